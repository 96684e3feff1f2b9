"""One run of a simulated cluster: its roles, network, virtual clock and planned deaths."""

from __future__ import annotations

import contextlib
import functools
import gc
import io
import math
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import msgspec
import torch
from torch import nn

from distbelief.coordination.coordinator import Coordinator
from distbelief.core import events, roles
from distbelief.core.conversations import grouping, membership
from distbelief.core.effects import Machine
from distbelief.core.messages import Message
from distbelief.core.portions import ANEW
from distbelief.core.records import (
    Ending,
    EpochDone,
    Finished,
    Iterated,
    Json,
    Parted,
    Record,
    Rewound,
    StandbyReady,
    Started,
    Stepped,
    Succeeded,
    Vacant,
)
from distbelief.core.roles import Kind
from distbelief.core.settings import Plan, Settings
from distbelief.errors import UsageError
from distbelief.job import Job
from distbelief.places.attempt import Attempt, evaluates
from distbelief.places.compute_model import Stopwatch
from distbelief.places.evaluate import threads
from distbelief.places.messages import ChannelMessage, Died, Interrupt, Listening
from distbelief.places.place import NEVER, Effect, Ended, Event, Interruption, Moved, Said, Tick, TickLater, carry_out
from distbelief.places.simulated.handling import INSTANT, HandlingCosts
from distbelief.places.simulated.memory import ShardInMemory
from distbelief.places.simulated.timed import timed, timed_work
from distbelief.places.simulated.traffic import traffic
from distbelief.places.simulated.virtual_cluster import VirtualCluster
from distbelief.places.supervisor import Supervisor
from distbelief.record.journal import Journal
from distbelief.record.restore import CheckpointStore, MemoryStore, load_weights
from distbelief.runtime import direct
from distbelief.runtime.clock import VirtualClock
from distbelief.runtime.driver import Driver
from distbelief.runtime.lasting import LastingHost
from distbelief.runtime.player import ACCOUNT_SECONDS, PlayedRole
from distbelief.runtime.player import Store as Keeper
from distbelief.server.shard import Shard
from distbelief.server.slice import Slice
from distbelief.split.graph import SplitGraph
from distbelief.strategies.base import DIRECT
from distbelief.strategies.cast import Cast
from distbelief.strategies.context import Memory, Stage, StepTiming, VirtualStage
from distbelief.strategies.partition import split_graph
from distbelief.tasks import Task, resolve
from distbelief.tasks.flat import layout_of
from distbelief.tasks.worker import build_model, load, with_data
from distbelief.transport.routed import RoutedNetwork
from distbelief.transport.virtual import VirtualEndpoint, VirtualNetwork

ORDER = (Kind.SINGLE, Kind.COORDINATOR, Kind.SHARD, Kind.STANDBY, Kind.REPLICA, Kind.EVALUATOR)
"""Order in which roles are started."""
TOLD = (Started, Rewound, Ending, StandbyReady, Succeeded, Vacant, Finished)
"""Records that the supervisor receives."""


def task_of(job: Job) -> Task:
    """Return the task that a job names or holds."""
    return resolve(job.reference, job.data_dir) if isinstance(job.task, str) else job.task


def model_of(job: Job, task: Task) -> nn.Module:
    """Return the initial model of a job."""
    model = build_model(task, job.seed, job.device)
    if job.init_from:
        model.load_state_dict(load_weights(job.init_from, layout_of(model)))
    return model


def without_loss(record: Record) -> Record:
    """Return a record without the loss: a phantom computes none."""
    if isinstance(record, Iterated):
        return msgspec.structs.replace(record, loss=math.nan, gradient=math.nan)
    return msgspec.structs.replace(record, loss=None) if isinstance(record, Stepped) else record


def _adds(message: Message) -> bool:
    """Return whether a message is a part of a sum."""
    return isinstance(message, grouping.ReducedPiece) and message.adds


ACCOUNTS = 64
"""Accounts of a role in a job that nothing slows down."""
SELDOM = 100_000
"""Number of new objects after which the garbage collector looks for cycles."""


def _never() -> None:
    """Return no reason to end the job early."""


@contextlib.contextmanager
def _seldom_collected() -> Iterator[None]:
    """Collect garbage less often while the block runs.

    A run makes millions of objects, hardly any of them in a cycle; the usual collections take 7 % of its time.
    """
    usual = gc.get_threshold()
    gc.set_threshold(SELDOM, *usual[1:])  # no gc.freeze: unfrozen objects count as old, and are rarely collected
    try:
        yield
    finally:
        gc.set_threshold(*usual)


