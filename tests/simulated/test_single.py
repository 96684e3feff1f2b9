"""Every option of the plain loop does something; what it leaves, a job with shards goes on with, and back."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from oracles import STEPPERS, classes, minibatches, mlp
from torch import nn

from distbelief.core.optimizer import optim
from distbelief.core.portions import StartingPoint
from distbelief.core.records import Record
from distbelief.errors import TrainingError
from distbelief.job import Job
from distbelief.places.simulated.simulated import Simulated
from distbelief.record.checkpoints import Checkpoints, Manifest, read_manifest
from distbelief.record.restore import load_part
from distbelief.sharding.assignments import cut
from distbelief.strategies import Downpour, Single
from distbelief.strategies.context import LoopContext
from distbelief.strategies.single.loop import SingleLoop
from distbelief.tasks import Task
from distbelief.tasks.worker import build_model


def play(out: str = "", **options: Any) -> tuple[list[Record], torch.Tensor]:
    """The records of a loop, and the parameters at its end."""
    own = {name: options.pop(name) for name in ("lr_scaling", "base_batch") if name in options}
    strategy = Single(optimizer=options.pop("optimizer", optim("sgd")), **own)
    job = Job(**{"task": classes(mlp, samples=40), "strategy": strategy, "batch_size": 4, **options})
    told: list[Record] = []
    model = build_model(job.task, 0, "cpu")
    SingleLoop(LoopContext(job.task, model, job.settings(), told.append, lambda: None, out)).run()
    return told, torch.cat([value.flatten() for value in model.state_dict().values()])


@pytest.mark.parametrize(("scaling", "factor"), [("linear", 4.0), ("sqrt", 2.0)])
def test_the_rate_of_one_process_grows_with_its_minibatch(scaling: str, factor: float) -> None:
    """A minibatch of 4 is four times the base batch."""
    scaled = play(lr_scaling=scaling, base_batch=1, optimizer=optim("sgd", lr=0.02))[1]
    assert torch.equal(scaled, play(optimizer=optim("sgd", lr=0.02 * factor))[1])


def held(folder: Path) -> tuple[Path, Manifest, dict[str, torch.Tensor]]:
    """The newest checkpoint of a run, what stands on it, and its arrays as one shard would hold them."""
    latest = Checkpoints(folder).latest()
    manifest = read_manifest(latest)
    whole = msgspec.structs.replace(manifest.plan, assignments=cut(manifest.plan.layout, 1, 1))
    return latest, manifest, load_part(latest, whole, 0)[0]


def oracle(
    task: Task, arrays: dict[str, torch.Tensor], optimizer: str, epoch: int, masters: bool
) -> dict[str, torch.Tensor]:
    """What a plain loop makes of the parameters and states of a checkpoint in one epoch more."""
    [parameter] = task.model().parameters()
    model, dtype, shape = task.model(), parameter.dtype, parameter.shape
    values = arrays["vector.moving"].view(dtype)[: parameter.numel()]
    flat = nn.Parameter(values.float() if masters and dtype is torch.bfloat16 else values.clone())
    stepper = STEPPERS[optimizer]([flat], lr=0.05)
    if flat.dtype is torch.bfloat16:
        stepper.param_groups[0]["fused"] = False  # torch's fused kernels step wrongly in bfloat16
    states = {name.removeprefix("state.0."): value for name, value in arrays.items() if name.startswith("state.0.")}
    assert states
    stepper.load_state_dict({"state": {0: states}, "param_groups": stepper.state_dict()["param_groups"]})
    data, [parameter] = task.train(), model.parameters()
    for number, (_, numbers) in enumerate(minibatches(len(data), 4, epoch + 1, 0)):
        if number >= epoch * len(data) // 4:
            parameter.data.copy_(flat.detach().view(shape))
            model.zero_grad()
            inputs, targets = data.batch(numbers)
            task.loss(model(inputs), targets).backward()
            flat.grad = parameter.grad.flatten().to(flat.dtype)
            stepper.step()
    return {
        "vector.moving": flat.detach().to(dtype),
        **{f"state.0.{name}": value for name, value in stepper.state[flat].items()},
    }


@pytest.mark.parametrize(
    ("dtype", "optimizer", "shards"),
    [
        (torch.float32, "momentum", 1), (torch.float32, "adam", 2), (torch.float64, "adagrad", 1),
        (torch.float64, "momentum", 2), (torch.bfloat16, "adam", 1), (torch.bfloat16, "adagrad", 2),
    ],
)  # fmt: skip
def test_a_checkpoint_goes_from_downpour_to_single_and_back_exactly(
    tmp_path: Path, dtype: torch.dtype, optimizer: str, shards: int
) -> None:
    task = classes(lambda: nn.Linear(16, 3, bias=False, dtype=dtype), samples=40, features=16, dtype=dtype)
    chosen = optim(optimizer, lr=0.05)
    strategies = [
        Downpour(replicas=1, shards=shards, optimizer=chosen),
        Single(optimizer=chosen),
        Downpour(replicas=1, shards=shards, optimizer=chosen),
    ]
    before: dict[str, torch.Tensor] = {}
    for epoch, strategy in enumerate(strategies):
        job = Job(task, strategy, epochs=epoch + 1, batch_size=4, evaluate_every=0, out=str(tmp_path), resume=epoch > 0)
        if not isinstance(strategy, Single):
            Simulated().run(job)
        else:
            latest, manifest, _ = held(tmp_path)
            loop = SingleLoop(
                LoopContext(
                    task, build_model(task, 9, "cpu"), job.settings(), lambda _: None, lambda: None, str(tmp_path),
                    StartingPoint(str(latest), manifest.position, manifest.samples, manifest.number + 1),
                )
            )  # fmt: skip
            loop.run()
        _, manifest, arrays = held(tmp_path)
        assert manifest.samples == 40 * (epoch + 1)
        if before:
            right = oracle(task, before, optimizer, epoch, masters=not isinstance(strategy, Single))
            arrays["vector.moving"] = arrays["vector.moving"].view(dtype)[:48]
            assert all(torch.equal(arrays[name], value.to(arrays[name].dtype)) for name, value in right.items())
            arrays["vector.moving"] = arrays["vector.moving"].view(torch.uint8)
        before = arrays


def test_a_sparse_gradient_that_no_module_told_of_is_refused() -> None:
    class Looked(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.rows = nn.Parameter(torch.randn(6, 3))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return nn.functional.embedding((x > 0).long(), self.rows, sparse=True).sum(1)

    with pytest.raises(TrainingError, match="a gradient is sparse, and its module does not declare it"):
        play(task=classes(Looked), optimizer=optim("adagrad"))
