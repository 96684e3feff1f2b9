"""The commands: each checks its words before torch is imported, makes the call, and shows what came of it."""

from __future__ import annotations

import math
import shlex
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import msgspec

from distbelief.cli import INTERRUPTED, options, teller, words
from distbelief.cli.arguments import DataFolder, arguments_of, ask, ask_of
from distbelief.cli.auto import AUTO, chosen
from distbelief.cli.check import check
from distbelief.cli.compress import compress, expand
from distbelief.cli.predict import predict
from distbelief.cli.reports import report, runs
from distbelief.cli.study import study
from distbelief.core.optimizer import Optimizer, optim
from distbelief.core.outcomes import Outcome
from distbelief.core.records import Json
from distbelief.errors import JobFailed, UsageError
from distbelief.job import OnDevice, Threaded
from distbelief.lab.cost.options import MOST_REPLICAS, CostRequest, SplitRequest
from distbelief.lab.draw.allreduce import LETTERS
from distbelief.lab.draw.allreduce import draw as draw_schedule
from distbelief.lab.draw.pipeline import draw_pipeline, draw_svg
from distbelief.network.routes import Routes
from distbelief.places.processes.script import name_of
from distbelief.places.topologies import topology
from distbelief.places.view import View
from distbelief.references import TASKS, check_task
from distbelief.schedules.allreduce import ALGORITHMS, by_host, check_algorithm, check_hosts, schedule
from distbelief.schedules.pipeline import PIPELINES, chain, check_pipeline, pipeline
from distbelief.schedules.pipeline_price import SegmentCost, price_pipeline
from distbelief.schedules.price import LinkModel, draw_on
from distbelief.split.options import MOST, Partitions, Split
from distbelief.strategies import STRATEGIES, find

if TYPE_CHECKING:
    from distbelief.job import Job
    from distbelief.lab.plan.scaling import Scaling
    from distbelief.places.simulated.simulated import Simulated

MOST_DRAWN = 64
"""Partitions, and microbatches, of a drawing."""
MOST_RANKS = 512
"""Ranks in a drawing of the loads of links."""


def train(args: list[str]) -> int:
    """`distbelief train TASK STRATEGY [options]`; the strategy may be `auto`."""
    if args[1:2] == [AUTO] and not args[0].startswith("-"):
        check_task(args[0])
        args = chosen(args[0], args[2:])
    task, strategy, rest = _task_and_strategy("train", args)
    command = options.parse("train", task, strategy, rest)
    job = command.job(task)
    place = command.place()
    if command.dry_run:
        return _dry_run(place, job)
    return _run(lambda: place.run(job, _view(command, f"{strategy} on {task}")), command, ["train", *args])


def launch(args: list[str]) -> int:
    """`distbelief launch STRATEGY [options] script.py [args...]`, or `-m module` in the place of the script."""
    if not args or args[0] in ("--help", "-h"):
        return _usage("launch STRATEGY [options] script.py|-m module [args...]", bool(args), "")
    strategy = _strategy("launch", args[0], args)
    mine, script = options.split_script(strategy, args[1:])
    command = options.parse("launch", "", strategy, mine)
    if not script:
        raise UsageError(
            f"distbelief launch {strategy}: which script? Write it after the options: distbelief launch {strategy} "
            "script.py"
        )
    job = command.job("script")
    place = command.place()
    if command.dry_run:
        return _dry_run(place, job)
    view = _view(command, f"{name_of(script)} in the replicas of {strategy}")
    return _run(lambda: place.launch(job, script, view), command, ["launch", *args[: len(mine) + 1]], script)


def _dry_run(place: Any, job: Job) -> int:
    """Show who would be where on several hosts."""
    settings = place.settings(job)
    for line in place.preview(settings, job.strategy.roles(measured=settings.evaluates)):
        print(line)
    links = "TLS" if place.encrypted else "plain TCP (--insecure)"
    print(f"links: {links}, each role at a free port of its host's address, which is found when the job starts")
    return 0


