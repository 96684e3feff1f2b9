"""The errors of distbelief: one small tree, every message with the value it got and the remedy.

DistbeliefError
├── UsageError             an option, name or value that cannot be used
│   └── Refusals               several of them
├── DataError              a data file that is missing, corrupt or of another kind
├── LayoutError            a model whose parameters differ from the server's
├── CheckpointError        a checkpoint that is missing, truncated or of another job
├── ProtocolError
│   ├── LocalProtocolError     this process broke a rule of the protocol: a bug of ours
│   └── RemoteProtocolError    the peer broke one: its link is closed, the job goes on
├── TrainingError          the user's model raised
│   └── LossNotFinite          its loss, or the norm of its gradient, is no finite number
└── JobFailed              a job ended before its time: who ended it, and why
    └── Interrupted            whoever ran it ended it, before it began or in the midst of it
"""

from __future__ import annotations

import difflib
import errno
from collections.abc import Collection, Iterable, Mapping, Sequence


class DistbeliefError(Exception):
    """The root of the tree."""


class UsageError(DistbeliefError):
    """An option, a name or a value that cannot be used."""


class Refusals(UsageError):
    """Several options, names or values that cannot be used, each in a line."""

    @classmethod
    def of(cls, refusals: Sequence[UsageError]) -> UsageError:
        """Return the only one, or one error with the text of all, which goes from process to process as it is."""
        if len(refusals) == 1:
            return refusals[0]
        return cls("\n".join(" ".join(str(refusal).split()) for refusal in refusals))


class DataError(DistbeliefError):
    """A data file that is missing, corrupt or of another kind."""


class LayoutError(DistbeliefError):
    """A model whose parameters differ from the server's, by name, shape or dtype."""


class CheckpointError(DistbeliefError):
    """A checkpoint that is missing, truncated, or of another job."""


class ProtocolError(DistbeliefError):
    """A rule of the protocol was broken."""


class LocalProtocolError(ProtocolError):
    """A rule of the protocol was broken by this process."""


class RemoteProtocolError(ProtocolError):
    """The peer broke a rule of the protocol; its link is closed and the job goes on."""


class TrainingError(DistbeliefError):
    """The user's model raised."""


class LossNotFinite(TrainingError):
    """The loss, or the norm of the gradient, of the user's model is no finite number."""


class JobFailed(DistbeliefError):
    """A job ended before its time."""

    run = ""
    """The run folder to go on in, with `--resume`, where it has a checkpoint."""


class Interrupted(JobFailed):
    """Whoever ran a job ended it, before it had begun or in the midst of it."""


LIMITS = {
    errno.EFBIG: "this machine limits how long a file may be, and shared memory with it: raise that (ulimit -f)",
    errno.EMFILE: "this machine limits how many files a process may have open: raise that (ulimit -n)",
    errno.ENFILE: "this machine has as many files open as it may: end something else, or raise that (sysctl "
    "fs.file-max)",
}


def limit(error: BaseException) -> str:
    """Say what to do where a limit of this machine has made an error; "" for any other error.

    >>> limit(OSError(errno.EMFILE, "Too many open files"))
    'this machine limits how many files a process may have open: raise that (ulimit -n)'
    """
    return LIMITS.get(error.errno or 0, "") if isinstance(error, OSError) else ""


SYNONYMS: Mapping[str, tuple[str, ...]] = {
    # ways to split
    "layers": ("stages",), "pipeline": ("stages",), "tensor": ("neurons",), "channels": ("filters",),
    "spatial": ("regions",), "patches": ("regions",), "streams": ("branches",), "towers": ("branches",),
    "paths": ("branches",), "batch": ("samples",), "sequence": ("time",),
    # strategies, and a method
    "async": ("downpour",), "asgd": ("downpour",), "parameter-server": ("downpour",), "ssp": ("bounded",),
    "bsp": ("synchronous",), "sync": ("synchronous",), "l-bfgs": ("lbfgs", "sandblaster"), "lbfgs": ("sandblaster",),
    "full-gradient": ("gradient", "sandblaster"), "data-parallel": ("allreduce",), "ddp": ("allreduce",),
    "serial": ("single",),
    # options
    "--n-push": ("--push-every", "--accumulate"), "--n-fetch": ("--fetch-every",),
    "--push-every": ("--accumulate",), "--accumulate": ("--push-every",),
    "--gamma": ("--lr",), "--eta": ("--lr",), "--learning-rate": ("--lr",), "--alpha": ("--local-lr",),
    "--full-gradient": ("--method gradient", "--batch-size of all samples"),
    "--minibatch": ("--batch-size",), "--momentum": ("--optimizer momentum",), "--adagrad": ("--optimizer adagrad",),
    "--workers": ("--replicas",), "--learners": ("--replicas",), "--servers": ("--shards",), "--ps": ("--shards",),
    "--slack": ("--staleness",), "--layers": ("--split stages",), "--streams": ("--split branches",),
    "--towers": ("--split branches",), "--sorted": ("--data sorted",), "--private": ("--data private",),
}  # fmt: skip
"""Names here for the field's other words, with what belongs to them; of several, the first that is known counts."""


def synonym(word: str, known: Collection[str]) -> str:
    """The name here for what the field calls otherwise; "" for none.

    >>> synonym("towers", ["branches", "stages"]), synonym("--n_push", ["--accumulate", "--lr"])
    ('branches', '--accumulate')
    """
    names = SYNONYMS.get(word.lower().replace("_", "-").replace(" ", "-"), ())
    return next((name for name in names if name.split()[0] in known), "")


def nearest(word: str, known: Collection[str]) -> str:
    """The known name that a word stands for, or is most like; "" for none."""
    return synonym(word, known) or "".join(difflib.get_close_matches(word, known, n=1, cutoff=0.5))


def unknown(kind: str, got: str, choices: Iterable[str]) -> UsageError:
    """A `UsageError` for a wrong word, naming the nearest right one and all others.

    >>> print(unknown("optimizer", "adagrd", ["sgd", "adagrad"]))
    unknown optimizer 'adagrd'; did you mean 'adagrad'? Known: adagrad, sgd
    """
    known = sorted(choices)
    near = nearest(got, known)
    hint = f"did you mean {near!r}? " if near else ""
    return UsageError(f"unknown {kind} {got!r}; {hint}Known: {', '.join(known)}")
