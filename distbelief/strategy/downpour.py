"""Downpour: asynchronous SGD on a sharded parameter server (Dean et al. 2012, section 4.1)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from distbelief.strategy.served import Asynchronous


@dataclass(frozen=True)
class Downpour(Asynchronous):
    """Replicas push gradients to server shards and fetch parameters from them, none waiting for another."""

    name: ClassVar[str] = "downpour"

    read_in_place: bool = False
    """Compute on the shards' own memory, torn, and fetch nothing (one machine, shared memory)."""
