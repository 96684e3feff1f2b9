"""The options of `train`, `launch` and `simulate`, made of the fields of the dataclasses of the Python API."""

from __future__ import annotations

import dataclasses
import inspect
import itertools
import os
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from distbelief.cli import words
from distbelief.cli.arguments import ALL, Argument, Heading, arguments_of, configured, documents, read, refuse
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
    """Options of the optimizer."""

    optimizer: str = "sgd"
    """adadelta, adagrad, adam, adamax, adamw, asgd, lamb, lars, momentum, nadam, nesterov, radam, rmsprop or sgd."""
    lr: float | None = None
    """Learning rate; without it, the default of the optimizer."""
    weight_decay: float | None = None
    """Weight decay; without it, the default of the optimizer."""
    decay_exempt: bool = False
    """Leave biases and the parameters of normalisations out of the weight decay."""
    optimizer_options: tuple[str, ...] = ()
    """Other options of the optimizer, such as eps=1e-8 or betas=0.9,0.95; lars has trust=0.001, momentum=0.9,
    exempt=true and correction=false."""


@dataclass(frozen=True)
class LocalStepping:
    """Options of the optimizer of local steps, but for its rate."""

    local_optimizer: str = ""
    """Optimizer with which each replica steps its own parameters for --push-every minibatches: one of those of
    --optimizer. A push is then the change that these steps made, which the shards step by with --optimizer: any of
    those; average, which is sgd at rate 1; or delayed-nesterov, where replicas do not wait for each other."""
    local_optimizer_options: tuple[str, ...] = ()
    """Options of --local-optimizer, such as betas=0.9,0.95 or weight_decay=0.1."""


@dataclass(frozen=True)
class Showing:
    """Options of the output."""

    quiet: bool = False
    """Show only the run folder, at the end."""
    json: bool = False
    """Show events as lines of JSON; the last line is the result."""
    metrics: str = ""
    """PORT, or HOST:PORT, at which Prometheus reads the metrics of the job; on any network but loopback by TLS, with a
    certificate of the authority in the run folder. /health says whether the job runs."""
    track: str = ""
    """Tool that shows the job as one run: mlflow, mlflow:URI, wandb, aim or aim:REPOSITORY, each with its package of
    that name; or a sink of another package."""
    page: int | bool = False
    """Show the job in a browser too: at this port of this machine, or at one that is free. The page ends a minute after
    the job."""


@dataclass(frozen=True)
class Configuring:
    """Option that names a file of options."""

    config: str = ""
    """TOML file of options, such as replicas = 2; the command line takes precedence."""


@dataclass(frozen=True)
class Planned:
    """Option that shows a job instead of running it."""

    dry_run: bool = False
    """With --hosts or --hostfile, only show the host of each role, without contacting any."""


@dataclass(frozen=True)
class Padded:
    """Options that slow down the steps of real processes."""

    pad: str = "0s"
    """Least time of a step, such as 50ms. Steps that are faster sleep, so that more replicas than cores can be
    compared."""
    straggle: tuple[str, ...] = ()
    """1:4 makes replica 1 take 4 times as long; 5%x10 makes 5 % of the steps take 10 times as long."""


@dataclass(frozen=True)
class VirtualOptions:
    """Options of the virtual cluster."""

    network: str = "latency=50us,bandwidth=10Gbit"
    """Latency, bandwidth and jitter (a fraction of the latency) of every link. local-latency and local-bandwidth are
    those inside a host (--hosts, or allreduce --per-host). reduce=10GB is the speed at which gradients are added, if it
    differs from the memory of --handling."""
    topology: str = ""
    """Switches and cables between hosts: tree:8x8, fat-tree:4, torus:4x4x4, dragonfly:2, slim-fly:5, or a file such as
    Slurm's topology.conf. Each replica has a host unless --hosts or --per-host puts several together; consecutive
    replicas are neighbours, and shards are spread over the switches."""
    compute: str = "lognormal:1ms:0.2"
    """Time of a step: 1ms, constant:1ms, exponential:1ms or lognormal:1ms:0.2."""
    handling: str = "message=6us,memory=26GB"
    """Time that a role takes for each message it receives, and the speed at which it reads and writes memory."""
    hosts: str = ""
    """Machines that roles share; by default each role has its own. cores=2 puts all roles on one machine with two
    cores. replicas=4 puts four replicas on each machine, and spreads the shards. together=0.9 is the speed of a core
    while all cores of its machine work. busy=1ms is the part of a step that needs a core; the rest sleeps."""
    path: str = "auto"
    """Roles that make the updates on one host (--hosts cores=N): served (the shards), direct (the replicas, in memory
    shared with the shards, under their locks), or auto (direct if the job allows it)."""
    stragglers: tuple[str, ...] = ()
    """1:4 makes replica 1 take 4 times as long; 5%x10 makes 5 % of the steps take 10 times as long."""
    faults: tuple[str, ...] = ()
    """crash=1@500 kills replica 1 as it sends its 500th message; crash=shard0@500 and crash=coordinator@9 kill other
    roles. restart=2s is the time until they come back. leave=1@500+2s tells the host of replica 1 to leave within 2 s.
    outage=2s+500ms@1/shard0 cuts off replica 1 and shard 0 from the others at 2 s, for 500 ms. delay=1%x50ms delays 1 %
    of all messages."""
    phantom: bool = False
    """Compute nothing and move no bytes; only time passes. Learning rates and clipping have no effect."""
    keep: bool = False
    """Leave a run folder with metrics, checkpoints and the model."""
    sweep: int | None = None
    """Run the job under so many seeds, from --seed on, without run folders. Show the spread of the results, and the
    command that replays each failing seed."""


