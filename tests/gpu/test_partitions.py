"""Split models on GPUs, which partitions take in turn; what can be shown without is in machines/test_devices.py."""

from __future__ import annotations

import copy
import gc
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from splitting import Played, check_buffers, play_programs
from torch import nn

import distbelief as db
from benchmarks import BENCHES
from distbelief.core.optimizer import optim
from distbelief.fabric.crossings import Crossings, segment_bytes
from distbelief.fabric.pinned import DeviceCopies, device_copies
from distbelief.lab.cost import splitting
from distbelief.lab.cost.options import SplitRequest
from distbelief.places.processes.local import Local
from distbelief.split.options import Split
from distbelief.split.plan import apply
from distbelief.split.play import cut_minibatch
from distbelief.split.program import build
from distbelief.split.tracing import trace
from distbelief.tasks import as_data, resolve
from distbelief.tasks.worker import on_device, placed

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device here")
DEVICE = torch.device("cuda", 0)


# what crosses


def copies() -> DeviceCopies:
    made = device_copies(DEVICE)
    assert made is not None
    return made


def test_memory_is_pinned_until_who_uses_it_is_gone() -> None:
    memory, owner = torch.zeros(1 << 20, dtype=torch.uint8), copies()
    assert not memory.is_pinned()
    owner.pin(memory)
    owner.pin(memory)  # which it is already
    assert memory.is_pinned()
    del owner
    gc.collect()
    assert not memory.is_pinned()


def test_memory_that_cannot_be_registered_leaves_no_error_behind() -> None:
    memory, owner = torch.zeros(1 << 20, dtype=torch.uint8), copies()
    owner.pin(memory[4096 : 1 << 19])
    copies().pin(memory)  # a part of it is
    assert float(torch.ones(3, device=DEVICE).sum()) == 3


@pytest.mark.parametrize("pinned", [True, False])
def test_large_tensors_cross_as_they_are_while_the_device_is_busy(pinned: bool) -> None:
    """16 MB, step after step, behind work of the device that takes longer than the host needs to ask for it."""
    size, (first, second) = 4 << 20, (copies(), copies())
    memory = torch.zeros(segment_bytes(2, [4 * size]), dtype=torch.uint8)
    if pinned:
        first.pin(memory)
    ends = [Crossings(memory, partition, 2, [4 * size], copies=own) for partition, own in enumerate((first, second))]
    busy, got = torch.randn(4096, 4096, device=DEVICE), list[torch.Tensor]()
    for number in range(1, 9):
        for one in ends:
            one.begin(number)
        for _ in range(4):
            busy = (busy @ busy).tanh()
        value = torch.full((size,), float(number), device=DEVICE) + 0 * busy[0, 0]
        assert ends[0].give(0, 1, value)
        taken = ends[1].take(0, torch.float32, (size,))
        got.append(taken)
    assert [(float(one.min()), float(one.max())) for one in got] == [(float(n), float(n)) for n in range(1, 9)]


# a split model

CASES = [
    ("mnist", "neurons"), ("mnist-lenet", "conv*=filters,fc*=neurons"), ("mnist-lenet", "conv*=regions,fc*=neurons"),
    ("mnist-alexnet", "groups"), ("mnist-inception", "branches"), ("mnist-gru", "time"), ("mnist-local", "regions"),
    ("gpt-tiny", "stages"), ("gpt-tiny", "neurons"),
]  # fmt: skip


@pytest.mark.parametrize(("name", "way"), CASES)
def test_a_split_model_is_the_whole_one(name: str, way: str) -> None:
    """In float64; it is built on the host, and each partition moves its part to its device."""
    task = resolve(name)
    torch.manual_seed(0)
    model, (inputs, targets) = task.model().double(), as_data(task.train()).batch(torch.arange(3))
    inputs = inputs.double() if isinstance(inputs, torch.Tensor) and inputs.is_floating_point() else inputs
    graph = apply(Split.parse(way, 2), trace(model, (inputs,)), task.loss, targets)
    whole = copy.deepcopy(model).to(DEVICE)
    value = task.loss(whole(on_device(inputs, DEVICE)), on_device(targets, DEVICE))
    value.backward()
    programs = [build(graph, partition, model, DEVICE) for partition in range(2)]
    batches = cut_minibatch((on_device(inputs, DEVICE),), on_device(targets, DEVICE), 1)
    played = Played(programs, 0.0, [])
    results = play_programs(programs, batches, played.gave)
    assert sum(one.loss for one in results if one.loss is not None) == pytest.approx(value.item(), abs=1e-9)
    got = played.gradients()
    for own, parameter in whole.named_parameters():
        if parameter.grad is not None:
            torch.testing.assert_close(got[own], parameter.grad, atol=1e-9, rtol=0)
    check_buffers(played, whole, 1e-9)


