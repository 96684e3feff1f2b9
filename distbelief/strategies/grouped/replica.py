"""The story of a replica of a group: it computes, adds up its gradients with those of its group, and
makes the same update as all.

Whatever happens to another, it waits for the coordinator's word: to halt, and say how far it is. Then a group is formed
of those who are there, and who has made fewer rounds than another, or has just come, is given what that one holds.

Each partition of a split replica plays this story on its own part of the model, with the same partitions of the others.
The first leads: it takes part for all, and hands on what it is told; to them it is what the coordinator is to it. A
round's update is made when all of them hold their sums, so that a replica is never between two rounds.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable
from itertools import islice
from typing import NamedTuple

from msgspec.structs import replace

from distbelief.core import events, roles
from distbelief.core.conversations import (
    checkpointing,
    dealing,
    evaluating,
    grouping,
    initialising,
    membership,
    partitioning,
)
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
    Steps,
    Story,
    Wake,
)
from distbelief.core.messages import Address, Version
from distbelief.core.norms import cut_layers
from distbelief.core.portions import Portion
from distbelief.core.settings import Plan, Settings
from distbelief.core.timers import BucketDue
from distbelief.errors import UsageError
from distbelief.fabric.base import schedule_of
from distbelief.fabric.buckets import Bucket, buckets, of_buffers, shares
from distbelief.fabric.messages import Messages
from distbelief.replica.links import unwanted
from distbelief.replica.served_replica import LoopRequest, end_minibatch, save
from distbelief.replica.siblings import Siblings
from distbelief.replica.split_compute import SplitCompute
from distbelief.replica.work import check_loss, gradient, report_seconds
from distbelief.schedules.schedule import Schedule
from distbelief.strategies.grouped.settings import Reducing, reduction
from distbelief.strategies.grouped.whole import Whole

CHUNK = 4 << 20
"""Most bytes of what a replica holds in one message to another."""
FORWARD = 1 / 3
"""Fraction of a simulated step after which the backward pass begins."""
NAMED = 3
"""Most replicas that a sentence about a wait names."""
Request = (
    dealing.Deal | evaluating.Evaluate | checkpointing.Snapshot | checkpointing.SaveScript | checkpointing.Describe
)
"""A request of the coordinator, or of the partition that leads."""


class _Halted(Exception):
    """The group is broken up, and another of this number is to be formed."""

    def __init__(self, group: int) -> None:
        super().__init__(group)
        self.group = group


class _Dismissed(Exception):
    """It is let go, wherever it is in its rounds."""


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
        self._split, self.script = split, request.script
        self._siblings = split.siblings if split else Siblings(role, incarnation)
        asked, keeps = (request.batch_size, request.epochs), request.script is not None
        place, digest = membership.PartPlace(Address(address, incarnation), store), whole.digest()
        self._join = membership.Join(
            incarnation, whole.layout, samples, *asked, keeps=keeps, places=(place,), digest=digest
        )
        self.stops = False
        """True if its script ends the job for all."""
        self._reduces, self._gradual, self._choose, self._fault = reduces, gradual, choose, fault
        self._collects = collect
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
        self._early: list[tuple[str, grouping.ReducedPiece]] = []
        self._requests: deque[Request] = deque()
        """Requests that are left, the first of which it does now."""
        self._errors: list[str] = []
        """Errors of the partitions that it leads, in saving their parts."""
        self._coming: deque[Batch] = deque()
        self._greeted: dict[str, int] = {}
        self._linked: dict[str, int] = {}
        self._receipt, self._receipts = 0, dict[str, int]()
        """The last that was asked for, and the last of each other."""
        self._arrays: dict[str, _StateArray] = {}
        self._given, self._missing = -1, 0
        """The group of which it was given something last, and how many messages are to come of that."""
        self._updates = 0
        self._ending = self._leaves_early = self._left = False
        """Three flags: it makes no more rounds; though the job may go on; and has said so."""
        self._loss, self._losses, self._seconds = 0.0, 0, 0.0
        self._reported = (0, 0, 0)
        """Its own steps, the samples of all, and the rounds that it has reported."""
        self._answers = self._table()
        """Answer to each kind of event, from its sender and itself."""

    def story(self) -> Story:
        """From joining to leaving."""
        yield from self._siblings.meet(self.whole.layout)
        joins = [self._join, *(self._siblings.joined[role] for role in self._siblings.followers)]
        places = tuple(place for join in joins for place in join.places)
        yield Send(
            self._siblings.superior, replace(self._join, places=places, digest=" ".join(join.digest for join in joins))
        )
        try:
            while True:
                try:
                    yield from self._next()
                except _Halted as halted:
                    yield from self._halt(halted.group)
        except _Dismissed:
            self._siblings.ending = True
            yield from self._siblings.tell(membership.Farewell())

    def _next(self) -> Steps[None]:
        """Form a group, say that it leaves, or do what was asked for first."""
        if self._assemble is not None:
            yield from self._form(self._assemble)
        elif self._ending and not self._left:
            yield from self._leave()
        elif self._requests:
            yield from self._do(self._requests[0])
            self._requests.popleft()
        else:
            yield from self._wait()

    def _halt(self, group: int) -> Steps[None]:
        """Break off, and say how far it is; what is asked for beside rounds is done in the next group."""
        kept = [one for one in self._requests if not (isinstance(one, dealing.Deal) or self._siblings.follows)]
        self._requests = deque(kept)
        self._early.clear()
        self._awaits, self._group = "", -1
        yield from self._siblings.ask(grouping.Halt(group), grouping.Halted)
        yield from self._wait_for_followers()
        yield Send(self._siblings.superior, grouping.Halted(group, self.rounds))

    def _leave(self) -> Steps[None]:
        """Say that it makes no more rounds, and what it has made; it stays until it is let go."""
        self._left = True
        if self._group >= 0:
            yield self._report()
        yield Send(self._siblings.superior, membership.Leave(self._leaves_early, self.stops))

    def _wait_for_followers(self) -> Steps[None]:
        """Wait until the partitions that this one leads have done what they were asked for."""
        while self._siblings.busy:
            yield from self._wait()

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
        yield from self._siblings.ask(told, initialising.Restored)
        if self._siblings.follows:
            told = replace(told, members=grouping.column(told.members, partition))
        if self._plan is None:
            yield from self._attach(plan)
        self._group, self._members = told.group, [member.role for member in told.members]
        rank = self._rank = self._members.index(self.role)
        self._siblings.begin(told.group)
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
        yield from self._hold(told)
        if self._reduces:
            self._await(f"a link of group {self._group}", self._others)
            if not (yield Form(told)):
                yield from self._break(self._fault() or "its part in the group could not be made")
            self._awaits = ""
        yield from self._wait_for_followers()
        self._reported = self.step, self.samples, self.rounds
        yield Send(self._siblings.superior, initialising.Restored(loaded=True))

    def _hold(self, told: grouping.Assemble) -> Steps[None]:
        """Hold what the group begins with: load it, or give it to others, or be given it."""
        rank = self._rank
        if told.checkpoint and rank == told.source:
            loaded: events.Loaded = yield Load(told.checkpoint, told.plan, self._siblings.partition)
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
        while self._missing or self._given < self._group:
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

    def _make(self, portion: Portion) -> Steps[None]:
        """All rounds of a round batch."""
        assert self._plan is not None
        count, settings = len(self._members), self._settings
        width = count * self._own.accumulate
        rounds = [portion.numbers[at : at + width] for at in range(0, portion.count, width)]
        self._coming = deque(Batch(portion.epoch, index) for taken in rounds for index in taken[self._rank :: count])
        for taken in rounds:
            sizes = [min(settings.batch_size, self._plan.samples - index * settings.batch_size) for index in taken]
            computed = None
            own = sizes[self._rank :: count]
            for at, size in enumerate(own):
                self.whole.weigh(size / sum(sizes), first=not at, last=at + 1 == len(own))
                yield from self._look()
                if self._ending:
                    return
                batch = self._coming.popleft()
                computed = yield from gradient(self._split, batch, self._wait)
                if computed is None:
                    self._ending = self._leaves_early = True
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
            last, due = taken is rounds[-1], self._seconds >= report_seconds(count)
            if self._siblings.follows and (last or due):
                yield self._report()  # before the lead's, of the same rounds
            # each makes the update once all partitions of the replica hold their sums of the round
            self.whole.clip((yield from self._siblings.whole_norm(self.whole.norm(), self._wait)))
            squares = self.whole.squares() if self._cuts else ()
            norms = (yield from self._siblings.whole_squares(squares, self._wait)) if self._cuts else ()
            if self._own.buffers == "broadcast":
                self.whole.adopt_buffers()
            self.whole.update(self._plan.factor(self.samples), norms, count == 1)
            self.rounds += 1
            self._updates += 1
            self.samples += sum(sizes)
            if (last or due) and not self._siblings.follows:
                yield self._report()

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
        check_loss(self.role, loss, batch, step, what, self._settings)
        self._loss += loss
        self._losses += 1

    def _report(self) -> Send:
        """Tell what it has made since the last report."""
        now, loss, losses = (self.step, self.samples, self.rounds), self._loss, self._losses
        steps, samples, rounds = (after - before for after, before in zip(now, self._reported, strict=True))
        self._reported = now
        self._loss, self._losses, self._seconds = 0.0, 0, 0.0
        return Send(self._siblings.superior, dealing.Progress(steps, samples, rounds, loss, losses, wants=False))

    # what it is asked for

    def _do(self, asked: Request) -> Steps[None]:
        match asked:
            case dealing.Deal() if not self._left:
                yield from self._siblings.tell(asked)
                yield from self._make(asked.portion)
            case evaluating.Evaluate():
                yield from self._measure(asked)
            case checkpointing.Snapshot():
                yield from self._save(asked.number)
            case checkpointing.SaveScript() if self.script is not None:
                yield from end_minibatch(self.script)
                error = yield from save(self.script, asked.number)
                yield Send(roles.COORDINATOR, checkpointing.ScriptSaved(asked.number, error))
                if asked.number == checkpointing.LEAVING:
                    yield Send(roles.COORDINATOR, membership.Leave(self._leaves_early, self.stops))
            case checkpointing.Describe():
                # a round is made of the parameters that it updates
                told = checkpointing.Description(Version(0, self._updates), self.samples, {0: self._updates})
                yield Send(roles.COORDINATOR, told)

    def _measure(self, asked: evaluating.Evaluate) -> Steps[None]:
        if self._siblings.follows:
            yield from self._give_values()
            return
        yield from self._siblings.tell(asked, awaited=True)
        for start, stop in self._chunks() if self._siblings.followers else ():
            self._collects(start, self.whole.values(start, stop))
        yield from self._wait_for_followers()
        measured: Measured = yield Measure()
        yield Send(
            roles.COORDINATOR,
            evaluating.Evaluated(asked.number, measured.loss, measured.accuracy, measured.metrics, measured.seconds),
        )

    def _save(self, number: int) -> Steps[None]:
        self._errors.clear()
        yield from self._siblings.ask(checkpointing.Snapshot(number), checkpointing.SnapshotDone)
        facts = {"updates": self._updates, "samples": self.samples, "staleness": {"0": self._updates}, "taken": []}
        part = f"shard-{self._siblings.partition}"
        saved: events.Saved = yield Save(number, part, self.whole.arrays(), facts)
        yield from self._wait_for_followers()
        error = next(filter(None, (saved.error, *self._errors)), "")
        yield Send(self._siblings.superior, checkpointing.SnapshotDone(number, error))

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

    # what arrives

    def _wait(self) -> Steps[None]:
        yield from self._take((yield RECEIVE))

    def _look(self) -> Steps[None]:
        """Take what has arrived, and go on."""
        while (arrival := (yield GLANCE)) is not None:
            yield from self._take(arrival)

    def _take(self, arrival: Arrival) -> Steps[None]:
        """Act on what arrived, or note it.

        Raises:
            _Halted: the group is to break up; _Dismissed: it is let go.
        """
        answer = self._answers.get(type(arrival.event))
        if answer is not None:
            yield from answer(arrival.sender, arrival.event) or ()
        if self._siblings.takes(arrival):
            yield from self._siblings.doubts()
        elif answer is None and not isinstance(arrival.event, events.Woke):  # of a round that was broken off
            unwanted(self.role, arrival)

    def _table(self) -> dict[type, Callable[..., Iterable[Effect] | None]]:
        return {
            **dict.fromkeys((dealing.Deal, evaluating.Evaluate, checkpointing.Snapshot), self._queue),
            **dict.fromkeys((checkpointing.SaveScript, checkpointing.Describe), self._queue),
            grouping.Halt: self._break_off,
            grouping.Assemble: self._take_group,
            membership.Finish: self._finish,
            membership.Farewell: self._stop,
            membership.Stop: self._stop,
            grouping.Broken: lambda _, event: [Send(self._siblings.superior, event)],
            dealing.Progress: self._add_report,
            checkpointing.SnapshotDone: lambda _, event: self._errors.append(event.error),
            grouping.PartValues: self._take_values,
            partitioning.Crossed: lambda *_: None,  # whoever waits looks again
            partitioning.Boundary: lambda _, event: self._split.arrive(event) if self._split else None,
            grouping.ReducedPiece: self._take_piece,
            grouping.GroupHello: lambda sender, event: self._greeted.update({sender: event.group}),
            grouping.State: self._take_state,
            grouping.AskReceipt: lambda sender, event: [Send(sender, grouping.Receipt(event.number))],
            grouping.Receipt: lambda sender, event: self._receipts.update({sender: event.number}),
            events.Lost: self._lose,
        }

    def _break_off(self, _: str, event: grouping.Halt) -> None:
        raise _Halted(event.group)

    def _take_group(self, _: str, event: grouping.Assemble) -> None:
        self._assemble = event
        if self.rounds == grouping.NOTHING:
            self._left, self._ending = False, self._leaves_early  # what it was told to end with is lost

    def _queue(self, _: str, event: Request) -> None:
        self._requests.append(event)

    def _finish(self, sender: str, _: membership.Finish) -> None:
        self._ending = True
        if sender == roles.SUPERVISOR:
            self._leaves_early, self._left = True, False  # it says so, though it may have left with the others

    def _stop(self, sender: str, event: membership.Stop | membership.Farewell) -> None:
        if isinstance(event, membership.Stop) and not self._ending:
            unwanted(self.role, Arrival(sender, event))
        raise _Dismissed

    def _add_report(self, _: str, event: dealing.Progress) -> None:
        """Count what a partition that this one leads has counted into the next report."""
        self._loss, self._losses = self._loss + event.loss, self._losses + event.losses

    def _take_values(self, sender: str, event: grouping.PartValues) -> None:
        self._collects(event.start, event.data)
        if not event.left:
            self._siblings.done(sender)

    def _take_piece(self, sender: str, event: grouping.ReducedPiece) -> None:
        if event.group >= self._group:
            self._early.append((sender, event))

    def _take_state(self, _: str, event: grouping.State) -> None:
        if event.group > self._given:
            self._given = event.group
            self._arrays.clear()
        if event.group == self._given:
            array = _StateArray(event.dtype, event.shape, event.start, bytearray())
            self._arrays.setdefault(event.name, array).data.extend(event.data)
            self._missing = event.left

    def _lose(self, role: str, event: events.Lost) -> Steps[None]:
        """A link to another is gone: the coordinator is told, which may not know of it."""
        if role == roles.COORDINATOR:
            unwanted(self.role, Arrival(role, event))
        if 0 <= event.incarnation < self._linked.get(role, -1):
            return
        self._linked.pop(role, None)
        self._greeted.pop(role, None)
        if self._group >= 0 and role in self._members:
            reason = f"its link to {role} is gone ({event.reason})"
            yield Send(self._siblings.superior, grouping.Broken(self._group, reason))
