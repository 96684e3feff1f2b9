"""The story of a replica that updates the shard's memory itself, without a lock: Hogwild's loop (Niu 2011, section 2).

It joins, waits, is dealt minibatches and leaves as a Downpour replica does. Between these it computes a gradient at the
parameters as they are, and has the worker step them: it pushes and fetches nothing.
"""

from __future__ import annotations

from distbelief.core.effects import Batch, Compute, Computed, Update
from distbelief.replica.downpour import DownpourTraining
from distbelief.replica.served_replica import ServedReplica, ServerView
from distbelief.replica.steps import Steps


class HogwildReplica(ServedReplica):
    """One replica."""

    def begin_training(self, server: ServerView) -> DownpourTraining:
        """Begin Hogwild's loop."""
        return HogwildTraining(self, server)


class HogwildTraining(DownpourTraining):
    """Hogwild's loop, and its state since the replica was welcomed."""

    def _first_parameters(self) -> Steps[None]:
        yield from ()  # the model computes where they lie

    def _step(self, batch: Batch) -> Steps[bool]:
        while self._holding:  # a forward pass writes buffers: it is not begun either
            yield from self.wait()
        replica = self._replica
        computed: Computed = yield Compute(batch)
        if computed.loss is not None:
            replica.report(computed.loss, batch, replica.step)
        yield Update(computed.samples)
        replica.step += 1
        self._pushes.made(computed.samples)
        self.work.seconds += computed.seconds
        return True

    def waits(self) -> str:
        """Say in one sentence what it waits for."""
        return "for a checkpoint to be made" if self._holding else super().waits()
