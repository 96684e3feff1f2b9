"""The story of a Downpour replica: Algorithm 1.1 of the paper.

Beside the paper's listing: gradients are pushed after every `push_every` steps, so that each push holds as many (the listing pushes one at step 0),
and a fetch lands only between steps. With `prefetch` the fetch for the next step is in flight while this one computes, and pushes are not waited for.
Where the consistency needs it, a replica tells the shards when it takes part and when it sits out, and pushes and fetches name their tick; in rounds
each gradient of a push is weighted by its minibatch's share of a full one, so that unequal minibatches add up to their union.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Generator
from typing import Any, NoReturn

from distbelief.core import attendance, events, messages, roles
from distbelief.core.effects import RECEIVE, Arrival, Attach, Batch, Compute, Computed, Effect, Payload, Send, Story
from distbelief.core.layout import Range
from distbelief.core.messages import Version
from distbelief.core.portions import Portion
from distbelief.core.settings import Plan
from distbelief.errors import JobFailed, LayoutError, LocalProtocolError, TrainingError, UsageError
from distbelief.replica.vectors import Vectors

REPORT_SECONDS = 0.25
"""A replica reports its progress when it has computed for this long since its last report, and at the end of every portion."""

Steps = Generator[Effect, Any, None]


def refusal(event: messages.Refused) -> LayoutError | UsageError:
    """The error for a role that may not take part."""
    return (LayoutError if event.layout else UsageError)(event.reason)


class Downpour:
    """One replica.

    Args:
        role: its name.
        vectors: of its model.
        samples: in its training set.
        batch_size: that the user's own loop names; 0 where the job's is taken.
        keeps: whether the model is used after the story: then it ends with the server's parameters.
        incarnation: of this replica; a restarted one has a higher.
    """

    def __init__(self, role: str, vectors: Vectors, samples: int, batch_size: int = 0, keeps: bool = False, incarnation: int = 0) -> None:
        self.role, self.vectors, self.incarnation = role, vectors, incarnation
        self.step = 0
        self._samples, self._batch_size, self._keeps = samples, batch_size, keeps
        self._plan: Plan | None = None
        self._initialise = False
        self._ending = False

    def story(self) -> Story:
        """Algorithm 1.1, from joining to leaving."""
        if not (yield from self._join()):
            yield Send(roles.COORDINATOR, messages.Leave())
            return
        while (batch := (yield from self._next_batch())) is not None:
            if self._attends and not self._attending:
                yield from self._attend()
            if self._in_flight or self._too_old(self.step, self._tick):
                yield from self._fetch()
            if self._settings.prefetch and self._too_old(self.step + 1, self._next_tick):
                yield from self._ask_ahead()
            computed: Computed | None = yield Compute(batch)
            if computed is None:
                break
            if computed.loss is not None:
                self.report(computed.loss, batch, self.step)
            yield from self._accrue(computed)
            self.step += 1
            if self._steps == self._settings.push_every:
                yield from self._push()
            if self._seconds >= REPORT_SECONDS:
                yield self._progress(wants=False)
        yield from self._drain()
        if self._keeps:
            yield from self._request(self._landing, [part for _, part in self._parts])
            yield from self._landed()
            self.vectors.swap(self._landing)
        yield Send(roles.COORDINATOR, messages.Leave())

    def waits(self) -> str:
        """What it waits for, where it does: one sentence."""
        if self._plan is None:
            return "to be welcomed by the coordinator"
        if self._missing:
            asked = sorted(self._asked_of, key=roles.index_of)
            return f"for parameters from {', '.join(asked[:3]) or 'the shards'}" + (f" and {len(asked) - 3} more" if len(asked) > 3 else "")
        if any(self._busy):
            return "for the shards to apply its push"
        return "for work from the coordinator"

    def standing(self) -> dict[str, Any]:
        """How far it is."""
        return {} if self._plan is None else {"clock": self._clock}

    # joining

    def _join(self) -> Generator[Effect, Any, bool]:
        """Take part and hold the server's parameters; False where the job is over already."""
        yield Send(roles.COORDINATOR, messages.Join(self.incarnation, self.vectors.layout, self._samples, self._batch_size))
        while self._plan is None:
            self._take((yield RECEIVE))
            if self._ending:
                return False
        plan = self._plan
        self._settings = plan.settings
        parameters = self._settings.landings
        yield Attach(plan, self._settings.slots, parameters)
        self._start(plan)
        if self._initialise:
            yield from self._send_initial(plan)
        yield from self._request(0, [part for a in plan.assignments for part in (a.moving, a.frozen)])
        yield from self._landed()
        self.vectors.swap(0)
        return True

    def _start(self, plan: Plan) -> None:
        own = [(roles.shard(i), a.moving) for i, a in enumerate(plan.assignments) if a.moving.size]
        self._holders: dict[tuple[int, int], str] = {}
        for i, a in enumerate(plan.assignments):
            for part in (a.moving, a.frozen):
                if part.size:
                    self._holders[part.start, part.stop] = roles.shard(i)
        self._parts: list[tuple[str, Range]] = own
        self._outgoing: list[list[Payload]] = [[self.vectors.outgoing(slot, part) for _, part in own] for slot in range(self._settings.slots)]
        self._push_bytes = self._fetch_bytes = sum(part.size for _, part in own)
        self._versions: dict[str, Version] = {role: Version(0, 0) for role, _ in own}
        self._based = self._versions
        self._arrived: dict[str, Version] = dict(self._versions)
        self._missing = 0
        self._asked_of: set[str] = set()
        self._landing, self._in_flight = 0, False
        self._clock = self._slot = 0
        self._busy = [0] * self._settings.slots
        self._unacknowledged: deque[list[int]] = deque()
        self._dropped: list[tuple[int, int]] = []
        self._attends, self._in_rounds = self._settings.attends, self._settings.in_rounds
        self._attending, self._admitting = False, 0
        self._expected = self._in_rounds  # the first round waits for all, until they say otherwise
        self._tick = self._floor = 0
        self._floors: dict[str, int] = {role: 0 for role, _ in own}
        self._bound = self._settings.staleness if self._settings.consistency == "bounded" else math.inf
        self._steps = self._accrued_samples = 0
        self._portions: deque[Portion] = deque()
        self._at = 0
        self._asked = self._draining = False
        self._seconds = self._loss = 0.0
        self._losses = self._done_steps = self._done_samples = self._done_pushes = self._pushed = self._fetched = 0

    def _send_initial(self, plan: Plan) -> Steps:
        self.vectors.initial(0)
        for (start, stop), role in self._holders.items():
            self._missing += 1
            yield Send(role, messages.Initialise(0, start, stop), self.vectors.outgoing(0, Range(start, stop)))
        yield from self._landed()
        yield Send(roles.COORDINATOR, messages.Ready())

    # data

    def _next_batch(self) -> Generator[Effect, Any, Batch | None]:
        """The next minibatch that the coordinator dealt; one portion is kept in reserve. None when the job is over."""
        while not self._ending:
            if self._portions and self._at < self._portions[0].count:
                portion = self._portions[0]
                if not self._asked and len(self._portions) == 1:
                    self._asked = True
                    yield self._progress(wants=True)
                self._at += 1
                return Batch(portion.epoch, portion.first + self._at - 1)
            if self._portions:
                self._portions.popleft()
                self._at = 0
                continue
            if self._draining:
                self._draining = False
                yield from self._drain()
            elif not self._asked:
                self._asked = True
                yield self._progress(wants=True)
            else:
                self._take((yield RECEIVE))
        return None

    def report(self, loss: float, batch: Batch | None, step: int, what: str = "loss") -> None:
        """Count the loss of a step on a minibatch into the next report.

        Raises:
            TrainingError: it is not a finite number.
        """
        if not math.isfinite(loss):
            where = f" (epoch {batch.epoch + 1}, minibatch {batch.index})" if batch else ""
            raise TrainingError(
                f"{self.role}: the {what} is {loss} at step {step}{where}; lower --lr (it is {self._settings.optimizer.lr:g}),"
                " clip with --clip-norm, or look for a division by zero in the model"
            )
        self._loss += loss
        self._losses += 1

    # gradients up

    def _accrue(self, computed: Computed) -> Steps:
        """Add the step's gradient to what the next push will hold, and step the local model."""
        while self._busy[self._slot]:
            self._take((yield RECEIVE))
        if not self._steps:
            self._based = self._versions
        weight = computed.samples / self._settings.batch_size if self._in_rounds else 1.0
        self.vectors.accrue(self._slot, not self._steps, weight)
        if self._settings.local_lr:
            self.vectors.descend(self._settings.local_lr)
        self._steps += 1
        self._accrued_samples += computed.samples
        self._seconds += computed.seconds

    def _push(self) -> Steps:
        """Send what has accrued to all shards; does not wait."""
        slot = self._slot
        self.vectors.carry_buffers(slot)
        self._clock += 1
        self._busy[slot] = len(self._parts)
        self._unacknowledged.append([len(self._parts), self._steps, self._accrued_samples, False])
        for (role, part), payload in zip(self._parts, self._outgoing[slot], strict=True):
            push = messages.Push(
                slot, part.start, part.stop, self.incarnation, self._clock, self._based[role], self._steps, self._accrued_samples, self._tick
            )  # fmt: skip
            yield Send(role, push, payload)
        self._tick += self._attends
        self._pushed += self._push_bytes
        self._steps = self._accrued_samples = 0
        self._slot = (slot + 1) % self._settings.slots

    def _drain(self) -> Steps:
        """Push the rest, wait until all is acknowledged and all that was asked for is here, and report it."""
        if self._steps:
            yield from self._push()
        yield from self._sit_out()
        while self._unacknowledged or self._missing:
            self._take((yield RECEIVE))
        self._in_flight = False  # what was asked for may be old by the time of the next step
        yield self._progress(wants=False)

    # parameters down

    def _fetch(self) -> Steps:
        """The parameters for this step; with prefetch, those that were asked for a step ago, and the next are asked for."""
        if self._settings.read_in_place:
            return
        if not self._settings.prefetch:
            yield from self._request(0, [part for _, part in self._parts], self._tick)
            yield from self._landed()
            self.vectors.swap(0)
            return
        if not self._in_flight:
            yield from self._request(1 - self._landing, [part for _, part in self._parts], self._tick)
        yield from self._landed()
        self._landing, self._in_flight = 1 - self._landing, False
        self.vectors.swap(self._landing)

    def _ask_ahead(self) -> Steps:
        """Ask for the next step's parameters; they land in the other vector while this step computes."""
        if self._settings.read_in_place:
            return
        self._in_flight = True
        yield from self._request(1 - self._landing, [part for _, part in self._parts], self._next_tick)

    def _request(self, landing: int, parts: list[Range], tick: int = 0) -> Steps:
        for part in parts:
            if part.size:
                self._missing += 1
                self._fetched += part.size
                self._asked_of.add(self._holders[part.start, part.stop])
                yield Send(self._holders[part.start, part.stop], messages.Fetch(landing, part.start, part.stop, tick))

    def _landed(self) -> Steps:
        while self._missing:
            self._take((yield RECEIVE))
        if self._in_rounds:
            yield from self._same_round()
        self._versions = dict(self._arrived)
        self._floor = min(self._floors.values())

    def _same_round(self) -> Steps:
        """Rounds may have gone on without this replica: have every shard's parameters be those of one round, which this replica is in."""
        while (newest := max(self._floors.values())) > min(self._floors.values()):
            yield from self._request(self._landing, [part for role, part in self._parts if self._floors[role] < newest], newest)
            while self._missing:
                self._take((yield RECEIVE))
        self._tick = newest

    def _too_old(self, step: int, tick: int) -> bool:
        """Whether the parameters at hand may not serve a step: by the user's cadence, or because the consistency asks for newer ones."""
        if self._in_rounds:
            return not self._steps
        return step % self._settings.fetch_every == 0 or self._floor < tick - self._bound

    @property
    def _next_tick(self) -> int:
        """The tick of the step after this one."""
        return self._tick + (self._steps + 1 == self._settings.push_every)

    # taking part

    def _attend(self) -> Steps:
        """Take part, from the furthest tick at which a shard would have this replica begin."""
        self._admitting = len(self._parts)
        for role, _ in self._parts:
            yield Send(role, attendance.Attend(self.incarnation, -1))
        while self._admitting:
            self._take((yield RECEIVE))
        self._attending, self._expected = True, False
        if self._settings.consistency == "bounded":
            for role, _ in self._parts:
                yield Send(role, attendance.Attend(self.incarnation, self._tick))

    def _sit_out(self) -> Steps:
        """Be waited for by nobody; what was pushed before counts."""
        if self._attending or self._expected:
            self._attending = self._expected = False
            for role, _ in self._parts:
                self._missing += 1
                yield Send(role, attendance.SitOut())

    # what arrives

    def _progress(self, wants: bool) -> Send:
        report = messages.Progress(
            self._done_steps, self._done_samples, self._done_pushes, self._loss, self._losses, self._pushed, self._fetched, wants,
            tuple(self._dropped),
        )  # fmt: skip
        self._dropped.clear()
        self._seconds = self._loss = 0.0
        self._losses = self._done_steps = self._done_samples = self._done_pushes = self._pushed = self._fetched = 0
        return Send(roles.COORDINATOR, report)

    def _take(self, arrival: Arrival) -> None:
        """Note what arrived; every wait of the story is a loop around this."""
        event = arrival.event
        kind = type(event)
        if kind is messages.Fetched:
            self._missing -= 1
            self._asked_of.discard(arrival.sender)
            self._arrived[arrival.sender] = event.version  # type: ignore[union-attr]
            if arrival.sender in self._floors:  # others hold nothing but frozen parameters
                self._floors[arrival.sender] = event.floor  # type: ignore[union-attr]
        elif kind is messages.Pushed:
            self._acknowledged(arrival.sender, event)  # type: ignore[arg-type]
        elif isinstance(event, messages.Initialised | attendance.Excused):
            self._missing -= 1
        elif isinstance(event, messages.Deal):
            self._portions.append(event.portion)
            self._asked = False
        elif isinstance(event, attendance.Admitted):
            self._admitting -= 1
            self._tick = max(self._tick, event.tick)
        elif isinstance(event, messages.Drain):
            self._draining = True
        elif isinstance(event, messages.Finish):
            self._ending = True
        elif isinstance(event, messages.Welcome):
            self._plan, self._initialise = event.plan, event.initialise
        else:
            self._end(arrival)

    def _acknowledged(self, shard: str, event: messages.Pushed) -> None:
        """A shard has applied a push; one that all shards have applied is done. The last of a former life are nobody's any more."""
        if event.incarnation != self.incarnation:
            return
        waiting = self._unacknowledged
        push = waiting[event.clock - (self._clock - len(waiting)) - 1]
        push[0] -= 1
        push[3] |= event.dropped
        self._busy[event.slot] -= 1
        if self._settings.read_in_place:
            self._versions = {**self._versions, shard: event.version}
        while waiting and not waiting[0][0]:
            _, steps, samples, dropped = waiting.popleft()
            if dropped:
                self._dropped.append((self._done_steps, steps))
                continue
            self._done_steps += steps
            self._done_samples += samples
            self._done_pushes += 1

    def _end(self, arrival: Arrival) -> NoReturn:
        event = arrival.event
        if isinstance(event, messages.Refused):
            raise refusal(event)
        if isinstance(event, events.Lost):
            raise JobFailed(f"{self.role}: {arrival.sender} is gone ({event.reason})")
        if isinstance(event, messages.Stop):
            raise JobFailed(f"{self.role}: the job was ended: {event.reason}")
        raise LocalProtocolError(f"{self.role} has no use for {type(event).__name__} from {arrival.sender}")