OPTIMIZERS = ("optimizer", "local_optimizer")
"""Options of strategies that are an optimizer: the command line has a name, a rate and options for each."""
Source = tuple[type, tuple[str, ...]]
"""A dataclass, and those of its fields that are not options of a command."""

HEADINGS = (
    Heading("first", "epochs iterations batch_size replicas optimizer lr out"),
    Heading("what is trained", "data_dir init_from portion_size seed precision device threads",
        "drop_last order data fixed_point weight_decay decay_exempt optimizer_options clip_norm"),
    Heading("how far", "target_accuracy target_loss budget evaluate_every", "tolerance"),
    Heading("who takes part", "shards partitions split hosts hostfile transport listen",
        "microbatches schedule chunks per_host on remote_shell interface topology tickets oversubscribe dry_run bind "
        "advertise insecure tls path leave_within"),
    Heading("how they train", "", "local_lr local_optimizer_options push_weight stagger stagger_delay stagger_mix "
        "warm_start_steps staleness_scaling bucket_mb buffers overlap backup_portions deterministic"),
    Heading("the rate", "lr_schedule warmup_epochs lr_scaling base_batch", "lr_steps lr_gamma lr_power warmup"),
    Heading("faults", "restarts standby checkpoint_every resume faults",
        "on_death snapshot_every keep_checkpoints pad straggle"),
    Heading("time in simulation", "network compute stragglers phantom", "handling"),
    Heading("output", "quiet json config page", "metrics track logs keep sweep"),
)  # fmt: skip
"""Headings of the help; options that no heading names go under "how they train"."""
OWN_HEADING = "how they train"
WHEN = {
    "epochs": "when the test accuracy still rises at the end",
    "iterations": "when the loss still falls at the end",
    "batch_size": "when a step takes less than a millisecond (larger), or memory runs out (smaller)",
    "replicas": "to the number of free cores or GPUs; `distbelief plan` measures what pays",
    "optimizer": "to adagrad if replicas do not wait for each other, as in the paper",
    "lr": "when the loss is not finite or rises (smaller), or falls slowly (larger)",
    "out": "to find a run again by its name",
}
"""Advice for newcomers: when to change the first options."""


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
    showing: Source = (Showing, ("metrics", "track", "page") if command == "simulate" else ())
    if command == "simulate":
        place = [(VirtualOptions, _hidden(kind))]
    elif not is_alone(kind()):
        local = [field.name for field in dataclasses.fields(Local)]
        place = [(Local, ("compute", *_hidden(kind))), (Cluster, tuple(local)), (Planned, ()), *place]
    stepping: list[Source] = [(Stepping, ())] if _has(kind, "optimizer") else []
    stepping += [(LocalStepping, ())] if _has(kind, "local_optimizer") else []
    return [(kind, OPTIMIZERS), *stepping, (Job, job), (Configuring, ()), *place, showing]


def _hidden(kind: type[Strategy]) -> tuple[str, ...]:
    """List the options that a strategy always refuses, except --device, of which one value is allowed."""
    return tuple(name for name, why in kind.meaningless.items() if why and name != "device")


def arguments(command: str, strategy: str) -> list[Argument]:
    """List the options of a command with a strategy."""
    known = [argument for kind, without in sources(command, strategy) for argument in arguments_of(kind, without)]
    meanings = LAUNCHED if command == "launch" else {}
    return [argument._replace(text=meanings.get(argument.name, argument.text)) for argument in known]


