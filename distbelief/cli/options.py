"""The options of each command, made from the fields of the Python API's dataclasses; one that does not belong is
refused with one that does.
"""

from __future__ import annotations

import dataclasses
import inspect
import itertools
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from distbelief.cli import words
from distbelief.cli.arguments import ALL, Argument, Heading, arguments_of, documents, read, refuse
from distbelief.cli.config import configured
from distbelief.core.optimizer import Optimizer, optim
from distbelief.core.settings import option
from distbelief.errors import UsageError
from distbelief.job import Job
from distbelief.places.cluster import launched
from distbelief.places.cluster.cluster import Cluster
from distbelief.places.cluster.slurm import is_allocated
from distbelief.places.compute_model import ComputeModel
from distbelief.places.processes.local import Local
from distbelief.places.processes.script import MODULE
from distbelief.strategies import STRATEGIES, Strategy, find
from distbelief.strategies.base import is_alone

if TYPE_CHECKING:
    from distbelief.places.simulated.simulated import Simulated


@dataclass(frozen=True)
class Stepping:
    """How the parameters are stepped."""

    optimizer: str = "sgd"
    """adadelta, adagrad, adam, adamax, adamw, lamb, lars, momentum, nadam, nesterov, radam, rmsprop or sgd."""
    lr: float | None = None
    """Learning rate; the optimizer's own where none is given."""
    weight_decay: float | None = None
    """Weight decay; the optimizer's own where none is given."""
    decay_exempt: bool = False
    """Leave biases and the parameters of normalisations out of the weight decay."""
    optimizer_options: tuple[str, ...] = ()
    """Other options of its class, such as eps=1e-8 or betas=0.9,0.95; of lars: trust=0.001, momentum=0.9, exempt=true,
    correction=false.
    """


@dataclass(frozen=True)
class Showing:
    """What is shown."""

    quiet: bool = False
    """Show nothing but, at the end, the run folder."""
    json: bool = False
    """Show what happens as lines of JSON; the last one is the result."""


@dataclass(frozen=True)
class Configuring:
    """Where options are from."""

    config: str = ""
    """A TOML file of options, such as replicas = 2; what stands on the command line goes before what the file has."""


@dataclass(frozen=True)
class Planned:
    """A plan in the place of a job."""

    dry_run: bool = False
    """With --hosts or --hostfile, only show who would be where; no host is asked."""


@dataclass(frozen=True)
class Padded:
    """Slower steps on real processes."""

    pad: str = "0s"
    """Least time of a step, such as 50ms; the rest is slept, so that more replicas than cores can be compared."""
    straggle: tuple[str, ...] = ()
    """1:4 makes replica 1 take 4 times as long; 5%x10 makes 5 % of the steps take 10 times as long."""


@dataclass(frozen=True)
class VirtualOptions:
    """The virtual cluster."""

    network: str = "latency=50us,bandwidth=10Gbit"
    """Latency, bandwidth and jitter (a fraction of the latency) of every link; local-latency and local-bandwidth of
    those inside a host (--hosts, or allreduce --per-host); reduce=10GB, how fast a gradient that arrives is added to
    another, where that is not the memory of --handling."""
    topology: str = ""
    """Switches and cables between hosts: tree:8x8, fat-tree:4, torus:4x4x4, dragonfly:2, slim-fly:5, or a file as
    Slurm's topology.conf. Replicas follow each other along its walk, each on a host of its own where --hosts or
    --per-host puts none together; shards are spread over switches."""
    compute: str = "lognormal:1ms:0.2"
    """Time of a step: 1ms, constant:1ms, exponential:1ms or lognormal:1ms:0.2."""
    handling: str = "message=6us,memory=26GB"
    """What a message costs who takes it; how fast bytes are read and written, in updates, sums and copies."""
    hosts: str = ""
    """Machines that roles share: cores=2 puts all on one with two cores, replicas=4 as many replicas on each, with
    shards spread over them; together=0.9 is the speed of a core while all of a host work; busy=1ms is what of a step
    needs a core, the rest of it is slept. Else each role has its own."""
    path: str = "auto"
    """Who makes the updates on one host (--hosts cores=N): served (the shards), direct (each replica, in memory that it
    shares with the shards, under their locks), or auto (direct where the job allows it)."""
    stragglers: tuple[str, ...] = ()
    """1:4 makes replica 1 take 4 times as long; 5%x10 makes 5 % of the steps take 10 times as long."""
    faults: tuple[str, ...] = ()
    """crash=1@500 kills replica 1 as it sends its 500th message, crash=shard0@500 shard 0, crash=coordinator@9 the
    coordinator; restart=2s lets them come back so late; leave=1@500+2s tells the host of replica 1 to go within 2 s, as
    that sends its 500th message; outage=2s+500ms@1/shard0 cuts replica 1 and shard 0 off from
    the others for 500 ms, from 2 s on; delay=1%x50ms delays 1 % of all messages."""
    phantom: bool = False
    """Compute nothing, move no bytes: only the time that passes, to which learning rates and clipping are nothing."""
    keep: bool = False
    """Leave a run folder with metrics, checkpoints and the model."""
    sweep: int | None = None
    """Run the job under so many seeds, from --seed on: the command that replays each that fails, and how the results
    spread. No run folder.
    """


