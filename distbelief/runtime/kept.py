"""State of a script that goes on in the next attempt or life (`replica.keep()`): its objects and values, as bytes of a
checkpoint and back. Nothing is pickled.
"""

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
    "tensor, and "
    "lists, tuples and dictionaries of these"
)


@runtime_checkable
class HasState(Protocol):
    """Object with a state to save and to load: a scheduler, a module, a scaler."""

    def state_dict(self) -> Mapping[str, Any]:
        """Return the state with which it is to go on."""
        ...

    def load_state_dict(self, state_dict: Any) -> object:
        """Go on with it."""
        ...


class KeptState(msgspec.Struct, frozen=True):
    """All that a script keeps at a moment, with the epoch that it was in, and the options of its parameter groups."""

    epoch: int
    """-1 where it has no loop over epochs."""
    groups: Any
    """Options of each group of each optimizer: the rate, and what a scheduler has added."""
    states: dict[str, Any]
    """States of objects, by their names."""
    values: dict[str, Any]


def packed(value: object, where: str) -> Any:
    """A value as msgpack has it: what is no scalar as its kind and what is in it.

    Args:
        value: of a script.
        where: it is kept, as an error says it.

    Raises:
        UsageError: it, or something in it, is of another type.

    >>> packed({"best": (1, 0.5)}, "it")
    ['dict', [['best', ['tuple', [1, 0.5]]]]]
    """
    if value is None or type(value) in (bool, str, bytes):
        return value
    if type(value) is int and -(1 << 63) <= value < 1 << 64:
        return value
    if isinstance(value, float):  # numpy's float64 is one
        return float(value)
    if isinstance(value, torch.Tensor) and value.layout is torch.strided and not value.is_quantized:
        plain = value.detach().cpu().contiguous()
        bytes_of = plain.reshape(-1).view(torch.uint8).numpy().tobytes() if plain.numel() else b""
        return ["tensor", [str(plain.dtype).removeprefix("torch."), list(plain.shape), value.is_cpu, bytes_of]]
    if isinstance(value, dict):
        kind = "counter" if isinstance(value, Counter) else "dict"
        items = value.items()
        return [kind, [[packed(key, f"a key of {where}"), packed(one, f"{where}[{key!r}]")] for key, one in items]]
    if isinstance(value, list | tuple) and type(value) in (list, tuple):
        return [type(value).__name__, [packed(one, f"{where}[{number}]") for number, one in enumerate(value)]]
    raise UsageError(f"keep(): {where} is {shown(value)}, of type {type(value).__name__}: it takes {TAKES}")


