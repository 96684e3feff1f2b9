"""An iteration of training, followed operation by operation on fake tensors, which know only their shapes: what each
layer is and multiplies, and every allocation, so that the peak of the memory is known without using any.
"""

from __future__ import annotations

import contextlib
import math
import weakref
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple, TypeVar

import msgspec
import torch
from torch import Tensor, nn
from torch._ops import OpOverload
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map
from torch.utils.flop_counter import FlopCounterMode, sdpa_flop

from distbelief.core.optimizer import Optimizer
from distbelief.errors import TrainingError
from distbelief.server import optimizers
from distbelief.tasks.task import Task
from distbelief.tasks.worker import build_model

REST = "(between layers)"
"""The name of what no layer computes: operations of a model's own `forward`, and the loss."""
WHOLE = "(model)"
"""The name of a model that is one layer."""
COUNTED = 2
"""Samples with which multiply-adds are counted: not one, which a batch norm refuses."""
FEW = (2, 4)
"""Samples of the two minibatches that are computed where fake tensors do not do."""
MAPPED = 32 << 20
"""From how many bytes on glibc keeps no free memory: the kernel has it, and clears it for each use."""
PROBE = 1 << 14
"""Elements of the vector on which it is seen what an optimizer keeps."""

INPUT, PARAMETERS, GRADIENTS = "input batch", "parameters", "gradients"
STATE, MAPS, MAP_GRADIENTS = "optimizer state", "feature maps", "their gradients"
KINDS = (INPUT, PARAMETERS, GRADIENTS, STATE, MAPS, MAP_GRADIENTS)
"""Kinds of what an iteration holds. Buffers are among the parameters, and what a backward pass and an update need as
work space among the gradients of feature maps.
"""


class Layer(msgspec.Struct, frozen=True):
    """What a layer is by itself."""

    name: str
    """In the model, such as "features.0"."""
    kind: str
    """Its class, such as "Conv2d"."""
    output: tuple[int, ...]
    """The shape of what it makes of one sample; () where that is no tensor."""
    parameters: int
    """Elements; those that several layers share are the first one's."""
    multiply_adds: int
    """Of the forward pass of one sample."""
    calls: int
    """How often it is called in a forward pass."""

    @property
    def uncounted(self) -> bool:
        """Whether it has parameters, and nothing that it does with them is known."""
        return self.parameters > 0 and not self.multiply_adds


class MemoryTrace(msgspec.Struct, frozen=True):
    """What an iteration with minibatches of one size holds, in bytes."""

    batch_size: int
    maps: dict[str, int]
    """Of each layer: what of its feature maps is kept for the backward pass."""
    gradients: dict[str, int]
    """Of each layer: the gradients of what it makes."""
    memory: dict[str, int]
    """By kind, in the moment at which the most is held."""

    @property
    def peak(self) -> int:
        """The most that is held at one time."""
        return sum(self.memory.values())


