"""A shard's slice of the flat vector, its optimizer, and the arithmetic on them, in place."""

from __future__ import annotations

import functools
import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import NamedTuple, Protocol

import torch

from distbelief.core.conversations.agreement import Squares
from distbelief.core.effects import Payload, Phantom
from distbelief.core.optimizer import GroupOption
from distbelief.core.settings import Plan
from distbelief.server import optimizers
from distbelief.server.layerwise import Layers, Layerwise
from distbelief.server.optimizers import COUNT, MISSED, WHOLE_STEPS, StepPart, step_without
from distbelief.sharding.layout import Layout, Range, Section

MASTERED = (torch.bfloat16, torch.float16)
"""Dtypes whose parameters have float32 masters on the shard, which the optimizer steps."""


class Slice(Protocol):
    """Slice of the parameters that a shard holds; a phantom holds nothing, and knows only lengths."""

    lasts: bool
    """True where it outlives the shard's process."""

    def of(self, model: int) -> Slice:
        """Return the slice of one of several models, each with an optimizer."""

    def fill(self, payload: Payload, frozen: bool) -> None:
        """Take initial values for the moving or the frozen range."""

    def apply(self, sender: str, slot: int, payload: Payload, factor: float, covered: Sequence[Range] = ()) -> None:
        """Make one optimizer step with a push, at `factor` times the base learning rate.

        Parameters outside of all ranges `covered` are left out, or none where it is empty.
        """

    def gather(
        self, sender: str, slot: int, payload: Payload, weight: float, average: bool, covered: Sequence[Range] = ()
    ) -> None:
        """Add a push, times its weight, to the gradient of the next `step`.

        Buffers become the average over the pushes, or this push's; a parameter the mean of the pushes that cover it.
        """

    def set_options(self, options: Sequence[GroupOption]) -> None:
        """Use these options of parameter groups from now on, and the job's elsewhere."""

    def squares(self) -> Squares:
        """Return the squared norms of the parts that are here of cut layers, once all is gathered."""

    def step(self, factor: float, weight: float, norms: Squares = ()) -> None:
        """Make one optimizer step with the gathered sum, times a weight; `norms` are those of cut layers."""

    @property
    def sum_size(self) -> int:
        """Bytes of a `sum`."""

    def sum(self) -> Payload:
        """Return a copy of the gathered sum, as bytes."""

    def take_sum(self, payload: Payload, parts: int) -> None:
        """Take the sum of so many pushes, in place of gathering them."""

    def moving(self) -> Payload:
        """Return the bytes of the moving range: no copy."""

    def frozen(self) -> Payload:
        """Return the bytes of the frozen range: no copy."""

    def arrays(self) -> dict[str, torch.Tensor]:
        """Return everything that a checkpoint holds, by name: views, not copies."""

    def load(self, arrays: dict[str, torch.Tensor]) -> None:
        """Take back what `arrays` gave."""


def copy_bytes(to: torch.Tensor, source: torch.Tensor) -> None:
    """Copy bytes (1-D uint8, of one length).

    >>> to = torch.zeros(3, dtype=torch.uint8)
    >>> copy_bytes(to, torch.arange(3, dtype=torch.uint8))
    >>> to.tolist()
    [0, 1, 2]
    """
    # torch copies 64 MB as words in three quarters of the time that it needs for bytes
    if not (to.nbytes | to.data_ptr() | source.data_ptr()) & 7:
        to, source = to.view(torch.int64), source.view(torch.int64)
    to.copy_(source)


def copy_scaled(to: torch.Tensor, source: torch.Tensor, weight: float) -> None:
    """Copy values times a weight, in one pass where both are of one dtype and device."""
    if weight == 1.0:
        to.copy_(source)
    elif (to.dtype, to.device) == (source.dtype, source.device):
        torch.mul(source, weight, out=to)
    else:
        to.copy_(source).mul_(weight)


def as_bytes(array: torch.Tensor) -> torch.Tensor:
    """Return a view of a contiguous array as 1-D bytes."""
    return array.reshape(-1).view(torch.uint8)


