"""A strategy from outside the package on processes: trained, gone on with, evaluated."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import damped_downpour
import jobs
import pytest

import distbelief as db
from distbelief.errors import UsageError
from distbelief.places.evaluate import evaluate
from distbelief.places.simulated.simulated import Simulated
from distbelief.record.checkpoints import Checkpoints, read_manifest

NAME = "damped_downpour:DampedDownpour"


def test_processes_train_with_it_and_a_run_goes_on_and_is_evaluated(tmp_path: Path) -> None:
    result = jobs.run(tmp_path / "run", damped_downpour.DampedDownpour(2, 2, restarts=0), epochs=1)
    assert (result["outcome"], result["strategy"], result["settings"]["damping"]) == ("done", NAME, 0.5)
    result = jobs.run(tmp_path / "run", damped_downpour.DampedDownpour(2, 2, damping=0.25), epochs=2, resume=True)
    assert (result["outcome"], result["samples"]) == ("done", 2 * jobs.SAMPLES)
    assert evaluate(tmp_path / "run")["test_accuracy"] == result["test_accuracy"]
    # others read its checkpoint where nobody knows its class
    newest = Checkpoints(tmp_path / "run").latest()
    assert read_manifest(newest).plan.settings.strategy.name == NAME
    code = (
        "import sys; from distbelief.record.checkpoints import read_manifest; sys.path.clear();"
        "print(read_manifest(sys.argv[1]).plan.settings.strategy.name)"
    )
    told = subprocess.run([sys.executable, "-c", code, str(newest)], capture_output=True, text=True)
    assert told.stdout == f"{NAME}\n", told.stderr


def test_a_run_whose_strategy_is_gone_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    Simulated(keep=True).run(jobs.job(tmp_path / "run", damped_downpour.DampedDownpour(1, 1)))
    monkeypatch.setattr(sys, "path", [one for one in sys.path if not (Path(one) / "damped_downpour.py").exists()])
    monkeypatch.delitem(sys.modules, "damped_downpour")
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UsageError, match=f"strategy '{NAME}': importing 'damped_downpour' raised ModuleNotFoundError"):
        jobs.run(tmp_path / "run", db.Downpour(1, 1), epochs=2, resume=True)
