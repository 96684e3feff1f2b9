"""The whole gradient of the course's perceptron, on several processes: cut by data and by model it makes the steps of
one process. The oracle is plain PyTorch in float64, written without our machinery.
"""

from __future__ import annotations

from pathlib import Path

import jobs
import pytest
import torch
from safetensors.torch import load_file

from distbelief.core.optimizer import optim
from distbelief.strategies import Allreduce, Single, Strategy, Synchronous

EPOCHS, RATE = 3, 0.5
SGD = optim("sgd", lr=RATE)


def loop() -> dict[str, torch.Tensor]:
    """Gradient descent on all of the data."""
    torch.manual_seed(0)
    task = jobs.perceptron()
    model, data = task.model(), task.train()
    inputs, targets = data.batch(torch.arange(jobs.WHOLE))  # type: ignore[union-attr]
    for _ in range(EPOCHS):
        loss = task.loss(model(inputs), targets)
        gradients = torch.autograd.grad(loss, [*model.parameters()])
        with torch.no_grad():
            for parameter, gradient in zip(model.parameters(), gradients, strict=True):
                parameter -= RATE * gradient
    return dict(model.named_parameters())


@pytest.mark.parametrize(
    ("cut", "processes"),
    [("by data", 2), ("by data", 4), ("by data, all-reduce", 4), ("by model", 2), ("by model", 4)],
)
def test_on_several_processes_it_is_that_of_one(tmp_path: Path, cut: str, processes: int) -> None:
    ways: dict[str, Strategy] = {
        "by data": Synchronous(processes, optimizer=SGD),
        "by data, all-reduce": Allreduce(processes, optimizer=SGD),
        "by model": Single(partitions=processes, optimizer=SGD),
    }
    size = jobs.WHOLE if cut == "by model" else jobs.WHOLE // processes
    job = jobs.job(tmp_path / "run", ways[cut], "jobs:perceptron", epochs=EPOCHS, batch_size=size, evaluate_every=0)
    result = jobs.Local().run(job)
    assert result["updates"] == EPOCHS
    model = load_file(tmp_path / "run" / "model.safetensors")
    for name, expected in loop().items():
        assert model[name].dtype == torch.float64
        assert (model[name] - expected).abs().max() <= 1e-12 * expected.abs().max(), name
