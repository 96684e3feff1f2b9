"""The mirror of a shard: what its standby has been sent and has confirmed, and what the shard may say only then."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from typing import NamedTuple

import msgspec
import torch

from distbelief.core.conversations.agreement import Ruling
from distbelief.core.conversations.mirroring import Confirmed, Copied, Decided, StatePart, StateSent
from distbelief.core.effects import Connect, Effect, Lend, Payload, Send
from distbelief.core.events import Lent
from distbelief.core.ledger import PushTaken
from distbelief.core.messages import Address, Message
from distbelief.errors import RemoteProtocolError
from distbelief.server.slice import as_bytes


class ArrayBytes(NamedTuple):
    """Some bytes of one array, and where in it they belong."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    offset: int
    data: torch.Tensor


def pack(arrays: dict[str, torch.Tensor], most: int) -> Iterator[ArrayBytes]:
    """Copy arrays into pieces of at most so many bytes.

    >>> [(piece.name, piece.offset, piece.data.nbytes) for piece in pack({"a": torch.zeros(5)}, most=16)]
    [('a', 0, 16), ('a', 16, 4)]
    """
    for name, array in arrays.items():
        data = as_bytes(array.detach().clone())
        for offset in range(0, max(1, data.nbytes), most):
            yield ArrayBytes(
                name, str(array.dtype).removeprefix("torch."), tuple(array.shape), offset, data[offset : offset + most]
            )


class Unpacking:
    """Arrays that are put together again from pieces.

    Args:
        limit: most bytes that they may have in all.
    """

    # a piece says itself how large its array is: without a limit a few bytes of a peer could take all memory

    def __init__(self, limit: int) -> None:
        self.arrays: dict[str, torch.Tensor] = {}
        self._left = limit

    def take(self, piece: StatePart, payload: Payload | None) -> None:
        """Take a piece; nothing where payloads are phantoms.

        Raises:
            RemoteProtocolError: it fits no array, or there are more bytes than there may be.
        """
        if not isinstance(payload, torch.Tensor):
            return
        if piece.name not in self.arrays:
            dtype, numbers = getattr(torch, piece.dtype, None), math.prod(piece.shape)
            if (
                not isinstance(dtype, torch.dtype)
                or min(piece.shape, default=0) < 0
                or (size := numbers * dtype.itemsize) > self._left
            ):
                raise RemoteProtocolError(
                    f"array {piece.name!r} of {piece.dtype} {piece.shape} does not fit what is left, {self._left} bytes"
                )
            self._left -= size
            self.arrays[piece.name] = torch.zeros(piece.shape, dtype=dtype)
        room = as_bytes(self.arrays[piece.name])[max(0, piece.offset) : max(0, piece.offset) + payload.nbytes]
        if room.nbytes != payload.nbytes:
            raise RemoteProtocolError(
                f"{payload.nbytes} bytes at {piece.offset} are not of array {piece.name!r} {piece.shape}"
            )
        room.copy_(payload.view(torch.uint8))


def stage(payload: Payload, room: Payload | None) -> Payload:
    """Copy bytes into the beginning of a vector, and return them there; a phantom stays what it is."""
    if not (isinstance(payload, torch.Tensor) and isinstance(room, torch.Tensor)):
        return payload
    return room[: payload.nbytes].copy_(as_bytes(payload))


SLOTS = 2
"""Number of vectors that bytes are sent from: one is read while the next is written."""
LEAST_SLOT = 1 << 12
"""Least bytes of such a vector."""

Make = Callable[[int, int], Message]
"""Maker of a message, from its number and the slot that its bytes lie in (-1 without bytes)."""


