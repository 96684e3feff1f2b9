"""A replica whose model lives in memory that others update too: it computes there, and steps views of it in place."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import NamedTuple

import torch

from distbelief.core.settings import Plan, Settings
from distbelief.errors import TrainingError, UsageError
from distbelief.server import optimizers
from distbelief.server.layerwise import Group
from distbelief.sharding.layout import Entry, Layout, Range
from distbelief.strategies.shared_memory import mapping
from distbelief.strategies.shared_memory.counts import SAMPLES, Counts
from distbelief.strategies.shared_memory.settings import MemoryUpdates
from distbelief.tasks.flat import FlatModule
from distbelief.tasks.sparse import check_dense, check_rows


class LockedStep(NamedTuple):
    """A part of an update: what it locks, how many bytes it writes to, and the step itself."""

    locks: tuple[int, ...]
    size: int
    act: Callable[[], object]


class _MappedPiece(NamedTuple):
    """Some elements of a parameter of the model, as the optimizer steps them: all of them, or those within a slice."""

    parameter: torch.Tensor
    source: torch.Tensor
    within: slice | None
    start: int
    """The byte of the vector at which they begin."""
    group: int
    """The parameter group of the model that they are of."""


class MappedModel:
    """One replica's model, optimizer and counts in a mapping: the model lives there from here on.

    Args:
        flat: the model.
        counts: of the replica, in the mapping.
        process: a number that tells who holds a lock: the id of its process.
        plan: of the job.
        memory: 1-D uint8, `mapped_layout(plan).length` bytes.
        cut: parts in which an update is made where nothing is locked; one where none are given.
    """

    def __init__(
        self,
        flat: FlatModule,
        counts: Counts,
        process: int,
        plan: Plan,
        memory: torch.Tensor,
        cut: Sequence[Range] = (),
    ) -> None:
        layout, settings = plan.layout, plan.settings
        check(layout, settings)
        self.flat, self.counts, self._process, self._plan = flat, counts, process, plan
        self._factor, self._live, self._scheduled = 1.0, False, settings.rate_varies
        mapped = mapped_layout(plan)
        self._key = mapping.state_of(settings.optimizer)
        self._vector, self._state = memory[: layout.total], memory[mapped.state : mapped.steps]
        self._steps = memory[mapped.steps : mapped.counts].view(torch.float32)
        self._made = 0
        """Number of the steps' counts whose optimizer counts there."""
        flat.bind([], [self._vector])
        self._locks = settings.own(MemoryUpdates).locking
        cut = tuple(cut) or mapping.ranges(layout, settings.shards if self._locks == "shard" else 1)
        self._stops = torch.tensor([part.stop for part in cut])
        dense = [(part, list(self._pieces(part))) for part in cut]
        self._locked_steps = [
            LockedStep((i,) if self._locks == "shard" else (), part.size, self._optimizer(pieces))
            for i, (part, pieces) in enumerate(dense)
            if pieces
        ]
        self._partial = [piece for _, pieces in dense for piece in pieces if piece.within is not None]
        self._sparse = [(entry, piece.source, self._optimizer([piece], rows=True)) for entry, piece in self._rows()]
        named = dict(flat.module.named_buffers()) if self._locks != "none" else {}
        self._buffers = [
            (named[e.tensor.name], self._vector[e.start : e.stop].view(getattr(torch, e.tensor.dtype)).view(e.shape))
            for e in layout.entries
            if e.tensor.kind == "buffer" and named
        ]
        if self._sparse:
            # the default, of which torch warns where nobody has said so
            torch.sparse.check_sparse_tensor_invariants.disable()

    # what it steps

    def _pieces(self, part: Range) -> Iterator[_MappedPiece]:
        """The parts of dense parameters that lie in a range."""
        layout = self._plan.layout
        for piece in layout.trained_in(part):
            if not layout.is_sparse(piece.entry):
                source, here = self.flat.trained[piece.number], piece.part
                view = source if piece.elements is None else self._vector[here.start : here.stop].view(source.dtype)
                yield _MappedPiece(view, source, piece.elements, here.start, piece.entry.tensor.group)

    def _rows(self) -> Iterator[tuple[Entry, _MappedPiece]]:
        """The parameters whose gradients are some of their rows."""
        layout = self._plan.layout
        for entry, source in zip(layout.trained_entries, self.flat.trained, strict=True):
            if layout.is_sparse(entry):
                yield entry, _MappedPiece(source, source, None, entry.start, entry.tensor.group)

    def _optimizer(self, pieces: list[_MappedPiece], rows: bool = False) -> Callable[[], object]:
        """A step of torch's optimizer on some pieces, with its state in the mapping, at the learning rate of now."""
        optimizer = optimizers.build(self._plan.settings.optimizer, self._groups(pieces), rows)
        for parameter, _, _, start, _ in pieces:
            if self._key:
                state = optimizer.state[parameter]
                state[self._key] = (
                    self._state[start : start + parameter.nbytes].view(parameter.dtype).view(parameter.shape)
                )
                if self._key == "sum":
                    state["step"] = self._steps[self._made]
                    self._made += 1
        stepper, rates = optimizers.stepper(optimizer), [(group, group["lr"]) for group in optimizer.param_groups]

        def step() -> None:
            for group, rate in rates:
                group["lr"] = rate * self._factor
            stepper()

        return step if self._scheduled else stepper

    def _groups(self, pieces: list[_MappedPiece]) -> list[Group]:
        """The pieces by the parameter groups of the model, with what those set for themselves."""
        groups: dict[int, Group] = {}
        for piece in pieces:
            groups.setdefault(piece.group, {**self._plan.layout.stepped(piece.group), "params": []})["params"].append(
                piece.parameter
            )
        return list(groups.values())

    # a step

    def locked_steps(self) -> list[LockedStep]:
        """The update with the gradient of the step, in its parts; a parameter without one is left alone."""
        if self._scheduled:
            self._factor = self._plan.factor(self.counts.total(SAMPLES))
        for piece in self._partial:
            gradient = piece.source.grad
            check_dense(gradient)
            piece.parameter.grad = None if gradient is None else gradient.contiguous().view(-1)[piece.within]
        steps = list(self._locked_steps)
        for entry, source, step in self._sparse:
            if source.grad is not None:
                locks, size = self._touched(entry, source.grad)
                steps.append(LockedStep(locks, size, step))
        if self._buffers:
            steps.append(
                LockedStep(
                    (0,) if self._locks == "shard" else (), sum(there.nbytes for _, there in self._buffers), self._carry
                )
            )
        if self._locks in mapping.WHOLE:
            return [LockedStep((0,), sum(step.size for step in steps), lambda: [step.act() for step in steps])]
        return steps

    def _carry(self) -> None:
        """Have the buffers that the forward pass has written be those of the mapping."""
        for buffer, there in self._buffers:
            there.copy_(buffer)

    def _touched(self, entry: Entry, gradient: torch.Tensor) -> tuple[tuple[int, ...], int]:
        """The ranges that a gradient's rows lie in, where these are locked, and the bytes of the rows."""
        if not gradient.is_sparse:
            raise TrainingError(
                f"the gradient of {entry.tensor.name!r} is dense, and its module says sparse=True: use it as an "
                "embedding only"
            )
        size = entry.size // entry.shape[0] * gradient._nnz()
        if self._locks != "shard":
            return (), size
        return touched(gradient._indices()[0], entry, self._stops), size

    # everything

    def begin(self, arrays: Mapping[str, torch.Tensor] | None, facts: Mapping[str, object]) -> None:
        """Fill the mapping: with the model's own values, or those of a checkpoint."""
        self.counts.begin(dict(facts))
        self._steps.zero_()
        self._state.zero_()
        self.flat.write(self._vector)
        initial = self._plan.settings.optimizer.options.get("initial_accumulator_value")
        for name, value in self.arrays().items():
            if arrays is not None and name in arrays:
                value.copy_(arrays[name])
            elif initial and name.endswith(".sum"):
                value.fill_(float(initial))  # type: ignore[arg-type]  # a number: checked with the optimizer
        self._steps.fill_(float(self._steps.max()))

    def look(self) -> None:
        """Begin a step on the mapping's tensors; where there are locks, on a copy of the buffers as they are."""
        if not self._live:
            self.flat.swap(0)
            self.counts.sign(self._process)
            for buffer, there in self._buffers:
                buffer.data = there.clone()
            self._live = True
        for buffer, there in self._buffers:
            buffer.copy_(there)
        self.counts.look()

    def arrays(self) -> dict[str, torch.Tensor]:
        """`vector.moving`, `vector.frozen` and `state.<section>.<key>`, as views."""
        layout = self._plan.layout
        arrays = {"vector.moving": self._vector[: layout.moving], "vector.frozen": self._vector[layout.moving :]}
        for number, section in enumerate(layout.sections):
            if section.kind == "parameter" and self._key:
                arrays[f"state.{number}.{self._key}"] = self._state[section.start : section.stop].view(
                    getattr(torch, section.dtype)
                )
                if self._key == "sum":
                    arrays[f"state.{number}.step"] = self._steps[
                        number
                    ]  # of one piece, as each of them counts; a file shares no memory
        return arrays


