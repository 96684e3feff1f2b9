"""Execution of a study in a folder, one trial after the other; a killed study continues where it was."""

from __future__ import annotations

import contextlib
import shutil
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TypeVar, cast

import msgspec

from distbelief.core.records import Cause, Json, Outcome
from distbelief.errors import DistbeliefError, Interrupted, UsageError
from distbelief.job import Job
from distbelief.lab.study.definition import Arm, Study, Target
from distbelief.lab.study.trials import (
    MISSED,
    SHRUNK,
    Trial,
    cosine,
    measure_points,
    median,
    of_result,
    tidy,
    unevenness,
)
from distbelief.record.folder import RunFolder, write_atomically
from distbelief.record.limits import busy, machine

STUDY, MACHINE, TRIAL, COSTS = "study.json", "machine.json", "trial.json", "costs.jsonl"
RUN = "run"
KEPT = 100_000


@dataclass(frozen=True)
class Prepared:
    """Trial that is ready to run."""

    run: Callable[..., Json]
    """Function that runs the job; without a job, it compresses the model of a run folder into a file."""
    command: str
    """Equivalent command, without the run to compress."""
    job: Job | None = None


Prepare = Callable[[Arm, Sequence[str]], Prepared]
"""Function that prepares an arm with its options; raises `UsageError` for an unknown option or value."""


@dataclass(frozen=True)
class Due:
    """Trial that is due."""

    arm: Arm
    seed: int
    value: float | None = None
    tuning: bool = False

    @property
    def member_seeds(self) -> tuple[int, ...]:
        """Return the seeds of its models, which differ within a farm and between trials.

        >>> Due(Arm("a", "digits", "single", "local", (), members=3), 2).member_seeds
        (6, 7, 8)
        """
        return tuple(self.seed * self.arm.members + number for number in range(self.arm.members))

    @property
    def folder(self) -> str:
        """Return the trial's folder within the study's."""
        slug = "".join(letter if letter.isalnum() else "-" for letter in self.arm.name.lower())
        tuned = f"tuning-{self.value:g}-" if self.tuning else ""
        return f"trials/{slug}/{tuned}seed-{self.seed}"

    @property
    def runs(self) -> list[str]:
        """Return the run folders of its models within the study's folder."""
        members = self.arm.members
        names = [RUN] if members == 1 else [f"{RUN}-{number}" for number in range(members)]
        return [f"{self.folder}/{name}" for name in names]


def order(arms: Sequence[Arm], seeds: Sequence[int]) -> Iterator[tuple[Arm, int]]:
    """Yield all arms for each seed, in reverse order for every other seed.

    >>> a, b = (Arm(name, "digits", "single", "local", ()) for name in "ab")
    >>> [(arm.name, seed) for arm, seed in order([a, b], [0, 1])]
    [('a', 0), ('b', 0), ('b', 1), ('a', 1)]
    """
    # a machine's changing load then affects all timed arms alike; compressing arms need the models of others
    kinds = [(arm.place != "local", arm.compresses != "") for arm in arms]
    for kind in ((False, False), (True, False), (False, True)):
        group = [arm for arm, other in zip(arms, kinds, strict=True) if other == kind]
        for number, seed in enumerate(seeds):
            yield from ((arm, seed) for arm in group[:: -1 if number % 2 else 1])


class Cost(msgspec.Struct, frozen=True):
    """Seconds of this machine for a trial or a study."""

    jobs: float = 0.0
    measuring: float = 0.0
    beside: float = 0.0


Kind = TypeVar("Kind")


def read_kept(file: Path, kind: type[Kind]) -> Kind:
    """Read a file of a study."""
    try:
        return msgspec.json.decode(file.read_bytes(), type=kind)
    except OSError as error:
        raise UsageError(f"{file} cannot be read: {error.strerror}; name the folder of a study") from error
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise UsageError(f"{file} is corrupt, or of another version: {error}; delete it to repeat its run") from error


