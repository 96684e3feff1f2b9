"""A script with one replica is the plain script, through the processes of `launch`: cells of tests/plain."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import jobs
import pytest
import torch
from plain.play import WAYS, Outcome
from plain.scripts import FEATURES
from plain.table import Cell, difference, plainly

from distbelief.errors import UsageError
from distbelief.places.processes.local import Local

SCRIPT = """
import sys
from pathlib import Path
import torch
import distbelief
sys.path.insert(0, {tests!r})
from plain.play import Seen
from plain.scripts import FEATURES

seen = Seen(Path("saved"))
seen.folder.mkdir(exist_ok=True)
model = FEATURES[{name!r}].script(distbelief.join(), seen)
torch.save([model.state_dict(), [*seen]], "outcome.pt")
"""
CELLS = [
    *(Cell("a_plain_model", way) for way in WAYS),
    Cell("buffer_assigned", "served"),
    Cell("optimizer_adam_with_weight_decay", "direct"),
    Cell("scheduler_StepLR", "direct"),
    Cell("two_models_1", "served"),
    Cell("backward_penalised", "synchronous"),
    Cell("data_workers", "served"),
    Cell("epochs_of_loader", "synchronous"),
    Cell("saved_by_torch", "direct"),
    Cell("written_by_data", "direct"),
    Cell("sometimes_used", "direct"),
    Cell("control_stop_break", "allreduce"),
    Cell("control_break", "allreduce"),
]
REFUSED = [Cell("thawed", "served"), Cell("data_sampler", "allreduce")]


def launch(cell: Cell, folder: Path, **more: Any) -> dict[str, Any]:
    """Train the script of a cell by the one replica of a job."""
    job = dataclasses.replace(
        WAYS[cell.way].job(cell.feature.optimizer, cell.feature.epochs), out=folder / "run", **more
    )
    script = folder / "script.py"
    script.write_text(SCRIPT.format(tests=str(Path(__file__).parents[1]), name=cell.name))
    return Local(path=WAYS[cell.way].path).launch(job, [str(script)])


@pytest.mark.parametrize("cell", CELLS, ids="-".join)
def test_a_script_of_one_replica_is_the_plain_one(cell: Cell, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What it has seen and saved, and the model that the job has kept."""
    monkeypatch.chdir(tmp_path)
    launch(cell, tmp_path)
    state, seen = torch.load(tmp_path / "outcome.pt")
    saved = {path.name: path.read_bytes() for path in (tmp_path / "saved").iterdir()}
    plain = plainly(cell.name, tmp_path / "plain")
    ours = Outcome(state, seen, saved, plain.messages)
    assert not (found := difference(plain, ours, cell.feature.within)), found
    kept = jobs.weights(tmp_path / "run")
    assert cell.name.startswith("two") or not difference(ours, ours._replace(state={**state, **kept}))
    assert len(kept) == len(state)


@pytest.mark.parametrize("cell", REFUSED, ids="-".join)
def test_what_is_refused_ends_the_job_with_the_sentence(cell: Cell, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=f"script.py, line 12: {cell.feature.refused[cell.way]}"):
        launch(cell, tmp_path)


def test_a_script_that_goes_on_is_the_plain_one_of_all_epochs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    cell = Cell("optimizer_momentum", "served")
    launch(cell, tmp_path, epochs=2)
    launch(cell, tmp_path, resume=True)
    plain = plainly(cell.name, tmp_path / "plain").state
    kept = jobs.weights(tmp_path / "run")
    assert all(torch.equal(value, kept[name]) for name, value in plain.items())
    assert FEATURES[cell.name].epochs == 4
