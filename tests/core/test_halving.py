"""Runs of candidates on this machine: which go on, for how long, and what is left of those that are interrupted."""

from __future__ import annotations

import shutil
import signal
import tempfile
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import distbelief as db
from distbelief.errors import Interrupted, JobFailed, UsageError
from distbelief.lab.cost.options import PlanRequest
from distbelief.lab.plan import halving
from distbelief.lab.plan.candidates import Machines, PlanCandidate, candidates
from distbelief.lab.plan.halving import Measurements
from distbelief.lab.plan.pricing import Terms, terms_of

ASKED = candidates(Machines(1, 4), ("allreduce", "hogwild", "downpour"), db.optim("sgd"))
NAMES = [str(one) for one in ASKED]
START = 0.5
"""Seconds that a run takes to start."""


class Runs:
    """Runs that take as long as they are to train, and some time to start, of candidates with these rates.

    Args:
        monkeypatch: has them take the place of jobs.
        rates: of each run of a candidate, the last of which is that of all further runs; 0 fails.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch, rates: dict[str, list[float]]) -> None:
        self.now, self._rates = 0.0, rates
        self.runs: list[tuple[str, float]] = []
        monkeypatch.setattr(halving, "time", SimpleNamespace(monotonic=lambda: self.now))
        monkeypatch.setattr(halving, "run", self._run)

    def _run(self, _: Any, one: PlanCandidate, __: Any, seconds: float) -> Terms:
        self.now += seconds + START
        self.runs.append((str(one), seconds))
        rates = self._rates[str(one)]
        rate = rates.pop(0) if len(rates) > 1 else rates[0]
        if not rate:
            raise UsageError("not here")
        return Terms(1e-3, 0.0, 0.0, 0.0, rate, 0.0)

    def measured(self, seconds: float, asked: list[PlanCandidate]) -> Measurements:
        return halving.measure("digits", asked, PlanRequest(seconds=seconds), lambda _: None)


def test_the_best_third_goes_on_and_the_last_are_run_by_turns_for_longer(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of nine, three; the fastest in its first run is the second in the longer ones, and one that was left behind stays
    there, however its rate looks beside theirs.
    """
    rates = {what: [float(at)] for at, what in enumerate(NAMES[:9], 1)}
    rates[NAMES[8]] = [9.0, 3.0, 5.0]
    runs = Runs(monkeypatch, rates)
    found = runs.measured(40.0, ASKED[:9])
    assert [what for what, _ in runs.runs[:9]] == NAMES[:9]
    last = [NAMES[8], NAMES[7], NAMES[6]]
    assert [what for what, _ in runs.runs[9:]] == [*last, *reversed(last)]
    assert [*found.terms] == [NAMES[7], NAMES[6], NAMES[8], *reversed(NAMES[:6])]
    assert found.terms[NAMES[8]].samples_per_second == 4.0
    assert min(seconds for _, seconds in runs.runs[9:]) > max(seconds for _, seconds in runs.runs[1:9])
    assert runs.now == pytest.approx(40.0, abs=1.0)


def test_each_run_has_a_few_steps_and_there_is_no_second_turn_however_little_time_there_is(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    runs = Runs(monkeypatch, {what: [1.0] for what in NAMES[:2]})
    monkeypatch.setattr(halving, "LEAST_SECONDS", 0.0)
    runs.measured(1e-3, ASKED[:2])
    assert [seconds for _, seconds in runs.runs[1:]] == [pytest.approx(3e-3)]


def test_a_candidate_that_fails_is_told_and_ends_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    found = Runs(monkeypatch, {NAMES[0]: [0.0], NAMES[1]: [1.0], NAMES[2]: [2.0, 0.0]}).measured(9.0, ASKED[:3])
    assert ([*found.terms], found.failed) == ([NAMES[1]], {NAMES[0]: "not here", NAMES[2]: "not here"})


def test_one_plan_at_a_time_measures() -> None:
    second = halving.only_plan()
    with halving.only_plan(), pytest.raises(UsageError, match="another plan measures on this machine"):
        second.__enter__()
    with halving.only_plan():
        pass


@pytest.fixture(autouse=True)
def own_lock(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(halving, "LOCK", f"\0{tmp_path}")


@pytest.mark.parametrize(
    "where", [(tempfile, "mkdtemp"), (halving.Local, "run"), (shutil, "rmtree")], ids=lambda at: at[1]
)
def test_a_run_that_is_interrupted_at_any_moment_leaves_no_folder(
    where: tuple[Any, str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    before = signal.getsignal(signal.SIGINT)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setattr(halving.Local, "run", lambda *_: {"outcome": "completed"})
    monkeypatch.setattr(halving, "terms_of", lambda *_: None)
    called = getattr(*where)

    def interrupted(*args: Any, **options: Any) -> Any:
        found = called(*args, **options) if where[1] == "mkdtemp" else None
        signal.raise_signal(signal.SIGINT)
        return called(*args, **options) if found is None else found

    monkeypatch.setattr(*where, interrupted)
    with pytest.raises(KeyboardInterrupt):
        halving.run("digits", PlanCandidate(db.Single()), PlanRequest(), 1.0)
    assert [*tmp_path.iterdir()] == []
    assert signal.getsignal(signal.SIGINT) is before


@pytest.mark.parametrize("began", [True, False])
def test_who_interrupts_a_run_interrupts_the_plan(began: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    def run(*_: object) -> dict[str, str]:
        if not began:
            raise Interrupted("interrupted before the job began")
        return {"outcome": "interrupted"}

    monkeypatch.setattr(halving.Local, "run", run)
    with pytest.raises(KeyboardInterrupt):
        halving.run("digits", PlanCandidate(db.Single()), PlanRequest(), 1.0)


def test_a_job_that_ends_before_a_step_was_timed_has_no_rate() -> None:
    result = {"per_replica": [{"times": None}], "reason": "the budget of 1 s is spent"}
    with pytest.raises(JobFailed, match=r"^single ended \(the budget of 1 s is spent\) before a step was timed"):
        terms_of(result, PlanCandidate(db.Single()), 64)
