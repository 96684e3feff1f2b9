"""Promises of every transport, which `distbelief.testing.check_transport` tests.

Of the protocol, a transport knows only `core/messages`: bytes may follow a message (`Bulk`), a role may ask for bytes
to be put into a slot (`SlotRequest`, `SlotReply`), and a link begins with a `Hello`.

1. **Order.** What one role sends another arrives once, in the order it was sent.
2. **Payloads out of a slot** (`Bulk`) are read where they lie: the sender does not write to a slot until its receiver
   allows that.
3. **Answers with bytes** (`SlotReply`) lie in the asker's arena, in the slot and range that they name, when the message
   is delivered. The sender may write to its own copy once it has called `settle`.
4. **Bounds.** A frame that is too long, is garbage or names bytes outside the arena ends its own link, and no other.
5. **Deaths are seen.** When a peer's process ends or its link closes, the other side gets one `Lost`, after everything
   that came before it.
6. **Nothing stays.** After `close`, or after kill -9 of all roles, no file, socket or segment of shared memory is left.
7. `deliver` may send, connect, settle, drop and close, but not poll.
8. `send` never waits for the peer: bytes that the carrier does not take at once are queued, and `poll` sends them.
9. **Bytes are counted** in `traffic` by the kind of their message, when it is sent and when it arrives: its frame and
   the bytes that follow. A payload in shared memory is counted by its reader.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import torch

from distbelief.core.effects import Arrival, Payload
from distbelief.core.messages import Bulk, Message, SlotRequest, Traffic
from distbelief.errors import LocalProtocolError
from distbelief.sharding.layout import Range


class Arena(NamedTuple):
    """Vectors of one role (1-D uint8 tensors) that peers read and write; they are its part of the flat vector."""

    gradients: tuple[torch.Tensor, ...]
    """Slots that their owner writes and peers read."""
    parameters: tuple[torch.Tensor, ...]
    """Slots that peers write when the owner asks for bytes, and the owner reads."""
    held: Range = Range(0, 0)
    """Range of the flat vector that each slot holds; messages name bytes of the flat vector."""

    def vectors(self, message: Bulk) -> tuple[torch.Tensor, ...]:
        """Return the vectors that a message's bytes belong to."""
        return self.parameters if message.is_reply else self.gradients

    def part(self, message: Bulk) -> torch.Tensor:
        """Return a view of the bytes that a message names."""
        start = self.held.start
        return self.vectors(message)[message.slot][message.start - start : message.stop - start]


EMPTY = Arena((), ())
in_memory = partial(torch.zeros, dtype=torch.uint8)
"""Function that returns a zeroed vector of some length, 1-D uint8."""


def plain_arena(
    held: Range, gradients: int, parameters: int, zeros: Callable[[int], torch.Tensor] = in_memory
) -> Arena:
    """Make a zeroed arena that no peer maps."""
    vectors = [zeros(held.size) for _ in range(gradients + parameters)]
    return Arena(tuple(vectors[:gradients]), tuple(vectors[gradients:]), held)


def outside(message: Bulk | SlotRequest, slots: int, held: Range) -> str:
    """Return why a message's range does not fit `slots` vectors of these bytes; "" if it fits."""
    if 0 <= message.slot < slots and held.start <= message.start <= message.stop <= held.stop:
        return ""
    where = f"bytes {message.start} to {message.stop} of vector {message.slot}"
    began = f", from byte {held.start} on" if held.start else ""
    return f"a {type(message).__name__} names {where}; there are {slots} vectors of {held.size} bytes{began}"


def checked(message: Bulk, payload: Payload | None, slots: int, held: Range) -> torch.Tensor:
    """Return a payload as bytes that fit its message's range, in one of `slots` vectors of the `held` bytes.

    A range outside of these raises a `LocalProtocolError`. So does a payload that is not one contiguous tensor of the
    range's length.
    """
    if wrong := outside(message, slots, held):
        raise LocalProtocolError(f"{wrong}: send a range that fits them")
    size = message.stop - message.start
    if not isinstance(payload, torch.Tensor) or payload.nbytes != size or not payload.is_contiguous():
        got = f"a tensor of {payload.nbytes} bytes" if isinstance(payload, torch.Tensor) else repr(payload)
        raise LocalProtocolError(
            f"a {type(message).__name__} of {size} bytes sent with {got}; give one contiguous tensor"
        )
    if payload.dtype is torch.uint8 and payload.dim() == 1:
        return payload
    return payload.detach().reshape(-1).view(torch.uint8)


class Endpoint(ABC):
    """One role's end of a transport; its driver sets `deliver`, which gets every arrival."""

    deliver: Callable[[Arrival], None]

    def __init__(self, role: str) -> None:
        self.role = role
        self.arena = EMPTY
        self.zeros: Callable[[int], torch.Tensor] = in_memory
        """Function that makes each vector of an arena that no peer maps."""
        self.traffic = Traffic()

    def allocate(self, held: Range, gradients: int, parameters: int) -> Arena:
        """Make this role's zeroed arena for a range of the flat vector: once, before any link needs it."""
        self.arena = plain_arena(held, gradients, parameters, self.zeros)
        return self.arena

    @abstractmethod
    def send(self, to: str, message: Message, payload: Payload | None = None) -> None:
        """Send a message, and the bytes of a `Bulk` one; a message to a peer that is gone is dropped."""

    @abstractmethod
    def connect(self, role: str, address: str, incarnation: int = -1) -> None:
        """Open the link to a role, or to one incarnation of it, at an address.

        A link to an earlier incarnation is closed first, and its `Lost` is delivered.

        Raises:
            JobFailed: there is no answer.
        """

    @abstractmethod
    def incarnation_of(self, peer: str) -> int:
        """Return the incarnation of the peer that opened the present link; -1 if it is unknown, or without a link."""

    def flush(self) -> None:
        """Send queued messages, since the caller will not poll for a while."""

    def settle(self) -> None:
        """Copy the unsent parts of answers' payloads, since their owner is about to write to them."""

    @abstractmethod
    def drop(self, peer: str, reason: str) -> None:
        """Close the link to a peer that broke the protocol, and deliver `Lost(reason)` for it."""

    @abstractmethod
    def close(self) -> None:
        """Send queued messages, for at most a second, and close every link; safe to call twice."""


class NetworkEndpoint(Endpoint):
    """Endpoint of a role that reaches other processes."""

    deliver_end: Callable[[Arrival], None]
    """Function that gets the `Lost` of a link that the peer or the network ended; `deliver` gets those of this end."""

    @abstractmethod
    def listen(self, address: str = "", advertise: str = "") -> str:
        """Accept links; return the address for others, with the host `advertise` if that is not empty.

        Raises:
            UsageError: the address is in use or cannot be bound.
        """

    @abstractmethod
    def watch(self, fileno: int, ready: Callable[[], None]) -> None:
        """Call `ready` from `poll` when a descriptor can be read; the descriptor still belongs to the caller."""

    @abstractmethod
    def poll(self, timeout: float | None) -> None:
        """Send queued messages, wait up to `timeout` seconds (None: for ever) for arrivals, and deliver them all."""
