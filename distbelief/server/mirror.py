"""The mirror of a shard: messages to its standby, effects that wait for confirmations, and the update under way."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import NamedTuple

import msgspec
import torch

from distbelief.core.consistency import Key, PlannedUpdate
from distbelief.core.conversations import pushing
from distbelief.core.conversations.agreement import Ruling, Squares
from distbelief.core.conversations.mirroring import Confirmed, Copied, CopyUse, Decided, StatePart, StateSent
from distbelief.core.effects import Connect, Effect, Lend, Payload, Send
from distbelief.core.events import Lent
from distbelief.core.ledger import PushTaken
from distbelief.core.messages import Address, Message, Version
from distbelief.errors import RemoteProtocolError
from distbelief.server.slice import Slice, as_bytes

SLOTS = 2
"""Number of vectors for sending bytes: one is read while the next is written."""
LEAST_SLOT = 1 << 12
"""Least bytes of such a vector."""
Make = Callable[[int, int], Message]
"""Maker of a message, from its number and the slot that its bytes lie in (-1 without bytes)."""


def pack(arrays: dict[str, torch.Tensor], most: int) -> Iterator[tuple[StatePart, torch.Tensor]]:
    """Copy arrays as plain bytes, in pieces of at most `most` bytes, each with its message.

    The messages have no numbers yet.

    >>> [(part.name, part.offset, piece.nbytes) for part, piece in pack({"a": torch.zeros(5)}, most=16)]
    [('a', 0, 16), ('a', 16, 4)]
    """
    for name, array in arrays.items():
        data, dtype = as_bytes(array.detach().clone()), str(array.dtype).removeprefix("torch.")
        for offset in range(0, max(1, data.nbytes), most):
            piece = data[offset : offset + most]
            yield StatePart(-1, 0, piece.nbytes, 0, 0, name, dtype, tuple(array.shape), offset), piece


class Unpacking:
    """Arrays that are assembled from pieces, up to a limit of bytes in all."""

    # A piece names the size of its array: without a limit a few bytes of a peer could take all memory.

    def __init__(self, limit: int) -> None:
        self.arrays: dict[str, torch.Tensor] = {}
        self._left = limit

    def take(self, piece: StatePart, payload: Payload | None) -> None:
        """Take a piece, unless payloads are phantoms; refuse one that fits no array, or exceeds the limit."""
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
    """Copy bytes to the beginning of a vector, and return them there; a phantom is returned as it is."""
    if not (isinstance(payload, torch.Tensor) and isinstance(room, torch.Tensor)):
        return payload
    return room[: payload.nbytes].copy_(as_bytes(payload))


# Every change of the shard is a numbered message, and the standby confirms numbers in their order: one number tells its
# progress. Effects of a change (`after`) are kept with the number of the latest change, and released when that is
# confirmed. So no other role knows of a change that would be lost if the standby took over now.
#
# Floors of the policy go with the messages, and count once these are confirmed (`_floors`): a floor that only this
# shard knew would be lower in its next incarnation, and behind the parameters of replicas.
class Mirror:
    """A shard's side of mirroring. Without a standby nothing is sent, and nothing waits.

    >>> mirror = Mirror("standby 0")
    >>> mirror.tell(step=(8, 1.0, 1.0)), mirror.after(["at once"])
    ([], ['at once'])
    >>> connect, whole = mirror.begin(Address("unix:@a", 0), {}, StateSent(0, 0, 0, 0, {}, (), 0, ()))
    >>> mirror.after(["when it has all"]), mirror.kept(Confirmed(0, 1))
    ([], (['when it has all'], True))
    """

    def __init__(self, standby: str) -> None:
        self.standby = standby
        self.place: Address | None = None
        """Address of the standby; None without one."""
        self.vectors: tuple[Payload, ...] = ()
        """Vectors for sending bytes; none where payloads are phantoms."""
        self._size = LEAST_SLOT
        self._incarnation = 0
        self._free: list[int] = []
        """Numbers of the vectors that the standby does not read."""
        self._queue: deque[tuple[int, Make, Payload | None]] = deque()
        """Messages that wait for a free vector, in their order."""
        self._waiting: deque[tuple[int, list[Effect]]] = deque()
        """Effects that wait, with the number to be confirmed first."""
        self._number = self._confirmed = 0
        self._whole = 0
        """Number of the message that ends the state."""
        self._floors: deque[tuple[int, int]] = deque()
        """Floors that are not confirmed, with the numbers of their messages."""
        self._floor = self._told_floor = 0

    def lend(self, size: int) -> Lend:
        """Ask for vectors of so many bytes."""
        self._size = max(size, LEAST_SLOT)
        return Lend(self._size, SLOTS)

    def lent(self, sender: str, event: Lent, payload: Payload | None) -> list[Effect]:
        """Take these vectors."""
        self.vectors = event.vectors
        return []

    def begin(
        self,
        place: Address,
        arrays: dict[str, torch.Tensor],
        whole: StateSent,
        beside: Iterable[tuple[Make, Payload]] = (),
    ) -> list[Effect]:
        """Begin to mirror to the standby at an address, which first receives copies of the shard's arrays.

        Then come the messages of the makers `beside`, each with its bytes. `whole` has the counts of the shard, and is
        sent last; its number is replaced.
        """
        # The state is copied now and sent as vectors become free, while the shard continues. Later changes queue behind
        # it, so the standby applies them to the same state.
        effects = self.end()
        self.place, self._incarnation, self._free = place, whole.incarnation, list(range(SLOTS))
        self._floor = self._told_floor = whole.floor
        sent = [effect for part, piece in pack(arrays, self._size) for effect in self._send(self._numbers(part), piece)]
        sent += [effect for make, payload in beside for effect in self._send(make, payload)]
        sent += self._send(lambda number, _: msgspec.structs.replace(whole, number=number))
        self._whole = self._number
        return [*effects, Connect(self.standby, place), *sent]

    def end(self) -> list[Effect]:
        """End mirroring; returns the effects that waited for the standby."""
        effects = [effect for _, waiting in self._waiting for effect in waiting]
        self.place = None
        self._queue.clear()
        self._waiting.clear()
        self._floors.clear()
        self._number = self._confirmed = self._whole = 0
        return effects

    def covers(self, floor: int) -> bool:
        """Return whether the standby has confirmed a floor of the policy, or there is no standby."""
        return self.place is None or floor <= self._floor

    def copy(self, copied: Copied, payload: Payload) -> list[Effect]:
        """Send the standby a push or a sum of several; the message's slot and number are replaced."""
        # A push that waits for a vector is not copied: its replica does not overwrite it before it is acknowledged,
        # which waits for the standby.
        return self.repeat(self._numbers(copied), payload, copied.floor)

    def _numbers(self, message: Copied | StatePart) -> Make:
        life = self._incarnation
        return lambda number, slot: msgspec.structs.replace(message, slot=slot, incarnation=life, number=number)

    def repeat(self, make: Make, payload: Payload | None = None, floor: int = 0) -> list[Effect]:
        """Have the standby repeat a change; `floor` is that of the policy afterwards."""
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
        """Send the standby a decision, which has no bytes: see `Decided`."""
        return self.repeat(lambda number, _: Decided(self._incarnation, number, step, dropped, ruling))

    def tell_floor(self, floor: int) -> list[Effect]:
        """Send the standby a higher floor of the policy, unless it has it."""
        if floor <= self._told_floor or self.place is None:
            return []
        return self.repeat(lambda number, _: Decided(self._incarnation, number, floor=floor), floor=floor)

    def after(self, effects: list[Effect]) -> list[Effect]:
        """Return effects, or keep them until the standby has confirmed all changes so far."""
        if self._number == self._confirmed or not effects:
            return effects
        self._waiting.append((self._number, effects))
        return []

    def kept(self, event: Confirmed) -> tuple[list[Effect], bool]:
        """Take a confirmation; returns the effects that waited for it, and whether the standby is whole from now on."""
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
        """Send the next messages, as far as there are free vectors."""
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