def open_study(path: Path, study: Study) -> None:
    """Create the folder of a study, or continue in it."""
    if (path / STUDY).is_file():
        if read_kept(path / STUDY, Study) != study:
            raise UsageError(
                f"--out {path} holds another study, or an earlier version of this one: targets, seeds and arms "
                "are fixed before anything is run; name another folder"
            )
        return
    if path.exists() and any(path.iterdir()):
        raise UsageError(f"--out {path} is not empty, and holds no study: name another folder")
    path.mkdir(parents=True, exist_ok=True)
    write_atomically(path / MACHINE, msgspec.json.encode(machine()))
    write_atomically(path / STUDY, msgspec.json.encode(study))


def cost_of(path: Path) -> Cost:
    """Sum up the time of all trials of a study, repeated ones too."""
    file, costs = path / COSTS, list[Cost]()
    for line in file.read_bytes().splitlines() if file.is_file() else []:
        with contextlib.suppress(msgspec.MsgspecError):  # a full disk cut this line short
            costs.append(msgspec.json.decode(line, type=Cost))
    return Cost(*(sum(getattr(cost, name) for cost in costs) for name in Cost.__struct_fields__))


def run(
    study: Study,
    path: Path,
    prepare: Prepare,
    tell: Callable[[str], None] = lambda _: None,
    minutes: float = float("inf"),
) -> list[Trial]:
    """Run the rest of a study, and return all its trials; after Ctrl-C the same call continues."""
    until = time.monotonic() + 60 * minutes
    open_study(path, study)
    lock = RunFolder(path)
    lock.lock()
    try:
        trials: list[Trial] = []
        for due, kept in _trials(study, path, trials):
            if kept is None and time.monotonic() > until:
                break
            trials.append(kept or _run(path, study, due, prepare, tell))
        return trials
    finally:
        lock.unlock()


def kept_trials(path: Path) -> list[Trial]:
    """Return all trials in the folder of a study."""
    trials: list[Trial] = []
    for _, kept in _trials(read_kept(path / STUDY, Study), path, trials):
        trials += [kept] if kept else []
    return trials


def _trials(study: Study, path: Path, before: Sequence[Trial]) -> Iterator[tuple[Due, Trial | None]]:
    """Yield each due trial, and its record if it has one; the last stage depends on the results of the second."""
    for stage in (starts, _candidates, _final):
        for due in stage(study, before):
            file = path / due.folder / TRIAL
            yield due, read_kept(file, Trial) if file.is_file() else None


def starts(study: Study, _: Sequence[Trial] = ()) -> list[Due]:
    """Return the trials of initial models: one for each seed of all others."""
    due = [Due(arm, seed) for arm in study.arms for seed in (*study.seeds, *(study.tuning_seeds if arm.grid else ()))]
    pairs = ((study.start(trial.arm), seed) for trial in due for seed in trial.member_seeds)
    return [Due(start, seed) for start, seed in dict.fromkeys(pairs) if start]


def _candidates(study: Study, _: Sequence[Trial]) -> list[Due]:
    tuned = [arm for arm in study.arms if arm.grid]
    return [Due(arm, seed, value, True) for arm, seed in order(tuned, study.tuning_seeds) for value in arm.grid]


def _final(study: Study, before: Sequence[Trial]) -> list[Due]:
    best = {arm.name: choose(arm, study.targets, before) for arm in study.arms}
    return [Due(arm, seed, best[arm.name]) for arm, seed in order(study.arms, study.seeds)]


def choose(arm: Arm, targets: Sequence[Target], before: Sequence[Trial]) -> float | None:
    """Return a grid's value with the least median time to the highest target, or else the highest median accuracy.

    On a problem, the least median time to the loss decides, or else the least median loss.
    """

    def price(value: float) -> tuple[float, float]:
        trials = [trial for trial in before if trial.tuning and trial.arm == arm.name and trial.value == value]
        last = [trial.points[-1].loss if trial.points else MISSED for trial in trials]
        if arm.problem:
            return median([trial.until(f"loss={arm.loss}") for trial in trials]), median(last)
        times = [trial.until(targets[-1]) for trial in trials] if targets else [0.0]
        return median(times), median([-(trial.accuracy or 0.0) for trial in trials])

    return min(arm.grid, key=price, default=None)