class Tracer:
    """Follows iterations of a task's training loop.

    Args:
        task: whose model and loss are followed.
        sample: inputs and targets of `COUNTED` samples, as the task's data gather them.

    Raises:
        TrainingError: the model cannot compute them.

    >>> from distbelief.core.optimizer import optim
    >>> task = Task(model=lambda: nn.Linear(100, 10), train=lambda: [])
    >>> tracer = Tracer(task, (torch.zeros(2, 100), torch.zeros(2, dtype=torch.int64)))
    >>> [(layer.name, layer.parameters, layer.multiply_adds) for layer in tracer.layers]
    [('(model)', 1010, 1000), ('(between layers)', 0, 0)]
    >>> tracer.follow(8, optim("adam")).memory["input batch"]  # floats, and the targets
    3264
    """

    def __init__(self, task: Task, sample: tuple[object, object]) -> None:
        self._task, self._sample = task, sample
        self._fakes = True
        self._closed: list[str] = []
        self._seen: dict[tuple[int, tuple[float, float]], _Followed] = {}
        """Iterations that were followed, by their samples and what an optimizer keeps and needs."""
        self.note = ""
        """Why layers are followed as they compute, where fake tensors do not do, and which are counted as a whole; ""
        where nothing is to be said.
        """
        try:
            self.layers = self._describe()
        except _Failed as failed:
            self._fakes = False
            self.note = (
                f"{failed}: it needs more than shapes, so memory is what was held as it computed "
                f"{FEW[0]} and {FEW[1]} samples, continued to as many as are asked for"
            )
            try:
                self.layers = self._describe()
            except _Failed as again:
                raise TrainingError(f"task {task.reference!r}: {again}") from again
        if self._closed:
            told = (
                f"what {', '.join(self._closed)} computes is counted between layers: TorchScript cannot be looked into"
            )
            self.note = f"{self.note}; {told}" if self.note else told

    def follow(self, batch_size: int, optimizer: Optimizer) -> MemoryTrace:
        """Follow an iteration that is not the first, so that the optimizer has its state. Where fake tensors do not
        do, two small minibatches are computed, once, and each memory of theirs is continued along a line.

        Args:
            batch_size: samples in the minibatch.
            optimizer: that steps; its state is counted, and its work space at the end.

        Raises:
            TrainingError: the model cannot compute so many samples, such as a batch norm that is given one.
        """
        return self._iteration(batch_size, _vectors(optimizer)).trace(batch_size)

    def mapped(self, batch_size: int) -> dict[str, int]:
        """Bytes by kind of what the passes of an iteration have of the kernel, each time that they need it: those of
        every memory of `MAPPED` or more; nothing of a minibatch that cannot be computed.
        """
        try:
            return self._iteration(batch_size, (0.0, 0.0)).mapped()
        except TrainingError:
            return {}

    def _iteration(self, batch_size: int, vectors: tuple[float, float]) -> _Followed:
        """An iteration with an optimizer that keeps, and needs, so many vectors."""
        if not self._fakes:
            low, high = (self._once(size, vectors) for size in FEW)
            return _continued(low, high, batch_size)
        return self._once(batch_size, vectors)

    def _once(self, batch_size: int, vectors: tuple[float, float]) -> _Followed:
        """The same, which is followed once."""
        if (batch_size, vectors) not in self._seen:
            self._seen[batch_size, vectors] = self._followed(batch_size, vectors)
        return self._seen[batch_size, vectors]

    def _followed(self, batch_size: int, vectors: tuple[float, float]) -> _Followed:
        """An iteration with an optimizer that keeps, and needs, so many vectors."""
        (state, work), allocations = vectors, _Allocations()
        with self._made() as model, allocations:
            hooks = _Hooks(model, [layer.name for layer in self.layers])
            allocations.hooks = hooks
            trained = [p for p in model.parameters() if p.requires_grad]
            for part in (*model.parameters(), *model.buffers()):
                allocations.call(part, PARAMETERS)
            bytes_trained = sum(p.nbytes for p in trained)
            kept = torch.empty(round(state * bytes_trained), dtype=torch.uint8)
            allocations.call(kept, STATE)
            for p in trained:
                p.register_post_accumulate_grad_hook(lambda p: allocations.call(p.grad, GRADIENTS))
            try:
                self._iterate(model, batch_size, allocations)
            except Exception as error:
                told = " ".join(str(error).split())
                raise TrainingError(
                    f"task {self._task.reference!r}: a minibatch of {batch_size} raised {type(error).__name__}: {told}"
                ) from error
            torch.empty(round(work * bytes_trained), dtype=torch.uint8)
        return allocations.followed(hooks.outputs)

    def _iterate(self, model: nn.Module, batch_size: int, allocations: _Allocations) -> None:
        """What a replica computes with a minibatch."""
        inputs, targets = _of_size(self._sample, batch_size)
        for leaf in tree_leaves((inputs, targets)):
            allocations.call(leaf, INPUT)
        loss = self._task.loss(model(inputs), targets)
        allocations.keep()
        loss.backward()

    def _describe(self) -> list[Layer]:
        """The layers in the order in which they are called, and what is between them."""
        counter = FlopCounterMode(display=False, custom_mapping=UNCOUNTED)
        with self._made() as model:
            calls = _Calls(model, counter)
            opened = {name for name, _ in _open(model)}
            self._closed = [
                name or WHOLE
                for name, _ in model.named_modules()
                if name not in opened and (not name or name.rpartition(".")[0] in opened)
            ]
            try:
                with counter:
                    inputs, targets = _of_size(self._sample, COUNTED)
                    loss = self._task.loss(model(inputs), targets)
            except Exception as error:
                raise _Failed(f"{calls.told} raised {type(error).__name__}: {error}") from error
            layers = calls.layers(counter.get_total_flops())
            try:
                loss.backward()
            except Exception as error:
                raise _Failed(f"the way back through the model raised {type(error).__name__}: {error}") from error
            return layers

    @contextlib.contextmanager
    def _made(self) -> Iterator[nn.Module]:
        """The task's model, of fake tensors where these do."""
        if not self._fakes:
            yield build_model(self._task, 0, "cpu").train()
            return
        with FakeTensorMode():
            try:
                model = self._task.model().train()
            except Exception as error:
                raise _Failed(f"building the model raised {type(error).__name__}: {error}") from error
            yield model


