"""The client of a replica in a group: it computes, adds up its gradients with its group's, and makes the same update.

When a replica dies or a link breaks, the coordinator halts the group, and each replica answers with its rounds. A group
is then formed of the replicas that are present. One that has made fewer rounds, or is new, gets the state of another.

Each partition of a split replica runs this client on its part of the model, in a group with the same partition of the
other replicas. The first partition leads: it talks to the coordinator, and the other partitions talk to it. They make a
round's update once all of them have their sums, so that a replica never stands between two rounds.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from itertools import islice
from typing import NamedTuple, get_args

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
from distbelief.core.events import BucketDue
from distbelief.core.messages import Address, Version
from distbelief.core.norms import cut_layers
from distbelief.core.portions import Portion
from distbelief.core.settings import Plan, Settings
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
"""Largest piece of a replica's state in one message, in bytes."""
NAMED = 3
"""Largest number of replicas that the text of a wait names."""
Request = (
    dealing.Deal | evaluating.Evaluate | checkpointing.Snapshot | checkpointing.SaveScript | checkpointing.Describe
)
"""A request of the coordinator, or of the leading partition."""


class _Halted(Exception):
    """The group breaks up, and the next one, of this number, is formed."""

    def __init__(self, group: int) -> None:
        super().__init__(group)
        self.group = group


class _Dismissed(Exception):
    """The replica is dismissed, which may be in the middle of a round."""


class _StateArray(NamedTuple):
    """The bytes that have arrived of one array of the source's state."""

    dtype: str
    shape: tuple[int, ...]
    start: int
    data: bytearray


@dataclass(frozen=True)
class GroupSurroundings:
    """Surroundings of a replica: how it reaches its group, and what its process does for it."""

    address: str = ""
    """Address at which the others reach it."""
    reduces: bool = False
    """True if its worker adds up gradients, in shared memory or over links; else the client sends them as messages."""
    gradual: bool = False
    """True if its simulated step makes bucket after bucket, so that the first travel before the step is over."""
    store: str = ""
    """Address at which the worker's carrier is met, where that has one."""
    choose: Callable[[Bucket, int], str] | None = None
    """Chooses the algorithm for a bucket among so many ranks, where the job's is auto."""
    split: SplitCompute | None = None
    """Computation together with the other partitions, where the replica is split."""
    collect: Callable[[int, bytes], None] = lambda *_: None
    """Takes the values of a split model, part by part, before it is measured."""
    fault: Callable[[], str] = str
    """Returns why its worker could not reduce or join its group; "" where that is unknown."""
    loop: LoopRequest | None = None
    """Request of a script's loop; None where a task is trained."""