def simulate(args: list[str]) -> int:
    """`distbelief simulate TASK STRATEGY [options]`."""
    task, strategy, rest = _task_and_strategy("simulate", args)
    command = options.parse("simulate", task, strategy, rest)
    job = command.job(task)
    place, view = command.simulated(), _view(command, f"{strategy} on {task}, simulated")
    if command.virtual.sweep is not None:
        view.show_start()
        return _sweep(place, job, command.virtual.sweep, command, args)
    return _run(lambda: place.run(job, view), command, ["simulate", *args])


def _sweep(place: Simulated, job: Job, count: int, command: options.Options, args: Sequence[str]) -> int:
    """Show each seed that fails and how to replay it, and at the end how the results spread."""
    from distbelief.places.simulated.sweep import lines, spread, sweep

    ended = []
    for result in sweep(place, job, count):
        ended.append(result)
        replay = replay_command(args, result.seed)
        if command.showing.json:
            line = {**msgspec.to_builtins(result), "replay": replay}
            print(msgspec.json.encode(line).decode(), flush=True)
        elif result.failed:
            print(f"seed {result.seed} failed: {' '.join(result.reason.split())}; replay it: {replay}", flush=True)
    summary = spread(ended)
    if command.showing.json:
        print(msgspec.json.encode(summary).decode())
    elif not command.showing.quiet:
        print("\n".join(lines(summary)))
    return INTERRUPTED if ended[-1].outcome == Outcome.INTERRUPTED else int(any(result.failed for result in ended))


def replay_command(args: Sequence[str], seed: int) -> str:
    """The command that runs one seed of a sweep by itself.

    >>> replay_command(["digits", "downpour", "--sweep", "9", "--seed=4", "--json", "--lr", "0.1"], 7)
    'distbelief simulate digits downpour --lr 0.1 --seed 7'
    """
    kept: list[str] = []
    for at, word in enumerate(args):
        valued = ("--sweep", "--seed")
        if word.partition("=")[0] not in (*valued, "--json", "--quiet") and not (at and args[at - 1] in valued):
            kept.append(word)
    return shlex.join(["distbelief", "simulate", *kept, "--seed", str(seed)])


@dataclass(frozen=True)
class EvaluateOptions(OnDevice, DataFolder):
    """Measure the model of a run folder, or of a compressed file, on its task's test set."""

    data_dir: str | None = None
    """Folder with the data; else the run's own, else $DISTBELIEF_DATA, else the cache."""
    task: str = ""
    """Task of a compressed file, module:function, where it is no built-in one."""
    inference: str = "float32"
    """Arithmetic: float32; int8 (products of 8 bits); or, of a compressed file, ids (shared weights are made of their
    ids whenever they are used)."""
    json: bool = False
    """Show the figures as JSON."""


def evaluate(args: list[str]) -> int:
    """`distbelief evaluate RUN [options]`; a compressed file may stand in the place of a run."""
    run, settings = ask_of("distbelief evaluate RUN", "run folder", EvaluateOptions, args)
    from distbelief.places.evaluate import evaluate as measure
    from distbelief.record.live import figures

    result = measure(run, settings.data_dir, settings.device, settings.task or None, settings.inference)
    if settings.json:
        print(msgspec.json.encode(result).decode())
    else:
        text = figures(result["test_accuracy"], result["test_metrics"], result["test_loss"])
        print(f"{result['task']}: test {text} ({result['samples']:,} samples)")
        if settings.inference != "float32":
            print(f"{settings.inference}: {result['model_bytes']:,} bytes in memory, {result['seconds']:.2f} s")
    return 0


@dataclass(frozen=True)
class StatusOptions:
    """Members of the job of a run folder: how far each is, and what it waits for, since when and why."""

    watch: bool = False
    """Show it again every second, until the job has ended."""
    json: bool = False
    """Show it as JSON, one line each time."""


Asked = TypeVar("Asked")


def status(args: list[str]) -> int:
    """`distbelief status RUN [options]`."""
    run, settings = ask_of("distbelief status RUN", "run folder", StatusOptions, args)
    from distbelief.places.status import lines
    from distbelief.places.status import status as ask

    while True:
        state = ask(run)
        print(msgspec.json.encode(state).decode() if settings.json else "\n".join(lines(state)), flush=True)
        if not (settings.watch and state["running"]):
            return 0
        time.sleep(1.0)


