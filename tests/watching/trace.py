"""Trace of what a simulation delivers."""

from __future__ import annotations

from hashlib import blake2b

import msgspec

from distbelief.core import wire
from distbelief.core.messages import Message
from distbelief.places.simulated.simulation import Simulation
from distbelief.testing.simulations import attach


class Trace:
    """What was delivered in a simulation, in order: moment (to a nanosecond), sender, receiver and frame."""

    def __init__(self, simulation: Simulation) -> None:
        self._clock = simulation.clock
        self._hash = blake2b(digest_size=16)
        self.marks = ""
        """Two hexadecimal digits for each message: where two traces part, their marks do."""
        attach(simulation.network, self)

    def sent(self, sender: str, to: str, message: Message) -> None:
        """What is only sent stands in no trace."""

    def delivered(self, sender: str, to: str, message: Message) -> None:
        """Take a message into the trace."""
        line = msgspec.msgpack.encode((f"{self._clock.now():.9f}", sender, to)) + wire.encode(message)
        self._hash.update(line)
        self.marks += blake2b(line, digest_size=1).hexdigest()

    @property
    def digest(self) -> str:
        """One number for all of it."""
        return self._hash.hexdigest()
