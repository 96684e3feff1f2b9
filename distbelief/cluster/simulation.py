"""One run of a simulated cluster: its roles, its network and its clock, and the deaths that are planned for it."""

from __future__ import annotations

import io
import math
from collections import deque
from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import msgspec
import torch
from torch import nn

from distbelief.cluster import cast
from distbelief.cluster.handling import INSTANT, Labour
from distbelief.cluster.sitting import Sitting, evaluates
from distbelief.cluster.timed import TimedPhantom, TimedWorker, Watcher, with_data
from distbelief.core import events, roles
from distbelief.core.conversations import membership
from distbelief.core.effects import Story
from distbelief.core.layout import Layout
from distbelief.core.messages import Message
from distbelief.core.records import Finished, Iterated, Record, Stepped, Succeeded, Vacant
from distbelief.core.settings import Plan, Settings
from distbelief.job import Job
from distbelief.record.journal import Journal
from distbelief.record.memory import MemoryStore
from distbelief.record.restore import Store, load_weights
from distbelief.replica.evaluator import Evaluator
from distbelief.replica.vectors import PhantomVectors, Vectors
from distbelief.runtime.clock import VirtualClock
from distbelief.runtime.driver import Driver
from distbelief.runtime.lasting import Host
from distbelief.runtime.player import Store as Keeper
from distbelief.runtime.player import Worker
from distbelief.server.shard import Shard
from distbelief.server.slice import Slice
from distbelief.tasks import Task, resolve
from distbelief.tasks.decay import groups_of
from distbelief.tasks.flat import FlatModule, layout_of
from distbelief.tasks.worker import Trainer, build_model, check_measure, load
from distbelief.transport.virtual import VirtualEndpoint, VirtualNetwork

if TYPE_CHECKING:
    from distbelief.cluster.simulated import Simulated


def task_of(job: Job) -> Task:
    """The task that a job names or holds."""
    return resolve(job.reference, job.data_dir) if isinstance(job.task, str) else job.task


def model_of(job: Job, task: Task) -> nn.Module:
    """The model that a job begins with."""
    model = build_model(task, job.seed, job.device)
    if job.init_from:
        model.load_state_dict(load_weights(job.init_from, layout_of(model)))
    return model


def without_loss(record: Record) -> Record:
    """A record of a phantom's, which has computed none."""
    if isinstance(record, Iterated):
        return msgspec.structs.replace(record, loss=math.nan, gradient=math.nan)
    return msgspec.structs.replace(record, loss=None) if isinstance(record, Stepped) else record


