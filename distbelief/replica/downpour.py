"""The story of a Downpour replica: Algorithm 1.1 of the paper.

Beside the paper's listing: gradients are pushed after every `push_every` steps, so that each push holds as many (the
listing pushes one at step 0), and a fetch lands only between steps. With `prefetch` the fetch for the next step is in
flight while this one computes, and pushes are not waited for. Where the consistency needs it, a replica tells the
shards when it takes part and when it sits out, and pushes and fetches name their tick; in rounds each gradient of a
push is weighted by its minibatch's share of a full one, so that unequal minibatches add up to their union.

A shard that dies comes again: a replica tells it how far the one before had acknowledged, and sends it again what that
had not; in rounds, where all shards go back to one checkpoint, a replica begins anew. While a checkpoint is made it
computes, but pushes nothing.
"""

from __future__ import annotations

import math
from collections.abc import Generator
from typing import Any

from distbelief.core import events, roles
from distbelief.core.conversations import attendance, checkpointing, dealing, initialising, membership, pushing
from distbelief.core.effects import RECEIVE, Arrival, Attach, Batch, Compute, Computed, Effect, Payload, Send, Story
from distbelief.core.settings import Own, Plan, Pushing
from distbelief.replica.links import Links, unwanted
from distbelief.replica.parameters import Parameters
from distbelief.replica.pushes import Pushes
from distbelief.replica.vectors import Vectors
from distbelief.replica.work import Work, check_loss
from distbelief.sharding.layout import Range

REPORT_SECONDS = 0.25
"""A replica reports its progress when it has computed for this long since its last report, and at the end of every
portion.
"""

Steps = Generator[Effect, Any, None]


class AllBack(Exception):
    """The whole job has gone back to a checkpoint."""


