"""No option is dead: each of every strategy, as its dataclasses have them, is played with another value, and something
must come out otherwise.

An option that is added has no case here, and fails until it has one. What exactly an option does is tested where it is
at partition: this only holds that none does nothing, in no strategy that offers it.
"""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from oracles import classes
from safetensors.torch import save_file
from torch import nn
from watching.observed import mapping_of

from distbelief.core.messages import Message
from distbelief.core.optimizer import optim
from distbelief.core.records import Record
from distbelief.errors import DistbeliefError
from distbelief.job import Job
from distbelief.places.attempt import Attempt
from distbelief.places.compute_model import ComputeModel
from distbelief.places.simulated import running
from distbelief.places.simulated.handling import Handling
from distbelief.places.simulated.simulated import Simulated
from distbelief.places.simulated.simulation import Simulation
from distbelief.places.simulated.virtual_cluster import Crash, LeavingHost
from distbelief.strategies import STRATEGIES, Allreduce, Downpour, Hogwild, Strategy
from distbelief.tasks import Task
from distbelief.tasks.worker import build_model
from distbelief.testing.simulations import attach
from distbelief.transport.cluster_model import Hosts, NetworkModel, Outage

SAMPLES = 40
TESTS = Path(__file__).parent.parent


@dataclass
class Seen:
    """What came out of a job."""

    weights: list[bytes] = field(default_factory=list)
    """The trained parameters and buffers, wherever they are held."""
    traffic: list[tuple[float, str, str, str]] = field(default_factory=list)
    """Every message: when, from whom, to whom, of which kind. Not what is in it, which may only repeat the setting."""
    told: list[str] = field(default_factory=list)
    """The records that were made, and how the job ended."""
    threads: list[int] = field(default_factory=list)
    """Of torch, in each step."""
    files: list[str] = field(default_factory=list)
    """What is in the folder of the test."""

    def sent(self, sender: str, to: str, message: Message) -> None: ...

    def delivered(self, sender: str, to: str, message: Message) -> None:
        self.traffic.append((self.now(), sender, to, type(message).__name__))

    now: Callable[[], float] = field(default=float, compare=False)


@dataclass(frozen=True)
class Case:
    """Another value of an option, and what must come out otherwise."""

    value: Any
    """What it is set to; a function is called with a folder for it."""
    sees: str = "weights"
    """The part of `Seen` that must be another."""
    beside: Mapping[str, Any] = field(default_factory=dict)
    """Other options, set with it and without."""
    place: Mapping[str, Any] = field(default_factory=dict)
    """Of the virtual cluster, with it and without."""


@dataclass(frozen=True)
class Elsewhere:
    """A test that plays an option, where no simulation can."""

    test: str


Cases = Case | tuple[Case, ...] | Elsewhere


class Noting(nn.Module):
    """Notes how many threads torch has."""

    seen: list[int] = []  # noqa: RUF012

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        self.seen.append(torch.get_num_threads())
        return inputs


def task(normed: bool = True, data_dir: str | None = None) -> Task:
    """A small model, with buffers where its strategy can have them, on as many samples as the folder says."""
    norm = (nn.BatchNorm1d(10),) if normed else ()
    samples = int(Path(data_dir, "count").read_text()) if data_dir else SAMPLES
    return classes(lambda: nn.Sequential(Noting(), nn.Linear(6, 10), *norm, nn.Tanh(), nn.Linear(10, 3)), samples)  # type: ignore[no-any-return]


def made(kind: type[Strategy], options: Mapping[str, Any]) -> Job:
    """A job of a strategy with some options, of itself and of jobs."""
    own = {f.name for f in dataclasses.fields(kind)}
    usual: dict[str, Any] = {"task": task(), "batch_size": 4, "evaluate_every": 0, "snapshot_every": "0"}
    if kind.name == "sandblaster":
        usual |= {
            "task": task(normed=False),
            "iterations": 6,
            "portion_size": 4,
            "send_every": 2,
            "deterministic": True,
        }
        usual.pop("batch_size")
        options = {"iterations" if name == "epochs" else name: value for name, value in options.items()}
    options = {**usual, **options}
    strategy = kind(**{name: value for name, value in options.items() if name in own})
    return Job(strategy=strategy, **{name: value for name, value in options.items() if name not in own})


