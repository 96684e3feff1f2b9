"""The promises of every transport; `distbelief.testing.check_transport` holds a new one to them.

A transport knows nothing of the protocol but what `core/messages` says: bytes may be behind a message (`Bulk`), they
may have been asked for into a slot (`SlotRequest`, `SlotReply`), and a link begins with a `Hello`.

1. **Order.** What one role sends another arrives in the order it was sent, once. 2. **Payloads out of a slot** (`Bulk`)
are read where they lie: the sender leaves a slot alone until it is told that it may write there. 3. **Payloads asked
for** (`SlotReply`) lie in the asker's arena, in the slot and range they name, when the message is delivered. The sender
may write to its own copy once it has called `settle`.
4. **Bounds.** A frame that is too long, garbage, or names bytes outside the arena costs the link that it came on, and
no other. 5. **Death is seen.** When a peer's process ends, or its link is closed, the other side is delivered `Lost`
once, after all that came before it. 6. **Nothing stays.** After `close`, or after kill -9 of everybody, there is no
file, socket or shared-memory segment left. 7. `deliver` may send, connect, settle, drop and close, but not poll. 8.
`send` never waits for the peer; what the carrier does not take at once is kept and sent by `poll`. 9. **Bytes are
counted** in `traffic` by the kind of their message, as it is sent and as it arrives: its frame, and what is sent behind
it; a payload that is found in shared memory is counted there by who reads it.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import NamedTuple

import torch

from distbelief.core.effects import Arrival, Payload
from distbelief.core.messages import Bulk, Message, SlotRequest, Traffic
from distbelief.errors import LocalProtocolError
from distbelief.sharding.layout import Range


class Arena(NamedTuple):
    """The vectors of one role (1-D uint8 tensors), for peers to read and write: its part of the flat vector."""

    gradients: tuple[torch.Tensor, ...]
    """Slots that bytes leave from: their owner writes, peers read."""
    parameters: tuple[torch.Tensor, ...]
    """Slots that bytes are asked for into: peers write, their owner reads."""
    held: Range = Range(0, 0)
    """Bytes of the flat vector that each of them is; messages name these."""

    def vectors(self, message: Bulk) -> tuple[torch.Tensor, ...]:
        """Those that the bytes behind a message are of."""
        return self.parameters if message.is_reply else self.gradients

    def part(self, message: Bulk) -> torch.Tensor:
        """The bytes that a message names; a view."""
        start = self.held.start
        return self.vectors(message)[message.slot][message.start - start : message.stop - start]


EMPTY = Arena((), ())


def in_memory(size: int) -> torch.Tensor:
    """So many zeros, 1-D uint8."""
    return torch.zeros(size, dtype=torch.uint8)


def plain_arena(
    held: Range, gradients: int, parameters: int, zeros: Callable[[int], torch.Tensor] = in_memory
) -> Arena:
    """An arena that no peer maps, zeroed."""
    vectors = [zeros(held.size) for _ in range(gradients + parameters)]
    return Arena(tuple(vectors[:gradients]), tuple(vectors[gradients:]), held)


def outside(message: Bulk | SlotRequest, slots: int, held: Range) -> str:
    """Return what is wrong with the range of a message about `slots` vectors of these bytes; "" if nothing."""
    if 0 <= message.slot < slots and held.start <= message.start <= message.stop <= held.stop:
        return ""
    where = f"bytes {message.start} to {message.stop} of vector {message.slot}"
    began = f", from byte {held.start} on" if held.start else ""
    return f"a {type(message).__name__} names {where}; there are {slots} vectors of {held.size} bytes{began}"


def checked(message: Bulk, payload: Payload | None, slots: int, held: Range) -> torch.Tensor:
    """A payload as bytes, for a range of `slots` vectors of these bytes.

    Raises:
        LocalProtocolError: there is no such range, or the payload is no contiguous tensor of its length.
    """
    if wrong := outside(message, slots, held):
        raise LocalProtocolError(f"{wrong}: send what fits them")
    if (
        not isinstance(payload, torch.Tensor)
        or payload.nbytes != message.stop - message.start
        or not payload.is_contiguous()
    ):
        got = f"a tensor of {payload.nbytes} bytes" if isinstance(payload, torch.Tensor) else repr(payload)
        raise LocalProtocolError(
            f"a {type(message).__name__} of {message.stop - message.start} bytes sent with {got}; give one contiguous "
            "tensor"
        )
    if payload.dtype is torch.uint8 and payload.dim() == 1:
        return payload
    return payload.detach().reshape(-1).view(torch.uint8)


class Endpoint(ABC):
    """One role's end of a transport. Its driver sets `deliver`, and is handed every arrival through it."""

    deliver: Callable[[Arrival], None]

    def __init__(self, role: str) -> None:
        self.role = role
        self.arena = EMPTY
        self.zeros = in_memory
        """Makes each vector of an arena that no peer maps."""
        self.traffic = Traffic()

    def allocate(self, held: Range, gradients: int, parameters: int) -> Arena:
        """Make this role's zeroed arena, for these bytes of the flat vector; once, before links that need it."""
        self.arena = plain_arena(held, gradients, parameters, self.zeros)
        return self.arena

    @abstractmethod
    def send(self, to: str, message: Message, payload: Payload | None = None) -> None:
        """Send a message, and bytes behind a `Bulk` one; to a peer that is gone it is dropped, as `Lost` tells."""

    @abstractmethod
    def connect(self, role: str, address: str, incarnation: int = -1) -> None:
        """Open the link to a role, or to one incarnation, that listens at an address; it is there at the return.

        A link to an earlier one that is still there is closed first: `Lost` tells which.

        Raises:
            JobFailed: nobody answers there.
        """

    @abstractmethod
    def incarnation_of(self, peer: str) -> int:
        """Return the incarnation of the peer that opened the present link; -1 where unknown, or without a link."""

    def flush(self) -> None:
        """Let go of what was sent and kept for company, since the caller will be long in polling."""

    def settle(self) -> None:
        """Copy what is still unsent of the payloads of answers, since their owner is about to write to them."""

    @abstractmethod
    def drop(self, peer: str, reason: str) -> None:
        """Close the link to a peer that broke the protocol; `Lost(reason)` is delivered for it."""

    @abstractmethod
    def close(self) -> None:
        """Close every link after sending what is kept, waiting at most a second; safe to call twice."""


class NetworkEndpoint(Endpoint):
    """An endpoint between processes."""

    deliver_end: Callable[[Arrival], None]
    """Takes the `Lost` of a link that the other end has ended, or what is between; else `deliver` does."""

    @abstractmethod
    def listen(self, address: str = "", advertise: str = "") -> str:
        """Accept links; returns the address to advertise, whose host is `advertise` where it has one and that is given.

        Raises:
            UsageError: the address is in use or cannot be bound; the message names it.
        """

    @abstractmethod
    def watch(self, fileno: int, ready: Callable[[], None]) -> None:
        """Call `ready` from `poll` when a descriptor of somebody else can be read; fileno stays theirs."""

    @abstractmethod
    def poll(self, timeout: float | None) -> None:
        """Send what is kept, wait up to `timeout` seconds (None: for ever) for arrivals, and deliver all."""