class DownpourReplica:
    """One replica.

    Args:
        role: its name.
        vectors: of its model.
        samples: in its training set.
        batch_size: that the user's own loop names; 0 where the job's is taken.
        keeps: whether the model is used after the story: then it ends with the server's parameters.
        incarnation: of this replica; a restarted one has a higher.
    """

    def __init__(
        self, role: str, vectors: Vectors, samples: int, batch_size: int = 0, keeps: bool = False, incarnation: int = 0
    ) -> None:
        self.role, self.vectors, self.incarnation = role, vectors, incarnation
        self._partition = roles.partition_of(role)
        self.step = self._generation = 0
        self._samples, self._batch_size, self._keeps = samples, batch_size, keeps
        self._plan: Plan | None = None
        self._strategy: Own = Pushing()
        self._pushing = self._strategy.pushing
        self._links = Links(role)
        self._welcome: membership.Welcome | None = None
        self._ending = self._left = self._wanted_away = self._excused = False

    def story(self) -> Story:
        """Algorithm 1.1, from joining to leaving."""
        yield Send(
            roles.COORDINATOR, membership.Join(self.incarnation, self.vectors.layout, self._samples, self._batch_size)
        )
        while self._welcome is None and not self._ending:
            self._take((yield RECEIVE))
        if self._welcome is None:
            yield Send(roles.COORDINATOR, membership.Leave(for_good=True))
            return
        self._plan, self._settings = (plan := self._welcome.plan), plan.settings
        self._strategy, self._pushing = self._settings.strategy, self._settings.strategy.pushing
        yield Attach(plan, self._settings.slots, self._settings.landings)
        while not self._excused:
            try:
                if not self._left:
                    yield from self._enter(plan)
                    yield from self._train()
                yield from self._leave()
            except AllBack:
                continue

    def _leave(self) -> Steps:
        """Leave, once the coordinator says so: should all go back before it does, there is work again."""
        yield Send(roles.COORDINATOR, membership.Leave(for_good=self._left))
        while not self._excused:
            self._take((yield RECEIVE))
            if self._welcome is not None and self._welcome.generation > self._generation:
                raise AllBack

    def _train(self) -> Steps:
        """The loop of Algorithm 1.1."""
        while (batch := (yield from self._next_batch())) is not None:
            if self._attends and not self._attending:
                yield from self._attend()
            if self._in_flight or self._too_old(self.step, self._tick):
                yield from self._fetch()
            if self._pushing.prefetch and self._too_old(self.step + 1, self._next_tick):
                yield from self._ask_ahead()
            computed: Computed | None = yield Compute(batch)
            if computed is None:
                self._left = True
                break
            if computed.loss is not None:
                self.report(computed.loss, batch, self.step)
            yield from self._accrue(computed)
            self.step += 1
            if self._steps == self._pushing.push_every:
                yield from self._push()
            if self._work.seconds >= REPORT_SECONDS:
                yield self._progress(wants=False)
        yield from self._drain()
        if self._keeps:
            yield from self._request(self._landing, [part for _, part in self._parts])
            yield from self._landed()
            self.vectors.swap(self._landing)

    def waits(self) -> str:
        """What it waits for, where it does: one sentence."""
        if self._plan is None:
            return "to be welcomed by the coordinator"
        if lives := self._links.waits_for_lives():
            return lives
        if self._holding and self._steps == self._pushing.push_every:
            return "for a checkpoint to be made"
        if answers := self._links.waits_for_answers():
            return answers
        if self._pushes.waiting:
            return "for the shards to apply its push"
        return "for work from the coordinator"

    def standing(self) -> dict[str, Any]:
        """How far it is."""
        return {} if self._plan is None else {"clock": self._pushes.clock}

    # joining

    def _enter(self, plan: Plan) -> Steps:
        """Reach the shards, and hold the server's parameters."""
        self._start(plan)
        initialise = False
        while self._welcome is not None or (self._strategy.one_moment and self._links.lost):
            while self._welcome is None:
                yield from self._links.seek()
                self._take((yield RECEIVE))
            welcome, self._welcome = self._welcome, None
            initialise |= welcome.initialise
            if welcome.generation > self._generation:
                self._generation = welcome.generation
                yield Send(roles.COORDINATOR, membership.Anew(self._generation))
            for shard in [*(yield from self._links.reach(welcome)), *self._links.lost]:
                self._links.forget(shard)
        self._start(plan)
        if initialise:
            yield from self._send_initial()
        yield from self._request(0, [part for a in plan.assignments for part in (a.moving, a.frozen)])
        yield from self._landed()
        self.vectors.swap(0)

    def _start(self, plan: Plan) -> None:
        own = [(roles.shard(i), a.moving) for i, a in enumerate(plan.assignments) if a.moving.size]
        held = [
            (roles.shard(i), part) for i, a in enumerate(plan.assignments) for part in (a.moving, a.frozen) if part.size
        ]
        self._holders = {(part.start, part.stop): role for role, part in held}
        self._parts: list[tuple[str, Range]] = own
        self._outgoing: list[list[Payload]] = [
            [self.vectors.outgoing(slot, part) for _, part in own] for slot in range(self._settings.slots)
        ]
        self._held = Parameters(role for role, _ in own)
        self._based = self._held.versions
        self._ending = self._holding = self._draining = self._attending = self._in_flight = False
        self._hold: int | None = None
        self._pushes = Pushes(self.incarnation, self._held.versions, self._settings.slots)
        self._attends, self._in_rounds = self._strategy.attendance, self._strategy.rounds
        self._expected = self._in_rounds  # the first round waits for all, until they say otherwise
        self._landing = self._slot = self._tick = self._steps = self._accrued_samples = 0
        self._bound = self._strategy.staleness_bound
        self._work = Work()

    def _send_initial(self) -> Steps:
        self.vectors.initial(0)
        for (start, stop), role in self._holders.items():
            yield self._links.ask(
                role, initialising.Initialise(0, start, stop), self.vectors.outgoing(0, Range(start, stop))
            )
        yield from self._landed()
        yield Send(roles.COORDINATOR, initialising.Ready(self._links.lives()))

    # data

    def _next_batch(self) -> Generator[Effect, Any, Batch | None]:
        """The next minibatch that the coordinator dealt; None when the job is over."""
        while not (self._ending or self._wanted_away):
            if self._work.runs_out and not self._draining:
                yield self._progress(wants=True)
            if (batch := self._work.next()) is not None:
                return batch
            if self._draining:
                self._draining = False
                yield from self._drain()
            else:
                yield from self._wait()
        return None

    def report(self, loss: float, batch: Batch | None, step: int, what: str = "loss") -> None:
        """Count the loss of a step on a minibatch into the next report.

        Raises:
            LossNotFinite: it is not a finite number.
        """
        check_loss(self.role, loss, batch, step, what, self._settings.optimizer.lr)
        self._work.count(loss)

    # gradients up

    def _accrue(self, computed: Computed) -> Steps:
        """Add the step's gradient to what the next push will hold, and step the local model."""
        while self._pushes.busy[self._slot]:
            yield from self._wait()
        if not self._steps:
            self._based = self._held.versions
        weight = computed.samples / self._settings.data.batch_size if self._in_rounds else 1.0
        self.vectors.accrue(self._slot, not self._steps, weight)
        if self._pushing.local_lr:
            self.vectors.descend(self._pushing.local_lr)
        self._steps += 1
        self._accrued_samples += computed.samples
        self._work.seconds += computed.seconds

    def _push(self) -> Steps:
        """Send what has accrued to all shards; does not wait, but for a checkpoint that is being made."""
        while self._holding:
            yield from self._wait()
        slot = self._slot
        self.vectors.carry_buffers(slot)
        clock, sent = self._pushes.clock + 1, {}
        for (role, part), payload in zip(self._parts, self._outgoing[slot], strict=True):
            push = pushing.Push(
                slot, part.start, part.stop, self.incarnation, clock, self._based[role], self._steps,
                self._accrued_samples, self._tick, self._partition, (part,)
            )  # fmt: skip
            sent[role] = Send(role, push, payload)
        yield from self._pushes.make(slot, self._steps, self._accrued_samples, sent)
        self._tick += self._attends
        self._work.pushed += sum(part.size for _, part in self._parts)
        self._steps = self._accrued_samples = 0
        self._slot = (slot + 1) % self._settings.slots

    def _drain(self) -> Steps:
        """Push the rest, wait until all is acknowledged and all that was asked for is here, and report it."""
        if self._steps:
            yield from self._push()
        yield from self._sit_out()
        while self._pushes.waiting or self._links.missing:
            yield from self._wait()
        self._in_flight = False  # what was asked for may be old by the time of the next step
        yield self._progress(wants=False)

    # parameters down

    def _fetch(self) -> Steps:
        """The parameters for this step; with prefetch, those that were asked for a step ago, and the next are asked
        for.
        """
        if self._pushing.read_in_place:
            return
        if not self._pushing.prefetch:
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
        if self._pushing.read_in_place:
            return
        self._in_flight = True
        yield from self._request(1 - self._landing, [part for _, part in self._parts], self._next_tick)

    def _request(self, landing: int, parts: list[Range], tick: int = 0) -> Steps:
        for part in parts:
            if part.size:
                self._work.fetched += part.size
                yield self._links.ask(
                    self._holders[part.start, part.stop],
                    pushing.Fetch(landing, part.start, part.stop, tick, self.incarnation),
                )

    def _landed(self) -> Steps:
        while self._links.missing:
            yield from self._wait()
        if self._in_rounds:
            yield from self._same_round()
        self._held.land()

    def _same_round(self) -> Steps:
        """Rounds may have gone on without this replica: have every shard's parameters be those of one round, which this
        replica is in.
        """
        while behind := self._held.behind():
            yield from self._request(
                self._landing, [part for role, part in self._parts if role in behind], self._held.newest
            )
            while self._links.missing:
                yield from self._wait()
        self._tick = self._held.newest

    def _too_old(self, step: int, tick: int) -> bool:
        """Whether the parameters at hand may not serve a step: by the user's cadence, or because the consistency asks
        for newer ones.
        """
        if self._in_rounds:
            return not self._steps
        return step % self._pushing.fetch_every == 0 or self._held.floor < tick - self._bound

    @property
    def _next_tick(self) -> int:
        """The tick of the step after this one."""
        return self._tick + (self._steps + 1 == self._pushing.push_every)

    # taking part

    def _attend(self) -> Steps:
        """Take part, from the furthest tick at which a shard would have this replica begin."""
        for role, _ in self._parts:
            yield self._links.ask(role, attendance.Attend(self.incarnation, -1))
        while any(self._links.asks(role, attendance.Attend) for role, _ in self._parts):
            yield from self._wait()
        self._attending, self._expected = True, False
        if self._bound < math.inf:
            for role, _ in self._parts:
                yield Send(role, attendance.Attend(self.incarnation, self._tick))

    def _sit_out(self) -> Steps:
        """Be waited for by nobody; what was pushed before counts."""
        if self._attending or self._expected:
            self._attending = self._expected = False
            for role, _ in self._parts:
                yield self._links.ask(role, attendance.SitOut())

    # what arrives

    def _wait(self) -> Steps:
        """Wait for the next word, and do what it asks for; every wait of the story is a loop around this."""
        self._take((yield RECEIVE))
        if self._hold is not None and not self._pushes.waiting:
            number, self._hold = self._hold, None
            yield self._progress(wants=False)
            yield Send(roles.COORDINATOR, checkpointing.Held(number))
        if self._welcome is not None:
            yield from self._reunite(self._welcome)
        yield from self._links.seek()

    def _reunite(self, welcome: membership.Welcome) -> Steps:
        """Reach the shards that have come again; begin anew where these have nothing to go on from, or all have gone
        back.
        """
        if welcome.initialise or welcome.generation > self._generation:
            raise AllBack
        self._welcome = None
        for shard in (yield from self._links.reach(welcome)):
            unanswered = self._links.again(shard)
            if shard in self._pushes.acknowledged:
                yield from self._return(shard)
            yield from unanswered

    def _return(self, shard: str) -> Steps:
        """Tell a shard that has come again how far the one before was, and push again what that had not
        acknowledged.
        """
        pushes = self._pushes.owed(shard)
        yield Send(shard, attendance.Return(self.incarnation, self._pushes.acknowledged[shard], self._partition))
        if self._attending:
            first: Any = pushes[0].message if pushes else None
            yield Send(shard, attendance.Attend(self.incarnation, first.tick if first else self._tick))
        elif self._attends and not self._links.asks(shard, attendance.SitOut):
            yield self._links.ask(shard, attendance.SitOut())
        yield from pushes

    def _progress(self, wants: bool) -> Send:
        return Send(roles.COORDINATOR, self._work.report(self._pushes, wants))

    def _take(self, arrival: Arrival) -> None:
        """Note what arrived."""
        event = arrival.event
        kind = type(event)
        if self._links.stale(arrival):
            return
        if kind is pushing.Fetched:
            self._links.answered(arrival.sender, event)  # type: ignore[arg-type]  # a Fetched, by its kind
            self._held.arrive(arrival.sender, event)  # type: ignore[arg-type]  # a Fetched
        elif kind is pushing.Pushed:
            self._pushes.applied(arrival.sender, event)  # type: ignore[arg-type]  # a Pushed
            if self._pushing.read_in_place:
                self._held.applied(arrival.sender, event.version)  # type: ignore[union-attr]  # of one that was applied
        elif isinstance(event, initialising.Initialised | attendance.Excused):
            self._links.answered(arrival.sender, event)
        elif isinstance(event, attendance.Admitted):
            self._links.answered(arrival.sender, event)
            self._tick = max(self._tick, event.tick)
        elif isinstance(event, events.Lost) and arrival.sender != roles.COORDINATOR:
            self._links.lose(arrival.sender, event)
        else:
            self._take_word(arrival)

    def _take_word(self, arrival: Arrival) -> None:
        """Note what the coordinator tells, or the supervisor."""
        match arrival.event:
            case dealing.Deal() as deal:
                self._work.deal(deal.portion)
            case dealing.Drain():
                self._draining = True
            case membership.Finish():
                self._ending = True
                self._wanted_away |= arrival.sender == roles.SUPERVISOR
            case membership.Farewell():
                self._excused = True
            case checkpointing.Hold() as hold:
                self._holding, self._hold = True, hold.number
            case checkpointing.Go():
                self._holding, self._hold = False, None
            case membership.Welcome() as welcome:
                self._welcome = welcome
            case _:
                unwanted(self.role, arrival)
