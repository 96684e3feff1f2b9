"""The story of a Downpour replica: Algorithm 1.1 of the paper.

It differs from the paper's listing in this: gradients are pushed after every `push_every` steps, so that all pushes
have as many steps (the listing's first push has one), and a fetch lands only between steps. With `prefetch` the fetch
for the next step is in flight during this one, and the replica does not wait for pushes. Where the consistency needs
it, a replica tells the shards when it takes part and when it sits out, and pushes and fetches name their tick. In
rounds each gradient of a push of several steps is weighted by its minibatch's share of a full one: so unequal
minibatches add up to their union.

A shard that dies is started again. A replica tells the new one which pushes the last one had acknowledged, and pushes
the others again. In rounds all shards go back to one checkpoint, and a replica begins anew. During a checkpoint it
computes, but pushes nothing.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
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
from distbelief.core.settings import FEWEST_STEPS, SPEED
from distbelief.replica.served_replica import ModelView, ServedReplica, ServerView, end_minibatch
from distbelief.replica.split_compute import apart
from distbelief.replica.work import NextPush, Pushes, WorkQueue, gradient, report_seconds
from distbelief.sharding.layout import Range


# Every wait of the story is a loop around `wait`, which takes one arrival and acts on it. So a replica answers a
# checkpoint, or a new incarnation of a shard, during any wait. `take` only notes an arrival; `_act` yields the effects.
#
# Three invariants. Fetched parameters become the model's only between steps, in a `swap`. A gradient slot is rewritten
# only once all shards have applied its push (`Pushes.busy`). Pushes leave in the order of their clocks, each to all
# shards at once: so one number shows how far a dead shard was, and `owed` sends the rest.
class DownpourTraining:
    """The loop of Algorithm 1.1, and its state since the replica was welcomed, or since all went back."""

    def __init__(self, replica: ServedReplica, server: ServerView) -> None:
        self.server, self.work = server, WorkQueue()
        settings = server.plan.settings
        self._replica, self._links = replica, replica.links
        self._siblings = replica.siblings
        self._models = server.models
        self._stepped = {*range(len(server.models))}
        """Models, of several, with updates since their last fetch."""
        self._mid_minibatch = False
        """True after some of the pushes of a minibatch of several models."""
        self._pushing, self._policy = settings.strategy.pushing, settings.policy
        self._weighs_speed = settings.push_weight == SPEED
        self._local = settings.local is not None
        """True where a push is the change that local steps have made, and no gradient."""
        shards, slots = [role for role, _ in server.parts], server.slots * len(server.models)
        self._pushes_again = self._local and self._policy.leaves_behind and replica.split is None
        """True where a push that is dropped as too late is made again."""
        self._pushes = Pushes(replica.incarnation, shards, slots, replica.siblings.follows, self._pushes_again)
        self._slot, self._next = 0, NextPush()
        self._goal = min(FEWEST_STEPS, self._pushing.push_steps) if self._pushing.paced else self._pushing.push_steps
        """Steps of a push."""
        self._changes: tuple[float, tuple[GroupOption, ...]] = (1.0, ())
        self._based = server.based(0)
        # the tick, the vector that the model computes with, and whether a fetch into the other is in flight
        self._tick = self._landing = 0
        self._in_flight = False
        # orders: to drain an epoch that has no more work; to push nothing during a checkpoint, and its number until it
        # is answered
        self._draining: int | None = None
        self._holding = False
        self._hold: int | None = None
        # orders to give back unbegun work, between two pushes; whether a step is under way
        self._recalled = self._under_way = False
        # the epoch in which shards wait for this replica, and the last in which it sat out: in rounds shards wait for
        # all replicas in every epoch, until each sits out
        self._attending: int | None = None
        self._rested_epoch = -1

    @property
    def clock(self) -> int:
        return self._pushes.clock

    def train(self) -> Steps[None]:
        # The first fetch is of all ranges, frozen ones too, and of tick 0, so it waits for no pushes. At the end the
        # rest is pushed, and all pushes are acknowledged before the replica leaves.
        yield from self._fetch_all(self.server.whole)
        replica, reports = self._replica, report_seconds(self.server.plan.settings.replicas)
        if self._local and replica.incarnation and not self._siblings.follows:
            yield WriteRecord(Note(f"{replica.role} is there again; the state of its local optimizer begins anew"))
        self._stepped.clear()
        step = self._step if len(self._models) == 1 else self._step_in_turn
        attends, takes_turns = self._policy.attended, self._policy.turns
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
                if self._siblings.follows:  # its lead deals it no more work, and no longer waits for it
                    yield Send(replica.superior, membership.Leave(for_good=True))
                elif not replica.stops:
                    yield WriteRecord(Note(f"{replica.role} ends its part here: its script has left the loop"))
                break
            if self.work.seconds >= reports:
                yield self._progress(wants=False)
        yield from self._drain(self._rested_epoch if self._attending is None else self._attending)
        if replica.keeps:
            yield from replica.finish()  # in rounds, partitions agree on the last round that all hold
            yield from self._fetch_all(self.server.moving)

    def _fetch_all(self, parts: Sequence[Range]) -> Steps[None]:
        yield from self.server.fetch(self._landing, parts)
        yield from self._await_parameters(*self._models)
        self._replica.vectors.swap(self._landing)

    def _step(self, batch: Batch) -> Steps[bool]:
        """Make one step, with the push and the fetches that are due; returns whether training continues."""
        # The next step's parameters are requested before this one computes, so that they travel meanwhile; they cannot
        # contain this step's push. Values that a script has written to its parameters reach the shards before the
        # gradient that was computed with them.
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
        if replica.due_script is not None:  # the last minibatch is done, and this one is not pushed yet
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
        yield from self._exchange()
        return True

    def _exchange(self) -> Steps[None]:
        """Push what is accrued, if that is due after this step."""
        if self._next.steps >= self._goal:
            yield from self._push()

    def _step_in_turn(self, batch: Batch) -> Steps[bool]:
        """Step several models in turn until the minibatch ends; returns whether training continues."""
        # A script chooses the next model to step, and its losses may read all models: so each step is pushed at once,
        # and stepped models are fetched before the next gradient. The minibatch is done with its last push, and no
        # checkpoint comes between its pushes (`_mid_minibatch`).
        samples = 0
        while True:
            if self._stepped:
                yield from self._fetch_stepped()
            computed = yield from gradient(self._replica.split, batch, self.wait)
            if not self._mid_minibatch and self._replica.due_script is not None:
                yield from self._replica.save_script()
            if computed is not None and computed.ended:
                yield from self._end_epoch(batch)
                return True
            if computed is not None and computed.written:
                yield from self._replace()
            if computed is None or computed.held:
                if computed is not None or self._mid_minibatch:  # earlier pushes of the minibatch count
                    self._pushes.close(1, samples)
                    self._replica.step += 1
                self.work.spend(computed.seconds if computed else 0.0)
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
        self._replica.vectors.swap(0, [part for model in models for part in model.moving])

    def _end_epoch(self, batch: Batch) -> Steps[None]:
        """End an epoch whose data end before a minibatch."""
        self.work.end(batch.epoch)
        yield Send(roles.COORDINATOR, dealing.StreamEnded(batch.epoch, batch.index))

    # data

    def _next_batch(self) -> Steps[Batch | None]:
        """Return the next minibatch that the coordinator dealt; None when the job is over."""
        # Look at the links before each step, so that a replica holds, leaves or ends within a step. Portions that are
        # given back are reported before later ones begin: the coordinator counts steps in the order of dealing.
        if self._replica.split is not None and self._siblings.follows:
            return (yield from self._next_of_lead())
        yield from self._look()
        drained = False
        while not (self._replica.ending or self._replica.wanted_away):
            if drained and self._replica.due_script is not None:
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
                if self._policy.turns and self._attending is not None and not self._pushes.waiting:
                    yield from self._sit_out(self._attending)
                yield from self.wait()
        return None

    def _save_idle(self) -> Steps[None]:
        """Save the script's state while there is no work; the script ends its minibatch first."""
        # the script may read its model as it ends the minibatch: the model must have that minibatch's update; a split
        # model cannot be read then
        script = self._replica.script
        if script is not None and script.in_step and self._replica.split is None:
            yield from self._fetch_all(self.server.moving)
        if (yield from end_minibatch(script)):
            yield from self._replace()
        yield from self._replica.save_script()

    def _give_back(self) -> None:
        """Give back unbegun work, where that was ordered."""
        # not amid a push of several steps, whose size would depend on the moment of the order
        if self._recalled and not 0 < self._next.steps + self._under_way < self._goal:
            self._recalled = False
            self.work.give_back()

    def _next_of_lead(self) -> Steps[Batch | None]:
        """Return the next minibatch of the lead; None at the end."""
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
        """Add the step's gradient to the next push, and step the local model."""
        clipping = yield from self._clipping()
        if not self._next.steps:  # a push is as stale as its oldest gradient
            self._based = self.server.based(computed.model)
        samples = computed.samples + self._next.held_samples
        if self._local:
            self._replica.vectors.descend(computed.rate * self._local_factor(), clipping)
            self._next.seconds = computed.seconds + (self._next.seconds if self._next.steps else 0.0)
        else:
            yield from self._free_slot(computed.model)
            self._changes = computed.rate, computed.options
            # the shards weight a push of one step as a whole: so a round of one replica keeps its bits
            several = self._policy.rounds and self._goal > 1
            weight = samples / self.server.plan.settings.batch_size if several else 1.0
            self._replica.vectors.accrue(self._slot, not self._next.steps, weight * clipping, computed.model)
            if self._pushing.local_lr:
                self._replica.vectors.descend(self._pushing.local_lr, clipping)
        self._under_way = False
        self._next.steps += 1
        self._next.covered += 1 + self._next.held_steps
        self._next.samples += samples
        self._next.held_steps = self._next.held_samples = 0
        self.work.spend(computed.seconds)

    def _weight(self) -> float:
        """Return the weight of a push in a round; 0 stands for its number of samples."""
        return self._next.samples**2 / max(self._next.seconds, 1e-9) if self._weighs_speed else 0.0

    def _local_factor(self) -> float:
        """Return the factor on the rate of a local step, by the samples of the whole job as far as they are known."""
        # since this replica's fetch, each other replica has computed about as many samples as this one
        plan = self.server.plan
        return plan.local_factor(self.server.held.samples + self._next.samples * plan.settings.replicas)

    def _free_slot(self, model: int) -> Steps[None]:
        """Wait until no shard reads the slot of the next push."""
        while self._pushes.busy[self._slot * len(self._models) + model]:
            yield from self.wait()

    def _replace(self) -> Steps[None]:
        """Send the shards the values that the script has written to its parameters."""
        while self._pushes.waiting:  # shards still read the slot into which the values are written
            yield from self.wait()
        yield from self.server.initial(replaces=True)
        while self._links.missing:
            yield from self.wait()

    def _clipping(self) -> Steps[float]:
        """Return the factor that clips a split replica's gradient: each partition knows a part of its norm."""
        clip = self.server.plan.settings.clip_norm  # the worker of a whole replica clips by itself
        if not clip or self._replica.split is None:
            return 1.0
        norm = yield from self._siblings.whole_norm(self._replica.vectors.norm(), self._wait_for_others)
        return min(1.0, clip / (norm + 1e-6))  # as torch's clip_grad_norm_

    def _wait_for_others(self) -> Steps[None]:
        """Wait for the other partitions; raises `UsageError` where a script has left its loop before this step."""
        drains = self._siblings.follows and self._draining is not None
        left = self._siblings.left or ({self._replica.superior} if drains else ())
        if left:
            raise apart(self._replica.role, min(left))
        yield from self.wait()

    def _hold_over(self, computed: Computed) -> None:
        """Count a minibatch without a step into the next push."""
        self._next.held_steps += 1
        self._next.held_samples += computed.samples
        self.work.spend(computed.seconds)

    def _push(self, model: int = 0) -> Steps[None]:
        """Push the accrued gradient of a model to all shards."""
        pushed = self._models[model]
        self._give_back()
        yield from self._wait_to_push()
        slot, split = self._slot, self._replica.split is not None
        if self._local and not self._pushes.late[0]:
            yield from self._free_slot(model)
            self._replica.vectors.change(slot)
        self._replica.vectors.carry_buffers(slot, model)
        clock, sent = self._pushes.clock + 1, {}
        single = len(self._models) == 1
        steps = self._next.steps if single else int(not self._mid_minibatch)  # a minibatch's first push counts
        for (role, part), payload in zip(pushed.parts, pushed.outgoing[slot], strict=True):
            sent[role] = Send(role, self._message(role, part, clock, steps, self._next.samples), payload)
        covered = (self._next.covered, self._next.samples) if single else (0, 0)  # else at the minibatch's end
        self._mid_minibatch = not single  # a minibatch of several models counts when it ends
        busy = slot * len(self._models) + model
        yield from self._pushes.make(busy, *covered, sent, self._siblings.push(clock) if split else {})
        self._tick += self._policy.attended
        self._stepped.add(model)
        self._next.clear()
        self._slot = (slot + 1) % self.server.slots

    def _wait_to_push(self) -> Steps[None]:
        """Wait for the end of a checkpoint, which may need the script's state, and for the lead of a split replica."""
        # a push waits here, and not before its step, so that replicas compute during a checkpoint; but a gradient is
        # pushed in the turn that computed it: later its staleness would be unknown
        holds = not (self._mid_minibatch or self._policy.turns)
        split = self._replica.split is not None
        while (self._holding and holds) or (split and not self._siblings.may_push(self._pushes.clock + 1)):
            if self._replica.due_script is not None and self._holding:
                yield from self._replica.save_script()
            yield from self.wait()

    def _message(self, role: str, part: Range, clock: int, steps: int, samples: int) -> pushing.Push:
        rate, options = self._changes
        return pushing.Push(
            self._slot,
            part.start,
            part.stop,
            self._replica.incarnation,
            clock,
            self._based[role],
            steps,
            samples,
            self._tick,
            self._replica.partition,
            self._replica.vectors.covered(self._slot, part),
            rate=rate,
            options=options,
            weight=self._weight(),
        )

    def _stay_in_turn(self, epoch: int) -> Steps[None]:
        """Take part in turns, but not during a checkpoint, when others would wait for a push that does not come."""
        while self._holding or self._attending is None:
            if not self._holding:
                yield from self._attend(epoch)
                continue
            if self._attending is not None:
                yield from self._sit_out(epoch)
            yield from self.wait()

    @property
    def _discards(self) -> bool:
        """True where the rest of the job counts as not computed: it would make a smaller round than any other."""
        ends = self._replica.ending and not self._replica.wanted_away
        return bool(self._next.steps) and self._policy.rounds and ends

    def _flush(self) -> Steps[None]:
        """Push the rest of an epoch."""
        if self._next.steps:
            yield from self._push()

    def _drain(self, epoch: int) -> Steps[None]:
        """Push the rest of an epoch, wait for all acknowledgements and parameters, and report."""
        if self._discards:
            self._next = NextPush()
            yield from self._replica.finish()
        else:
            yield from self._flush()
            yield from self._siblings.tell(dealing.Drain(epoch), awaited=True)
        yield from self._sit_out(epoch)
        while self._pushes.waiting or self._links.missing or self._siblings.busy:
            yield from self.wait()
        self._pushes.repeat_late()
        self._in_flight = False  # fetched parameters may be old at the next step
        self._pushes.pass_over(self._next.held_steps, self._next.held_samples)
        self._next.held_steps = self._next.held_samples = 0
        yield self._progress(wants=False)

    # parameters down

    def _fetch(self) -> Steps[None]:
        """Swap in this step's parameters; with prefetch the fetch began a step ago."""
        landing = 1 - self._landing if self._pushing.prefetch else self._landing
        if not self._in_flight:
            yield from self.server.fetch(landing, self.server.moving, self._tick)
        yield from self._await_parameters(*self._models)
        if self._pushes_again:
            yield from self._push_late()
        self._landing, self._in_flight = landing, False
        self._replica.vectors.swap(landing)

    def _push_late(self) -> Steps[None]:
        """Push a change that came too late for its round again, with the next ones, and fetch the result."""
        while True:
            while self._pushes.waiting:  # with a standby, parameters may come before the acknowledgement
                yield from self.wait()
            self._next.covered, self._next.samples = self._pushes.late
            self._next.steps = self._next.covered
            if not self._next.steps:
                return
            yield from self._push()
            yield from self.server.fetch(0, self.server.moving, self._tick)
            yield from self._await_parameters(*self._models)

    def _ask_ahead(self) -> Steps[None]:
        """Fetch the next step's parameters into the other vector while this step computes."""
        self._in_flight = True
        yield from self.server.fetch(1 - self._landing, self.server.moving, self._next_tick)

    def _await_parameters(self, *models: ModelView) -> Steps[None]:
        while self._links.missing:  # as `wait`, without a generator for each of many arrivals
            self.take((yield RECEIVE))
            if self._must_act():
                yield from self._act()
        for model in models:
            if self._policy.rounds:
                yield from self._same_round(model)
            model.held.land()

    def _same_round(self, model: ModelView) -> Steps[None]:
        """Fetch until all shards' parameters are of one round, and take part in that."""
        # With backup workers or a quorum, rounds continue without this replica, so one shard may answer with a later
        # round than another. A gradient across two rounds would belong to neither, and be late again: so shards that
        # are behind are fetched from again, until all have answered with the newest round, at every partition.
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
        """Return whether a step needs newer parameters, by the user's cadence or by the bound on staleness."""
        # without the second condition the bound would be off by up to `fetch_every`: fresh parameters may be too old
        # some steps later
        if self._policy.rounds or self._local:
            return not self._next.steps
        return step % self._pushing.fetch_every == 0 or self.server.held.floor < tick - self._policy.bound

    @property
    def _next_tick(self) -> int:
        return self._tick + (self._next.steps + 1 == self._goal)

    # membership

    def _attend(self, epoch: int) -> Steps[None]:
        """Take part, from the highest tick that a shard proposes."""
        # Shards are at different ticks: each proposes one, and holds its floor meanwhile. Where ticks bound staleness,
        # all then get the same tick: a shard with a lower one would make all replicas wait for pushes that never come.
        before = self._tick
        for role, _ in self.server.parts:
            yield self._links.ask(role, attendance.Attend(self._replica.incarnation, -1, epoch))
        while any(self._links.asks(role, attendance.Attend) for role, _ in self.server.parts):
            yield from self.wait()
        self._attending = epoch
        if self._tick > before:  # other replicas may have stepped the models since the last fetch
            self._stepped |= {*range(len(self._models))}
        if self._policy.bound < math.inf:
            for role, _ in self.server.parts:
                yield Send(role, attendance.Attend(self._replica.incarnation, self._tick))

    def _sit_out(self, epoch: int) -> Steps[None]:
        """Sit out: no shard waits for this replica any more, and its pushes count."""
        if self._attending is not None or (self._policy.rounds and self._rested_epoch < epoch):
            self._attending, self._rested_epoch = None, epoch
            for role, _ in self.server.parts:
                yield self._links.ask(role, attendance.SitOut(self._replica.incarnation, epoch))

    # arrivals

    def wait(self) -> Steps[None]:
        self.take((yield RECEIVE))
        if self._must_act():
            yield from self._act()

    def _look(self) -> Steps[None]:
        """Take what has arrived, and act on it."""
        while (arrival := (yield GLANCE)) is not None:
            self.take(arrival)
            if self._must_act():
                yield from self._act()

    def _must_act(self) -> bool:
        """Return whether the last arrival may need effects, which is rare."""
        replica = self._replica
        return (
            replica.split is not None or self._hold is not None or replica.welcome is not None or bool(self._links.lost)
        )

    def _act(self) -> Steps[None]:
        if self._replica.split is not None:  # at each arrival, which is to cost a whole replica nothing
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
        """Answer a checkpoint, once no push is on its way."""
        # progress first: the checkpoint's position counts all applied pushes
        if self._policy.turns and (self._under_way or self._next.steps):
            return []
        if self._hold is not None and not self._pushes.waiting and not self._mid_minibatch:
            number, self._hold = self._hold, None
            return [self._progress(wants=False), Send(roles.COORDINATOR, checkpointing.Held(number))]
        return []

    def owed(self, shard: str) -> Steps[None]:
        # `Return` comes first: without the number of the next push the ledger would refuse them; `Attend` sets the tick
        # from which the shard waits for this replica
        if shard not in self._pushes.acknowledged:
            return
        pushes, incarnation = self._pushes.owed(shard), self._replica.incarnation
        yield Send(shard, attendance.Return(incarnation, self._pushes.acknowledged[shard], self._replica.partition))
        if self._attending is not None:
            first: Any = pushes[0].message if pushes else None
            yield Send(shard, attendance.Attend(incarnation, first.tick if first else self._tick, self._attending))
        elif self._policy.attended and not self._links.asks(shard, attendance.SitOut):
            yield self._links.ask(shard, attendance.SitOut(incarnation, self._rested_epoch))
        yield from pushes

    def waits(self) -> str:
        if self._replica.split is not None and (crosses := self._replica.split.waits()):
            return crosses
        if self._holding and self._next.steps >= self._goal:
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
                self._replica.vectors.free(free // len(self._models))
        elif isinstance(event, initialising.Initialised | attendance.Excused):
            self._links.answered(arrival.sender, event)
        elif isinstance(event, attendance.Admitted):
            if self._links.answered(arrival.sender, event):
                self._tick = max(self._tick, event.tick)
        else:
            self._take_order(arrival)

    def _take_order(self, arrival: Arrival) -> None:
        """Note an order of the coordinator, or a message of another partition."""
        match arrival.event:
            case partitioning.PartPushed() as part:
                self._pushes.applied(arrival.sender, self._replica.incarnation, part.clock, part.dropped)
            case dealing.Progress() as progress:
                self.work.add(progress)
                if progress.wants:
                    self._siblings.done(arrival.sender)
            case dealing.Deal() as deal:
                self.work.deal(deal.portion)
                self._goal = deal.steps or self._goal
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


class HogwildTraining(DownpourTraining):
    """Hogwild's loop (Niu et al. 2011, section 2): the worker steps the shard's memory itself, without a lock."""

    def _fetch_all(self, parts: Sequence[Range]) -> Steps[None]:
        self._replica.vectors.swap(0)  # the model computes on the shard's memory
        yield from ()

    def _step(self, batch: Batch) -> Steps[bool]:
        while self._holding:  # not even a forward pass begins, as it writes buffers
            yield from self.wait()
        replica = self._replica
        computed: Computed = yield Compute(batch)
        if computed.loss is not None:
            replica.report(computed.loss, batch, replica.step)
        yield Update(computed.samples)
        replica.step += 1
        self._pushes.count_applied(computed.samples)
        self.work.spend(computed.seconds)
        return True

    def waits(self) -> str:
        return "for a checkpoint to be made" if self._holding else super().waits()
