"""Saving of checkpoints: pushes are held, so that the data's position and all shards' parts are from one moment.

A checkpoint has three stages:

- *holding*: replicas push nothing until all their earlier pushes are applied and reported. A synchronous job deals
  nothing until no replica holds a minibatch.
- *writing*: the shards write their parts.
- *sealing*: the store seals the parts.

The wait for a replica ends after `HOLD_SECONDS`. Then the checkpoint may hold a few more pushes than its position says,
and a resumed job computes their minibatches again. One shard of a synchronous job may be a round ahead of another.

If scripts keep state (`replica.keep()`), the checkpoint holds that of the lowest replica. It is sealed once that
replica has saved its state, which delays no other replica.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable

import msgspec

from distbelief.coordination.cadence import snapshot_due
from distbelief.coordination.dealing import DataDealer
from distbelief.core import events, records, roles
from distbelief.core.conversations import checkpointing
from distbelief.core.conversations.checkpointing import CHECKPOINT, CheckpointStage
from distbelief.core.effects import Commit, Discard, Effect, Send, Wake, WriteRecord
from distbelief.core.events import AnyTimer, CheckpointDue, HoldOver, ScriptOver
from distbelief.core.portions import StartingPoint
from distbelief.core.settings import Holder, Plan, Settings
from distbelief.errors import RemoteProtocolError

HOLD_SECONDS = 2.0
"""Longest hold of pushes while a replica has not reported that all its pushes are applied."""
SCRIPT_SECONDS = 60.0
"""Longest wait for a replica that saves its script's state: it may be evaluating."""


