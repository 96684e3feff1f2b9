"""The errors of distbelief: one small tree. Each message gives the value, the reason and the remedy.

DistbeliefError
├── UsageError             an option, name or value that cannot be used
│   └── Refusals               several of them
├── DataError              a data file that is missing, corrupt or of another kind
├── LayoutError            a model whose parameters differ from the server's
├── CheckpointError        a checkpoint that is missing, truncated or from another job
├── ProtocolError
│   ├── LocalProtocolError     this process broke a rule of the protocol: a bug
│   └── RemoteProtocolError    the peer broke a rule: its link is closed, and the job goes on
├── TrainingError          the user's model raised an error
│   └── LossNotFinite          its loss, or the norm of its gradient, is not finite
└── JobFailed              a job ended early
    └── Interrupted            it was stopped before or during the training
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
    """Several options, names or values that cannot be used, each on a line."""

    @classmethod
    def of(cls, refusals: Sequence[UsageError]) -> UsageError:
        """Return the only refusal, or one error with the text of all, which other processes can pass on."""
        if len(refusals) == 1:
            return refusals[0]
        return cls("\n".join(" ".join(str(refusal).split()) for refusal in refusals))


class DataError(DistbeliefError):
    """A data file that is missing, corrupt or of another kind."""


class LayoutError(DistbeliefError):
    """A model whose parameters differ from the server's, by name, shape or dtype."""


class CheckpointError(DistbeliefError):
    """A checkpoint that is missing, truncated, or from another job."""


class ProtocolError(DistbeliefError):
    """A rule of the protocol was broken."""


class LocalProtocolError(ProtocolError):
    """A rule of the protocol was broken by this process."""


class RemoteProtocolError(ProtocolError):
    """The peer broke a rule of the protocol; its link is closed and the job goes on."""


class TrainingError(DistbeliefError):
    """The user's model raised an error."""


class LossNotFinite(TrainingError):
    """The loss of the user's model, or the norm of its gradient, is not finite."""


class JobFailed(DistbeliefError):
    """A job ended early."""

    run = ""
    """The run folder, for `--resume`, if it has a checkpoint."""


class Interrupted(JobFailed):
    """A job was stopped before or during its training."""


LIMITS = {
    errno.EFBIG: "this machine limits the length of files, and of shared memory with them: raise the limit (ulimit -f)",
    errno.EMFILE: "this machine limits the open files of a process: raise the limit (ulimit -n)",
    errno.ENFILE: "this machine has too many open files: end other processes, or raise the limit (sysctl fs.file-max)",
}


def limit(error: BaseException) -> str:
    """Return the remedy for an error from a limit of this machine; "" for any other error.

    >>> limit(OSError(errno.EMFILE, "Too many open files"))
    'this machine limits the open files of a process: raise the limit (ulimit -n)'
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
"""Names here for other terms of the field; of several, the first that is known counts."""


def synonym(word: str, known: Collection[str]) -> str:
    """Return the name here for another term of the field; "" for none.

    >>> synonym("towers", ["branches", "stages"]), synonym("--n_push", ["--accumulate", "--lr"])
    ('branches', '--accumulate')
    """
    names = SYNONYMS.get(word.lower().replace("_", "-").replace(" ", "-"), ())
    return next((name for name in names if name.split()[0] in known), "")


def nearest(word: str, known: Collection[str]) -> str:
    """Return the known name that a word stands for, or is most like; "" for none."""
    return synonym(word, known) or "".join(difflib.get_close_matches(word, known, n=1, cutoff=0.5))


def unknown(kind: str, got: str, choices: Iterable[str]) -> UsageError:
    """Return a `UsageError` for a wrong word, with the nearest right one and all others.

    >>> print(unknown("optimizer", "adagrd", ["sgd", "adagrad"]))
    unknown optimizer 'adagrd'; did you mean 'adagrad'? Known: adagrad, sgd
    """
    known = sorted(choices)
    near = nearest(got, known)
    hint = f"did you mean {near!r}? " if near else ""
    return UsageError(f"unknown {kind} {got!r}; {hint}Known: {', '.join(known)}")