Source = tuple[type, tuple[str, ...]]
"""A dataclass, and its fields that a command has no option for."""

HEADINGS = (
    Heading("first", "epochs iterations batch_size replicas optimizer lr out"),
    Heading("what is trained", "data_dir init_from portion_size seed precision device threads",
        "drop_last order data fixed_point weight_decay decay_exempt optimizer_options clip_norm"),
    Heading("how far", "target_accuracy target_loss budget evaluate_every", "tolerance"),
    Heading("who takes part", "shards partitions split hosts hostfile transport listen",
        "microbatches schedule chunks per_host on remote_shell interface topology tickets oversubscribe dry_run bind "
        "advertise insecure tls path leave_within"),
    Heading("how they train", "", "local_lr warm_start_steps staleness_scaling bucket_mb buffers overlap "
        "backup_portions deterministic"),
    Heading("the rate", "lr_schedule warmup_epochs lr_scaling base_batch", "lr_steps lr_gamma lr_power warmup"),
    Heading("faults", "restarts standby checkpoint_every resume faults",
        "on_death snapshot_every keep_checkpoints pad straggle"),
    Heading("time in simulation", "network compute handling stragglers phantom"),
    Heading("output", "quiet json config", "logs keep sweep"),
)  # fmt: skip
"""Headings of the help of train, launch and simulate; what no heading names stands under how they train."""
OWN_HEADING = "how they train"
WHEN = {
    "epochs": "when the test accuracy still rises at the end",
    "iterations": "when the loss still falls at the end",
    "batch_size": "when a step takes less than a millisecond (larger), or memory runs out (smaller)",
    "replicas": "to as many as there are free cores or GPUs; `distbelief plan` measures what pays",
    "optimizer": "to adagrad where replicas do not wait for each other, as in the paper",
    "lr": "when the loss is not finite or rises (smaller), or falls slowly (larger)",
    "out": "to find a run again by its name",
}
"""When a newcomer changes the first options."""


def sources(command: str, strategy: str) -> list[Source]:
    """List the dataclasses whose fields are the options of a command with a strategy."""
    kind = find(strategy)
    job = (
        "task",
        "strategy",
        *_hidden(kind),
        *(("evaluate_every", "target_accuracy", "target_loss", "data_dir") if command == "launch" else ()),
    )
    place: list[Source] = [(Padded, ())]
    if command == "simulate":
        place = [(VirtualOptions, _hidden(kind))]
    elif not is_alone(kind()):
        local = [field.name for field in dataclasses.fields(Local)]
        place = [(Local, ("compute", *_hidden(kind))), (Cluster, tuple(local)), (Planned, ()), *place]
    stepping: list[Source] = [(Stepping, ())] if _is_stepped(kind) else []
    return [(kind, ("optimizer",)), *stepping, (Job, job), (Configuring, ()), *place, (Showing, ())]


def _hidden(kind: type[Strategy]) -> tuple[str, ...]:
    """List the options that a strategy always refuses; of a device it has one, which may be named."""
    return tuple(name for name, why in kind.meaningless.items() if why and name != "device")


def arguments(command: str, strategy: str) -> list[Argument]:
    """List the options of a command with a strategy."""
    found = [one for kind, without in sources(command, strategy) for one in arguments_of(kind, without)]
    meanings = LAUNCHED if command == "launch" else {}
    return [one._replace(text=meanings.get(one.name, one.text)) for one in found]


def _is_stepped(kind: type[Strategy]) -> bool:
    """Whether a strategy's shards step with an optimizer."""
    return any(field.name == "optimizer" for field in dataclasses.fields(kind))


