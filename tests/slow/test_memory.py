"""A model of a gigabyte, split over processes none of which could hold it. Minutes, and 5 GB of disk."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from gigabyte import BATCH, RATE, STEPS, gigabyte, quarter, train
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from distbelief.tasks.order import Order
from distbelief.tasks.worker import build_model, load, measure

OWN, MAPPED = 900_000_000, 1_800_000_000
"""Most bytes that a process may have of its own, and with what it has mapped of others and of files."""
OWN_SINGLE, MAPPED_SINGLE = 1_150_000_000, 2_400_000_000
"""In `single`, where a partition has its gradients and what it sends beside its part, and the first measures."""


def plain(begin: dict[str, torch.Tensor] | None) -> torch.nn.Module:
    """The same steps, by a plain loop on the whole model; with other values than the seeded ones, if given."""
    torch.set_num_threads(1)
    task = gigabyte()
    model, data = build_model(task, 0, "cpu"), load(task, "training")
    if begin:
        model.load_state_dict(begin)
    order = Order(len(data), BATCH, seed=0)
    optimizer = torch.optim.SGD(model.parameters(), lr=RATE)
    for number in range(STEPS):
        inputs, targets = data.batch(order.indices(0, number))
        optimizer.zero_grad()
        task.loss(model(inputs), targets).backward()
        optimizer.step()
    return model


@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    ("strategy", "begins", "own", "mapped"),
    [
        ("downpour", "seeded", OWN, MAPPED),
        ("downpour", "named", OWN, MAPPED),
        ("single", "seeded", OWN_SINGLE, MAPPED_SINGLE),
    ],
)
def test_a_model_of_a_gigabyte_trains_in_processes_that_could_not_hold_it(
    tmp_path: Path, strategy: str, begins: str, own: int, mapped: int
) -> None:
    """On four partitions, watched; ends in the parameters of a plain loop, bit for bit."""
    begin, file = None, ""
    if begins == "named":
        begin, file = build_model(gigabyte(), 1, "cpu").state_dict(), str(tmp_path / "begin.safetensors")
        save_file(begin, file)
    ended = train(own, "gigabyte", strategy, tmp_path / "split", file)
    assert ended.returncode == 0, ended.stderr
    result: dict[str, Any] = json.loads(ended.stdout)
    assert (result["outcome"], result["steps"]) == ("done", STEPS)
    assert "dropped the rest" not in result["split"]["told"]
    measured = {f"distbelief: replica 0.{home}" for home in range(4)}
    assert measured | ({"distbelief: evaluator"} if strategy == "downpour" else set()) < result["most"].keys()
    for process, (had, together) in result["most"].items():
        assert had <= own, process
        assert together <= mapped, process
    trained = plain(begin)
    assert result["test_loss"] == pytest.approx(measure(gigabyte(), trained).loss, rel=1e-6)
    with safe_open(tmp_path / "split" / "model.safetensors", framework="pt") as saved:
        for name, tensor in trained.named_parameters():
            assert torch.equal(saved.get_tensor(name), tensor), name


@pytest.mark.timeout(300)
def test_unsplit_it_does_not_fit(tmp_path: Path) -> None:
    ended = train(OWN, "gigabyte", "whole", tmp_path / "whole")
    assert ended.returncode
    assert "can't allocate memory" in ended.stderr


@pytest.mark.timeout(900)
@pytest.mark.parametrize("strategy", ["allreduce", "single"])
def test_who_leads_and_measures_has_room_for_its_part_only(tmp_path: Path, strategy: str) -> None:
    """A part is 144 MB of two, or 72 of four: more than a link keeps for who does not read."""
    ended = train(700_000_000, "quarter", strategy, tmp_path)
    assert ended.returncode == 0, ended.stderr
    result = json.loads(ended.stdout)
    assert (result["outcome"], result["steps"]) == ("done", STEPS)
    task = quarter()
    model = task.model()
    model.load_state_dict(load_file(tmp_path / "model.safetensors"))
    assert result["test_loss"] == pytest.approx(measure(task, model).loss, rel=1e-6)
