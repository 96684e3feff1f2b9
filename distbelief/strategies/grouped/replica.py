"""The story of a replica of a job without a server: it computes, adds up its gradients with those of its group, and
makes the same update as all.

Whatever happens to another, it waits for the coordinator's word: to halt, and say how far it is. Then a group is formed
of those who are there, and who has made fewer rounds than another, or has just come, is given what that one holds.

Each partition of a split replica plays this story on its own part of the model, with the same partitions of the others.
The first leads: it takes part for all, and hands on what it is told; to them it is what the coordinator is to it. A
round's update is made when all of them hold their sums, so that a replica is never between two rounds.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Generator
from itertools import islice
from typing import NamedTuple

from distbelief.core import events, roles
from distbelief.core.conversations import evaluating, grouping, membership, partitioning
from distbelief.core.conversations.agreement import Squares
from distbelief.core.effects import (
    GLANCE,
    RECEIVE,
    Arrival,
    Attach,
    Batch,
    Computed,
    Connect,
    Effect,
    Form,
    Load,
    Measure,
    Measured,
    Phantom,
    ReduceGradients,
    Save,
    Send,
    Story,
    Wake,
)
from distbelief.core.norms import added, cut_layers
from distbelief.core.portions import Portion
from distbelief.core.settings import Plan, Settings
from distbelief.core.timers import BucketDue
from distbelief.errors import UsageError
from distbelief.fabric.base import schedule_of
from distbelief.fabric.buckets import Bucket, buckets, of_buffers, shares
from distbelief.fabric.messages import Messages
from distbelief.replica.links import unwanted
from distbelief.replica.script import LoopRequest, end_minibatch, save
from distbelief.replica.siblings import Siblings
from distbelief.replica.split_compute import SplitCompute, gradient
from distbelief.replica.steps import Steps
from distbelief.replica.work import check_loss, report_seconds
from distbelief.schedules.schedule import Schedule
from distbelief.strategies.grouped.followers import Followers, Said
from distbelief.strategies.grouped.round_batches import round_of
from distbelief.strategies.grouped.settings import Reducing, reduction
from distbelief.strategies.grouped.whole import Whole

CHUNK = 4 << 20
"""Most bytes of what a replica holds in one message to another."""
FORWARD = 1 / 3
"""Fraction of a simulated step after which the backward pass begins."""
NAMED = 3
"""Most replicas that a sentence about a wait names."""
OTHERS_SAY = (grouping.ReducedPiece, grouping.GroupHello, grouping.State, grouping.AskReceipt, grouping.Receipt)
"""Messages from any other of the group, or of the replica."""


class _Halted(Exception):
    """The group is broken up, and another of this number is to be formed."""

    def __init__(self, group: int) -> None:
        super().__init__(group)
        self.group = group


class _Dismissed(Exception):
    """The partition that leads this one leaves, wherever this one is in its rounds."""


class _StateArray(NamedTuple):
    """Received part of one array of the source's state."""

    dtype: str
    shape: tuple[int, ...]
    start: int
    data: bytearray