class AllreduceReplica:
    """One replica, or one partition of it."""

    def __init__(
        self, role: str, whole: Whole, samples: int, incarnation: int = 0, surroundings: GroupSurroundings | None = None
    ) -> None:
        surroundings = surroundings or GroupSurroundings()
        self.role, self.whole, self.incarnation = role, whole, incarnation
        self.step = self.samples = 0
        self.rounds = grouping.NOTHING
        split, request = surroundings.split, surroundings.loop or LoopRequest()
        self._split, self.script = split, request.script
        self._siblings = split.siblings if split else Siblings(role, incarnation)
        keeps, digest = request.script is not None, whole.digest()
        place = membership.PartPlace(Address(surroundings.address, incarnation), surroundings.store)
        data = whole.layout, samples, request.batch_size, request.epochs
        self._join = membership.Join(incarnation, *data, keeps=keeps, places=(place,), digest=digest)
        self.stops = False
        """True if its script ends the job for all replicas."""
        self._surroundings = surroundings
        self._cuts = False
        """True if the optimizer needs norms of layers that lie on several partitions."""
        self._plan: Plan | None = None
        self._assemble: grouping.Assemble | None = None
        self._group = -1
        self._members: list[str] = []
        self._rank = 0
        self._buckets: list[Bucket] = []
        self._messages: Messages | None = None
        """Carrier of the group's gradients, where no worker adds them up."""
        self._awaits, self._awaited = "", list[str]()
        """Object of its wait, or of its worker's, and the members that it must come from."""
        self._early: list[tuple[str, grouping.ReducedPiece]] = []
        self._requests: deque[Request] = deque()
        """Requests that are not done; the first is under way."""
        self._errors: list[str] = []
        """Errors of the partitions that it leads, when they saved their parts."""
        self._coming: deque[Batch] = deque()
        self._greeted: dict[str, int] = {}
        self._linked: dict[str, int] = {}
        self._receipt, self._receipts = 0, dict[str, int]()
        """Number of the last receipt that it asked for, and of the last that each other replica sent."""
        self._arrays: dict[str, _StateArray] = {}
        self._given, self._missing = -1, 0
        """Last group of which it received state, and how many messages of that are still to come."""
        self._updates = 0
        self._ending = self._leaves_early = self._left = False
        """It makes no more rounds; the job may go on without it; it has sent `Leave`."""
        self._loss, self._losses, self._seconds = 0.0, 0, 0.0
        self._reported = (0, 0, 0)
        """Its steps, the samples of all replicas, and the rounds, as last reported."""
        self._answers = self._table()

    def story(self) -> Story:
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
        """Form a group, leave, or do the next request."""
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
        """Break off the round and report how many are done; requests other than rounds wait for the next group."""
        kept = [item for item in self._requests if not (isinstance(item, dealing.Deal) or self._siblings.follows)]
        self._requests = deque(kept)
        self._early.clear()
        self._awaits, self._group = "", -1
        yield from self._siblings.ask(grouping.Halt(group), grouping.Halted)
        yield from self._wait_for_followers()
        yield Send(self._siblings.superior, grouping.Halted(group, self.rounds))

    def _leave(self) -> Steps[None]:
        """Report the last rounds and leave, but stay until dismissed: others may need this replica's state."""
        self._left = True
        if self._group >= 0:
            yield self._report()
        yield Send(self._siblings.superior, membership.Leave(self._leaves_early, self.stops))

    def _wait_for_followers(self) -> Steps[None]:
        while self._siblings.busy:
            yield from self._wait()

    def coming(self, most: int) -> list[Batch]:
        return list(islice(self._coming, most))

    def waits(self) -> str:
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
        return {"rounds": self.rounds}

    def _await(self, what: str, whom: list[str]) -> None:
        """Note, for `waits`, what is awaited and from which members."""
        self._awaits, self._awaited = what, whom

    @property
    def _others(self) -> list[str]:
        return [role for role in self._members if role != self.role]

    # the group

    def _form(self, assembly: grouping.Assemble) -> Steps[None]:
        """Join a group, and take the state that it begins with."""
        self._assemble = None
        plan, partition = assembly.plan, self._siblings.partition
        yield from self._siblings.ask(assembly, initialising.Restored)
        if self._siblings.follows:
            assembly = replace(assembly, members=grouping.column(assembly.members, partition))
        if self._plan is None:
            yield from self._attach(plan)
        self._group, self._members = assembly.group, [member.role for member in assembly.members]
        rank = self._rank = self._members.index(self.role)
        self._siblings.begin(assembly.group)
        if self._split is not None:
            yield from self._split.begin(assembly.group)
        self._buckets = [*buckets(plan.layout, self._reducing.bucket_mb, partition)]
        if self._reducing.buffers == "broadcast":
            self._buckets += of_buffers(plan.layout, partition)
        needy = {i for i, member in enumerate(assembly.members) if member.needs}
        partners = needy if rank == assembly.source else {assembly.source} if rank in needy else set()
        if not self._surroundings.reduces:
            schedules = [*map(self._schedule, self._buckets)]
            self._messages = Messages(assembly.group, self._members, rank, self._buckets, schedules, self.whole)
            partners |= self._messages.partners
        yield from self._meet(assembly, partners - {rank})
        yield from self._hold(assembly)
        if self._surroundings.reduces:
            self._await(f"a link of group {self._group}", self._others)
            if not (yield Form(assembly)):
                yield from self._break(self._surroundings.fault() or "it could not join the group")
            self._awaits = ""
        yield from self._wait_for_followers()
        self._reported = self.step, self.samples, self.rounds
        yield Send(self._siblings.superior, initialising.Restored(loaded=True))

    def _hold(self, assembly: grouping.Assemble) -> Steps[None]:
        """Take the state that the group begins with: load it, receive it, or send it to the others."""
        rank = self._rank
        if assembly.checkpoint and rank == assembly.source:
            loaded: events.Loaded = yield Load(assembly.checkpoint, assembly.plan, self._siblings.partition)
            self.whole.load(loaded.arrays)
            self._updates = int(loaded.facts.get("updates", 0))
        if self.rounds == grouping.NOTHING:
            self.samples = assembly.samples
        if rank == assembly.source:
            yield from self._give([member.role for i, member in enumerate(assembly.members) if member.needs])
        elif assembly.members[rank].needs:
            self._await("parameters", [self._members[assembly.source]])
            yield from self._receive_state()
            self._awaits = ""
        self.rounds = assembly.rounds

    def _attach(self, plan: Plan) -> Steps[None]:
        self._plan = plan
        self._cuts = bool(cut_layers(plan))
        yield Attach(plan, 0, 0)

    @property
    def _settings(self) -> Settings:
        assert self._plan is not None
        return self._plan.settings

    @property
    def _reducing(self) -> Reducing:
        return reduction(self._settings)

    def _schedule(self, bucket: Bucket) -> Schedule:
        ranks, reducing, choose = len(self._members), self._reducing, self._surroundings.choose
        chosen = choose(bucket, ranks) if choose and reducing.algorithm == "auto" else reducing.algorithm
        return schedule_of(bucket, chosen, ranks, reducing.per_host)

    def _meet(self, assembly: grouping.Assemble, partners: set[int]) -> Steps[None]:
        """Connect to partners of a higher rank, and wait for those of a lower one."""
        for other in sorted(partners):
            role, place = self._members[other], assembly.members[other].place
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
            self._linked[self._members[other]] = assembly.members[other].place.incarnation

    def _give(self, needy: list[str]) -> Steps[None]:
        """Send this replica's state to members that need it."""
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

    def _await_receipts(self, receivers: list[str]) -> Steps[None]:
        """Wait for others to receive all that was sent to them, so that no more than a chunk is under way."""
        self._receipt += 1
        for role in receivers:
            yield Send(role, grouping.AskReceipt(self._receipt))
        while away := [role for role in receivers if self._receipts.get(role) != self._receipt]:
            self._await("a receipt", away)
            yield from self._wait()
        self._awaits = ""

    def _receive_state(self) -> Steps[None]:
        while self._missing or self._given < self._group:
            yield from self._wait()
        self._updates, self.samples = (self._arrays.pop(name).start for name in ("updates", "samples"))
        arrays = {name: (array.dtype, array.shape, array.data) for name, array in self._arrays.items() if name}
        self._arrays.clear()
        self.whole.take_state(arrays)

    def _break(self, reason: str) -> Steps[None]:
        """Report that the group cannot go on, and wait for it to be halted."""
        self._awaits = ""
        yield Send(self._siblings.superior, grouping.Broken(self._group, reason))
        while True:
            yield from self._wait()

    # rounds

    def _make(self, portion: Portion) -> Steps[None]:
        """Make all rounds of a round batch."""
        assert self._plan is not None
        count, settings = len(self._members), self._settings
        width = count * self._reducing.accumulate
        rounds = [portion.numbers[at : at + width] for at in range(0, portion.count, width)]
        self._coming = deque(
            Batch(portion.epoch, index) for indices in rounds for index in indices[self._rank :: count]
        )
        for indices in rounds:
            sizes = [min(settings.batch_size, self._plan.samples - index * settings.batch_size) for index in indices]
            computed = None
            mine = sizes[self._rank :: count]
            for at, size in enumerate(mine):
                self.whole.weigh(size / sum(sizes), first=not at, last=at + 1 == len(mine))
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
            if not mine:
                self.whole.contribute_nothing()
            yield from self._reduce(computed)
            last, due = indices is rounds[-1], self._seconds >= report_seconds(count)
            if self._siblings.follows and (last or due):
                yield self._report()  # the lead adds this part's report to its own, which is of the same rounds
            # the partitions update only once all of them have their sums: none may be a round ahead after a death
            self.whole.clip((yield from self._siblings.whole_norm(self.whole.norm(), self._wait)))
            squares = self.whole.squares() if self._cuts else ()
            norms = (yield from self._siblings.whole_squares(squares, self._wait)) if self._cuts else ()
            if self._reducing.buffers == "broadcast":
                self.whole.adopt_buffers()
            self.whole.update(self._plan.factor(self.samples), norms, count == 1)
            self.rounds += 1
            self._updates += 1
            self.samples += sum(sizes)
            if (last or due) and not self._siblings.follows:
                yield self._report()

    def _reduce(self, computed: Computed | None) -> Steps[None]:
        """Add up the group's gradients of the round."""
        if self._surroundings.reduces:
            self._await("gradients", self._others)
            if not (yield ReduceGradients()):
                yield from self._break(self._surroundings.fault() or "its gradients could not be added up")
            self._awaits = ""
            return
        pieces = self._messages
        assert pieces is not None
        pieces.begin_round(self.rounds)
        early, self._early = self._early, []
        for sender, piece in early:
            if piece.group == self._group:  # others are of earlier groups, and were on their way when those broke up
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
        """Return the moments at which the gradients of the buckets are ready, in seconds.

        Only their differences count: all are 0 where a worker has made the gradients at once.
        """
        if computed is None or not self._surroundings.gradual:
            return [0.0] * len(self._buckets)
        return [computed.seconds * share for share in shares(self._buckets)]

    def report(self, loss: float, batch: Batch | None, step: int, what: str = "loss") -> None:
        """Add the loss of a step to the next report; refuse a loss that is not finite."""
        check_loss(self.role, loss, batch, step, what, self._settings)
        self._loss += loss
        self._losses += 1

    def _report(self) -> Send:
        now, loss, losses = (self.step, self.samples, self.rounds), self._loss, self._losses
        steps, samples, rounds = (after - before for after, before in zip(now, self._reported, strict=True))
        self._reported = now
        self._loss, self._losses, self._seconds = 0.0, 0, 0.0
        return Send(self._siblings.superior, dealing.Progress(steps, samples, rounds, loss, losses, wants=False))

    # requests

    def _do(self, request: Request) -> Steps[None]:
        match request:
            case dealing.Deal() if not self._left:
                yield from self._siblings.tell(request)
                yield from self._make(request.portion)
            case evaluating.Evaluate():
                yield from self._measure(request)
            case checkpointing.Snapshot():
                yield from self._save(request.number)
            case checkpointing.SaveScript() if self.script is not None:
                yield from end_minibatch(self.script)
                error = yield from save(self.script, request.number)
                yield Send(roles.COORDINATOR, checkpointing.ScriptSaved(request.number, error))
                if request.number == checkpointing.LEAVING:
                    yield Send(roles.COORDINATOR, membership.Leave(self._leaves_early, self.stops))
            case checkpointing.Describe():
                # every minibatch of a round is computed on the parameters that the round updates: staleness is 0
                description = checkpointing.Description(Version(0, self._updates), self.samples, {0: self._updates})
                yield Send(roles.COORDINATOR, description)

    def _measure(self, request: evaluating.Evaluate) -> Steps[None]:
        if self._siblings.follows:
            yield from self._give_values()
            return
        yield from self._siblings.tell(request, awaited=True)
        for start, stop in self._chunks() if self._siblings.followers else ():
            self._surroundings.collect(start, self.whole.values(start, stop))
        yield from self._wait_for_followers()
        measured: Measured = yield Measure()
        yield Send(
            roles.COORDINATOR,
            evaluating.Evaluated(request.number, measured.loss, measured.accuracy, measured.metrics, measured.seconds),
        )

    def _save(self, number: int) -> Steps[None]:
        self._errors.clear()
        yield from self._siblings.ask(checkpointing.Snapshot(number), checkpointing.SnapshotDone)
        facts = {"updates": self._updates, "samples": self.samples, "staleness": {"0": self._updates}, "taken": []}
        part = f"shard-{self._siblings.partition}"
        saved: events.Saved = yield Save(number, part, self.whole.arrays(), facts)
        yield from self._wait_for_followers()
        error = next(filter(None, (saved.error, *self._errors)), "")
        yield Send(self._siblings.superior, checkpointing.SnapshotDone(number, error, saved.seconds))

    def _give_values(self) -> Steps[None]:
        """Send the lead this partition's range of the flat vector."""
        superior, chunks = self._siblings.superior, self._chunks()
        for left, (start, stop) in zip(range(len(chunks) - 1, -1, -1), chunks, strict=True):
            yield Send(superior, grouping.PartValues(self._group, start, left, self.whole.values(start, stop)))
            if left:
                yield from self._await_receipts([superior])

    def _chunks(self) -> list[tuple[int, int]]:
        """Return this partition's range of the flat vector in chunks; an empty range is one empty chunk."""
        held = self.whole.layout.held(self._siblings.partition)
        starts = range(held.start, max(held.stop, held.start + 1), CHUNK)
        return [(start, min(start + CHUNK, held.stop)) for start in starts]

    # events

    def _wait(self) -> Steps[None]:
        yield from self._take((yield RECEIVE))

    def _look(self) -> Steps[None]:
        """Take all that has arrived, without waiting."""
        while (arrival := (yield GLANCE)) is not None:
            yield from self._take(arrival)

    def _take(self, arrival: Arrival) -> Steps[None]:
        """Handle an event; raise `_Halted` if the group breaks up, and `_Dismissed` if the replica is dismissed."""
        answer = self._answers.get(type(arrival.event))
        if answer is not None:
            yield from answer(arrival.sender, arrival.event) or ()
        if self._siblings.takes(arrival):
            yield from self._siblings.doubts()
        elif answer is None and not isinstance(arrival.event, events.Woke):  # the timer's round was broken off
            unwanted(self.role, arrival)

    def _table(self) -> dict[type, Callable[..., Iterable[Effect] | None]]:
        return {
            **dict.fromkeys(get_args(Request), self._queue),
            grouping.Halt: self._break_off,
            grouping.Assemble: self._take_group,
            membership.Finish: self._finish,
            membership.Farewell: self._stop,
            membership.Stop: self._stop,
            grouping.Broken: lambda _, event: [Send(self._siblings.superior, event)],
            dealing.Progress: self._add_report,
            checkpointing.SnapshotDone: lambda _, event: self._errors.append(event.error),
            grouping.PartValues: self._take_values,
            partitioning.Crossed: lambda *_: None,  # the event only wakes the waiting loop, which looks again
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
            self._left, self._ending = False, self._leaves_early  # the parameters with which it left are lost

    def _queue(self, _: str, event: Request) -> None:
        self._requests.append(event)

    def _finish(self, sender: str, _: membership.Finish) -> None:
        self._ending = True
        if sender == roles.SUPERVISOR:
            # this replica leaves early: it sends `Leave` again, even if it has left with the others
            self._leaves_early, self._left = True, False

    def _stop(self, sender: str, event: membership.Stop | membership.Farewell) -> None:
        if isinstance(event, membership.Stop) and not self._ending:
            unwanted(self.role, Arrival(sender, event))
        raise _Dismissed

    def _add_report(self, _: str, event: dealing.Progress) -> None:
        """Add the report of a partition that this one leads to the next report."""
        self._loss, self._losses = self._loss + event.loss, self._losses + event.losses

    def _take_values(self, sender: str, event: grouping.PartValues) -> None:
        self._surroundings.collect(event.start, event.data)
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
        """Report a lost link: the coordinator may not have noticed."""
        if role == roles.COORDINATOR:
            unwanted(self.role, Arrival(role, event))
        if 0 <= event.incarnation < self._linked.get(role, -1):
            return
        self._linked.pop(role, None)
        self._greeted.pop(role, None)
        if self._group >= 0 and role in self._members:
            reason = f"its link to {role} is gone ({event.reason})"
            yield Send(self._siblings.superior, grouping.Broken(self._group, reason))
