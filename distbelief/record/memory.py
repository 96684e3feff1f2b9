"""A store of checkpoints in memory: what simulations without a run folder go back to."""

from __future__ import annotations

import torch

from distbelief.core.portions import Position
from distbelief.core.records import Json
from distbelief.core.settings import Plan
from distbelief.errors import CheckpointError


class MemoryStore:
    """Keeps the newest checkpoint, for a job that goes on with as many shards as it had."""

    def __init__(self) -> None:
        self._making: dict[tuple[int, str], tuple[dict[str, torch.Tensor], Json]] = {}
        self._newest: dict[str, tuple[dict[str, torch.Tensor], Json]] = {}
        self._number = ""

    def save_part(self, number: int, part: str, arrays: dict[str, torch.Tensor], facts: Json) -> None:
        """Copy one shard's part."""
        self._making[number, part] = (
            {name: array.detach().clone() for name, array in arrays.items()},
            dict(facts),
        )

    def commit(self, number: int, plan: Plan, position: Position, samples: int, script: bool = False) -> str:
        """Make a checkpoint the newest; returns its name."""
        if str(number) == self._number:
            return self._number
        self._newest = {part: held for (checkpoint, part), held in self._making.items() if checkpoint == number}
        self._number = str(number)
        self.discard(number)
        return self._number

    def discard(self, number: int) -> None:
        """Clear away what was made of a checkpoint, and of those before."""
        self._making = {key: held for key, held in self._making.items() if key[0] > number}

    def load_part(self, checkpoint: str, plan: Plan, shard: int) -> tuple[dict[str, torch.Tensor], Json]:
        """One shard's part of the newest.

        Raises:
            CheckpointError: it is another that is asked for.
        """
        if checkpoint != self._number:
            raise CheckpointError(
                f"checkpoint {checkpoint!r} is not in memory, which keeps the newest only ({self._number or 'none'})"
            )
        arrays, facts = self._newest[f"shard-{shard}"]
        return {name: array.clone() for name, array in arrays.items()}, facts
