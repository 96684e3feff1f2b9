"""Parameters that replicas hold in one memory: one of them fills it, saves it and accounts for it, as a shard would.

That one is the first of those who are there; when it dies, the next is asked. So replicas that are done stay until the
last checkpoint is written.
"""

from __future__ import annotations

from distbelief.coordination.closing import ClosingStep
from distbelief.coordination.coordinator import Coordinator, Handlers, Holders
from distbelief.core import roles
from distbelief.core.conversations import initialising
from distbelief.core.conversations.checkpointing import CheckpointStage
from distbelief.core.conversations.phases import May, Phase
from distbelief.core.effects import Effect, Send


class MemoryHolders(Holders):
    """The replicas of a job in one memory; see `coordination.coordinator.Holders`."""

    stay = True

    def __init__(self) -> None:
        self.filler = ""
        """Replica that was asked to fill the memory; "" for nobody."""

    def handlers(self, job: Coordinator) -> Handlers:
        """One says that the memory is filled."""
        return {
            initialising.Restored: lambda sender, _: (
                job.begin() if job.may(May.INITIALISE) and sender == self.filler else []
            )
        }

    def roles(self, job: Coordinator) -> list[str]:
        """The first of the replicas."""
        return sorted(job.membership.members, key=roles.index_of)[:1]

    def restore(self, job: Coordinator) -> list[Effect]:
        """Have the first replica that is there fill the memory, once the layout is known."""
        if job.plan is not None and job.may(May.GATHER):
            job.enter(Phase.INITIALISING)
        return self.initialise(job)

    def initialise(self, job: Coordinator) -> list[Effect]:
        """Have the first replica fill the memory, unless one was asked already."""
        if not job.may(May.INITIALISE) or self.filler or job.plan is None:
            return []
        if not (first := job.membership.initialiser()):
            return []
        job.membership.wait(first)
        self.filler = first
        return [Send(first, initialising.Restore(job.plan, job.saving.newest))]

    def without(self, job: Coordinator, replica: str, reason: str) -> list[Effect]:
        """Ask another replica for what one that is gone was asked for."""
        saving, closing = job.saving, job.closing
        described = replica in closing.describing
        closing.describing.discard(replica)
        effects: list[Effect] = []
        if replica == self.filler:
            self.filler = ""
        others = job.membership.members - {replica}
        unmade = (saving.stage is CheckpointStage.WRITING and replica in saving.writing) or (
            saving.stage is CheckpointStage.HOLDING and not others
        )
        if unmade:
            effects += job.give_up(f"{replica} is gone ({reason})")
            saving.again = saving.stage is CheckpointStage.SEALING
        if job.may(May.CLOSE) and others and (unmade or described):
            closing.describing.clear()
            closing.steps = [*([ClosingStep.SAVE] if unmade else []), ClosingStep.DESCRIBE, ClosingStep.STOP]
        return effects
