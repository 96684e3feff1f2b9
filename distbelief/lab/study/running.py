"""Runs a study into a folder, one trial after the other; what was killed goes on where it was."""

from __future__ import annotations

import contextlib
import shutil
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TypeVar, cast

import msgspec

from distbelief.core.outcomes import Cause, Outcome
from distbelief.core.records import Json
from distbelief.errors import DistbeliefError, Interrupted, UsageError
from distbelief.job import Job
from distbelief.lab.study.definition import Arm, Study
from distbelief.lab.study.statistics import median
from distbelief.lab.study.trials import SHRUNK, Trial, cosine, measure_points, of_result, tidy
from distbelief.record.folder import RunFolder, write_atomically
from distbelief.record.machine import busy, machine

STUDY, MACHINE, TRIAL, COSTS = "study.json", "machine.json", "trial.json", "costs.jsonl"
RUN = "run"
"""The folder of the one model that a trial trains."""
KEPT = 100_000
"""Checkpoints of a run that are kept until its end: all."""


@dataclass(frozen=True)
class Prepared:
    """A trial that can be run."""

    run: Callable[..., Json]
    """Runs the job; or, without one, compresses the model of a run folder into a file."""
    command: str
    """That does it by itself, but for the run that is compressed."""
    job: Job | None = None


Prepare = Callable[[Arm, Sequence[str]], Prepared]
"""Prepares an arm with the words of its options; raises `UsageError`, where there is no such option or value."""


@dataclass(frozen=True)
class Due:
    """A trial that is to be run."""

    arm: Arm
    seed: int
    value: float | None = None
    tuning: bool = False
    origin: str = ""
    """Where in the folder of the study is what it compresses."""

    @property
    def member_seeds(self) -> tuple[int, ...]:
        """The seeds of the models that it trains: of a farm's no two are alike, nor those of two trials.

        >>> Due(Arm("a", "digits", "single", "local", (), members=3), 2).member_seeds
        (6, 7, 8)
        """
        return tuple(self.seed * self.arm.members + number for number in range(self.arm.members))

    @property
    def runs(self) -> list[str]:
        """Where in the folder of the study are the runs of these models."""
        several = [f"{RUN}-{number}" for number in range(self.arm.members)]
        return [f"{self.folder}/{name}" for name in (several if len(several) > 1 else [RUN])]

    @property
    def folder(self) -> str:
        """Where in the folder of the study."""
        slug = "".join(letter if letter.isalnum() else "-" for letter in self.arm.name.lower())
        tuned = f"tuning-{self.value:g}-" if self.tuning else ""
        return f"trials/{slug}/{tuned}seed-{self.seed}"


def order(arms: Sequence[Arm], seeds: Sequence[int]) -> Iterator[tuple[Arm, int]]:
    """All arms once for each seed, every other time backwards: so that what changes with time, as how busy a machine
    is, meets all of them, and nobody always follows the same one. Simulated arms come after those, since how busy a
    machine is changes none of their figures, and those that compress what others train at the end.

    >>> a, b = (Arm(name, "digits", "single", "local", ()) for name in "ab")
    >>> [(arm.name, seed) for arm, seed in order([a, b], [0, 1])]
    [('a', 0), ('b', 0), ('b', 1), ('a', 1)]
    """
    timed, simulated, compressing = list[Arm](), list[Arm](), list[Arm]()
    for arm in arms:
        (compressing if arm.compresses else timed if arm.place == "local" else simulated).append(arm)
    for group in (timed, simulated, compressing):
        for number, seed in enumerate(seeds):
            yield from ((arm, seed) for arm in group[:: -1 if number % 2 else 1])


class Cost(msgspec.Struct, frozen=True):
    """What a trial, or a study, took, in seconds of this machine."""

    jobs: float = 0.0
    measuring: float = 0.0
    """Of the models that jobs had kept, afterwards."""
    beside: float = 0.0
    """All else."""


