"""The report of a study: its figures and what was found, as JSON and CSV in its folder."""

from __future__ import annotations

import csv
import io
from collections.abc import Sequence
from pathlib import Path

import msgspec

from distbelief.core.records import Json
from distbelief.lab.study.claims import FIGURES, judge
from distbelief.lab.study.definition import Study
from distbelief.lab.study.figures import Report, figures, shrunk_figures
from distbelief.lab.study.observation import findings, observe
from distbelief.lab.study.running import MACHINE, cost_of, read_kept, starts
from distbelief.lab.study.sentences import sentences
from distbelief.lab.study.trials import Point, Trial
from distbelief.record.folder import write_atomically
from distbelief.record.summary import moved

REPORT, TRIALS, POINTS = "report.json", "trials.csv", "points.csv"


def make_report(study: Study, trials: Sequence[Trial], machine: Json, left: int | None = None) -> Report:
    """Make the report of a study's trials."""
    counted = [trial for trial in trials if not trial.tuning]
    whole = len(study.arms) * len(study.seeds) + sum(len(arm.grid) * len(study.tuning_seeds) for arm in study.arms)
    whole += len(starts(study))
    trained = [arm for arm in study.arms if not arm.compresses]
    names = {arm.name for arm in trained}
    measured = [figures(study, counted, arm) for arm in trained]
    shrunk = [shrunk_figures(counted, arm) for arm in study.arms if arm.compresses]
    left, kept = whole - len(trials) if left is None else left, [trial for trial in counted if trial.arm in names]
    beside = observe(study, counted)
    report = Report(
        study=study, machine=dict(machine), left=left, arms=measured, trials=kept, shrunk=shrunk, problems=beside
    )
    judged = [
        judge(claim, [FIGURES[claim.of](report.arm(name)) for name in claim.arms])
        for claim in (() if report.left else study.claims)
    ]
    return msgspec.structs.replace(report, sentences=[*findings(study, beside), *sentences(report)], claims=judged)


def write_report(path: Path, study: Study, trials: Sequence[Trial]) -> Report:
    """Write the report of a study into its folder.

    Raises:
        OSError: the disk is full.
    """
    cost = cost_of(path)
    text = (
        f"The jobs took {cost.jobs:,.0f} s, evaluating afterwards {cost.measuring:,.0f} s, and the study itself "
        f"{cost.beside:,.1f} s, {100 * cost.beside / ((cost.jobs + cost.measuring) or 1.0):.1f} % of both."
    )
    report = msgspec.structs.replace(make_report(study, trials, read_kept(path / MACHINE, Json)), cost=text)
    write_atomically(path / REPORT, msgspec.json.format(msgspec.json.encode(report), indent=1))
    kept = ("arm", "seed", "value", "command", "place", "outcome", "reason", "replicas", "seconds", "epochs", "steps",
            "samples", "updates", "bytes", "busy")  # fmt: skip
    till = [(what, target) for target in study.targets for what in ("seconds", "epochs")]
    rows = [
        [
            *(getattr(trial, name) for name in kept),
            trial.accuracy,
            *(trial.bytes_by_kind.get(kind, 0) for kind in moved({})),
            *(trial.until(target, what) for what, target in till),
        ]
        for trial in report.trials
    ]
    heads = [*(f"bytes {kind}" for kind in moved({})), *(f"{what} to {target}" for what, target in till)]
    _write(path / TRIALS, [*kept, "accuracy", *heads], rows)
    points = [
        [trial.arm, trial.seed, *msgspec.structs.astuple(point)] for trial in report.trials for point in trial.points
    ]
    _write(path / POINTS, ["arm", "seed", *Point.__struct_fields__], points)
    return report


def _write(path: Path, head: Sequence[str], rows: Sequence[Sequence[object]]) -> None:
    text = io.StringIO(newline="")
    csv.writer(text).writerows([head, *rows])
    write_atomically(path, text.getvalue().encode())