def touched(rows: torch.Tensor, entry: Entry, stops: torch.Tensor) -> tuple[int, ...]:
    """Return which ranges some rows of a parameter lie in, in order; a row may lie in several.

    Args:
        rows: int64, 1-D, in any order.
        entry: the parameter.
        stops: int64, 1-D: the byte of the vector at which each range ends.

    >>> from distbelief.sharding.layout import Tensor, lay_out
    >>> [entry] = lay_out([Tensor("rows", (10, 24), "float32")]).entries  # rows of 96 bytes
    >>> [touched(torch.tensor(rows, dtype=torch.int64), entry, torch.tensor([512, 960])) for rows in ([0, 3], [5], [9],
    ...     [9, 0], [])]
    [(0,), (0, 1), (1,), (0, 1), ()]
    """
    size = entry.size // max(entry.shape[0], 1)
    starts = rows * size + entry.start
    first, last = (torch.searchsorted(stops, at, right=True) for at in (starts, starts + size - 1))
    edges = torch.bincount(first, minlength=len(stops) + 1) - torch.bincount(last + 1, minlength=len(stops) + 1)
    return tuple((edges.cumsum(0) > 0).nonzero().view(-1).tolist())


def mapped_layout(plan: Plan) -> mapping.MappingLayout:
    """Return where everything lies in the mapping of a job."""
    settings = plan.settings
    return mapping.mapping_layout(plan.layout, settings.optimizer, settings.shards, settings.replicas)


def check(layout: Layout, settings: Settings) -> None:
    """Refuse a model that cannot be stepped in place.

    Raises:
        UsageError: naming what, and the remedy.
    """
    for entry in layout.trained_entries:
        if entry.tensor.dtype in ("bfloat16", "float16"):
            raise UsageError(
                f"parameter {entry.tensor.name!r} is {entry.tensor.dtype}, whose steps need float32 masters: "
                f"{settings.strategy.name} has none;"
                " use float32"
            )
    check_rows(layout, settings)