class Saving:
    """Checkpoints of a job."""

    def __init__(self, settings: Settings, start: StartingPoint) -> None:
        self.settings = settings
        self.number, self.newest = start.number, start.checkpoint
        self.position, self.samples = start.position, start.samples
        self.kept = start.number - 1
        """Number of the newest; 0 for none."""
        self.stage = CheckpointStage.NONE
        self._holding: set[str] = set()
        self._holds = 0  # number of holds so far: an answer to an abandoned hold does not count for the next
        self._patient = True
        self.writing: set[str] = set()
        """Roles that are writing a part."""
        self._failed = ""
        self._took = 0.0  # seconds of the slowest part of this checkpoint
        self.error = ""
        """Reason that the last checkpoint failed; "" if it did not."""
        self.again = False
        """True while another checkpoint is to replace one that was given up."""
        self._cut = (start.position, start.samples)
        self.keepers: set[str] = set()
        """Replicas whose scripts keep state."""
        self.resumed = bool(start.checkpoint)
        """True if the job continues from an earlier attempt's checkpoint."""
        self._asked = ""
        """Replica whose script's state the checkpoint waits for; "" for none."""
        self._scripted = False
        """True once a replica has saved its script's state."""
        self._left, self._left_at_end = "", False
        """Last replica that saved its script's state as it left, and whether the job was ending then."""
        self._timed = False
        """True while the timer for the next checkpoint runs."""

    def in_time(self, data: DataDealer) -> tuple[list[Effect], bool]:
        """Set the timer for the next checkpoint if there are new pushes; return whether one is due by their number."""
        due = snapshot_due(self.settings, data.pushes, minibatches=data.minibatches)
        # without new pushes, a waiting job would write the same checkpoint again and again
        if self._timed or not (self.settings.snapshots.seconds and data.pushes):
            return [], due
        self._timed = True
        return [Wake(self.settings.snapshots.seconds, CheckpointDue())], due

    def begin(self, data: DataDealer, members: Collection[str]) -> list[Effect]:
        """Begin a checkpoint: have the replicas hold their pushes."""
        data.pushes = data.minibatches = 0
        self._left, self._left_at_end = "", False
        self._holding, self._failed = set() if self.settings.strategy.one_moment else set(members), ""
        self._move(CheckpointStage.HOLDING)
        self._holds, self._patient = self._holds + 1, True
        requests: list[Effect] = [self.hold(role) for role in sorted(self._holding)]
        # replicas that hold the parameters agree with the data's position only once all have done what they were dealt
        patient = self.settings.strategy.held_by is Holder.REPLICAS
        return [*requests, Wake(HOLD_SECONDS, HoldOver(self._holds))] if members and not patient else []

    def hold(self, role: str) -> Send:
        """Have a replica hold its pushes."""
        return Send(role, checkpointing.Hold(self._holds))

    def held(self, role: str, number: int) -> list[Effect]:
        """Note that all of a replica's pushes are applied."""
        if number == self._holds:
            self._holding.discard(role)
        return []

    def joins(self, role: str, keeps: bool) -> None:
        """Note whether the script of a new replica keeps state."""
        (self.keepers.add if keeps else self.keepers.discard)(role)
        self._left = "" if role == self._left else self._left

    def _lowest(self, members: Iterable[str]) -> str:
        """Return the lowest replica whose script keeps state; "" for none."""
        return min(self.keepers.intersection(members), key=roles.index_of, default="")

    def ask_who_leaves(self, role: str, members: Iterable[str], ends: bool) -> list[Effect]:
        """Have the lowest replica save its script's state before it leaves; at the job's end only the first one."""
        if role != self._lowest(members) or role == self._left or (ends and self._left_at_end):
            return []
        return [Send(role, checkpointing.SaveScript(checkpointing.LEAVING))]

    def script_saved(
        self, sender: str, event: checkpointing.ScriptSaved, plan: Plan | None, ends: bool
    ) -> list[Effect]:
        """Handle a replica's answer that its script's state is saved, or could not be saved."""
        self._scripted |= not event.error
        if event.number == checkpointing.LEAVING:
            self._left, self._left_at_end = sender, ends
        note = f"the state of the script of {sender} was not saved: {event.error}"
        notes: list[Effect] = [WriteRecord(records.Note(note))] if event.error else []
        awaited = sender == self._asked and event.number == self.number
        return notes + (self._without_script(plan) if awaited else [])

    def script_late(self, timer: ScriptOver, plan: Plan | None) -> list[Effect]:
        """Seal the checkpoint without the state of a script that is late."""
        if not self._asked or timer.number != self.number:
            return []
        note = (
            f"checkpoint {self.number} has the script's earlier state: {self._asked} is busy for {SCRIPT_SECONDS:g} s"
        )
        return [WriteRecord(records.Note(note)), *self._without_script(plan)]

    def gone(self, role: str, plan: Plan | None) -> list[Effect]:
        """Wait no longer for a replica that is gone."""
        self.keepers.discard(role)
        self._holding.discard(role)
        return self._without_script(plan) if role == self._asked else []

    def _without_script(self, plan: Plan | None) -> list[Effect]:
        self._asked = ""
        return self._seal(plan) if self.stage is CheckpointStage.SEALING else []

    def _seal(self, plan: Plan | None) -> list[Effect]:
        """Have the store seal the parts, or discard them if one could not be written."""
        assert plan is not None
        return [Discard(self.number) if self._failed else Commit(self.number, plan, *self._cut, self._scripted)]

    def woke(self, timer: AnyTimer) -> bool:
        """Return whether a timer makes a checkpoint due; the timer of a hold ends that hold."""
        due = isinstance(timer, CheckpointDue)
        if due:
            self._timed = False
        elif timer == HoldOver(self._holds):
            self._patient = False
        return due

    def _move(self, stage: CheckpointStage) -> None:
        self.stage = CHECKPOINT.move(self.stage, stage)

    @property
    def busy(self) -> bool:
        """True while a checkpoint is being made."""
        return self.stage is not CheckpointStage.NONE

    @property
    def holds(self) -> bool:
        """Return whether new pushes must not reach the shards now."""
        return self.stage in (CheckpointStage.HOLDING, CheckpointStage.WRITING)

    def write(self, data: DataDealer, unmeasured: int, members: Iterable[str], shards: Iterable[str]) -> list[Effect]:
        """Ask the shards for their parts, once no push is on its way, and note the data's position."""
        busy = sorted(filter(data.held, members)) if self.settings.strategy.one_moment else sorted(self._holding)
        if self.stage is not CheckpointStage.HOLDING or (busy and self._patient):
            return []
        effects: list[Effect] = []
        if busy:
            who = f"{roles.named(busy)}, busy for {HOLD_SECONDS:g} s"
            note = f"checkpoint {self.number} is made without waiting for {who}: it is not exact"
            effects.append(WriteRecord(records.Note(note)))
        # nothing reaches the shards until their parts are written, so the present position is that of the parts
        position = msgspec.structs.replace(data.position(), unmeasured=unmeasured)
        self._cut, self.writing = (position, data.samples), set(shards)
        self._move(CheckpointStage.WRITING)
        self._asked = self._lowest(members)
        if self._asked:
            effects.append(Send(self._asked, checkpointing.SaveScript(self.number)))
        return effects + [Send(role, checkpointing.Snapshot(self.number)) for role in sorted(self.writing)]

    def written(self, sender: str, event: checkpointing.SnapshotDone, plan: Plan | None) -> list[Effect]:
        """Handle a shard's answer that its part is on disk, or could not be written.

        The last answer seals all parts.
        """
        if event.number < self.number:
            return []  # the checkpoint of this answer was given up
        if (
            plan is None
            or self.stage is not CheckpointStage.WRITING
            or sender not in self.writing
            or event.number != self.number
        ):
            raise RemoteProtocolError(f"{sender} saved checkpoint {event.number} without being asked")
        self.writing.discard(sender)
        self._failed, self._took = self._failed or event.error, max(self._took, event.seconds)
        if self.writing:
            return []
        self._move(CheckpointStage.SEALING)
        if self._asked and not self._failed:
            return [Wake(SCRIPT_SECONDS, ScriptOver(self.number))]
        return self._without_script(plan)

    def sealed(self, event: events.Saved) -> list[Effect]:
        """Handle the store's answer, and record it."""
        self._move(CheckpointStage.NONE)
        self.number += 1
        self.error = self._failed or event.error
        if not self.error:
            self.kept, self.newest = event.number, event.checkpoint
            self.position, self.samples = self._cut
        took, self._took = self._took, 0.0
        return [WriteRecord(records.Checkpointed(event.number, self.error, took))]

    def unsaved(self, what: str) -> str:
        """Return a sentence for the end of a job that cannot continue."""
        kept = f"all updates since checkpoint {self.kept} are lost: go on with --resume"
        return f"{what}; {kept if self.kept else 'there is no checkpoint yet: start anew'}"

    def abandon(self, why: str) -> list[Effect]:
        """Give up the checkpoint that is being made, if any."""
        self._holding, keeper, self._asked = set(), self._asked, ""
        if self.stage is not CheckpointStage.WRITING and not keeper:
            self._move(CheckpointStage.NONE)
            return []
        # some parts are on disk, or will be: the store removes them, and its answer ends this checkpoint
        self._failed = why
        self._move(CheckpointStage.SEALING)
        return [Discard(self.number)]