def play(job: Job, place: Simulated, folder: Path) -> Seen:
    """Run a job, and look at it."""
    seen, staged = Seen(), running.Simulation
    Noting.seen = seen.threads
    simulations: list[Any] = []
    loops: list[Any] = []
    record, loop = Attempt.record, running.Alone

    def stage(*args: Any, **more: Any) -> Simulation:
        simulation = staged(*args, **more)
        seen.now = simulation.clock.now
        attach(simulation.network, seen)
        simulations.append(simulation)
        return simulation

    def alone(*args: Any, **more: Any) -> Any:
        loops.append(loop(*args, **more))
        return loops[-1]

    def note(attempt: Attempt, moment: float, role: str, one: Record) -> None:
        seen.told.append(type(one).__name__)
        record(attempt, moment, role, one)

    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        patch.setattr(running, "Simulation", stage)
        patch.setattr(running, "Alone", alone)
        patch.setattr(Attempt, "record", note)
        try:
            seen.told.append(str(place.run(job)["outcome"]))
        except DistbeliefError as error:
            seen.told.append(f"{type(error).__name__}: {error}")
    seen.weights = [one for simulation in simulations for one in held(simulation)]
    seen.weights += [value.numpy().tobytes() for one in loops for value in one.model.state_dict().values()]
    seen.files = sorted(
        str(path.relative_to(folder)) for path in folder.rglob("*") if not path.name.startswith("events.out")
    )
    return seen


def held(simulation: Any) -> list[bytes]:
    """What is trained, by whoever holds it."""
    if simulation.memory is not None:
        return [bytes(mapping_of(simulation).numpy())]
    if simulation.shards:
        return [bytes(shard.held.moving().numpy()) for shard in simulation.shards if not simulation.cluster.phantom]
    stories = [part.player for part in simulation.parts.values()]
    wholes = [story.whole for story in stories if hasattr(story, "whole") and hasattr(story.whole, "flat")]
    return [bytes(value.numpy().tobytes()) for whole in wholes for value in whole.flat.module.state_dict().values()]


# the cases


def weights_of_another_start(folder: Path, job: Job) -> str:
    path = folder / "weights.safetensors"
    save_file(build_model(job.task, 99, "cpu").state_dict(), path)  # type: ignore[arg-type]
    return str(path)


