"""The same jobs with `--device cuda`. Skipped where there is no GPU: nothing of it can be shown there."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

import distbelief as db

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
