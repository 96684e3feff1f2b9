"""State that a script keeps (`replica.keep()`), as bytes of a checkpoint and back. Nothing is pickled."""

from __future__ import annotations

import gc
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from types import SimpleNamespace
from typing import Any, Protocol, runtime_checkable

import msgspec
import torch
from torch.optim.lr_scheduler import LRScheduler

from distbelief.core.effects import SCRIPT
from distbelief.core.values import shown
from distbelief.errors import CheckpointError, UsageError
from distbelief.record.checkpoints import SCRIPT_LIMIT
from distbelief.runtime.server_optimizer import ServerOptimizer

TAKES = (
    "an object with state_dict() and load_state_dict(), None, bool, int (of 64 bits), float, str, bytes or a dense "
    "tensor, and lists, tuples and dictionaries of these"
)


@runtime_checkable
class HasState(Protocol):
    """An object with a state to save and to load, such as a scheduler, a module or a scaler."""

    def state_dict(self) -> Mapping[str, Any]:
        """Return the state."""
        ...

    def load_state_dict(self, state_dict: Any) -> object:
        """Go on with a state."""
        ...


class KeptState(msgspec.Struct, frozen=True):
    """All that a script keeps at a moment, with its epoch and the options of its parameter groups."""

    epoch: int
    """-1 for a script without a loop over epochs."""
    groups: Any
    """Options of each group of each optimizer: its rate, and those that a scheduler has added."""
    states: dict[str, Any]
    """States of objects, by name."""
    values: dict[str, Any]


def packed(value: object, where: str) -> Any:
    """Turn a value into plain data for msgpack: scalars, and lists that begin with the name of a type.

    A value of another type is refused. `where` names the value in the error.

    >>> packed({"best": (1, 0.5)}, "it")
    ['dict', [['best', ['tuple', [1, 0.5]]]]]
    """
    if value is None or type(value) in (bool, str, bytes):
        return value
    if type(value) is int and -(1 << 63) <= value < 1 << 64:
        return value
    if isinstance(value, float):  # numpy's float64 is a float
        return float(value)
    if isinstance(value, torch.Tensor) and value.layout is torch.strided and not value.is_quantized:
        plain = value.detach().cpu().contiguous()
        bytes_of = plain.reshape(-1).view(torch.uint8).numpy().tobytes() if plain.numel() else b""
        return ["tensor", [str(plain.dtype).removeprefix("torch."), list(plain.shape), value.is_cpu, bytes_of]]
    if isinstance(value, dict):
        kind = "counter" if isinstance(value, Counter) else "dict"
        items = value.items()
        return [kind, [[packed(key, f"a key of {where}"), packed(item, f"{where}[{key!r}]")] for key, item in items]]
    # no subclasses: a named tuple would come back as a tuple
    if isinstance(value, list | tuple) and type(value) in (list, tuple):
        return [type(value).__name__, [packed(item, f"{where}[{number}]") for number, item in enumerate(value)]]
    raise UsageError(f"keep(): {where} is {shown(value)}, of type {type(value).__name__}: it takes {TAKES}")


def unpacked(tree: Any, device: torch.device) -> Any:
    """Undo `packed`. A tensor that was not on the host is moved to a device.

    >>> unpacked(["dict", [["best", ["tuple", [1, 0.5]]]]], torch.device("cpu"))
    {'best': (1, 0.5)}
    """
    if not isinstance(tree, list):
        return tree
    kind, held = tree
    if kind == "tensor":
        name, shape, on_host, data = held
        dtype = getattr(torch, name)
        plain = torch.frombuffer(bytearray(data), dtype=dtype) if data else torch.empty(0, dtype=dtype)
        return plain.reshape(shape).to("cpu" if on_host else device)
    if kind in ("dict", "counter"):
        entries = {unpacked(key, device): unpacked(item, device) for key, item in held}
        return Counter(entries) if kind == "counter" else entries
    values = [unpacked(item, device) for item in held]
    return tuple(values) if kind == "tuple" else values


def packed_whole(value: object, name: str) -> Any:
    """Return `packed(value)`; refuse a value that contains itself."""
    try:
        return packed(value, name)
    except RecursionError:
        raise UsageError(f"keep(): {name} is nested too deeply, or contains itself") from None


class KeptValues(SimpleNamespace):
    """The values that a script keeps, by name; to keep another value, assign it.

    >>> values = KeptValues(best=1.0)
    >>> values.best = 0.5
    >>> values
    KeptValues(best=0.5)
    """

    def __setattr__(self, name: str, value: object) -> None:
        if name not in self.__dict__:
            raise UsageError(
                f"{name} = {shown(value)}: keep() has {', '.join(self.__dict__) or 'no value'}: pass it there too"
            )
        super().__setattr__(name, value)


