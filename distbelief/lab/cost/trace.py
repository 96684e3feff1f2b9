"""Traces of a training iteration on fake tensors, which know only shapes: layers, multiply-adds and all allocations."""

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
"""Name of operations outside of layers: those of a model's own `forward`, and the loss."""
WHOLE = "(model)"
"""Name of the only layer, if the model itself is one."""
COUNTED = 2
"""Samples with which multiply-adds are counted; a batch norm refuses a single one."""
FEW = (2, 4)
"""Samples of the two minibatches that are computed if fake tensors fail."""
MAPPED = 32 << 20
"""Size from which glibc returns free memory to the kernel, which clears it for each use."""
PROBE = 1 << 14
"""Elements of the vector that shows an optimizer's state."""

INPUT, PARAMETERS, GRADIENTS = "input batch", "parameters", "gradients"
STATE, MAPS, MAP_GRADIENTS = "optimizer state", "feature maps", "their gradients"
KINDS = (INPUT, PARAMETERS, GRADIENTS, STATE, MAPS, MAP_GRADIENTS)
"""Kinds of an iteration's memory.

Parameters include buffers. Gradients of feature maps include work space of the backward pass and the update.
"""


class Layer(msgspec.Struct, frozen=True):
    """Properties of one layer."""

    name: str
    kind: str
    output: tuple[int, ...]
    parameters: int
    multiply_adds: int
    calls: int

    @property
    def uncounted(self) -> bool:
        """Return whether it has parameters and its operations are unknown."""
        return self.parameters > 0 and not self.multiply_adds


class MemoryTrace(msgspec.Struct, frozen=True):
    """Bytes of an iteration with minibatches of one size."""

    batch_size: int
    maps: dict[str, int]
    """Feature maps of each layer that the backward pass needs."""
    gradients: dict[str, int]
    """Gradients of each layer's output."""
    memory: dict[str, int]
    """Bytes by kind at the peak."""

    @property
    def peak(self) -> int:
        """Return the bytes at the peak."""
        return sum(self.memory.values())


class Tracer:
    """Tracer of a task's training iterations.

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
        """Finished traces, by samples and by the optimizer's vectors."""
        self.note = ""
        """Why real samples are computed instead of fake ones, and which layers are opaque; "" without either."""
        try:
            self.layers = self._describe()
        except _Failed as failed:
            self._fakes = False
            self.note = (
                f"{failed}: fake tensors do not suffice, so memory is extrapolated from computing "
                f"{FEW[0]} and {FEW[1]} samples"
            )
            try:
                self.layers = self._describe()
            except _Failed as again:
                raise TrainingError(f"task {task.reference!r}: {again}") from again
        if self._closed:
            closed = f"what {', '.join(self._closed)} computes is counted between layers, as TorchScript is opaque"
            self.note = f"{self.note}; {closed}" if self.note else closed

    def follow(self, batch_size: int, optimizer: Optimizer) -> MemoryTrace:
        """Trace an iteration after the first, so that the optimizer has its state.

        If fake tensors fail, two small minibatches are computed, and each allocation is extrapolated along a line.
        """
        return self._iteration(batch_size, _vectors(optimizer)).trace(batch_size)

    def mapped(self, batch_size: int) -> dict[str, int]:
        """Return the bytes of allocations of `MAPPED` or more, by kind.

        There are none if the minibatch cannot be computed.
        """
        try:
            return self._iteration(batch_size, (0.0, 0.0)).mapped()
        except TrainingError:
            return {}

    def _iteration(self, batch_size: int, vectors: tuple[float, float]) -> _Followed:
        if not self._fakes:
            low, high = (self._once(size, vectors) for size in FEW)
            return _continued(low, high, batch_size)
        return self._once(batch_size, vectors)

    def _once(self, batch_size: int, vectors: tuple[float, float]) -> _Followed:
        if (batch_size, vectors) not in self._seen:
            self._seen[batch_size, vectors] = self._followed(batch_size, vectors)
        return self._seen[batch_size, vectors]

    def _followed(self, batch_size: int, vectors: tuple[float, float]) -> _Followed:
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
                reason = " ".join(str(error).split())
                raise TrainingError(
                    f"task {self._task.reference!r}: a minibatch of {batch_size} raised {type(error).__name__}: "
                    f"{reason}"
                ) from error
            torch.empty(round(work * bytes_trained), dtype=torch.uint8)
        return allocations.followed(hooks.outputs)

    def _iterate(self, model: nn.Module, batch_size: int, allocations: _Allocations) -> None:
        inputs, targets = _of_size(self._sample, batch_size)
        for leaf in tree_leaves((inputs, targets)):
            allocations.call(leaf, INPUT)
        loss = self._task.loss(model(inputs), targets)
        allocations.keep()
        loss.backward()

    def _describe(self) -> list[Layer]:
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
                raise _Failed(f"{calls.last} raised {type(error).__name__}: {error}") from error
            layers = calls.layers(counter.get_total_flops())
            try:
                loss.backward()
            except Exception as error:
                raise _Failed(f"the backward pass raised {type(error).__name__}: {error}") from error
            return layers

    @contextlib.contextmanager
    def _made(self) -> Iterator[nn.Module]:
        """Yield the task's model, of fake tensors if these suffice."""
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
    """Failure of a pass, with its layer and error."""


