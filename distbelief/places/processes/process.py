"""Process of a job: it plays one role, and reports its records and its end to the supervisor."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import importlib
import mmap
import os
import re
import select
import sys
import time
import traceback
from collections.abc import Callable, Collection
from multiprocessing.connection import Connection
from pathlib import Path
from typing import NoReturn

import msgspec
import torch
from torch import nn

from distbelief.core import records, roles
from distbelief.core.conversations import membership
from distbelief.core.effects import Arrival, Batch, Computed
from distbelief.core.records import Parted, Record
from distbelief.core.settings import Plan, Settings, read_strategy
from distbelief.errors import DataError, DistbeliefError, LayoutError, TrainingError, UsageError, limit
from distbelief.fabric.base import MEET_SECONDS
from distbelief.places import messages
from distbelief.places.channel import Channel
from distbelief.places.compute_model import Padding
from distbelief.places.processes.options import host_and_port, listen_at
from distbelief.places.processes.output import print_into
from distbelief.places.processes.script import file_of, name_of
from distbelief.places.processes.script import hint as script_hint
from distbelief.places.processes.settle import as_main, end_main, enter, name_process
from distbelief.places.processes.spec import Opening, Spec
from distbelief.record.journal import Journal
from distbelief.record.restore import CheckpointStore, load_weights
from distbelief.runtime import loop
from distbelief.runtime.clock import WallClock
from distbelief.runtime.direct import DirectEndpoint, OwnedShard, pushes_each, reads_only
from distbelief.runtime.driver import Driver
from distbelief.runtime.lasting import LastingHost
from distbelief.runtime.loading import text_of, worker_traceback
from distbelief.runtime.player import ACCOUNT_SECONDS, Answer, Compute, PlayedRole, Shown
from distbelief.runtime.script_story import Pump, ScriptStage
from distbelief.server.shard import Shard
from distbelief.server.slice import Slice
from distbelief.split.graph import SplitGraph
from distbelief.strategies import by_name, find
from distbelief.strategies.base import Strategy
from distbelief.strategies.cast import Cast
from distbelief.strategies.context import LoopContext, Memory, ProcessStage
from distbelief.strategies.partition import split_graph
from distbelief.tasks import Task, resolve
from distbelief.tasks.flat import FlatModule, layout_of
from distbelief.tasks.on_disk import build_on_disk, zeros_on_disk
from distbelief.tasks.worker import build_model, hint, placed
from distbelief.transport.base import Arena, NetworkEndpoint
from distbelief.transport.shared import Locks, SharedEndpoint
from distbelief.transport.tcp import TcpEndpoint
from distbelief.transport.tls import HANDSHAKE_SECONDS, TlsEndpoint

WORD_SECONDS = 1.0
"""Limit for the supervisor to report a role's death after the link to that role has ended."""


def main(role: str, incarnation: int, spec: bytes, connection: Connection) -> None:
    """Play an incarnation of a role; the process ends with status 0, or with 1 after it has reported the error."""
    channel = Channel(connection)
    try:
        _open(role, msgspec.msgpack.decode(spec, type=Opening))
        decoded = msgspec.msgpack.decode(spec, type=Spec, dec_hook=read_strategy)
        process = RoleProcess(role, incarnation, decoded, channel)
        try:
            process.play()
        finally:
            process.tell_bytes()
        channel.say(messages.Over())
    except DistbeliefError as error:
        whose = f"{role}: " if isinstance(error, TrainingError) and role not in str(error) else ""
        cause = error.__cause__ if isinstance(error, TrainingError) else None
        channel.say(messages.Failed(type(error).__name__, f"{whose}{error}", _traced(cause) if cause else ""))
        sys.exit(1)
    except SystemExit:
        raise
    except BaseException as error:
        told, remedy = f"{role} failed: {type(error).__name__}: {error}", limit(error)
        channel.say(
            messages.Failed(UsageError.__name__, f"{told}; {remedy}")
            if remedy
            else messages.Failed("", told, _traced(error))
        )
        sys.exit(1)


