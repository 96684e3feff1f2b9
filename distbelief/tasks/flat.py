"""The flat vector of a module: parameters and buffers as views into contiguous bytes, and the arithmetic of a step.

In a user's own loop the tensors stay the user's: fetched values are copied into them, so that all references to them
stay valid, and autograd counts the write.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence

import torch
from torch import nn
from torch.nn.parameter import is_lazy

from distbelief.core.optimizer import ParameterGroup
from distbelief.errors import TrainingError, UsageError
from distbelief.fabric.pinned import CudaDevice, pin
from distbelief.sharding.layout import ITEM_SIZES, Entry, Layout, Piece, Range, Tensor, lay_out
from distbelief.tasks.users_tensors import UsersTensors, named_tensors

GROUP_OPTIONS = ("lr", "weight_decay")
"""Options that a parameter group may set."""


def layout_of(
    module: nn.Module,
    groups: Sequence[ParameterGroup] | None = None,
    split: Mapping[str, Sequence[Piece]] | None = None,
    several: bool = False,
    valued: bool = True,
) -> Layout:
    """Lay out a module: trained parameters by (dtype, group), buffers, frozen; a tied tensor once, by its first name.

    Embeddings with sparse gradients form a group beside the group that they are in, marked by "rows".

    Args:
        module: a module with dense parameters.
        groups: parameter groups as `torch.optim` takes them, `{"params": [...], "lr": ..., "weight_decay": ...}`; all
            in one group by default.
        split: pieces of the tensors of a split model, by name.
        several: whether each child of the module is a model with its own optimizer.
        valued: whether the tensors must have values.

    Raises:
        UsageError: a tensor cannot be trained, has no shape yet or shares memory with another, or a group is wrong.

    >>> layout_of(nn.Linear(3, 2)).parameters
    8
    """
    tensors: list[Tensor] = []
    aliases: dict[str, str] = {}
    first: dict[int, str] = {}
    kept: dict[str, torch.Tensor] = {}
    options, member = _groups(module, groups)
    sparse = {id(part.weight): member.get(id(part.weight), 0) for part in sparse_parts(module)}
    apart = {group: len(options) + number for number, group in enumerate(dict.fromkeys(sparse.values()))}
    options = [*options, *({**options[group], "rows": 1.0} for group in apart)]
    member = {**member, **{weight: apart[group] for weight, group in sparse.items()}}
    for kind, name, tensor in named_tensors(module):
        dtype = str(tensor.dtype).removeprefix("torch.")
        if id(tensor) in first:
            aliases[name] = first[id(tensor)]
            continue
        if is_lazy(tensor):
            raise UsageError(
                f"{kind} {name!r} of a lazy module has no shape yet: run a minibatch through the model first"
            )
        if tensor.layout is not torch.strided or (valued and tensor.is_meta) or dtype not in ITEM_SIZES:
            raise UsageError(
                f"{kind} {name!r} is {tensor.layout} {tensor.dtype} on {tensor.device}: it must be a dense real "
                "tensor with values"
            )
        first[id(tensor)], kept[name] = name, tensor
        tensors.append(
            Tensor(name, tuple(tensor.shape), dtype, kind, member.get(id(tensor), 0) if kind == "parameter" else 0)
        )
    _refuse_shared(kept)
    models = {tensor.name: int(tensor.name.split(".")[0]) for tensor in tensors} if several else None
    return lay_out(tensors, options, aliases, split, models)


def sparse_parts(module: nn.Module) -> list[nn.Embedding | nn.EmbeddingBag]:
    """Return the embeddings of a module whose gradients are sparse."""
    return [
        part
        for part in module.modules()
        if isinstance(part, nn.Embedding | nn.EmbeddingBag) and part.sparse and part.weight.requires_grad
    ]


def _refuse_shared(tensors: Mapping[str, torch.Tensor]) -> None:
    """Refuse two tensors that share memory: each would get its own part, which would untie them."""
    extents: dict[tuple[torch.device, int], list[tuple[int, int, str]]] = {}
    for name, tensor in tensors.items():
        if tensor.numel() and not tensor.is_meta:
            last = sum((side - 1) * stride for side, stride in zip(tensor.shape, tensor.stride(), strict=True))
            start = int(tensor.storage_offset()) * tensor.itemsize
            storage = tensor.device, tensor.untyped_storage().data_ptr()
            extents.setdefault(storage, []).append((start, start + (last + 1) * tensor.itemsize, name))
    for intervals in extents.values():
        open_yet: list[tuple[int, int, str]] = []
        for start, stop, name in sorted(intervals):
            open_yet = [interval for interval in open_yet if interval[1] > start]
            for _, _, other in open_yet:
                if _overlap(tensors[name], tensors[other]):
                    raise UsageError(
                        f"{name!r} and {other!r} are two tensors that share memory: tie them by assigning the same "
                        "parameter to both (take slices and transposes in forward), or give each a copy"
                    )
            open_yet.append((start, stop, name))


def _overlap(first: torch.Tensor, second: torch.Tensor) -> bool:
    """Return whether two tensors of one storage have a byte in common; two columns of a matrix do not."""
    marks = torch.zeros(first.untyped_storage().nbytes(), dtype=torch.bool)

    def of(tensor: torch.Tensor) -> torch.Tensor:
        item = tensor.itemsize
        # an expanded side is in memory once
        sides = [(n, step) for n, step in zip(tensor.shape, tensor.stride(), strict=True) if step]
        return marks.as_strided(
            [*(n for n, _ in sides), item], [*(step * item for _, step in sides), 1], tensor.storage_offset() * item
        )

    of(first).fill_(True)
    return bool(of(second).any())


def _groups(
    module: nn.Module, groups: Sequence[ParameterGroup] | None
) -> tuple[list[dict[str, float]], dict[int, int]]:
    """Return the options of each parameter group, and the group of each parameter by its id."""
    if groups is None:
        return [{}], {}
    names = {id(parameter): name for name, parameter in module.named_parameters()}
    options: list[dict[str, float]] = []
    member: dict[int, int] = {}
    for number, group in enumerate(groups):
        settings = {key: value for key, value in group.items() if key not in ("params", "name")}
        for key in settings:
            if key not in GROUP_OPTIONS:
                raise UsageError(
                    f"parameter group {number} sets {key!r}; a group may set {', '.join(GROUP_OPTIONS)}, the rest is "
                    "the job's"
                )
        parameters = group["params"]
        for parameter in [parameters] if isinstance(parameters, torch.Tensor) else parameters:
            if id(parameter) not in names:
                raise UsageError(
                    f"parameter group {number} has a tensor of shape {list(parameter.shape)} that is no parameter of "
                    "the model"
                )
            if id(parameter) in member:
                raise UsageError(
                    f"{names[id(parameter)]!r} is in parameter groups {member[id(parameter)]} and {number}; it may be "
                    "in one"
                )
            member[id(parameter)] = number
        options.append({key: float(value) for key, value in settings.items()})
    missing = [names[id(p)] for p in module.parameters() if p.requires_grad and id(p) not in member]
    if missing:
        raise UsageError(
            f"parameter {missing[0]!r} is in no parameter group: put it in one, or set its requires_grad to False"
        )
    return options, member


SUMMED = 2
"""Number of first steps in which writes to parameters are detected by their values, later only by counts."""


class _WriteCheck:
    """A check that a model does not write to its parameters as it computes, since other processes read them."""

    def __init__(self, trained: Mapping[str, torch.Tensor], remedy: str) -> None:
        self._trained, self._remedy = trained, remedy
        self._summed, self._sums = 0, True
        self._before: list[int] = []

    def begin(self) -> None:
        """Note the parameters before a computation."""
        self._sums = self._summed < SUMMED
        self._before = self._marks()

    def check(self) -> None:
        """Raise a `TrainingError` for the first parameter that was written to."""
        self._summed += self._sums
        for name, before, after in zip(self._trained, self._before, self._marks(), strict=True):
            if after != before:
                raise TrainingError(
                    f"the model writes to its parameter {name!r} as it computes, where other processes read it: "
                    f"train with {self._remedy}"
                )

    def _marks(self) -> list[int]:
        """Return the sum of the bytes of each parameter, or torch's count of writes to it."""
        return [_added(parameter) if self._sums else parameter._version for parameter in self._trained.values()]


