"""The commands that predict what training costs: `cost`, `plan`, `split` and `draw`."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from distbelief.cli import words
from distbelief.cli.arguments import Asked, DataFolder, ask, ask_of, picked
from distbelief.core.optimizer import Optimizer, optim
from distbelief.errors import UsageError
from distbelief.lab.cost.options import MOST_REPLICAS, CostRequest, PlanRequest, SplitRequest, check_amounts
from distbelief.lab.draw.schedules import LETTERS, draw_pipeline, draw_schedule, draw_svg
from distbelief.network.graph import Routes
from distbelief.places.topologies import topology
from distbelief.references import TASKS, check_task
from distbelief.schedules.allreduce import ALGORITHMS, by_host, check_algorithm, check_hosts, schedule
from distbelief.schedules.pipeline import PIPELINES, chain, check_pipeline, pipeline
from distbelief.schedules.pipeline_price import SegmentCost, price_pipeline
from distbelief.schedules.price import LinkModel, draw_on
from distbelief.split.options import MOST, Partitions, Split

if TYPE_CHECKING:
    from distbelief.lab.plan.scaling import Scaling

MOST_DRAWN = 64
"""Most partitions and microbatches of a drawing."""
MOST_RANKS = 512
"""Most ranks in a drawing of the loads of links."""


def _of_a_task(command: str, kind: type[Asked], args: Sequence[str]) -> tuple[str, Asked]:
    """Read a task and the options of a command that takes no strategy."""
    known = f"{', '.join(TASKS)}, or module:function of your own"
    task, settings = ask_of(f"distbelief {command} TASK", "task", kind, args, known=known)
    check_task(task)
    return task, settings


@dataclass(frozen=True)
class CostOptions(CostRequest, DataFolder):
    """Measure what training a task costs on this machine: each layer, an iteration, its memory, and epochs."""

    optimizer: str = "sgd"
    """Optimizer of the job; the others are shown for comparison."""
    max_memory: str = ""
    """Memory of a process, such as 2GB: find the largest batch that fits."""
    seconds: float = 30.0
    """Time limit of the profile. Batch sizes that would need longer are left out, and named."""
    compare: tuple[str, ...] = ()
    """Instead of a task: compare files that `--json` has written on several machines."""
    json: bool = False
    """Show the costs as JSON."""


def cost(args: list[str]) -> int:
    """Run `distbelief cost TASK [options]`, or `distbelief cost --compare FILE FILE ...`."""
    if args[:1] == ["--compare"]:
        return _compare(ask("distbelief cost", CostOptions, args))
    task, settings = _of_a_task("cost", CostOptions, args)
    if settings.compare:
        raise UsageError("--compare takes files instead of a task: distbelief cost --compare FILE FILE ...")
    chosen = optim(settings.optimizer)
    memory = words.size(settings.max_memory, "--max-memory") if settings.max_memory else None
    from distbelief.cli import tables
    from distbelief.lab.cost.cost import measure
    from distbelief.tasks import resolve

    with tables.progress(f"what {task} costs") as show:
        request = CostRequest(**picked(settings, *(field.name for field in fields(CostRequest))))
        costs = measure(resolve(task, settings.data_dir), request, chosen, memory, settings.seconds, show)
    return _show(settings.json, costs.as_json(), lambda: tables.show_cost(costs))


def _compare(settings: CostOptions) -> int:
    if settings != CostOptions(compare=settings.compare, json=settings.json):
        raise UsageError("--compare measures nothing: leave off all other options but --json")
    from distbelief.cli.tables import show_comparison
    from distbelief.lab.cost.cost import compare

    task, rows = compare(settings.compare)
    return _show(settings.json, {"task": task, "machines": rows}, lambda: show_comparison(task, rows))


@dataclass(frozen=True)
class PlanOptions(DataFolder):
    """Find the strategy and the numbers of replicas and shards that train a task fastest on some machines."""

    machines: str = ""
    """Number of hosts and cores of each, such as 4x8; the default is this machine."""
    network: str = "latency=50us,bandwidth=10Gbit"
    """Latency and bandwidth between hosts."""
    topology: str = ""
    """Switches and cables between hosts: tree:8x8, fat-tree:4, torus:4x4x4, dragonfly:2, slim-fly:5, or a file such as
    Slurm's topology.conf."""
    stragglers: tuple[str, ...] = ()
    """Replicas on slower machines, such as 1:4: each step of replica 1 takes 4 times as long."""
    max_memory: str = ""
    """Memory of each process, such as 4GB."""
    strategies: tuple[str, ...] = ()
    """Strategies to compare; the default is single, downpour, synchronous, allreduce and hogwild."""
    batch_size: int = 64
    """Samples in a minibatch of one replica."""
    optimizer: str = "sgd"
    """Optimizer of the job."""
    seconds: float = 30.0
    """Time limit of all runs on this machine together."""
    replicas: str = ""
    """Instead of a plan, show what one more replica brings, for numbers such as 1,2,4 or 1-64 (doubled)."""
    draw: str = ""
    """File for a picture (SVG) of what one more replica brings."""
    json: bool = False
    """Show the plan as JSON."""


