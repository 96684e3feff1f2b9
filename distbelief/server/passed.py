"""A shard's slice in memory that several processes share. Each has two buffers of its own for the parameters, since its
model computes in one while others make updates; what the optimizer keeps beside them, which only who has the lock
reads, lies in two for all. An update is made into those that are not the newest, and then one store of 8 bytes says
that they are.

Whoever calls anything here but `newest` holds the shard's lock. Who dies in the middle leaves buffers half written that
nobody reads: there is nothing to repair.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import accumulate
from typing import NamedTuple

import torch

from distbelief.core import roles
from distbelief.core.conversations.agreement import Squares
from distbelief.core.effects import Payload
from distbelief.core.optimizer import GroupOption
from distbelief.core.settings import Plan
from distbelief.errors import JobFailed, LocalProtocolError
from distbelief.fabric.copying import copy_bytes
from distbelief.server.partial import MISSED
from distbelief.server.slice import TorchSlice
from distbelief.sharding.layout import Range

PAGE = 4096
NOTE = 64 << 10
"""Most bytes of what a shard knows beside its slice, as a note; what is not written takes no memory."""


class _Kept(NamedTuple):
    """An array beside the vector: a master, or the optimizer's state; and where it begins, in bytes."""

    name: str
    dtype: torch.dtype
    shape: torch.Size
    offset: int

    def of(self, memory: torch.Tensor) -> torch.Tensor:
        """It, in a buffer's bytes."""
        size = self.shape.numel() * self.dtype.itemsize
        return memory[self.offset : self.offset + size].view(self.dtype).view(self.shape)


class PassedLayout:
    """Layout of the memory of all shards of a job.

    Shard by shard a page with its word, then the notes, two each; then two times what the shards' optimizers keep; then
    the buffers: a whole flat vector each, so that a model can live in one.

    Args:
        plan: of the job.

    Attributes:
        length: bytes in all.
    """

    def __init__(self, plan: Plan) -> None:
        self.plan, self._shards = plan, len(plan.assignments)
        self.places = plan.settings.replicas + 1
        """Number of holders of buffers: each replica, and behind them the shard."""
        self.kept = [_kept(plan, shard) for shard in range(self._shards)]
        beside = [_paged(size) for _, size in self.kept]
        self._offsets = [0, *accumulate(beside)]
        self._beside = self._shards * (PAGE + 2 * NOTE)
        self._vectors = self._beside + 2 * self._offsets[-1]
        self._stride = _paged(plan.layout.total)
        self.length = self._vectors + self.buffers * self._stride

    @property
    def buffers(self) -> int:
        """Two for each place."""
        return 2 * self.places

    def words(self, memory: torch.Tensor, shard: int) -> memoryview:
        """A shard's numbers, each of 64 bits."""
        return memory[shard * PAGE : (shard + 1) * PAGE].numpy().data.cast("Q")

    def note(self, memory: torch.Tensor, shard: int, half: int) -> memoryview:
        """Room for what a shard knows, as bytes: one of two."""
        start = self._shards * PAGE + (2 * shard + half) * NOTE
        return memory[start : start + NOTE].numpy().data

    def vector(self, memory: torch.Tensor, buffer: int) -> torch.Tensor:
        """The flat vector of a buffer: 1-D uint8."""
        start = self._vectors + buffer * self._stride
        return memory[start : start + self.plan.layout.total]

    def beside(self, memory: torch.Tensor, shard: int, half: int) -> torch.Tensor:
        """Return one of two areas for what a shard keeps beside its parameters: 1-D uint8."""
        start = self._beside + half * self._offsets[-1] + self._offsets[shard]
        return memory[start : start + self.kept[shard][1]]