class StudyFolder:
    """The folder of a study.

    Args:
        path: of it.
    """

    def __init__(self, path: Path) -> None:
        self.path = path

    def open(self, study: Study) -> None:
        """Begin it, or go on with it.

        Raises:
            UsageError: it is of another study, or holds something else.
        """
        file = self.path / STUDY
        if file.is_file():
            if self.study() != study:
                raise UsageError(
                    f"--out {self.path} holds another study than this one, or an earlier state of it: targets, seeds "
                    "and arms are fixed before anything is run; name another folder"
                )
            return
        if self.path.exists() and any(self.path.iterdir()):
            raise UsageError(f"--out {self.path} is not empty, and no study: name another folder")
        self.path.mkdir(parents=True, exist_ok=True)
        write_atomically(self.path / MACHINE, msgspec.json.encode(machine()))
        write_atomically(file, msgspec.json.encode(study))

    def study(self) -> Study:
        """The study that it holds.

        Raises:
            UsageError: it holds none, or one of another version.
        """
        return read_kept(self.path / STUDY, Study)

    def trial(self, due: Due) -> Trial | None:
        """What is kept of a trial; None where it has not been run to its end."""
        file = self.path / due.folder / TRIAL
        return read_kept(file, Trial) if file.is_file() else None

    def cost(self) -> Cost:
        """What all trials took so far, those that were run again too; a line that a full disk has cut is left out."""
        file = self.path / COSTS
        found = list[Cost]()
        for line in file.read_bytes().splitlines() if file.is_file() else []:
            with contextlib.suppress(msgspec.MsgspecError):
                found.append(msgspec.json.decode(line, type=Cost))
        return Cost(*(sum(getattr(one, name) for one in found) for name in Cost.__struct_fields__))

    def keep(self, due: Due, trial: Trial, cost: Cost) -> None:
        """Keep a trial, and what it took.

        Raises:
            OSError: the disk is full; the trial is run again then.
        """
        folder = self.path / due.folder
        folder.mkdir(parents=True, exist_ok=True)
        write_atomically(folder / TRIAL, msgspec.json.encode(trial))
        with (self.path / COSTS).open("ab") as file:
            file.write(msgspec.json.encode(cost) + b"\n")


Kind = TypeVar("Kind")


def read_kept(file: Path, kind: type[Kind]) -> Kind:
    """What a file of a study holds.

    Raises:
        UsageError: it cannot be read, or is spoilt.
    """
    try:
        return msgspec.json.decode(file.read_bytes(), type=kind)
    except OSError as error:
        raise UsageError(f"{file} cannot be read: {error.strerror}; name the folder of a study") from error
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise UsageError(
            f"{file} is spoilt, or of another version: {error}; delete it to have that run again"
        ) from error


def run(
    study: Study,
    path: Path,
    prepare: Prepare,
    tell: Callable[[str], None] = lambda _: None,
    minutes: float = float("inf"),
) -> list[Trial]:
    """Run what is left of a study; returns all its trials.

    Args:
        study: what is compared.
        path: its folder.
        prepare: makes a job of an arm.
        tell: is told what is done.
        minutes: after which no more trial is begun; the same call goes on.

    Raises:
        UsageError: the folder is of another study; nothing has been run then.
        Interrupted: Ctrl-C; the same call goes on.
        OSError: the disk is full.
    """
    folder, began = StudyFolder(path), time.monotonic()
    folder.open(study)
    lock = RunFolder(path)
    lock.lock()
    try:
        found: list[Trial] = []
        for stage in STAGES:
            for due in stage(study, found):
                trial = folder.trial(due)
                if trial is None and time.monotonic() - began > 60 * minutes:
                    return found
                found.append(trial or _run(folder, due, prepare, tell))
        return found
    finally:
        lock.unlock()


def kept_trials(path: Path) -> list[Trial]:
    """All trials that the folder of a study holds.

    Raises:
        UsageError: one is spoilt.
    """
    folder, found = StudyFolder(path), list[Trial]()
    study = folder.study()
    for stage in STAGES:
        found += [trial for due in stage(study, found) if (trial := folder.trial(due))]
    return found


def starts(study: Study, _: Sequence[Trial] = ()) -> list[Due]:
    """What trains the models from which all others begin: one for each of their seeds."""
    if study.start is None:
        return []
    due = [Due(arm, seed) for arm in study.arms for seed in (*study.seeds, *(study.tuning_seeds if arm.grid else ()))]
    return [Due(study.start, seed) for seed in dict.fromkeys(seed for one in due for seed in one.member_seeds)]


def _candidates(study: Study, _: Sequence[Trial]) -> list[Due]:
    """The trials that choose the values of grids."""
    tuned = [arm for arm in study.arms if arm.grid]
    return [Due(arm, seed, value, True) for arm, seed in order(tuned, study.tuning_seeds) for value in arm.grid]


def _final(study: Study, found: Sequence[Trial]) -> list[Due]:
    """The trials that count, each arm with the best value of its grid."""
    best = {arm.name: choose(arm, study.targets, found) for arm in study.arms}
    due = [Due(arm, seed, best[arm.name]) for arm, seed in order(study.arms, study.seeds)]
    return [replace(one, origin=Due(study.arm(one.arm.compresses), one.seed).folder if one.arm.compresses else "")
            for one in due]  # fmt: skip


STAGES = (starts, _candidates, _final)
"""What is due, one after the other; the last follows from what the second has found."""