def half_the_data(folder: Path, _: Job) -> str:
    (folder / "count").write_text(str(SAMPLES // 2))
    return str(folder)


STEADY = {"compute": ComputeModel(spread="constant")}
UNEVEN = {"compute": ComputeModel(spread="constant", slow={0: 4.0})}
SCALED = {"lr_scaling": "linear", "base_batch": 2}
LOCAL = {"local_optimizer": optim("sgd"), "optimizer": optim("sgd", lr=0.5), "shards": 2}
DECAYING = {"optimizer": optim("sgd", weight_decay=0.5)}


def dying(who: str, message: int = 12) -> dict[str, Any]:
    return {"crashes": (Crash(who, message),), "restart_seconds": 0.01, **STEADY}


ALL: dict[str, Cases] = {
    "replicas": Case(3, "traffic"),
    "shards": Case(3, "traffic"),
    "optimizer": (
        Case(optim("adagrad")), Case(optim("sgd", lr=0.01)), Case(optim("sgd", weight_decay=0.5)),
        Case(optim("sgd", weight_decay=0.5, decay_exempt=True), beside=DECAYING),
        Case(optim("momentum", momentum=0.5), beside={"optimizer": optim("momentum")}),
    ),
    "restarts": (
        Case(0, "told", {"epochs": 3, "replicas": 1}, dying("replica 0", 5)),
        Case(0, "told", {"epochs": 3}, dying("coordinator")),
    ),
    "standby": Case(1, "traffic"),
    "partitions": Case(2, "traffic"),
    "split": Case("neurons", "traffic", {"partitions": 2}),
    "microbatches": Case(2, "traffic", {"partitions": 2, "split": "stages"}),
    "schedule": Case(
        "gpipe", "traffic",
        {"partitions": 2, "split": "stages", "microbatches": 3, "batch_size": 6, "drop_last": True},
    ),
    "chunks": Elsewhere("simulated/test_partitions.py::test_a_sequence_is_cut_in_as_many_chunks_as_are_named"),
    "push_every": Case(2),
    "fetch_every": Case(2),
    "local_lr": Case(0.5, beside=LOCAL),
    "local_optimizer": (Case(optim("adamw"), beside=LOCAL), Case(None, beside=LOCAL)),
    "push_weight": Case("speed", beside=LOCAL, place=UNEVEN),
    "stagger": Case(True, beside={**LOCAL, "push_every": 2}),
    "stagger_delay": Case(1, beside={**LOCAL, "push_every": 3, "stagger": True}),
    "stagger_mix": Case(0.5, beside={**LOCAL, "push_every": 3, "stagger": True}),
    "prefetch": Case(1),
    "warm_start_steps": Case(5),
    "staleness_scaling": (Case("inverse", beside={"replicas": 3}), Case("exponential", beside={"replicas": 3,
        "staleness_scaling": "inverse"})),
    "backup_workers": Case(1, beside={"replicas": 3}),
    "quorum": (Case(0.6, beside={"replicas": 3}), Case(2, beside={"replicas": 3})),
    "n": Case(2, beside={"replicas": 4}),
    "staleness": Case(0, place=UNEVEN),
    "lr_scaling": Case("sqrt", beside=SCALED),
    "base_batch": Case(4, beside=SCALED),
    "accumulate": Case(2),
    "algorithm": Case("ring", "traffic", {"replicas": 3, "algorithm": "naive"}),
    "bucket_mb": Case(0.0002, "traffic"),
    "buffers": Case("local"),
    "on_death": Case("stop", "told", {"epochs": 3}, dying("replica 1")),
    "per_host": (
        Case(2, "traffic", {"replicas": 4, "algorithm": "hierarchical"}),
        Case(2, "traffic", {"replicas": 4, "per_host": 4}, {"network": NetworkModel(latency=1e-3, local_latency=1e-6)}),
    ),
    "locks": Case("round-robin", "traffic", place=UNEVEN),
    # of a job
    "epochs": Case(2),
    "batch_size": Case(5),
    "drop_last": Case(True, beside={"batch_size": 6}),
    "order": Case("sequential"),
    "data": Case("own", "told"),  # or refused, where replicas cannot have minibatches of their own
    "lr_schedule": (
        *(Case(name) for name in ("linear", "polynomial", "cosine", "step")),
        Case("backoff", beside={"epochs": 3}),
    ),
    "lr_steps": (Case((0.25,), beside={"lr_schedule": "step"}), Case((0.5,), beside={"lr_schedule": "backoff",
        "epochs": 3})),
    "lr_gamma": (Case(0.5, beside={"lr_schedule": "step"}), Case(0.5, beside={"lr_schedule": "backoff", "epochs": 3})),
    "lr_power": Case(3.0, beside={"lr_schedule": "polynomial"}),
    "warmup_epochs": Case(0.5),
    "warmup": Case("constant", "told", {"warmup_epochs": 0.5}),  # refused, where the rate is not scaled
    "clip_norm": Case(0.1),
    "precision": (Case("bf16"), Case("fp16")),
    "fixed_point": (Case("dynamic:10,12"), Case("dynamic:10,24")),
    "seed": Case(1),
    "target_accuracy": Case(1e-9, "told", {"epochs": 3, "evaluate_every": 1}),
    "target_loss": Case(1e9, "told", {"epochs": 3, "evaluate_every": 1}),
    "budget": Case("5ms", "told", {"epochs": 9}),
    "evaluate_every": (
        Case(2, "told", {"epochs": 4, "evaluate_every": 1}),
        Case("7minibatches", "told", {"epochs": 4, "evaluate_every": 0}),
    ),
    "checkpoint_every": Case(2, "told", {"epochs": 4}),
    "snapshot_every": (Case("3", "told"), Case("2ms", "told", {"epochs": 3}), Case("3minibatches", "told")),
    "keep_checkpoints": Case(1, "files", {"epochs": 4, "out": "run"}),
    "init_from": Case(weights_of_another_start),
    "device": Case("cuda:77", "told"),
    "threads": Case(2, "threads"),
    "data_dir": Case(half_the_data, "threads", {"task": "foldered:task"}),
    "out": Case("run", "files"),
    "resume": Case(True, "told", {"epochs": 2, "out": "run"}),
}  # fmt: skip
"""By the option's name, whichever strategy has it."""

REFUSED = Case("sequential", "told")
SINGLE: dict[str, Cases] = {
    "checkpoint_every": Case(2, "told", {"epochs": 4, "out": "run"}),
    "snapshot_every": (
        Case("3", "told", {"out": "run"}),
        Case("2ms", "told", {"epochs": 3, "out": "run"}),
        Case("3minibatches", "told", {"out": "run"}),
    ),
    "warmup": Case("constant", beside={**SCALED, "warmup_epochs": 0.5}),
}
OWN: dict[str, dict[str, Cases]] = {
    "single": SINGLE,
    "synchronous": {"warmup": SINGLE["warmup"], "data": Case("own")},
    "allreduce": {
        "order": REFUSED,
        "warmup": SINGLE["warmup"],
        "snapshot_every": (
            Case("3", "told"),
            Case("6minibatches", "told"),
            Case("100ms", "told", {"epochs": 12, "checkpoint_every": 0}, {"compute": ComputeModel(step=0.05)}),
        ),
        "restarts": (*ALL["restarts"], Case(0, "told", {"epochs": 3, "on_death": "stop"}, dying("coordinator"))),  # type: ignore[misc]
    },
    "softsync": {"staleness_scaling": Case("inverse", beside={"replicas": 4, "n": 4})},
    "hogwild": {"order": REFUSED},
    "locking": {"order": REFUSED},
    "sandblaster": {
        "order": REFUSED,
        "schedule": Case(
            "gpipe", "traffic", {"partitions": 2, "split": "stages", "microbatches": 3, "portion_size": 6}
        ),
        "evaluate_every": Case(2, "told", {"epochs": 4, "evaluate_every": 1}),
        "snapshot_every": (Case("3", "told"), Case("2ms", "told", {"epochs": 3})),
        "iterations": Case(5),
        "batch_size": Case(20),
        "overlap": Case(0.4, beside={"batch_size": 20}),
        "portion_size": Case(5, "traffic"),
        "send_every": Case(3, "traffic"),
        "backup_portions": Case(0, "traffic", {"replicas": 3, "send_every": 1}, UNEVEN),
        "method": (Case("cg"), Case("gradient")),
        "history": Case(2, beside={"epochs": 6}),
        "line_search": Case("none"),
        "step": (
            Case(0.1, beside={"line_search": "none"}),
            Case(9.0, beside={"method": "cg"}),
            Case(9.0, beside={"method": "gradient"}),
        ),
        "weight_decay": Case(0.1),
        "tolerance": Case(1.0),
        "deterministic": Case(False, place=UNEVEN, beside={"replicas": 3, "send_every": 1}),
    },
}
"""Those that a strategy plays by itself."""


def options_of(kind: type[Strategy]) -> list[str]:
    """Every option that a job of a strategy has."""
    without = {"task", "strategy", *kind.meaningless} - {f.name for f in dataclasses.fields(kind)}
    return [
        f.name
        for part in (kind, Job)
        for f in dataclasses.fields(part)
        if f.init and f.name not in without and f.name not in ("task", "strategy")
    ]


def cases_of(strategy: str, option: str) -> tuple[Case | Elsewhere | None, ...]:
    """What there is for an option; none is a test that fails."""
    found = OWN.get(strategy, {}).get(option, ALL.get(option))
    return found if isinstance(found, tuple) else (found,)


EVERY = [
    pytest.param(name, option, case, id=f"{name} {option} {number}" if number else f"{name} {option}")
    for name, kind in STRATEGIES.items()
    for option in dict.fromkeys(options_of(kind))
    for number, case in enumerate(cases_of(name, option))
]


@pytest.mark.parametrize(("strategy", "option", "case"), EVERY)
@pytest.mark.long
def test_no_option_of_a_strategy_is_dead(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, strategy: str, option: str, case: Case | Elsewhere | None
) -> None:
    assert case, f"{strategy} has an option {option!r} without a case here: what does it change?"
    if isinstance(case, Elsewhere):
        assert_there(case.test)
        return
    foldered = SimpleNamespace(task=lambda data_dir=None: task(strategy != "sandblaster", data_dir))
    monkeypatch.setitem(sys.modules, "foldered", foldered)  # type: ignore[arg-type]
    kind, place = STRATEGIES[strategy], Simulated(**case.place)

    def came(name: str, more: Mapping[str, Any]) -> Seen:
        folder = tmp_path / name
        folder.mkdir()
        if option == "resume":
            play(made(kind, {**case.beside, "epochs": 1}), place, folder)
        return play(made(kind, {**case.beside, **more}), place, folder)

    key = option * ("out" in case.beside), strategy, repr(case.beside), repr(case.place)
    before = PLAYED.get(key) or PLAYED.setdefault(key, came("without", {}))
    value = case.value(tmp_path, made(kind, case.beside)) if callable(case.value) else case.value
    assert_differ([before, came("with", {option: value})], case.sees)


PLAYED: dict[tuple[str, ...], Seen] = {}
"""What came of the jobs that several options are held against."""


def assert_differ(came: list[Seen], sees: str) -> None:
    """That what is looked at came out otherwise, of two jobs that were both trained to their end."""
    assert getattr(came[0], sees) != getattr(came[1], sees)
    assert sees == "told" or all(one.told[-1] == "done" for one in came), came[1].told[-1]


def assert_there(test: str) -> None:
    """That a test has not been renamed, or taken away."""
    file, _, name = test.partition("::")
    assert f"def {name}(" in (TESTS / file).read_text()


# the virtual cluster


LATE = {"delay": 1e-2, "delay_chance": 0.2}
TWO_HOSTS = Allreduce(4, algorithm="hierarchical", per_host=2)
PLACES: dict[type, dict[str, tuple[tuple[Any, str, Mapping[str, Any], Strategy], ...]]] = {
    NetworkModel: {
        "latency": ((1e-3, "traffic", {}, Downpour()),),
        "bandwidth": ((1e5, "traffic", {}, Downpour()),),
        "jitter": ((1.0, "traffic", {}, Downpour()),),
        "delay_chance": ((0.5, "traffic", LATE, Downpour()),),
        "delay": ((1e-1, "traffic", LATE, Downpour()),),
        "reduction": tuple((1e-5, "traffic", {}, strategy) for strategy in (Allreduce(), Hogwild())),
        "local_latency": ((1e-6, "traffic", {}, TWO_HOSTS),),
        "local_bandwidth": ((1e11, "traffic", {}, TWO_HOSTS),),
        "outages": (((Outage(2e-3, 7e-3, ("replica 1",)),), "traffic", {}, Downpour()),),
    },
    ComputeModel: {
        "step": ((2e-3, "traffic", {}, Downpour()),),
        "spread": (("constant", "traffic", {}, Downpour()), ("exponential", "traffic", {}, Downpour())),
        "variation": ((0.5, "traffic", {}, Downpour()),),
        "slow": (({1: 4.0}, "traffic", {}, Downpour()),),
        "straggle_chance": ((0.5, "traffic", {}, Downpour()),),
        "straggle_factor": ((5.0, "traffic", {"straggle_chance": 0.5}, Downpour()),),
    },
    Handling: {"message": ((1e-3, "traffic", {}, Downpour()),), "memory": ((1e5, "traffic", {}, Downpour()),)},
    Hosts: {
        "cores": ((2, "traffic", {}, Downpour(4)),),
        "replicas": ((1, "traffic", {}, Downpour(4)),),
        "together": ((0.5, "traffic", {"cores": 2}, Downpour(4)),),
        "busy": ((1e-4, "traffic", {}, Downpour(4)),),
    },
    Simulated: {
        "network": ((NetworkModel(latency=1e-3), "traffic", {}, Downpour()),),
        "compute": ((ComputeModel(step=2e-3), "traffic", {}, Downpour()),),
        "crashes": (((Crash("replica 1", 8),), "told", {}, Downpour()),),
        "leaves": (((LeavingHost("replica 1", 8, 9.0),), "told", {}, Downpour()),),
        "restart_seconds": ((1e-3, "traffic", {"crashes": (Crash("replica 1", 8),)}, Downpour()),),
        "phantom": ((True, "weights", {}, Downpour()),),
        "keep": ((True, "files", {}, Downpour()),),
        "handling": ((Handling(message=1e-3), "traffic", {}, Downpour()),),
        "hosts": ((Hosts(cores=2), "traffic", {}, Downpour()),),
        "topology": (("tree:2x2", "traffic", {}, Downpour()),),
        "path": (("served", "traffic", {"hosts": Hosts(cores=2)}, Downpour()),),
    },
}
"""Of each option: another value, what must come out otherwise, other options beside it, and the strategy that is
played.
"""


def names_of(part: type) -> list[str]:
    return (
        [f.name for f in dataclasses.fields(part)] if dataclasses.is_dataclass(part) else list(part.__struct_fields__)
    )  # type: ignore[attr-defined]


@pytest.mark.parametrize(("part", "option"), [(part, option) for part in PLACES for option in names_of(part)])
def test_no_option_of_the_virtual_cluster_is_dead(tmp_path: Path, part: type, option: str) -> None:
    assert option in PLACES[part], f"{part.__name__} has an option {option!r} without a case here: what does it change?"
    for number, (value, sees, beside, strategy) in enumerate(PLACES[part][option]):
        came = []
        for more in ({}, {option: value}):
            folder = tmp_path / f"{number} {len(more)}"
            folder.mkdir()
            made_part = part(**{**beside, **more})
            place = (
                made_part
                if isinstance(made_part, Simulated)
                else Simulated(**{part.__name__.removesuffix("Model").lower(): made_part})
            )
            came.append(play(Job(task(), strategy, batch_size=4, evaluate_every=0, epochs=2), place, folder))
        assert_differ(came, sees)