@dataclass
class Simulation:
    """One run of a simulated cluster; tests use its network, driver and shards."""

    job: Job
    settings: Settings
    cluster: VirtualCluster
    sink: Callable[[float, str, Record], None]
    attempt: Attempt | None = None
    clock: VirtualClock = field(default_factory=VirtualClock)
    killed: list[str] = field(default_factory=list)
    stopped: Callable[[], str | None] = _never
    """Function that is called between events until it returns a reason to end the job, rather than None."""
    validates: bool = False
    """True if coordinator, shards and supervisor check their invariants after each event."""
    parts: dict[str, PlayedRole] = field(init=False, default_factory=dict)
    """Players of the replicas, by role."""
    memory: torch.Tensor | None = field(init=False, default=None)
    """Memory that the replicas share if the strategy needs it: 1-D uint8."""
    coordinator: Coordinator = field(init=False)
    shards: list[Shard] = field(init=False, default_factory=list)

    def __post_init__(self) -> None:
        cluster, settings = self.cluster, self.settings
        given = self.clock, cluster.network, settings, cluster.phantom, cluster.hosts
        routed = cluster.routed(settings, self.job.seed)
        self.network = RoutedNetwork(*given, routed) if routed else VirtualNetwork(*given)
        self._lengths: dict[int, int] = {}
        """Bytes that each shard holds, by its number."""
        self._revives = self.settings.restarts > 0 and any(
            crash.role == roles.COORDINATOR for crash in self.cluster.crashes
        )
        self.driver = Driver(self.clock, self._record, self._revives, self._validate if self.validates else None)
        deadlines = msgspec.structs.replace(NEVER, pause=cluster.restart_seconds)
        self.supervisor = Supervisor(settings.restarts, lasts=self._revives, deadlines=deadlines)
        self.network.left, self.network.adds = self._left, _adds
        self._direct = cluster.path_of(self.job.strategy, settings) == DIRECT
        self._in_memory: dict[str, ShardInMemory] = {}
        """Machines of the shards that replicas update themselves, each from the latest process of the shard."""
        self._moved: set[tuple[str, int]] = set()
        """Incarnations of standbys that have become their shards."""
        task = task_of(self.job)
        own_data = settings.own_data and settings.partitions == 1
        self.task = task if own_data else with_data(task, load(task, "training"))
        self.account_seconds = self.driver.account_seconds = self._account_seconds()
        """Least seconds between two accounts of a role."""
        self._accounts_due = 0.0
        self._known = 0
        self._journal = io.BytesIO(), io.BytesIO()
        self.evaluates = evaluates(self.settings, self.task) and not self.cluster.phantom
        folder = self.attempt.folder if self.attempt else None
        self._store = CheckpointStore(folder.path) if folder and not cluster.phantom else MemoryStore()
        self.cast = Cast(
            self.job.strategy,
            settings,
            lambda: self.task,
            lambda _: self._model(),
            lambda *_: self._graph,
            self.evaluates,
            cluster.phantom,
        )
        everybody = self.job.strategy.roles(self.evaluates)
        self._do(self.supervisor.begin(sorted(everybody, key=lambda role: ORDER.index(roles.kind(role)))))
        self._plan_faults()

    def run(self) -> None:
        """Play every role to its end."""
        with threads(self.job.threads), contextlib.closing(self), _seldom_collected():
            for role in self._stories():
                if self.driver.plays(role):
                    self.driver.begin(role)
            self._play()
            if (reason := self.stopped()) and not self.supervisor.over:
                self.stopped = _never
                self._do(self._ask(Interruption(reason)))
                self._play()
        if self.supervisor.failure is not None:
            raise self.supervisor.failure

    def _validate(self, role: str) -> None:
        match roles.kind(role):
            case Kind.COORDINATOR:
                self.coordinator.validate()
            case Kind.SHARD:
                self.shards[roles.index_of(role)].validate()

    def traffic(self, steps: int) -> Json:
        """Return the traffic between hosts in a number of steps; empty without a topology."""
        if not (isinstance(self.network, RoutedNetwork) and steps):
            return {}
        size = sum(partition.trained.size for partition in self.cast.layout.partitions)
        return {"network": traffic(self.network, self.clock.time, steps / self.settings.replicas, size)}

    def _play(self) -> None:
        """Play the roles until the job is over, or interrupted."""
        supervisor, stopped = self.supervisor, self.stopped

        def goes_on() -> bool:  # called before every story's turn, so it must be fast
            return supervisor.failure is None and stopped() is None

        self.driver.run_while(goes_on, self.clock.turn_until)
        while not self.supervisor.over and self.clock.pending and goes_on():
            self.clock.turn()
            self.driver.run_while(goes_on, self.clock.turn_until)

    def _stories(self) -> list[str]:
        return [*roles.replicas(self.settings.mesh), roles.EVALUATOR]

    def _record(self, moment: float, role: str, record: Record) -> None:
        # accounts come before an epoch's end, and with steps as often as the replicas give theirs
        due = isinstance(record, EpochDone) or (isinstance(record, Stepped) and moment >= self._accounts_due)
        if due and self.attempt:
            self._accounts_due = moment + self.account_seconds
            self._give_accounts()
        self.sink(moment, role, without_loss(record) if self.cluster.phantom else record)
        self._known += role == roles.COORDINATOR
        if isinstance(record, TOLD):
            self._happens(Said(role, 0, record))
        if isinstance(record, Finished):
            self.clock.call_later(0.0, self._dismiss, None)

    def _dismiss(self, _: None) -> None:
        """End the stories that remain when the job is over, as a supervisor does: they came too late to join."""
        for role in self._stories():
            self.driver.remove(role)

    def _add_coordinator(self, incarnation: int) -> None:
        """Play the coordinator; a later incarnation replays its journal."""
        endpoint = self._endpoint(roles.COORDINATOR, incarnation)
        self.coordinator = self.cast.coordinator(self.attempt.start if self.attempt else ANEW)
        host = None
        if self._revives:
            watched = self.network.endpoints.keys()  # all deaths are reported to the coordinator
            memory, journal = self.cast.players.memory, Journal(*self._journal)
            host = LastingHost(endpoint, self.coordinator, memory, journal, watched)
        self.driver.add_machine(roles.COORDINATOR, self.coordinator, endpoint, self._store, host=host)
        if incarnation:
            self.driver.replay(roles.COORDINATOR, self._known)
        self._do(self._ask(Said(roles.COORDINATOR, incarnation, Listening(""))))

    def _endpoint(self, role: str, incarnation: int = 0) -> VirtualEndpoint:
        """Return the endpoint of an incarnation of a role; its messages take time, except those of the evaluator."""
        if role in self.network.endpoints:
            self._tell_bytes(role)
        endpoint = self.network.endpoint(role, incarnation)
        if role != roles.EVALUATOR and self.cluster.handling != INSTANT:
            lengths, adds = self._lengths, not self.cluster.network.reduction
            of = self.cluster.handling, self.settings, lambda: lengths[roles.index_of(role)]
            endpoint.work = HandlingCosts(*of, adds, self._in_place, self._found)
        return endpoint

    def _play_story(self, role: str, part: PlayedRole, endpoint: VirtualEndpoint, store: Keeper | None = None) -> None:
        story, worker = part.player.story(), part.worker
        self.driver.add_story(role, story, endpoint, worker, store, lambda: endpoint.thread.worked)
        if self._revives:
            self.driver.link(role)

    def _play_shard(self, role: str, shard: Shard, endpoint: VirtualEndpoint) -> None:
        index = roles.index_of(role)
        machine: Machine = shard
        if self._direct:
            before, incarnation = self._in_memory.get(role), endpoint.incarnation
            machine = self._in_memory[role] = ShardInMemory(self.network, shard, incarnation, before)
            shard = machine.shard
        self.shards[index : index + 1] = [shard]
        self.driver.add_machine(role, machine, endpoint, self._store)
        self._report(role, endpoint.incarnation)

    def _report(self, role: str, incarnation: int) -> None:
        if self._revives:
            self.driver.link(role)
        self.driver.send(role, roles.COORDINATOR, membership.Here(incarnation))

    def _become(self, role: str, incarnation: int, shard: Shard) -> None:
        """Let a standby's machine play its shard; messages of an earlier process of the shard no longer count."""
        standby = roles.standby_of(role)
        self._moved.add((standby, self.network.endpoints[standby].incarnation))
        self._happens(Moved(standby))

        def play(_: None) -> None:
            if not self.supervisor.over:
                self._play_shard(role, shard, self._endpoint(role, incarnation))

        self.clock.call_later(0.0, play, None)

    def _add_replica(self, role: str, incarnation: int) -> None:
        endpoint = self._endpoint(role, incarnation)
        network, timing = self.network.model, StepTiming()
        number, seed = roles.index_of(role), self.job.seed + incarnation
        stopwatch = Stopwatch(self.cluster.compute, number, seed, roles.partition_of(role))
        stage = VirtualStage(
            self._memory,
            timed=functools.partial(timed, thread=endpoint.thread, stopwatch=stopwatch, timing=timing),
            work=timed_work(endpoint.thread, stopwatch, timing),
            now=self.clock.now,
            clock=self.clock,
            endpoint=endpoint,
            addition=network.reduction or self.cluster.handling.addition,
            timing=timing,
        )
        part = self.parts[role] = self.cast.replica(role, incarnation, stage)
        self._play_story(role, part, endpoint, self._store)

    @property
    def _memory(self) -> Memory | None:
        """Return the memory that the replicas share, if the strategy needs it."""
        needed = self.job.strategy.needs_memory(self.settings, "virtual")
        return self._share if needed and not self._direct else None

    def _share(self, length: int) -> torch.Tensor:
        """Return the memory that the replicas share; the first call makes it."""
        if self.memory is None:
            self.memory = torch.zeros(length, dtype=torch.uint8)
        return self.memory[:length]

    @functools.cached_property
    def _graph(self) -> SplitGraph:
        """Return the split model: it is the same at all partitions of all replicas."""
        lead = roles.replicas(self.settings.mesh)[0]

        def tell(record: Parted) -> None:
            self.sink(self.clock.now(), lead, record)

        if self.cluster.phantom:
            with contextlib.suppress(UsageError):  # some models can only be traced with their values
                return split_graph(self.task, self._model(), self.settings)
        model = model_of(self.job, self.task)
        return split_graph(self.task, model, self.settings, None if self.cluster.phantom else tell)

    def _model(self) -> nn.Module:
        """Return the initial model of the job; a phantom's has no values, if it can be built without them."""
        with contextlib.suppress(Exception), torch.device("meta"):  # without values a model may raise any error
            phantom = self.cluster.phantom and not self.job.init_from
            if phantom and isinstance(model := self.task.model(), nn.Module):
                return model
        return model_of(self.job, self.task)

    @functools.cached_property
    def _in_place(self) -> bool:
        """Return whether replicas on the direct path compute on the parameters that they update."""
        return self._direct and direct.reads_only(self.settings, self.cast.layout)

    @functools.cached_property
    def _found(self) -> bool:
        """Return whether replicas read the parameters in the memory of the shards, on one host."""
        shared = self.cast.players.servers is not None and self.job.strategy.needs_memory(self.settings, "shared")
        return shared and self.cluster.one_host and not self._direct and self.job.device == "cpu"

    def _slice(self, plan: Plan, shard: int) -> Slice:
        self._lengths[shard] = plan.assignments[shard].moving.size
        held = self.cast.slice(plan, shard, self._memory)
        held.lasts |= self._direct
        return held

    def _plan_faults(self) -> None:
        """Plan the crashes of roles and the departures of hosts: each comes just before the message that it names."""
        due: dict[str, deque[int]] = {}
        for crash in self.cluster.crashes:
            due.setdefault(crash.role, deque()).append(crash.message)
        leaves = {leave.role: (leave.message, leave.seconds) for leave in self.cluster.leaves}

        def strike(sender: str, _to: str, _message: Message) -> None:
            left = due.get(sender)
            if left and not self.network.endpoints[sender].ended:
                left[0] -= 1
                if not left[0]:
                    left.popleft()
                    self.kill(sender)
            if sender in leaves:
                message, seconds = leaves.pop(sender)
                if message > 1:
                    leaves[sender] = message - 1, seconds
                else:  # the host of a replica, or of its lead partition; no other role is on it
                    life = sender, self.network.endpoints[sender].incarnation
                    self._happens(Interruption("told to go", sender, (life,), seconds))

        if due or leaves:
            self.network.before_send = strike

    # effects and events of the supervisor

    def start(self, role: str, incarnation: int) -> None:
        one = roles.parse(role)
        match one.kind:
            case roles.Kind.COORDINATOR:
                self._add_coordinator(incarnation)
            case roles.Kind.EVALUATOR:
                part = self.cast.evaluator(incarnation, Stage(self._memory))
                self._play_story(role, part, self._endpoint(role, incarnation))
            case roles.Kind.REPLICA:
                self._add_replica(role, incarnation)
            case roles.Kind.SHARD:
                shard = self.cast.servers.shard(one.index, self._slice, incarnation)
                self._play_shard(role, shard, self._endpoint(role, incarnation))
            case roles.Kind.STANDBY:
                standby = self.cast.servers.standby(one.index, self._slice, incarnation)
                self.driver.add_machine(role, standby, self._endpoint(role, incarnation), become=self._become)
                self._report(role, incarnation)
        if incarnation and role in self._stories():
            self.driver.begin(role)

    def end(self, role: str, incarnation: int) -> None:
        if self.network.endpoints[role].incarnation == incarnation:
            self._crash(role)

    def tell(self, role: str, word: ChannelMessage) -> None:
        """Send a message to a role, except a death that the coordinator notices by its link."""
        if isinstance(word, Interrupt):
            self.driver.tell(role, roles.SUPERVISOR, word.event_for(role))
        elif isinstance(word, Died) and word.role == roles.COORDINATOR:
            self.driver.end_wait(role)
        elif isinstance(word, Died) and (self._is_let_go(word) or not self._is_heard(word)):
            lost = events.Lost(word.reason or f"{word.role} ended before it joined", word.incarnation)
            self.driver.tell(role, word.role, word.event if word.left else lost)

    def kill(self, role: str) -> None:
        """End a role as kill -9 does; the supervisor reports it to the coordinator, which may not know the role yet."""
        self._crash(role)

    def _crash(self, role: str) -> None:
        endpoint = self.network.endpoints[role]
        if endpoint.ended:
            return
        self.killed.append(role)
        if role == roles.COORDINATOR and self._revives:
            self.driver.remove(role)
        self.network.crash(role)
        self.clock.call_later(0.0, self.driver.remove, role)
        if (role, endpoint.incarnation) not in self._moved:
            self._happens(Ended(role, endpoint.incarnation, killed=True))

    def close(self) -> None:
        """End all roles that are left."""
        for role, endpoint in self.network.endpoints.items():
            self.driver.remove(role)
            if not endpoint.ended:
                endpoint.die()
            self._tell_bytes(role)

    def _account_seconds(self) -> float:
        """Return a part of the time that the job will take if nothing slows it down, for as many bars on a page."""
        settings = self.settings
        if settings.own_data:
            return ACCOUNT_SECONDS
        samples = settings.epochs * len(load(self.task, "training"))
        steps = samples / (settings.batch_size * settings.replicas)
        return max(1.0, steps) * self.cluster.compute.step / ACCOUNTS

    def _give_accounts(self) -> None:
        """Record the bytes of all roles, and all that the shards have applied."""
        for role in self.network.endpoints:
            self._tell_bytes(role)
        for shard in self.shards:
            worked = self.network.endpoints[shard.role].thread.worked
            self.sink(self.clock.time, shard.role, msgspec.structs.replace(shard.account(), busy=worked))

    def _tell_bytes(self, role: str) -> None:
        """Record the bytes that the current incarnation of a role has sent and received."""
        if (counted := self.network.endpoints[role].traffic.tell(role)) is not None:
            self.sink(self.clock.time, role, counted)

    def _left(self, role: str, incarnation: int) -> None:
        """Report that a role has ended by itself, unless it is a standby that becomes its shard."""
        if not self.supervisor.moves(role) and (role, incarnation) not in self._moved:
            self._happens(Ended(role, incarnation, done=True))

    def _happens(self, event: Event) -> None:
        """Pass an event to the supervisor; carry out its effects at this moment, after all else that is due now."""
        if asked := self._ask(event):
            self.clock.call_later(0.0, self._do, asked)

    def _ask(self, event: Event) -> list[Effect]:
        """Return the supervisor's effects of an event; if the event makes the job fail, nothing else happens."""
        asked = self.supervisor.handle(self.clock.time, event)
        if self.validates:
            self.supervisor.validate()
        if self.supervisor.failure is not None:
            self.driver.look()
        return asked

    def _do(self, asked: list[Effect]) -> None:
        for effect in asked:
            if isinstance(effect, TickLater):
                self.clock.call_later(effect.seconds, self._tick, None)
            else:
                carry_out(self, effect)

    def _tick(self, _: None) -> None:
        self._do(self._ask(Tick()))

    def _is_let_go(self, died: Died) -> bool:
        """Return whether an incarnation counts as having left, and is about to be ended."""
        return died.left and not self.network.endpoints[died.role].ended

    def _is_heard(self, died: Died) -> bool:
        """Return whether the coordinator has a link to an incarnation, or will have before it hears of its end."""
        endpoint, current = self.network.endpoints[died.role], self.network.endpoints[roles.COORDINATOR].incarnation
        linked = endpoint.has_sent(roles.COORDINATOR) and endpoint.incarnation_of(roles.COORDINATOR) == current
        return linked and endpoint.incarnation == died.incarnation
