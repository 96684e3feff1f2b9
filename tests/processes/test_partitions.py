"""Split replicas as processes: over both carriers, with partitions that are killed, and what they leave behind."""

from __future__ import annotations

import dataclasses
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jobs
import pytest
import torch
from safetensors.torch import save_file
from torch.utils.data import TensorDataset

from distbelief.core import records, roles
from distbelief.core.optimizer import optim
from distbelief.core.settings import Plan
from distbelief.errors import UsageError
from distbelief.job import Job
from distbelief.places.processes import process, running
from distbelief.places.processes.local import Local, check_model
from distbelief.places.processes.running import Running
from distbelief.runtime.player import cannot
from distbelief.strategies import Allreduce, Downpour, Single, Strategy
from distbelief.strategies.context import Context
from distbelief.strategies.players import served_reader
from distbelief.tasks import Task
from distbelief.tasks.flat import FlatModule
from distbelief.tasks.on_disk import build_on_disk
from distbelief.tasks.worker import measure
from distbelief.transport.base import plain_arena


@pytest.mark.parametrize(("transport", "split"), [("shared", "neurons"), ("tcp", "stages")])
def test_one_split_replica_ends_where_the_whole_one_does(tmp_path: Path, transport: str, split: str) -> None:
    """Which is simulated."""
    whole = Downpour(replicas=1, shards=3, optimizer=optim("adagrad", lr=0.05))
    result = jobs.run(tmp_path / "whole", whole, jobs.PLAIN, epochs=2)
    parts = dataclasses.replace(whole, partitions=2, split=split)
    other: dict[str, Any] = jobs.run(tmp_path / "split", parts, Local(transport=transport), epochs=2)
    jobs.assert_close(tmp_path / "split", tmp_path / "whole", atol=1e-5)
    assert split != "stages" or jobs.same(tmp_path / "split", tmp_path / "whole"), "stages compute the same bits"
    assert other["test_accuracy"] == pytest.approx(result["test_accuracy"], abs=0.01)
    [replica] = other["per_replica"]
    times = replica.pop("times")
    assert replica == {"id": 0, "steps": 42, "samples": 2 * jobs.SAMPLES, "pushes": 42, "lost": 0, "participation": 1.0}
    assert min(times["compute"], times["wait"]) > 0
    crossed = jobs.run(tmp_path / "simulated", parts, jobs.PLAIN, epochs=2)["bytes"]["sent"]["partitions"]
    way = "shared_memory" if transport == "shared" else "sent"
    assert other["bytes"][way]["partitions"] == pytest.approx(crossed, rel=0.1)


MOMENTUM = optim("momentum", lr=0.05)


@pytest.mark.parametrize(
    ("strategy", "epochs", "batch_size"),
    [
        (Allreduce(2, MOMENTUM, partitions=2, split="stages"), 2, jobs.BATCH),
        (Single(optimizer=MOMENTUM, partitions=3, split="0=samples,2=neurons"), 1, 13),  # the last minibatch has 5
    ],
    ids=["all-reduce", "samples"],
)
def test_split_models_end_where_simulated_ones_do(
    tmp_path: Path, strategy: Strategy, epochs: int, batch_size: int
) -> None:
    """Bit for bit, and measure the same."""
    told = [
        jobs.run(tmp_path / str(number), strategy, place, epochs=epochs, batch_size=batch_size)
        for number, place in enumerate((jobs.PLAIN, Local(transport="tcp")))
    ]
    assert jobs.same(tmp_path / "0", tmp_path / "1")
    assert told[0]["test_loss"] == told[1]["test_loss"]


def test_one_model_over_two_processes_ends_where_a_simulated_one_does(tmp_path: Path, watch: jobs.Watch) -> None:
    """In stages bit for bit, also where a partition is killed, so that both come again, from the newest checkpoint, and
    where the job is ended and gone on with: what is computed with which weights depends on nobody's speed.
    """
    strategy = Single(optimizer=MOMENTUM, partitions=2, split="stages", schedule="gpipe")
    jobs.run(tmp_path / "simulated", strategy, jobs.PLAIN, epochs=4, evaluate_every=0)
    killed: list[int] = []
    watch.once(records.Checkpointed, lambda: killed.append(jobs.kill("replica 0.1")))
    jobs.run(tmp_path / "processes", strategy, epochs=3, evaluate_every=0)
    assert killed
    jobs.run(tmp_path / "processes", strategy, Local(transport="tcp"), epochs=4, evaluate_every=0, resume=True)
    assert jobs.same(tmp_path / "processes", tmp_path / "simulated")


@pytest.mark.parametrize(
    ("task", "strategy", "told"),
    [
        ("jobs:tiny", Single(partitions=2, split="stage"), "unknown way to split 'stage'; did you mean 'stages'"),
        ("mnist", Single(partitions=400), "fc1 has 300 neurons; split it over at most 300, or another way"),
        ("jobs:wrongly_split", Single(partitions=2), r"the task's own split '0=stagse': unknown way .* --split names"),
        ("jobs:split_as_another", Single(partitions=2), r"'encoder=stages': unknown module .* 'encoder'.* --split nam"),
    ],
    ids=["no such way", "more than it has", "the task's", "another's"],
)
def test_a_split_that_a_model_cannot_have_is_refused_before_a_process_is_started(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, task: str, strategy: Strategy, told: str
) -> None:
    monkeypatch.setattr(Running, "__init__", None)  # who would start them
    with pytest.raises(UsageError, match=told):
        jobs.run(tmp_path, strategy, task=task)


