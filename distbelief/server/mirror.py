"""The mirror of a shard: what its standby has been sent, what that has confirmed, and what waits to be said until it
has.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable
from functools import partial

import msgspec
import torch

from distbelief.core.conversations.agreement import Ruling, Squares
from distbelief.core.conversations.mirroring import Confirmed, Copied, CopyUse, Decided, StatePart, StateSent
from distbelief.core.effects import Connect, Effect, Lend, Payload, Send
from distbelief.core.events import Lent
from distbelief.core.ledger import PushTaken
from distbelief.core.messages import Address, Message
from distbelief.server.packing import ArrayBytes, pack, stage

SLOTS = 2
"""Vectors in which what is sent lies until the standby has it: one is read while the next is written."""
LEAST_SLOT = 1 << 12
"""Least bytes of one."""

Make = Callable[[int, int], Message]
"""Makes a message from the number it has and the slot that its bytes lie in (-1: it has none)."""


class Mirror:
    """A shard's side of it. With no standby nothing is sent, and nothing waits.

    Args:
        standby: its role.

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
        self._queue: deque[tuple[int, Make, Payload | None]] = deque()
        self._waiting: deque[tuple[int, list[Effect]]] = deque()
        self._number = self._kept = self._whole = 0
        self._floors: deque[tuple[int, int]] = deque()
        self._floor = self._told = 0

    def lend(self, size: int) -> Lend:
        """Ask for vectors of that many bytes."""
        self._size = max(size, LEAST_SLOT)
        return Lend(self._size, SLOTS)

    def lent(self, sender: str, event: Lent, payload: Payload | None) -> list[Effect]:
        """They are there."""
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
            place: where it is.
            arrays: that the shard holds; they are copied.
            whole: what else it holds, said last, whatever number that has then.
            beside: said before it, each with its bytes.
        """
        said = self.end()
        self.place, self._incarnation, self._free = place, whole.incarnation, list(range(SLOTS))
        self._floor = self._told = whole.floor
        sent = [
            effect
            for part in pack(arrays, self._size)
            for effect in self._send(partial(_piece, whole.incarnation, part), part.data)
        ]
        sent += [effect for make, payload in beside for effect in self._send(make, payload)]
        sent += self._send(lambda number, _: msgspec.structs.replace(whole, number=number))
        self._whole = self._number
        return [*said, Connect(self.standby, place), *sent]

    def end(self) -> list[Effect]:
        """The standby is no more: what waited for it may be said."""
        said = [effect for _, effects in self._waiting for effect in effects]
        self.place = None
        self._queue.clear()
        self._waiting.clear()
        self._floors.clear()
        self._number = self._kept = self._whole = 0
        return said

    @property
    def pending(self) -> bool:
        """True while the standby has not confirmed all that the shard has done."""
        return self._number > self._kept

    def covers(self, floor: int) -> bool:
        """Return whether the standby would go on from this floor of the policy, or there is none. A floor that nobody
        else knows is not to be relied on.
        """
        return self.place is None or floor <= self._floor

    def copy(
        self,
        what: CopyUse,
        payload: Payload,
        keys: tuple[PushTaken, ...],
        staleness: tuple[int, ...],
        samples: int,
        factor: float,
        weight: float,
        floor: int,
        norms: Squares = (),
    ) -> list[Effect]:
        """Send the standby a push, or the sum of several; its bytes stay as they are until it has confirmed them."""
        of = keys, staleness, samples

        def copied(number: int, slot: int) -> Message:
            return Copied(slot, 0, payload.nbytes, self._incarnation, number, what, *of, factor, weight, floor, norms)

        return self.repeat(copied, payload, floor)

    def repeat(self, make: Make, payload: Payload | None = None, floor: int = 0) -> list[Effect]:
        """Have the standby do what the shard does, which `make` tells; the floor of the policy is this, after that."""
        if self.place is None:
            return []
        self._rise(floor)
        return self._send(make, payload)

    def tell(
        self,
        step: tuple[int, float, float] | None = None,
        dropped: PushTaken | None = None,
        ruling: Ruling | None = None,
        floor: int = 0,
    ) -> list[Effect]:
        """Tell the standby what has no bytes: see `Decided`."""
        return self.repeat(lambda number, _: Decided(self._incarnation, number, step, dropped, ruling, floor))

    def tell_floor(self, floor: int) -> list[Effect]:
        """Tell the standby that the floor of the policy has risen, unless it knows."""
        if floor <= self._told or self.place is None:
            return []
        self._rise(floor)
        return self.tell(floor=floor)

    def _rise(self, floor: int) -> None:
        """The next word tells a floor."""
        if floor > self._told:
            self._told = floor
            self._floors.append((self._number + 1, floor))

    def after(self, effects: list[Effect]) -> list[Effect]:
        """Say this once the standby has confirmed all that the shard has done so far."""
        if not self.pending or not effects:
            return effects
        self._waiting.append((self._number, effects))
        return []

    def kept(self, event: Confirmed) -> tuple[list[Effect], bool]:
        """The standby has confirmed: what may be said now, and whether it holds the whole state since this word."""
        if self.place is None or event.incarnation != self.place.incarnation or event.number > self._number:
            return [], False
        whole = self._kept < self._whole <= event.number
        self._kept = max(self._kept, event.number)
        if event.slot in range(SLOTS) and event.slot not in self._free:
            self._free.append(event.slot)
        while self._floors and self._floors[0][0] <= self._kept:
            self._floor = self._floors.popleft()[1]
        said: list[Effect] = []
        while self._waiting and self._waiting[0][0] <= self._kept:
            said += self._waiting.popleft()[1]
        return [*self._go_on(), *said], whole

    def _send(self, make: Make, payload: Payload | None = None) -> list[Effect]:
        self._number += 1
        self._queue.append((self._number, make, payload))
        return self._go_on()

    def _go_on(self) -> list[Effect]:
        """Send what is next, as far as there are vectors for it."""
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


def _piece(incarnation: int, part: ArrayBytes, number: int, slot: int) -> StatePart:
    return StatePart(slot, 0, part.data.nbytes, incarnation, number, part.name, part.dtype, part.shape, part.offset)
