"""A shard's slice in memory that several processes share.

    words of each shard     a page: the published state (8 bytes), who has the lock and since when, what is stepped
    notes of each shard     two, of the shard's state beside its slice; or a row of counts for each place
    half 0, half 1          states of the optimizers of all shards
    place 0                 two buffers, each a whole flat vector
    ...                     the replicas' places, and behind them that of the shards' processes

Each process has two buffers for the parameters: its model computes in one while others make updates. The optimizer's
state lies in two halves for all, since only the holder of the lock reads it. An update is made in a buffer and a half
that are not the newest; then one store of 8 bytes makes them the newest. Replicas without a lock (`unlocked.py`) use
the first buffer alone, half 0, and the counts.

All methods but `newest` and `changes` need the shard's lock. It orders one process's writes before another's reads, on
any processor, also where the kernel takes it from a dead process. `changes` without the lock is a hint, after which the
lock is taken. A process that dies amid an update leaves half-written buffers that are never read: nothing needs repair.
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
from distbelief.server.optimizers import MISSED
from distbelief.server.slice import TorchSlice, copy_bytes
from distbelief.sharding.layout import Range

Memory = Callable[[int], torch.Tensor]
"""Returns so many bytes that all processes of the job share (1-D uint8), zeroed in the beginning."""
PAGE = 4096
NOTE = 64 << 10
"""Most bytes of a note of a shard's state; unwritten pages take no memory."""
ROW = 64
"""Number of counts of each place, where there is no lock; they lie in place of the notes."""
STATE, HOLDER, SINCE, STEPPED, UNEVEN = 0, 1, 2, 8, 10
"""A shard's words: the published state; the lock's holder, and since when; for each half whether its optimizer has
stepped, and whether parameters have missed steps.
"""


class _Kept(NamedTuple):
    """An array beside the vector: a master, or a part of the optimizer's state."""

    name: str
    dtype: torch.dtype
    shape: torch.Size
    offset: int

    def of(self, memory: torch.Tensor) -> torch.Tensor:
        size = self.shape.numel() * self.dtype.itemsize
        return memory[self.offset : self.offset + size].view(self.dtype).view(self.shape)


class PassedLayout:
    """Layout of the memory of all shards of a job, of `length` bytes."""

    def __init__(self, plan: Plan) -> None:
        self.plan, self._shards = plan, len(plan.assignments)
        self.places = plan.settings.replicas + 1
        """Number of places, each with two buffers: the replicas', and the shards'."""
        self.kept = [_kept(plan, shard) for shard in range(self._shards)]
        beside = [_paged(size) for _, size in self.kept]
        self._offsets = [0, *accumulate(beside)]
        self._beside = self._shards * (PAGE + 2 * NOTE)
        self._vectors = self._beside + 2 * self._offsets[-1]
        self._total, self._stride = plan.layout.total, _paged(plan.layout.total)
        self.length = self._vectors + 2 * self.places * self._stride

    def words(self, memory: torch.Tensor, shard: int) -> memoryview:
        """Return a shard's words of 64 bits."""
        return memory[shard * PAGE : (shard + 1) * PAGE].numpy().data.cast("Q")

    def note(self, memory: torch.Tensor, shard: int, half: int) -> memoryview:
        """Return the room for one of a shard's two notes, as bytes."""
        start = self._shards * PAGE + (2 * shard + half) * NOTE
        return memory[start : start + NOTE].numpy().data

    def rows(self, memory: torch.Tensor) -> memoryview:
        """Return the counts of 64 bits, in the room for notes of the only shard, where there is no lock."""
        return memory[PAGE : PAGE + 8 * self.places * ROW].numpy().data.cast("q")

    def state(self, memory: torch.Tensor) -> dict[str, torch.Tensor]:
        """Return the arrays beside the parameters of the only shard, where there is no lock and no step is missed."""
        beside = self.beside(memory, 0, 0)
        return {array.name: array.of(beside) for array in self.kept[0][0] if not _is_missed(array.name)}

    def vector(self, memory: torch.Tensor, buffer: int) -> torch.Tensor:
        """Return the flat vector of a buffer: 1-D uint8."""
        start = self._vectors + buffer * self._stride
        return memory[start : start + self._total]

    def beside(self, memory: torch.Tensor, shard: int, half: int) -> torch.Tensor:
        """Return one of the two halves of a shard's arrays beside its parameters: 1-D uint8."""
        start = self._beside + half * self._offsets[-1] + self._offsets[shard]
        return memory[start : start + self.kept[shard][1]]