def choose(arm: Arm, targets: Sequence[float], found: Sequence[Trial]) -> float | None:
    """The value of an arm's grid with the least median time to the highest target; with the highest median accuracy at
    the end, where none reaches that.
    """

    def price(value: float) -> tuple[float, float]:
        trials = [one for one in found if one.tuning and one.arm == arm.name and one.value == value]
        times = [one.seconds_to(targets[-1]) for one in trials] if targets else [0.0]
        return median(times), median([-(one.accuracy or 0.0) for one in trials])

    return min(arm.grid, key=price, default=None)


def _run(folder: StudyFolder, due: Due, prepare: Prepare, tell: Callable[[str], None]) -> Trial:
    """Run one trial, and keep it; one that cannot be run is kept with the reason."""
    began, arm, study = time.monotonic(), due.arm, folder.study()
    tell(f"{arm.name}{f', {arm.tuned} {due.value:g}' if due.tuning else ''}, seed {due.seed}")
    start = None if arm.compresses or arm == study.start else study.start
    members = []
    for seed in due.member_seeds:
        begin = ("--init-from", str(folder.path / Due(start, seed).runs[0])) if start else ()
        members.append(prepare(arm, (*arm.with_value(due.value), *begin, "--seed", str(seed))))
    runs = [folder.path / run for run in due.runs]
    for run in runs:
        shutil.rmtree(run, ignore_errors=True)
    cost, result = Cost(), Json()
    try:
        if arm.compresses:
            runs[0].mkdir(parents=True)
            compressed = members[0].run(folder.path / due.origin / RUN, runs[0] / "model.dbz")
            result["shrunk"] = {name: compressed[name] for name in SHRUNK if name in compressed}
            cost = Cost(time.monotonic() - began)
        else:
            result, cost = _train(members, runs, arm.place == "local", study.cosine)
    except Interrupted:
        raise
    except DistbeliefError as error:
        result = {"outcome": str(Outcome.FAILED), "reason": " ".join(str(error).split())}
    trial = Trial(
        arm=arm.name, seed=due.seed, value=due.value, tuning=due.tuning, task=arm.task, strategy=arm.strategy,
        command="; ".join(member.command for member in members), place=arm.place, **result,
    )  # fmt: skip
    beside = max(0.0, time.monotonic() - began - cost.jobs - cost.measuring)
    folder.keep(due, trial, msgspec.structs.replace(cost, beside=beside))
    return trial


def _later(job: Job) -> Json:
    """Options that keep the parameters at the moments at which a job would measure them, instead.

    >>> _later(Job("digits", evaluate_every="500minibatches"))
    {'evaluate_every': 0, 'checkpoint_every': 0, 'snapshot_every': '500minibatches'}
    """
    if isinstance(job.evaluate_every, str):
        return {"evaluate_every": 0, "checkpoint_every": 0, "snapshot_every": job.evaluate_every}
    every = job.evaluate_every if job.evaluate_every != 1 else job.checkpoint_every
    return {"evaluate_every": 0, "checkpoint_every": every}


def _train(members: Sequence[Prepared], runs: Sequence[Path], measured: bool, cosines: bool) -> tuple[Json, Cost]:
    """Run jobs, one after the other, and measure their models, or their mean, as they were at each checkpoint."""
    from distbelief.tasks import resolve

    before, began = busy() if measured else 0.0, time.monotonic()
    results = [_play(prepared, run) for prepared, run in zip(members, runs, strict=True)]
    ran = time.monotonic() - began
    taken = (before + busy()) / 2 if measured else None
    began, job = time.monotonic(), cast(Job, members[0].job)
    task = resolve(job.reference, job.data_dir)
    points = measure_points(runs, task, job.seed)
    alike = cosine(runs[0], task, job.batch_size, job.seed) if cosines else None
    cost = Cost(ran, time.monotonic() - began)
    for run in runs:
        tidy(run)
    return {**of_result(*results), "points": points, "busy": taken, "cosine": alike}, cost


def _play(prepared: Prepared, run: Path) -> Json:
    """Run one job; returns its result."""
    run.parent.mkdir(parents=True, exist_ok=True)
    job = cast(Job, prepared.job)
    result = prepared.run(replace(job, out=str(run), keep_checkpoints=KEPT, **_later(job)))
    if result["outcome"] == Outcome.INTERRUPTED:
        with contextlib.suppress(OSError):
            shutil.rmtree(run)
        raise Interrupted("the study was interrupted, and keeps all trials that had ended: the same command goes on")
    if result["cause"] == Cause.CHECKPOINT_FAILED:
        raise OSError(f"{result['reason']}; the same command goes on with the study")
    return result