class _TrainedPiece:
    """Part of one section in the slice, with its parameter in the optimizer."""

    # A buffer has no parameter. In full precision the parameter is a view of the slice, so that a step changes the
    # slice itself. In low precision it is a float32 master, rounded into the slice after each step: otherwise updates
    # smaller than the last digit of a bfloat16 would be lost.
    def __init__(self, layout: Layout, section: Section, moving: torch.Tensor, offset: int) -> None:
        self.number = next(
            i for i, whole in enumerate(layout.sections) if whole.start <= section.start and section.stop <= whole.stop
        )
        self.section, self.offset, self._dtype = section, offset, getattr(torch, section.dtype)
        self.tensor = tensor = self.typed(moving)
        self.master = tensor.dtype in MASTERED
        self.parameter = (
            (tensor.float() if self.master else tensor.view_as(tensor)) if section.kind == "parameter" else None
        )
        self.gradient = torch.zeros_like(self.parameter) if self.parameter is not None and self.master else None

    @property
    def summed(self) -> bool:
        """True where pushes can be summed or averaged; buffers of whole numbers cannot."""
        return self.parameter is not None or self.tensor.is_floating_point()

    def working(self) -> torch.Tensor:
        """Return the vector for the sum of pushes, made at its first use."""
        if self.gradient is None:
            self.gradient = torch.zeros_like(self.tensor if self.parameter is None else self.parameter)
        return self.gradient

    def typed(self, payload: torch.Tensor) -> torch.Tensor:
        """Return a view of this piece's part of a push, or of the moving range."""
        return payload[self.offset : self.offset + self.section.stop - self.section.start].view(self._dtype)


def _average(mean: torch.Tensor, value: torch.Tensor, count: int) -> None:
    """Take one more value into a mean of so many values, this one included.

    >>> mean = torch.tensor([torch.finfo(torch.float32).min, 1.0]); kept = mean.clone()
    >>> _average(mean, torch.tensor([torch.finfo(torch.float32).min, 4.0]), 3); mean == kept, mean[1]
    (tensor([ True, False]), tensor(2.))
    """
    # not a sum that is divided at the end: equal values keep their bits, and the sum of a mask's least numbers
    # overflows
    wide = torch.promote_types(mean.dtype, torch.float32)
    moved = mean.to(wide) + (value.to(wide) - mean.to(wide)) / count
    mean.copy_(torch.where((value == mean) | mean.isinf(), mean, moved.to(mean.dtype)))


