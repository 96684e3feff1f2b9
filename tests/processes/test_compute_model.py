"""Replicas made slow: on real processes, and in a user's own loop."""

import json
from pathlib import Path

import jobs
import pytest

from distbelief.cli import main
from distbelief.places.compute_model import ComputeModel
from distbelief.places.processes.local import Local
from distbelief.strategies import Hogwild, Single


def test_a_padded_step_takes_its_time_and_a_slow_replica_does_less(tmp_path: Path) -> None:
    compute = ComputeModel(step=0.01, spread="constant", slow={1: 20.0})
    result = jobs.run(tmp_path, Hogwild(replicas=2), Local(compute=compute), epochs=6, evaluate_every=0)
    fast, slow = (one["steps"] for one in result["per_replica"])
    assert fast + slow == result["steps"] == 6 * 21
    assert slow < fast / 2
    assert result["seconds"] > 0.01 * fast


@pytest.mark.parametrize("partitions", [1, 2])
def test_a_padded_step_of_single_takes_its_time(tmp_path: Path, partitions: int) -> None:
    compute = ComputeModel(step=0.02, spread="constant")
    result = jobs.run(tmp_path, Single(partitions=partitions), Local(compute=compute), epochs=2, evaluate_every=0)
    assert result["steps"] == 2 * 21
    assert result["seconds"] > 0.02 * 41


def test_a_script_is_padded_too(tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(
        "import torch, distbelief\n"
        "replica, model = distbelief.join(), torch.nn.Linear(2, 1)\n"
        "optimizer = replica.optimizer(model)\n"
        "data = [(torch.ones(2), torch.ones(1))] * 60\n"
        "for x, y in replica.batches(data):\n"
        "    optimizer.zero_grad(); (model(x) - y).square().mean().backward(); optimizer.step()\n"
    )
    words = f"launch downpour --replicas 2 --batch-size 1 --pad 10ms --straggle 1:20 --quiet --out {tmp_path}/run"
    assert main.run([*words.split(), str(tmp_path / "script.py")]) == 0
    result = json.loads((tmp_path / "run" / "result.json").read_text())
    fast, slow = (one["steps"] for one in result["per_replica"])
    assert slow < fast / 2
    assert result["seconds"] > 0.01 * fast