def _paged(size: int) -> int:
    return -(-size // PAGE) * PAGE


def _kept(plan: Plan, shard: int) -> tuple[list[_Kept], int]:
    """The arrays that a slice has beside its ranges once it was stepped, and their bytes in all.

    Those by which some parameters have missed steps come last: most jobs never use them.
    """
    probe, end, found = TorchSlice(plan, shard), 0, []
    probe.apply("", 0, torch.zeros(plan.assignments[shard].moving.size, dtype=torch.uint8), 1.0)
    probe.miss()
    arrays = {name: one for name, one in probe.arrays().items() if not name.startswith("vector.")}
    for name in sorted(arrays, key=_is_missed):
        found.append(_Kept(name, arrays[name].dtype, arrays[name].shape, end))
        end += -(-arrays[name].nbytes // 64) * 64
    return found, end


def _is_missed(name: str) -> bool:
    """Return whether an array counts the steps that each element has missed."""
    return name.endswith(f".{MISSED}")


def _nothing(_: int) -> Sequence[torch.Tensor]:
    return ()


class PassedSlice:
    """A slice as one of those who share it sees it; see `server.slice.Slice`.

    Args:
        layout: of the memory.
        shard: whose slice it is.
        memory: 1-D uint8, `layout.length` bytes, zeroed before anybody used it.
        place: of this one among those who share it.
    """

    lasts = True

    def __init__(self, layout: PassedLayout, shard: int, memory: torch.Tensor, place: int) -> None:
        self._layout, self._shard, self._memory = layout, shard, memory
        self._kept, self._size = layout.kept[shard]
        self._most = next((one.offset for one in self._kept if _is_missed(one.name)), self._size)
        """Bytes of what is kept where no parameter has missed a step."""
        self._range = layout.plan.assignments[shard].moving
        self._words = layout.words(memory, shard)
        self._own = (2 * place, 2 * place + 1)
        self._slices: dict[int, TorchSlice] = {}
        self._notes = [layout.note(memory, shard, half) for half in (0, 1)]
        self._changed = -1
        """The buffer in which a change is under way; -1 for none."""
        self._options: Sequence[GroupOption] = ()
        self.adds = not self._kept and self._at(self._own[0]).adds
        """True where an update is an addition, and needs no copy of the newest."""
        self.lying: Callable[[int], Sequence[torch.Tensor]] = _nothing
        """The gradients of a slot that were left where they were made; none where they lie in the slot."""

    # who is newest

    @property
    def changes(self) -> int:
        """Number of changes that were published; 0 where the memory holds nothing yet."""
        return int(self._words[0]) >> 32

    @property
    def newest(self) -> int:
        """The buffer that holds the parameters, of those that are published; -1 for none."""
        return (int(self._words[0]) & 0xFFFF) - 1

    def note(self) -> bytes:
        """Return the note that was published with the newest change."""
        room = self._notes[self._note_half]
        size = int.from_bytes(room[:8], "little")
        return bytes(room[8 : 8 + size])

    @property
    def _note_half(self) -> int:
        """Half, of two, with the published note."""
        return int(self._words[0]) >> 16 & 1

    @property
    def _kept_half(self) -> int:
        """Half, of two, with the optimizer's state: that of the change under way, else the published one."""
        published = int(self._words[0]) >> 17 & 1
        return published if self._changed < 0 else 1 - published

    def publish(self, note: bytes) -> None:
        """Have what was changed, and a note, be what everybody goes on from: both, or neither.

        Raises:
            JobFailed: the note is longer than there is room.
        """
        if len(note) > NOTE - 8:
            raise JobFailed(
                f"{roles.shard(self._shard)} knows {len(note)} bytes beside its parameters, and there is room for "
                f"{NOTE - 8}: train with --path served"
            )
        half = 1 - self._note_half
        self._write_note(half, note)
        self._point_to(self.now, self._kept_half, half)
        self._changed = -1

    def _write_note(self, half: int, note: bytes) -> None:
        room = self._notes[half]
        room[:8] = len(note).to_bytes(8, "little")
        room[8 : 8 + len(note)] = note

    def _point_to(self, buffer: int, kept: int, note: int) -> None:
        """The one store: bits 0 to 15 have the buffer, counted from 1, bit 16 the half of the note, bit 17 that of what
        is kept, and bits 32 to 63 the changes.
        """
        self._words[0] = (self.changes + 1 & 0xFFFFFFFF) << 32 | kept << 17 | note << 16 | buffer + 1

    def abandon(self) -> None:
        """Leave a change that was begun, and goes no further."""
        self._changed = -1

    @property
    def changed(self) -> bool:
        """True where something was changed that is not published."""
        return self._changed >= 0

    def sign(self, moment: int) -> None:
        """Whoever has the lock says so, and since which nanosecond of the machine's clock."""
        self._words[1], self._words[2] = self._own[0] // 2, moment

    def signed(self) -> tuple[int, int]:
        """The place of whoever had the lock last, and since when."""
        return int(self._words[1]), int(self._words[2])

    # buffers

    def of(self, model: int) -> PassedSlice:
        """It is of one: shards of several make their updates themselves."""
        return self

    def _at(self, buffer: int) -> TorchSlice:
        """The slice of a buffer."""
        known = self._slices.get(buffer)
        if known is None:
            vector, frozen = (
                self._layout.vector(self._memory, buffer),
                self._layout.plan.assignments[self._shard].frozen,
            )
            home = self._layout.vector(self._memory, self._layout.buffers - 2)
            known = self._slices[buffer] = TorchSlice(
                self._layout.plan,
                self._shard,
                vector[self._range.start : self._range.stop],
                home[frozen.start : frozen.stop],
            )
        return known

    def _arrays(self) -> dict[str, torch.Tensor]:
        beside = self._layout.beside(self._memory, self._shard, self._kept_half)
        return {one.name: one.of(beside) for one in self._kept if self._uneven or not _is_missed(one.name)}

    @property
    def _uneven(self) -> bool:
        """True where some parameters have made fewer steps than others."""
        return bool(self._words[10 + self._kept_half])

    @property
    def _is_stepped(self) -> bool:
        """True where the optimizer's state is in use."""
        return bool(self._words[8 + self._kept_half])

    @_is_stepped.setter
    def _is_stepped(self, stepped: bool) -> None:
        self._words[8 + self._kept_half] = stepped

    def _meet(self) -> TorchSlice:
        """A slice as it is now, whoever wrote there last."""
        one = self._at(self.now)
        if self._kept:
            one.adopt(self._arrays(), self._is_stepped)
        one.set_options(self._options)
        return one

    def _change(self) -> TorchSlice:
        """The slice to make a change in: in a buffer of one's own, a copy of the newest."""
        if self._changed >= 0:
            one = self._at(self._changed)
            one.set_options(self._options)
            return one
        newest, half = self.newest, self._kept_half
        self._changed = self._idle
        if newest >= 0:
            self._copy(newest, half)
        else:
            self._begin()
        return self._meet()

    @property
    def _idle(self) -> int:
        """Buffer in which the next change is made. Before anybody has a part in the memory it is the first, where the
        first replica goes on: the shard's own buffers take no memory until another's pushes are made there.
        """
        if self.newest < 0:
            return 0
        return self._own[self.newest == self._own[0]]

    def _part(self, buffer: int) -> torch.Tensor:
        """The moving range in a buffer: 1-D uint8."""
        return self._layout.vector(self._memory, buffer)[self._range.start : self._range.stop]

    def _copy(self, newest: int, half: int) -> None:
        """Begin a change with what was there before it, in a buffer and a half."""
        copy_bytes(self._part(self._changed), self._part(newest))
        if self._kept:
            size = self._size if self._words[10 + half] else self._most
            here, there = (self._layout.beside(self._memory, self._shard, one) for one in (self._kept_half, half))
            copy_bytes(here[:size], there[:size])
            for word in (8, 10):
                self._words[word + self._kept_half] = self._words[word + half]

    def _begin(self) -> None:
        """Begin the first change: some optimizers have a state before their first step."""
        fresh = TorchSlice(self._layout.plan, self._shard)
        self._is_stepped = any(name.startswith("state.") for name in fresh.arrays())
        self._keep(fresh)

    def _keep(self, one: TorchSlice) -> None:
        """Have what a slice keeps beside its ranges lie in the memory, wherever it was made."""
        made = one.arrays()
        for name, room in self._arrays().items():
            if name in made and made[name].data_ptr() != room.data_ptr():
                room.copy_(made[name])
            elif name not in made and _is_missed(name):
                room.zero_()  # of a change that was never published

    def _settle(self) -> None:
        """After a change: the optimizer may have made its state, which it keeps in memory of its own then."""
        one = self._slices[self._changed]
        if self._kept and not (self._is_stepped and self._uneven == one.uneven):
            self._words[10 + self._kept_half] = one.uneven
            self._keep(one)
            self._is_stepped = any(name.startswith("state.") for name in one.arrays())
            one.adopt(self._arrays(), self._is_stepped)

    @property
    def own(self) -> tuple[int, int]:
        """The buffers of this place."""
        return self._own

    def holds(self, start: int, stop: int) -> bool:
        """Return whether bytes of the flat vector are those that move."""
        return (start, stop) == (self._range.start, self._range.stop)

    def bring(self, buffer: int) -> None:
        """Have a buffer of one's own, which must not be the newest, hold the parameters too."""
        copy_bytes(self._part(buffer), self._part(self.newest))

    @property
    def now(self) -> int:
        """The buffer of the parameters, with the change that is under way."""
        return self.newest if self._changed < 0 else self._changed

    # what a slice does

    def fill(self, payload: Payload, frozen: bool) -> None:
        """Take initial values for the moving or the frozen range."""
        self._change().fill(payload, frozen)
        self._settle()

    def apply(self, sender: str, slot: int, payload: Payload, factor: float, covered: Sequence[Range] = ()) -> None:
        """Make one optimizer step with a push, into a buffer of one's own; what is left out adds zero."""
        if not self.adds or self._options or self.now < 0:
            one = self._change()
            if gradients := self.lying(slot):
                one.gather_lying(gradients, payload)
            one.apply(sender, slot, payload, factor, covered)
            self._settle()
            return
        before = self._at(self.now)
        self._changed = self._idle if self._changed < 0 else self._changed
        one = self._at(self._changed)
        if gradients := self.lying(slot):
            one.add_to(before, gradients, factor)
        else:
            one.apply_to(before, sender, slot, payload, factor)

    def gather(
        self, sender: str, slot: int, payload: Payload, weight: float, average: bool, covered: Sequence[Range] = ()
    ) -> None:
        """Add a push to what the next `step` is made with."""
        self._change().gather(sender, slot, payload, weight, average, covered)

    def step(self, factor: float, weight: float, norms: Squares = ()) -> None:
        """Make one optimizer step with what was gathered."""
        self._change().step(factor, weight, norms)
        self._settle()

    def set_options(self, options: Sequence[GroupOption]) -> None:
        """Step with these options of parameter groups from here on, and with the job's where none is named."""
        self._options = options

    def squares(self) -> Squares:
        """Return no norms of cut layers: no other shard holds parts of them."""
        return ()

    @property
    def sum_size(self) -> int:
        """Bytes of a `sum`."""
        return self._at(self._own[0]).sum_size

    def sum(self) -> Payload:
        """Refuse to give what was gathered.

        Raises:
            LocalProtocolError: always: it is for a standby, which needs the pushes themselves.
        """
        raise LocalProtocolError("a slice that replicas update themselves has no sums: a standby needs --path served")

    def take_sum(self, payload: Payload, parts: int) -> None:
        """Refuse, as `sum` does."""
        self.sum()

    def moving(self) -> Payload:
        """The bytes of the moving range, as they are."""
        return self._at(self.now).moving()

    def frozen(self) -> Payload:
        """The bytes of the frozen range, which lie with the shard."""
        return self._at(self._own[0]).frozen()

    def arrays(self) -> dict[str, torch.Tensor]:
        """Everything, by name, for a checkpoint: views, not copies, which hold as long as the lock is held."""
        return self._meet().arrays()

    def load(self, arrays: dict[str, torch.Tensor]) -> None:
        """Take back what `arrays` gave."""
        one = self._change()
        one.load(arrays)
        self._is_stepped = False
        self._settle()