def _of_a_task(command: str, kind: type[Asked], args: Sequence[str]) -> tuple[str, Asked]:
    """The task and the options of a command on one, which has no strategy."""
    known = f"{', '.join(TASKS)}, or module:function of your own"
    task, settings = ask_of(f"distbelief {command} TASK", "task", kind, args, known=known)
    check_task(task)
    return task, settings


@dataclass(frozen=True)
class CostOptions(CostRequest, DataFolder):
    """Costs of training a task on this machine: each layer, an iteration, its memory, and epochs."""

    optimizer: str = "sgd"
    """Optimizer that updates; the others are shown beside it."""
    max_memory: str = ""
    """Memory of a process, such as 2GB: tells the largest batch that fits."""
    seconds: float = 30.0
    """For the profile; batch sizes that would need longer are left out, and named."""
    compare: tuple[str, ...] = ()
    """In the place of a task, files that `--json` has made on several machines: puts them beside each other."""
    json: bool = False
    """Show it as JSON."""


def cost(args: list[str]) -> int:
    """`distbelief cost TASK [options]`, or `distbelief cost --compare FILE FILE ...`."""
    if args[:1] == ["--compare"]:
        return _compare(ask("distbelief cost", CostOptions, args))
    task, settings = _of_a_task("cost", CostOptions, args)
    if settings.compare:
        raise UsageError("--compare is in the place of a task: distbelief cost --compare FILE FILE ...")
    chosen = optim(settings.optimizer)
    memory = words.size(settings.max_memory, "--max-memory") if settings.max_memory else None
    from distbelief.cli import cost_tables
    from distbelief.lab.cost.cost import measure
    from distbelief.tasks import resolve

    with cost_tables.progress(f"what {task} costs") as show:
        request = CostRequest(**{field.name: getattr(settings, field.name) for field in fields(CostRequest)})
        costs = measure(resolve(task, settings.data_dir), request, chosen, memory, settings.seconds, show)
    return _show(settings.json, costs.as_json(), lambda: cost_tables.show_cost(costs))


def _compare(settings: CostOptions) -> int:
    if settings != CostOptions(compare=settings.compare, json=settings.json):
        raise UsageError("--compare measures nothing, and has only --json beside it: leave the other options off")
    from distbelief.cli.cost_tables import show_comparison
    from distbelief.lab.cost.comparing import compare

    task, rows = compare(settings.compare)
    return _show(settings.json, {"task": task, "machines": rows}, lambda: show_comparison(task, rows))


@dataclass(frozen=True)
class PlanOptions(DataFolder):
    """The strategy, replicas and shards that train a task fastest on some machines, and why."""

    machines: str = ""
    """Hosts and the cores of each, such as 4x8; this machine where none are given."""
    network: str = "latency=50us,bandwidth=10Gbit"
    """Latency and bandwidth between hosts."""
    topology: str = ""
    """Switches and cables between them: tree:8x8, fat-tree:4, torus:4x4x4, dragonfly:2, slim-fly:5, or a file as
    Slurm's topology.conf."""
    stragglers: tuple[str, ...] = ()
    """Replicas on slower machines, such as 1:4: each step of replica 1 takes 4 times as long."""
    max_memory: str = ""
    """Memory of each process, such as 4GB."""
    strategies: tuple[str, ...] = ()
    """Those that may be chosen; else single, downpour, synchronous, allreduce and hogwild."""
    batch_size: int = 64
    """Samples in a minibatch of one replica."""
    optimizer: str = "sgd"
    """Optimizer that updates."""
    seconds: float = 30.0
    """For all runs on this machine together."""
    replicas: str = ""
    """Show what one more replica brings, in the place of a plan: numbers of them, such as 1,2,4 or 1-64 (doubled)."""
    draw: str = ""
    """A file to put a picture of that into (SVG)."""
    json: bool = False
    """Show it as JSON."""