def _open(role: str, opening: Opening) -> None:
    """Take over the surroundings of the supervisor, redirect the output and import the strategy."""
    enter(role, opening)
    if opening.output >= 0:
        output = os.open(f"/proc/{opening.supervisor}/fd/{opening.output}", os.O_WRONLY)
        print_into(output)
        os.close(output)
    find(opening.strategy)


def _traced(error: BaseException, script: str = "") -> str:
    """Return the traceback of an error, without the frames that called the user's script."""
    told = traceback.TracebackException.from_exception(error)
    begin = next((i for i, frame in enumerate(told.stack) if frame.filename == script), 0)
    told.stack = traceback.StackSummary.from_list(list(told.stack)[begin:])
    return "".join(told.format()).rstrip()


def _place_in(script: str, named: str, error: BaseException) -> str:
    """Return the place of an error in a user's script: the name of the script, and the line."""
    lines = [frame.lineno for frame in traceback.extract_tb(error.__traceback__) if frame.filename == script]
    lines += re.findall(rf'^  File "{re.escape(script)}", line (\d+)', worker_traceback(error), re.MULTILINE)
    return f"{named}, line {lines[-1]}" if lines else named


def _watched(settings: Settings) -> set[str]:
    """Return the roles that the supervisor starts, and whose deaths it reports; guests are not among them."""
    return {*roles.replicas(settings.mesh), *roles.servers(settings.shards, 1), roles.EVALUATOR}


class _Ends:
    """Ends of links to the coordinator, held back until the supervisor has reported why a watched role died."""

    def __init__(self, endpoint: NetworkEndpoint, clock: WallClock, watched: Collection[str]) -> None:
        self._deliver, self._clock, self._watched = endpoint.deliver, clock, watched
        self._held: dict[str, Arrival] = {}
        endpoint.deliver, endpoint.deliver_end = self._take, self._hold

    def _take(self, arrival: Arrival) -> None:
        if arrival.sender in self._held:
            self._deliver(self._held.pop(arrival.sender))
        self._deliver(arrival)

    def _hold(self, lost: Arrival) -> None:
        if lost.sender not in self._watched:
            self._deliver(lost)
            return
        self._held[lost.sender] = lost
        self._clock.call_later(WORD_SECONDS, self._release, lost)

    def _release(self, lost: Arrival) -> None:
        if self._held.get(lost.sender) is lost:
            self._deliver(self._held.pop(lost.sender))

    def explain(self, died: messages.Died) -> None:
        """Drop the end of a link that is held back: the coordinator is about to get this report instead."""
        held = self._held.get(died.role)
        if held is not None and not died.left and held.event.incarnation <= died.incarnation:  # type: ignore[union-attr]  # it is a `Lost`
            del self._held[died.role]