class Untraceable(torch.nn.Module):
    """Goes one way or the other."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.other = torch.nn.Linear(4, 4), torch.nn.Linear(4, 2)

    def forward(self, x: torch.Tensor) -> Any:
        given = self.one(x)
        return self.other(given * 2 if given.sum() > 0 else given)


class WithValues(torch.nn.Module):
    """Can be built with values only."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.other = torch.nn.Linear(4, 4), torch.nn.Linear(4, int(torch.tensor(2).item()))

    def forward(self, x: torch.Tensor) -> Any:
        return self.other(self.one(x))


def of_four(model: Callable[[], torch.nn.Module]) -> Task:
    return Task(model=model, train=lambda: TensorDataset(torch.zeros(8, 4), torch.zeros(8).long()))


@pytest.mark.parametrize(
    ("model", "partitions", "reason"),
    [
        (Untraceable, 2, r"cannot be traced at .*test_partitions.py:\d+: return self.other\(given \* 2 if given.sum"),
        (WithValues, 3, "there are 2 layers with parameters for stages"),
        (
            lambda: torch.nn.Sequential(torch.nn.LazyLinear(4), torch.nn.Linear(4, 2)),
            2,
            "'0.weight' of a lazy module has no shape yet",
        ),
    ],
)
def test_what_cannot_be_built_without_values_is_refused_as_its_replicas_would(
    model: Callable[[], torch.nn.Module], partitions: int, reason: str
) -> None:
    settings = Job(task="mine", strategy=Single(partitions=partitions, split="stages")).settings()
    with pytest.raises(UsageError, match=reason):
        check_model(of_four(model), settings)


def test_what_only_replicas_can_build_is_left_to_them() -> None:
    def unable() -> torch.nn.Module:
        raise RuntimeError("not in this process")

    settings = Job(task="mine", strategy=Single(partitions=2, split="stages")).settings()
    check_model(of_four(unable), settings)
    check_model(of_four(WithValues), settings)


@pytest.mark.parametrize("strategy", [Downpour(replicas=1, partitions=2, split="stages"), Downpour()])
def test_more_than_sixteen_shards_are_held_against_the_parameters(strategy: Downpour) -> None:
    """Of a split model, any number."""
    task, limit = of_four(WithValues), 30
    check_model(task, Job(task="mine", strategy=dataclasses.replace(strategy, shards=limit)).settings())
    with pytest.raises(UsageError, match=f"--shards {limit + 1} is more than the model's {limit} parameters"):
        check_model(task, Job(task="mine", strategy=dataclasses.replace(strategy, shards=limit + 1)).settings())


def test_a_model_is_built_and_its_data_are_loaded_once_before_processes_are_started() -> None:
    """However many partitions and shards there are."""
    built: list[str] = []
    plain = of_four(lambda: torch.nn.Sequential(torch.nn.Linear(4, 40), torch.nn.Linear(40, 4)))
    task = Task(
        model=lambda: [built.append("model"), plain.model()][1], train=lambda: [built.append("data"), plain.train()][1]
    )
    check_model(task, Job(task="mine", strategy=Downpour(partitions=2, split="neurons", shards=17)).settings())
    assert built == ["model", "data"]