def plan(args: list[str]) -> int:
    """`distbelief plan TASK [options]`."""
    task, settings = _of_a_task("plan", PlanOptions, args)
    chosen = optim(settings.optimizer)
    line: dict[str, Any] = dict(words.network(settings.network))
    memory = words.size(settings.max_memory, "--max-memory") if settings.max_memory else None
    slow = words.slow_replicas(settings.stragglers)
    counts = words.counts(settings.replicas, "--replicas", MOST_REPLICAS) if settings.replicas else ()
    if settings.draw and not counts:
        raise UsageError(
            f"--draw {settings.draw}: draws what one more replica brings; name their numbers, --replicas 1-64"
        )
    from distbelief.cli import cost_tables, plan_tables
    from distbelief.lab.plan import plan as planning
    from distbelief.lab.plan.scaling import scaling
    from distbelief.transport.network_model import NetworkModel

    known: dict[str, Any] = {"slow": slow, "optimizer": chosen, "max_memory": memory}
    known |= {name: getattr(settings, name) for name in ("topology", "batch_size", "seconds", "data_dir")}
    if settings.strategies:
        known["strategies"] = settings.strategies
    network = NetworkModel(**line)
    with cost_tables.progress(f"planning {task}") as show:
        if counts:
            return _scaling(scaling(task, counts, network, machines=settings.machines, told=show, **known), settings)
        plan = planning.plan(task, settings.machines or None, network, told=show, **known)
    return _show(settings.json, plan, lambda: plan_tables.show_plan(plan))


def _scaling(found: Scaling, settings: PlanOptions | SplitOptions) -> int:
    from distbelief.cli import plan_tables
    from distbelief.lab.draw.scaling import draw_scaling

    if settings.draw:
        _write_picture("--draw", settings.draw, draw_scaling(found))
    return _show(settings.json, found, lambda: plan_tables.show_scaling(found))


@dataclass(frozen=True)
class SplitOptions(SplitRequest, Partitions, DataFolder):
    """Parts of a model by partition, what crosses between them, and whether it pays, before training."""

    partitions: str = "2"  # type: ignore[assignment]  # of a job it is one number
    """Processes over which the model is split; of several numbers, such as 1,2,4 or 1-16 (doubled), what one more
    brings."""
    optimizer: str = "sgd"
    """Optimizer that updates."""
    network: str = "latency=50us,bandwidth=10Gbit"
    """Latency and bandwidth between partitions."""
    draw: str = ""
    """A file to put a picture into (SVG): what each partition computes, and what crosses; or what one more brings."""
    draw_step: str = ""
    """Another: when each partition computes what of the predicted step."""
    json: bool = False
    """Show it as JSON."""


def split(args: list[str]) -> int:
    """`distbelief split TASK [options]`."""
    task, settings = _of_a_task("split", SplitOptions, args)
    check_pipeline(settings.algorithm, settings.microbatches)
    if not 0 < settings.seconds < math.inf:
        raise UsageError(f"--seconds {settings.seconds:g}: must be more than 0, and finite")
    chosen, counts = optim(settings.optimizer), words.counts(settings.partitions, "--partitions", MOST)
    if ":" not in task:  # a user's module may register ways
        Split.parse(settings.split, counts[-1], settings.chunks)
    line: dict[str, Any] = dict(words.network(settings.network))
    if len(counts) > 1:
        return _split_scaling(task, settings, counts, chosen, line)
    link = LinkModel(line.get("latency", 0.0), line.get("bandwidth", math.inf))
    from distbelief.cli import cost_tables, split_tables
    from distbelief.lab.cost import splitting
    from distbelief.lab.draw.split import draw_split
    from distbelief.tasks import resolve

    with cost_tables.progress(f"splitting {task}") as show:
        resolved = resolve(task, settings.data_dir)
        split = Split.parse(settings.split, counts[0], settings.chunks, resolved.split)
        costs, programs, steps, price = splitting.measure(resolved, split, settings, chosen, link, show)
    if settings.draw:
        _write_picture("--draw", settings.draw, draw_split(programs))
    if settings.draw_step:
        _write_picture("--draw-step", settings.draw_step, draw_svg(steps, price))
    return _show(settings.json, costs.as_json(), lambda: split_tables.show_split(costs))