# The optimizer steps sections, not tensors: a thousand small tensors cost no more than one of their total size, for any
# `torch.optim`. Single tensors matter where a push does not cover them (`_left_out`), and where an optimizer needs
# norms of layers (`_layers`).
#
# A push that is applied by itself is read where its replica wrote it: `.grad` of the flat parameter is a view of the
# slot. Pushes that make an update together are summed first, in one vector for each section (`working`).
class TorchSlice:
    """A slice in memory, stepped by `torch.optim` with one flat parameter per (dtype, parameter group).

    Args:
        moving: memory for the moving range, 1-D uint8; new where None.
        frozen: the same for the frozen range.
        model: number of the model, of several: the moving range is that of this model.
    """

    lasts = False

    def __init__(
        self,
        plan: Plan,
        shard: int,
        moving: torch.Tensor | None = None,
        frozen: torch.Tensor | None = None,
        model: int = 0,
    ) -> None:
        part = plan.parts(shard)[model]
        frozen_size = plan.assignments[shard].frozen.size
        self._moving = torch.zeros(part.size, dtype=torch.uint8) if moving is None else moving
        self._frozen = torch.zeros(frozen_size, dtype=torch.uint8) if frozen is None else frozen
        self._pieces = [
            _TrainedPiece(plan.layout, section, self._moving, section.start - part.start)
            for section in plan.layout.sections_in(part)
        ]
        self._trained = [piece for piece in self._pieces if piece.parameter is not None]
        self._carried = [piece for piece in self._pieces if piece.parameter is None]
        groups = [{"params": [piece.parameter], **plan.stepped(piece.section.group)} for piece in self._trained]
        self._optimizer = optimizers.build(plan.optimizer(model), groups) if groups else None
        self._step = optimizers.stepper(self._optimizer) if self._optimizer else None
        self._layers: Layers | None = None
        if isinstance(self._optimizer, Layerwise):
            self._layers = Layers(self._optimizer, plan.layout, [(p.section, _data(p)) for p in self._trained])
        self._post_hooks = optimizers.post_hooks(plan.settings)
        held = self._optimizer.param_groups if self._optimizer else []
        self._job_options = [{name: group[name] for name in group if name != "params"} for group in held]
        self._rates = [group["lr"] for group in held]
        self._options: Sequence[GroupOption] = ()
        self._layout = plan.layout
        self._factor = 1.0
        self._gathered, self._average = 0, False
        self._weight, self._uncovered = 0.0, dict[int, list[float]]()
        """Weight of the gathered sum, and for each parameter the weights of the pushes that do not cover it."""
        stepped = plan.optimizer(model)
        self._whole_steps = stepped.name in WHOLE_STEPS or bool(stepped.options.get("dampening"))
        self._missing: Collection[int] = ()
        """Parameters that the next step leaves out, by number."""
        self._views: dict[tuple[str, int], tuple[torch.Tensor, list[torch.Tensor], list[torch.Tensor]]] = {}
        """Bytes of each slot of a replica, and the gradients and buffers in it."""

    def of(self, model: int) -> TorchSlice:
        return self

    def fill(self, payload: Payload, frozen: bool) -> None:
        assert isinstance(payload, torch.Tensor)
        (self._frozen if frozen else self._moving).copy_(payload)
        self.moved()

    def moved(self) -> None:
        """Continue from the values in the moving range, which others have written."""
        for piece in self._trained:
            if piece.master:  # an element whose rounded value is unchanged keeps its digits beyond
                master = _data(piece)
                master.copy_(torch.where(master.to(piece.tensor.dtype) == piece.tensor, master, piece.tensor.float()))

    def apply(
        self,
        sender: str,
        slot: int,
        payload: Payload,
        factor: float,
        covered: Sequence[Range] = (),
        norms: Squares = (),
    ) -> None:
        gradients, values = self._typed(sender, slot, payload)
        self._take_gradients(gradients)
        self._missing = self._left_out(covered)
        self._optimize(factor, norms)
        for piece, value in zip(self._carried, values, strict=True):
            piece.tensor.copy_(value)

    def squares_with(self, sender: str, slot: int, payload: Payload) -> Squares:
        """Return `squares` for a single push."""
        self._take_gradients(self._typed(sender, slot, payload)[0])
        return self._layers.squares() if self._layers else ()

    def set_options(self, options: Sequence[GroupOption]) -> None:
        if options != self._options and self._optimizer is not None:
            self._options, self._factor = options, math.nan  # NaN equals no factor: the next step sets the rates
            for group, job_options in zip(self._optimizer.param_groups, self._job_options, strict=True):
                group.update(job_options)

    def _change_option(self, option: GroupOption) -> None:
        assert self._optimizer is not None
        for group, piece in zip(self._optimizer.param_groups, self._trained, strict=True):
            if piece.section.group == option.group:
                if option.name == "lr":
                    group["lr"] *= option.values[0]
                else:
                    group[option.name] = option.values if isinstance(group[option.name], tuple) else option.values[0]

    def _left_out(self, covered: Sequence[Range]) -> list[int]:
        """Return the numbers of the parameters outside of all these ranges."""
        return [
            number
            for number, part in enumerate(self._parameters if covered and not self._whole_steps else ())
            if not any(span.start <= part.span.start and part.span.stop <= span.stop for span in covered)
        ]

    def _take_gradients(self, gradients: list[torch.Tensor]) -> None:
        for piece, gradient in zip(self._trained, gradients, strict=True):
            _data(piece).grad = piece.working().copy_(gradient) if piece.master else gradient

    def _typed(self, sender: str, slot: int, payload: Payload) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
        assert isinstance(payload, torch.Tensor)
        # views are made once for each slot, not with every push; another incarnation has its slots elsewhere
        views = self._views.get((sender, slot))
        if views is None or views[0] is not payload:
            views = (payload, [p.typed(payload) for p in self._trained], [p.typed(payload) for p in self._carried])
            self._views[sender, slot] = views
        return views[1], views[2]

    def _optimize(self, factor: float, norms: Squares = ()) -> None:
        if self._optimizer is not None and self._step is not None:
            if factor != self._factor:
                self._factor = factor
                for group, rate in zip(self._optimizer.param_groups, self._rates, strict=True):
                    group["lr"] = rate * factor
                for option in self._options:
                    self._change_option(option)
            if self._layers:
                self._layers.step(norms)
            elif self._missing or self.uneven:
                step_without(self._optimizer, self._step, self._step_parts, self._missing)
            else:
                self._step()
        self._missing = ()
        for hook in self._post_hooks:
            hook(parameter[elements] for parameter, elements in self._step_parts)
        for piece in self._trained:
            if piece.master:
                piece.tensor.copy_(_data(piece))

    @property
    def uneven(self) -> bool:
        """True where some parameters have made fewer steps than others."""
        return self._optimizer is not None and any(MISSED in state for state in self._optimizer.state.values())

    def miss(self) -> None:
        """Begin to count missed steps, where torch counts steps."""
        for state, parameter in [(state, p) for p, state in self._optimizer.state.items()] if self._optimizer else ():
            if COUNT in state:
                state[MISSED] = torch.zeros_like(parameter, dtype=torch.int32)

    def gather(
        self, sender: str, slot: int, payload: Payload, weight: float, average: bool, covered: Sequence[Range] = ()
    ) -> None:
        # The first push of an update overwrites the last sum: nothing needs to be zeroed, and weight 1 is a plain copy.
        # Buffers without an average go into the slice at once: the latest stay.
        self._weight += weight
        for number in self._left_out(covered):
            self._uncovered.setdefault(number, []).append(weight)
        gradients, values = self._typed(sender, slot, payload)
        first, self._average = not self._gathered, average
        self._gathered += 1
        for piece, gradient in zip(self._trained, gradients, strict=True):
            if first:
                copy_scaled(piece.working(), gradient, weight)
            else:
                piece.working().add_(gradient, alpha=weight)
        for piece, value in zip(self._carried, values, strict=True):
            if not (average and piece.summed):
                piece.tensor.copy_(value)
            elif first:
                piece.working().copy_(value)
            else:
                _average(piece.working(), value, self._gathered)

    def squares(self) -> Squares:
        self._set_gradients(1.0)
        return self._layers.squares() if self._layers else ()

    def _set_gradients(self, weight: float) -> None:
        # A push that does not cover a parameter has added zeros to its sum. Scaling makes the mean over the pushes that
        # do cover it; a parameter that none covers is left out of the step.
        if self._uncovered:
            self._missing = [number for number, weights in self._uncovered.items() if len(weights) == self._gathered]
            for number, weights in self._uncovered.items():
                if (rest := self._weight - sum(weights)) > 0:
                    part = self._parameters[number]
                    self._trained[part.piece].working()[part.within].mul_(self._weight / rest)
            self._uncovered = {}
        for piece in self._trained:
            _data(piece).grad = piece.working() if weight == 1.0 else piece.working().mul_(weight)

    def step(self, factor: float, weight: float, norms: Squares = ()) -> None:
        self._set_gradients(weight)
        self._optimize(factor, norms)
        for piece in self._carried:
            if self._average and piece.summed:
                piece.tensor.copy_(piece.working())
        self._gathered, self._weight = 0, 0.0

    @property
    def sum_size(self) -> int:
        """Bytes of a sum; low-precision parameters are float32 in it."""
        return sum(
            piece.tensor.numel() * (4 if piece.master and piece.parameter is not None else piece.tensor.itemsize)
            for piece in self._pieces
        )

    def sum(self) -> Payload:
        """Return the sums of gradients, in their working precision, and the means of buffers."""
        return torch.cat([as_bytes(part) for part in self._sums()])

    def take_sum(self, payload: Payload, parts: int) -> None:
        assert isinstance(payload, torch.Tensor)
        sums = self._sums()
        for room, part in zip(sums, payload.split([room.nbytes for room in sums]), strict=True):
            as_bytes(room).copy_(part)
        self._gathered, self._average = parts, True

    def _sums(self) -> list[torch.Tensor]:
        """Return the vectors of sums, and the values of pieces without a sum."""
        return [piece.working() if piece.summed else piece.tensor for piece in self._pieces]

    def moving(self) -> Payload:
        return self._moving

    def frozen(self) -> Payload:
        return self._frozen

    def arrays(self) -> dict[str, torch.Tensor]:
        """Return `vector.moving`, `vector.frozen`, `master.<section>` and `state.<section>.<key>`, as views."""
        arrays = {"vector.moving": self._moving, "vector.frozen": self._frozen}
        for piece in self._trained:
            if piece.master:
                arrays[f"master.{piece.number}"] = _data(piece)
            assert self._optimizer is not None
            for key, value in self._optimizer.state.get(_data(piece), {}).items():
                if value is not None:
                    arrays[f"state.{piece.number}.{key}"] = torch.as_tensor(value)
        return arrays

    def load(self, arrays: dict[str, torch.Tensor]) -> None:
        self._moving.copy_(arrays["vector.moving"])
        self._frozen.copy_(arrays["vector.frozen"])
        for piece in self._trained:
            if piece.master:
                _data(piece).copy_(arrays[f"master.{piece.number}"])
            assert self._optimizer is not None
            if state := state_of(piece.number, arrays):
                self._optimizer.state[_data(piece)] = {key: value.clone() for key, value in state.items()}

    def adopt(self, arrays: Mapping[str, torch.Tensor], stepped: bool) -> None:
        """Use these arrays, named as in `arrays`, for masters, and where it has `stepped` for the optimizer's state."""
        for piece in self._trained:
            assert self._optimizer is not None
            if piece.master:
                _data(piece).data = arrays[f"master.{piece.number}"]
            if stepped and (state := state_of(piece.number, arrays)):
                self._optimizer.state[_data(piece)] = state
            else:
                self._optimizer.state.pop(_data(piece), None)

    @property
    def adds(self) -> bool:
        """True where a step only adds the gradient times the learning rate: without state, masters and hooks."""
        plain = ("momentum", "weight_decay", "nesterov", "maximize")
        if not isinstance(self._optimizer, torch.optim.SGD) or self._post_hooks:
            return False
        extras = any(group[extra] for group in self._optimizer.param_groups for extra in plain)
        return not extras and not any(piece.master for piece in self._trained)

    def apply_to(self, other: TorchSlice, sender: str, slot: int, payload: Payload, factor: float) -> None:
        """Take the values that another slice would have after `apply`, where a step `adds`; leave that slice alone."""
        # one pass reads the other's parameters and the gradient, and writes here, without a copy first
        gradients, values = self._typed(sender, slot, payload)
        for piece, before, gradient, rate in zip(self._trained, other._trained, gradients, self._rates, strict=True):
            torch.add(before.tensor, gradient, alpha=-rate * factor, out=piece.tensor)
        for piece, value in zip(self._carried, values, strict=True):
            piece.tensor.copy_(value)

    @functools.cached_property
    def _parameters(self) -> list[_PartOfParameter]:
        """Parts of single parameters in the slice."""
        return list(_parameters_of(self._layout, self._trained))

    @functools.cached_property
    def _step_parts(self) -> list[StepPart]:
        """These parts in the optimizer's flat parameters."""
        return [StepPart(_data(self._trained[parameter.piece]), parameter.within) for parameter in self._parameters]

    def add_to(self, other: TorchSlice, gradients: Sequence[torch.Tensor], factor: float) -> None:
        """Do as `apply_to`, for a model without buffers, with gradients left where autograd made them."""
        for mine, before in zip(self._parameters, other._parameters, strict=True):
            gradient = mine.of(gradients)
            torch.add(before.tensor, gradient, alpha=-self._rates[mine.piece] * factor, out=mine.tensor)

    def gather_lying(self, gradients: Sequence[torch.Tensor], payload: Payload) -> None:
        """Copy gradients from where autograd made them into their places in a payload."""
        assert isinstance(payload, torch.Tensor)
        for mine in self._parameters:
            room = self._trained[mine.piece].typed(payload)[mine.within]
            room.view(mine.tensor.shape).copy_(mine.of(gradients))


