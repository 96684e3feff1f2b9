"""The story of a Downpour replica: Algorithm 1.1 of the paper.

Beside the paper's listing: gradients are pushed after every `push_every` steps, so that each push holds as many (the
listing pushes one at step 0), and a fetch lands only between steps. With `prefetch` the fetch for the next step is in
flight while this one computes, and pushes are not waited for. Where the consistency needs it, a replica tells the
shards when it takes part and when it sits out, and pushes and fetches name their tick. In rounds each gradient of a
push of several steps is weighted by its minibatch's share of a full one: so unequal minibatches add up to their union.

A shard that dies comes again. A replica tells it how far the one before had acknowledged, and pushes again what that
had not. In rounds all shards go back to one checkpoint, and a replica begins anew. While a checkpoint is made it
computes, but pushes nothing.
"""

from __future__ import annotations

import math
from typing import Any

from distbelief.core import roles
from distbelief.core.conversations import (
    attendance,
    checkpointing,
    dealing,
    initialising,
    membership,
    partitioning,
    pushing,
)
from distbelief.core.effects import GLANCE, RECEIVE, Arrival, Batch, Compute, Computed, Send, Steps, Update, WriteRecord
from distbelief.core.optimizer import GroupOption
from distbelief.core.records import Note
from distbelief.core.settings import Settings
from distbelief.replica.served_replica import ModelView, ServedReplica, ServerView, end_minibatch
from distbelief.replica.split_compute import apart
from distbelief.replica.vectors import Vectors
from distbelief.replica.work import Pushes, WorkQueue, gradient, report_seconds


class DownpourReplica(ServedReplica):
    """One replica."""

    def begin_training(self, server: ServerView) -> DownpourTraining:
        return DownpourTraining(self, server)


