"""Partitions that compute on a device, with a stand-in for CUDA whose copies are torn until they are waited for."""

from __future__ import annotations

import contextlib
import dataclasses
import gc
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from splitting import Gave, play_programs
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from distbelief.core import roles
from distbelief.core.conversations.partitioning import Boundary
from distbelief.core.effects import RECEIVE, Batch, Receive, Send, Steps
from distbelief.core.settings import Settings
from distbelief.fabric.crossings import Crossings, segment_bytes
from distbelief.fabric.pinned import CudaDevice, DeviceCopies, pin
from distbelief.replica.siblings import Siblings
from distbelief.replica.split_compute import SplitCompute
from distbelief.runtime.split_model import SplitCall, SplitModel
from distbelief.split.options import Split
from distbelief.split.plan import apply
from distbelief.split.play import cut_minibatch
from distbelief.split.program import PartitionProgram, build
from distbelief.split.tracing import trace
from distbelief.strategies import Downpour, Single
from distbelief.strategies.context import Context, Stage
from distbelief.strategies.partition import PartitionTrainer, part_of, split_graph
from distbelief.tasks import Task
from distbelief.tasks.flat import layout_of
from distbelief.tasks.task import TensorData

CPU, META = torch.device("cpu"), torch.device("meta")
TORN = 0x5A
"""What a byte is while it is copied."""


@dataclass(eq=False)
class Copy:
    """A copy that was begun."""

    to: torch.Tensor
    source: torch.Tensor
    value: torch.Tensor
    leaves: bool
    """Whether it is to the host."""


class StandIn(CudaDevice):
    """CUDA as one must take it: what leaves is torn until it was waited for, and what comes may be read until then."""

    def __init__(self, refuses: bool = False) -> None:
        super().__init__(CPU)
        self.refuses = refuses
        self.registered: list[tuple[int, int]] = []
        self.unregistered: list[int] = []
        self.under_way: list[Copy] = []
        self.waiting: Callable[[Copy], None] = lambda _: None

    def register(self, memory: torch.Tensor) -> bool:
        self.registered.append((memory.data_ptr(), memory.nbytes))
        return not self.refuses

    def unregister(self, memory: torch.Tensor) -> None:
        self.unregistered.append(memory.data_ptr())

    def _is_pinned(self, tensor: torch.Tensor) -> bool:
        at = tensor.data_ptr()
        return any(start <= at and at + tensor.nbytes <= start + size for start, size in self.registered)

    def copy(self, to: torch.Tensor, source: torch.Tensor) -> Any:
        leaves = self._is_pinned(to)
        assert not to.numel() or leaves != self._is_pinned(source), (
            "one end of it is on the device, and the other in pinned memory"
        )
        begun = Copy(to, source, source.clone(), leaves)
        if leaves:
            to.view(-1).view(torch.uint8).fill_(TORN)
        else:
            to.copy_(source)
        self.under_way.append(begun)
        return begun

    def wait(self, event: Any) -> None:
        self.waiting(event)
        if event.leaves:
            event.to.copy_(event.value)
        self._check(event)
        self.under_way.remove(event)

    def _check(self, one: Copy) -> None:
        assert one.leaves or torch.equal(one.source, one.value), "it was written over before it was read"

    def check(self) -> None:
        """Nothing that has not been waited for was written over."""
        for one in self.under_way:
            self._check(one)


# shared memory

SLOTS, SHAPE = (48, 48), (3, 4)


def ends(cuda: StandIn) -> list[Crossings]:
    memory = torch.zeros(segment_bytes(2, SLOTS), dtype=torch.uint8)
    copies = [DeviceCopies(CPU, cuda) for _ in range(2)]
    copies[0].pin(memory)
    made = [Crossings(memory, partition, 2, SLOTS, copies=own) for partition, own in enumerate(copies)]
    for one in made:
        one.begin(1)
    return made


def value(number: float) -> torch.Tensor:
    return torch.arange(12.0).reshape(SHAPE) + number