class _PartOfParameter(NamedTuple):
    """Part of one parameter in a slice: all of it, or consecutive elements."""

    number: int
    """Number of the parameter among the trained ones."""
    elements: slice | None
    """Elements of the parameter; None for all."""
    tensor: torch.Tensor
    piece: int
    span: Range
    """Range in the flat vector."""
    within: slice
    """Elements of the piece."""

    def of(self, tensors: Sequence[torch.Tensor]) -> torch.Tensor:
        """Return this part of the gradient, from the gradients of all parameters."""
        whole = tensors[self.number]
        return whole if self.elements is None else whole.view(-1)[self.elements]


def _parameters_of(layout: Layout, pieces: Sequence[_TrainedPiece]) -> Iterator[_PartOfParameter]:
    for at, piece in enumerate(pieces):
        start, item = piece.section.start, piece.tensor.itemsize
        for trained in layout.trained_in(Range(start, piece.section.stop)):
            span, elements = trained.part, trained.elements
            within = slice((span.start - start) // item, (span.stop - start) // item)
            flat = piece.tensor[within] if elements is not None else piece.tensor[within].view(trained.entry.shape)
            yield _PartOfParameter(trained.number, elements, flat, at, span, within)


def state_of(section: int, arrays: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Return a section's arrays `state.<section>.<key>`, by their keys."""
    prefix = f"state.{section}."
    return {name.removeprefix(prefix): value for name, value in arrays.items() if name.startswith(prefix)}


def _data(piece: _TrainedPiece) -> torch.Tensor:
    assert piece.parameter is not None
    return piece.parameter


class SlicesOfModels(TorchSlice):
    """A slice in memory with parts of several models, each with its optimizer."""

    def __init__(self, plan: Plan, shard: int) -> None:
        moving, frozen = plan.assignments[shard].moving, plan.assignments[shard].frozen
        self._moving, self._frozen = (torch.zeros(part.size, dtype=torch.uint8) for part in (moving, frozen))
        self._within = [
            slice(part.start - moving.start, part.stop - moving.start) if part.size else slice(0)
            for part in plan.parts(shard)
        ]
        self._models = [
            TorchSlice(plan, shard, self._moving[within], self._frozen, model)
            for model, within in enumerate(self._within)
        ]

    def of(self, model: int) -> TorchSlice:
        return self._models[model]

    def moved(self) -> None:
        for model in self._models:
            model.moved()

    @property
    def sum_size(self) -> int:
        return sum(model.sum_size for model in self._models)

    def arrays(self) -> dict[str, torch.Tensor]:
        """Return the ranges, and the arrays of each model: sections have different numbers."""
        beside = {name: array for model in self._models for name, array in model.arrays().items()}
        return {**beside, "vector.moving": self._moving, "vector.frozen": self._frozen}

    def load(self, arrays: dict[str, torch.Tensor]) -> None:
        for model, within in zip(self._models, self._within, strict=True):
            model.load({**arrays, "vector.moving": arrays["vector.moving"][within]})


def slice_of(
    plan: Plan, shard: int, moving: torch.Tensor | None = None, frozen: torch.Tensor | None = None
) -> TorchSlice:
    """Make a shard's slice, in new memory or in these ranges (1-D uint8) of one model."""
    return SlicesOfModels(plan, shard) if plan.models > 1 else TorchSlice(plan, shard, moving, frozen)


class PhantomSlice:
    """A slice without values, for simulations that compute nothing."""

    lasts = False

    def __init__(self, plan: Plan, shard: int) -> None:
        assignment = plan.assignments[shard]
        self._moving, self._frozen = Phantom(assignment.moving.size), Phantom(assignment.frozen.size)

    def _do_nothing(self, *_args: object, **_options: object) -> None:
        pass

    fill = apply = gather = set_options = step = take_sum = load = _do_nothing

    def of(self, model: int) -> PhantomSlice:
        return self

    def squares(self) -> Squares:
        return ()

    @property
    def sum_size(self) -> int:
        return self._moving.nbytes

    def moving(self) -> Payload:
        return self._moving

    sum = moving

    def frozen(self) -> Payload:
        return self._frozen

    def arrays(self) -> dict[str, torch.Tensor]:
        return {}