def _split_scaling(
    task: str, settings: SplitOptions, counts: Sequence[int], optimizer: Optimizer, line: Mapping[str, Any]
) -> int:
    if settings.draw_step or settings.device != "cpu":
        raise UsageError("--draw-step and --device are of one number of --partitions: leave them off, or name one")
    from distbelief.cli import cost_tables
    from distbelief.lab.plan.scaling import scaling
    from distbelief.transport.network_model import NetworkModel

    way = {name: getattr(settings, name) for name in ("split", "chunks", "microbatches", "schedule")}
    with cost_tables.progress(f"splitting {task}") as show:
        found = scaling(
            task,
            counts,
            NetworkModel(**line),
            split=Partitions(**way),
            batch_size=settings.batch_size,
            optimizer=optimizer,
            seconds=settings.seconds,
            data_dir=settings.data_dir,
            told=show,
        )
    return _scaling(found, settings)


def _show(as_json: bool, value: object, tables: Callable[[], None]) -> int:
    if as_json:
        print(msgspec.json.encode(value).decode())
    else:
        tables()
    return 0


def _write_picture(option: str, path: str, picture: str) -> None:
    try:
        Path(path).write_text(picture, "utf-8")
    except OSError as error:
        raise UsageError(f"{option} {path}: cannot be written ({error}); name a file in a folder of yours") from error


@dataclass(frozen=True)
class JoinOptions(Threaded, DataFolder):
    """Add a replica on this machine to a job that was started elsewhere with --listen, which wrote the ticket."""

    strategy: str = ""
    """The strategy of the job as module:Class, where that is no name of ours; a ticket imports nothing."""
    leave_within: float = 0.0
    """Seconds in which what was begun is to be finished, once this replica is told to go (Ctrl-C, SIGTERM); 0 gives it
    as long as it takes."""
    quiet: bool = False
    """Show nothing but errors."""


def join(args: list[str]) -> int:
    """`distbelief join TICKET [options] [script.py|-m module [args...]]`."""
    prog = "distbelief join TICKET"
    valued = [argument.option for argument in arguments_of(JoinOptions) if not argument.is_flag]
    if not args or args[0] in ("--help", "-h"):
        if args:
            ask(prog, JoinOptions, ["--help"])
        raise UsageError(f"which ticket? Write its file: {prog}")
    if args[0].startswith("-"):
        raise UsageError(f"{args[0]}: write the ticket first: {prog} [options] [script.py|-m module [args...]]")
    flags, script = options.until_word(args[1:], valued)
    chosen = ask(prog, JoinOptions, flags)
    for check_process in chosen.process_checks():
        check_process()
    tell = teller(chosen.quiet)
    tell(f"joining by {args[0]}")
    from distbelief.places.join.guest import Guest

    Guest(
        args[0], script, chosen.data_dir, chosen.device, chosen.threads, tell, chosen.strategy, chosen.leave_within
    ).run()
    return 0


def leave(args: list[str]) -> int:
    """`distbelief leave TICKET`."""
    if len(args) != 1 or args[0].startswith("-"):
        print(
            "usage: distbelief leave TICKET\n\nThe replicas that joined with this ticket from this machine finish "
            "what they have begun, and go."
        )
        return 0 if args and args[0] in ("--help", "-h") else 2
    from distbelief.places.join.guest import leave as ask

    count = ask(args[0])
    print(
        f"asked {count} replica{'' if count == 1 else 's'} to leave"
        if count
        else "no replica on this machine has joined with this ticket"
    )
    return 0 if count else 1


