"""Trials: candidates that were run here, beside what was predicted of them; the calibration file keeps them, and later
plans are corrected by it.
"""

from __future__ import annotations

import contextlib
import datetime
import math
import statistics
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple, Self

import msgspec
import torch

from distbelief.core.optimizer import Optimizer
from distbelief.core.outcomes import Outcome
from distbelief.errors import Interrupted, UsageError
from distbelief.job import Job
from distbelief.lab.plan.candidates import PlanCandidate
from distbelief.lab.plan.pricing import PARTS, Terms, terms_of
from distbelief.places import signals
from distbelief.places.processes.local import Local
from distbelief.record import limits
from distbelief.record.folder import write_atomically
from distbelief.server.optimizers import build
from distbelief.tasks import Task
from distbelief.tasks.data.cache import NO_HOME, cache_folder

TRIAL_SECONDS, LONGEST_EPOCH = 4.0, 120.0
"""What is trained for at least, by the prediction, in whole epochs; the longest epoch that is run."""
MOST_TRIALS = 400
"""Kept in a calibration file: the newest."""
MOST_BYTES = 1 << 22
"""The longest calibration file that is read."""


class Alike(NamedTuple):
    """What runs have in common that tell of each other."""

    task: str
    batch_size: int
    optimizer: str
    """As `stepped` tells of it."""
    strategy: str
    split: bool
    """Whether replicas are split over processes."""


class PlanTrial(msgspec.Struct, frozen=True, kw_only=True):
    """One candidate, predicted and measured."""

    machine: str
    task: str
    batch_size: int
    optimizer: str
    what: str
    strategy: str
    date: str
    predicted: Terms
    """By the virtual cluster alone, not corrected by earlier trials."""
    measured: Terms

    @property
    def alike(self) -> Alike:
        """What it tells of."""
        return Alike(self.task, self.batch_size, self.optimizer, self.strategy, "partition" in self.what)

    @property
    def ratio(self) -> float:
        """Samples a second, measured of predicted."""
        return self.measured.samples_per_second / self.predicted.samples_per_second


def stepped(optimizer: Optimizer) -> str:
    """An optimizer's name, and which of its options are on or off other than usual: what an update costs depends on
    that, and not on their numbers.

    >>> from distbelief.core.optimizer import optim
    >>> stepped(optim("sgd", lr=3.0, momentum=0.8)), stepped(optim("adamw", weight_decay=0.0))
    ('sgd, momentum on', 'adamw, weight_decay off')
    >>> stepped(optim("adam", eps=1e-6)) == stepped(optim("adam")) == "adam"
    True
    """
    usual, asked = (
        build(one, [{"params": [torch.zeros(1)]}]).param_groups[0] for one in (Optimizer(optimizer.name), optimizer)
    )
    told = [
        f"{name} {'on' if value else 'off'}" for name, value in asked.items()
        if name not in ("params", "lr", "foreach", "fused") and bool(value) != bool(usual[name])
    ]  # fmt: skip
    return ", ".join([optimizer.name, *told, *["decay_exempt on"] * optimizer.decay_exempt])


def this_kind() -> str:
    """What trials must have in common with a plan: the processor, its cores, and torch."""
    lines = Path("/proc/cpuinfo").read_text().splitlines() if Path("/proc/cpuinfo").exists() else []
    model = next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), "a processor")
    return f"{model}, {limits.cores()} cores, torch {torch.__version__}"


def usual_file() -> Path | None:
    """Where trials are kept: in the cache folder; None where there is none."""
    cache = cache_folder()
    return cache and cache / "calibration.json"


def read(path: Path | None, named: bool = False) -> list[PlanTrial]:
    """The trials of a calibration file, the oldest first; none where there is no file.

    Args:
        path: of the file.
        named: whether it was named for this machine, so that one without any trial of it is of no use.

    Raises:
        UsageError: it is no calibration file, or another machine's.
    """
    try:
        found = _decode(path) if path else []
    except FileNotFoundError:
        return []
    except (OSError, ValueError) as error:  # a DecodeError of msgspec is one
        raise UsageError(
            f"--calibration {path}: is no calibration file ({error}); delete it, or name another"
        ) from None
    if named and found and all(one.machine != this_kind() for one in found):
        raise UsageError(
            f"--calibration {path}: its trials are of {found[-1].machine}, and this is {this_kind()}; name a file of "
            "this machine's, or one that is not there yet"
        )
    return found


def _decode(path: Path) -> list[PlanTrial]:
    """The trials of a file.

    Raises:
        OSError, ValueError: it cannot be read, or holds something else.
    """
    size = path.stat().st_size
    if not path.is_file():
        raise ValueError("it is no file")
    if size > MOST_BYTES:
        raise ValueError(f"it has {size:,} bytes, more than {MOST_BYTES:,}")
    found = msgspec.json.decode(path.read_bytes(), type=list[PlanTrial])
    for one in found:
        for rate in (one.predicted.samples_per_second, one.measured.samples_per_second):
            if not 0 < rate < math.inf:
                raise ValueError(f"a trial of {one.what} with {rate:g} samples/s")
    return found


def check_writable(path: Path | None) -> None:
    """Refuse a calibration file that cannot be written; nothing of the attempt is left.

    Raises:
        UsageError: it cannot be, or is no calibration file.
    """
    if path is None:
        raise UsageError(f"{NO_HOME}, or a file with --calibration")
    missing = [one for one in (path, *path.parents) if not one.exists()]
    add(path, [])
    for one in missing:
        one.unlink() if one == path else one.rmdir()


