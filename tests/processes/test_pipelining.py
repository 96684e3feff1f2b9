"""Pipelines of split models beside PyTorch's own: the same gradients, from the same weights and minibatch."""

from __future__ import annotations

import copy
from multiprocessing.connection import Connection
from pathlib import Path

import jobs
import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file
from torch import nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe

from benchmarks.parts.peers import Peers
from distbelief.core.optimizer import optim
from distbelief.strategies import Single
from distbelief.tasks import Task, TensorData
from distbelief.tasks.worker import build_model

SAMPLES, MICROBATCHES = 16, 4
ROOT = Path(__file__).parents[2]
CUT = 2
"""Of its modules, those of the first of two stages."""
THEIRS = {"gpipe": ScheduleGPipe, "1f1b": Schedule1F1B}


def net() -> nn.Module:
    layers = (nn.Linear(6, 9), nn.Tanh(), nn.Linear(9, 9), nn.Tanh(), nn.Linear(9, 5))
    return nn.Sequential(*layers).double()


def data() -> TensorData:
    generator = torch.Generator().manual_seed(5)
    inputs = torch.randn(SAMPLES, 6, generator=generator, dtype=torch.float64)
    return TensorData(inputs, torch.arange(SAMPLES) % 5)


def task() -> Task:
    """One minibatch of four microbatches."""
    return Task(model=net, train=data)


def play_stage(connection: Connection, folder: str, schedule: str, rank: int) -> None:
    """One stage of torch's, once; what its parameters have as gradients is left in the folder."""
    dist.init_process_group("gloo", init_method=f"file://{folder}/meeting", rank=rank, world_size=2)
    model = build_model(task(), 0, "cpu")
    own = copy.deepcopy(model)[slice(CUT) if rank == 0 else slice(CUT, None)]  # type: ignore[index]  # a sequence
    made = THEIRS[schedule](PipelineStage(own, rank, 2, torch.device("cpu")), MICROBATCHES, nn.functional.cross_entropy)
    taken = data()
    made.step(taken.inputs) if rank == 0 else made.step(target=taken.targets)
    torch.save({name: one.grad for name, one in own.named_parameters()}, Path(folder) / f"{schedule} {rank}")
    dist.destroy_process_group()
    connection.send_bytes(b"done")


def theirs(folder: Path, schedule: str) -> dict[str, torch.Tensor]:
    """The gradient of the minibatch by torch's pipeline, by the names that the whole model has."""
    with Peers() as peers:
        started = [peers.start("stage", 1, play_stage, str(folder), schedule, rank) for rank in (0, 1)]
        assert [one.hear() for one in started] == ["done", "done"]
    return {name: one for rank in (0, 1) for name, one in torch.load(folder / f"{schedule} {rank}").items()}


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b"])
def test_a_step_has_the_gradient_of_pytorchs_own_pipeline(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, schedule: str
) -> None:
    """What one step of SGD at rate 1 takes from the parameters."""
    monkeypatch.syspath_prepend(ROOT)  # a stage is a function of this file, which the processes must find
    expected = theirs(tmp_path, schedule)
    start = build_model(task(), 0, "cpu").state_dict()
    strategy = Single(
        optimizer=optim("sgd", lr=1.0), partitions=2, split="[01]=0,*=1", microbatches=MICROBATCHES, schedule=schedule,
    )  # fmt: skip
    jobs.run(tmp_path / "run", strategy, task="test_pipelining:task", batch_size=SAMPLES, epochs=1, evaluate_every=0)
    end = load_file(tmp_path / "run" / "model.safetensors")
    assert expected.keys() == end.keys()
    for name, gradient in expected.items():
        torch.testing.assert_close(start[name] - end[name], gradient, rtol=0, atol=1e-12)
        assert gradient.abs().max() > 1e-3