@dataclass
class Simulation:
    """One run of a simulated cluster; tests reach into its network, driver and shards."""

    job: Job
    settings: Settings
    cluster: Simulated
    sink: Callable[[float, str, Record], None]
    sitting: Sitting | None = None
    clock: VirtualClock = field(default_factory=VirtualClock)
    killed: list[str] = field(default_factory=list)
    stopped: Callable[[], str | None] = lambda: None
    """Says, between two events, why the job is to end; None while it is not."""

    def __post_init__(self) -> None:
        cluster, settings = self.cluster, self.settings
        self.network = VirtualNetwork(
            self.clock, cluster.weather, self.job.seed, cluster.phantom, settings.per_host, cluster.hosts, settings.replicas
        )
        self._lengths: dict[int, int] = {}
        """Bytes that each shard holds, by its number."""
        self._revives = self.settings.restarts > 0 and any(crash.role == roles.COORDINATOR for crash in self.cluster.crashes)
        self.driver = Driver(self.clock, self._record, lasts=self._revives)
        self.task = task_of(self.job)
        self._data = load(self.task, "training")
        self._over = False
        self._ended: dict[str, int] = {}
        """The last life of each role that was killed."""
        self._known = 0
        self._journal = io.BytesIO(), io.BytesIO()
        self._interrupt = ""
        self._granted: dict[str, int] = {}
        self._succeeding: dict[str, Succeeded] = {}
        self.evaluates = evaluates(self.settings, self.task) and not self.cluster.phantom
        self._cast()
        self._plan_crashes()

    def run(self) -> None:
        """Play every role to its end."""
        threads = torch.get_num_threads()
        torch.set_num_threads(self.job.threads)
        try:
            for role in self._stories():
                if self.driver.plays(role):
                    self.driver.begin(role)
            self._play(lambda: self.stopped() is None)
            if reason := self.stopped():
                self._interrupt = reason
                self.driver.tell(roles.COORDINATOR, roles.SUPERVISOR, membership.Stop(reason))
                self._play(lambda: True)
        finally:
            torch.set_num_threads(threads)

    def _play(self, condition: Callable[[], bool]) -> None:
        """Take turns while a condition holds and somebody is played, or is about to come again."""
        self.driver.run_while(condition)
        while not self._over and self.clock.pending and condition():
            self.clock.turn()
            self.driver.run_while(condition)

    def _stories(self) -> list[str]:
        return [*(roles.replica(i) for i in range(self.settings.replicas)), roles.EVALUATOR]

    def _record(self, moment: float, role: str, record: Record) -> None:
        self.sink(moment, role, without_loss(record) if self.cluster.phantom else record)
        self._known += role == roles.COORDINATOR
        if isinstance(record, Finished):
            self._over = True
            self.clock.call_later(0.0, self._dismiss, None)
        elif isinstance(record, Succeeded):
            if self.network.endpoints[record.standby].closed:
                self._tell_lost(record.role, record.incarnation)
            else:
                self._succeeding[record.standby] = record
        elif isinstance(record, Vacant):
            self.clock.call_later(0.0, self._fill, record)

    def _dismiss(self, _: None) -> None:
        """End the stories that are left when the job is over, as a supervisor does: those who came too late to join."""
        for role in self._stories():
            self.driver.remove(role)

    def _cast(self) -> None:
        sitting, keep = self.sitting, self.sitting is not None and self.sitting.folder is not None and not self.cluster.phantom
        self._store = Store(sitting.folder.path) if keep and sitting and sitting.folder else MemoryStore()
        self._add_coordinator()
        self.shards: list[Shard] = []
        self._cast_servers()
        for i in range(self.settings.replicas):
            self._add_replica(i)
        if self.evaluates and not self.settings.among_themselves:
            self._add_evaluator()

    def _add_evaluator(self) -> None:
        evaluated = self._flat(self._model())
        check_measure(self.task, evaluated.module)
        self._play_story(roles.EVALUATOR, Evaluator(evaluated).story(), self._endpoint(roles.EVALUATOR), self._watcher(evaluated))

    def _watcher(self, flat: FlatModule) -> Worker:
        """Who measures for the evaluator."""
        return Watcher(self.task, flat)

    def _cast_servers(self) -> None:
        for i in range(0 if self.settings.mapped else self.settings.shards):
            self._add_shard(i)
        for i in range(self.settings.shards * self.settings.standby):
            self._add_standby(i)

    def _add_coordinator(self, incarnation: int = 0) -> None:
        """Play the coordinator, which in a later life goes through its journal."""
        sitting, endpoint = self.sitting, self._endpoint(roles.COORDINATOR, incarnation)
        resume = (sitting.checkpoint, sitting.position, sitting.samples, sitting.number) if sitting else ()
        self.coordinator = cast.coordinator(self.settings, self.evaluates, *resume)
        host = Host(endpoint, self.coordinator, cast.memory_of(self.coordinator), Journal(*self._journal), self._watched) if self._revives else None
        self.driver.add_machine(roles.COORDINATOR, self.coordinator, endpoint, self._store, host=host)

    @property
    def _watched(self) -> Collection[str]:
        """The roles whose deaths the coordinator is told of: all."""
        return self.network.endpoints.keys()

    def _revive(self, incarnation: int) -> None:
        """Have the coordinator come again; whoever started it tells it who has died meanwhile, and to stop if it was to."""
        if self._over:
            return
        self._add_coordinator(incarnation)
        self.driver.replay(roles.COORDINATOR, self._known)
        for role, life in self._ended.items():
            if role != roles.COORDINATOR:
                self._tell_lost(role, life)
        for role in self._stories():
            if roles.is_replica(role) and not self.driver.plays(role) and self._ended.get(role) != self.network.endpoints[role].incarnation:
                self.driver.tell(roles.COORDINATOR, role, membership.Leave(for_good=True))
        if self._interrupt:
            self.driver.tell(roles.COORDINATOR, roles.SUPERVISOR, membership.Stop(self._interrupt))

    def _endpoint(self, role: str, incarnation: int = 0) -> VirtualEndpoint:
        """The endpoint of one life of a role, whose messages take their time; the evaluator is outside of all time."""
        endpoint = self.network.endpoint(role, incarnation)
        if role != roles.EVALUATOR and self.cluster.handling != INSTANT:
            lengths, adds = self._lengths, not self.cluster.weather.reduction
            endpoint.work = Labour(self.cluster.handling, self.settings, lambda: lengths[roles.index_of(role)], adds)
        return endpoint

    def _play_story(self, role: str, story: Story, endpoint: VirtualEndpoint, worker: Worker, store: Keeper | None = None) -> None:
        self.driver.add_story(role, story, endpoint, worker, store)
        if self._revives:
            self.driver.link(role)

    def _model(self) -> nn.Module:
        return model_of(self.job, self.task)

    def _add_shard(self, index: int, incarnation: int = 0) -> None:
        role = roles.shard(index)
        shard, endpoint = cast.shard(self.settings, index, self._slice, incarnation), self._endpoint(role, incarnation)
        self._play_shard(role, shard, endpoint)

    def _play_shard(self, role: str, shard: Shard, endpoint: VirtualEndpoint) -> None:
        index = roles.index_of(role)
        self.shards[index : index + 1] = [shard]
        self.driver.add_machine(role, shard, endpoint, self._store)
        self._report(role, endpoint.incarnation)

    def _report(self, role: str, incarnation: int) -> None:
        if self._revives:
            self.driver.link(role)
        self.driver.send(role, roles.COORDINATOR, membership.Here(incarnation))

    def _add_standby(self, index: int, incarnation: int = 0) -> None:
        role = roles.standby(index)
        endpoint = self._endpoint(role, incarnation)
        self.driver.add_machine(role, cast.standby(self.settings, index, self._slice, incarnation), endpoint, become=self._become)
        self._report(role, incarnation)

    def _become(self, role: str, incarnation: int, shard: Shard) -> None:
        """Have a standby's machine play its shard; should that be there still, it has no say any more."""
        if not self.network.endpoints[role].closed:
            self._kill(role)
        self._settle(roles.standby_of(role))

        def play(_: None) -> None:
            if not self._over:
                self._play_shard(role, shard, self._endpoint(role, incarnation))

        self.clock.call_later(0.0, play, None)

    def _add_replica(self, index: int, incarnation: int = 0) -> None:
        role, samples = roles.replica(index), len(self._data)
        stopwatch = self.cluster.pace.stopwatch(index, self.job.seed + incarnation)
        vectors: Vectors
        worker: TimedWorker | TimedPhantom
        endpoint = self._endpoint(role, incarnation)
        if self.cluster.phantom:
            vectors = PhantomVectors(self._layout())
            worker = TimedPhantom(endpoint.thread, stopwatch, samples, self.settings.batch_size)
        else:
            model = self._model()
            cast.check_model(self.settings, model)
            vectors = self._flat(model)
            settings = self.settings
            task = with_data(self.task, self._data)
            trainer = Trainer(task, model, settings.batch_size, settings.seed, settings.clip_norm, settings.drop_last)
            worker = TimedWorker(endpoint.thread, stopwatch, vectors, trainer)
        story = cast.replica(self.settings, role, vectors, samples, incarnation).story()
        self._play_story(role, story, endpoint, worker)

    def _flat(self, model: nn.Module) -> FlatModule:
        return FlatModule(model, groups_of(model, self.settings.optimizer), rows=self.settings.mapped)

    def _layout(self) -> Layout:
        if not hasattr(self, "_known_layout"):
            self._known_layout = self._flat(self._model()).layout
        return self._known_layout

    def _slice(self, plan: Plan, shard: int) -> Slice:
        self._lengths[shard] = plan.assignments[shard].moving.size
        return cast.phantom_slice(plan, shard) if self.cluster.phantom else cast.torch_slice(plan, shard)

    def _plan_crashes(self) -> None:
        """Kill roles as they are about to send the message that their crash names."""
        due: dict[str, deque[int]] = {}
        for crash in self.cluster.crashes:
            due.setdefault(crash.role, deque()).append(crash.message)

        def strike(sender: str, _to: str, _message: Message) -> None:
            left = due.get(sender)
            if left and not self.network.endpoints[sender].ended:
                left[0] -= 1
                if not left[0]:
                    left.popleft()
                    self.kill(sender)

        if due:
            self.network.before_send = strike

    def kill(self, role: str) -> None:
        """End a role as kill -9 does; whoever started it tells the coordinator, which may not have heard of it yet."""
        if not self.network.endpoints[role].ended:
            self._kill(role)
            incarnation = self.network.endpoints[role].incarnation
            if (heir := self._succeeding.get(role)) is not None:
                self._tell_lost(heir.role, heir.incarnation)
                self._settle(role)
            elif not self._is_heard(self.network.endpoints[role]):
                self._tell_lost(role, incarnation)
            if role == roles.COORDINATOR and self._revives and incarnation < self.settings.restarts:
                self.clock.call_later(self.cluster.restart_seconds, self._revive, incarnation + 1)
            if roles.is_replica(role) and incarnation < self.settings.restarts:
                self.clock.call_later(self.cluster.restart_seconds, self._restart, role)

    def _is_heard(self, endpoint: VirtualEndpoint) -> bool:
        """Whether the coordinator has a link to a role, or will have before it hears of its end."""
        current = self.network.endpoints[roles.COORDINATOR].incarnation
        return roles.COORDINATOR in endpoint.last and endpoint.life_of(roles.COORDINATOR) == current

    def _tell_lost(self, role: str, incarnation: int) -> None:
        lost = events.Lost(f"{role} ended before it joined", incarnation)
        self.clock.call_later(0.0, lambda _: self.driver.tell(roles.COORDINATOR, role, lost), None)

    def _settle(self, standby: str) -> None:
        """A standby has become its shard, or never will: its own place may be taken."""
        del self._succeeding[standby]
        if (life := self._granted.get(standby, -1)) > self.network.endpoints[standby].incarnation:
            self.clock.call_later(self.cluster.restart_seconds, self._replace, Vacant(standby, life))

    def _kill(self, role: str) -> None:
        self.killed.append(role)
        if role == roles.COORDINATOR and self._revives:
            self.driver.remove(role)
        self._ended[role] = self.network.endpoints[role].incarnation
        self.network.crash(role)
        self.clock.call_later(0.0, self.driver.remove, role)

    def _restart(self, role: str) -> None:
        if not self._over:
            self._add_replica(roles.index_of(role), self.network.endpoints[role].incarnation + 1)
            self.driver.begin(role)

    def _fill(self, record: Vacant) -> None:
        """Begin a life of a shard that is to be; a life before it that is still there ends first."""
        self._granted[record.role] = record.incarnation
        if record.role in self._succeeding:
            return
        if not self.network.endpoints[record.role].closed:
            self._kill(record.role)
        self.clock.call_later(self.cluster.restart_seconds, self._replace, record)

    def _replace(self, record: Vacant) -> None:
        if not self._over and self._granted[record.role] == record.incarnation:
            add = self._add_shard if roles.kind(record.role) is roles.Kind.SHARD else self._add_standby
            add(roles.index_of(record.role), record.incarnation)