@dataclass(frozen=True)
class DrawOptions:
    """Messages of an all-reduce, step by step, and its price: drawn from the schedule that is played."""

    ranks: int | None = None
    """Ranks that add up, at most 26; else 4, or as many as a topology has hosts."""
    topology: str = ""
    """Draw what each link of it carries: tree:8x8, fat-tree:4, torus:4x4x4, dragonfly:2, slim-fly:5, or a file as
    Slurm's topology.conf; ranks follow its walk."""
    per_host: int = 0
    """Ranks on each host, for hierarchical; 0 for all on one."""
    network: str = "latency=20us,bandwidth=10Gbit"
    """Latency and bandwidth of every line; local-latency and local-bandwidth of those inside a host; reduce=10GB, how
    fast is added.
    """


@dataclass(frozen=True)
class DrawPipelineOptions:
    """Microbatches that the partitions of a split model take forward and back, and when: a chain of equal stages."""

    partitions: int = 4
    """Stages, each at a partition of its own."""
    microbatches: int = 0
    """Parts of a minibatch; 8 where 0, and 1 for sequential."""
    svg: str = ""
    """A file to put a picture into."""


def draw(args: list[str]) -> int:
    """`distbelief draw ALGORITHM [options]`."""
    if not args or args[0] in ("--help", "-h"):
        print(
            f"usage: distbelief draw ALGORITHM [options]\n\nalgorithms: {', '.join(ALGORITHMS)}, or hierarchical:NAME "
            f"with NAME between hosts; of split models: {', '.join(PIPELINES)}"
        )
        return 0 if args else 2
    prog = f"distbelief draw {args[0]}"
    if args[0] in PIPELINES:
        return _draw_pipeline(args[0], ask(prog, DrawPipelineOptions, args[1:]))
    check_algorithm(args[0], PIPELINES)
    settings = ask(prog, DrawOptions, args[1:])
    graph = topology(settings.topology) if settings.topology else None
    per_host = settings.per_host or 1
    ranks = settings.ranks if settings.ranks is not None else len(graph.hosts) * per_host if graph else 4
    if not 1 <= ranks <= (MOST_RANKS if graph else len(LETTERS)):
        raise UsageError(f"--ranks {ranks}: must be from 1 to {MOST_RANKS if graph else len(LETTERS)}")
    check_hosts(args[0], settings.per_host, auto=False)
    line = words.network(settings.network)
    knows_hosts = args[0].startswith("hierarchical")
    inner = ("local_latency", "local_bandwidth")
    for name in ("jitter", *(() if knows_hosts and not graph else inner), *["reduction"] * bool(graph)):
        if name in line:
            word = {"reduction": "reduce"}.get(name, name.replace("_", "-"))
            where = f" on a topology, {settings.topology}" if graph else ""
            raise UsageError(f"--network {word}: is in no price of {args[0]}{where}; leave it off")
    hosts = by_host(ranks, settings.per_host) if knows_hosts else ()
    network = {"latency": 20e-6, "bandwidth": 1.25e9, "reduction": 0.0, **line}
    link = LinkModel(network["latency"], network["bandwidth"], network["reduction"])
    inside = LinkModel(
        network.get("local_latency", link.latency), network.get("local_bandwidth", link.bandwidth), link.reduction
    )
    drawn = schedule(args[0], ranks, math.lcm(*range(1, ranks + 1)) if ranks < 10 else ranks, hosts)
    if graph:
        walk = graph.first(-(-ranks // per_host), f"--ranks {ranks}")
        print("\n".join(draw_on(drawn, Routes(graph), [walk[rank // per_host] for rank in range(ranks)], link)))
    else:
        print(draw_schedule(drawn, link, None if inside == link else inside))
    return 0


def _draw_pipeline(algorithm: str, settings: DrawPipelineOptions) -> int:
    if not 1 <= settings.partitions <= MOST_DRAWN or not 0 <= settings.microbatches <= MOST_DRAWN:
        raise UsageError(
            f"--partitions {settings.partitions} --microbatches {settings.microbatches}: {MOST_DRAWN} at most can be "
            "drawn, and 1 partition at least"
        )
    microbatches = settings.microbatches or (1 if algorithm == "sequential" else 8)
    drawn = pipeline(algorithm, chain(settings.partitions), microbatches)
    if settings.svg:
        price = price_pipeline(drawn, [SegmentCost(1e-3, 2e-3)] * settings.partitions)
        _write_picture("--svg", settings.svg, draw_svg(drawn, price))
    print(draw_pipeline(drawn))
    return 0


COMMANDS: Mapping[str, Callable[[list[str]], int]] = {
    f.__name__: f
    for f in (
        train,
        launch,
        simulate,
        check,
        study,
        report,
        runs,
        evaluate,
        predict,
        compress,
        expand,
        join,
        leave,
        status,
        cost,
        plan,
        split,
        draw,
    )
}


def resume_command(args: Sequence[str], run: str, script: Sequence[str] = ()) -> str:
    """The command that goes on with an interrupted run: the same one, with its run folder and `--resume`.

    >>> resume_command(["train", "digits", "single", "--out", "x", "--epochs", "3"], "x")
    'distbelief train digits single --epochs 3 --out x --resume'
    """
    kept: list[str] = []
    for at, word in enumerate(args):
        if word in ("--out", "--resume") or word.startswith("--out=") or (at and args[at - 1] == "--out"):
            continue
        kept.append(word)
    return shlex.join(["distbelief", *kept, "--out", run, "--resume", *script])


def _usage(words: str, wanted: bool, more: str = f"; tasks: {', '.join(TASKS)}, or module:function of your own") -> int:
    named = ", ".join((*STRATEGIES, *[f"{AUTO} (the first of a plan)"] * words.startswith("train ")))
    print(f"usage: distbelief {words}\n\nstrategies: {named}, or module:Class of your own{more}")
    return 0 if wanted else 2


def _task_and_strategy(command: str, args: Sequence[str]) -> tuple[str, str, list[str]]:
    if not args or args[0] in ("--help", "-h") or list(args[1:]) in (["--help"], ["-h"]):
        _usage(
            f"{command} TASK STRATEGY [options]\n\n  distbelief {command} TASK STRATEGY --help shows the options of a "
            "strategy",
            True,
        )
        raise SystemExit(0 if args else 2)
    task = args[0]
    if task.startswith("-"):
        raise UsageError(f"{task}: write the task and the strategy first: distbelief {command} TASK STRATEGY [options]")
    check_task(task)
    if len(args) < 2:
        raise UsageError(
            f"distbelief {command} {task}: which strategy? Write it after the task: {', '.join(STRATEGIES)}, or "
            "module:Class of your own"
        )
    return task, _strategy(command, args[1], args), list(args[2:])


def _strategy(command: str, name: str, args: Sequence[str]) -> str:
    if name.startswith("-"):
        raise UsageError(
            f"{name}: write the strategy before the options: distbelief {command} "
            f"{' '.join([*args[:-1][:1], 'STRATEGY'])} [options]"
        )
    find(name)
    return name


def _view(command: options.Options, title: str) -> View:
    return View(quiet=command.showing.quiet, json=command.showing.json and not command.showing.quiet, title=title)


def _run(run_job: Callable[[], Json], command: options.Options, args: Sequence[str], script: Sequence[str] = ()) -> int:
    """Run a job and print its end, and how to go on where it was cut short."""
    try:
        result = run_job()
    except JobFailed as error:
        if error.run:
            error.args = (f"{error}: {resume_command(args, error.run, script)}",)
        raise
    run = result.get("run")
    if command.showing.json:
        print(msgspec.json.encode(result).decode())
    elif command.showing.quiet:
        print(run or "")
    else:
        from distbelief.record.live import summary

        print(summary(result, run))
        if run and result.get("replicas", 1) > 1:
            from distbelief.lab.study.runs import efficiency_of

            if told := efficiency_of(Path(run)):
                print(f"{'efficiency':<12}{told}")
    if result["outcome"] != Outcome.INTERRUPTED:
        return 0
    go_on = ""
    if run and (Path(run) / "checkpoints").is_dir():  # a phantom keeps none
        go_on = f"; go on with: {resume_command(args, run, script)}"
    print(f"distbelief: interrupted{go_on}", file=sys.stderr)
    return INTERRUPTED
