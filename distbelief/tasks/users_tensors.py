"""The tensors of a module by name, and those of a user's script, into which fetched values are copied.

The script may write to them. A write changes the count that autograd keeps of each tensor; `.data = ...` changes its
memory. Writes through `.data` and numpy change neither, so values are compared with the fetched ones too: always for a
small model, else in the first steps and every now and then.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import torch
from torch import nn

from distbelief.errors import UsageError
from distbelief.sharding.layout import Kind, Tensor


def named_tensors(module: nn.Module) -> Iterable[tuple[Kind, str, torch.Tensor]]:
    """Yield every parameter and persistent buffer by each of its names in `state_dict`."""
    persistent = module.state_dict(keep_vars=True)
    for name, parameter in module.named_parameters(remove_duplicate=False):
        yield ("parameter" if parameter.requires_grad else "frozen"), name, parameter
    for name, buffer in module.named_buffers(remove_duplicate=False):
        if name in persistent:
            yield "buffer", name, buffer


SMALL, FIRST, EVERY = 1 << 20, 20, 50
"""Most bytes of a model compared in each step; a larger one is compared in the first 20 steps and every 50th."""
_AS_WHOLE_NUMBERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


class UsersTensors:
    """The current tensors of a user's module, in the order of its layout."""

    def __init__(self, module: nn.Module, tensors: Sequence[Tensor], named: Mapping[str, torch.Tensor]) -> None:
        self._module, self._tensors, self._given = module, tensors, named
        self._kinds = [
            (tensor, torch.Size(tensor.shape), getattr(torch, tensor.dtype), named[tensor.name].device)
            for tensor in tensors
        ]
        self._held: list[tuple[Mapping[str, object], list[object], list[int]]] = []
        """Members of each module (modules, parameters, buffers), kept alive so that their ids stay unique."""
        self._parameters = [at for at, tensor in enumerate(tensors) if tensor.kind != "buffer"]
        self._moving = [at for at, tensor in enumerate(tensors) if tensor.kind != "frozen"]
        self._small = sum(named[tensor.name].nbytes for tensor in tensors) <= SMALL
        self._steps = 0
        self._values: Sequence[torch.Tensor] = ()
        """Values that were copied last."""
        self._marks: list[tuple[int, int]] = []
        self._targets: list[torch.Tensor] = []
        """Tensors that are fetched, detached."""
        self.now: list[torch.Tensor] = []
        """Tensors in the order of the layout, as of the last look at names."""
        self._look(named)

    def _look(self, named: Mapping[str, torch.Tensor]) -> None:
        """Note the members of all modules, so that a step need not look up all names."""
        both = [held for part in self._module.modules() for held in (part._modules, part._parameters, part._buffers)]
        self._held = [(held, [*held.values()], [*map(id, held.values())]) for held in both]
        self.now = [named[tensor.name] for tensor in self._tensors]
        self._targets = []

    def follow(self) -> None:
        """Look up the names again if members have changed.

        A tensor that is new, gone or replaced, or has another shape, dtype or device, raises a `UsageError`.
        """
        named, now = {}, self.now
        if any([*map(id, held.values())] != ids for held, _, ids in self._held):
            named = {name: tensor for _, name, tensor in named_tensors(self._module)}
            self._check_names(named)
            now = [named[tensor.name] for tensor in self._tensors]
        for (declared, shape, dtype, device), tensor in zip(self._kinds, now, strict=True):
            if tensor.device != device:
                raise self._another(f"{declared.kind} {declared.name!r} is on {tensor.device}, and was on {device}")
            if tensor.shape != shape or tensor.dtype is not dtype:
                was = f"{declared.dtype} {[*declared.shape]}"
                is_now = f"{tensor.dtype} {[*tensor.shape]}".removeprefix("torch.")
                raise self._another(f"{declared.kind} {declared.name!r} is {is_now}, and was {was}")
        if named:
            self._look(named)

    def _check_names(self, named: Mapping[str, torch.Tensor]) -> None:
        for tensor in self._tensors:
            if (now := named.get(tensor.name)) is None:
                raise self._another(f"{tensor.kind} {tensor.name!r} is gone")
            before = self._given[tensor.name]
            if (now is not before and tensor.kind != "buffer") or now.device != before.device:
                raise self._another(f"{tensor.kind} {tensor.name!r} was replaced")
        for name in named:
            if name not in self._given:
                raise self._another(f"{name!r} is new")

    def _another(self, what: str) -> UsageError:
        return UsageError(
            f"{what}: the model has changed since replica.optimizer(); change it before (run a minibatch through it "
            "first, if its first call makes tensors)"
        )

    def copy(self, values: Sequence[torch.Tensor], some: Sequence[int] | None = None) -> None:
        """Copy values into the tensors numbered `some`; by default into all but the frozen ones."""
        if some is None:
            self._targets = self._targets or [self.now[at].detach() for at in self._moving]
            torch._foreach_copy_(self._targets, [values[at] for at in self._moving])
        elif some:
            torch._foreach_copy_([self.now[at].detach() for at in some], [values[at] for at in some])
        self._values, self._marks = values, self._marked()

    def _marked(self) -> list[tuple[int, int]]:
        """Return for each parameter marks that most writes change."""
        return [(tensor._version, tensor.data_ptr()) for tensor in (self.now[at] for at in self._parameters)]

    def written(self) -> list[str]:
        """Return the parameters whose values are no longer those copied into them."""
        self._steps += 1
        if (marks := self._marked()) != self._marks:
            self._targets = []  # a tensor may have moved to other memory
        elif not (self._small or self._steps <= FIRST or self._steps % EVERY == 0):
            return []
        written = [self._tensors[at].name for at in self._parameters if not _same(self.now[at], self._values[at])]
        if not written:
            self._marks = marks
        return written

    def keep(self, *kinds: Kind) -> None:
        """Take the current values of some kinds of tensors as copied values."""
        # there are no marks before the first copy
        for tensor, now, value in zip(self._tensors, self.now, self._values, strict=False):
            if tensor.kind in kinds:
                value.copy_(now.detach())
        self._marks = self._marked()


def _same(first: torch.Tensor, second: torch.Tensor) -> bool:
    """Return whether two tensors have the same bits, so that NaN equals itself."""
    kind = _AS_WHOLE_NUMBERS[first.itemsize]
    return torch.equal(first.detach().view(kind), second.view(kind))