def plan(args: list[str]) -> int:
    """Run `distbelief plan TASK [options]`."""
    task, settings = _of_a_task("plan", PlanOptions, args)
    chosen = optim(settings.optimizer)
    line = words.network(settings.network)
    memory = words.size(settings.max_memory, "--max-memory") if settings.max_memory else None
    slow = words.slow_replicas(settings.stragglers)
    counts = words.counts(settings.replicas, "--replicas", MOST_REPLICAS) if settings.replicas else ()
    if settings.draw and not counts:
        raise UsageError(f"--draw {settings.draw}: draws what --replicas shows: add numbers, such as --replicas 1-64")
    from distbelief.cli import tables
    from distbelief.lab.plan import plan as planning
    from distbelief.lab.plan.scaling import scaling
    from distbelief.transport.cluster_model import NetworkModel

    known = picked(settings, "machines", "topology", "strategies", "batch_size", "seconds", "data_dir")
    request = PlanRequest(network=NetworkModel(**line), slow=slow, optimizer=chosen, max_memory=memory, **known)
    with tables.progress(f"planning {task}") as show:
        if counts:
            return _scaling(scaling(task, counts, request, tell=show), settings)
        plan = planning.plan(task, request, show)
    return _show(settings.json, plan, lambda: tables.show_plan(plan))


def _scaling(scaling: Scaling, settings: PlanOptions | SplitOptions) -> int:
    from distbelief.cli import tables
    from distbelief.lab.plan.scaling import draw_scaling

    if settings.draw:
        _write_picture("--draw", settings.draw, draw_scaling(scaling))
    return _show(settings.json, scaling, lambda: tables.show_scaling(scaling))


@dataclass(frozen=True)
class SplitOptions(SplitRequest, Partitions, DataFolder):
    """Show how a model would be split: the work of each partition, the bytes between them, and whether it pays."""

    partitions: str = "2"  # type: ignore[assignment]  # a job has one number of partitions
    """Processes over which the model is split. Several numbers, such as 1,2,4 or 1-16 (doubled), show what one more
    brings."""
    optimizer: str = "sgd"
    """Optimizer of the job."""
    network: str = "latency=50us,bandwidth=10Gbit"
    """Latency and bandwidth between partitions."""
    draw: str = ""
    """File for a picture (SVG) of the work of each partition and the bytes between them, or of what one more brings."""
    draw_step: str = ""
    """File for a picture (SVG) of a predicted step: what each partition computes when."""
    json: bool = False
    """Show the split as JSON."""