# floating-point operations, by shapes, of CPU kernels that torch's counter does not know
UNCOUNTED = {
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu: lambda *shapes, **_: int(sdpa_flop(*shapes[:3])),
    # each sample and step multiplies all weights of a direction once
    torch.ops.aten.mkldnn_rnn_layer: lambda sequence, of_inputs, of_state, *_, **__: (
        2 * math.prod(sequence[:2]) * (math.prod(of_inputs) + math.prod(of_state))
    ),
}
Tree = TypeVar("Tree")


def _of_size(sample: Tree, size: int) -> Tree:
    """Return zeros for a minibatch, with the shapes and dtypes of a sample."""

    def zeros(leaf: object) -> object:
        # a fake tensor mode refuses new_zeros on a real tensor
        return torch.zeros((size, *leaf.shape[1:]), dtype=leaf.dtype) if isinstance(leaf, Tensor) else leaf

    sized: Tree = tree_map(zeros, sample)
    return sized


def _vectors(optimizer: Optimizer) -> tuple[float, float]:
    """Return the sizes of an optimizer's state and of its work space, in vectors as long as the parameters.

    >>> from distbelief.core.optimizer import optim
    >>> [tuple(round(size) for size in _vectors(optim(name))) for name in ("sgd", "adam", "lamb")]
    [(0, 0), (2, 0), (2, 2)]
    """
    parameter = torch.zeros(PROBE)
    parameter.grad = torch.ones(PROBE)
    updater = optimizers.build(optimizer, [{"params": [parameter]}])
    step = optimizers.stepper(updater)
    with torch.no_grad():
        step()
        state = [leaf for leaf in tree_leaves(list(updater.state.values())) if isinstance(leaf, Tensor)]
        with _Allocations() as allocations:
            for held in (parameter, parameter.grad, *state):
                allocations.call(held, STATE)
            step()
    kept, needed = sum(leaf.nbytes for leaf in state), allocations.followed({}).at_peak()[MAPS]
    return kept / parameter.nbytes, needed / parameter.nbytes


