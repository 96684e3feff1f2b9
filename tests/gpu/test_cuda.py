"""The same jobs with `--device cuda`. Skipped where there is no GPU: nothing of it can be shown there."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

import distbelief as db
from distbelief.places.processes.local import Local

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device here")


@pytest.mark.parametrize("prefetch", [0, 1])
@pytest.mark.parametrize("push_every", [1, 3])
def test_a_gpu_trains_what_the_cpu_trains(prefetch: int, push_every: int, tmp_path: Path) -> None:
    weights = {}
    for device in ("cpu", "cuda"):
        strategy = db.Downpour(
            replicas=1, shards=2, optimizer=db.optim("adagrad", lr=0.05), prefetch=prefetch, push_every=push_every
        )
        result = db.run(db.Job(task="digits", strategy=strategy, epochs=2, device=device, out=str(tmp_path / device)))
        assert result["outcome"] == "done"
        weights[device] = load_file(str(Path(result["run"]) / "model.safetensors"))
    for name, value in weights["cpu"].items():
        torch.testing.assert_close(weights["cuda"][name], value, rtol=1e-3, atol=1e-4)


def test_two_replicas_share_a_gpu(tmp_path: Path) -> None:
    strategy = db.Downpour(replicas=2, shards=2, optimizer=db.optim("adagrad", lr=0.05))
    result = db.run(db.Job(task="digits", strategy=strategy, epochs=10, device="cuda", out=str(tmp_path / "run")))
    assert result["test_accuracy"] > 0.9


SGD = db.optim("sgd", lr=0.05)
ADAM = db.optim("adam", lr=0.002, eps=1e-3)
"""Whose steps along gradients near 0 do not follow their rounding, which differs between devices."""
SAME: dict[str, tuple[db.strategies.Strategy, dict[str, Any]]] = {
    "single": (db.Single(optimizer=SGD), {}),
    "single, adagrad": (db.Single(optimizer=db.optim("adagrad", lr=0.02)), {}),
    "allreduce, adam": (db.Allreduce(replicas=2, optimizer=ADAM), {}),
    "allreduce of one": (db.Allreduce(replicas=1, optimizer=SGD), {}),
    "allreduce": (db.Allreduce(replicas=2, optimizer=SGD), {}),
    "allreduce, clipped": (db.Allreduce(replicas=2, optimizer=SGD), {"clip_norm": 0.5}),
    "allreduce, accumulated": (db.Allreduce(replicas=3, optimizer=SGD, accumulate=2), {}),
    "synchronous": (db.Synchronous(replicas=2, shards=2, optimizer=SGD), {}),
    "sandblaster": (db.Sandblaster(replicas=2, shards=2, iterations=4, deterministic=True), {"epochs": 1}),
}
"""Strategies whose updates do not depend on who is faster, with options of the job."""


@pytest.mark.parametrize("name", SAME)
def test_each_way_to_train_does_on_a_gpu_what_it_does_on_the_cpu(name: str, tmp_path: Path) -> None:
    strategy, options = SAME[name]
    weights = {}
    for device in ("cpu", "cuda"):
        job = db.Job("digits", strategy, device=device, out=str(tmp_path / device), **{"epochs": 2, **options})
        result = db.run(job)
        assert result["outcome"] == "done"
        weights[device] = load_file(str(Path(result["run"]) / "model.safetensors"))
    for key, value in weights["cpu"].items():
        torch.testing.assert_close(weights["cuda"][key], value, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("strategy", [db.Single, db.Allreduce, db.Downpour])
def test_a_run_goes_on_from_its_checkpoint_on_a_gpu(strategy: type[db.strategies.Strategy], tmp_path: Path) -> None:
    """With the moments that its optimizer had, from the host's memory to the device's."""
    weights = []
    for name, parts in (("whole", (3,)), ("in parts", (2, 3))):
        for epochs in parts:
            one = strategy(optimizer=ADAM, **({} if strategy is db.Single else {"replicas": 1}))
            run = str(tmp_path / name)
            job = db.Job("digits", one, epochs=epochs, device="cuda", out=run, resume=epochs == 3 and len(parts) > 1)
            assert db.run(job)["outcome"] == "done"
        weights.append(load_file(str(tmp_path / name / "model.safetensors")))
    for key, value in weights[0].items():
        torch.testing.assert_close(weights[1][key], value, rtol=1e-3, atol=1e-4)


@pytest.mark.skipif(torch.cuda.device_count() != 1, reason="there is not one CUDA device, which two replicas share")
def test_nccl_is_not_asked_for_two_replicas_on_one_gpu(tmp_path: Path) -> None:
    job = db.Job("digits", db.Allreduce(replicas=2), epochs=1, device="cuda", out=str(tmp_path / "run"))
    with pytest.raises(db.JobFailed, match="ranks 0 and 1 share a GPU"):
        Local(transport="tcp").run(job)
