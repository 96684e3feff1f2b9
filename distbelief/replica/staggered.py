"""Local steps whose exchange is spread over time (Streaming DiLoCo, Douillard et al. 2025).

Each shard's range is a fragment with a phase of its own: of P shards, shard p gets its part of a push after
(p + 1) H / P of the H steps, and the answer is mixed into the replica's parameters some steps later. So a link carries
at all times what it would carry in bursts.
"""

from __future__ import annotations

import math

from distbelief.core.conversations.pushing import Fetch
from distbelief.core.effects import Steps
from distbelief.replica.downpour import DownpourTraining
from distbelief.replica.served_replica import ServedReplica, ServerView


# The parts of a push have one clock, though they leave one by one: so a round is of the same pushes at every shard. The
# last steps of a push reach the first shards only with the next push, which therefore counts them: a minibatch counts
# once its change is everywhere. At the end of an epoch a push of all that has changed since brings the rest.
class StaggeredTraining(DownpourTraining):
    """The loop of Algorithm 1.1 with local steps, where each shard has a phase of its own."""

    def __init__(self, replica: ServedReplica, server: ServerView) -> None:
        super().__init__(replica, server)
        shards = len(server.parts)
        settings = server.plan.settings
        self._delay, self._alpha = settings.stagger_delay, settings.stagger_mix
        self._phases = [math.ceil((number + 1) * self._goal / shards) for number in range(shards)]
        """Number of steps after which each shard gets its part."""
        self._due: dict[str, float] = {}
        """Step after which each answer that is under way is mixed in, by shard."""
        self._uncounted = 0, 0
        """Minibatches and samples that no push counts yet."""
        self._opened = self._whole = False
        """Flags: a push has begun to leave; the model has the shards' parameters, but for its own steps."""

    def _too_old(self, step: int, tick: int) -> bool:
        return not self._whole

    def _fetch(self) -> Steps[None]:
        yield from super()._fetch()
        self._whole = True

    @property
    def _discards(self) -> bool:
        return False

    def _exchange(self) -> Steps[None]:
        """Send the parts that are due after this step, and mix in the answers that are due."""
        yield from self._mix(self._replica.step)
        yield from self._send([number for number, phase in enumerate(self._phases) if phase == self._next.steps])
        yield from self._mix(self._replica.step)
        if self._next.steps >= self._goal:
            self._close()

    def _send(self, numbers: list[int]) -> Steps[None]:
        """Send the parts of some shards, and fetch the results."""
        vectors = self._replica.vectors
        for number in numbers:
            role, part = self.server.parts[number]
            if not self._opened:
                yield from self._wait_to_push()
                self._pushes.open(self._slot, *self._uncounted, [shard for shard, _ in self.server.parts])
                self._opened = True
            while self._pushes.owed(role):  # the shard may still read the part before
                yield from self.wait()
            vectors.change(self._slot, part)
            vectors.carry_buffers(self._slot, 0, part)
            self._based = self.server.based(0)
            message = self._message(role, part, self._pushes.clock, *self._uncounted)
            yield self._pushes.part(role, message, vectors.outgoing(self._slot, part))
            yield from self.server.fetch(0, [part], self._tick + self._policy.attended)
            self._due[role] = self._replica.step + self._delay

    def _mix(self, step: float) -> Steps[None]:
        """Mix the answers into the parameters that are due by a step."""
        for role, part in self.server.parts:
            if role in self._due and self._due[role] <= step:
                while self._links.asks(role, Fetch):
                    yield from self.wait()
                self.server.held.land()
                self._replica.vectors.mix(part, self._alpha)
                del self._due[role]

    def _close(self) -> None:
        """End a push: the next one counts its steps."""
        self._uncounted = self._next.covered, self._next.samples
        self._next.clear()
        self._tick += self._policy.attended
        self._opened = False

    def _flush(self) -> Steps[None]:
        """Send the rest of a push, and then all that has changed since."""
        every = range(len(self._phases))
        if self._opened:
            yield from self._send([number for number in every if self._phases[number] > self._next.steps])
            self._close()
        steps, samples = self._uncounted
        self._uncounted = steps + self._next.covered, samples + self._next.samples
        self._next.clear()
        yield from self._mix(math.inf)
        if self._uncounted[0]:
            yield from self._send(list(every))
            self._close()
            yield from self._mix(math.inf)
        self._whole = False


def begin_staggered(replica: ServedReplica, server: ServerView) -> DownpourTraining:
    """Begin a training in which each shard has a phase of its own; with one shard there are no phases."""
    return (StaggeredTraining if len(server.parts) > 1 else DownpourTraining)(replica, server)
