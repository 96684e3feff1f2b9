"""The story of a replica that updates shared memory: Hogwild's loop, with locks or without (Niu 2011, section 2).

It computes a gradient at the parameters as they are, and steps them itself; what is stale, torn or locked is the
worker's. Between two steps it hears what the coordinator has to say: that updates are to rest while a checkpoint is
made, or that it is to make it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Any

from distbelief.core import events, messages, roles
from distbelief.core.conversations import checkpointing, dealing, initialising, membership
from distbelief.core.effects import (
    GLANCE,
    RECEIVE,
    REST,
    Arrival,
    Attach,
    Batch,
    Begin,
    Compute,
    Computed,
    Load,
    Save,
    Send,
    Story,
    Update,
)
from distbelief.core.records import Json
from distbelief.core.settings import Plan
from distbelief.replica.links import unwanted
from distbelief.replica.steps import Steps
from distbelief.replica.work import REPORT_SECONDS, WorkQueue, check_loss
from distbelief.sharding.layout import Layout


class SharedMemoryReplica:
    """One replica.

    Args:
        role: its name.
        layout: of its model.
        samples: in its training set.
        incarnation: of this replica; a restarted one has a higher.
        holds: everything in the mapping, by name, and the facts, for a checkpoint.
        blocked: says for which lock or turn it waits, and who has it.
    """

    def __init__(
        self, role: str, layout: Layout, samples: int, incarnation: int,
        holds: Callable[[], tuple[dict[str, Any], Json]], blocked: Callable[[], str],
    ) -> None:  # fmt: skip
        self.role, self.incarnation, self.step = role, incarnation, 0
        self._layout, self._samples, self._holds, self._blocked = layout, samples, holds, blocked
        self._plan: Plan | None = None
        self._work, self._made = WorkQueue(), _Made()
        self._attached = self._welcomed = self._ending = self._draining = self._holding = self._updating = (
            self._left
        ) = self._over = False
        self._hold: int | None = None
        self._requests: deque[events.Event] = deque()

    def story(self) -> Story:
        """From joining to leaving."""
        yield Send(roles.COORDINATOR, membership.Join(self.incarnation, self._layout, self._samples))
        while not (self._welcomed or self._ending):
            yield from self._wait()
        if self._plan is not None:
            yield from self._attach(self._plan)
            yield from self._train(self._plan)
        self._left = True
        yield Send(roles.COORDINATOR, membership.Leave(for_good=True))
        while not self._over:
            yield from self._wait()

    def coming(self, most: int) -> list[Batch]:
        """The minibatches that come next, as far as they are dealt."""
        return self._work.coming(most)

    def waits(self) -> str:
        """Return what it waits for, where it does: one sentence."""
        if not self._welcomed:
            return "to be welcomed by the coordinator"
        if self._updating:
            return self._blocked()
        if self._left:
            return "for the others to be done, and the last checkpoint"
        return "for a checkpoint to be made" if self._holding else "for work from the coordinator"

    def standing(self) -> dict[str, object]:
        """Return how far it is."""
        return {"clock": self.step}

    def _train(self, plan: Plan) -> Steps[None]:
        """One minibatch after another: compute, and update."""
        while (batch := (yield from self._next_batch())) is not None:
            while self._holding:  # a forward pass writes buffers: it is not begun either
                yield from self._wait()
            computed: Computed = yield Compute(batch)
            if computed.loss is not None:
                check_loss(self.role, computed.loss, batch, self.step, "loss", plan.settings.optimizer.lr)
                self._work.count(computed.loss)
            yield from self._update(computed)
            if self._work.seconds >= REPORT_SECONDS:
                yield self._progress(wants=False)
            yield from self._hear()
        yield self._progress(wants=False)

    def _update(self, computed: Computed) -> Steps[None]:
        """Step the parameters; whoever waits for a lock or a turn hears of the end of the job."""
        self._updating = True
        while not (yield Update(computed.samples)):
            self._take((yield RECEIVE))
        self._updating = False
        self.step += 1
        self._made.add(computed.samples)
        self._work.seconds += computed.seconds

    def _next_batch(self) -> Steps[Batch | None]:
        """The next minibatch that the coordinator dealt; None when the job is over."""
        while not self._ending:
            if self._work.runs_out and not self._draining:
                yield self._progress(wants=True)
            if (batch := self._work.next()) is not None:
                return batch
            if self._draining:
                self._draining = False
                yield self._progress(wants=False)
            else:
                yield from self._wait()
        return None

    def _progress(self, wants: bool) -> Send:
        return Send(roles.COORDINATOR, self._work.report(self._made, wants))

    # what the coordinator asks one replica to do for all

    def _attach(self, plan: Plan) -> Steps[None]:
        """Reach the mapping; once."""
        if not self._attached:
            self._plan, self._attached = plan, True
            yield Attach(plan, 0, 0)

    def _run(self, event: events.Event) -> Steps[None]:
        if isinstance(event, initialising.Restore):
            yield from self._attach(event.plan)
            loaded: events.Loaded | None = (yield Load(event.checkpoint, event.plan, 0)) if event.checkpoint else None
            yield Begin(loaded.arrays, loaded.facts) if loaded else Begin(None, {})
            yield Send(roles.COORDINATOR, initialising.Restored(loaded=True))
            return
        arrays, facts = self._holds()
        if isinstance(event, checkpointing.Snapshot):
            saved: events.Saved = yield Save(event.number, "shard-0", arrays, facts)
            yield Send(roles.COORDINATOR, checkpointing.SnapshotDone(event.number, saved.error))
        else:
            staleness = {int(at): count for at, count in facts["staleness"].items()}
            yield Send(
                roles.COORDINATOR,
                checkpointing.Description(messages.Version(0, facts["updates"]), facts["samples"], staleness),
            )

    # what arrives

    def _wait(self) -> Steps[None]:
        """Wait for the next word, and do what it asks for."""
        yield REST
        self._take((yield RECEIVE))
        yield from self._oblige()

    def _hear(self) -> Steps[None]:
        """Do what is asked for by what has arrived."""
        while (arrival := (yield GLANCE)) is not None:
            self._take(arrival)
        yield from self._oblige()

    def _oblige(self) -> Steps[None]:
        if self._hold is not None:
            number, self._hold = self._hold, None
            yield self._progress(wants=False)
            yield Send(roles.COORDINATOR, checkpointing.Held(number))
        while self._requests:
            yield from self._run(self._requests.popleft())

    def _take(self, arrival: Arrival) -> None:
        event = arrival.event
        if isinstance(event, dealing.Deal):
            self._work.deal(event.portion)
        elif isinstance(event, dealing.Drain):
            self._draining = True
        elif isinstance(event, membership.Welcome):
            self._welcomed = True
            self._plan = self._plan or event.plan
        elif isinstance(event, initialising.Restore | checkpointing.Snapshot | checkpointing.Describe):
            self._requests.append(event)
        elif isinstance(event, checkpointing.Hold):
            self._holding, self._hold = True, event.number
        elif isinstance(event, checkpointing.Go):
            self._holding, self._hold = False, None
        elif isinstance(event, membership.Finish):
            self._ending = True
        elif isinstance(event, membership.Farewell) or (self._left and isinstance(event, membership.Stop)):
            self._over = True
        else:
            unwanted(self.role, arrival)


class _Made:
    """The updates since the last report; all are applied."""

    def __init__(self) -> None:
        self._steps = self._samples = 0

    def add(self, samples: int) -> None:
        self._steps += 1
        self._samples += samples

    def take(self) -> tuple[int, int, int, tuple[tuple[int, int], ...]]:
        done = self._steps, self._samples, self._steps, ()
        self._steps = self._samples = 0
        return done