def test_partitions_say_when_they_hold_their_parts_and_why_that_may_take_long(
    watch: jobs.Watch, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(running, "CROWD", 0)
    strategy = Allreduce(replicas=2, partitions=2, split="stages", optimizer=optim("sgd", lr=0.05))
    jobs.run(tmp_path, strategy, epochs=1, evaluate_every=0)
    parts = roles.replicas(Job(task="mine", strategy=strategy).settings().mesh)
    assert sorted(watch.of(records.PartBuilt), key=lambda one: one.role) == [
        records.PartBuilt(role, 4) for role in parts
    ]
    assert any(one.text.startswith("4 partitions take turns on the ") for one in watch.of(records.Note))


class Ragged(torch.nn.Module):
    """How many rows cross depends on their values."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.other = torch.nn.Linear(8, 4), torch.nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> Any:
        given = self.one(x)
        return given + self.other(given[given[:, 0] > 0]).sum()


def ragged() -> Task:
    return Task(model=Ragged, train=jobs.data)


def test_what_crosses_in_another_shape_than_its_samples_have_ends_the_job_with_the_remedy(tmp_path: Path) -> None:
    strategy = Single(partitions=2, split="one=0,other=1")
    told = (
        r"^the model: getitem_1 has the shape \[\d+, 4\] where it crosses from partition 0 to 1, but the trace has "
        r"\[\d+, 4\] for 16 samples: a tensor whose shape depends on values cannot cross; .*\(--split PATTERN=0\)"
    )
    with pytest.raises(UsageError, match=told):
        jobs.run(tmp_path, strategy, task="test_partitions:ragged")


PRELOADED = """
import sys
import distbelief as db
import jobs
result = db.run(db.Job("jobs:in_partitions", db.Single(partitions=2, split="stages"), out=sys.argv[1]))
assert result["outcome"] == "done"
"""


@pytest.mark.long
def test_partitions_have_what_torch_traces_with_from_the_forkserver(tmp_path: Path) -> None:
    """Each by itself would take 0.7 s and 70 MB for it. The model says whether it is there."""
    command = [sys.executable, "-c", PRELOADED, str(tmp_path / "run")]
    done = subprocess.run(command, env=jobs.environment(), capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.parametrize(("split", "begins"), [("stages", "named"), ("neurons", "seeded")])
def test_a_partition_begins_with_its_own_part_of_the_whole_model(tmp_path: Path, split: str, begins: str) -> None:
    """Seeded, or of the weights that are named; steps by the smallest learning rate change nothing of it."""
    named: dict[str, object] = {}
    if begins == "named":
        torch.manual_seed(99)
        save_file(jobs.wide().model().state_dict(), tmp_path / "begin.safetensors")
        named = {"init_from": str(tmp_path / "begin.safetensors")}
    strategy = Downpour(replicas=1, partitions=2, split=split, optimizer=optim("sgd", lr=1e-45))
    result = jobs.run(tmp_path / "run", strategy, task="jobs:wide", epochs=1, evaluate_every=0, seed=99, **named)
    torch.manual_seed(99)
    expected = jobs.wide().model().state_dict()
    assert "dropped the rest" not in result["split"]["told"]  # type: ignore[index]  # a dict
    found = jobs.weights(tmp_path / "run")
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], tensor) for name, tensor in expected.items())


@pytest.mark.parametrize(
    ("strategy", "transport", "split"),
    [
        (Downpour(1), "shared", "stages"),
        (Downpour(1), "tcp", "stages"),
        (Allreduce(1), "shared", "neurons"),
        (Single(), "shared", "stages"),
    ],
    ids=["downpour-stages", "tcp-stages", "allreduce-neurons", "single-stages"],
)
def test_who_measures_a_split_model_has_none_of_it_in_memory_of_its_own(
    tmp_path: Path, strategy: Strategy, transport: str, split: str
) -> None:
    """And measures what a process that holds the whole model does."""
    strategy = dataclasses.replace(strategy, partitions=2, split=split, optimizer=optim("sgd", lr=0.05))  # type: ignore[call-arg]  # which each of them has
    result = jobs.run(tmp_path, strategy, Local(transport=transport), task="jobs:wide_and_mapped", epochs=1, seed=99)
    model = jobs.wide().model()
    model.load_state_dict(jobs.weights(tmp_path))
    measured = measure(dataclasses.replace(jobs.wide(), test=jobs.data), model)
    assert result["test_loss"] == pytest.approx(measured.loss, rel=1e-6)
    assert result["test_accuracy"] == measured.accuracy


def test_an_evaluator_leaves_what_it_was_built_with_before_parameters_come() -> None:
    settings = Job(task="digits", strategy=Downpour(partitions=2)).settings()
    flat = FlatModule(build_on_disk(jobs.wide(), 0).model)
    files = {one.data_ptr() for one in flat.trained}
    computes = cannot("compute")
    context = Context(roles.EVALUATOR, 0, settings, jobs.wide(), 0, flat, lambda _: computes)
    plan = Plan(settings, flat.layout, (), jobs.SAMPLES)
    served_reader(context).attach(plan, plain_arena(flat.held, 0, 1))
    assert files.isdisjoint(one.data_ptr() for one in flat.trained)


def test_a_result_says_that_partitions_have_built_more_than_their_part(tmp_path: Path) -> None:
    strategy = Downpour(replicas=1, partitions=2, split="stages", optimizer=optim("sgd", lr=0.05))
    result = jobs.run(tmp_path, strategy, task="jobs:of_an_array", epochs=1, evaluate_every=0)
    assert "built more than its own part" in result["split"]["told"]  # type: ignore[index]  # a dict
    assert "'1.weight', 1,440,000 bytes, was not made by an operation" in result["split"]["told"]  # type: ignore[index]  # a dict


def test_partitions_take_the_devices_of_a_machine_in_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[int] = []

    def place(device: str, number: int) -> object:
        assert device == "cuda"
        asked.append(number)
        raise UsageError("seen")

    monkeypatch.setattr(process, "placed", place)
    settings = Job(task="mine", strategy=Downpour(replicas=2, partitions=3, shards=3)).settings()
    for role in ("replica 0.0", "replica 0.2", "replica 1.0", "replica 1.1"):
        one = process.RoleProcess.__new__(process.RoleProcess)
        vars(one).update(role=role, spec=SimpleNamespace(settings=settings, device="cuda"))
        with pytest.raises(UsageError, match="seen"):
            one._device()
    assert asked == [0, 2, 3, 4]