LAUNCHED = {
    "batch_size": "Samples in a minibatch of one replica; the script's own wins, where its batches() names one."
}
"""What options mean to `launch`, where that is not what they mean elsewhere."""


def parse(command: str, task: str, strategy: str, args: Sequence[str]) -> Options:
    """Read the options of a command.

    Raises:
        UsageError: an option that the command does not have, with the nearest that it has, or a value that is none.
        SystemExit: help was asked for, and shown.
    """
    known, kind = arguments(command, strategy), find(strategy)
    names = [one.option for one in known]
    prog = " ".join(word for word in ("distbelief", command, task, strategy) if word)
    why = {option(name): reason for name, reason in kind.meaningless.items() if reason}
    refuse(prog, args, names, lambda: _elsewhere(command, strategy), why)
    given = configured(args, known)
    meaning, *_ = (inspect.getdoc(kind) or "").split("\n\n")
    placed = {name for heading in HEADINGS for name in f"{heading.common} {heading.rare}".split()}
    rest = " ".join(one.name for one in known if one.name not in placed)
    headings = [one._replace(common=rest) if one.title == OWN_HEADING else one for one in HEADINGS]
    values = read(prog, meaning, known, given.words, headings, WHEN, given.places)
    values["replicas given"] = any(word.partition("=")[0] == "--replicas" for word in given.words)
    return Options(kind, values)


def _elsewhere(command: str, strategy: str) -> dict[str, str]:
    """The options that only other strategies or commands have, and which."""
    having: dict[str, list[str]] = {}
    for other in STRATEGIES:
        for one in arguments(command, other):
            having.setdefault(one.option, []).append(other)
    found = {name: f"strategy {' or '.join(others)}" for name, others in having.items() if strategy not in others}
    for other_command in ("train", "simulate", "launch"):
        for other in STRATEGIES:
            for one in arguments(other_command, other):
                found.setdefault(one.option, f"distbelief {other_command}")
    return found


_SEVERAL = re.compile(r"\w+=.*|[0-9.]+((:|%?x)[0-9.,:%x]+)?")
"""Values of the options that take several words: eps=1e-8, 1:4, 5%x10 or 30."""


def split_script(strategy: str, args: Sequence[str]) -> tuple[list[str], list[str]]:
    """The options of `launch`, and the script with its own arguments: it is the first word that is neither an option
    nor its value, or `-m` and the name of a module.

    >>> split_script("downpour", ["--replicas", "3", "--json", "train.py", "--replicas", "9"])
    (['--replicas', '3', '--json'], ['train.py', '--replicas', '9'])
    """
    known = {one.option: one for one in arguments("launch", strategy)}
    at = 0
    while at < len(args) and args[at].startswith("-") and args[at] != MODULE:
        name, given, _ = args[at].replace("_", "-").partition("=")
        at += 1
        if name == "--help":
            at += args[at : at + 1] == [ALL]
        elif name in known and known[name].several:
            at += sum(1 for _ in itertools.takewhile(lambda word: _SEVERAL.fullmatch(word), args[at:]))
        elif not given and name in known and not known[name].is_flag:
            at += 1
    return list(args[:at]), list(args[at:])


def until_word(args: Sequence[str], valued: Sequence[str]) -> tuple[list[str], list[str]]:
    """The options that come first, and the rest from the first word that is neither one nor the value of one.

    >>> until_word(["--device", "cpu", "--quiet", "mine.py", "--quiet"], ["--device"])
    (['--device', 'cpu', '--quiet'], ['mine.py', '--quiet'])
    """
    at = 0
    while at < len(args) and args[at].startswith("-") and args[at] != MODULE:
        at += 2 if args[at].replace("_", "-") in valued else 1
    return list(args[:at]), list(args[at:])