# Every change of the shard is a numbered message, sent in the order of the changes, and the standby confirms numbers in
# that order: one number says how far it is. What the shard has to say of a change (`after`) is kept with the number of
# the latest change, and released when that is confirmed. So nobody outside knows of anything that would be lost if the
# standby took over now.
#
# Floors of the policy go with the messages, and count once theirs is confirmed (`_floors`): a floor that only this
# shard knew would be lower again in its next life, behind what replicas hold.
class Mirror:
    """A shard's side of it. With no standby nothing is sent, and nothing waits.

    Args:
        standby: role of the standby.

    >>> mirror = Mirror("standby 0")
    >>> mirror.tell(step=(8, 1.0, 1.0)), mirror.after(["said at once"])
    ([], ['said at once'])
    >>> connect, whole = mirror.begin(Address("unix:@a", 0), {}, StateSent(0, 0, 0, 0, {}, (), 0, ()))
    >>> mirror.after(["said when it has all"]), mirror.kept(Confirmed(0, 1))
    ([], (['said when it has all'], True))
    """

    def __init__(self, standby: str) -> None:
        self.standby = standby
        self.place: Address | None = None
        """Address of the standby; None where there is none."""
        self.vectors: tuple[Payload, ...] = ()
        """Vectors that it sends from; none where payloads are phantoms."""
        self._size = LEAST_SLOT
        self._incarnation = 0
        self._free: list[int] = []
        """Slots that the standby does not read."""
        self._queue: deque[tuple[int, Make, Payload | None]] = deque()
        """Messages that wait for a slot, or behind one that does."""
        self._waiting: deque[tuple[int, list[Effect]]] = deque()
        """Effects, each with the number that is to be confirmed first."""
        self._number = self._confirmed = 0
        self._whole = 0
        """Number of the end of the state."""
        self._floors: deque[tuple[int, int]] = deque()
        """Floors that are not confirmed, each with the number of its message."""
        self._floor = self._told_floor = 0

    def lend(self, size: int) -> Lend:
        """Ask for vectors of that many bytes."""
        self._size = max(size, LEAST_SLOT)
        return Lend(self._size, SLOTS)

    def lent(self, sender: str, event: Lent, payload: Payload | None) -> list[Effect]:
        """Take the vectors that were asked for."""
        self.vectors = event.vectors
        return []

    def begin(
        self,
        place: Address,
        arrays: dict[str, torch.Tensor],
        whole: StateSent,
        beside: Iterable[tuple[Make, Payload]] = (),
    ) -> list[Effect]:
        """Mirror to a standby, which is sent all of the shard's state first, as of now.

        Args:
            place: address of the standby.
            arrays: that the shard holds; they are copied.
            whole: counts of the shard, sent last; its number is replaced.
            beside: makers of messages that are sent before that, each with its bytes.
        """
        # The state is copied now and sent as slots become free, while the shard goes on. Later changes queue behind it,
        # so the standby applies them to the state that they were applied to here.
        effects = self.end()
        self.place, self._incarnation, self._free = place, whole.incarnation, list(range(SLOTS))
        self._floor = self._told_floor = whole.floor
        sent = [
            effect
            for part in pack(arrays, self._size)
            for effect in self._send(partial(_state_part, whole.incarnation, part), part.data)
        ]
        sent += [effect for make, payload in beside for effect in self._send(make, payload)]
        sent += self._send(lambda number, _: msgspec.structs.replace(whole, number=number))
        self._whole = self._number
        return [*effects, Connect(self.standby, place), *sent]

    def end(self) -> list[Effect]:
        """Mirror to nobody any more; returns what waited for the standby."""
        effects = [effect for _, waiting in self._waiting for effect in waiting]
        self.place = None
        self._queue.clear()
        self._waiting.clear()
        self._floors.clear()
        self._number = self._confirmed = self._whole = 0
        return effects

    def covers(self, floor: int) -> bool:
        """Return whether the standby would go on from this floor of the policy, or there is no standby."""
        return self.place is None or floor <= self._floor

    def copy(self, copied: Copied, payload: Payload) -> list[Effect]:
        """Send the standby a push, or the sum of several; the slot and the number of the message are replaced."""
        # What waits for a slot is not copied: a push is acknowledged only once the standby has it, and its replica does
        # not overwrite it before.
        life = self._incarnation
        return self.repeat(
            lambda number, slot: msgspec.structs.replace(copied, slot=slot, incarnation=life, number=number),
            payload,
            copied.floor,
        )

    def repeat(self, make: Make, payload: Payload | None = None, floor: int = 0) -> list[Effect]:
        """Have the standby do what the shard does; `floor` is that of the policy afterwards."""
        if self.place is None:
            return []
        if floor > self._told_floor:
            self._told_floor = floor
            self._floors.append((self._number + 1, floor))
        return self._send(make, payload)

    def tell(
        self,
        step: tuple[int, float, float] | None = None,
        dropped: PushTaken | None = None,
        ruling: Ruling | None = None,
    ) -> list[Effect]:
        """Tell the standby of a decision, which has no bytes: see `Decided`."""
        return self.repeat(lambda number, _: Decided(self._incarnation, number, step, dropped, ruling))

    def tell_floor(self, floor: int) -> list[Effect]:
        """Tell the standby that the floor of the policy has risen, unless it knows."""
        if floor <= self._told_floor or self.place is None:
            return []
        return self.repeat(lambda number, _: Decided(self._incarnation, number, floor=floor), floor=floor)

    def after(self, effects: list[Effect]) -> list[Effect]:
        """Return effects, or keep them until the standby has confirmed all that the shard has done so far."""
        if self._number == self._confirmed or not effects:
            return effects
        self._waiting.append((self._number, effects))
        return []

    def kept(self, event: Confirmed) -> tuple[list[Effect], bool]:
        """Note what the standby confirmed; returns effects that waited for it, and whether it is whole from now on."""
        if self.place is None or event.incarnation != self.place.incarnation or event.number > self._number:
            return [], False
        whole = self._confirmed < self._whole <= event.number
        self._confirmed = max(self._confirmed, event.number)
        if event.slot in range(SLOTS) and event.slot not in self._free:
            self._free.append(event.slot)
        while self._floors and self._floors[0][0] <= self._confirmed:
            self._floor = self._floors.popleft()[1]
        effects: list[Effect] = []
        while self._waiting and self._waiting[0][0] <= self._confirmed:
            effects += self._waiting.popleft()[1]
        return [*self._go_on(), *effects], whole

    def _send(self, make: Make, payload: Payload | None = None) -> list[Effect]:
        self._number += 1
        self._queue.append((self._number, make, payload))
        return self._go_on()

    def _go_on(self) -> list[Effect]:
        """Send what is next, as far as there are free slots."""
        sent: list[Effect] = []
        while self._queue and (self._queue[0][2] is None or self._free):
            number, make, payload = self._queue.popleft()
            if payload is None:
                sent.append(Send(self.standby, make(number, -1)))
                continue
            slot = self._free.pop(0)
            sent.append(
                Send(self.standby, make(number, slot), stage(payload, self.vectors[slot] if self.vectors else None))
            )
        return sent


def _state_part(incarnation: int, part: ArrayBytes, number: int, slot: int) -> StatePart:
    return StatePart(slot, 0, part.data.nbytes, incarnation, number, part.name, part.dtype, part.shape, part.offset)