def unpacked(tree: Any, device: torch.device) -> Any:
    """Undo `packed`. A tensor that was not in the host's memory is made on a device.

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
        made = {unpacked(key, device): unpacked(one, device) for key, one in held}
        return Counter(made) if kind == "counter" else made
    values = [unpacked(one, device) for one in held]
    return tuple(values) if kind == "tuple" else values


def packed_whole(value: object, name: str) -> Any:
    """A value as `packed` has it.

    Raises:
        UsageError: as there; or it is in itself.
    """
    try:
        return packed(value, name)
    except RecursionError:
        raise UsageError(f"keep(): {name} is nested too deeply, or in itself") from None


class KeptValues(SimpleNamespace):
    """The values that a script keeps, by name; what is assigned to one is what is kept.

    >>> values = KeptValues(best=1.0)
    >>> values.best = 0.5
    >>> values
    KeptValues(best=0.5)
    """

    def __setattr__(self, name: str, value: object) -> None:
        if name not in self.__dict__:
            raise UsageError(
                f"{name} = {shown(value)}: keep() was given {', '.join(self.__dict__) or 'no value'}: give it there too"
            )
        super().__setattr__(name, value)


class KeptObjects:
    """Objects and values that one script keeps.

    Args:
        device: where it computes.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self.asked = False
        """True where it keeps anything, if only the rates of its optimizers."""
        self._objects: dict[str, HasState] = {}
        self._values: dict[str, KeptValues] = {}

    def keep(self, objects: Mapping[str, object], saved: KeptState | None) -> KeptValues:
        """Keep objects and values, and have them be what was saved of them.

        Args:
            objects: by name.
            saved: in the checkpoint that the job goes on from.

        Returns:
            The values.

        Raises:
            UsageError: a name is kept already, was not kept when the checkpoint was made, or what it names cannot be.
        """
        self.asked, values = True, dict[str, object]()
        for name, one in objects.items():
            if name in self._objects or name in self._values:
                raise UsageError(f"keep({name}=...) a second time: each name is kept once")
            if isinstance(one, ServerOptimizer):
                raise UsageError(f"keep({name}=...) of an optimizer: its state is on the shards, and in checkpoints")
            stateful = isinstance(one, HasState) and not isinstance(one, type)
            known = None if saved is None else saved.states if stateful else saved.values
            if known is not None and name not in known:
                assert saved is not None
                listed = ", ".join([*saved.states, *saved.values]) or "the rates alone"
                raise UsageError(
                    f"keep({name}=...): the run has kept {listed}, as objects or values, and no such "
                    f"{'object' if stateful else 'value'}: keep the same, or begin another run with --init-from"
                )
            if not stateful:
                packed_whole(one, name)
                values[name] = one if known is None else unpacked(known[name], self._device)
                continue
            self._objects[name] = one  # type: ignore[assignment]  # it has a state
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
                f"keep({name}=...): it does not take the state that was kept ({type(error).__name__}: {error}): have "
                "it be made as it was, or begin another run with --init-from"
            ) from error

    def load_options(self, optimizers: Sequence[ServerOptimizer], saved: KeptState) -> None:
        """Have parameter groups go on with the rates that they had, and with what else the script had changed."""
        for optimizer, groups in zip(optimizers, unpacked(saved.groups, self._device), strict=False):
            every = zip(optimizer.param_groups, optimizer.first_options, groups, strict=False)
            for group, first, options in every:
                group.update({**first, **options})  # a scheduler has written to it as it was made

    def check_names(self, saved: KeptState) -> None:
        """Refuse to go on without something that was kept.

        Raises:
            UsageError: it is not among what the script keeps.
        """
        names = self._objects.keys() | self._values.keys()
        if gone := [name for name in (*saved.states, *saved.values) if name not in names]:
            raise UsageError(
                f"the run has kept {gone[0]!r}, and the script does not: replica.keep({gone[0]}=...) before the loop, "
                "or begin another run with --init-from"
            )

    def unkept_scheduler(self, optimizers: Iterable[ServerOptimizer]) -> LRScheduler | None:
        """A scheduler that goes by one of these optimizers, where the script keeps none."""
        if any(isinstance(one, LRScheduler) for one in self._objects.values()):
            return None
        own = {id(one) for one in optimizers}
        # an optimizer does not know its schedulers: ReduceLROnPlateau leaves no trace in it
        found = (one for one in gc.get_objects() if issubclass(type(one), LRScheduler))
        return next((one for one in found if id(getattr(one, "optimizer", None)) in own), None)

    def part(self, epoch: int, optimizers: Iterable[ServerOptimizer]) -> dict[str, torch.Tensor]:
        """All of it as a part of a checkpoint.

        Raises:
            UsageError: something in it cannot be kept, or it is more than `SCRIPT_LIMIT` bytes.
        """
        groups = [
            [
                {
                    name: one
                    for name, one in group.items()
                    if name != "params" and (name not in first or one != first[name])
                }
                for group, first in zip(optimizer.param_groups, optimizer.first_options, strict=True)
            ]
            for optimizer in optimizers
        ]
        states = {name: packed_whole(dict(one.state_dict()), name) for name, one in self._objects.items()}
        values = {name: packed_whole(getattr(space, name), name) for name, space in self._values.items()}
        state = KeptState(epoch, packed(groups, "a parameter group"), states, values)
        data = msgspec.msgpack.encode(state)
        if len(data) > SCRIPT_LIMIT:
            sizes = {name: len(msgspec.msgpack.encode(one)) for name, one in {**states, **values}.items()}
            most = max(sizes, key=lambda name: sizes[name])
            raise UsageError(
                f"keep(): {len(data):,} bytes, of which {most} has {sizes[most]:,}; {SCRIPT_LIMIT:,} are the most: "
                "keep less, or save it to a file of your own"
            )
        return {SCRIPT: torch.frombuffer(bytearray(data), dtype=torch.uint8)}


def kept_of(part: Mapping[str, torch.Tensor], checkpoint: str) -> KeptState | None:
    """Decode a script's part of a checkpoint; None where there is none.

    Raises:
        CheckpointError: it is something else.
    """
    if not part:
        return None
    try:
        return msgspec.msgpack.decode(part[SCRIPT].numpy().tobytes(), type=KeptState)
    except (KeyError, msgspec.DecodeError) as error:
        raise CheckpointError(
            f"what a script has kept in {checkpoint} cannot be read: {error}; delete that folder to go on from the "
            "checkpoint before it"
        ) from error
