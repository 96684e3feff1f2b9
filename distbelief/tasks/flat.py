"""The flat vector of a module: its parameters and buffers as views into contiguous bytes, and the arithmetic of a step on them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from distbelief.core.layout import ITEM_SIZES, Entry, Kind, Layout, Range, Tensor, lay_out
from distbelief.errors import UsageError

GROUP_OPTIONS = ("lr", "weight_decay")
"""What a parameter group may set for itself."""


def layout_of(module: nn.Module, groups: Sequence[Mapping[str, Any]] | None = None) -> Layout:
    """The layout of a module: trained parameters by (dtype, group), buffers, frozen parameters; a tied tensor lies once, under its first name.

    Args:
        module: any module whose parameters are dense and materialised.
        groups: as `torch.optim` takes them, `{"params": [...], "lr": ..., "weight_decay": ...}`; all in one group where None.

    Raises:
        UsageError: a dtype that cannot be trained, two tensors on one memory, a parameter group that names a foreign parameter, an option that a
            group cannot set.

    >>> layout_of(nn.Linear(3, 2)).parameters
    8
    """
    tensors: list[Tensor] = []
    aliases: dict[str, str] = {}
    first: dict[int, str] = {}
    places: dict[tuple[Any, ...], str] = {}
    options, member = _groups(module, groups)
    for kind, name, tensor in _named(module):
        dtype = str(tensor.dtype).removeprefix("torch.")
        if id(tensor) in first:
            aliases[name] = first[id(tensor)]
            continue
        if tensor.layout is not torch.strided or tensor.is_meta or dtype not in ITEM_SIZES:
            raise UsageError(f"{kind} {name!r} is {tensor.layout} {tensor.dtype} on {tensor.device}: it must be a dense real tensor with values")
        first[id(tensor)] = name
        place = (tensor.data_ptr(), tensor.shape, tensor.stride())
        if tensor.numel() and place in places:
            raise UsageError(f"{name!r} and {places[place]!r} are two tensors on one memory: tie them by assigning the parameter, not its .data")
        places[place] = name
        tensors.append(Tensor(name, tuple(tensor.shape), dtype, kind, member.get(id(tensor), 0) if kind == "parameter" else 0))
    return lay_out(tensors, options, aliases)


def _named(module: nn.Module) -> Iterable[tuple[Kind, str, torch.Tensor]]:
    """Every parameter and persistent buffer by every name it has in `state_dict`."""
    persistent = module.state_dict(keep_vars=True)
    for name, parameter in module.named_parameters(remove_duplicate=False):
        yield ("parameter" if parameter.requires_grad else "frozen"), name, parameter
    for name, buffer in module.named_buffers(remove_duplicate=False):
        if name in persistent:
            yield "buffer", name, buffer


def _groups(module: nn.Module, groups: Sequence[Mapping[str, Any]] | None) -> tuple[list[dict[str, float]], dict[int, int]]:
    """The options of each parameter group, and the group of each parameter by its id."""
    if groups is None:
        return [{}], {}
    names = {id(parameter): name for name, parameter in module.named_parameters()}
    options: list[dict[str, float]] = []
    member: dict[int, int] = {}
    for number, group in enumerate(groups):
        own = {key: value for key, value in group.items() if key != "params"}
        for key in own:
            if key not in GROUP_OPTIONS:
                raise UsageError(f"parameter group {number} sets {key!r}; a group may set {', '.join(GROUP_OPTIONS)}, the rest is the job's")
        parameters = group["params"]
        for parameter in [parameters] if isinstance(parameters, torch.Tensor) else parameters:
            if id(parameter) not in names:
                raise UsageError(f"parameter group {number} has a tensor of shape {list(parameter.shape)} that is no parameter of the model")
            if id(parameter) in member:
                raise UsageError(f"{names[id(parameter)]!r} is in parameter groups {member[id(parameter)]} and {number}; it may be in one")
            member[id(parameter)] = number
        options.append({key: float(value) for key, value in own.items()})
    missing = [names[id(p)] for p in module.parameters() if p.requires_grad and id(p) not in member]
    if missing:
        raise UsageError(f"parameter {missing[0]!r} is in no parameter group: put it in one, or set its requires_grad to False")
    return options, member


class FlatModule:
    """A module whose parameters and buffers live in a flat vector; what a story asks of its vectors.

    On a GPU the module lives in a flat vector of the device, and `swap` and `outgoing` copy between it and the host's vectors, which are pinned.

    Args:
        module: already on its device.
        groups: parameter groups, as for `layout_of`.
    """

    def __init__(self, module: nn.Module, groups: Sequence[Mapping[str, Any]] | None = None) -> None:
        self.module = module
        self.layout = layout_of(module, groups)
        self.device = next(module.parameters()).device
        tensors = {name: tensor for _, name, tensor in _named(module)}
        self._tensors = [tensors[entry.tensor.name] for entry in self.layout.entries]
        self._trained = [t for t, e in zip(self._tensors, self.layout.entries, strict=True) if e.tensor.kind == "parameter"]
        self._current = -1
        self._gradients: list[torch.Tensor] = []
        self._parameters: list[torch.Tensor] = []
        self._live = torch.empty(0)

    def bind(self, gradients: Sequence[torch.Tensor], parameters: Sequence[torch.Tensor]) -> None:
        """Use these vectors (1-D uint8, `layout.total` bytes each): slots to accrue into, and vectors to compute with."""
        self._gradients, self._parameters = list(gradients), list(parameters)
        self._current = -1
        on_host = self.device.type == "cpu"
        self._working = self._gradients if on_host else [torch.zeros_like(g, device=self.device) for g in gradients]
        self._slots = [[v for v, e in zip(self._views(w), self.layout.entries, strict=True) if e.tensor.kind == "parameter"] for w in self._working]
        if not on_host:
            for vector in (*self._gradients, *self._parameters):
                _pin(vector)
            self._live = torch.empty(self.layout.total, dtype=torch.uint8, device=self.device)
        # the frozen parameters are fetched once, into the first vector
        homes = [self._views(p if on_host else self._live) for p in self._parameters]
        self._alternatives = [
            [first if entry.tensor.kind == "frozen" else view for first, view, entry in zip(homes[0], home, self.layout.entries, strict=True)]
            for home in homes
        ]

    def _views(self, vector: torch.Tensor) -> list[torch.Tensor]:
        return [_view(vector, entry) for entry in self.layout.entries]

    def initial(self, slot: int) -> None:
        """Write the model's own values into a gradient slot."""
        for tensor, view in zip(self._tensors, self._views(self._working[slot]), strict=True):
            view.copy_(tensor.detach())
        if self.device.type != "cpu":
            self._gradients[slot].copy_(self._working[slot])

    def swap(self, landing: int) -> None:
        """Compute with parameter vector `landing` from here on; the module's tensors stay the same objects."""
        if self.device.type != "cpu":
            # the frozen parameters are fetched once, into the first vector, and come with the first swap
            moved = self.layout.total if self._current < 0 else self.layout.moving
            self._live[:moved].copy_(self._parameters[landing][:moved], non_blocking=True)
        if landing == self._current or (self._current >= 0 and self.device.type != "cpu"):
            self._current = landing
            return
        self._current = landing
        for tensor, view in zip(self._tensors, self._alternatives[landing], strict=True):
            tensor.data = view

    def accrue(self, slot: int, first: bool) -> None:
        """Add the step's gradient to a slot, or begin the slot with it; a parameter without one counts as zero."""
        for view, parameter in zip(self._slots[slot], self._trained, strict=True):
            if parameter.grad is None:
                if first:
                    view.zero_()
            elif first:
                view.copy_(parameter.grad)
            else:
                view.add_(parameter.grad)

    def descend(self, rate: float) -> None:
        """One step of plain SGD on the model's own parameters."""
        with torch.no_grad():
            for parameter in self._trained:
                if parameter.grad is not None:
                    parameter.add_(parameter.grad, alpha=-rate)

    def carry_buffers(self, slot: int) -> None:
        """Write the model's buffers behind the gradient of a slot; from a GPU, the slot itself goes to the host here."""
        if self.device.type != "cpu":
            self._gradients[slot].copy_(self._working[slot])
        for entry, tensor in zip(self.layout.entries, self._tensors, strict=True):
            if entry.tensor.kind == "buffer":
                _view(self._gradients[slot], entry).copy_(tensor)

    def outgoing(self, slot: int, part: Range) -> torch.Tensor:
        """A range of a gradient slot."""
        return self._gradients[slot][part.start : part.stop]


def _pin(vector: torch.Tensor) -> None:
    """Register host memory with CUDA, so that copies run at full speed and beside compute; where that fails they are only slower."""
    if vector.nbytes and not vector.is_pinned():
        torch.cuda.cudart().cudaHostRegister(vector.data_ptr(), vector.nbytes, 0)


def _view(vector: torch.Tensor, entry: Entry) -> torch.Tensor:
    tensor = entry.tensor
    return vector[entry.start : entry.start + tensor.size].view(getattr(torch, tensor.dtype)).view(tensor.shape)
