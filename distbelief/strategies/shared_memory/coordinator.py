"""The coordinator of a job whose replicas update one mapping by themselves: one of them fills it, saves it and accounts
for it, as a shard would.

That one, the keeper, is the first of those who are there; when it dies, the next is asked. So replicas that are done
stay until the last checkpoint is written.
"""

from __future__ import annotations

from collections.abc import Collection

from distbelief.coordination.closing import ClosingStep
from distbelief.coordination.coordinator import Coordinator
from distbelief.core import events, records, roles
from distbelief.core.conversations import initialising, membership
from distbelief.core.conversations.checkpointing import CheckpointStage
from distbelief.core.conversations.phases import May, Phase
from distbelief.core.effects import Effect, Send, WriteRecord
from distbelief.core.outcomes import Cause, Outcome
from distbelief.core.portions import START, Position
from distbelief.core.protocol import SHARED, heard_by
from distbelief.core.roles import Kind
from distbelief.core.settings import Settings


class MappingCoordinator(Coordinator):
    """The coordinator of one such job; its arguments are those of `Coordinator`."""

    heard = heard_by(Kind.COORDINATOR, SHARED)

    def __init__(
        self,
        settings: Settings,
        evaluator: bool = True,
        checkpoint: str = "",
        position: Position = START,
        samples: int = 0,
        number: int = 1,
    ) -> None:
        super().__init__(settings, evaluator, checkpoint, position, samples, number)
        self._done: set[str] = set()  # members that have left, and stay for what is still to be done
        self._filler = self._writer = ""
        self._again = False  # a checkpoint is to be made in the place of one whose writer died

    def _restore(self) -> list[Effect]:
        if self.plan is not None and self._may(May.GATHER):
            self._enter(Phase.INITIALISING)
        return self._ask_to_initialise()

    def _ask_to_initialise(self) -> list[Effect]:
        """Have the first replica that is there fill the mapping."""
        if (
            not self._may(May.INITIALISE)
            or self._filler
            or self.plan is None
            or not (first := self._membership.initialiser())
        ):
            return []
        self._membership.wait(first)
        self._filler = first
        return [Send(first, initialising.Restore(self.plan, self._saving.newest))]

    def _on_restored(self, sender: str, event: initialising.Restored) -> list[Effect]:
        return self._begin() if self._may(May.INITIALISE) and sender == self._filler else []

    @property
    def _holders(self) -> list[str]:
        return sorted(self._membership.members, key=roles.index_of)[:1]

    @property
    def _busy(self) -> Collection[str]:
        return self._membership.members - self._done

    def _save(self) -> list[Effect]:
        if self._may(May.CLOSE) and not self._membership.members and self._closing.cause.outcome is not Outcome.FAILED:
            self._closing.cause, self._closing.reason = Cause.UNKEPT, self._saving.unsaved("every replica is gone")
        return super()._save() if self._membership.members else []

    def _write(self) -> list[Effect]:
        effects = super()._write()
        if effects:
            [self._writer] = self._holders
        return effects

    def _on_saved(self, sender: str, event: events.Saved) -> list[Effect]:
        effects = super()._on_saved(sender, event)
        if self._again and self._may(May.DEAL) and self._membership.members:
            self._again = False
            effects += self._save()
        return effects

    def _on_leave(self, sender: str, event: membership.Leave) -> list[Effect]:
        """A replica is done; it stays, to be asked for what is left, until it is told to stop."""
        if sender not in self._membership.members:
            return super()._on_leave(sender, event)
        self._done.add(sender)
        return [WriteRecord(records.Gone(sender, 0, "it was done", died=False)), *self._close()]

    def _without_replica(self, role: str, reason: str, died: bool) -> list[Effect]:
        """What it held is dealt again; what it was asked for, another is."""
        self._done.discard(role)
        described = role in self._closing.describing
        self._closing.describing.discard(role)
        effects: list[Effect] = []
        if role == self._filler:
            self._filler = ""
        others = self._membership.members - {role}
        saving = (self._saving.stage is CheckpointStage.WRITING and role == self._writer) or (
            self._saving.stage is CheckpointStage.HOLDING and not others
        )
        if saving:
            effects += self._give_up(f"{role} is gone ({reason})")
            self._again = self._saving.stage is CheckpointStage.SEALING
        if self._may(May.CLOSE) and others and (saving or described):
            self._closing.describing.clear()
            self._closing.steps = [*([ClosingStep.SAVE] if saving else []), ClosingStep.DESCRIBE, ClosingStep.STOP]
        return [*effects, *super()._without_replica(role, reason, died)]