def test_a_parameter_that_is_moved_keeps_its_hooks() -> None:
    called: list[int] = []
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    model[1].weight.register_hook(lambda _: called.append(1))
    graph = apply(
        Split.parse("stages", 2), trace(model, (torch.zeros(2, 4),)), nn.functional.mse_loss, torch.zeros(2, 4)
    )
    program = build(graph, 1, model, DEVICE)
    assert program.module.get_parameter("1.weight") is model[1].weight
    assert (model[0].weight.device.type, model[1].weight.device) == ("cpu", DEVICE)
    program.module.get_parameter("1.weight").sum().backward()
    assert called == [1]


# jobs


def weights(folder: Path, strategy: Any, place: Local, device: str) -> dict[str, torch.Tensor]:
    result = place.run(db.Job(task="digits", strategy=strategy, epochs=2, device=device, out=str(folder)))
    assert result["outcome"] == "done"
    return load_file(str(Path(result["run"]) / "model.safetensors"))


PLACES = {"shared": Local(), "served": Local(path="served"), "tcp": Local(transport="tcp")}
STRATEGIES = {
    "downpour": (db.Downpour, {"replicas": 1, "shards": 2}, ("shared", "served", "tcp")),
    "synchronous": (db.Synchronous, {"replicas": 1, "shards": 2}, ("shared", "tcp")),
    "allreduce": (db.Allreduce, {"replicas": 2}, ("shared",)),
    "single": (db.Single, {}, ("shared", "tcp")),
}
JOBS = [(name, place) for name, (_, _, places) in STRATEGIES.items() for place in places]


@pytest.mark.parametrize(
    "more", [{"split": "stages"}, {"split": "neurons"}, {"split": "stages", "microbatches": 4}], ids=str
)
@pytest.mark.parametrize(("name", "place"), JOBS)
def test_partitions_on_gpus_train_what_whole_replicas_do(
    name: str, place: str, more: dict[str, Any], tmp_path: Path
) -> None:
    """On one GPU too, which they share then; whole replicas compute on the host."""
    make, options, _ = STRATEGIES[name]
    optimizer = db.optim("sgd", lr=0.05)
    whole = weights(tmp_path / "cpu", make(optimizer=optimizer, **options), Local(), "cpu")
    split = make(optimizer=optimizer, partitions=2, **options, **more)
    there = weights(tmp_path / "cuda", split, PLACES[place], "cuda")
    for own, value in whole.items():
        torch.testing.assert_close(there[own], value, rtol=1e-3, atol=1e-4)


SCRIPT = """
import sys, torch, distbelief as db
from torch.nn.functional import cross_entropy

replica = db.join()
data = db.tasks.digits().train()
torch.manual_seed(0)
model = db.tasks.digits().model()
model = replica.split(model.to(replica.device) if sys.argv[1] == "moved" else model, db.Split("stages", partitions=2))
optimizer = replica.optimizer(model)
for x, y in replica.batches(data, batch_size=32):
    assert x.device.type == y.device.type == replica.device.type
    optimizer.zero_grad()
    cross_entropy(model(x), y).backward()
    optimizer.step()
assert {one.device for one in model.parameters()} == {replica.device}
"""


@pytest.mark.parametrize("way", ["moved", "left on the host"])
def test_a_script_splits_a_model_wherever_it_is(way: str, tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(SCRIPT)
    found = {}
    for device in ("cpu", "cuda"):
        job = db.Job("script", db.Downpour(replicas=1, partitions=2), device=device, out=str(tmp_path / device))
        Local().launch(job, [str(tmp_path / "script.py"), way])
        found[device] = load_file(tmp_path / device / "model.safetensors")
    for own, value in found["cpu"].items():
        torch.testing.assert_close(found["cuda"][own], value, rtol=1e-3, atol=1e-4)


def test_partitions_predict_what_the_whole_model_does(tmp_path: Path) -> None:
    run = tmp_path / "run"
    db.run(db.Job("digits", db.Single(db.optim("adam", lr=0.003)), epochs=2, out=run))
    found = {}
    for device, more in (("cpu", {}), ("cuda", {"partitions": 2, "split": "stages"})):
        out = tmp_path / f"{device}.safetensors"
        db.predict(run, "digits", out, replicas=1, device=device, **more)
        found[device] = load_file(out)["outputs"]
    torch.testing.assert_close(found["cuda"], found["cpu"], rtol=1e-3, atol=1e-4)


# what is measured


def test_segments_are_timed_by_events() -> None:
    asked = SplitRequest(seconds=0.2, device="cuda")
    found = splitting.measure(resolve("mnist"), Split.parse("stages", 2), asked, optim("sgd")).cost
    assert placed("cuda", 0) == DEVICE
    assert found.whole.computes > 0
    assert all(partition.computes > 0 and partition.update > 0 for partition in found.partition_costs)


def test_the_benchmark_of_split_models_runs_on_a_device() -> None:
    bench = BENCHES["split"]
    result = bench.run(bench.options(quick=True, quiet=True, repeats=1, models=("mlp",), device="cuda"))
    assert all(one > 0 for one in result["crossing_seconds"])
    assert all(one > 0 for one in result["models"]["mlp"]["samples_per_second"].values())