def _added(tensor: torch.Tensor) -> int:
    return int(tensor.detach().reshape(-1).view(torch.uint8).sum(dtype=torch.int64))


class FlatModule:
    """A module whose parameters and buffers are in a flat vector: the vectors of a story.

    On a GPU the module is in a flat vector of the device; `swap` and `carry_buffers` copy between it and the vectors of
    the host, which are pinned.

    Args:
        groups: parameter groups, as for `layout_of`.
        rows: whether sparse gradients stay sparse; else embeddings make dense ones.
        layout: layout of the whole model if it is split; by default the layout of the module.
        partition: partition whose pieces the module holds; -1 for the whole model.
        owned: whether the module is a user's, whose tensors are never replaced.
    """

    def __init__(
        self,
        module: nn.Module,
        groups: Sequence[ParameterGroup] | None = None,
        rows: bool = False,
        layout: Layout | None = None,
        partition: int = -1,
        owned: bool = False,
    ) -> None:
        self.module, self.owned = module, owned
        self.layout = layout_of(module, groups) if layout is None else layout
        for part in [] if rows else sparse_parts(module):
            part.sparse = False
        self.device = next(module.parameters()).device
        self.held = self.layout.held(partition)
        """Range of the flat vector in its vectors."""
        self._moving = self.layout.partitions[partition].moving.stop - self.held.start
        """Number of bytes that are pushed and fetched, the first of its vectors."""
        self._entries = [entry for entry in self.layout.entries if partition in (-1, entry.piece.partition)]
        tensors = {name: tensor for _, name, tensor in named_tensors(module)}
        self._tensors = [tensors[entry.tensor.name] for entry in self._entries]
        trained = [(e, t) for e, t in zip(self._entries, self._tensors, strict=True) if e.tensor.kind == "parameter"]
        self.trained_entries = [entry for entry, _ in trained]
        self.trained = [tensor for _, tensor in trained]
        """Trained parameters in the order of the layout, and of their entries."""
        self.frozen = frozenset(e.tensor.name for e in self._entries if e.tensor.kind == "frozen")
        """Names of the parameters without a gradient."""
        self._models = [self.layout.model_of(entry) for entry in self.trained_entries]
        """Number of the model of each trained parameter."""
        self._cut = [
            entry.shape != tuple(tensor.shape) for entry, tensor in zip(self._entries, self._tensors, strict=True)
        ]
        """True for each entry that is a piece of a whole tensor in the module, and must be copied."""
        self._users = UsersTensors(module, [entry.tensor for entry in self._entries], tensors) if owned else None
        self._current = -1
        self._staged = self._unpushed = self._copied = False
        self.local: torch.optim.Optimizer | None = None
        """Optimizer of `trained`, with which the model steps a copy of the parameters between two fetches."""
        self._stepped: set[int] = set()
        """Numbers of the parameters with a gradient since the last fetch, where there is a local optimizer."""
        self._landing = 0
        self._landed: Callable[[int], int] | None = None
        self._lies = False
        self._unwritten: _WriteCheck | None = None
        self._lying: list[Sequence[torch.Tensor]] = []
        self._without: list[set[int]] = []
        """Numbers of the parameters without a gradient, by slot."""
        self._gradients: list[torch.Tensor] = []
        self._parameters: list[torch.Tensor] = []
        self._working: list[torch.Tensor] = []
        self._slots: list[list[torch.Tensor]] = []
        self._buffers: list[list[tuple[torch.Tensor, int, int]]] = []
        self._partitions: list[list[torch.Tensor]] = []
        self._live = torch.zeros(0, dtype=torch.uint8, device=self.device)

    @property
    def only_reads(self) -> bool:
        """Return whether the model computes without writing to its parameters; an embedding with `max_norm` writes."""
        return all(getattr(part, "max_norm", None) is None for part in self.module.modules())

    def bind(
        self,
        gradients: Sequence[torch.Tensor],
        parameters: Sequence[torch.Tensor],
        landed: Callable[[int], int] | None = None,
        lies: bool = False,
        remedy: str = "",
    ) -> None:
        """Use these vectors (1-D uint8 of the range `held`): gradient slots, and parameters to compute with.

        `landed` returns the vector in which a fetch has really landed; by default it is the named one. With `lies`, a
        gradient stays in its own tensor until all shards have applied it. If others read these vectors, `remedy` is
        the advice for a model that writes to its parameters; else it is "".
        """
        self._gradients, self._parameters = list(gradients), list(parameters)
        self._landed, self._lies, self._lying = landed, lies, [() for _ in gradients]
        self._without = [set() for _ in gradients]
        names = [entry.tensor.name for entry in self.trained_entries]
        self._unwritten = _WriteCheck(dict(zip(names, self.trained, strict=True)), remedy) if remedy else None
        self._staged = any(vector.device != self.device for vector in (*gradients, *parameters))
        # local steps are made on a copy: the fetched values stay, so that the change can be computed
        self._copied = self._staged or self.local is not None
        self._working = (
            [torch.zeros_like(g, device=self.device) for g in gradients] if self._staged else self._gradients
        )
        self._current = -1
        partitions = self._parameters
        if self._staged:
            cuda = CudaDevice(self.device)
            for vector in (*self._gradients, *self._parameters):
                pin(vector, cuda, self)
        if self._copied:
            partitions = [torch.empty(self.held.size, dtype=torch.uint8, device=self.device)]
        slots = [list(zip(self._entries, self._views(vector), self._tensors, strict=True)) for vector in self._working]
        self._slots = [[view for entry, view, _ in slot if entry.tensor.kind == "parameter"] for slot in slots]
        self._buffers = [
            [
                (view, at, self.layout.model_of(entry))
                for at, (entry, view, _) in enumerate(slot)
                if entry.tensor.kind == "buffer"
            ]
            for slot in slots
        ]
        # frozen parameters are fetched once, into the first vector
        first, *others = [self._views(partition) for partition in partitions]
        kinds = [entry.tensor.kind for entry in self._entries]
        self._partitions = [
            first,
            *([f if k == "frozen" else v for f, v, k in zip(first, other, kinds, strict=True)] for other in others),
        ]
        self._live = partitions[0]

    def _views(self, vector: torch.Tensor) -> list[torch.Tensor]:
        return [_view(vector, entry, self.held.start) for entry in self._entries]

    def trained_in(self, vector: torch.Tensor) -> list[torch.Tensor]:
        """Return the trained parameters in a vector (1-D uint8, of `held` or of its trained range), in their order."""
        return [_view(vector, entry, self.held.start) for entry in self.trained_entries]

    def gradients(self, slot: int) -> list[torch.Tensor]:
        """Return the gradients of `trained` in a slot, on the device of the module."""
        return self._slots[slot]

    def write(self, vector: torch.Tensor) -> None:
        """Write the values of the module into a vector (1-D uint8, of the range `held`)."""
        for tensor, view in zip(self._own(), self._views(vector), strict=True):
            view.copy_(tensor)

    def read(self, vector: torch.Tensor) -> None:
        """Copy the values in a vector (1-D uint8, of the range `held`) into the module."""
        for tensor, view in zip(self._own(), self._views(vector), strict=True):
            tensor.copy_(view)

    def _own(self) -> Iterator[torch.Tensor]:
        """Yield the part of the module's tensor for each entry."""
        for entry, tensor, cut in zip(self._entries, self._tensors, self._cut, strict=True):
            piece, whole = entry.piece, tensor.detach()
            yield whole.narrow(piece.dimension, piece.start, piece.stop - piece.start) if cut else whole

    def initial(self, slot: int) -> None:
        """Write the values of the model into a gradient slot, to initialise the shards."""
        self.write(self._gradients[slot])
        if self._users is not None:
            self._users.keep("frozen")  # all other tensors are fetched again

    def swap(self, landing: int, parts: Sequence[Range] = ()) -> None:
        """Compute with parameter vector `landing` from now on; if `parts` are given, only these have changed.

        The module's tensors stay the same objects, and those of a user's module keep their memory.
        """
        if self._landed is not None:
            landing = self._landed(landing)
        self._landing = landing
        if self._copied:
            self._arrive(landing, parts)
            landing = 0
        before, self._current = self._current, landing
        if self._users is not None:
            self._copy(self._partitions[landing], parts, frozen=before < 0)
            return
        if landing != before:
            for tensor, view, cut in zip(self._tensors, self._partitions[landing], self._cut, strict=True):
                if not cut:
                    tensor.data = view
        if any(self._cut):
            for held, view, cut in zip(self._own(), self._partitions[landing], self._cut, strict=True):
                if cut:
                    held.copy_(view)
        if self._unwritten is not None:
            self._unwritten.begin()

    def _copy(self, values: Sequence[torch.Tensor], parts: Sequence[Range], frozen: bool) -> None:
        """Copy fetched values into the user's tensors."""
        assert self._users is not None
        some = None
        if frozen or parts or self._unpushed:
            some = [
                at
                for at, entry in enumerate(self._entries)
                if frozen or entry.tensor.kind != "frozen"
                if not (self._unpushed and entry.tensor.kind == "buffer")
                if not parts or any(part.start <= entry.start < part.stop for part in parts)
            ]
        self._users.copy(values, some)

    def hold_buffers(self) -> None:
        """Keep the buffers until they are pushed, after a minibatch without a step."""
        self._unpushed = True

    def follow(self) -> None:
        """Take the current tensors of a user's module, whose buffers may be other tensors; raise as `UsersTensors`."""
        if self._users is not None:
            self._users.follow()
            self._tensors = self._users.now

    def written(self) -> list[str]:
        """Return the parameters of a user's module that the script has written to since the fetch."""
        return self._users.written() if self._users is not None else []

    def take_buffers(self, vector: torch.Tensor) -> None:
        """Write the buffers of a user's module into a vector (1-D uint8, of the range `held`)."""
        if self.owned:
            for entry, tensor in zip(self._entries, self._tensors, strict=True):
                if entry.tensor.kind == "buffer":
                    _view(vector, entry, self.held.start).copy_(tensor.detach())

    def _arrive(self, landing: int, parts: Sequence[Range]) -> None:
        """Copy a vector to the model's, frozen parameters once, and wait, so that the next fetch may land in it."""
        size = self.held.size if self._current < 0 else self._moving
        for part in parts or (Range(0, size),):
            self._live[part.start : part.stop].copy_(self._parameters[landing][part.start : part.stop])

    def accrue(self, slot: int, first: bool, weight: float = 1.0, model: int = 0) -> None:
        """Add the weighted gradient of a step to a slot, or begin the slot with it.

        The slot does not cover a parameter without a gradient in any of its steps.
        """
        if self._unwritten is not None:
            self._unwritten.check()
        if self._lies and first:
            self._lying[slot] = ()
            if weight == 1.0 and self._leave(slot):
                self._without[slot] = set()
                return
        without = set()
        for number, (view, parameter, of) in enumerate(zip(self._slots[slot], self.trained, self._models, strict=True)):
            if of != model:
                continue
            if parameter.grad is None:
                without.add(number)
                if first:
                    view.zero_()
            elif first:
                try:
                    view.copy_(parameter.grad.detach())  # if it stayed attached, its autograd history would grow
                except RuntimeError as error:
                    if parameter.grad.layout is torch.strided:
                        raise
                    raise TrainingError(
                        f"a gradient of shape {list(parameter.shape)} is sparse ({error}); make it dense: sparse=False"
                    ) from error
                if weight != 1.0:
                    view.mul_(weight)
            else:
                view.add_(parameter.grad.detach(), alpha=weight)
        self._without[slot] = without if first else self._without[slot] & without

    def covered(self, slot: int, part: Range) -> tuple[Range, ...]:
        """Return the parts of a range with a gradient or a buffer in a slot, in order."""
        if not self._without[slot]:
            return (part,)
        without = self._without[slot]
        return part.without(Range(e.start, e.stop) for at, e in enumerate(self.trained_entries) if at in without)

    def _leave(self, slot: int) -> bool:
        """Leave the gradient of a step in its tensors if they are laid out as in a slot; return whether they are."""
        gradients = []
        for parameter in self.trained:
            gradient = parameter.grad
            if gradient is None or gradient.layout is not torch.strided or not gradient.is_contiguous():
                return False
            gradients.append(gradient.detach())
        self._lying[slot] = gradients
        return True

    def lying(self, slot: int) -> Sequence[torch.Tensor]:
        """Return the gradients that `accrue` left in their tensors, or none if it wrote them to the slot."""
        return self._lying[slot]

    def free(self, slot: int) -> None:
        """Release the gradients that `accrue` left in their tensors, which all shards have applied."""
        self._lying[slot] = ()

    def descend(self, rate: float, clipping: float = 1.0) -> None:
        """Make one step of the local optimizer, at `rate` times its own, or of plain SGD at `rate`."""
        with torch.no_grad():
            if self.local is None:
                for parameter in self.trained:
                    if parameter.grad is not None:
                        parameter.add_(parameter.grad, alpha=-rate * clipping)
            else:
                self._step_locally(self.local, rate, clipping)
        if self._users is not None:
            self._users.keep("parameter")

    def _step_locally(self, optimizer: torch.optim.Optimizer, rate: float, clipping: float) -> None:
        for number, parameter in enumerate(self.trained):
            if parameter.grad is not None:
                self._stepped.add(number)
                if clipping != 1.0:
                    parameter.grad.mul_(clipping)
        # the groups keep their own rates, which a script may save, or set by a schedule
        rates = [group["lr"] for group in optimizer.param_groups]
        for group in optimizer.param_groups:
            group["lr"] *= rate
        optimizer.step()
        for group, own in zip(optimizer.param_groups, rates, strict=True):
            group["lr"] = own

    def change(self, slot: int, part: Range | None = None) -> None:
        """Write the fetched values of the trained parameters less the present ones into a slot, or a part of it.

        The slot does not cover parameters without a gradient since the fetch, or with parts ever.
        """
        # the shards' optimizer descends along this change, from the fetched values towards the present ones
        fetched = self.trained_in(self._parameters[self._landing])
        vectors = self.trained_entries, self._slots[slot], fetched, self.trained
        for entry, view, before, parameter in zip(*vectors, strict=True):
            some = _elements(entry, part)
            view.view(-1)[some].copy_(before.view(-1)[some]).sub_(parameter.detach().reshape(-1)[some])
        self._without[slot] = {*range(len(self.trained))} - self._stepped
        if part is None:
            self._stepped = set()

    def mix(self, part: Range, alpha: float) -> None:
        """Move the parameters in a range to the fetched ones, and take the fetched buffers.

        `alpha` is the weight of the present values, 0 to 1.
        """
        fetched = self._views(self._parameters[self._landing])
        for entry, before, tensor in zip(self._entries, fetched, self._tensors, strict=True):
            some = _elements(entry, part)
            if entry.tensor.kind == "frozen" or some.start >= some.stop:
                continue
            flat = tensor.detach().reshape(-1)
            there = before.view(-1)[some].to(flat.device)
            flat[some] = torch.lerp(flat[some], there, 1.0 - alpha) if entry.tensor.kind == "parameter" else there
            if not tensor.is_contiguous():
                tensor.detach().copy_(flat.view(tensor.shape))
        if self._users is not None:
            self._users.keep("parameter")

    def norm(self) -> float:
        """Return the norm of the step's gradient, in float64."""
        gradients = (parameter.grad for parameter in self.trained if parameter.grad is not None)
        parts = [torch.linalg.vector_norm(gradient, dtype=torch.float64) for gradient in gradients]
        return float(torch.linalg.vector_norm(torch.stack(parts))) if parts else 0.0

    def carry_buffers(self, slot: int, model: int = 0, part: Range | None = None) -> None:
        """Write the buffers of the model into a slot, or those in a part; on a GPU, then copy that to the host."""
        self._unpushed = False
        for view, at, of in self._buffers[slot]:
            if of == model:
                some = _elements(self._entries[at], part)
                view.view(-1)[some].copy_(self._tensors[at].detach().reshape(-1)[some])
        if self._staged:
            start, held = self.held.start, self.layout.models[model] if self.layout.models else None
            sent = held or (Range(part.start - start, part.stop - start) if part else Range(0, self._moving))
            self._gradients[slot][sent.start : sent.stop].copy_(self._working[slot][sent.start : sent.stop])

    def outgoing(self, slot: int, part: Range) -> torch.Tensor:
        """Return a range of a gradient slot."""
        return self._gradients[slot][part.start - self.held.start : part.stop - self.held.start]


def _elements(entry: Entry, part: Range | None) -> slice:
    """Return the elements of an entry that a range of the flat vector has; all where it is None."""
    count = math.prod(entry.shape)
    if part is None or not count:
        return slice(0, count)
    width = (entry.stop - entry.start) // count
    first, last = (max(entry.start, min(at, entry.stop)) - entry.start for at in (part.start, part.stop))
    return slice(first // width, last // width)


def _view(vector: torch.Tensor, entry: Entry, start: int) -> torch.Tensor:
    """Return the view of an entry in a vector that begins at byte `start` of the flat vector."""
    return vector[entry.start - start : entry.stop - start].view(getattr(torch, entry.tensor.dtype)).view(entry.shape)
