"""The story that all replicas on a parameter server share: they join, reach the shards, train in their way, and leave.

A dead shard is started again: a replica asks the coordinator for its address, and repeats the pushes that the last one
had not acknowledged. When all go back to a checkpoint, replicas begin anew.

Each partition of a split replica plays this story, on its own part of the vector. The first leads: it takes part for
all, and stands in for the coordinator towards the others (`replica/siblings`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Protocol

from distbelief.core import events, roles
from distbelief.core.conversations import (
    checkpointing,
    dealing,
    initialising,
    membership,
    partitioning,
    pushing,
)
from distbelief.core.effects import (
    PAUSE,
    RECEIVE,
    SCRIPT,
    Arrival,
    Attach,
    Batch,
    Compute,
    Computed,
    Payload,
    Save,
    Send,
    Steps,
    Story,
)
from distbelief.core.messages import Version
from distbelief.core.optimizer import Optimizer
from distbelief.core.settings import Plan
from distbelief.replica.links import ShardLinks, unwanted
from distbelief.replica.siblings import Siblings, lives_of
from distbelief.replica.split_compute import SplitCompute
from distbelief.replica.vectors import Parameters, Vectors
from distbelief.replica.work import WorkQueue, check_loss
from distbelief.sharding.layout import Range


class KeptScript(Protocol):
    """Script with state of its own to save."""

    in_step: bool
    """True while it waits in its step, before the end of its minibatch."""

    def part(self) -> Mapping[str, Payload]:
        """Return its present state, as a part of a checkpoint."""


@dataclass(frozen=True)
class LoopRequest:
    """Settings of a user's own loop; 0, "" or None leaves a setting to the job."""

    batch_size: int = 0
    epochs: int = 0
    order: str = ""
    optimizers: tuple[Optimizer, ...] = ()
    """One for each of its models."""
    local: Optimizer | None = None
    """Optimizer of its local steps."""
    script: KeptScript | None = None
    """Script with state to save, if any."""


def end_minibatch(script: KeptScript | None) -> Steps[bool]:
    """Have a script end its minibatch; returns whether it has written to its parameters there."""
    # the script's work after a step, such as a scheduler's, belongs to its state, but without this request that step
    # would return only with the next minibatch
    if script is None or not script.in_step:
        return False
    computed: Computed | None = yield Compute(PAUSE)
    return computed is not None and computed.written


def save(script: KeptScript, number: int) -> Steps[str]:
    """Save a script's state; returns the error of the store, or ""."""
    saved: events.Saved = yield Save(number, SCRIPT, dict(script.part()), {})
    return saved.error


class AllBack(Exception):
    """Raised to end a training when the whole job goes back to a checkpoint."""


class ModelView:
    """A replica's view of one of the job's models at the shards.

    `parts` has the moving range of the model at each shard, perhaps empty. `slots` is the number of slots for its
    gradient.
    """

    def __init__(self, parts: list[tuple[str, Range]], vectors: Vectors, slots: int) -> None:
        self.parts = parts
        self.moving = [part for _, part in parts if part.size]
        self.outgoing: list[list[Payload]] = [
            [vectors.outgoing(slot, part) for _, part in parts] for slot in range(slots)
        ]
        """Payloads of a push in each slot, one for each shard."""
        self.held = Parameters(role for role, part in parts if part.size)


class ServerView:
    """A replica's view of the shards: their ranges, and the versions of its parameters."""

    def __init__(self, plan: Plan, vectors: Vectors, links: ShardLinks, incarnation: int) -> None:
        # a partition uses only its own shards: no shard holds ranges of two partitions
        self.plan, self.vectors, self.slots = plan, vectors, plan.settings.slots
        partition = roles.partition_of(links.role)
        shards = [
            (roles.shard(i), held, plan.parts(i))
            for i, held in enumerate(plan.assignments)
            if plan.layout.partition_of(held.moving) == partition
        ]
        self.parts: list[tuple[str, Range]] = [(role, held.moving) for role, held, _ in shards if held.moving.size]
        """Moving range of each shard."""
        self.whole = [part for _, held, parts in shards for part in (*parts, held.frozen) if part.size]
        self.models = [
            ModelView([(role, parts[model]) for role, held, parts in shards if held.moving.size], vectors, self.slots)
            for model in range(plan.models)
        ]
        self.moving = [part for model in self.models for part in model.moving]
        self.held = self.models[0].held
        """Versions of the only model, or the first."""
        self._links, self._incarnation = links, incarnation
        self._initial = [(part, role) for role, held, _ in shards for part in (held.moving, held.frozen) if part.size]
        self._holders = {
            (part.start, part.stop): role for role, held, parts in shards for part in (*parts, held.frozen) if part.size
        }
        self._held = {(part.start, part.stop): model.held for model in self.models for part in model.moving}

    def fetch(self, landing: int, parts: Iterable[Range], tick: int = 0) -> list[Send]:
        """Fetch ranges into a parameter vector."""
        return [
            self._links.fetch(self._holders[part.start, part.stop], landing, part, tick, self._incarnation)
            for part in parts
        ]

    def initial(self, replaces: bool = False) -> list[Send]:
        """Send all shards the model's parameters; with `replaces` also those that have values."""
        self.vectors.initial(0)
        return [
            self._links.ask(
                role, initialising.Initialise(0, part.start, part.stop, replaces), self.vectors.outgoing(0, part)
            )
            for part, role in self._initial
        ]

    def arrive(self, shard: str, event: pushing.Fetched) -> None:
        """Note parameters that have arrived from a shard."""
        self._held.get((event.start, event.stop), self.held).arrive(shard, event)

    def based(self, model: int) -> Mapping[str, Version]:
        """Return the version of each shard in the parameters of a model."""
        if len(self.models) == 1:
            return self.held.versions
        # a push goes to all shards: for a shard without a part of the model it names the newest version here
        versions: dict[str, Version] = {}
        for view in self.models:
            versions |= {
                role: max(version, versions.get(role, version)) for role, version in view.held.versions.items()
            }
        return {**versions, **self.models[model].held.versions}