class _Failed(Exception):
    """A pass raised: in which layer, and what."""


# floating point operations, by shapes, of what the CPU computes and torch's counter does not know
UNCOUNTED = {
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu: lambda *shapes, **_: int(sdpa_flop(*shapes[:3])),
    # in each step of each sample all weights of a direction are multiplied once
    torch.ops.aten.mkldnn_rnn_layer: lambda given, of_given, of_state, *_, **__: (
        2 * math.prod(given[:2]) * (math.prod(of_given) + math.prod(of_state))
    ),
}
Tree = TypeVar("Tree")


def _of_size(sample: Tree, size: int) -> Tree:
    """As many samples as a minibatch has, of the shapes and dtypes of these."""

    def made(leaf: object) -> object:
        # not new_zeros, which fake tensors refuse of a real one
        return torch.zeros((size, *leaf.shape[1:]), dtype=leaf.dtype) if isinstance(leaf, Tensor) else leaf

    sized: Tree = tree_map(made, sample)
    return sized


def _vectors(optimizer: Optimizer) -> tuple[float, float]:
    """What an optimizer keeps, and what it needs while it steps, in vectors as long as the parameters.

    >>> from distbelief.core.optimizer import optim
    >>> [tuple(round(one) for one in _vectors(optim(name))) for name in ("sgd", "adam", "lamb")]
    [(0, 0), (2, 0), (2, 2)]
    """
    parameter = torch.zeros(PROBE)
    parameter.grad = torch.ones(PROBE)
    made = optimizers.build(optimizer, [{"params": [parameter]}])
    step = optimizers.stepper(made)
    with torch.no_grad():
        step()
        state = [leaf for leaf in tree_leaves(list(made.state.values())) if isinstance(leaf, Tensor)]
        with _Allocations() as allocations:
            for held in (parameter, parameter.grad, *state):
                allocations.call(held, STATE)
            step()
    kept, needed = sum(leaf.nbytes for leaf in state), allocations.followed({}).at_peak()[MAPS]
    return kept / parameter.nbytes, needed / parameter.nbytes


