"""Run folders as a list, with their states and accuracies, and as the trials of a study."""

from __future__ import annotations

import contextlib
import math
import os
from collections.abc import Mapping, Sequence
from pathlib import Path

import msgspec

from distbelief.core.records import Json, Outcome
from distbelief.errors import DistbeliefError, UsageError, unknown
from distbelief.lab.study.definition import Arm, Study, Target, hardness
from distbelief.lab.study.figures import efficiency
from distbelief.lab.study.running import RUN, TRIAL, read_kept
from distbelief.lab.study.trials import Point, Trial, of_result
from distbelief.record.folder import RunFolder

DEPTH = 5
"""Levels below the listed folder to search for runs, as in studies/NAME/trials/ARM/SEED/run."""
COLUMNS = ("run", "task", "strategy", "state", "accuracy", "seconds", "seed")
RUNNING, CUT_SHORT, SPOILT = "running", "cut short", "spoilt"
STATES = (*map(str, Outcome), RUNNING, CUT_SHORT, SPOILT)
"""States of a run: its outcome, or that it runs, has no result, or is unreadable."""
BESIDE = 100
"""Number of newest neighbouring runs to search for one with one replica."""


class Run(msgspec.Struct, frozen=True):
    """Run folder in one line."""

    run: str
    task: str
    strategy: str
    state: str
    accuracy: float | None
    seconds: float
    seed: int


def list_runs(folder: Path) -> list[Run]:
    """Return the runs in a folder and its subfolders."""
    if not folder.is_dir():
        raise UsageError(f"{folder} is no folder: name one that holds runs, such as runs/")
    files = {path for depth in range(DEPTH + 1) for path in folder.glob(f"{'*/' * depth}job.json")}
    return [_line(path) for path in sorted(path.parent for path in files)]


def _line(path: Path) -> Run:
    name = os.fsencode(path).decode(errors="backslashreplace")
    try:
        run = RunFolder.open(path)
        job, result = run.read_job(), _result(run)
        accuracy: float | None = result.get("test_accuracy")
        # the models of a study are measured after their jobs
        if accuracy is None and path.name == RUN and (trial := path.parent / TRIAL).is_file():
            accuracy = read_kept(trial, Trial).accuracy
    except (DistbeliefError, OSError):
        return Run(name, "", "", SPOILT, None, 0.0, 0)
    state = str(result["outcome"]) if result else RUNNING if run.locked else CUT_SHORT
    seconds, seed = float(result.get("seconds") or 0.0), int(job.get("seed") or 0)
    return Run(name, str(job.get("task")), str(job.get("strategy")), state, accuracy, seconds, seed)


def _result(run: RunFolder) -> Json:
    """Return `result.json`; nothing if there is none yet."""
    if not run.result.is_file():
        return {}
    try:
        result = msgspec.json.decode(run.result.read_bytes(), type=Json)
        of_result(result)
    except (msgspec.MsgspecError, UnicodeDecodeError, KeyError, TypeError, AttributeError) as error:
        raise UsageError(
            f"{run.result} is spoilt, or of another version of distbelief ({type(error).__name__}: {error}); leave "
            "this run out"
        ) from error
    return result


def efficiency_of(path: Path) -> str:
    """Compare a run's samples a second with those of one replica times its number of replicas.

    The run with one replica is the newest beside it with the same job but for replicas, seed and epochs; "" if there is
    no such run.
    """
    dated: list[tuple[float, Path]] = []
    for result in path.resolve().parent.glob("*/result.json"):
        with contextlib.suppress(OSError):  # a run may be deleted meanwhile
            dated.append((result.stat().st_mtime, result.parent))
    alike, replicas, rate = _alike(path)
    for _, beside in sorted(dated, reverse=True)[:BESIDE]:
        # errors in a neighbouring run do not concern this one
        with contextlib.suppress(
            DistbeliefError, OSError, LookupError, TypeError, ValueError, AttributeError, RecursionError
        ):
            other, count, single = _alike(beside)
            if count == 1 < replicas and single >= 1 and other == alike:
                share = efficiency(rate, replicas, single)
                where = os.path.normpath(path / os.pardir / beside.name)
                return f"{100 * share:.0f} % of {replicas} times the {single:,.0f} samples/s of {where}"
    return ""


