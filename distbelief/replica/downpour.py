"""The story of a Downpour replica: Algorithm 1.1 of the paper.

Beside the paper's listing: gradients are pushed after every `push_every` steps, so that each push holds as many (the
listing pushes one at step 0), and a fetch lands only between steps. With `prefetch` the fetch for the next step is in
flight while this one computes, and pushes are not waited for. Where the consistency needs it, a replica tells the
shards when it takes part and when it sits out, and pushes and fetches name their tick; in rounds each gradient of a
push of several is weighted by its minibatch's share of a full one, so that unequal minibatches add up to their union.

A shard that dies comes again: a replica tells it how far the one before had acknowledged, and sends it again what that
had not; in rounds, where all shards go back to one checkpoint, a replica begins anew. While a checkpoint is made it
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
from distbelief.core.effects import GLANCE, RECEIVE, Arrival, Batch, Computed, Send, WriteRecord
from distbelief.core.optimizer import GroupOption, Optimizer
from distbelief.core.records import Note
from distbelief.core.settings import Settings
from distbelief.replica.pushes import Pushes
from distbelief.replica.script import KeptScript, end_minibatch
from distbelief.replica.served_replica import ModelView, ServedReplica, ServerView
from distbelief.replica.split_compute import SplitCompute, apart, gradient
from distbelief.replica.steps import Steps
from distbelief.replica.vectors import Vectors
from distbelief.replica.work import WorkQueue, report_seconds


class DownpourReplica(ServedReplica):
    """One replica.

    Args:
        role: its name.
        vectors: of its model.
        samples: in its training set.
        batch_size: that the user's own loop names; 0 where the job's is taken.
        keeps: whether the model is used after the story: then it ends with the server's parameters.
        incarnation: of this replica; a restarted one has a higher.
        split: how it computes together with the other partitions, where the replica is split.
        epochs: that the user's own loop names; 0 where the job's are taken.
        order: that the user's own loop names; "" where the job's is taken.
        optimizers: that it names, one for each model; none where all have the job's.
        script: of the user's, where that keeps something.
    """

    def __init__(
        self, role: str, vectors: Vectors, samples: int, batch_size: int = 0, keeps: bool = False, incarnation: int = 0,
        split: SplitCompute | None = None, epochs: int = 0, order: str = "", optimizers: tuple[Optimizer, ...] = (),
        script: KeptScript | None = None,
    ) -> None:  # fmt: skip
        super().__init__(
            DownpourTraining, role, vectors, samples, batch_size, keeps, incarnation, split, epochs, order, optimizers,
            script,
        )  # fmt: skip


class DownpourTraining:
    """The loop of Algorithm 1.1, and what it knows since the replica was welcomed, or since all went back.

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
        """Models, of several, whose parameters are not at hand since they were stepped."""
        self._amid = False
        """True while a minibatch of several pushes has been begun, and is not over."""
        self._pushing, self._bound = settings.strategy.pushing, settings.strategy.staleness_bound
        shards, slots = [role for role, _ in server.parts], settings.slots * len(server.models)
        self._pushes = Pushes(replica.incarnation, shards, slots, told=replica.siblings.follows)
        # what accrues for the next push: in which slot, how much of it, and from which parameters on
        self._slot = self._steps = self._accrued_samples = 0
        # minibatches that it covers, and those before them without a step of their own
        self._covered, self._held_steps, self._held_samples = 0, 0, 0
        self._changes: tuple[float, tuple[GroupOption, ...]] = (1.0, ())
        self._based = server.based(0)
        # where it stands: its tick, which vector it computes on, whether the other is asked for
        self._tick = self._landing = 0
        self._in_flight = False
        # what it was told: that there is nothing of an epoch, and to report what it has; to push nothing (for a
        # checkpoint, to be answered once that holds)
        self._draining: int | None = None
        self._holding = False
        self._hold: int | None = None
        # whether it is to give back what it has not begun, once no push is half accrued; whether it computes
        self._recalled = self._under_way = False
        # the epoch in which shards wait for it, and the last of which it has said that it has no more: in rounds they
        # wait for all, in every epoch, until they say so
        self._attending: int | None = None
        self._rested = -1

    # by what they come from, for CPython finds the attributes of an object with 30 or more by a slower way

    @property
    def _vectors(self) -> Vectors:
        return self._replica.vectors

    @property
    def _settings(self) -> Settings:
        return self.server.plan.settings

    @property
    def _attends(self) -> bool:
        return self._settings.strategy.attendance

    @property
    def _in_rounds(self) -> bool:
        return self._settings.strategy.rounds

    @property
    def clock(self) -> int:
        """Pushes that were made."""
        return self._pushes.clock

    def train(self) -> Steps[None]:
        """From the server's parameters to the end of the work."""
        yield from self.server.fetch(0, self.server.whole)
        yield from self._landed(*self._models)
        self._vectors.swap(0)
        replica, reports = self._replica, report_seconds(self._settings.replicas)
        self._stepped.clear()
        step = self._step if len(self._models) == 1 else self._step_in_turn
        while (batch := (yield from self._next_batch())) is not None:
            if self._attends and self._attending is None:
                yield from self._attend(batch.epoch)
            self._under_way = True
            goes_on = yield from step(batch)
            self._under_way = False
            if not goes_on:
                replica.left = True
                if self._siblings.follows:  # so that its lead has it do nothing more
                    yield Send(replica.superior, membership.Leave(for_good=True))
                elif not replica.stops:
                    yield WriteRecord(Note(f"{replica.role} ends its part here: its script has left the loop"))
                break
            if self.work.seconds >= reports:
                yield self._progress(wants=False)
        yield from self._drain(self._rested if self._attending is None else self._attending)
        if replica.keeps:
            yield from replica.finish()  # in rounds, partitions agree on the one that they hold at the end
            yield from self._fetch_all()

    def _fetch_all(self) -> Steps[None]:
        """The parameters of all models, as they are now."""
        yield from self.server.fetch(self._landing, self.server.moving)
        yield from self._landed(*self._models)
        self._vectors.swap(self._landing)

    def _step(self, batch: Batch) -> Steps[bool]:
        """One step, and the push and the fetches that are due with it; whether there is to be another."""
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
        """Step several models one after another until the minibatch is over, each with a push and a fetch of its own.
        Return whether there is to be another minibatch.
        """
        samples = 0
        while True:
            if self._stepped:
                yield from self._fetch_stepped()
            computed = yield from gradient(self._replica.split, batch, self.wait)
            if not self._amid and self._replica.asked is not None:
                yield from self._replica.save_script()
            if computed is not None and computed.ended:
                yield from self._end_epoch(batch)
                return True
            if computed is not None and computed.written:
                yield from self._replace()
            if computed is None or computed.held:
                if computed is not None or self._amid:  # what was pushed in a minibatch that is left is done
                    self._pushes.close(1, samples)
                    self._replica.step += 1
                self.work.seconds += computed.seconds if computed else 0.0
                self._amid = False
                yield from self._holds()
                return computed is not None
            samples = computed.samples
            yield from self._accrue(computed)
            yield from self._push(computed.model)

    def _fetch_stepped(self) -> Steps[None]:
        """The parameters of the models that were stepped."""
        models = [self._models[number] for number in sorted(self._stepped)]
        for model in models:
            yield from self.server.fetch(0, model.moving, self._tick)
        yield from self._landed(*models)
        self._stepped.clear()
        self._vectors.swap(0, [part for model in models for part in model.moving])

    def _end_epoch(self, batch: Batch) -> Steps[None]:
        """Its data end before a minibatch: there is no more of that epoch."""
        self.work.end(batch.epoch)
        yield Send(roles.COORDINATOR, dealing.StreamEnded(batch.epoch, batch.index))

    # data

    def _next_batch(self) -> Steps[Batch | None]:
        """The next minibatch that the coordinator dealt; None when the job is over."""
        if self._siblings.follows:
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
                yield from self._siblings.deal(batch)
                return batch
            if self._draining is not None:
                epoch, self._draining = self._draining, None
                yield from self._drain(epoch)
                drained = True
            else:
                yield from self.wait()
        return None

    def _save_idle(self) -> Steps[None]:
        """Save what the script keeps, where there is nothing to do: it comes to the end of its minibatch first, for
        which its model is as that has left it.
        """
        script = self._replica.script
        if script is not None and script.in_step and self._replica.split is None:  # a partition's model rests meanwhile
            yield from self._fetch_all()
        if (yield from end_minibatch(script)):
            yield from self._replace()
        yield from self._replica.save_script()

    def _give_back(self) -> None:
        """Give back what is not begun, where that was asked for: but for what the push that accrues still needs, whose
        size would else be that of the moment.
        """
        if self._recalled and not 0 < self._steps + self._under_way < self._pushing.push_every:
            self._recalled = False
            self.work.give_back()

    def _next_of_lead(self) -> Steps[Batch | None]:
        """The next minibatch that the lead computes; None when it is done."""
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
        shrinks = yield from self._shrinks()
        while self._pushes.busy[self._slot * len(self._models) + computed.model]:
            yield from self.wait()
        if not self._steps:
            self._based = self.server.based(computed.model)
        samples = computed.samples + self._held_samples
        self._changes = computed.rate, computed.options
        # of one step the shards weigh the whole push: a round of one leaves it as it is
        several = self._in_rounds and self._pushing.push_every > 1
        weight = samples / self._settings.data.batch_size if several else 1.0
        self._vectors.accrue(self._slot, not self._steps, weight * shrinks, computed.model)
        if self._pushing.local_lr:
            self._vectors.descend(self._pushing.local_lr * shrinks)
        self._under_way = False
        self._steps += 1
        self._covered += 1 + self._held_steps
        self._accrued_samples += samples
        self._held_steps = self._held_samples = 0
        self.work.seconds += computed.seconds

    def _replace(self) -> Steps[None]:
        """Have the shards hold what the script has written to its parameters, before a gradient that was computed with
        it.
        """
        while self._pushes.waiting:  # they read the slot
            yield from self.wait()
        yield from self.server.initial(replaces=True)
        while self._links.missing:
            yield from self.wait()

    def _shrinks(self) -> Steps[float]:
        """Return the factor by which a split replica's gradient is clipped, from its norm, of which each partition
        knows a part. A replica that is whole computes it clipped.
        """
        clip = self._settings.clip_norm
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
        """A minibatch without a step of its own is done with the next that has one."""
        self._held_steps += 1
        self._held_samples += computed.samples
        self.work.seconds += computed.seconds

    def _push(self, model: int = 0) -> Steps[None]:
        """Send what has accrued to all shards; does not wait, but for a checkpoint that is being made, or for the lead
        to do so. Of several models, what has of one: the first push of a minibatch counts as its step, and the others
        follow it.
        """
        pushed = self._models[model]
        self._give_back()
        while (self._holding and not self._amid) or not self._siblings.may_push(self._pushes.clock + 1):
            if self._replica.asked is not None and self._holding:
                yield from self._replica.save_script()
            yield from self.wait()
        slot = self._slot
        self._vectors.carry_buffers(slot, model)
        clock, sent = self._pushes.clock + 1, {}
        single = len(self._models) == 1
        steps = self._steps if single else int(not self._amid)
        rate, options = self._changes
        for (role, part), payload in zip(pushed.parts, pushed.outgoing[slot], strict=True):
            push = pushing.Push(
                slot, part.start, part.stop, self._replica.incarnation, clock, self._based[role], steps,
                self._accrued_samples, self._tick, self._replica.partition, self._vectors.covered(slot, part),
                rate=rate, options=options
            )  # fmt: skip
            sent[role] = Send(role, push, payload)
        covered = (self._covered, self._accrued_samples) if single else (0, 0)  # those are done with the minibatch
        self._amid = not single
        busy = slot * len(self._models) + model
        yield from self._pushes.make(busy, *covered, sent, self._siblings.push(clock))
        self._tick += self._attends
        self._stepped.add(model)
        self._steps = self._covered = self._accrued_samples = 0
        self._slot = (slot + 1) % self._settings.slots

    def _drain(self, epoch: int) -> Steps[None]:
        """Push the rest, wait until all is acknowledged and all that was asked for is here, and report it: there is no
        more of an epoch.

        What a round of a job that ends would have of less than a push is as if it had not been computed.
        """
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
        """The parameters for this step; with prefetch, those that were asked for a step ago, and the next are asked
        for.
        """
        if not self._pushing.prefetch:
            yield from self.server.fetch(0, self.server.moving, self._tick)
            yield from self._landed(*self._models)
            self._vectors.swap(0)
            return
        if not self._in_flight:
            yield from self.server.fetch(1 - self._landing, self.server.moving, self._tick)
        yield from self._landed(*self._models)
        self._landing, self._in_flight = 1 - self._landing, False
        self._vectors.swap(self._landing)

    def _ask_ahead(self) -> Steps[None]:
        """Ask for the next step's parameters; they land in the other vector while this step computes."""
        self._in_flight = True
        yield from self.server.fetch(1 - self._landing, self.server.moving, self._next_tick)

    def _landed(self, *models: ModelView) -> Steps[None]:
        while self._links.missing:
            self.take((yield RECEIVE))
            if self._is_told_to_act():
                yield from self._act()
        for model in models:
            if self._in_rounds:
                yield from self._same_round(model)
            model.held.land()

    def _same_round(self, model: ModelView) -> Steps[None]:
        """Rounds may have gone on without this replica: have every shard's parameters be those of one round, which this
        replica is in.
        """
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
        """Return whether the parameters at hand may not serve a step: by the user's cadence, or because the consistency
        asks for newer ones.
        """
        if self._in_rounds:
            return not self._steps
        return step % self._pushing.fetch_every == 0 or self.server.held.floor < tick - self._bound

    @property
    def _next_tick(self) -> int:
        """The tick of the step after this one."""
        return self._tick + (self._steps + 1 == self._pushing.push_every)

    # taking part

    def _attend(self, epoch: int) -> Steps[None]:
        """Take part, from the furthest tick at which a shard would have this replica begin."""
        before = self._tick
        for role, _ in self.server.parts:
            yield self._links.ask(role, attendance.Attend(self._replica.incarnation, -1, epoch))
        while any(self._links.asks(role, attendance.Attend) for role, _ in self.server.parts):
            yield from self.wait()
        self._attending = epoch
        if self._tick > before:  # while it took no part others have stepped them
            self._stepped |= {*range(len(self._models))}
        if self._bound < math.inf:
            for role, _ in self.server.parts:
                yield Send(role, attendance.Attend(self._replica.incarnation, self._tick))

    def _sit_out(self, epoch: int) -> Steps[None]:
        """Be waited for by nobody; what was pushed before counts."""
        if self._attending is not None or (self._in_rounds and self._rested < epoch):
            self._attending, self._rested = None, epoch
            for role, _ in self.server.parts:
                yield self._links.ask(role, attendance.SitOut(self._replica.incarnation, epoch))

    # what arrives

    def wait(self) -> Steps[None]:
        """Wait for the next word, and do what it asks for; every wait of the story is a loop around this, or, where it
        waits for most words, around the same.
        """
        self.take((yield RECEIVE))
        if self._is_told_to_act():
            yield from self._act()

    def _look(self) -> Steps[None]:
        """Take what has arrived, and do what it asks for."""
        while (arrival := (yield GLANCE)) is not None:
            self.take(arrival)
            if self._is_told_to_act():
                yield from self._act()

    def _is_told_to_act(self) -> bool:
        """Return whether a message that was taken may ask for more than to be noted, which it seldom does."""
        replica = self._replica
        return (
            replica.split is not None or self._hold is not None or replica.welcome is not None or bool(self._links.lost)
        )

    def _act(self) -> Steps[None]:
        """Do what a word has asked for."""
        if self._replica.split is not None:
            yield from self._siblings.relayed()
            for done in self._pushes.finished():
                yield Send(self._replica.superior, partitioning.PartPushed(*done))
        if self._hold is not None:
            yield from self._holds()
        if self._replica.welcome is not None:
            yield from self._replica.reunite(self, self._replica.welcome)
        if self._links.lost:
            yield from self._links.seek()

    def _holds(self) -> list[Send]:
        """Tell that nothing is on its way to the shards, and nothing will be, once that is so."""
        if self._hold is not None and not self._pushes.waiting and not self._amid:
            number, self._hold = self._hold, None
            return [self._progress(wants=False), Send(roles.COORDINATOR, checkpointing.Held(number))]
        return []

    def owed(self, shard: str) -> Steps[None]:
        """Tell a shard that has come again how far the one before was, and push again what that had not
        acknowledged.
        """
        if shard not in self._pushes.acknowledged:
            return
        pushes, incarnation = self._pushes.owed(shard), self._replica.incarnation
        yield Send(shard, attendance.Return(incarnation, self._pushes.acknowledged[shard], self._replica.partition))
        if self._attending is not None:
            first: Any = pushes[0].message if pushes else None
            yield Send(shard, attendance.Attend(incarnation, first.tick if first else self._tick, self._attending))
        elif self._attends and not self._links.asks(shard, attendance.SitOut):
            yield self._links.ask(shard, attendance.SitOut(incarnation, self._rested))
        yield from pushes

    def waits(self) -> str:
        """Say in one sentence what it waits for."""
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
        """Note what arrived."""
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
            self._told(arrival)

    def _told(self, arrival: Arrival) -> None:
        """Note what the coordinator tells, or the other partitions."""
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