def add(path: Path, trials: Sequence[PlanTrial]) -> None:
    """Keep trials in a calibration file.

    Raises:
        UsageError: it cannot be written, or is no calibration file.
    """
    kept = [*read(path), *trials][-MOST_TRIALS:]
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(path, msgspec.json.format(msgspec.json.encode(kept), indent=1) + b"\n")
    except OSError as error:
        raise UsageError(f"--calibration {path}: cannot be written ({error.strerror}); name another") from None


def correction(trials: Sequence[PlanTrial], alike: Alike) -> tuple[float, int]:
    """What a rate is to be multiplied with, and by how many trials that is known: those alike. What another task's, an
    other optimizer's or a split model's showed says little, since what is added to a step is then another part of it.
    The price counts as one of them: a machine is never twice the same, and one trial may be further off than the price.

    >>> from distbelief.lab.plan.pricing import Terms
    >>> def trial(task, rate):
    ...     one = Terms(1.0, 0.0, 0.0, 0.0, 100.0, 0.0)
    ...     return PlanTrial(machine="", task=task, batch_size=64, optimizer="sgd", what="downpour",
    ...         strategy="downpour", date="", predicted=one,
    ...         measured=msgspec.structs.replace(one, samples_per_second=rate))
    >>> trials = [trial("mnist", 75.0), trial("mnist", 80.0), trial("digits", 50.0)]
    >>> alike = Alike("mnist", 64, "sgd", "downpour", split=False)
    >>> correction(trials, alike), correction(trials[:1], alike)
    ((0.8, 2), (0.875, 1))
    >>> correction(trials, alike._replace(optimizer="adam")), correction(trials, alike._replace(split=True))
    ((1.0, 0), (1.0, 0))
    """
    found = [one for one in trials if one.alike == alike]
    return statistics.median([1.0, *(one.ratio for one in found)]), len(found)


def corrected(terms: Terms, factor: float) -> Terms:
    """The same at so many times the rate: each part of a step alike, since nobody knows which was wrong."""
    parts = {name: getattr(terms, name) / factor for name in PARTS}
    return msgspec.structs.replace(terms, **parts, samples_per_second=terms.samples_per_second * factor)


def run(
    task: Task | str,
    candidate: PlanCandidate,
    batch_size: int,
    epoch: float,
    data_dir: str | None = None,
    seconds: float = TRIAL_SECONDS,
    whole: bool = True,
) -> Terms:
    """Train with a candidate for a while, and see.

    Args:
        task: what is trained.
        candidate: how.
        batch_size: samples in a minibatch of a replica.
        epoch: seconds that one is expected to take.
        data_dir: folder with the data.
        seconds: that are trained for at least, in whole epochs.
        whole: whether epochs are whole; else it ends after these seconds.

    Raises:
        UsageError: an epoch would take too long, or it cannot run here.
        Interrupted: somebody has ended it.
        DistbeliefError: it failed.
    """
    if whole and epoch > LONGEST_EPOCH:
        raise UsageError(f"an epoch would take {epoch:.0f} s, more than {LONGEST_EPOCH:.0f}")
    epochs = max(1, math.ceil(seconds / epoch))
    with (
        _Interrupts() as interrupts,
        tempfile.TemporaryDirectory(prefix="distbelief-plan-") as folder,
        interrupts.raising(),
    ):
        job = Job(
            task, candidate.strategy, epochs=epochs, batch_size=batch_size, evaluate_every=0, checkpoint_every=0,
            snapshot_every="0", data_dir=data_dir, out=f"{folder}/run", budget="0" if whole else f"{seconds}s",
        )  # fmt: skip
        try:
            result = Local().run(job)
        except Interrupted:  # before the job began, which nobody who plans has asked for
            result = {"outcome": Outcome.INTERRUPTED}
    if result["outcome"] == Outcome.INTERRUPTED:
        raise Interrupted(f"{candidate}: its trial was interrupted; the plan ends, and keeps nothing of its trials")
    return terms_of(result)


class _Interrupts:
    """Signals, where no job waits for them: one raises at once within `raising`, else when this is left, since what
    ends a process while a folder is made or removed leaves it there.
    """

    def __init__(self) -> None:
        self._raises = self._came = False
        self._handled = signals.handled(self._note)

    def __enter__(self) -> Self:
        self._handled.__enter__()
        return self

    def __exit__(self, *_: object) -> None:
        self._handled.__exit__(None, None, None)
        if self._came:
            raise KeyboardInterrupt

    @contextlib.contextmanager
    def raising(self) -> Iterator[None]:
        try:
            self._raises = True
            if self._came:
                raise KeyboardInterrupt
            yield
        finally:
            self._raises = False

    def _note(self, *_: object) -> None:
        self._came = True
        if self._raises:
            raise KeyboardInterrupt


def trial(
    candidate: PlanCandidate, task: str, batch_size: int, optimizer: Optimizer, predicted: Terms, measured: Terms
) -> PlanTrial:
    """What is kept of a run."""
    return PlanTrial(
        machine=this_kind(), task=task, batch_size=batch_size, optimizer=stepped(optimizer), what=str(candidate),
        strategy=candidate.strategy.name, predicted=predicted, measured=measured,
        date=datetime.datetime.now().astimezone().isoformat(timespec="seconds"),
    )  # fmt: skip