def _open(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Yield the modules that call hooks, with their names; those of TorchScript do not."""
    return ((name, module) for name, module in model.named_modules() if not isinstance(module, torch.jit.ScriptModule))


class _Calls:
    """Recorder of called modules and their multiply-adds; a layer is a module that calls no other."""

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
    def last(self) -> str:
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
        counted: set[Tensor] = set()
        layers, known = [], 0
        for name, calls in self._called.items():
            if name in self._calling:
                continue
            module = self._model.get_submodule(name)
            new = set(module.parameters()) - counted
            counted |= new
            elements = sum(p.numel() for p in new)
            known += self._operations[name]
            adds = self._operations[name] // 2 // COUNTED
            layers.append(Layer(name or WHOLE, type(module).__name__, self._outputs[name], elements, adds, calls))
        rest = sum(p.numel() for p in set(self._model.parameters()) - counted)
        between = (operations - known) // 2 // COUNTED
        return [*layers, Layer(REST, "", (), rest, between, 1)]


class _Hooks:
    """Hooks that know the current layer, and sum up the bytes of each layer's output gradients."""

    def __init__(self, model: nn.Module, names: list[str]) -> None:
        self.current = REST
        self.outputs: dict[str, int] = dict.fromkeys(names, 0)
        for name, module in model.named_modules():
            layer = name or WHOLE
            if layer in self.outputs:
                module.register_forward_pre_hook(lambda _, __, name=layer: self._enter(name))
                module.register_forward_hook(lambda _, __, output, name=layer: self._leave(name, output))

    def _enter(self, name: str) -> None:
        self.current = name

    def _leave(self, name: str, output: object) -> None:
        self.current = REST
        for leaf in tree_leaves(output):
            if isinstance(leaf, Tensor) and leaf.requires_grad:
                self.outputs[name] += leaf.nbytes


class _Followed(NamedTuple):
    """Trace of an iteration: sizes of its allocations, and when each is made and freed."""

    sizes: list[int]
    kinds: list[str]
    events: list[int]
    """Number of each memory when it is allocated; -1 - number when it is freed."""
    kept: dict[str, int]
    outputs: dict[str, int]
    work: list[tuple[str, int]]

    def at_peak(self) -> dict[str, int]:
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
        """Return bytes by kind of allocations that come from the kernel."""
        sizes: dict[str, int] = {}
        for kind, size in (*zip(self.kinds, self.sizes, strict=True), *self.work):
            if size >= MAPPED and kind not in (PARAMETERS, STATE):  # allocated before
                sizes[kind] = sizes.get(kind, 0) + size
        return sizes

    def trace(self, batch_size: int) -> MemoryTrace:
        return MemoryTrace(batch_size, self.kept, self.outputs, self.at_peak())


def _continued(low: _Followed, high: _Followed, batch_size: int) -> _Followed:
    """Return a trace of any size from those of `FEW` samples, with each memory on the line through its two sizes.

    The peak may then come at another moment. If the two differ in their events, the second's sizes are scaled.
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

    def line(low_size: int, high_size: int) -> int:
        return max(0, round(low_size + part * (high_size - low_size)))

    def lines(ones: Mapping[str, int], others: Mapping[str, int]) -> dict[str, int]:
        return {name: line(ones.get(name, 0), size) for name, size in others.items()}

    return high._replace(
        sizes=[line(*both) for both in zip(low.sizes, high.sizes, strict=True)],
        kept=lines(low.kept, high.kept),
        outputs=lines(low.outputs, high.outputs),
        work=[(kind, line(small, size)) for (_, small), (kind, size) in zip(low.work, high.work, strict=True)],
    )


def _laid_out(func: OpOverload, args: Sequence[Any], result: Any) -> Iterator[int]:
    """Yield the bytes of each memory in which a convolution lays out its operands in blocks of channels.

    Its backward pass lays them out again for each gradient.
    """
    if func is torch.ops.aten.convolution.default:
        yield from (args[0].nbytes, result.nbytes)
    elif func is torch.ops.aten.convolution_backward.default:
        gradient, inputs, wanted = args[0], args[1], args[-1]
        yield from (gradient.nbytes, inputs.nbytes) * sum(wanted[:2])


class _Allocations(TorchDispatchMode):
    """Recorder of each allocation of operations, its kind, and when it is freed."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch has not annotated it
        self.hooks: _Hooks | None = None
        self.kept: dict[str, int] = {}
        self._alive: dict[int, tuple[weakref.ref[torch.UntypedStorage], int]] = {}
        self._sizes: list[int] = []
        self._kinds: list[str] = []
        self._layers: list[str] = []
        self._events: list[int] = []
        self._work: list[tuple[str, int]] = []
        self._kind = MAPS

    def __torch_dispatch__(
        self, func: OpOverload, types: object, args: tuple[Any, ...] = (), kwargs: Mapping[str, object] | None = None
    ) -> object:
        result = func(*args, **(kwargs or {}))
        self._work += [(self._kind, size) for size in _laid_out(func, args, result)]
        for leaf in tree_leaves(result):
            if isinstance(leaf, Tensor):
                self._note(leaf)
        return result

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
        if isinstance(tensor, Tensor):
            self._note(tensor)
            self._kinds[self._alive[tensor.untyped_storage()._cdata][1]] = kind

    def keep(self) -> None:
        """Mark the end of the forward pass: tensors still alive are kept for the backward pass."""
        self._kind, self.kept = MAP_GRADIENTS, {}
        for _, number in self._alive.values():
            if self._kinds[number] == MAPS:
                self.kept[self._layers[number]] = self.kept.get(self._layers[number], 0) + self._sizes[number]

    def followed(self, outputs: dict[str, int]) -> _Followed:
        return _Followed(self._sizes, self._kinds, self._events, self.kept, outputs, self._work)