# Every wait of the story is a loop around `wait`, which takes one arrival and then does what it asks for. So a replica
# answers a checkpoint, or a shard that has come again, whatever it is waiting for. `take` only notes; what needs
# effects is done by `_act`.
#
# Three invariants. Fetched parameters become the model's between steps only, in a `swap`. A gradient slot is rewritten
# only once all shards have applied the push in it (`Pushes.busy`). Pushes leave in the order of their clocks, each to
# all shards at once: so one number says how far a dead shard was, and `owed` sends the rest.
class DownpourTraining:
    """The loop of Algorithm 1.1, and its state since the replica was welcomed, or since all went back.

    Args:
        replica: that trains.
        server: the shards, as it sees them.
    """

    def __init__(self, replica: ServedReplica, server: ServerView) -> None:
        self.server, self.work = server, WorkQueue()
        settings = server.plan.settings
        self._replica, self._links = replica, replica.links
        self._siblings = replica.siblings
        self._models = server.models
        self._stepped = {*range(len(server.models))}
        """Models, of several, that were stepped since their parameters were fetched."""
        self._mid_minibatch = False
        """True while a minibatch of several models has made some of its pushes and not all."""
        self._pushing, self._bound = settings.strategy.pushing, settings.policy.bound
        shards, slots = [role for role, _ in server.parts], server.slots * len(server.models)
        self._pushes = Pushes(replica.incarnation, shards, slots, reports=replica.siblings.follows)
        # what accrues for the next push: in which slot, how much of it, and from which parameters on
        self._slot = self._steps = self._accrued_samples = 0
        # minibatches that it covers, and those before them without a step of their own
        self._covered, self._held_steps, self._held_samples = 0, 0, 0
        self._changes: tuple[float, tuple[GroupOption, ...]] = (1.0, ())
        self._based = server.based(0)
        # where it stands: its tick, which vector it computes on, whether the other is asked for
        self._tick = self._landing = 0
        self._in_flight = False
        # what it was told: that there is nothing of an epoch, and to report what it has; to push nothing, for a
        # checkpoint; and the number of that, until it is answered
        self._draining: int | None = None
        self._holding = False
        self._hold: int | None = None
        # whether it is to give back what it has not begun, once no push is half accrued; whether it computes
        self._recalled = self._under_way = False
        # the epoch in which shards wait for it, and the last of which it has said that it has no more: in rounds they
        # wait for all, in every epoch, until they say so
        self._attending: int | None = None
        self._rested_epoch = -1

    # properties and no attributes: CPython finds those of an object with 30 or more by a slower way

    @property
    def _vectors(self) -> Vectors:
        return self._replica.vectors

    @property
    def _settings(self) -> Settings:
        return self.server.plan.settings

    @property
    def _attends(self) -> bool:
        return self._settings.policy.attended

    @property
    def _in_rounds(self) -> bool:
        return self._settings.policy.rounds

    @property
    def _takes_turns(self) -> bool:
        return self._settings.policy.turns

    @property
    def clock(self) -> int:
        return self._pushes.clock

    def train(self) -> Steps[None]:
        """Train from the server's parameters to the end of the work."""
        # The first fetch is of all ranges, frozen ones too, and of tick 0, so it waits for nobody's pushes. At the end
        # what has accrued is pushed, and all of it acknowledged before the replica leaves.
        yield from self._first_parameters()
        self._vectors.swap(0)
        replica, reports = self._replica, report_seconds(self._settings.replicas)
        self._stepped.clear()
        step = self._step if len(self._models) == 1 else self._step_in_turn
        attends, takes_turns = self._attends, self._takes_turns
        while (batch := (yield from self._next_batch())) is not None:
            if takes_turns:
                yield from self._stay_in_turn(batch.epoch)
            elif attends and self._attending is None:
                yield from self._attend(batch.epoch)
            self._under_way = True
            goes_on = yield from step(batch)
            self._under_way = False
            if not goes_on:
                replica.left = True
                if self._siblings.follows:  # its lead is to deal it nothing more, and to wait for it nowhere
                    yield Send(replica.superior, membership.Leave(for_good=True))
                elif not replica.stops:
                    yield WriteRecord(Note(f"{replica.role} ends its part here: its script has left the loop"))
                break
            if self.work.seconds >= reports:
                yield self._progress(wants=False)
        yield from self._drain(self._rested_epoch if self._attending is None else self._attending)
        if replica.keeps:
            yield from replica.finish()  # in rounds, partitions agree on the one that they hold at the end
            yield from self._fetch_all()

    def _first_parameters(self) -> Steps[None]:
        yield from self.server.fetch(0, self.server.whole)
        yield from self._await_parameters(*self._models)

    def _fetch_all(self) -> Steps[None]:
        yield from self.server.fetch(self._landing, self.server.moving)
        yield from self._await_parameters(*self._models)
        self._vectors.swap(self._landing)

    def _step(self, batch: Batch) -> Steps[bool]:
        """Make one step, with the push and the fetches that are due; returns whether there is to be another."""
        # The next step's parameters are requested before this one computes, so that they travel meanwhile; they cannot
        # contain this step's push. What a script has written to its parameters reaches the shards before the gradient
        # computed with it.
        replica = self._replica
        if self._in_flight or self._too_old(replica.step, self._tick):
            yield from self._fetch()
        if self._pushing.prefetch and self._too_old(replica.step + 1, self._next_tick):
            yield from self._ask_ahead()
        computed = yield from gradient(replica.split, batch, self.wait)
        if computed is None:
            return False
        if computed.ended:
            yield from self._end_epoch(batch)
            return True
        if replica.asked is not None:  # its script has done with the minibatch before, and this one is not pushed
            yield from replica.save_script()
        if computed.loss is not None:
            replica.report(computed.loss, batch, replica.step)
        if computed.written:
            yield from self._replace()
        replica.step += 1
        if computed.held:
            self._hold_over(computed)
            return True
        yield from self._accrue(computed)
        if self._steps == self._pushing.push_every:
            yield from self._push()
        return True

    def _step_in_turn(self, batch: Batch) -> Steps[bool]:
        """Step several models in turn until the minibatch is over; returns whether there is to be another."""
        # A script chooses which model to step next, and its losses may read all of them: so each step is pushed at
        # once, and stepped models are fetched before the next gradient. The minibatch is done with the last of its
        # pushes, and no checkpoint comes between them (`_mid_minibatch`).
        samples = 0
        while True:
            if self._stepped:
                yield from self._fetch_stepped()
            computed = yield from gradient(self._replica.split, batch, self.wait)
            if not self._mid_minibatch and self._replica.asked is not None:
                yield from self._replica.save_script()
            if computed is not None and computed.ended:
                yield from self._end_epoch(batch)
                return True
            if computed is not None and computed.written:
                yield from self._replace()
            if computed is None or computed.held:
                if computed is not None or self._mid_minibatch:  # what was pushed in a minibatch that is left is done
                    self._pushes.close(1, samples)
                    self._replica.step += 1
                self.work.seconds += computed.seconds if computed else 0.0
                self._mid_minibatch = False
                yield from self._report_held()
                return computed is not None
            samples = computed.samples
            yield from self._accrue(computed)
            yield from self._push(computed.model)

    def _fetch_stepped(self) -> Steps[None]:
        models = [self._models[number] for number in sorted(self._stepped)]
        for model in models:
            yield from self.server.fetch(0, model.moving, self._tick)
        yield from self._await_parameters(*models)
        self._stepped.clear()
        self._vectors.swap(0, [part for model in models for part in model.moving])

    def _end_epoch(self, batch: Batch) -> Steps[None]:
        """End an epoch before a minibatch that its data do not have."""
        self.work.end(batch.epoch)
        yield Send(roles.COORDINATOR, dealing.StreamEnded(batch.epoch, batch.index))

    # data

    def _next_batch(self) -> Steps[Batch | None]:
        """Return the next minibatch that the coordinator dealt; None when the job is over."""
        # Look at the links before each step, so that a replica holds, leaves or ends within a step. Portions that are
        # given back are reported before anything dealt behind them is begun: steps count in the order in which they
        # were dealt.
        if self._replica.split is not None and self._siblings.follows:
            return (yield from self._next_of_lead())
        yield from self._look()
        drained = False
        while not (self._replica.ending or self._replica.wanted_away):
            if drained and self._replica.asked is not None:
                yield from self._save_idle()
            self._give_back()
            wants = self.work.runs_out and self._draining is None
            if wants or self.work.returns or self._replica.start is not None:
                yield self._progress(wants)
            if (batch := self.work.next()) is not None:
                if self._replica.split is not None:
                    yield from self._siblings.deal(batch)
                return batch
            if self._draining is not None:
                epoch, self._draining = self._draining, None
                yield from self._drain(epoch)
                drained = True
            else:
                if self._takes_turns and self._attending is not None and not self._pushes.waiting:
                    yield from self._sit_out(self._attending)
                yield from self.wait()
        return None

    def _save_idle(self) -> Steps[None]:
        """Save what the script keeps, where there is nothing to do; the script ends its minibatch first."""
        # at that point the script may read the model, which must be as the minibatch's own push has left it
        script = self._replica.script
        if script is not None and script.in_step and self._replica.split is None:  # a partition's model rests meanwhile
            yield from self._fetch_all()
        if (yield from end_minibatch(script)):
            yield from self._replace()
        yield from self._replica.save_script()

    def _give_back(self) -> None:
        """Give back what is not begun, where that was asked for."""
        # not amid a push of several steps: its size would depend on when the order came
        if self._recalled and not 0 < self._steps + self._under_way < self._pushing.push_every:
            self._recalled = False
            self.work.give_back()

    def _next_of_lead(self) -> Steps[Batch | None]:
        """Return the next minibatch that the lead computes; None when it is done."""
        while (batch := self.work.next()) is None and not self._replica.ending:
            if self._draining is not None:
                epoch, self._draining = self._draining, None
                yield from self._drain(epoch)
                yield self._progress(wants=True)
            else:
                yield from self.wait()
        return batch

    # gradients up

    def _accrue(self, computed: Computed) -> Steps[None]:
        """Add the step's gradient to what the next push will hold, and step the local model."""
        clipping = yield from self._clipping()
        while self._pushes.busy[self._slot * len(self._models) + computed.model]:
            yield from self.wait()
        if not self._steps:  # a push is as stale as its oldest gradient
            self._based = self.server.based(computed.model)
        samples = computed.samples + self._held_samples
        self._changes = computed.rate, computed.options
        # a push of one step is weighed by the shards, as a whole: so a round of one leaves its bits alone
        several = self._in_rounds and self._pushing.push_every > 1
        weight = samples / self._settings.batch_size if several else 1.0
        self._vectors.accrue(self._slot, not self._steps, weight * clipping, computed.model)
        if self._pushing.local_lr:
            self._vectors.descend(self._pushing.local_lr * clipping)
        self._under_way = False
        self._steps += 1
        self._covered += 1 + self._held_steps
        self._accrued_samples += samples
        self._held_steps = self._held_samples = 0
        self.work.seconds += computed.seconds

    def _replace(self) -> Steps[None]:
        """Have the shards hold what the script has written to its parameters."""
        while self._pushes.waiting:  # the shards read the slot in which the values are sent
            yield from self.wait()
        yield from self.server.initial(replaces=True)
        while self._links.missing:
            yield from self.wait()

    def _clipping(self) -> Steps[float]:
        """Return the factor by which a split replica's gradient is clipped: each partition knows a part of its norm."""
        clip = self._settings.clip_norm  # a replica that is whole computes its gradient clipped
        if not clip or self._replica.split is None:
            return 1.0
        norm = yield from self._siblings.whole_norm(self._vectors.norm(), self._wait_for_others)
        return min(1.0, clip / (norm + 1e-6))  # as torch's clip_grad_norm_

    def _wait_for_others(self) -> Steps[None]:
        """Wait for what the other partitions make of the same step.

        Raises:
            UsageError: one has left its loop before that.
        """
        drains = self._siblings.follows and self._draining is not None
        left = self._siblings.left or ({self._replica.superior} if drains else ())
        if left:
            raise apart(self._replica.role, min(left))
        yield from self.wait()

    def _hold_over(self, computed: Computed) -> None:
        """Count a minibatch without a step of its own into the next push that is made."""
        self._held_steps += 1
        self._held_samples += computed.samples
        self.work.seconds += computed.seconds

    def _push(self, model: int = 0) -> Steps[None]:
        """Send what has accrued of a model to all shards."""
        # It waits for no answer, only while a checkpoint is being made (when the script may have to be saved), and for
        # the lead where another partition leads. It waits here and not before the step, so that replicas compute while
        # a checkpoint is made.
        pushed = self._models[model]
        self._give_back()
        # what was computed in a turn is pushed in it: nobody would know its age else
        holds = not (self._mid_minibatch or self._takes_turns)
        split = self._replica.split is not None
        while (self._holding and holds) or (split and not self._siblings.may_push(self._pushes.clock + 1)):
            if self._replica.asked is not None and self._holding:
                yield from self._replica.save_script()
            yield from self.wait()
        slot = self._slot
        self._vectors.carry_buffers(slot, model)
        clock, sent = self._pushes.clock + 1, {}
        single = len(self._models) == 1
        steps = self._steps if single else int(not self._mid_minibatch)  # the first push counts as the minibatch's step
        rate, options = self._changes
        for (role, part), payload in zip(pushed.parts, pushed.outgoing[slot], strict=True):
            push = pushing.Push(
                slot,
                part.start,
                part.stop,
                self._replica.incarnation,
                clock,
                self._based[role],
                steps,
                self._accrued_samples,
                self._tick,
                self._replica.partition,
                self._vectors.covered(slot, part),
                rate=rate,
                options=options,
            )
            sent[role] = Send(role, push, payload)
        covered = (self._covered, self._accrued_samples) if single else (0, 0)  # those are done with the minibatch
        self._mid_minibatch = not single
        busy = slot * len(self._models) + model
        yield from self._pushes.make(busy, *covered, sent, self._siblings.push(clock) if split else {})
        self._tick += self._attends
        self._stepped.add(model)
        self._steps = self._covered = self._accrued_samples = 0
        self._slot = (slot + 1) % self.server.slots

    def _stay_in_turn(self, epoch: int) -> Steps[None]:
        """Take turns, but while a checkpoint is being made: nobody is to wait then for a push that does not come."""
        while self._holding or self._attending is None:
            if not self._holding:
                yield from self._attend(epoch)
                continue
            if self._attending is not None:
                yield from self._sit_out(epoch)
            yield from self.wait()

    def _drain(self, epoch: int) -> Steps[None]:
        """Push the rest of an epoch, wait until all is acknowledged and has arrived, and report it."""
        # What is left of a push when a job in rounds ends would make a smaller round than any other: it counts as not
        # computed.
        if self._steps and self._in_rounds and self._replica.ending and not self._replica.wanted_away:
            self._steps = self._covered = self._accrued_samples = self._held_steps = self._held_samples = 0
            yield from self._replica.finish()
        else:
            if self._steps:
                yield from self._push()
            yield from self._siblings.tell(dealing.Drain(epoch), awaited=True)
        yield from self._sit_out(epoch)
        while self._pushes.waiting or self._links.missing or self._siblings.busy:
            yield from self.wait()
        self._in_flight = False  # what was asked for may be old by the time of the next step
        self._pushes.pass_over(self._held_steps, self._held_samples)
        self._held_steps = self._held_samples = 0
        yield self._progress(wants=False)

    # parameters down

    def _fetch(self) -> Steps[None]:
        """Swap in this step's parameters; with prefetch they were asked for a step ago, else they are now."""
        if not self._pushing.prefetch:
            yield from self.server.fetch(0, self.server.moving, self._tick)
            yield from self._await_parameters(*self._models)
            self._vectors.swap(0)
            return
        if not self._in_flight:
            yield from self.server.fetch(1 - self._landing, self.server.moving, self._tick)
        yield from self._await_parameters(*self._models)
        self._landing, self._in_flight = 1 - self._landing, False
        self._vectors.swap(self._landing)

    def _ask_ahead(self) -> Steps[None]:
        """Ask for the next step's parameters; they land in the other vector while this step computes."""
        self._in_flight = True
        yield from self.server.fetch(1 - self._landing, self.server.moving, self._next_tick)

    def _await_parameters(self, *models: ModelView) -> Steps[None]:
        while self._links.missing:  # `wait`, without a generator for each of the many arrivals
            self.take((yield RECEIVE))
            if self._must_act():
                yield from self._act()
        for model in models:
            if self._in_rounds:
                yield from self._same_round(model)
            model.held.land()

    def _same_round(self, model: ModelView) -> Steps[None]:
        """Have every shard's parameters be those of one round, and take part in that."""
        # With backup workers or a quorum, rounds go on without this replica, so one shard may answer with a later round
        # than another. A gradient computed across two rounds would belong to neither, and be late again: shards that
        # are behind are asked once more, until all have answered of the newest round, at every partition.
        held = model.held
        newest, settled = held.newest, False
        while not settled:
            while behind := held.behind(newest):
                yield from self.server.fetch(
                    self._landing, [part for role, part in model.parts if role in behind], newest
                )
                while self._links.missing:
                    yield from self.wait()
                newest = max(newest, held.newest)
            newest, settled = yield from self._siblings.agree(newest, self.wait)
        self._tick = newest

    def _too_old(self, step: int, tick: int) -> bool:
        """Return whether a step needs newer parameters: by the user's cadence, or since the consistency asks for it."""
        # without the second condition the bound would be off by up to `fetch_every`: parameters that were fresh enough
        # when they came may not be some steps later
        if self._in_rounds:
            return not self._steps
        return step % self._pushing.fetch_every == 0 or self.server.held.floor < tick - self._bound

    @property
    def _next_tick(self) -> int:
        return self._tick + (self._steps + 1 == self._pushing.push_every)

    # taking part

    def _attend(self, epoch: int) -> Steps[None]:
        """Take part, from the furthest tick at which a shard would have this replica begin."""
        # Shards are at different ticks: each is asked first, and holds its floor meanwhile. Where ticks bound anything,
        # all are then told the same tick: a shard that had a lower one would make everybody, this replica too, wait for
        # pushes of ticks that it never makes.
        before = self._tick
        for role, _ in self.server.parts:
            yield self._links.ask(role, attendance.Attend(self._replica.incarnation, -1, epoch))
        while any(self._links.asks(role, attendance.Attend) for role, _ in self.server.parts):
            yield from self.wait()
        self._attending = epoch
        if self._tick > before:  # others have stepped the models meanwhile
            self._stepped |= {*range(len(self._models))}
        if self._bound < math.inf:
            for role, _ in self.server.parts:
                yield Send(role, attendance.Attend(self._replica.incarnation, self._tick))

    def _sit_out(self, epoch: int) -> Steps[None]:
        """Have no shard wait for this replica; what it has pushed counts."""
        if self._attending is not None or (self._in_rounds and self._rested_epoch < epoch):
            self._attending, self._rested_epoch = None, epoch
            for role, _ in self.server.parts:
                yield self._links.ask(role, attendance.SitOut(self._replica.incarnation, epoch))

    # what arrives

    def wait(self) -> Steps[None]:
        self.take((yield RECEIVE))
        if self._must_act():
            yield from self._act()

    def _look(self) -> Steps[None]:
        """Take what has arrived, and do what it asks for."""
        while (arrival := (yield GLANCE)) is not None:
            self.take(arrival)
            if self._must_act():
                yield from self._act()

    def _must_act(self) -> bool:
        """Return whether a message that was taken may ask for more than to be noted, which it seldom does."""
        replica = self._replica
        return (
            replica.split is not None or self._hold is not None or replica.welcome is not None or bool(self._links.lost)
        )

    def _act(self) -> Steps[None]:
        if self._replica.split is not None:
            yield from self._siblings.relayed()
            for done in self._pushes.finished():
                yield Send(self._replica.superior, partitioning.PartPushed(*done))
        if self._hold is not None:
            yield from self._report_held()
        if self._replica.welcome is not None:
            yield from self._replica.reunite(self, self._replica.welcome)
        if self._links.lost:
            yield from self._links.seek()

    def _report_held(self) -> list[Send]:
        """Answer a checkpoint, once nothing is on its way to the shards."""
        # progress first: the checkpoint's position counts all that the shards have applied
        if self._takes_turns and (self._under_way or self._steps):
            return []
        if self._hold is not None and not self._pushes.waiting and not self._mid_minibatch:
            number, self._hold = self._hold, None
            return [self._progress(wants=False), Send(roles.COORDINATOR, checkpointing.Held(number))]
        return []

    def owed(self, shard: str) -> Steps[None]:
        """Tell a shard that has come again how far the one before was, and push again what that still owes."""
        # in this order: `Return` tells the ledger which push is next, without which it would refuse them; `Attend`
        # tells from which tick on to wait for this replica
        if shard not in self._pushes.acknowledged:
            return
        pushes, incarnation = self._pushes.owed(shard), self._replica.incarnation
        yield Send(shard, attendance.Return(incarnation, self._pushes.acknowledged[shard], self._replica.partition))
        if self._attending is not None:
            first: Any = pushes[0].message if pushes else None
            yield Send(shard, attendance.Attend(incarnation, first.tick if first else self._tick, self._attending))
        elif self._attends and not self._links.asks(shard, attendance.SitOut):
            yield self._links.ask(shard, attendance.SitOut(incarnation, self._rested_epoch))
        yield from pushes

    def waits(self) -> str:
        if self._replica.split is not None and (crosses := self._replica.split.waits()):
            return crosses
        if self._holding and self._steps == self._pushing.push_every:
            return "for a checkpoint to be made"
        if answers := self._links.waits_for_answers():
            return answers
        if self._pushes.waiting:
            return "for the shards to apply its push"
        return f"for work from {self._replica.superior if self._siblings.follows else 'the coordinator'}"

    def _progress(self, wants: bool) -> Send:
        start, self._replica.start = self._replica.start, None
        return Send(self._replica.superior, self.work.report(self._pushes, wants, start))

    def take(self, arrival: Arrival) -> None:
        event = arrival.event
        kind = type(event)
        if self._links.stale(arrival):
            return
        if kind is pushing.Fetched:
            if self._links.answered(arrival.sender, event):  # type: ignore[arg-type]  # a Fetched, by its kind
                self.server.arrive(arrival.sender, event)  # type: ignore[arg-type]  # a Fetched
        elif kind is pushing.Pushed:
            free = self._pushes.applied(arrival.sender, event.incarnation, event.clock, event.dropped)  # type: ignore[union-attr]  # a Pushed
            if free is not None:
                self._vectors.free(free // len(self._models))
        elif isinstance(event, initialising.Initialised | attendance.Excused):
            self._links.answered(arrival.sender, event)
        elif isinstance(event, attendance.Admitted):
            if self._links.answered(arrival.sender, event):
                self._tick = max(self._tick, event.tick)
        else:
            self._take_order(arrival)

    def _take_order(self, arrival: Arrival) -> None:
        """Note what the coordinator orders, or another partition tells."""
        match arrival.event:
            case partitioning.PartPushed() as part:
                self._pushes.applied(arrival.sender, self._replica.incarnation, part.clock, part.dropped)
            case dealing.Progress() as progress:
                self.work.add(progress)
                if progress.wants:
                    self._siblings.done(arrival.sender)
            case dealing.Deal() as deal:
                self.work.deal(deal.portion)
            case dealing.Drain(epoch=epoch):
                self._draining = epoch
            case dealing.Recall():
                self._recalled = True
                self._give_back()
            case checkpointing.Hold() as hold:
                self._holding, self._hold = True, hold.number
            case checkpointing.Go():
                self._holding, self._hold = False, None
            case _:
                self._replica.take(arrival)


class HogwildReplica(ServedReplica):
    """One replica."""

    def begin_training(self, server: ServerView) -> DownpourTraining:
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
        return "for a checkpoint to be made" if self._holding else super().waits()