def split(args: list[str]) -> int:
    """Run `distbelief split TASK [options]`."""
    task, settings = _of_a_task("split", SplitOptions, args)
    check_pipeline(settings.algorithm, settings.microbatches)
    check_amounts(settings.batch_size, 1, {"seconds": settings.seconds})
    chosen, counts = optim(settings.optimizer), words.counts(settings.partitions, "--partitions", MOST)
    if ":" not in task:  # a user's module may register ways
        Split.parse(settings.split, counts[-1], settings.chunks)
    line = words.network(settings.network)
    if len(counts) > 1:
        return _split_scaling(task, settings, counts, chosen, line)
    link = LinkModel(line.get("latency", 0.0), line.get("bandwidth", math.inf))
    from distbelief.cli import tables
    from distbelief.lab.cost import splitting
    from distbelief.lab.draw.split import draw_split
    from distbelief.tasks import resolve

    with tables.progress(f"splitting {task}") as show:
        resolved = resolve(task, settings.data_dir)
        split = Split.parse(settings.split, counts[0], settings.chunks, resolved.split)
        costs, programs, steps, price = splitting.measure(resolved, split, settings, chosen, link, show)
    if settings.draw:
        _write_picture("--draw", settings.draw, draw_split(programs))
    if settings.draw_step:
        _write_picture("--draw-step", settings.draw_step, draw_svg(steps, price))
    return _show(settings.json, costs.as_json(), lambda: tables.show_split(costs))


def _split_scaling(
    task: str, settings: SplitOptions, counts: Sequence[int], optimizer: Optimizer, line: Mapping[str, Any]
) -> int:
    if settings.draw_step or settings.device != "cpu":
        raise UsageError("--draw-step and --device need one number of --partitions: leave them off, or name one")
    from distbelief.cli import tables
    from distbelief.lab.plan.scaling import scaling
    from distbelief.transport.cluster_model import NetworkModel

    known = picked(settings, "batch_size", "seconds", "data_dir")
    request = PlanRequest(network=NetworkModel(**line), optimizer=optimizer, **known)
    way = Partitions(**picked(settings, "split", "chunks", "microbatches", "schedule"))
    with tables.progress(f"splitting {task}") as show:
        curves = scaling(task, counts, request, way, show)
    return _scaling(curves, settings)


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
class DrawOptions:
    """Draw the messages of an all-reduce step by step, with its predicted time; jobs play the same schedule."""

    ranks: int | None = None
    """Number of ranks, at most 26; the default is 4, or the number of hosts of a topology."""
    topology: str = ""
    """Draw the load of each link of a topology: tree:8x8, fat-tree:4, torus:4x4x4, dragonfly:2, slim-fly:5, or a file
    such as Slurm's topology.conf. Consecutive ranks are on neighbouring hosts."""
    per_host: int = 0
    """Ranks on each host, for hierarchical; 0 puts all on one."""
    network: str = "latency=20us,bandwidth=10Gbit"
    """Latency and bandwidth of every line. local-latency and local-bandwidth are those inside a host; reduce=10GB is
    the speed of additions."""


@dataclass(frozen=True)
class DrawPipelineOptions:
    """Draw when each partition of a split model computes each microbatch, in a chain of equal stages."""

    partitions: int = 4
    """Stages, each in a partition of its own."""
    microbatches: int = 0
    """Parts of a minibatch; 0 stands for 8, or 1 for sequential."""
    svg: str = ""
    """File for a picture."""


def draw(args: list[str]) -> int:
    """Run `distbelief draw ALGORITHM [options]`."""
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
            raise UsageError(f"--network {word}: the price of {args[0]}{where} does not use it; leave it off")
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
            f"--partitions {settings.partitions} --microbatches {settings.microbatches}: a drawing has at most "
            f"{MOST_DRAWN} of each, and at least 1 partition"
        )
    microbatches = settings.microbatches or (1 if algorithm == "sequential" else 8)
    drawn = pipeline(algorithm, chain(settings.partitions), microbatches)
    if settings.svg:
        price = price_pipeline(drawn, [SegmentCost(1e-3, 2e-3)] * settings.partitions)
        _write_picture("--svg", settings.svg, draw_svg(drawn, price))
    print(draw_pipeline(drawn))
    return 0