class AllreduceReplica:
    """One replica.

    Args:
        role: its name.
        whole: its model.
        samples: in its training set.
        incarnation: of this replica; a restarted one has a higher.
        address: where others reach it.
        reduces: whether its worker adds up the gradients (in shared memory, or by torch.distributed); else they travel
            as messages.
        gradual: whether its simulated step makes one bucket after the other, so that the first are on their way before
            it is over.
        store: where the others of a group reach what adds up there, if it is not in messages or shared memory.
        choose: the algorithm for a bucket among so many ranks, where the job's is auto.
        split: how it computes together with the other partitions, where the replica is split.
        collect: takes the values of the model, part by part, that is measured then, where the replica is split.
        fault: says why its worker could not reduce, or not take its part in a group; "" where that is not known.
        loop: request of the user's own; None where a task is trained.
    """

    def __init__(
        self, role: str, whole: Whole, samples: int, incarnation: int = 0, address: str = "", reduces: bool = False,
        gradual: bool = False, store: str = "", choose: Callable[[Bucket, int], str] | None = None,
        split: SplitCompute | None = None, collect: Callable[[int, bytes], None] = lambda *_: None,
        fault: Callable[[], str] = str, loop: LoopRequest | None = None,
    ) -> None:  # fmt: skip
        self.role, self.whole, self.incarnation = role, whole, incarnation
        self.step = self.samples = 0
        self.rounds = grouping.NOTHING
        request = loop or LoopRequest()
        self._enter = grouping.Enter(
            incarnation, address, whole.layout, samples, request.batch_size, whole.digest(), store, request.epochs
        )
        self.stops = False
        """True if its script ends the job for all."""
        self._reduces, self._gradual, self._choose, self._fault = reduces, gradual, choose, fault
        self._split, self.script = split, request.script
        self._siblings = split.siblings if split else Siblings(role, incarnation)
        self._followers = Followers(self._siblings, collect)
        self._permitted = (-1, -1, 0.0)
        """The group and the round of which a partition that follows may make the update, and the norm of the sum."""
        self._squares = grouping.PartSquares(-1, -1, ())
        """The newest norms of whole layers that a partition that follows was told."""
        self._cuts = False
        """True if the optimizer needs norms of layers that lie at several partitions."""
        self._plan: Plan | None = None
        self._assemble: grouping.Assemble | None = None
        self._group = -1
        self._members: list[str] = []
        self._rank = 0
        """Rank of this replica among them."""
        self._buckets: list[Bucket] = []
        self._messages: Messages | None = None
        """Carrier that adds up the gradients of the group, where no worker does."""
        self._awaits, self._awaited = "", list[str]()
        """Reason that it, or its worker, may be waiting, and those of its group that it waits for."""
        self._round_batches: deque[grouping.RoundBatch] = deque()
        self._early: list[tuple[str, grouping.ReducedPiece]] = []
        self._requests: deque[grouping.Keep | evaluating.Evaluate] = deque()
        self._coming: deque[Batch] = deque()
        self._greeted: dict[str, int] = {}
        self._linked: dict[str, int] = {}
        self._receipt, self._receipts = 0, dict[str, int]()
        """The last that was asked for, and the last of each other."""
        self._arrays: dict[str, _StateArray] = {}
        self._given, self._left = -1, 0
        self._updates = 0
        self._ending = False
        self._loss, self._losses, self._seconds = 0.0, 0, 0.0

    def story(self) -> Story:
        """From joining to leaving."""
        yield from self._siblings.meet(self.whole.layout)
        yield Send(self._siblings.superior, self._followers.enter(self._enter))
        while not self._ending:
            try:
                while self._assemble is None and not self._ending:
                    yield from self._wait()
                if self._assemble is not None:
                    yield from self._form(self._assemble)
                    yield from self._train()
            except _Halted as halted:
                self._requests.clear()
                self._early.clear()
                self._awaits = ""
                halt, self._group = halted.group, -1
                yield from self._siblings.tell(grouping.Halt(halt))
                yield from self._all_say(grouping.Halted, lambda said, halt=halt: said.group == halt, "a halt")  # type: ignore[misc]  # of the type that is asked for
                self._followers.forget()
                yield Send(self._siblings.superior, grouping.Halted(halt, self.rounds))
            except _Dismissed:
                break
        self._siblings.ending = True
        yield from self._siblings.tell(membership.Finish("the replica is done"), awaited=True)
        while self._siblings.busy:
            yield from self._wait()
        yield Send(self._siblings.superior, membership.Leave(stops=self.stops))
        if self._siblings.follows:  # the coordinator may see its end before it hears of its lead
            yield Send(roles.COORDINATOR, membership.Leave())

    def coming(self, most: int) -> list[Batch]:
        """The minibatches that come next, as far as they are dealt."""
        return list(islice(self._coming, most))

    def waits(self) -> str:
        """Return what it waits for, where it does: one sentence."""
        if self._plan is None:
            return "for all replicas to be there"
        if together := self._siblings.waits():
            return together
        if self._group < 0 and not self._awaits:
            return "for a group to be formed"
        if self._split is not None and (crosses := self._split.waits()):
            return crosses
        who = self._awaited if self._awaits else self._messages.waits_for() if self._messages else []
        if who:
            return (
                f"for {self._awaits or 'gradients'} from "
                f"{', '.join(who[:NAMED])}{' and others' if len(who) > NAMED else ''}"
            )
        return f"for work from {self._siblings.superior if self._siblings.follows else 'the coordinator'}"

    def standing(self) -> dict[str, object]:
        """Return how far it is."""
        return {"rounds": self.rounds}

    def _await(self, what: str, whom: list[str]) -> None:
        """Have it told that this is waited for, until it is there."""
        self._awaits, self._awaited = what, whom

    @property
    def _others(self) -> list[str]:
        """The group without this replica."""
        return [role for role in self._members if role != self.role]

    # the group

    def _form(self, told: grouping.Assemble) -> Steps[None]:
        """Take one's place in a group, and hold what it begins with."""
        self._assemble = None
        plan, partition = told.plan, self._siblings.partition
        yield from self._followers.assemble(told)
        if self._plan is None:
            yield from self._attach(plan)
        self._group, self._members = told.group, [member.role for member in told.members]
        rank = self._rank = self._members.index(self.role)
        if self._split is not None:
            yield from self._split.begin(told.group)
        self._buckets = [*buckets(plan.layout, self._own.bucket_mb, partition)]
        if self._own.buffers == "broadcast":
            self._buckets += of_buffers(plan.layout, partition)
        needy = {i for i, member in enumerate(told.members) if member.needs}
        partners = needy if rank == told.source else {told.source} if rank in needy else set()
        if not self._reduces:
            schedules = [*map(self._schedule, self._buckets)]
            self._messages = Messages(told.group, self._members, rank, self._buckets, schedules, self.whole)
            partners |= self._messages.partners
        yield from self._meet(told, partners - {rank})
        if told.checkpoint and rank == told.source:
            loaded: events.Loaded = yield Load(told.checkpoint, plan, partition)
            self.whole.load(loaded.arrays)
            self._updates = int(loaded.facts.get("updates", 0))
        if self.rounds == grouping.NOTHING:
            self.samples = told.samples
        if rank == told.source:
            yield from self._give([member.role for i, member in enumerate(told.members) if member.needs])
        elif told.members[rank].needs:
            self._await("parameters", [self._members[told.source]])
            yield from self._receive_state()
            self._awaits = ""
        self.rounds = told.rounds
        if self._reduces:
            self._await(f"a link of group {self._group}", self._others)
            if not (yield Form(told)):
                yield from self._break(self._fault() or "its part in the group could not be made")
            self._awaits = ""
        yield from self._all_say(grouping.RoundsMade, lambda said: said.group == told.group, "a group")
        yield self._report()

    def _attach(self, plan: Plan) -> Steps[None]:
        """Have the vectors that a plan asks for."""
        self._plan = plan
        self._cuts = bool(cut_layers(plan))
        yield Attach(plan, 0, 0)

    @property
    def _settings(self) -> Settings:
        """Settings of the job, once it has begun."""
        assert self._plan is not None
        return self._plan.settings

    @property
    def _own(self) -> Reducing:
        return reduction(self._settings)

    def _schedule(self, bucket: Bucket) -> Schedule:
        """Return how one bucket is reduced in the group."""
        ranks, own = len(self._members), self._own
        chosen = self._choose(bucket, ranks) if self._choose and own.algorithm == "auto" else own.algorithm
        return schedule_of(bucket, chosen, ranks, own.per_host)

    def _meet(self, told: grouping.Assemble, partners: set[int]) -> Steps[None]:
        """Open the links to partners of a higher rank, and wait for those of a lower one."""
        for other in sorted(partners):
            role, place = self._members[other], told.members[other].place
            if other > self._rank:
                if self._linked.get(role) != place.incarnation:
                    if not (yield Connect(role, place)):
                        yield from self._break(f"{role} cannot be reached")
                    self._linked[role] = place.incarnation
                yield Send(role, grouping.GroupHello(self._group))
        lower = [self._members[other] for other in sorted(partners) if other < self._rank]
        while away := [role for role in lower if self._greeted.get(role, -1) < self._group]:
            self._await(f"a link of group {self._group}", away)
            yield from self._wait()
        self._awaits = ""
        for other in partners:
            self._linked[self._members[other]] = told.members[other].place.incarnation

    def _give(self, needy: list[str]) -> Steps[None]:
        """Send all that this replica holds to those who need it."""
        if not needy:
            return
        chunks = [
            (name, dtype, shape, start, min(start + CHUNK, size))
            for name, dtype, shape, size in self.whole.state()
            for start in range(0, max(size, 1), CHUNK)
        ] or [("", "", (), 0, 0)]
        counts = {"updates": self._updates, "samples": self.samples}
        chunks += [(name, "int64", (), count, count) for name, count in counts.items()]
        sent = 0
        for left, (name, dtype, shape, start, stop) in zip(range(len(chunks) - 1, -1, -1), chunks, strict=True):
            data = self.whole.state_bytes(name, start, stop) if stop > start else b""
            size = len(data) if data else self.whole.layout.held(self._siblings.partition).size * (not name)
            for role in needy:
                yield Send(role, grouping.State(self._group, name, dtype, shape, start, left, data), Phantom(size))
            sent += len(data)
            if sent >= CHUNK and left:
                yield from self._await_receipts(needy)
                sent = 0

    def _await_receipts(self, of: list[str]) -> Steps[None]:
        """Wait until others have taken what was sent to them."""
        self._receipt += 1
        for role in of:
            yield Send(role, grouping.AskReceipt(self._receipt))
        while away := [role for role in of if self._receipts.get(role) != self._receipt]:
            self._await("a receipt", away)
            yield from self._wait()
        self._awaits = ""

    def _receive_state(self) -> Steps[None]:
        """Wait for what the source holds, and take it."""
        while self._left or self._given < self._group:
            yield from self._wait()
        self._updates, self.samples = (self._arrays.pop(name).start for name in ("updates", "samples"))
        arrays = {name: (one.dtype, one.shape, one.data) for name, one in self._arrays.items() if name}
        self._arrays.clear()
        self.whole.take_state(arrays)

    def _break(self, reason: str) -> Steps[None]:
        """Say that the group cannot go on, and wait to be halted."""
        self._awaits = ""
        yield Send(self._siblings.superior, grouping.Broken(self._group, reason))
        while True:
            yield from self._wait()

    # rounds

    def _train(self) -> Steps[None]:
        """One round batch after another, until the group is broken up or the job is over."""
        while not self._ending:
            if self._round_batches:
                batch = self._round_batches.popleft()
                if batch.group == self._group:  # one of a group before was on its way when that broke up
                    yield from self._siblings.tell(batch)
                    yield from self._make(batch.portion)
            elif self._requests:
                yield from self._answer_request(self._requests.popleft())
            else:
                yield from self._wait()

    def _make(self, portion: Portion) -> Steps[None]:
        """All rounds of a round batch."""
        assert self._plan is not None
        count, settings = len(self._members), self._settings
        width = count * self._own.accumulate
        rounds = [round_of(portion, width, number) for number in range(-(-portion.count // width))]
        self._coming = deque(Batch(portion.epoch, index) for taken in rounds for index in taken[self._rank :: count])
        for taken in rounds:
            sizes = [min(settings.batch_size, self._plan.samples - index * settings.batch_size) for index in taken]
            computed = None
            own = sizes[self._rank :: count]
            for at, size in enumerate(own):
                self.whole.weigh(size / sum(sizes), first=not at, last=at + 1 == len(own))
                yield from self._look()
                if self._ending:
                    yield from self._leave_early()
                    return
                batch = self._coming.popleft()
                computed = yield from self._compute(batch)
                if computed is None:
                    yield from self._leave_early()
                    return
                if computed.loss is not None:
                    self.report(computed.loss, batch, self.step)
                self.step += 1
                self._seconds += computed.seconds
                if computed.written and count > 1:
                    raise UsageError(
                        "the script has written to its parameters, and a guest trains them too: only one replica alone "
                        "may; have the model compute it (torch.nn.utils.parametrize)"
                    )
                if computed.written:
                    self.whole.take_written()
                self.whole.gather()
            if not own:
                self.whole.contribute_nothing()
            yield from self._reduce(computed)
            self.whole.clip((yield from self._agree()))
            norms = (yield from self._whole_squares()) if self._cuts else ()
            if self._own.buffers == "broadcast":
                self.whole.adopt_buffers()
            self.whole.update(self._plan.factor(self.samples), norms, count == 1)
            self.rounds += 1
            self._updates += 1
            self.samples += sum(sizes)
            if self._seconds >= report_seconds(len(self._members)) and not self._siblings.follows:
                yield self._report()
        if not self._siblings.follows:
            yield self._report()

    def _leave_early(self) -> Steps[None]:
        """Have the job go on without this replica; where nobody else holds the parameters, stay until they are kept."""
        self._ending = len(self._members) > 1
        if self._ending:
            return
        yield self._report()
        yield Send(self._siblings.superior, membership.Leave(stops=self.stops))
        while True:  # until it is halted, to form a group that ends
            yield from self._wait()

    def _compute(self, batch: Batch) -> Steps[Computed | None]:
        return gradient(self._split, batch, self._wait)

    def _agree(self) -> Generator[Effect, object, float]:
        """Wait until all partitions of the replica hold their sums of the round: then each makes the update.

        Returns:
            The norm of the whole sum, where the job clips.
        """
        now, norm = (self._group, self.rounds), self.whole.norm()
        if self._siblings.follows:
            yield Send(self._siblings.superior, grouping.PartSummed(self._group, self.rounds, norm, *self._count()))
            while self._permitted[:2] != now:
                self._await("the word to update", [self._siblings.superior])
                yield from self._wait()
            self._awaits = ""
            return self._permitted[2]
        summed = yield from self._all_say(grouping.PartSummed, lambda said: (said.group, said.round) == now, "its sum")
        for one in summed:
            self._add_counts(one)
        norm = math.hypot(norm, *(one.norm for one in summed))
        yield from self._siblings.tell(grouping.UpdatePart(*now, norm))
        return norm

    def _whole_squares(self) -> Generator[Effect, object, Squares]:
        """The norms of the layers that are cut: what the partitions of the replica add to them, in their order. Nobody
        makes the update before all have said it.
        """
        own = grouping.PartSquares(self._group, self.rounds, self.whole.squares())
        now = own.group, own.round
        if self._siblings.follows:
            yield Send(self._siblings.superior, own)
            while (self._squares.group, self._squares.round) != now:
                self._await("the norms of whole layers", [self._siblings.superior])
                yield from self._wait()
            self._awaits = ""
            return self._squares.of
        said = yield from self._all_say(
            grouping.PartSquares, lambda said: (said.group, said.round) == now, "the norms of its parts"
        )
        told = grouping.PartSquares(*now, added(one.of for one in (own, *said)))
        yield from self._siblings.tell(told)
        return told.of

    def _add_counts(self, told: grouping.PartSummed) -> None:
        """Count what a partition has counted into the next report."""
        self._loss, self._losses = self._loss + told.loss, self._losses + told.losses

    def _all_say(self, kind: type[Said], fits: Callable[[Said], bool], what: str) -> Steps[list[Said]]:
        """Wait until all partitions that this one leads have said something of now."""
        while away := self._followers.missing(kind, fits):
            self._await(what, away)
            yield from self._wait()
        self._awaits = ""
        return self._followers.said(kind)

    def _reduce(self, computed: Computed | None) -> Steps[None]:
        """Add up the gradients of the round."""
        if self._reduces:
            self._await("gradients", self._others)
            if not (yield ReduceGradients()):
                yield from self._break(self._fault() or "its gradients could not be added up")
            self._awaits = ""
            return
        pieces = self._messages
        assert pieces is not None
        pieces.begin_round(self.rounds)
        early, self._early = self._early, []
        for sender, piece in early:
            if piece.group == self._group:  # those of groups before were on their way when these broke up
                pieces.receive(sender, piece)
        ready = self._moments(computed)
        for number, moment in enumerate(ready):
            if moment > ready[0]:
                yield Wake(moment - ready[0], BucketDue(self._group, self.rounds, number))
            else:
                pieces.ready(number)
                yield from pieces.outgoing()
        while not pieces.reduce():
            arrival: Arrival = yield RECEIVE
            if isinstance(arrival.event, grouping.ReducedPiece) and arrival.event.group == self._group:
                pieces.receive(arrival.sender, arrival.event)
                yield from pieces.outgoing()
            elif isinstance(arrival.event, events.Woke):
                timer = arrival.event.timer
                if isinstance(timer, BucketDue) and (timer.group, timer.round) == (self._group, self.rounds):
                    pieces.ready(timer.bucket)
                    yield from pieces.outgoing()
            else:
                yield from self._take(arrival)

    def _moments(self, computed: Computed | None) -> list[float]:
        """When the gradient of each bucket is there, in seconds since the step began; a step whose worker makes it at
        once has them all.
        """
        if computed is None or not self._gradual:
            return [0.0] * len(self._buckets)
        return [computed.seconds * share for share in shares(self._buckets)]

    def report(self, loss: float, batch: Batch | None, step: int, what: str = "loss") -> None:
        """Count the loss of a step on a minibatch into the next report.

        Raises:
            LossNotFinite: it is not a finite number.
        """
        check_loss(self.role, loss, batch, step, what, self._settings.optimizer.lr)
        self._loss += loss
        self._losses += 1

    def _report(self) -> Send:
        return Send(self._siblings.superior, grouping.RoundsMade(self._group, self.rounds, *self._count()))

    def _count(self) -> tuple[float, int]:
        """Since this was last asked: the sum of the losses, and how many they are."""
        counted = self._loss, self._losses
        self._loss, self._losses, self._seconds = 0.0, 0, 0.0
        return counted

    # what the first member does for all

    def _answer_request(self, asked: grouping.Keep | evaluating.Evaluate) -> Steps[None]:
        yield from self._siblings.tell(asked)
        if isinstance(asked, evaluating.Evaluate):
            if self._siblings.follows:
                yield from self._give_values()
                return
            yield from self._collect()
            measured: Measured = yield Measure()
            yield Send(
                roles.COORDINATOR,
                evaluating.Evaluated(
                    asked.number, measured.loss, measured.accuracy, measured.metrics, measured.seconds
                ),
            )
            return
        staleness = {"0": self._updates}  # a round is made of the parameters that it updates
        facts = {"updates": self._updates, "samples": self.samples, "staleness": staleness, "taken": []}
        part = f"shard-{self._siblings.partition}"
        saved: events.Saved = yield Save(asked.number, part, self.whole.arrays(), facts)
        kept = yield from self._all_say(grouping.Kept, lambda said: said.number == asked.number, "its checkpoint")
        errors = [saved.error, *(one.error for one in kept)]
        if self.script is not None and not self._siblings.follows:
            yield from end_minibatch(self.script)
            errors.append((yield from save(self.script, asked.number)))
        error = next(filter(None, errors), "")
        yield Send(self._siblings.superior, grouping.Kept(asked.number, error, self._updates, self.script is not None))

    def _give_values(self) -> Steps[None]:
        """Send the lead what this partition holds of the flat vector."""
        superior, chunks = self._siblings.superior, self._chunks()
        for left, (start, stop) in zip(range(len(chunks) - 1, -1, -1), chunks, strict=True):
            yield Send(superior, grouping.PartValues(self._group, start, left, self.whole.values(start, stop)))
            if left:
                yield from self._await_receipts([superior])

    def _chunks(self) -> list[tuple[int, int]]:
        """Return what this partition holds of the flat vector, in parts of which one at least is there."""
        held = self.whole.layout.held(self._siblings.partition)
        starts = range(held.start, max(held.stop, held.start + 1), CHUNK)
        return [(start, min(start + CHUNK, held.stop)) for start in starts]

    def _collect(self) -> Steps[None]:
        """Collect a split replica's whole model where it is measured."""
        for start, stop in self._chunks() if self._siblings.followers else ():
            self._followers.collect(start, self.whole.values(start, stop))
        now = self._group
        yield from self._all_say(grouping.PartValues, lambda said: (said.group, said.left) == (now, 0), "its values")

    # what arrives

    def _wait(self) -> Steps[None]:
        yield from self._take((yield RECEIVE))

    def _look(self) -> Steps[None]:
        """Take what has arrived, and go on."""
        while (arrival := (yield GLANCE)) is not None:
            yield from self._take(arrival)

    def _take(self, arrival: Arrival) -> Steps[None]:
        """Note what arrived, or act on it.

        Raises:
            _Halted: the group is to break up.
        """
        event = arrival.event
        if isinstance(event, grouping.Halt):
            raise _Halted(event.group)
        if self._takes(event) or self._followers.take(arrival):
            return
        if self._siblings.takes(arrival):
            yield from self._siblings.doubts()
            return
        if isinstance(event, OTHERS_SAY):
            yield from self._hear(arrival.sender, event)
        elif isinstance(event, grouping.Broken):
            yield Send(self._siblings.superior, event)
        elif isinstance(event, events.Lost) and arrival.sender != roles.COORDINATOR:
            yield from self._lose(arrival.sender, event)
        elif not isinstance(event, events.Woke):  # of a round that was broken off
            unwanted(self.role, arrival)

    def _takes(self, event: events.Event) -> bool:
        """Note what the coordinator, or the lead of a partition, has it do, and what crosses; whether it is that."""
        match event:
            case grouping.RoundBatch():
                self._round_batches.append(event)
            case grouping.Assemble():
                self._assemble = event
            case grouping.Keep() | evaluating.Evaluate():
                self._requests.append(event)
            case membership.Finish():
                self._ending = True
                if self._siblings.follows:
                    raise _Dismissed
            case grouping.UpdatePart():
                self._permitted = event.group, event.round, event.norm
            case grouping.PartSquares() if self._siblings.follows:
                self._squares = event
            case partitioning.Crossed():
                pass  # whoever waits looks again
            case partitioning.Boundary() if self._split is not None:
                self._split.arrive(event)
            case _:
                return False
        return True

    def _hear(self, sender: str, event: events.Event) -> list[Send]:
        """Note what another says, of its group or of its replica; what it is answered."""
        match event:
            case grouping.ReducedPiece(group=group):
                if group >= self._group:
                    self._early.append((sender, event))
            case grouping.GroupHello(group=group):
                self._greeted[sender] = group
            case grouping.State():
                self._take_state(event)
            case grouping.Receipt(number=number):
                self._receipts[sender] = number
            case grouping.AskReceipt(number=number):
                return [Send(sender, grouping.Receipt(number))]
        return []

    def _take_state(self, event: grouping.State) -> None:
        if event.group > self._given:
            self._given = event.group
            self._arrays.clear()
        if event.group == self._given:
            array = _StateArray(event.dtype, event.shape, event.start, bytearray())
            self._arrays.setdefault(event.name, array).data.extend(event.data)
            self._left = event.left

    def _lose(self, role: str, event: events.Lost) -> Steps[None]:
        """A link to another is gone: the coordinator is told, which may not know of it."""
        if 0 <= event.incarnation < self._linked.get(role, -1):
            return
        self._linked.pop(role, None)
        self._greeted.pop(role, None)
        if self._group >= 0 and role in self._members:
            reason = f"its link to {role} is gone ({event.reason})"
            yield Send(self._siblings.superior, grouping.Broken(self._group, reason))