def _run(path: Path, study: Study, due: Due, prepare: Prepare, tell: Callable[[str], None]) -> Trial:
    began, arm = time.monotonic(), due.arm
    tell(f"{arm.name}{f', {arm.tuned} {due.value:g}' if due.tuning else ''}, seed {due.seed}")
    start = study.start(arm)
    members = []
    for seed in due.member_seeds:
        begin = ("--init-from", str(path / Due(start, seed).runs[0])) if start else ()
        members.append(prepare(arm, (*arm.with_value(due.value), *begin, "--seed", str(seed))))
    runs = [path / run for run in due.runs]
    for run in runs:
        shutil.rmtree(run, ignore_errors=True)
    cost, result = Cost(), Json()
    try:
        if arm.compresses:
            runs[0].mkdir(parents=True)
            compressed = members[0].run(path / Due(study.arm(arm.compresses), due.seed).runs[0], runs[0] / "model.dbz")
            result["shrunk"] = {name: compressed[name] for name in SHRUNK if name in compressed}
            cost = Cost(time.monotonic() - began)
        else:
            result, cost = _train(study, members, runs, arm)
    except Interrupted:
        raise
    except DistbeliefError as error:
        result = {"outcome": str(Outcome.FAILED), "reason": " ".join(str(error).split())}
    trial = Trial(
        arm=arm.name,
        seed=due.seed,
        value=due.value,
        tuning=due.tuning,
        task=arm.task,
        strategy=arm.strategy,
        command="; ".join(member.command for member in members),
        place=arm.place,
        **result,
    )
    (path / due.folder).mkdir(parents=True, exist_ok=True)
    write_atomically(path / due.folder / TRIAL, msgspec.json.encode(trial))
    beside = max(0.0, time.monotonic() - began - cost.jobs - cost.measuring)
    with (path / COSTS).open("ab") as file:
        file.write(msgspec.json.encode(msgspec.structs.replace(cost, beside=beside)) + b"\n")
    return trial


def _later(job: Job) -> Json:
    """Return options that save the parameters at the moments when a job would have evaluated them.

    >>> _later(Job("digits", evaluate_every="500minibatches"))
    {'evaluate_every': 0, 'checkpoint_every': 0, 'snapshot_every': '500minibatches'}
    """
    if isinstance(job.evaluate_every, str):
        return {"evaluate_every": 0, "checkpoint_every": 0, "snapshot_every": job.evaluate_every}
    every = job.evaluate_every if job.evaluate_every != 1 else job.checkpoint_every
    return {"evaluate_every": 0, "checkpoint_every": every}


def _train(study: Study, members: Sequence[Prepared], runs: Sequence[Path], arm: Arm) -> tuple[Json, Cost]:
    """Run jobs one after the other, and measure their models (or their mean) at each checkpoint."""
    from distbelief.tasks import resolve

    before, began = busy() if arm.place == "local" else 0.0, time.monotonic()
    results = [_play(prepared, run) for prepared, run in zip(members, runs, strict=True)]
    ran = time.monotonic() - began
    share = (before + busy()) / 2 if arm.place == "local" else None
    began, job = time.monotonic(), cast(Job, members[0].job)
    task = resolve(job.reference, job.data_dir)
    points = measure_points(runs, task, job.seed, [*study.targets, *[f"loss={arm.loss}"] * bool(arm.problem)])
    alike = cosine(runs[0], task, job.batch_size, job.seed) if study.cosine else None
    uneven = unevenness(runs[0], task, job.batch_size, job.seed) if arm in study.starts else None
    cost = Cost(ran, time.monotonic() - began)
    for run in runs:
        tidy(run)
    return {**of_result(*results), "points": points, "busy": share, "cosine": alike, "uneven": uneven}, cost


def _play(prepared: Prepared, run: Path) -> Json:
    run.parent.mkdir(parents=True, exist_ok=True)
    job = cast(Job, prepared.job)
    result = prepared.run(replace(job, out=str(run), keep_checkpoints=KEPT, **_later(job)))
    if result["outcome"] == Outcome.INTERRUPTED:
        with contextlib.suppress(OSError):
            shutil.rmtree(run)
        raise Interrupted("the study was interrupted; finished trials are kept, and the same command continues")
    if result["cause"] == Cause.CHECKPOINT_FAILED:
        raise OSError(f"{result['reason']}; the same command continues the study")
    return result