def _paged(size: int) -> int:
    return -(-size // PAGE) * PAGE


def _kept(plan: Plan, shard: int) -> tuple[list[_Kept], int]:
    """Return the arrays of a stepped slice beside its ranges, and their bytes in all."""
    # A torch optimizer shows its state only after a step: make one, with zeros. Counts of missed steps come last, so
    # that jobs without them need not copy them.
    probe, end, kept = TorchSlice(plan, shard), 0, []
    probe.apply("", 0, torch.zeros(plan.assignments[shard].moving.size, dtype=torch.uint8), 1.0)
    probe.miss()
    arrays = {name: array for name, array in probe.arrays().items() if not name.startswith("vector.")}
    for name in sorted(arrays, key=_is_missed):
        kept.append(_Kept(name, arrays[name].dtype, arrays[name].shape, end))
        end += -(-arrays[name].nbytes // 64) * 64
    return kept, end


def _is_missed(name: str) -> bool:
    """Return whether an array counts missed steps."""
    return name.endswith(f".{MISSED}")


# A change begins with a copy of the newest parameters and state, in a buffer of this place and the other half
# (`_copy`), or with a fresh state for the first (`_keep`). A `TorchSlice` over that memory makes the change, and arrays
# that the optimizer has newly made are moved into the memory (`_settle`). Further changes of the same turn use the same
# buffer. `publish` writes a note of the shard's state, and then the one word that points to all three: before that
# store nothing has happened, and after it everything has. A process that dies earlier leaves garbage only where the
# next change is copied over it.
#
# An update in place would be unsafe: the kernel releases a dead process's lock, but the progress of its step is
# unknown.
class PassedSlice:
    """A shared slice at one place; see `server.slice.Slice`.

    Args:
        memory: 1-D uint8, `layout.length` bytes, zeroed in the beginning.
        place: number of this process's place.
    """

    lasts = True

    def __init__(self, layout: PassedLayout, shard: int, memory: torch.Tensor, place: int) -> None:
        self._layout, self._shard, self._memory = layout, shard, memory
        self._kept, self._size = layout.kept[shard]
        self._even_size = next((array.offset for array in self._kept if _is_missed(array.name)), self._size)
        """Bytes of the arrays without counts of missed steps."""
        self._range = layout.plan.assignments[shard].moving
        self._words = layout.words(memory, shard)
        self.own = (2 * place, 2 * place + 1)
        """Numbers of the buffers of this place."""
        self._slices: dict[int, TorchSlice] = {}
        self._notes = [layout.note(memory, shard, half) for half in (0, 1)]
        self._changed = -1
        """Buffer of the present change; -1 for none."""
        self._options: Sequence[GroupOption] = ()
        self.adds = not self._kept and self._at(self.own[0]).adds
        """True where an update is an addition, and needs no copy of the newest."""
        self.lying: Callable[[int], Sequence[torch.Tensor]] = lambda _: ()
        """Returns the gradients of a slot that lie where autograd made them; none where they are in the slot."""

    # the word that says which buffer is newest

    @property
    def changes(self) -> int:
        """Number of published changes; 0 where the memory holds nothing yet."""
        return int(self._words[STATE]) >> 32

    @property
    def newest(self) -> int:
        """Number of the buffer with the published parameters; -1 for none."""
        return (int(self._words[STATE]) & 0xFFFF) - 1

    def note(self) -> bytes:
        """Return the note of the newest published change."""
        room = self._notes[self._note_half]
        size = int.from_bytes(room[:8], "little")
        return bytes(room[8 : 8 + size])

    @property
    def _note_half(self) -> int:
        """Number (0 or 1) of the half of the note that is published."""
        return int(self._words[STATE]) >> 16 & 1

    @property
    def _kept_half(self) -> int:
        """Number of the half with the optimizer's state: that of the present change, else the published one."""
        published = int(self._words[STATE]) >> 17 & 1
        return published if self._changed < 0 else 1 - published

    def publish(self, note: bytes) -> None:
        """Publish the present change and a note, in one store; raises `JobFailed` where the note is too long."""
        if len(note) > NOTE - 8:
            raise JobFailed(
                f"{roles.shard(self._shard)} has {len(note)} bytes of state beside its parameters, and room for "
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
        # One aligned 8-byte store, which no reader sees half done. Bits 0 to 15 hold the buffer, counted from 1, as
        # zeroed memory means none; bit 16 the half of the note, bit 17 that of the state. Bits 32 to 63 count the
        # changes, so this word alone shows a new one.
        self._words[STATE] = (self.changes + 1 & 0xFFFFFFFF) << 32 | kept << 17 | note << 16 | buffer + 1

    def abandon(self) -> None:
        """Drop the present change."""
        self._changed = -1

    @property
    def changed(self) -> bool:
        """True where there is a change that is not published."""
        return self._changed >= 0

    def sign(self, moment: int) -> None:
        """Note that this process has the lock, since a moment of the machine's clock in nanoseconds."""
        self._words[HOLDER], self._words[SINCE] = self.own[0] // 2, moment

    def signed(self) -> tuple[int, int]:
        """Return the number of the lock's last holder, and the moment at which it took the lock."""
        return int(self._words[HOLDER]), int(self._words[SINCE])

    # buffers

    def of(self, model: int) -> PassedSlice:
        return self

    def _at(self, buffer: int) -> TorchSlice:
        known = self._slices.get(buffer)
        if known is None:
            plan, first = self._layout.plan, 2 * self._layout.places - 2
            frozen = plan.assignments[self._shard].frozen  # there is one copy, in the first buffer of the shard
            memory = self._layout.vector(self._memory, first)[frozen.start : frozen.stop]
            known = self._slices[buffer] = TorchSlice(plan, self._shard, self._part(buffer), memory)
        return known

    def _arrays(self) -> dict[str, torch.Tensor]:
        beside = self._layout.beside(self._memory, self._shard, self._kept_half)
        return {array.name: array.of(beside) for array in self._kept if self._uneven or not _is_missed(array.name)}

    @property
    def _uneven(self) -> bool:
        """True where some parameters have made fewer steps than others."""
        return bool(self._words[UNEVEN + self._kept_half])

    @property
    def _is_stepped(self) -> bool:
        """True where the optimizer has stepped, and its state is in use."""
        return bool(self._words[STEPPED + self._kept_half])

    @_is_stepped.setter
    def _is_stepped(self, stepped: bool) -> None:
        self._words[STEPPED + self._kept_half] = stepped

    def _current(self) -> TorchSlice:
        """Return the present slice, with the state that another process may have written."""
        held = self._at(self.now)
        if self._kept:
            held.adopt(self._arrays(), self._is_stepped)
        held.set_options(self._options)
        return held

    def _change(self) -> TorchSlice:
        """Return the slice for a change: a copy of the newest, in a buffer of this place."""
        if self._changed >= 0:
            held = self._at(self._changed)
            held.set_options(self._options)
            return held
        newest, half = self.newest, self._kept_half
        self._changed = self._idle
        if newest >= 0:
            self._copy(newest, half)
        else:
            self._keep(TorchSlice(self._layout.plan, self._shard))  # some optimizers have a state already
        return self._current()

    @property
    def _idle(self) -> int:
        # the first change is made in the first replica's buffer: the shard's buffers take no memory until it makes an
        # update
        if self.newest < 0:
            return 0
        return self.own[self.newest == self.own[0]]

    def _part(self, buffer: int) -> torch.Tensor:
        """Return the moving range in a buffer: 1-D uint8."""
        return self._layout.vector(self._memory, buffer)[self._range.start : self._range.stop]

    def _copy(self, newest: int, half: int) -> None:
        """Begin a change as a copy of a buffer and a half."""
        copy_bytes(self._part(self._changed), self._part(newest))
        if self._kept:
            size = self._size if self._words[UNEVEN + half] else self._even_size
            to, source = (self._layout.beside(self._memory, self._shard, of) for of in (self._kept_half, half))
            copy_bytes(to[:size], source[:size])
            for word in (STEPPED, UNEVEN):
                self._words[word + self._kept_half] = self._words[word + half]

    def _keep(self, held: TorchSlice) -> None:
        """Copy a slice's arrays beside its ranges into the memory, unless they are there, and note a state."""
        arrays = held.arrays()
        self._is_stepped = any(name.startswith("state.") for name in arrays)
        for name, room in self._arrays().items():
            if name in arrays and arrays[name].data_ptr() != room.data_ptr():
                room.copy_(arrays[name])
            elif name not in arrays and _is_missed(name):
                room.zero_()  # the last change of this place was never published

    def _settle(self) -> None:
        """Move new arrays of the optimizer into the memory."""
        # The first step makes the optimizer's state, and the first step that leaves a parameter out makes the counts of
        # missed steps, both in private memory, which no other process sees.
        held = self._slices[self._changed]
        if self._kept and not (self._is_stepped and self._uneven == held.uneven):
            self._words[UNEVEN + self._kept_half] = held.uneven
            self._keep(held)
            held.adopt(self._arrays(), self._is_stepped)

    def holds(self, start: int, stop: int) -> bool:
        """Return whether a range of the flat vector is the moving one."""
        return (start, stop) == (self._range.start, self._range.stop)

    def bring(self, buffer: int) -> None:
        """Copy the newest parameters to another buffer of this place."""
        copy_bytes(self._part(buffer), self._part(self.newest))

    @property
    def now(self) -> int:
        """Number of the buffer with the parameters after the changes so far."""
        return self.newest if self._changed < 0 else self._changed

    # the slice

    def fill(self, payload: Payload, frozen: bool) -> None:
        self._change().fill(payload, frozen)
        self._settle()

    def apply(self, sender: str, slot: int, payload: Payload, factor: float, covered: Sequence[Range] = ()) -> None:
        # An update that only adds reads the newest parameters and the gradient, and writes the sum: it needs no copy
        # first. Parameters that a push does not cover are zero in its slot, and add nothing.
        if not self.adds or self._options or self.now < 0:
            held = self._change()
            if gradients := self.lying(slot):
                held.gather_lying(gradients, payload)
            held.apply(sender, slot, payload, factor, covered)
            self._settle()
            return
        before = self._at(self.now)
        self._changed = self._idle if self._changed < 0 else self._changed
        held = self._at(self._changed)
        if gradients := self.lying(slot):
            held.add_to(before, gradients, factor)
        else:
            held.apply_to(before, sender, slot, payload, factor)

    def gather(
        self, sender: str, slot: int, payload: Payload, weight: float, average: bool, covered: Sequence[Range] = ()
    ) -> None:
        self._change().gather(sender, slot, payload, weight, average, covered)

    def step(self, factor: float, weight: float, norms: Squares = ()) -> None:
        self._change().step(factor, weight, norms)
        self._settle()

    def set_options(self, options: Sequence[GroupOption]) -> None:
        self._options = options

    def squares(self) -> Squares:
        return ()

    @property
    def sum_size(self) -> int:
        return self._at(self.own[0]).sum_size

    def sum(self) -> Payload:
        """Refuse, with a `LocalProtocolError`: sums are for a standby."""
        raise LocalProtocolError("a slice that replicas update themselves has no sums: a standby needs --path served")

    def take_sum(self, payload: Payload, parts: int) -> None:
        self.sum()

    def moving(self) -> Payload:
        return self._at(self.now).moving()

    def frozen(self) -> Payload:
        return self._at(self.own[0]).frozen()

    def arrays(self) -> dict[str, torch.Tensor]:
        """Return everything that a checkpoint holds, by name: views, valid while the lock is held."""
        return self._current().arrays()

    def load(self, arrays: dict[str, torch.Tensor]) -> None:
        held = self._change()
        held.load(arrays)
        self._is_stepped = False
        self._settle()