def _has(kind: type[Strategy], name: str) -> bool:
    return any(field.name == name for field in dataclasses.fields(kind))


LAUNCHED = {"batch_size": "Samples in a minibatch of one replica, unless the script's batches() names another number."}
"""Texts of options that mean something else to `launch`."""


def parse(command: str, task: str, strategy: str, args: Sequence[str]) -> Options:
    """Read the options of a command; raise as `read` and `refuse`."""
    known, kind = arguments(command, strategy), find(strategy)
    names = [argument.option for argument in known]
    prog = " ".join(word for word in ("distbelief", command, task, strategy) if word)
    why = {option(name): reason for name, reason in kind.meaningless.items() if reason}
    refuse(prog, args, names, lambda: _elsewhere(command, strategy), why)
    all_words = configured(args, known)
    meaning, *_ = (inspect.getdoc(kind) or "").split("\n\n")
    placed = {name for heading in HEADINGS for name in f"{heading.common} {heading.rare}".split()}
    rest = " ".join(argument.name for argument in known if argument.name not in placed)
    headings = [heading._replace(common=rest) if heading.title == OWN_HEADING else heading for heading in HEADINGS]
    values = read(prog, meaning, known, all_words.words, headings, WHEN, all_words.places)
    values["replicas given"] = any(word.partition("=")[0] == "--replicas" for word in all_words.words)
    return Options(kind, values)


def _elsewhere(command: str, strategy: str) -> dict[str, str]:
    """Return the options of other strategies and commands, each with its owner."""
    having: dict[str, list[str]] = {}
    for other in STRATEGIES:
        for argument in arguments(command, other):
            having.setdefault(argument.option, []).append(other)
    owners = {name: f"strategy {' or '.join(others)}" for name, others in having.items() if strategy not in others}
    for other_command in ("train", "simulate", "launch"):
        for other in STRATEGIES:
            for argument in arguments(other_command, other):
                owners.setdefault(argument.option, f"distbelief {other_command}")
    return owners


_SEVERAL = re.compile(r"\w+=.*|[0-9.]+((:|%?x)[0-9.,:%x]+)?")
"""Values of the options that take several words: eps=1e-8, 1:4, 5%x10 or 30."""


def split_script(options: Iterable[Argument], args: Sequence[str]) -> tuple[list[str], list[str]]:
    """Split the words of a command with these options into options, and a script with its arguments.

    The script is the first word that is neither an option nor a value of one, or `-m` and the name of a module.

    >>> split_script(arguments("launch", "downpour"), ["--replicas", "3", "--json", "train.py", "--replicas", "9"])
    (['--replicas', '3', '--json'], ['train.py', '--replicas', '9'])
    """
    known = {argument.option: argument for argument in options}
    at = 0
    while at < len(args) and args[at].startswith("-") and args[at] != MODULE:
        name, equals, _ = args[at].replace("_", "-").partition("=")
        at += 1
        if name == "--help":
            at += args[at : at + 1] == [ALL]
        elif name in known and known[name].several:
            at += sum(1 for _ in itertools.takewhile(lambda word: _SEVERAL.fullmatch(word), args[at:]))
        elif not equals and name in known and known[name].may_be_bare:
            at += args[at : at + 1] != [] and args[at].isdecimal()
        elif not equals and name in known and not known[name].is_flag:
            at += 1
    return list(args[:at]), list(args[at:])


def _optimizer_options(given: Sequence[str], elsewhere: Mapping[str, str], of: str = "") -> dict[str, Any]:
    """Read options of an optimizer, and refuse those that are options of the command line."""
    options = words.optimizer_options(given, f"--{of}optimizer-options")
    for name, instead in {"name": f"--{of}optimizer", "lr": f"--{of}lr", **elsewhere}.items():
        if name in options:
            raise UsageError(f"--{of}optimizer-options {name}: is an option of its own, {instead}")
    return options