class RoleProcess:
    """Process that plays one role, with a channel to the supervisor and a driver that `drive` makes."""

    player: Shown | None = None

    def __init__(
        self, role: str, incarnation: int, spec: Spec, channel: Channel, drive: Callable[..., Driver] = Driver
    ) -> None:
        # paths are relative to the folder of the command, and a script may change the folder
        run, begin = (path and os.path.abspath(path) for path in (spec.run, spec.init_from))
        spec = msgspec.structs.replace(spec, run=run, init_from=begin)
        self.role, self.incarnation, self.spec, self.channel = role, incarnation, spec, channel
        self.endpoint = self._endpoint()
        self.traffic = [self.endpoint.traffic]
        """Byte counts of all endpoints of its role."""
        self.closing = contextlib.ExitStack()
        """Closes what the role has opened besides its endpoint, in case the process outlives the role."""
        self._ends: _Ends | None = None
        self._in_memory = ""
        """Sentence for the record of the split, if the model was built in memory."""
        self.clock, self._worked = WallClock(self.endpoint), time.process_time()  # a new process has worked on imports
        self.clock.call_later(ACCOUNT_SECONDS, self._give_account, None)
        self.driver = drive(self.clock, self._note, lasts=spec.settings.restarts > 0)
        if role != roles.SINGLE:
            self.endpoint.watch(channel.connection.fileno(), self._hear)

    @property
    def strategy(self) -> Strategy:
        """Return the strategy of its job."""
        return by_name(self.spec.strategy)

    def play(self) -> None:
        """Play the role to its end."""
        if self.role == roles.COORDINATOR:
            self._play_coordinator()
        elif self.role == roles.SINGLE:
            self._play_single()
        elif roles.is_replica(self.role) and self.spec.script:
            self._run_script()
        elif roles.is_replica(self.role) or self.role == roles.EVALUATOR:
            self._play_story()
        else:
            self._play_server()

    def _endpoint(self, patience: float = HANDSHAKE_SECONDS) -> NetworkEndpoint:
        """Return a new endpoint of the role; by TLS, it waits `patience` seconds for the other end as it connects."""
        spec = self.spec
        if spec.transport == "shared":
            direct = spec.direct and roles.is_replica(self.role)
            return (DirectEndpoint if direct else SharedEndpoint)(self.role, spec.job, self.incarnation)
        if spec.identity:
            return TlsEndpoint(self.role, spec.job, self.incarnation, identity=spec.identity, patience=patience)
        return TcpEndpoint(self.role, spec.job, self.incarnation, insecure=spec.insecure)

    def _listen(self) -> str:
        again = self.spec.listen if self.role == roles.COORDINATOR else ""
        if self.spec.transport == "shared":
            return self.endpoint.listen(again)
        where = listen_at(self.spec.bind, self.role)
        if again:  # a later incarnation of the coordinator keeps its port
            where = f"{where.rpartition(':')[0]}:{again.rpartition(':')[2]}"
        try:
            return self.endpoint.listen(where, self.spec.advertise)
        except UsageError as error:
            if isinstance(error.__cause__, OSError) and not where.endswith(":0"):
                ports = (
                    "the coordinator listens at the port that was named, or after that of --listen; shards at the next"
                )
                error.args = (f"{self.role} {error} ({ports})",)
            raise

    def _another(self) -> tuple[NetworkEndpoint, str]:
        """Open another endpoint, for links between hosts; return it and its address."""
        endpoint = self._endpoint(MEET_SECONDS)
        host, _ = host_and_port(self.spec.bind)
        where = listen_at(f"[{host}]" if ":" in host else host, self.role)
        self.traffic.append(endpoint.traffic)
        return endpoint, endpoint.listen(where, self.spec.advertise)

    def _meet(self) -> None:
        """Wait until the supervisor sends the address of the coordinator."""
        while True:
            word = self.channel.hear()
            if isinstance(word, messages.Listening):
                self.driver.coordinator = word.address
                return
            if word is None or isinstance(word, messages.Interrupt):
                raise SystemExit(0)

    def _tell(self, record: Record) -> None:
        self._note(time.monotonic(), self.role, record)

    def _note(self, moment: float, role: str, record: Record) -> None:
        self.channel.say(messages.Noted(moment, role, record))  # type: ignore[arg-type]  # any Record; `Noted` lists all kinds

    def tell_bytes(self) -> None:
        """Report the bytes that its endpoints have counted since the last report."""
        for traffic in self.traffic:
            if (counted := traffic.tell(self.role)) is not None:
                self._tell(counted)

    def _give_account(self, _: None) -> None:
        self.tell_bytes()
        if isinstance(self.player, Shard | OwnedShard):
            self._tell(msgspec.structs.replace(self.player.account(), busy=time.process_time() - self._worked))
        self.clock.call_later(ACCOUNT_SECONDS, self._give_account, None)

    # roles that are state machines

    def _play_coordinator(self) -> None:
        spec = self.spec
        self.player = coordinator = self._cast.coordinator(spec.start)
        with contextlib.ExitStack() as opened:
            files = [
                opened.enter_context(open(f"/proc/{spec.supervisor}/fd/{one}", "r+b", buffering=0))
                for one in spec.journal
            ]
            memory, watched = self._cast.players.memory, _watched(spec.settings)
            host = LastingHost(self.endpoint, coordinator, memory, Journal(*files), watched) if files else None
            self.driver.add_machine(self.role, coordinator, self.endpoint, CheckpointStore(spec.run), host=host)
            self._ends = _Ends(self.endpoint, self.clock, watched)
            if self.incarnation and host is not None:
                self.driver.replay(self.role, spec.known)
            self.channel.say(messages.Listening(self._listen()))
            self.driver.run()

    def _hear(self) -> None:
        if not self.channel.hear_all(self._take_word):
            os._exit(1)

    def _take_word(self, word: messages.ChannelMessage) -> None:
        if isinstance(word, messages.Interrupt):
            self.driver.tell(self.role, roles.SUPERVISOR, word.event_for(self.role))
        elif isinstance(word, messages.Died) and word.role == roles.COORDINATOR:
            self.driver.end_wait(self.role)
        elif isinstance(word, messages.Died):
            if self._ends is not None:
                self._ends.explain(word)
            self.driver.tell(self.role, word.role, word.event)
        elif isinstance(word, messages.Explain) and self.player is not None:
            self._note(time.monotonic(), roles.SUPERVISOR, records.Note(self.player.waits()))
        elif isinstance(word, messages.Ask):
            self.tell_bytes()
            self.channel.say(self._standing())

    def _standing(self) -> messages.Standing:
        since = self.driver.waiting_since(self.role)
        machine = not (roles.is_replica(self.role) or self.role == roles.EVALUATOR)
        waits = self.player.waits() if self.player is not None and (machine or since is not None) else ""
        if isinstance(self.endpoint, DirectEndpoint):
            waits = self.endpoint.waits() or waits
        if (away := self.driver.away_since(self.role)) is not None:
            gone = f"the coordinator has been away for {time.monotonic() - away:.1f} s, and will be restarted"
            waits = f"{waits}; {gone}".removeprefix("; ")
        facts = self.player.standing() if self.player is not None else {}
        waited = None if since is None else time.monotonic() - since
        return messages.Standing(
            self.role, "serving" if machine else "busy" if since is None else "waiting", waits, waited, facts
        )

    def _play_server(self) -> None:
        """Play a shard, or a standby that may become its shard."""
        index = roles.index_of(self.role)
        if roles.kind(self.role) is roles.Kind.STANDBY:
            self.player = standby = self._cast.servers.standby(index, self._cast.slice, self.incarnation)
            self.driver.add_machine(self.role, standby, self.endpoint, become=self._become)
        else:
            shard = self._shard(index)
            self.player = shard
            self.driver.add_machine(self.role, shard, self.endpoint, CheckpointStore(self.spec.run))
        address = self._listen()
        self._meet()
        self.driver.link(self.role)
        self.driver.send(self.role, roles.COORDINATOR, membership.Here(self.incarnation, address))
        self.driver.run()

    def _become(self, role: str, incarnation: int, shard: Shard) -> None:
        """Continue as the shard that a standby has become."""
        self.role, self.incarnation, self.player = role, incarnation, shard
        self.spec = msgspec.structs.replace(self.spec, identity=self.spec.successor)
        name_process(role)
        self.endpoint = self.clock.endpoint = self._endpoint()
        self.traffic.append(self.endpoint.traffic)
        self.endpoint.watch(self.channel.connection.fileno(), self._hear)
        self.driver.add_machine(role, shard, self.endpoint, CheckpointStore(self.spec.run))
        address = self._listen()
        self.driver.link(role)
        self.driver.send(role, roles.COORDINATOR, membership.Here(incarnation, address))

    def _shard(self, index: int) -> Shard | OwnedShard:
        """Return a shard's state machine; on the direct path its state is in memory that replicas update."""
        make = self._cast.servers.shard
        if not self.spec.direct:
            return make(index, self._slice, self.incarnation)
        assert self._common is not None
        return OwnedShard(lambda held: make(index, held, self.incarnation), self._common, self._locks())

    def _locks(self) -> Locks:
        return Locks(self._descriptor(self.spec.memory[0]))

    def _slice(self, plan: Plan, shard: int) -> Slice:
        if self._memory is not None:
            assert isinstance(self.endpoint, SharedEndpoint)
            self.endpoint.finds = roles.is_replica
        return self._cast.slice(plan, shard, self._memory)

    def _play_single(self) -> None:
        spec, task = self.spec, self._cast.task
        told: list[str] = []
        poll = select.poll()
        poll.register(self.channel.connection.fileno(), select.POLLIN)

        def take_word(word: messages.ChannelMessage) -> None:
            if isinstance(word, messages.Interrupt):
                told.append(word.reason)
            elif isinstance(word, messages.Ask):
                self.channel.say(messages.Standing(self.role, "busy", "", None, {}))

        def stopped() -> str | None:
            if poll.poll(0) and not self.channel.hear_all(take_word):
                os._exit(1)
            return told[0] if told else None

        slowed = self._slowed()
        loop = self.strategy.loop(
            LoopContext(
                task,
                self._model(self.role),
                spec.settings,
                lambda record: self._note(time.monotonic(), roles.SINGLE, record),
                stopped,
                spec.run,
                spec.start,
                timed=lambda steps: steps._replace(compute=lambda batch: slowed(steps.compute(batch))),
            )
        )
        self.channel.say(messages.Listening(""))
        loop.run()

    # roles that are generators

    def _play_story(self) -> None:
        """Play a replica, a partition of one, or the evaluator."""
        split = self.spec.settings.partitions > 1
        if roles.is_replica(self.role):
            part = self._cast.replica(self.role, self.incarnation, self._stage())
            if split:
                self._tell(records.PartBuilt(self.role, len(roles.replicas(self.spec.settings.mesh))))
        else:
            if split:  # the model may be larger than the memory of one process
                self.endpoint.zeros = zeros_on_disk
            part = self._cast.evaluator(self.incarnation, self._stage())
        self.player, store = part.player, CheckpointStore(self.spec.run)
        self.driver.add_story(self.role, part.player.story(), self.endpoint, part.worker, store)
        self._meet()
        self.driver.link(self.role)
        self.driver.run()

    def _reaching(self, part: PlayedRole, flat: FlatModule | None) -> PlayedRole:
        """Return a replica's part. On the direct path it reaches the shards in memory, where its model may compute.

        A script's model is a copy of that memory, since the script keeps its model and may write to it.
        """
        endpoint, attach = self.endpoint, part.worker.attach
        if not isinstance(endpoint, DirectEndpoint):
            return part
        make, memory = self._cast.servers.shard, self._common
        assert memory is not None

        def reach(plan: Plan, arena: Arena) -> None:
            attach(plan, arena)
            if plan.models > 1:  # several models can only be updated by the shards
                if self.spec.direct_asked:
                    raise UsageError(
                        "--path direct: the script has several models, whose updates the shards make; leave it off"
                    )
                return
            endpoint.share(plan, memory, self._locks(), lambda index, held: make(index, held, 0))
            if flat is None or flat.device.type != "cpu" or not (flat.owned or flat.only_reads):
                return
            if reads_only(plan.settings, plan.layout):
                lies = endpoint.adds and pushes_each(plan.settings)
                buffers, landed = endpoint.compute_there(flat.lying if lies else None)
                flat.bind(arena.gradients, buffers, landed, lies, remedy="" if flat.owned else "--path served")

        return part._replace(worker=dataclasses.replace(part.worker, attach=reach))

    @functools.cached_property
    def _cast(self) -> Cast:
        spec = self.spec
        return Cast(
            self.strategy,
            spec.settings,
            functools.partial(resolve, spec.task, spec.data_dir),
            self._model,
            self._graph,
            spec.evaluator,
        )

    def _stage(self) -> ProcessStage:
        spec = self.spec
        return ProcessStage(
            self._memory,
            functools.partial(self._share, spec.crossings) if spec.crossings >= 0 else None,
            self._timed,
            self._works(),
            device=self._device() if roles.is_replica(self.role) else None,
            reach=self._reaching,
            listen=self._listen,
            count=self.traffic.append,
            at_end=self.closing.callback,
            transport=spec.transport,
            encrypted=spec.identity is not None,
            advertise=spec.advertise,
            descriptor=lambda: self._descriptor(spec.memory[roles.partition_of(self.role)]),
            open_endpoint=self._another,
        )

    @property
    def _memory(self) -> Memory | None:
        """Return the memory that processes share if replicas compute on it.

        Scripts, which keep their own model, and devices, which have their own memory, get the parameters in messages.
        """
        spec = self.spec
        sent = self._cast.players.servers is not None and bool(spec.script or spec.device != "cpu")
        return None if spec.direct or sent else self._common

    @property
    def _common(self) -> Memory | None:
        """Return the shared memory of the job, if it has any."""
        return functools.partial(self._share, self.spec.memory[0]) if self.spec.memory else None

    def _descriptor(self, descriptor: int) -> int:
        """Open memory of the supervisor by its descriptor there."""
        return os.open(f"/proc/{self.spec.supervisor}/fd/{descriptor}", os.O_RDWR)

    def _share(self, memory: int, length: int) -> torch.Tensor:
        """Return the first `length` bytes of memory of the supervisor.

        The descriptor stays open: when a process closes any descriptor of a file, it loses its locks on that file.
        """
        descriptor = self._descriptor(memory)
        if os.fstat(descriptor).st_size < length:
            os.ftruncate(descriptor, length)
        return torch.frombuffer(mmap.mmap(descriptor, max(length, 1)), dtype=torch.uint8)[:length]

    def _padding(self) -> Padding | None:
        spec, number = self.spec, max(0, roles.index_of(self.role))
        return Padding(spec.compute, number, spec.settings.seed) if spec.compute else None

    def _slowed(self) -> Callable[[Computed], Computed]:
        """Return a function that sleeps after a step as the compute model demands, and adds the time to the step."""
        padding = self._padding()

        def sleep(computed: Computed) -> Computed:
            if padding is None:
                return computed
            rest = padding.rest(computed.seconds)
            time.sleep(rest)
            return msgspec.structs.replace(computed, seconds=computed.seconds + rest)

        return sleep

    def _works(self) -> Callable[[float, bool, Callable[[bool], None]], bool]:
        """Return a function that sleeps before a partition computes a share of a step, as the compute model demands.

        It deducts the time that the partition has computed since the last sleep.
        """
        padding, worked = self._padding(), 0.0

        def work(share: float, begins: bool, _: Callable[[bool], None]) -> bool:
            nonlocal worked
            if padding is not None:
                time.sleep(padding.rest(time.thread_time() - worked, share, begins))
                worked = time.thread_time()
            return True

        return work

    def _timed(self, compute: Compute) -> Compute:
        """Return a step that sleeps as the compute model demands; a pump serves the links meanwhile if they need it."""
        slowed, pump = self._slowed(), self.pump()

        def step(batch: Batch, answer: Answer) -> Computed:
            with contextlib.nullcontext() if pump is None else pump.running():
                computed = compute(batch, answer)
                assert computed is not None
                return slowed(computed)

        return step

    @property
    def _number(self) -> int:
        """Return this process's number among those that compute gradients; devices are assigned by it in turn."""
        return self.spec.settings.mesh.number(max(0, roles.index_of(self.role)), roles.partition_of(self.role))

    def _device(self) -> torch.device:
        """Return the device of this process, and make it torch's current one: `device="cuda"` in a script means it."""
        device = placed(self.spec.device, self._number)
        if device.type == "cuda":
            torch.cuda.set_device(device)
        return device

    def _model(self, role: str) -> nn.Module:
        """Make the initial model of a role: on disk if it may be larger than the memory of one process."""
        settings, task = self.spec.settings, self._cast.task
        if role == roles.EVALUATOR:  # an evaluator fetches the parameters that it measures
            split = settings.partitions > 1
            return build_on_disk(task, settings.seed).model if split else build_model(task, settings.seed, "cpu")
        self._device()
        if settings.partitions > 1:
            built = build_on_disk(task, settings.seed, self._fill)
            self._in_memory = built.told
            return built.model
        model = build_model(task, settings.seed, self.spec.device, self._number)
        self._fill(model)
        return model

    def _graph(self, task: Task, model: nn.Module) -> SplitGraph:
        """Split the model; the first process of the first replica reports the split."""

        def tell(parted: Parted) -> None:
            self._tell(msgspec.structs.replace(parted, told=parted.told + self._in_memory))

        first = roles.is_replica(self.role) and roles.is_lead(self.role) and not roles.index_of(self.role)
        return split_graph(task, model, self.spec.settings, tell if first else None)

    def pump(self) -> Pump | None:
        """Return a thread that serves the links while a step computes, if a prefetch over a network needs it."""
        needed = self.spec.transport == "tcp" and self.spec.settings.strategy.pushing.prefetch
        return Pump(self.endpoint) if needed else None

    def _run_script(self) -> None:
        """Run the user's own script, which joins this replica."""
        self._meet()
        torch.manual_seed(self.spec.settings.seed)
        loop.current = self.scripted()
        script = file_of(self.spec.script)
        as_main(self.spec.script, self.role)
        try:
            self._run_main(script)
            loop.current.leave()
            if not loop.current.joined:
                raise UsageError(
                    f"{self.role}: {script} ended without taking part: it must call replica = distbelief.join(),"
                    " replica.optimizer(model), and go through replica.batches(dataset)"
                )
            self.endpoint.close()
        finally:
            end_main()

    def scripted(self) -> loop.Replica:
        """Return this replica in the form that the user's own loop drives."""
        spec, device, padding = self.spec, self._device(), self._padding()
        stage = ScriptStage(
            self.driver,
            self.endpoint,
            functools.partial(self._cast.scripted, self.role, self.incarnation, self._stage()),
            spec.settings,
            device,
            self.pump(),
            padding.rest if padding else None,
            CheckpointStore(spec.run),
            self._fill,
            self._tell,
        )
        return loop.Replica(self.role, stage)

    def _fill(self, model: nn.Module) -> None:
        """Load the initial weights of the job into a model, if it names any."""
        if self.spec.init_from:
            model.load_state_dict(load_weights(self.spec.init_from, layout_of(model)))

    def _run_main(self, script: str) -> None:
        named, main = name_of(self.spec.script), sys.modules["__main__"]
        try:
            if main.__package__:
                importlib.import_module(main.__package__)  # a package is imported before its modules, as with python -m
            exec(compile(Path(script).read_bytes(), script, "exec"), vars(main))
        except SystemExit as end:
            if end.code not in (None, 0):
                self._fail(TrainingError.__name__, f"{named} ended itself with sys.exit({end.code!r})")
        except (UsageError, DataError, LayoutError, TrainingError) as error:
            told = text_of(error).removeprefix(f"{self.role}: ")
            self._fail(type(error).__name__, f"{_place_in(script, named, error)}: {told}")
        except DistbeliefError:
            raise
        except BaseException as error:
            what = ": ".join(word for word in (type(error).__name__, text_of(error)) if word) + hint(error)
            what += script_hint(self.spec.script, error) + (loop.current.hint if loop.current is not None else "")
            where = _place_in(script, named, error)
            self._fail(TrainingError.__name__, f"{where}{',' * (where != named)} raised {what}", _traced(error, script))

    def _fail(self, kind: str, told: str, trace: str = "") -> NoReturn:
        """Report the error of the user's script, and end this process."""
        done = loop.current is not None and loop.current.over
        self.channel.say(messages.Failed(kind, f"{self.role}: {told}", trace, done))
        sys.exit(1)