class KeptObjects:
    """The objects and values that a script keeps, which computes on this device."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self.active = False
        """True once the script keeps anything, if only the rates of its optimizers."""
        self._objects: dict[str, HasState] = {}
        self._values: dict[str, KeptValues] = {}

    def keep(self, objects: Mapping[str, object], saved: KeptState | None) -> KeptValues:
        """Keep objects and values by name, give them their `saved` state, and return the values.

        `saved` is the state in the checkpoint from which the job goes on. A name that is kept already, or is not in the
        checkpoint, is refused.
        """
        self.active, values = True, dict[str, object]()
        for name, item in objects.items():
            if name in self._objects or name in self._values:
                raise UsageError(f"keep({name}=...) a second time: each name is kept once")
            if isinstance(item, ServerOptimizer):
                raise UsageError(f"keep({name}=...) of an optimizer: the shards and their checkpoints have its state")
            stateful = isinstance(item, HasState) and not isinstance(item, type)
            known = None if saved is None else saved.states if stateful else saved.values
            if known is not None and name not in known:
                assert saved is not None
                listed = ", ".join([*saved.states, *saved.values]) or "only the rates"
                raise UsageError(
                    f"keep({name}=...): the run has kept {listed}, and no such {'object' if stateful else 'value'}: "
                    "keep the same, or begin another run with --init-from"
                )
            if not stateful:
                packed_whole(item, name)
                values[name] = item if known is None else unpacked(known[name], self._device)
                continue
            self._objects[name] = item  # type: ignore[assignment]  # it has a state
            if known is not None:
                self._load(name, unpacked(known[name], self._device))
        space = KeptValues(**values)
        self._values |= dict.fromkeys(values, space)
        return space

    def _load(self, name: str, state: Any) -> None:
        try:
            self._objects[name].load_state_dict(state)
        except Exception as error:
            raise UsageError(
                f"keep({name}=...): the object does not accept the state that was kept ({type(error).__name__}: "
                f"{error}): build it as it was, or begin another run with --init-from"
            ) from error

    def load_options(self, optimizers: Sequence[ServerOptimizer], saved: KeptState) -> None:
        """Give parameter groups the rates and other options that they had when the checkpoint was made."""
        for optimizer, groups in zip(optimizers, unpacked(saved.groups, self._device), strict=False):
            every = zip(optimizer.param_groups, optimizer.first_options, groups, strict=False)
            for group, first, options in every:
                group.update({**first, **options})  # `first` undoes what a scheduler's constructor has set

    def check_names(self, saved: KeptState) -> None:
        """Refuse to go on without something that was kept."""
        names = self._objects.keys() | self._values.keys()
        if gone := [name for name in (*saved.states, *saved.values) if name not in names]:
            raise UsageError(
                f"the run has kept {gone[0]!r}, but the script does not: call replica.keep({gone[0]}=...) before the "
                "loop, or begin another run with --init-from"
            )

    def unkept_scheduler(self, optimizers: Iterable[ServerOptimizer]) -> LRScheduler | None:
        """Return a scheduler of one of these optimizers, if the script keeps no scheduler."""
        if any(isinstance(item, LRScheduler) for item in self._objects.values()):
            return None
        scheduled = {id(optimizer) for optimizer in optimizers}
        # an optimizer does not know its schedulers: ReduceLROnPlateau leaves no trace in it
        schedulers = (item for item in gc.get_objects() if issubclass(type(item), LRScheduler))
        return next((item for item in schedulers if id(getattr(item, "optimizer", None)) in scheduled), None)

    def part(self, epoch: int, optimizers: Iterable[ServerOptimizer]) -> dict[str, torch.Tensor]:
        """Return everything as a part of a checkpoint; refuse more than `SCRIPT_LIMIT` bytes."""
        groups = [
            [
                {
                    name: value
                    for name, value in group.items()
                    if name != "params" and (name not in first or value != first[name])
                }
                for group, first in zip(optimizer.param_groups, optimizer.first_options, strict=True)
            ]
            for optimizer in optimizers
        ]
        states = {name: packed_whole(dict(item.state_dict()), name) for name, item in self._objects.items()}
        values = {name: packed_whole(getattr(space, name), name) for name, space in self._values.items()}
        state = KeptState(epoch, packed(groups, "a parameter group"), states, values)
        data = msgspec.msgpack.encode(state)
        if len(data) > SCRIPT_LIMIT:
            sizes = {name: len(msgspec.msgpack.encode(item)) for name, item in {**states, **values}.items()}
            most = max(sizes, key=lambda name: sizes[name])
            raise UsageError(
                f"keep(): {len(data):,} bytes, of which {most} has {sizes[most]:,}; the limit is {SCRIPT_LIMIT:,}: "
                "keep less, or save it to a file of your own"
            )
        return {SCRIPT: torch.frombuffer(bytearray(data), dtype=torch.uint8)}


def kept_of(part: Mapping[str, torch.Tensor], checkpoint: str) -> KeptState | None:
    """Decode a script's part of a checkpoint, or raise a `CheckpointError`; None where there is no part."""
    if not part:
        return None
    try:
        return msgspec.msgpack.decode(part[SCRIPT].numpy().tobytes(), type=KeptState)
    except (KeyError, msgspec.DecodeError) as error:
        raise CheckpointError(
            f"the script's part of {checkpoint} cannot be read: {error}; delete that folder to go on from the "
            "checkpoint before it"
        ) from error