class Training(Protocol):
    """Algorithm of a replica, with its state since the welcome, or since all went back."""

    server: ServerView
    work: WorkQueue

    def train(self) -> Steps[None]:
        """Train from the first parameters to the end of the work."""

    def wait(self) -> Steps[None]:
        """Wait for the next message, and act on it."""

    def take(self, arrival: Arrival) -> None:
        """Note what arrived."""

    def owed(self, shard: str) -> Steps[None]:
        """Send a new incarnation of a shard the pushes that the last one had not acknowledged."""

    def waits(self) -> str:
        """Describe in one sentence what the replica waits for; "" for nothing."""

    @property
    def clock(self) -> int:
        """Number of pushes that it has made."""


# A replica joins, is welcomed (or refused, or dismissed), enters, trains, leaves and is dismissed. Two events interrupt
# that. After a new incarnation of a shard training continues, with what `owed` sends (`reunite`). When the job goes
# back to a checkpoint, which a welcome of a new generation announces, `AllBack` unwinds the training wherever it waits,
# since its view of the shards is out of date, and the replica enters again with a new one. That may happen until the
# coordinator's farewell, also after the work is done.
class ServedReplica:
    """One replica.

    Args:
        begin_training: begins its training, with its view of the shards.
        samples: number of samples in its training set.
        split: steps of this partition, where the replica is split.
        loop: request of a user's own loop, which uses the model after the story; None for a task.
    """

    def __init__(
        self,
        begin_training: Callable[[ServedReplica, ServerView], Training],
        role: str,
        vectors: Vectors,
        samples: int,
        incarnation: int = 0,
        split: SplitCompute | None = None,
        loop: LoopRequest | None = None,
    ) -> None:
        self._begin_training = begin_training
        self.split = split
        self.siblings = split.siblings if split else Siblings(role, incarnation)
        self.superior = self.siblings.superior
        """Role that deals work and takes reports: the coordinator, or the lead of a split replica."""
        self.role, self.vectors, self.incarnation = role, vectors, incarnation
        self.keeps = loop is not None
        """True where the story ends with a fetch of the server's parameters."""
        self.partition = roles.partition_of(role)
        self.step = 0
        """Number of all computed steps."""
        self.links = ShardLinks(role, self.superior)
        self.welcome: membership.Welcome | None = None
        """Newest welcome that is not acted on yet."""
        self.generation = 0
        self.ending = self.wanted_away = self.left = False
        """Flags: the job ends; this replica is to leave; this replica has left."""
        self._excused = self._finishing = False
        self.stops = False
        """True where its script ends the whole job."""
        self.start: dealing.StreamStart | None = None
        """Beginning of its stream that is not reported yet."""
        request = loop or LoopRequest()
        self.script = request.script
        self.due_script: int | None = None
        """Number of the checkpoint that wants its script's state; None for none."""
        names = request.batch_size, request.epochs, request.order, request.optimizers, request.local
        self._join = membership.Join(incarnation, vectors.layout, samples, *names, request.script is not None)
        self._training: Training | None = None

    def story(self) -> Story:
        yield from self.siblings.meet(self.vectors.layout)
        yield Send(self.superior, self._join)
        while self.welcome is None and not (self.ending or self._excused):
            yield from self._receive()
        if self.welcome is None:
            yield Send(self.superior, membership.Leave(for_good=True))
            yield from self.siblings.tell(membership.Farewell())
            return
        plan, settings = self.welcome.plan, self.welcome.plan.settings
        # a fetch that is in flight during computation lands in a vector of its own
        yield Attach(plan, settings.slots, 1 + settings.strategy.pushing.prefetch)
        while not self._excused:
            try:
                if not self.left:
                    training = yield from self._enter(plan)
                    yield from training.train()
                yield from self._leave()
            except AllBack:
                continue
        yield from self.siblings.tell(membership.Farewell())

    def _enter(self, plan: Plan) -> Steps[Training]:
        """Reach the shards, and begin a training; initialise the shards where that is ordered."""
        # Another shard may die while this replica connects to the shards that a welcome names. Then a newer welcome
        # comes before any training. The training will fetch all that it needs, so earlier requests are dropped.
        training: Training | None = None
        initialise = self.siblings.ending = False
        while self.welcome is not None or (plan.settings.strategy.one_moment and self.links.lost):
            while self.welcome is None:
                yield from self.links.seek()
                yield from self._receive()
            welcome, self.welcome = self.welcome, None
            initialise |= welcome.initialise
            yield from self.siblings.welcome(welcome)
            if welcome.generation > self.generation:
                self.generation, training = welcome.generation, None
                yield Send(self.superior, membership.Anew(self.generation))
            if training is None:
                self.siblings.begin(self.generation)
                if self.split is not None:
                    yield from self.split.begin(self.generation)
                server = ServerView(plan, self.vectors, self.links, self.incarnation)
                training = self._training = self._begin_training(self, server)
            for shard in [*(yield from self.links.reach(welcome)), *self.links.lost]:
                self.links.forget(shard)
        assert training is not None
        self.ending = self._finishing = False
        if initialise:
            yield from server.initial()
            while self.links.missing or self.siblings.busy:
                yield from training.wait()
            yield Send(self.superior, initialising.Ready(lives_of(welcome)))
        return training

    def finish(self) -> list[Send]:
        """Have the partitions that this one leads finish, once."""
        if self._finishing:
            return []
        self._finishing = True
        return self.siblings.tell(membership.Finish("the replica is done"), awaited=True)

    def save_script(self) -> Steps[None]:
        """Save the script's state, where a checkpoint wants it."""
        number, self.due_script = self.due_script, None
        if number is not None and self.script is not None:
            error = yield from save(self.script, number)
            yield Send(self.superior, checkpointing.ScriptSaved(number, error))

    def _leave(self) -> Steps[None]:
        """Leave, and wait for the coordinator's farewell; raises `AllBack` where there is work again."""
        yield from self.finish()
        while self.siblings.busy and self._training is not None:
            yield from self._training.wait()
        self.siblings.ending = True
        yield from end_minibatch(self.script)
        yield from self.save_script()
        yield Send(self.superior, membership.Leave(self.left, self.stops))
        while not self._excused:
            self._take((yield RECEIVE))
            if self.due_script is not None:
                again = self.due_script == checkpointing.LEAVING
                yield from self.save_script()
                if again:
                    yield Send(self.superior, membership.Leave(self.left, self.stops))
            if self.welcome is not None and self.welcome.generation > self.generation:
                raise AllBack

    def reunite(self, training: Training, welcome: membership.Welcome) -> Steps[None]:
        """Reach new incarnations of shards; raises `AllBack` where these are empty, or all went back."""
        if welcome.initialise or welcome.generation > self.generation:
            raise AllBack
        self.welcome = None
        yield from self.siblings.welcome(welcome)
        for shard in (yield from self.links.reach(welcome)):
            # pushes are sent first, so that repeated fetches include them; open requests are listed before, since
            # `owed` makes more
            unanswered = self.links.again(shard)
            yield from training.owed(shard)
            yield from unanswered

    def _receive(self) -> Steps[None]:
        """Take the next message, outside of a training."""
        self._take((yield RECEIVE))
        yield from self.siblings.doubts()

    def _take(self, arrival: Arrival) -> None:
        (self._training or self).take(arrival)

    def take(self, arrival: Arrival) -> None:
        """Note a message of the coordinator or the supervisor, or a loss."""
        match arrival.event:
            case partitioning.Crossed():
                pass  # the message only wakes this role: the waiting step looks again
            case partitioning.Boundary() as crossing if self.split is not None:
                self.split.arrive(crossing)
            case _ if self.siblings.takes(arrival):
                pass
            case membership.Welcome() as welcome:
                self.welcome = welcome
            case checkpointing.SaveScript(number=number):
                self.due_script = number
            case dealing.Deal() | dealing.Drain() | dealing.Recall() | checkpointing.Hold() | checkpointing.Go() if (
                self._training is None
            ):
                pass  # these are about work before a rewind: a welcome is on its way
            case membership.Finish():
                self.ending = True
                self.wanted_away |= arrival.sender == roles.SUPERVISOR
            case membership.Farewell():
                self._excused = True
            case events.Lost() as lost if arrival.sender != self.superior:
                self.links.lose(arrival.sender, lost)
            case _:
                unwanted(self.role, arrival)

    def report(self, loss: float, batch: Batch | None, step: int, what: str = "loss") -> None:
        """Count the loss of a step into the next report; refuse one that is not finite."""
        assert self._training is not None
        check_loss(self.role, loss, batch, step, what, self._training.server.plan.settings)
        self._training.work.count(loss)

    def coming(self, most: int) -> list[Batch]:
        return self._training.work.coming(most) if self._training is not None else []

    def waits(self) -> str:
        if self._training is None:
            return (
                "to be welcomed by the coordinator"
                if not self.siblings.follows
                else f"to be welcomed by {self.superior}"
            )
        waits = self.links.waits_for_lives() or self.siblings.waits() or (self.split and self.split.waits())
        return waits or self._training.waits()

    def standing(self) -> dict[str, object]:
        return {} if self._training is None else {"clock": self._training.clock}
