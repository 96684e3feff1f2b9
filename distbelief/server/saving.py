"""The coordinator's dealings with checkpoints: all pushes are held and reported, then the data's position and every shard's part are of one moment.

A checkpoint goes through: *holding* (replicas push nothing more, until all that they pushed is applied and reported; a synchronous job deals
nothing more, until nobody holds a minibatch), *writing* (the shards write their parts), *sealing* (the store seals them). Who does not answer for
`HOLD_SECONDS` is not waited for: then the checkpoint may hold a few pushes more than its position says, whose minibatches a resumed job makes again.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Literal

from distbelief.core import events, messages, records
from distbelief.core.effects import Commit, Discard, Effect, Record, Send, Wake
from distbelief.core.portions import Position
from distbelief.core.settings import Plan
from distbelief.errors import RemoteProtocolError

HOLD_SECONDS = 2.0
"""How long replicas push nothing, at most, while one of them has not said that all it pushed is applied."""


class Saving:
    """The checkpoints of one job.

    Args:
        number: of the next one.
        newest: where the newest is; "" where there is none.
        position: where the data of that stands.
        samples: that were done by it.
    """

    def __init__(self, number: int, newest: str, position: Position, samples: int) -> None:
        self.number, self.newest, self.position, self.samples = number, newest, position, samples
        self.kept = number - 1
        """The number of the newest; 0 where there is none."""
        self.stage: Literal["", "holding", "writing", "sealing"] = ""
        self._holding: set[str] = set()
        self._writing: set[str] = set()
        self._failed = ""
        self._cut = (position, samples)

    def hold(self, members: Iterable[str]) -> list[Effect]:
        """Begin a checkpoint: have these push nothing more."""
        self.stage, self._holding, self._failed = "holding", set(members), ""
        held: list[Effect] = [Send(role, messages.Hold(self.number)) for role in sorted(self._holding)]
        return [*held, Wake(HOLD_SECONDS, self._patience)] if held else []

    @property
    def _patience(self) -> str:
        return f"hold {self.number}"

    def held(self, role: str, number: int) -> None:
        """A replica has nothing on its way any more, or is gone."""
        if number == self.number:
            self._holding.discard(role)

    def woke(self, what: str) -> None:
        """It has been waited for long enough."""
        if what == self._patience:
            self._holding.clear()

    @property
    def holds(self) -> bool:
        """Whether nothing new is to reach the shards."""
        return self.stage in ("holding", "writing")

    @property
    def quiet(self) -> bool:
        """Whether the shards may be asked."""
        return self.stage == "holding" and not self._holding

    def write(self, position: Position, samples: int, shards: Iterable[str]) -> list[Effect]:
        """Call for the shards' parts, as of where the data stands."""
        self.stage, self._cut, self._writing = "writing", (position, samples), set(shards)
        return [Send(role, messages.Snapshot(self.number)) for role in sorted(self._writing)]

    def written(self, sender: str, event: messages.SnapshotDone, plan: Plan) -> list[Effect]:
        """A shard's part is on disk, or could not be; the last one has the store seal them all.

        Raises:
            RemoteProtocolError: nobody asked the shard.
        """
        if event.number < self.number:
            return []  # it was given up
        if self.stage != "writing" or sender not in self._writing or event.number != self.number:
            raise RemoteProtocolError(f"{sender} saved checkpoint {event.number}, which nobody asked it for")
        self._writing.discard(sender)
        self._failed = self._failed or event.error
        if self._writing:
            return []
        self.stage = "sealing"
        return [Discard(event.number) if self._failed else Commit(event.number, plan, *self._cut)]

    def sealed(self, event: events.Saved) -> tuple[list[Effect], str]:
        """The store has answered: what is to be written down, and the error if there was one."""
        self.stage = ""
        self.number += 1
        error = self._failed or event.error
        if not error:
            self.kept, self.newest, (self.position, self.samples) = event.number, event.checkpoint, self._cut
        return [Record(records.Checkpointed(event.number, error))], error

    def abandon(self, why: str) -> list[Effect]:
        """Give up the checkpoint that is being made, if one is."""
        stage, self.stage, self._holding = self.stage, "", set()
        if stage != "writing":
            return []
        self.stage, self._failed = "sealing", why
        return [Discard(self.number)]