def _open(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """The modules that tell when they are called, with their names: those of TorchScript do not."""
    return ((name, one) for name, one in model.named_modules() if not isinstance(one, torch.jit.ScriptModule))


class _Calls:
    """Writes down which modules are called, and what they multiply; a layer is one that calls no other."""

    def __init__(self, model: nn.Module, counter: FlopCounterMode) -> None:
        self._model, self._counter = model, counter
        self._stack: list[str] = []
        self._called: dict[str, int] = {}
        self._calling: set[str] = set()
        self._operations: dict[str, int] = {}
        self._outputs: dict[str, tuple[int, ...]] = {}
        self._innermost = ""
        for name, module in _open(model):
            module.register_forward_pre_hook(lambda _, __, name=name: self._enter(name))
            module.register_forward_hook(lambda _, __, output, name=name: self._leave(name, output))

    @property
    def told(self) -> str:
        """The layer that was computed last."""
        kind = type(self._model.get_submodule(self._innermost)).__name__
        return f"layer {self._innermost} ({kind})" if self._innermost else f"the model ({kind})"

    def _enter(self, name: str) -> None:
        self._calling.update(self._stack[-1:])
        self._stack.append(name)
        self._innermost = name
        self._operations[name] = self._operations.get(name, 0) - self._counter.get_total_flops()

    def _leave(self, name: str, output: object) -> None:
        self._stack.pop()
        self._called[name] = self._called.get(name, 0) + 1
        self._operations[name] += self._counter.get_total_flops()
        self._outputs[name] = tuple(output.shape[1:]) if isinstance(output, Tensor) else ()

    def layers(self, operations: int) -> list[Layer]:
        """What was called, of a pass with so many floating point operations."""
        counted: set[Tensor] = set()
        layers, known = [], 0
        for name, calls in self._called.items():
            if name in self._calling:
                continue
            module = self._model.get_submodule(name)
            own = set(module.parameters()) - counted
            counted |= own
            elements = sum(p.numel() for p in own)
            known += self._operations[name]
            made = self._operations[name] // 2 // COUNTED
            layers.append(Layer(name or WHOLE, type(module).__name__, self._outputs[name], elements, made, calls))
        rest = sum(p.numel() for p in set(self._model.parameters()) - counted)
        between = (operations - known) // 2 // COUNTED
        return [*layers, Layer(REST, "", (), rest, between, 1)]


class _Hooks:
    """Says which layer is computed, and how large the gradients of what layers make are."""

    def __init__(self, model: nn.Module, names: list[str]) -> None:
        self.current = REST
        self.outputs: dict[str, int] = dict.fromkeys(names, 0)
        for name, module in model.named_modules():
            told = name or WHOLE
            if told in self.outputs:
                module.register_forward_pre_hook(lambda _, __, name=told: self._enter(name))
                module.register_forward_hook(lambda _, __, output, name=told: self._leave(name, output))

    def _enter(self, name: str) -> None:
        self.current = name

    def _leave(self, name: str, output: object) -> None:
        self.current = REST
        for leaf in tree_leaves(output):
            if isinstance(leaf, Tensor) and leaf.requires_grad:
                self.outputs[name] += leaf.nbytes


class _Followed(NamedTuple):
    """An iteration: its memories and when each is made and given back, without what they hold."""

    sizes: list[int]
    kinds: list[str]
    events: list[int]
    """Numbers of memories as they are made, and less than 0 (by one) as they are given back."""
    kept: dict[str, int]
    outputs: dict[str, int]
    """Bytes of what each layer makes."""
    work: list[tuple[str, int]]
    """Kind and bytes of each memory that an operation has by itself while it computes, as far as that is known."""

    def at_peak(self) -> dict[str, int]:
        """What was held by kind when it was the most."""
        held, peak = dict.fromkeys(KINDS, 0), dict[str, int]()
        total = most = 0
        for event in self.events:
            number, sign = (event, 1) if event >= 0 else (-1 - event, -1)
            held[self.kinds[number]] += sign * self.sizes[number]
            total += sign * self.sizes[number]
            if total > most:
                most, peak = total, dict(held)
        return peak

    def mapped(self) -> dict[str, int]:
        """Bytes by kind of the memories that are made in it and are the kernel's."""
        found: dict[str, int] = {}
        for kind, size in (*zip(self.kinds, self.sizes, strict=True), *self.work):
            if size >= MAPPED and kind not in (PARAMETERS, STATE):  # which are there before
                found[kind] = found.get(kind, 0) + size
        return found

    def trace(self, batch_size: int) -> MemoryTrace:
        """What it holds."""
        return MemoryTrace(batch_size, self.kept, self.outputs, self.at_peak())


def _continued(low: _Followed, high: _Followed, batch_size: int) -> _Followed:
    """An iteration of any size by those of `FEW` samples: each memory is on the line through its two sizes, so that the
    most may be held in another moment than with few. Where the two were computed differently, all that the second held
    beside parameters is as many times larger.
    """
    if (low.kinds, low.events) != (high.kinds, high.events):
        same = (PARAMETERS, GRADIENTS, STATE)
        low = high._replace(
            sizes=[
                size if kind in same else size * FEW[0] // FEW[1]
                for size, kind in zip(high.sizes, high.kinds, strict=True)
            ],
            kept={name: size * FEW[0] // FEW[1] for name, size in high.kept.items()},
            work=[(kind, size * FEW[0] // FEW[1]) for kind, size in high.work],
            outputs={name: size * FEW[0] // FEW[1] for name, size in high.outputs.items()},
        )
    part = (batch_size - FEW[0]) / (FEW[1] - FEW[0])

    def line(one: int, other: int) -> int:
        return max(0, round(one + part * (other - one)))

    def lines(ones: Mapping[str, int], others: Mapping[str, int]) -> dict[str, int]:
        return {name: line(ones.get(name, 0), size) for name, size in others.items()}

    return high._replace(
        sizes=[line(*both) for both in zip(low.sizes, high.sizes, strict=True)],
        kept=lines(low.kept, high.kept),
        outputs=lines(low.outputs, high.outputs),
        work=[(kind, line(one, size)) for (_, one), (kind, size) in zip(low.work, high.work, strict=True)],
    )


def _laid_out(func: OpOverload, args: Sequence[Any], made: Any) -> Iterator[int]:
    """Bytes of each memory into which a convolution lays out what it is given and what it makes, in blocks of
    channels; on the way back it does so for each gradient that it is asked for.
    """
    if func is torch.ops.aten.convolution.default:
        yield from (args[0].nbytes, made.nbytes)
    elif func is torch.ops.aten.convolution_backward.default:
        gradient, given, asked = args[0], args[1], args[-1]
        yield from (gradient.nbytes, given.nbytes) * sum(asked[:2])


class _Allocations(TorchDispatchMode):
    """Writes down each memory that operations make, of which kind it is, and when it is given back."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch has not annotated it
        self.hooks: _Hooks | None = None
        self.kept: dict[str, int] = {}
        self._alive: dict[int, tuple[weakref.ref[torch.UntypedStorage], int]] = {}
        """Of each that is there, by its address: its number."""
        self._sizes: list[int] = []
        self._kinds: list[str] = []
        self._layers: list[str] = []
        self._events: list[int] = []
        self._work: list[tuple[str, int]] = []
        self._kind = MAPS

    def __torch_dispatch__(
        self, func: OpOverload, types: object, args: tuple[Any, ...] = (), kwargs: Mapping[str, object] | None = None
    ) -> object:
        """Carry an operation out, and look at what it has made."""
        made = func(*args, **(kwargs or {}))
        self._work += [(self._kind, size) for size in _laid_out(func, args, made)]
        for leaf in tree_leaves(made):
            if isinstance(leaf, Tensor):
                self._note(leaf)
        return made

    def _note(self, tensor: Tensor) -> None:
        storage = tensor.untyped_storage()
        address = storage._cdata
        if address not in self._alive:
            number = len(self._sizes)
            self._alive[address] = weakref.ref(storage, lambda _: self._gone(address)), number
            self._sizes.append(storage.nbytes())
            self._kinds.append(self._kind)
            self._layers.append(self.hooks.current if self.hooks else REST)
            self._events.append(number)

    def _gone(self, address: int) -> None:
        _, number = self._alive.pop(address)
        self._events.append(-1 - number)

    def call(self, tensor: object, kind: str) -> None:
        """Say of which kind a tensor is."""
        if isinstance(tensor, Tensor):
            self._note(tensor)
            self._kinds[self._alive[tensor.untyped_storage()._cdata][1]] = kind

    def keep(self) -> None:
        """The forward pass is over: what is there of it is kept for the backward pass."""
        self._kind, self.kept = MAP_GRADIENTS, {}
        for _, number in self._alive.values():
            if self._kinds[number] == MAPS:
                self.kept[self._layers[number]] = self.kept.get(self._layers[number], 0) + self._sizes[number]

    def followed(self, outputs: dict[str, int]) -> _Followed:
        """What was written down, with the bytes of what each layer makes."""
        return _Followed(self._sizes, self._kinds, self._events, self.kept, outputs, self._work)