def test_what_leaves_a_device_is_told_when_it_is_there(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("distbelief.fabric.crossings.LOOK_SECONDS", 0.0)
    cuda, seen = StandIn(), list[object]()
    first, second = ends(cuda)
    cuda.waiting = lambda _: seen.append(second.take(0, torch.float32, SHAPE))
    assert first.give(0, 1, value(1))
    assert seen == [None]
    cuda.waiting = lambda _: None
    taken = second.take(0, torch.float32, SHAPE)
    assert taken is not None
    assert torch.equal(taken, value(1))


def test_a_slot_is_free_when_it_was_read(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("distbelief.fabric.crossings.LOOK_SECONDS", 0.0)
    cuda, gave = StandIn(), list[bool]()
    first, second = ends(cuda)
    assert first.give(0, 1, value(1))
    taken = second.take(0, torch.float32, SHAPE)
    first.begin(2)
    first.begin(3)
    cuda.waiting = lambda _: gave.append(first.give(0, 1, value(3)))
    second.begin(2)
    assert gave == [False]
    cuda.waiting = lambda _: None
    assert first.give(0, 1, value(3))
    assert taken is not None
    assert torch.equal(taken, value(1))  # it is on the device, whatever the slot holds by now
    cuda.check()


# memory


@pytest.mark.long
def test_memory_is_registered_until_who_uses_it_is_gone() -> None:
    cuda, memory = StandIn(), torch.zeros(256, dtype=torch.uint8)
    address, copies = memory.data_ptr(), DeviceCopies(CPU, cuda)
    copies.pin(memory)
    copies.pin(memory[:0])  # which CUDA refuses to register
    assert cuda.registered == [(address, 256)]
    del memory
    assert cuda.unregistered == []
    del copies
    gc.collect()
    assert cuda.unregistered == [address]


@pytest.mark.long
def test_memory_that_cuda_refuses_is_not_unregistered() -> None:
    cuda = StandIn(refuses=True)
    copies = DeviceCopies(CPU, cuda)
    copies.pin(torch.zeros(256, dtype=torch.uint8))
    del copies
    gc.collect()
    assert (len(cuda.registered), cuda.unregistered) == (1, [])


class Owner:
    """Who uses memory."""


@pytest.mark.parametrize("error", [0, 712])
@pytest.mark.long
def test_cuda_is_asked_for_what_it_has(error: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Registered by address and length; undone when all copies are; an error that it keeps is taken from it."""
    asked: list[object] = []
    runtime = SimpleNamespace(
        cudaHostRegister=lambda *given: asked.append(given) or error,
        cudaHostUnregister=lambda address: asked.append(address),
    )

    def kernel(*_: object, **__: object) -> None:
        asked.append("kernel")
        raise RuntimeError("CUDA error: part or all of the memory is registered already")

    monkeypatch.setattr(torch.cuda, "cudart", lambda: runtime)
    monkeypatch.setattr(torch.cuda, "device", lambda _: contextlib.nullcontext())
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: asked.append("synchronize"))
    memory, owner = torch.zeros(256, dtype=torch.uint8), Owner()
    monkeypatch.setattr(torch, "ones", kernel)
    pin(memory, CudaDevice(torch.device("cuda", 0)), owner)
    del owner
    gc.collect()
    registers = (memory.data_ptr(), 256, 0)
    assert asked == ([registers, "kernel"] if error else [registers, "synchronize", memory.data_ptr()])


# a split replica


def layered() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(1, 4, 3), nn.Tanh(), nn.Conv2d(4, 4, 3), nn.Tanh(), nn.Flatten(), nn.Linear(64, 8), nn.Tanh(),
        nn.Linear(8, 3),
    )  # fmt: skip


def normed() -> nn.Module:
    return nn.Sequential(layered()[:1], nn.BatchNorm2d(4), layered()[1:])


def task_of(make: Callable[[], nn.Module]) -> Task:
    chance = torch.Generator().manual_seed(0)
    data = TensorData(torch.randn(20, 1, 8, 8, generator=chance), torch.arange(20) % 3)
    return Task(model=make, train=lambda: data, loss=nn.functional.cross_entropy)


def settings_of(split: str, **more: Any) -> Settings:
    return Settings(batch_size=4, strategy=Single(partitions=2, split=split, **more))


@dataclass
class Partitions:
    """The partitions of one replica."""

    parts: list[PartitionTrainer]
    computes: list[SplitCompute]
    order: list[str] = field(default_factory=list)

    def play(self, batch: Batch) -> list[dict[str, torch.Tensor]]:
        """A step of all, by turns; returns the gradients that each holds."""
        stories = {partition: one.compute(batch, wait) for partition, one in enumerate(self.computes)}
        while stories:
            for partition, story in list(stories.items()):
                if not self._go_on(partition, story):
                    del stories[partition]
        return [
            {name: one.grad.clone() for name, one in part.program.module.named_parameters() if one.grad is not None}
            for part in self.parts
        ]

    def _go_on(self, partition: int, story: Steps[Any]) -> bool:
        """Play a story until it waits; False where it is over."""
        for effect in story:
            if isinstance(effect, Receive):
                return True
            if isinstance(effect, Send) and isinstance(effect.message, Boundary):
                self.computes[1 - partition].arrive(effect.message)
        return False


def wait() -> Steps[None]:
    yield RECEIVE


def partitions(split: str, shared: bool, cuda: StandIn | None, **more: Any) -> Partitions:
    torch.manual_seed(1)
    task, settings = task_of(layered), settings_of(split, **more)
    model = layered()
    graph = split_graph(task, model, settings)
    own = roles.replicas(settings.mesh)
    programs = [part_of(graph, model, settings, role, False)[1] for role in own]
    parts = [PartitionTrainer(task, program, settings) for program in programs]
    memory = torch.zeros(segment_bytes(2, parts[0].slots), dtype=torch.uint8)
    for part in parts:
        part.copies = DeviceCopies(CPU, cuda) if cuda else None
    if cuda and shared and parts[0].copies:
        parts[0].copies.pin(memory)
    computes = []
    for partition, (role, part) in enumerate(zip(own, parts, strict=True)):
        crossings = Crossings(memory, partition, 2, part.slots, copies=part.copies) if shared else None
        computes.append(SplitCompute(Siblings(role, 0, 2, ""), part, crossings))
        computes[-1].begin(1)
    return Partitions(parts, computes)


@pytest.mark.parametrize("shared", [True, False], ids=["shared", "sent"])
@pytest.mark.parametrize(
    ("split", "more"),
    [
        ("stages", {}),
        ("5=columns,7=rows,*=0", {}),
        ("0=filters,2=filters,*=neurons", {}),
        ("0=regions,2=regions", {}),
        ("samples", {}),
        ("stages", {"microbatches": 2}),
    ],
    ids=["send", "sum", "gather", "halo", "samples", "microbatches"],
)
def test_a_split_model_on_devices_is_that_on_the_host(
    split: str, more: dict[str, Any], shared: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever crosses, by whichever carrier: nothing that is torn or was written over is computed with."""
    monkeypatch.setattr("distbelief.fabric.crossings.LOOK_SECONDS", 0.0)
    cuda = StandIn()
    here, there = partitions(split, shared, None, **more), partitions(split, shared, cuda, **more)
    for number in range(5):
        expected, found = here.play(Batch(0, number)), there.play(Batch(0, number))
        cuda.check()
        for one, other in zip(expected, found, strict=True):
            assert one.keys() == other.keys()
            assert all(torch.equal(one[name], other[name]) for name in one)
    assert any(expected)


def test_a_partition_registers_its_own_part_of_what_is_shared() -> None:
    task, settings = task_of(layered), settings_of("stages")
    settings = dataclasses.replace(settings, strategy=Downpour(2, 2, partitions=2, split="stages"))
    model = layered()
    graph, cuda = split_graph(task, model, settings), StandIn()
    flat, program = part_of(graph, model, settings, "replica 1.0", False)
    part = PartitionTrainer(task, program, settings)
    part.copies = DeviceCopies(CPU, cuda)
    length, asked = segment_bytes(2, part.slots), list[torch.Tensor]()

    def share(size: int) -> torch.Tensor:
        asked.append(torch.zeros(size, dtype=torch.uint8))
        return asked[-1]

    context = Context(
        "replica 1.0", 0, settings, task, 20, flat, lambda _: lambda *_: None, Stage(crossings=share), part=part
    )
    assert context.split is not None
    assert [len(one) for one in asked] == [2 * length]
    assert cuda.registered == [(asked[0].data_ptr() + length, length)]


# what is moved


def on_meta(program: PartitionProgram) -> Iterator[str]:
    """The tensors of a program that are not on the meta device."""
    for name, one in (*program.module.named_parameters(), *program.module.named_buffers()):
        if one.device != META:
            yield name
    for layer in program.layers:
        yield from (name for name, one in (*layer.named_parameters(), *layer.named_buffers()) if one.device != META)


@pytest.mark.parametrize("split", ["stages", "filters"])
def test_a_partition_moves_its_own_part_and_nothing_else(split: str) -> None:
    torch.manual_seed(1)
    model = normed()
    task, settings = task_of(normed), settings_of(split)
    graph = split_graph(task, model, settings)
    moved: list[int] = []
    with Watched(moved):
        flat, program = part_of(graph, model, settings, "replica 0.1", False, META)
        part = PartitionTrainer(task, program, settings)
    assert [*on_meta(part.program)] == []
    assert {one.device for one in (*model.parameters(), *model.buffers())} == {CPU}
    assert part.device == flat.device == META
    counted = [one for layer in part.program.layers for one in layer.buffers()]  # batches, by each partition for itself
    held = {
        id(one): one.nbytes for one in (*part.program.module.parameters(), *part.program.module.buffers(), *counted)
    }
    assert sum(moved) == sum(held.values()) < sum(one.nbytes for one in (*model.parameters(), *model.buffers()))


class Watched(TorchDispatchMode):
    """Notes the bytes of each tensor that is moved to the meta device with values of its own."""

    def __init__(self, moved: list[int]) -> None:
        super().__init__()
        self._moved = moved

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = func(*args, **(kwargs or {}))
        if func is torch.ops.aten._to_copy.default and found.device == META != args[0].device:
            self._moved.append(found.nbytes)
        return found


class Written(nn.Module):
    """One whose tracing writes down where it was: a constant, a device among arguments, a buffer of no checkpoint."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(6, 8), nn.Linear(8, 3)
        self.register_buffer("mask", torch.ones(8), persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        where = next(self.parameters()).device
        value = self.first(x) * torch.arange(8, device=where)
        value = value + torch.zeros_like(value, device=where)
        value = value + torch.zeros(x.shape[0], 8, device=where)
        return self.last(value * self.mask)


def test_what_tracing_wrote_down_is_of_the_device_that_computes() -> None:
    """The meta device refuses an operation with a tensor of another device."""
    model, inputs = Written(), torch.zeros(3, 6)
    traced = trace(model, (inputs,))
    graph = apply(Split.parse("stages", 2), traced, nn.functional.cross_entropy, torch.zeros(3, dtype=torch.int64))
    programs = [build(graph, partition, model, META) for partition in range(2)]
    batches, gave = cut_minibatch((inputs.to(META),), torch.zeros(3, dtype=torch.int64, device=META), 1), list[Gave]()
    partitions = play_programs(programs, batches, gave)
    assert {one.tensor.device for one in gave} == {META}
    assert [output.device for one in partitions for output in one.outputs.values() if output is not None] == [META]


def test_a_script_may_leave_the_whole_model_on_the_host() -> None:
    model, split = layered(), Split.parse("stages", 2)
    script = SplitModel(model, SplitCall(split), lambda: Batch(0, 0), bool, META)
    sample = torch.zeros(2, 1, 8, 8), torch.zeros(2)
    flat, part = script.cut(
        1, lambda: sample, settings_of("stages"), 4, lambda whole, graph: layout_of(whole, None, graph.pieces), None
    )
    assert (part.device, flat.device) == (META, META)
    assert {one.device for one in script.parameters()} == {META}
