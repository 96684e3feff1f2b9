"""The tensors of a module by their names, and what a user's script has made of them since."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import torch
from torch import nn

from distbelief.errors import UsageError
from distbelief.sharding.layout import Kind, Tensor


def named_tensors(module: nn.Module) -> Iterable[tuple[Kind, str, torch.Tensor]]:
    """Every parameter and persistent buffer by every name it has in `state_dict`."""
    persistent = module.state_dict(keep_vars=True)
    for name, parameter in module.named_parameters(remove_duplicate=False):
        yield ("parameter" if parameter.requires_grad else "frozen"), name, parameter
    for name, buffer in module.named_buffers(remove_duplicate=False):
        if name in persistent:
            yield "buffer", name, buffer


class UsersTensors:
    """The tensors that the names of a user's module are.

    Args:
        module: the user's.
        tensors: of its layout.
        given: the tensors that its names are now.
    """

    def __init__(self, module: nn.Module, tensors: Sequence[Tensor], given: Mapping[str, torch.Tensor]) -> None:
        self._module, self._tensors, self._given = module, tensors, given
        self._modules: list[nn.Module] = []
        self._count = 0
        self._places: list[tuple[Mapping[str, torch.Tensor | None], str, torch.Tensor]] = []
        self._look(given)

    def _look(self, named: Mapping[str, torch.Tensor]) -> None:
        """Keep where each tensor is, so that a step need not ask for all names."""
        self._modules = [*self._module.modules()]
        self._count = self._counted()
        self._places = []
        for one in self._tensors:
            path, _, name = one.name.rpartition(".")
            owner, tensor = self._module.get_submodule(path), named[one.name]
            self._places.append((owner._buffers if one.kind == "buffer" else owner._parameters, name, tensor))

    def _counted(self) -> int:
        held = (some.values() for one in self._modules for some in (one._parameters, one._buffers))
        return sum(value is not None for some in held for value in some)

    def tensors(self) -> list[torch.Tensor]:
        """Those of the layout, in its order, as they are now.

        Raises:
            UsageError: one is new, gone or replaced, or of another shape, dtype or device.
        """
        if (
            [*map(id, self._module.modules())] != [*map(id, self._modules)]
            or self._counted() != self._count
            or any(name not in held or held[name] is not tensor for held, name, tensor in self._places)
        ):
            named = {name: tensor for _, name, tensor in named_tensors(self._module)}
            self._check_names(named)
            self._look(named)
        for one, (_, _, tensor) in zip(self._tensors, self._places, strict=True):
            if tuple(tensor.shape) != one.shape or str(tensor.dtype) != f"torch.{one.dtype}":
                was, now = f"{one.dtype} {[*one.shape]}", f"{tensor.dtype} {[*tensor.shape]}".removeprefix("torch.")
                raise self._another(f"{one.kind} {one.name!r} is {now}, and was {was}")
        return [tensor for _, _, tensor in self._places]

    def _check_names(self, named: Mapping[str, torch.Tensor]) -> None:
        for one in self._tensors:
            if (now := named.get(one.name)) is None:
                raise self._another(f"{one.kind} {one.name!r} is gone")
            before = self._given[one.name]
            if (now is not before and one.kind != "buffer") or now.device != before.device:
                raise self._another(f"{one.kind} {one.name!r} was replaced")
        for name in named:
            if name not in self._given:
                raise self._another(f"{name!r} is new")

    def _another(self, what: str) -> UsageError:
        return UsageError(
            f"{what}: the model is not that which replica.optimizer() was given; change it before that (what its first "
            "call makes, by a minibatch through it)"
        )