class PendingUpdate(NamedTuple):
    """One update, with its held pushes."""

    due: PlannedUpdate
    factor: float
    """Factor of the learning rate."""
    pushes: list[tuple[Key, pushing.Push]]
    staleness: tuple[int, ...]

    def has(self, key: Key) -> bool:
        """Return whether a push is part of the update."""
        return any(key == known for known, _ in self.pushes)

    def mirrored(self, mirror: Mirror, held: Slice, floor: int, norms: Squares) -> list[Effect]:
        """Have the standby make the same update."""
        # The standby has gathered pushes already, and needs only the order to step. It has no held pushes: it gets
        # their sum, in one vector, and their keys.
        if not self.pushes:
            return mirror.tell(step=(self.due.samples, self.factor, self.due.weight))
        if mirror.place is None:
            return []
        keys = tuple(push_taken(key.who, push) for key, push in self.pushes)
        use, due, payload = CopyUse.SUM, self.due, held.sum()
        sums = Copied(
            0, 0, payload.nbytes, 0, 0, use, keys, self.staleness, due.samples, self.factor, due.weight, floor, norms
        )
        return mirror.copy(sums, payload)

    def acknowledged(self, version: Version) -> list[Effect]:
        """Acknowledge the pushes of the update."""
        return [acknowledgement(key.who, push, version) for key, push in self.pushes]


def mean_rate(pushes: Sequence[pushing.Push]) -> float:
    """Return the mean of the learning-rate factors of pushes, weighted by their samples."""
    if all(push.rate == 1.0 for push in pushes):
        return 1.0
    samples = sum(push.samples for push in pushes)
    return sum(push.rate * push.samples for push in pushes) / samples if samples else pushes[0].rate


def acknowledgement(who: str, push: pushing.Push, version: Version, dropped: bool = False) -> Send:
    """Make the acknowledgement of a push."""
    return Send(who, pushing.Pushed(push.slot, push.clock, version, dropped, push.incarnation))


def push_taken(who: str, push: pushing.Push) -> PushTaken:
    """Return a push in the form of the ledger."""
    return PushTaken(who, push.partition, push.incarnation, push.clock)