@dataclass(frozen=True)
class Options:
    """What was asked for."""

    kind: type[Strategy]
    values: Mapping[str, Any]

    def _of(self, kind: type, without: str = "optimizer") -> dict[str, Any]:
        return {
            field.name: self.values[field.name]
            for field in dataclasses.fields(kind)
            if field.name in self.values and field.name != without
        }

    @property
    def showing(self) -> Showing:
        """What is shown."""
        return Showing(**self._of(Showing))

    @property
    def virtual(self) -> VirtualOptions:
        """The virtual cluster."""
        return VirtualOptions(**self._of(VirtualOptions))

    def optimizer(self) -> Optimizer:
        """The optimizer.

        Raises:
            UsageError: no such one, or an option that is none.
        """
        asked = Stepping(**self._of(Stepping, without=""))
        options = words.optimizer_options(asked.optimizer_options)
        if asked.weight_decay is not None:
            options["weight_decay"] = asked.weight_decay
        for name, instead in (("name", "--optimizer"), ("lr", "--lr"), ("decay_exempt", "--decay-exempt")):
            if name in options:
                raise UsageError(f"--optimizer-options {name}: is an option of its own, {instead}")
        return optim(asked.optimizer, asked.lr, decay_exempt=asked.decay_exempt, **options)

    def job(self, task: str) -> Job:
        """The job.

        Raises:
            UsageError: an option of the optimizer or the strategy has a value that it cannot have.
        """
        stepped = {"optimizer": self.optimizer()} if _is_stepped(self.kind) else {}
        own = {name: value for name, value in self._of(Job).items() if name not in _hidden(self.kind)}
        return Job(task=task, strategy=self.kind(**stepped, **self._of(self.kind) | self._replicas()), **own)

    def _replicas(self) -> dict[str, int]:
        """On several hosts, as many replicas as their slots hold, where no other number was asked for."""
        if "hostfile" not in self.values or self.values["replicas given"] or "replicas" not in self.values:
            return {}
        place = self.place()
        if not isinstance(place, Cluster):
            return {}
        if not place.slots:
            bare = next(host.name for host in place.named if not host.slots)
            raise UsageError(f"how many replicas? Say with --replicas, or how many slots each host has: {bare}:4")
        partitions = self.values.get("partitions", 1)
        return {"replicas": max(1, place.slots // partitions)}

    @property
    def dry_run(self) -> bool:
        """Whether only who would be where is to be shown."""
        return bool(self.values.get("dry_run"))

    def place(self) -> Local:
        """The processes of this machine, or of several hosts where these are named; as slow as they are to be.

        Raises:
            UsageError: a compute model that is none.
        """
        padded = Padded(**self._of(Padded))
        slow = {"step": words.duration(padded.pad, "--pad"), **words.stragglers(padded.straggle, "--straggle")}
        compute = ComputeModel(**slow, spread="constant") if any(slow.values()) else None
        own, start = self._of(Cluster), launched.own()
        if start is not None and "hosts" not in own:
            raise UsageError(
                f"{start.launcher} has started this command {start.size} times, and {self.kind.name} is of one "
                f"process: start it once, without {start.launcher}"
            )
        if start or any(own.get(name) for name in ("hosts", "hostfile", "on")) or (own and is_allocated(os.environ)):
            cluster = Cluster(**own, compute=compute)
            cluster.attend()
            return cluster
        for name in (*(one.name for one in arguments_of(Cluster, documents(Local))), "dry_run"):
            if (value := self.values.get(name)) and value != getattr(Cluster, name, False):
                raise UsageError(f"{option(name)} {value}: is of several hosts; name them with --hosts or --hostfile")
        return Local(**self._of(Local), compute=compute)

    def simulated(self) -> Simulated:
        """The virtual cluster.

        Raises:
            UsageError: a word that is none.
        """
        from distbelief.places.simulated.handling import Handling
        from distbelief.places.simulated.simulated import Simulated
        from distbelief.places.simulated.virtual_cluster import Crash, LeavingHost
        from distbelief.transport.cluster_model import Hosts, NetworkModel, Outage

        virtual = self.virtual
        line, hosts = words.network(virtual.network), words.hosts(virtual.hosts)
        steps = {**words.compute(virtual.compute), **words.stragglers(virtual.stragglers)}
        faults = words.faults(virtual.faults)
        crashes, outages = tuple(Crash(*one) for one in faults.crashes), tuple(Outage(*one) for one in faults.outages)
        leaves = tuple(LeavingHost(*one) for one in faults.leaves)
        return Simulated(
            NetworkModel(**line, **faults.delays, outages=outages),
            ComputeModel(**steps),
            crashes,
            phantom=virtual.phantom,
            keep=virtual.keep,
            handling=Handling(**words.handling(virtual.handling)),
            hosts=Hosts(**hosts) if hosts else None,
            path=virtual.path,
            leaves=leaves,
            topology=virtual.topology,
            **faults.place,
        )