@dataclass(frozen=True)
class Options:
    """The options of one command line."""

    kind: type[Strategy]
    values: Mapping[str, Any]

    def _of(self, kind: type) -> dict[str, Any]:
        names = (field.name for field in dataclasses.fields(kind))
        return {name: self.values[name] for name in names if name in self.values}

    @property
    def showing(self) -> Showing:
        """Return the options of the output."""
        return Showing(**self._of(Showing))

    @property
    def virtual(self) -> VirtualOptions:
        """Return the options of the virtual cluster."""
        return VirtualOptions(**self._of(VirtualOptions))

    def optimizer(self) -> Optimizer:
        """Make the optimizer, or raise a `UsageError`."""
        stepping = Stepping(**self._of(Stepping))
        options = _optimizer_options(stepping.optimizer_options, {"decay_exempt": "--decay-exempt"})
        decay = {} if self.values.get("local_optimizer") else self._decay()
        return optim(stepping.optimizer, stepping.lr, **decay, **options)

    def _decay(self) -> dict[str, Any]:
        """Return the options of weight decay, which are of the optimizer that steps by gradients."""
        stepping = Stepping(**self._of(Stepping))
        decay = {} if stepping.weight_decay is None else {"weight_decay": stepping.weight_decay}
        return {**decay, "decay_exempt": stepping.decay_exempt}

    def local_optimizer(self) -> Optimizer | None:
        """Make the optimizer of local steps, None where none is named, or raise a `UsageError`."""
        stepping = LocalStepping(**self._of(LocalStepping))
        options = _optimizer_options(stepping.local_optimizer_options, {}, "local-")
        if stepping.local_optimizer:
            return optim(stepping.local_optimizer, **self._decay(), **options)
        if options:
            raise UsageError(f"--local-optimizer-options {stepping.local_optimizer_options[0]}: name --local-optimizer")
        return None

    def job(self, task: str) -> Job:
        """Make the job, or raise a `UsageError`."""
        made = {name: getattr(self, name)() for name in OPTIMIZERS if _has(self.kind, name)}
        more = {name: value for name, value in self._of(Job).items() if name not in _hidden(self.kind)}
        return Job(task=task, strategy=self.kind(**self._of(self.kind) | made | self._replicas()), **more)

    def _replicas(self) -> dict[str, int]:
        """Return the number of replicas that fits the slots of several hosts, unless --replicas names another."""
        if "hostfile" not in self.values or self.values["replicas given"] or "replicas" not in self.values:
            return {}
        place = self.place()
        if not isinstance(place, Cluster):
            return {}
        if not place.slots:
            bare = next(host.name for host in place.named if not host.slots)
            raise UsageError(f"how many replicas? Write --replicas, or the slots of each host, such as {bare}:4")
        partitions = self.values.get("partitions", 1)
        return {"replicas": max(1, place.slots // partitions)}

    @property
    def dry_run(self) -> bool:
        """Return whether the job is only to be shown."""
        return bool(self.values.get("dry_run"))

    def place(self) -> Local:
        """Make the place of processes: this machine, or several hosts if options or an allocation name them."""
        padded = Padded(**self._of(Padded))
        slow = {"step": words.duration(padded.pad, "--pad"), **words.stragglers(padded.straggle, "--straggle")}
        compute = ComputeModel(**slow, spread="constant") if any(slow.values()) else None
        known, start = self._of(Cluster), launched.own()
        if start is not None and "hosts" not in known:
            raise UsageError(
                f"{start.launcher} has started this command {start.size} times, and {self.kind.name} runs in one "
                f"process: start it once, without {start.launcher}"
            )
        named = any(known.get(name) for name in ("hosts", "hostfile", "on"))
        if start or named or (known and is_allocated(os.environ)):
            cluster = Cluster(**known, compute=compute)
            cluster.attend()
            return cluster
        for name in (*(argument.name for argument in arguments_of(Cluster, documents(Local))), "dry_run"):
            if (value := self.values.get(name)) and value != getattr(Cluster, name, False):
                raise UsageError(f"{option(name)} {value}: needs several hosts; name them with --hosts or --hostfile")
        return Local(**self._of(Local), compute=compute)

    def simulated(self) -> Simulated:
        """Make the virtual cluster, or raise a `UsageError`."""
        from distbelief.places.simulated.handling import Handling
        from distbelief.places.simulated.simulated import Simulated
        from distbelief.places.simulated.virtual_cluster import Crash, LeavingHost
        from distbelief.transport.cluster_model import Hosts, NetworkModel, Outage

        virtual = self.virtual
        line, hosts = words.network(virtual.network), words.hosts(virtual.hosts)
        steps = {**words.compute(virtual.compute), **words.stragglers(virtual.stragglers)}
        faults = words.faults(virtual.faults)
        outages = tuple(Outage(*outage) for outage in faults.outages)
        return Simulated(
            NetworkModel(**line, **faults.delays, outages=outages),
            ComputeModel(**steps),
            tuple(Crash(*crash) for crash in faults.crashes),
            phantom=virtual.phantom,
            keep=virtual.keep,
            handling=Handling(**words.handling(virtual.handling)),
            hosts=Hosts(**hosts) if hosts else None,
            path=virtual.path,
            leaves=tuple(LeavingHost(*leave) for leave in faults.leaves),
            topology=virtual.topology,
            **faults.place,
        )