def _alike(path: Path) -> tuple[Json, int, float]:
    run = RunFolder(path)
    job, result = run.read_job(), _result(run)
    common = {name: job.get(name) for name in ("task", "strategy", "device", "cluster", "carrier", "path", "compute")}
    settings = {name: value for name, value in job["settings"].items() if name not in ("replicas", "seed", "epochs")}
    threads = job.get("options", {}).get("threads")
    return {**common, "settings": settings, "threads": threads}, result["replicas"], result["samples_per_second"]


def choose(runs: Sequence[Run], kept: Mapping[str, str], by: str) -> list[Run]:
    """Return the runs that match all filters, sorted."""
    if by not in COLUMNS:
        raise unknown("column", by, COLUMNS)
    if (state := kept.get("state")) and state not in STATES:
        raise unknown("state", state, STATES)
    chosen = [run for run in runs if all(getattr(run, name) == value for name, value in kept.items() if value)]
    if by == "accuracy":
        return sorted(chosen, key=lambda run: -(run.accuracy if run.accuracy is not None else -1.0))
    return sorted(chosen, key=lambda run: getattr(run, by))


def study_of(paths: Sequence[Path], targets: Sequence[Target]) -> tuple[Study, list[Trial]]:
    """Return the study that some runs make: one arm for runs that differ only in seeds."""
    targets = sorted(targets, key=hardness)
    results: list[Json] = []
    for path in paths:
        run = RunFolder.open(path)
        run.read_job()
        result = _result(run)
        if not result:
            raise UsageError(f"{path} has no result.json: its job is running, or was cut short; leave it out")
        results.append({**result, "run": str(path)})
    names = _names(results)
    trials = [_trial(name, result) for name, result in zip(names, results, strict=True)]
    first = {trial.arm: trial for trial in reversed(trials)}
    arms = tuple(
        Arm(name, first[name].task, first[name].strategy, first[name].place, ()) for name in dict.fromkeys(names)
    )
    seeds = tuple(dict.fromkeys(trial.seed for trial in trials))
    return Study(f"{len(paths)} runs", arms, seeds, tuple(targets), arms[0].name), trials


def _names(results: Sequence[Json]) -> list[str]:
    """Return strategy and task of each run, and the settings in which runs of one strategy differ."""
    names = []
    for result in results:
        alike = [other["settings"] for other in results if other["strategy"] == result["strategy"]]
        settings = result["settings"]
        differing = [
            name
            for name in settings
            if name != "seed" and any(other.get(name, settings[name]) != settings[name] for other in alike)
        ]
        changes = "".join(f", {name.replace('_', ' ')} {_short(settings[name])}" for name in differing)
        where = " (simulated)" if "cluster" in result else ""
        names.append(f"{result['strategy']} on {result['task']}{where}{changes}")
    return names


def _short(value: object) -> str:
    if isinstance(value, dict):
        return " ".join(f"{inner:g}" if isinstance(inner, float) else str(inner) for inner in value.values() if inner)
    return f"{value:g}" if isinstance(value, float) else str(value)


def _trial(name: str, result: Json) -> Trial:
    whole, size = result["samples"] / max(result["epochs"], 1), int(result["settings"].get("batch_size") or 1)
    points = []
    for row in result["history"]:
        if row["test_loss"] is not None or row["test_accuracy"] is not None:
            samples = row["samples"]
            loss = math.nan if row["test_loss"] is None else row["test_loss"]
            parts = samples / max(whole, 1), samples, samples // size
            points.append(Point(row["seconds"], *parts, loss, row["test_accuracy"], row["train_loss"]))
    what = {"task": result["task"], "strategy": result["strategy"], "command": result["run"]}
    place = "simulated" if "cluster" in result else "local"
    return Trial(arm=name, seed=int(result["seed"]), place=place, points=points, **what, **of_result(result))
