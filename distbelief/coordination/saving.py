"""The coordinator's dealings with checkpoints: all pushes are held and reported, then the data's position and every
shard's part are of one moment.

A checkpoint goes through: *holding* (replicas push nothing more, until all that they pushed is applied and reported; a
synchronous job deals nothing more, until nobody holds a minibatch), *writing* (the shards write their parts), *sealing*
(the store seals them). Who does not answer for `HOLD_SECONDS` is not waited for: then the checkpoint may hold a few
pushes more than its position says, whose minibatches a resumed job makes again, and of a synchronous job one shard's
part may have a round more than another's.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable

from distbelief.coordination.cadence import SnapshotTimer, snapshot_due
from distbelief.coordination.dealing import DataDealer
from distbelief.core import events, records, roles
from distbelief.core.conversations import checkpointing
from distbelief.core.conversations.checkpointing import CHECKPOINT, CheckpointStage
from distbelief.core.effects import Commit, Discard, Effect, Send, Wake, WriteRecord
from distbelief.core.portions import StartingPoint
from distbelief.core.settings import Plan, Settings
from distbelief.core.timers import AnyTimer, CheckpointDue, HoldOver
from distbelief.errors import RemoteProtocolError

HOLD_SECONDS = 2.0
"""How long replicas push nothing, at most, while one of them has not said that all it pushed is applied."""


class Saving:
    """The checkpoints of one job.

    Args:
        settings: of the job.
        start: from where it goes on.
    """

    def __init__(self, settings: Settings, start: StartingPoint) -> None:
        self.settings = settings
        self.number, self.newest, self.position, self.samples = (
            start.number,
            start.checkpoint,
            start.position,
            start.samples,
        )
        self.kept = start.number - 1
        """The number of the newest; 0 where there is none."""
        self.stage = CheckpointStage.NONE
        self._holding: set[str] = set()
        self._holds = 0  # so far: an answer to one that was given up is none to the next
        self._patient = True
        self.writing: set[str] = set()
        """Who writes a part now."""
        self._failed = ""
        self.error = ""
        """Why the last one could not be made."""
        self.again = False
        """Whether one is to be made in the place of one that was given up."""
        self._cut = (start.position, start.samples)
        self._timer = SnapshotTimer()

    def in_time(self, data: DataDealer) -> tuple[list[Effect], bool]:
        """Whether it is time for a checkpoint, by the pushes made; and the clock is set for the next where any were
        made.
        """
        due = snapshot_due(self.settings, data.pushes, minibatches=data.minibatches)
        return self._timer.start(self.settings, data.pushes), due

    def begin(self, data: DataDealer, members: Collection[str]) -> list[Effect]:
        """Begin a checkpoint: have replicas push nothing more."""
        data.pushes = data.minibatches = 0
        self._holding, self._failed = set() if self.settings.strategy.one_moment else set(members), ""
        self._move(CheckpointStage.HOLDING)
        self._holds, self._patient = self._holds + 1, True
        asked: list[Effect] = [self.hold(role) for role in sorted(self._holding)]
        return [*asked, Wake(HOLD_SECONDS, HoldOver(self._holds))] if members else []

    def hold(self, role: str) -> Send:
        """Have one replica push nothing more."""
        return Send(role, checkpointing.Hold(self._holds))

    def held(self, role: str, number: int = -1) -> list[Effect]:
        """A replica has nothing on its way any more, or (-1) is gone."""
        if number in (-1, self._holds):
            self._holding.discard(role)
        return []

    def woke(self, timer: AnyTimer) -> bool:
        """A time has come: that of a checkpoint, or it has been waited for replicas for long enough; whether it is the
        former.
        """
        due = isinstance(timer, CheckpointDue)
        if due:
            self._timer.woke()
        elif timer == HoldOver(self._holds):
            self._patient = False
        return due

    def _move(self, stage: CheckpointStage) -> None:
        self.stage = CHECKPOINT.move(self.stage, stage)

    @property
    def busy(self) -> bool:
        """Whether a checkpoint is being made."""
        return self.stage is not CheckpointStage.NONE

    @property
    def holds(self) -> bool:
        """Whether nothing new is to reach the shards."""
        return self.stage in (CheckpointStage.HOLDING, CheckpointStage.WRITING)

    def write(self, data: DataDealer, members: Iterable[str], shards: Iterable[str]) -> list[Effect]:
        """Call for the shards' parts, as of where the data stands, once nothing is on its way to them."""
        busy = sorted(filter(data.held, members)) if self.settings.strategy.one_moment else sorted(self._holding)
        if self.stage is not CheckpointStage.HOLDING or (busy and self._patient):
            return []
        told: list[Effect] = []
        if busy:
            who = f"{roles.named(busy)}, busy for {HOLD_SECONDS:g} s"
            told.append(
                WriteRecord(
                    records.Note(f"checkpoint {self.number} is made without waiting for {who}: it is not exact")
                )
            )
        self._cut, self.writing = (data.position(), data.samples), set(shards)
        self._move(CheckpointStage.WRITING)
        return told + [Send(role, checkpointing.Snapshot(self.number)) for role in sorted(self.writing)]

    def written(self, sender: str, event: checkpointing.SnapshotDone, plan: Plan | None) -> list[Effect]:
        """A shard's part is on disk, or could not be; the last one has the store seal them all.

        Raises:
            RemoteProtocolError: nobody asked the shard.
        """
        if event.number < self.number:
            return []  # it was given up
        if (
            plan is None
            or self.stage is not CheckpointStage.WRITING
            or sender not in self.writing
            or event.number != self.number
        ):
            raise RemoteProtocolError(f"{sender} saved checkpoint {event.number}, which nobody asked it for")
        self.writing.discard(sender)
        self._failed = self._failed or event.error
        if self.writing:
            return []
        self._move(CheckpointStage.SEALING)
        return [Discard(event.number) if self._failed else Commit(event.number, plan, *self._cut)]

    def sealed(self, event: events.Saved) -> list[Effect]:
        """The store has answered: what is to be written down."""
        self._move(CheckpointStage.NONE)
        self.number += 1
        self.error = self._failed or event.error
        if not self.error:
            self.kept, self.newest, (self.position, self.samples) = event.number, event.checkpoint, self._cut
        return [WriteRecord(records.Checkpointed(event.number, self.error))]

    def unsaved(self, what: str) -> str:
        """The sentence for the end of a job that cannot go on."""
        kept = f"what was applied since checkpoint {self.kept} is lost: go on with --resume"
        return f"{what}; {kept if self.kept else 'there is no checkpoint yet: start anew'}"

    def abandon(self, why: str) -> list[Effect]:
        """Give up the checkpoint that is being made, if one is."""
        self._holding = set()
        if self.stage is not CheckpointStage.WRITING:
            self._move(CheckpointStage.NONE)
            return []
        self._failed = why
        self._move(CheckpointStage.SEALING)
        return [Discard(self.number)]
