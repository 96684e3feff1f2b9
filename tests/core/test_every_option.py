"""No option of a place or a benchmark is dead; those of strategies are in tests/simulated/test_options."""

from __future__ import annotations

import copy
import dataclasses
import json
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import distbelief as db
from benchmarks import (
    BENCHES,
    allreduce,
    cost,
    loading,
    local,
    memory,
    plan,
    sandblaster,
    split,
    standby,
    start,
    straggle,
    train,
    wire,
)
from benchmarks.parts import loops, partitions, torch_split, workloads
from benchmarks.parts.timing import figure
from distbelief import tasks
from distbelief.cli import commands, costs, options, results, tables
from distbelief.cli.commands import CheckOptions
from distbelief.cli.results import PredictOptions
from distbelief.cli.watch import WatchOptions
from distbelief.errors import UsageError
from distbelief.lab.cost import cost as costing
from distbelief.lab.cost import splitting
from distbelief.lab.draw import split as drawing
from distbelief.lab.plan import plan as planning
from distbelief.lab.plan.pricing import Terms
from distbelief.lab.watch import reading, serving
from distbelief.places import evaluate, status
from distbelief.places.attempt import Attempt
from distbelief.places.cluster.cluster import Cluster
from distbelief.places.join import guest
from distbelief.places.prediction import predict
from distbelief.places.processes import forkserver
from distbelief.places.processes.running import spec_of
from distbelief.places.simulated import simulated, sweep

TCP = {"transport": "tcp"}
LOCAL: dict[str, tuple[Any, dict[str, Any]]] = {
    "transport": ("tcp", {}),
    "bind": ("127.0.0.2:7000", TCP),
    "advertise": ("127.0.0.3", TCP),
    "insecure": (True, {**TCP, "bind": "10.0.0.1"}),
    "tls": (True, TCP),
    "listen": ("127.0.0.1:7000", {}),
    "path": ("served", {}),
    "logs": (True, {}),
    "compute": (db.ComputeModel(step=0.5), {}),
}
"""Of each option: another value, and what is set beside it."""


def told(place: db.Local) -> tuple[Any, ...]:
    """What the processes of a job are told of a place, but for the setting itself."""
    job = db.Job("digits")
    spec = spec_of(place, Attempt(job, place.settings(job), db.View(), 0.0, kept=False), [], True)
    # what --logs does to what is printed is seen in tests/processes/test_scripts.py
    return spec.transport, spec.bind, spec.advertise, spec.compute, spec.direct, place.encrypted, place.logs


@pytest.mark.parametrize("name", [field.name for field in dataclasses.fields(db.Local)])
def test_no_option_of_processes_is_dead(name: str) -> None:
    assert name in LOCAL, f"Local has an option {name!r} without a case here: what does it change?"
    value, beside = LOCAL[name]
    assert told(db.Local(**beside)) != told(db.Local(**{**beside, name: value}))


def typed(line: str) -> dict[str, list[str]]:
    """The words of each option of a line, by the option's name."""
    found = [f"--{part}".split() for part in line.split("--")[1:]]
    return {words[0][2:].replace("-", "_"): words for words in found}


WORDS = typed(
    "--network latency=1ms --topology tree:8x8 --compute 2ms --handling message=1ms --hosts cores=2 --path served "
    "--stragglers 1:4 --faults crash=1@9 --phantom --keep --sweep 3 --pad 50ms --straggle 1:4 --quiet --json "
    "--metrics 9400 --track mlflow --page"
)
"""A value of each option that only the command line has, or has in words of its own."""
REAL = {("simulate", "metrics"), ("simulate", "track"), ("simulate", "page")}
"""Options of the output that follow real time."""


@pytest.mark.parametrize(
    ("command", "name"),
    [
        (command, field.name)
        for command, kinds in (
            ("simulate", (options.VirtualOptions, options.Showing)),
            ("train", (options.Padded, options.Showing)),
        )
        for kind in kinds
        for field in dataclasses.fields(kind)
        if (command, field.name) not in REAL
    ],
)
def test_no_word_of_a_command_is_dead(
    command: str, name: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert name in WORDS, f"{command} has an option {name!r} without a case here: what does it change?"
    asked: list[Any] = []
    result = {"outcome": "done", "run": "there", "task": "digits"}
    for kind in (simulated.Simulated, db.Local):
        monkeypatch.setattr(kind, "run", lambda place, _, view: [asked.append((place, view)), result][1])
    monkeypatch.setattr(
        sweep, "sweep", lambda _place, _job, count: [asked.append(count), [sweep.SeedResult(0, "done", "")]][1]
    )
    monkeypatch.setattr("distbelief.record.live.summary", lambda *_: "summary")
    came = []
    for words in ([], WORDS[name]):
        asked.clear()
        getattr(commands, command)(["digits", "downpour", *words])
        came.append((list(asked), capsys.readouterr().out))
    assert came[0] != came[1]
    assert name not in ("quiet", "json") or came[0][1] != came[1][1]


SMALL: dict[str, tuple[Any, str, str]] = {
    "check": (
        CheckOptions, "mnist",
        "--hosts a:2 --hostfile f --on ssh --remote-shell sh --interface eth1 --data-dir there "
        "--topology-out measured.conf --json",
    ),
    "evaluate": (
        results.EvaluateOptions, "RUN", "--data-dir there --device cuda:1 --inference int8 --task mine:task --json",
    ),
    "predict": (
        PredictOptions, "RUN digits --out o.safetensors",
        "--out other.safetensors --replicas 3 --partitions 2 --split stages --batch-size 8 --data-dir there "
        "--device cuda:1 --threads 2 --quiet --json",
    ),
    "status": (commands.StatusOptions, "RUN", "--watch --json"),
    "watch": (WatchOptions, "RUN", "--bind 127.0.0.1:8000 --control --proxy hub.example --stay 60"),
    "join": (
        commands.JoinOptions, "RUN",
        "--data-dir there --device cuda:1 --threads 2 --strategy mine:Own --leave-within 30 --quiet",
    ),
    "draw": (costs.DrawOptions, "hierarchical", "--ranks 6 --per-host 2 --network latency=1ms --topology tree:2x4"),
    "draw 1f1b": (costs.DrawPipelineOptions, "", "--partitions 3 --microbatches 5 --svg drawn.svg"),
    "cost": (
        costs.CostOptions, "digits",
        "--batch-size 8 --optimizer adam --epochs 2 --watts 65 --price-per-hour 0.1 --max-memory 2GB --device cuda:1 "
        "--seconds 2 --data-dir there --compare other.json --json",
    ),
    "split": (
        costs.SplitOptions, "mnist-gru --split time",
        "--partitions 3 --split conv*=time --batch-size 8 --schedule gpipe --microbatches 2 --chunks 3 "
        "--optimizer adam --network latency=1ms --seconds 2 --device cuda:1 --draw drawn.svg --draw-step step.svg "
        "--data-dir there --json",
    ),
    "plan": (
        costs.PlanOptions, "digits",
        "--machines 4x8 --topology tree:2x2 --stragglers 1:4 --network latency=1ms --max-memory 2GB "
        "--strategies single --batch-size 8 --optimizer adam --seconds 2 --replicas 1-4 --draw picture.svg "
        "--data-dir there --json",
    ),
}  # fmt: skip
"""Of each command: its options, the words before them, and each option with another value than its own."""


@pytest.mark.parametrize(
    ("command", "name"),
    [(command, field.name) for command, (kind, *_) in SMALL.items() for field in dataclasses.fields(kind)],
)
def test_no_option_of_a_small_command_is_dead(
    command: str, name: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    _, before, line = SMALL[command]
    words = typed(line)
    assert name in words, f"{command} has an option {name!r} without a case here: what does it change?"
    asked: list[Any] = []
    measured = {"task": "digits", "test_accuracy": 0.5, "test_metrics": {}, "test_loss": 1.0, "samples": 360}
    measured |= {"model_bytes": 9, "seconds": 0.1}
    monkeypatch.setattr(evaluate, "evaluate", lambda *words: [asked.append(words), measured][1])
    made = {"out": "", "samples": 360, "samples_per_second": 1.0}
    monkeypatch.setattr(forkserver, "start", bool)
    monkeypatch.setattr(
        predict, "predict", lambda *words, **more: [asked.append((words, {**more, "told": 0})), made][1]
    )
    monkeypatch.setattr(
        status, "status", lambda _: [asked.append("looked"), {"running": len(asked) < 3, "members": []}][1]
    )
    monkeypatch.setattr(status, "lines", lambda _: ["nobody"])
    monkeypatch.setattr(commands.time, "sleep", lambda _: None)
    monkeypatch.setattr(serving, "serve", lambda *words: asked.append(words[2:]))
    monkeypatch.setattr(status, "supervisor", lambda _: 0)
    monkeypatch.setattr(reading, "Reading", lambda _: None)
    monkeypatch.setattr(Cluster, "check", lambda *words: [asked.append(words), []][1])
    monkeypatch.setattr(
        guest.Guest,
        "run",
        lambda self: [
            asked.append((self.data_dir, self.device, self.threads, self.strategy, self.leave_within)),
            self.tell("joined"),
        ],
    )
    monkeypatch.setattr(tasks, "resolve", lambda *words: [asked.append(words), SimpleNamespace(split=None)][1])
    monkeypatch.setattr(costing, "measure", lambda _, *words: [asked.append(words[:-1]), Told()][1])
    monkeypatch.setattr(tables, "show_cost", print)
    monkeypatch.setattr(planning, "plan", lambda *words: [asked.append(words[:-1]), {}][1])
    monkeypatch.setattr(tables, "show_plan", lambda _: print("a table"))
    monkeypatch.setattr("distbelief.lab.plan.scaling.scaling", lambda *words, **_: asked.append(words))
    monkeypatch.setattr(tables, "show_scaling", print)
    split = Told(), [], None, None
    monkeypatch.setattr(splitting, "measure", lambda _, *words: [asked.append(words[:-1]), split][1])
    monkeypatch.setattr(costs, "draw_svg", lambda *_: "another picture")
    monkeypatch.setattr(tables, "show_split", print)
    monkeypatch.setattr(drawing, "draw_split", lambda _: "a picture")
    monkeypatch.setattr(costs.Path, "write_text", lambda path, text, _: asked.append((str(path), text)))
    command, *first = command.split()
    came = []
    for more in ([], words[name]):
        asked.clear()
        refused = ""
        try:
            getattr(commands, command)([*first, *before.split(), *more])
        except UsageError as error:
            refused = str(error)
        came.append((list(asked), capsys.readouterr().out, refused))
    assert came[0] != came[1]


class Told:
    """What a cost says of itself."""

    def as_json(self) -> dict[str, str]:
        return {"step": "1 ms"}

    def __str__(self) -> str:
        return "a table"


# benchmarks

FAST: dict[str, dict[str, Any]] = {
    "wire": {"sizes": (256,), "shards": 3, "repeats": 4, "seconds": 0.5},
    "train": {"models": ("lenet",), "repeats": 2, "replicas": (3,), "epochs": 2, "batch_size": 32, "transport": "tcp"},
    "allreduce": {"sizes": (256,), "ranks": (3,), "repeats": 4, "namespaces": (2,), "encrypted": (3,), "rate": 10},
    "hogwild": {"repeats": 2, "epochs": 2, "batch_size": 32, "svm_batch_size": 4},
    "local": {"parts": ("storm",), "steps": 9, "epochs": 2, "seeds": 2, "batch_size": 16, "pad": 0.5},
    "straggle": {"task": "mnist", "replicas": 3, "epochs": 2, "batch_size": 32, "pad": 0.5, "repeats": 2},
    "standby": {"task": "digits", "replicas": 3, "shards": 3, "repeats": 2},
    "start": {"task": "sparse-svm", "replicas": 3, "shards": 3, "repeats": 2},
    "memory": {"optimizer": "adam", "epochs": 2},
    "cost": {"models": ("lenet",), "seconds": 5.0},
    "plan": {"models": ("split",), "repeats": 2, "seconds": 9.0},
    "loading": {"milliseconds": 1.0, "epochs": 3, "repeats": 2},
    "split": {"models": ("lenet",), "parts": ("whole",), "microbatches": (2,), "repeats": 2, "device": "cuda"},
    "simulator": {"replicas": 4, "shards": 3, "steps": 3, "repeats": 2},
    "sandblaster": {"task": "digits", "portion_size": 100, "repeats": 2, "iterations": 9},
}  # fmt: skip
"""Another value of each option of each benchmark, beside those that all have."""
ALL: dict[str, Any] = {"json": "made.json", "quick": True, "quiet": True}
BESIDE: dict[str, dict[str, Any]] = {
    "allreduce": {"namespaces": (3,)},
    "simulator": {"replicas": 3, "shards": 2, "steps": 2},
    **{name: {"repeats": 1} for name in ("standby", "start", "hogwild", "sandblaster", "straggle")},
    "train": {"models": ("mlp",), "repeats": 1},
    "plan": {"models": ("mlp",), "repeats": 1},
    "split": {"models": ("mlp",), "repeats": 1},
}
"""What is set in both runs."""
HELD = {"usual": 1.0, "peak": 1.0}
LOCAL_STEPS = {"test_loss": 1.0, "bytes": {"pushed": 1, "fetched": 1}, "samples": 10**9, "seconds": 1.0, "steps": 1,
               "forgotten": 0, "per_replica": [], "dead": [], "history": [{"seconds": 1.0, "samples": 10**9,
               "test_loss": 1.0}]}  # fmt: skip
RESULT = {"samples_per_second": 1.0, "test_accuracy": 0.5, "seconds": 1.0, "updates": 1, "descent": {"loss": 1.0},
          "history": [{"seconds": 1.0, "samples": 1, "test_accuracy": 0.5}]}  # fmt: skip
TERMS = Terms(1e-3, 0.0, 0.0, 0.0, 1000.0, 0.0)
PLAN = planning.TrainingPlan(task="mnist", machines="1x2", batch_size=64, optimizer="adam", seconds=1.0,
                             why="", changes=[], notes=[], rows=[planning.Row(
                                 what="single", command="single", machines="1x2", replicas=1, shards=0, partitions=1,
                                 memory=0, measured=TERMS)])  # fmt: skip
MEASURING: tuple[tuple[Any, str, Any], ...] = (
    (workloads, "run", RESULT), (loops, "independent", 1.0), (loops, "beside", 1.0), (loops, "ddp", 1.0),
    (partitions, "split", 1.0), (partitions, "crossing_seconds", 1.0), (partitions, "copying_seconds", 1.0),
    (split, "placed", None), (split, "_held", {}),
    (torch_split, "pipeline", 1.0), (torch_split, "tensors", 1.0),
    (wire, "_of_size", {}), (wire, "_figures", [figure("speed", 1.0, 1.0)]), (wire, "_tables", []),
    (train, "_figures", []),
    (allreduce, "_on_one_host", {}), (allreduce, "_limited", {}), (allreduce, "_encrypted", {}),
    (allreduce.lines, "hosts", "hosts"), (straggle, "_figures", []),
    (memory, "_grown", {"replica 0": HELD, "shard 0": HELD, "together": HELD}),
    (start, "_import_torch", 1.0), (standby, "_watch", (1.0, 1.0)),
    (loading, "_rate", 1.0), (local, "play", LOCAL_STEPS), (local, "command", LOCAL_STEPS),
    (cost, "_steps", {"median_error": 0.1, "rows": {}}),
    (cost, "_memory", {"error": 0.1, "process": 1e9, "traced": 1e9}),
    (plan, "plan", PLAN),
    (sandblaster, "_halves", 1.0), (sandblaster, "_torchs", 1.0),
)  # fmt: skip
"""What takes the time of a benchmark, and what it is to say here; what it is asked for, beside the options as they were
given, is written down.
"""


class Command:
    """A command that was started, and has ended."""

    returncode, stdout = 0, ('{"event": "Stepped", "steps": 1}',)

    def __init__(self, asked: list[str], command: list[str]) -> None:
        out = Path(command[command.index("--out") + 1])
        asked.append(" ".join(word for word in command if word != str(out)))
        out.mkdir()
        (out / "result.json").write_text(json.dumps({"forgotten": 0}))

    def __enter__(self) -> Command:
        return self

    def __exit__(self, *_: object) -> None: ...

    def __getattr__(self, name: str) -> Callable[..., None]:
        return lambda *_, **_more: None


def measured(name: str, monkeypatch: pytest.MonkeyPatch, **more: Any) -> list[str]:
    """What a benchmark asks for, with some options."""
    bench, asked = BENCHES[name], list[str]()

    def measuring(what: str, answer: Any) -> Callable[..., Any]:
        def ask(*words: Any, **named: Any) -> Any:
            asked.append(f"{what} {[one for one in words if not isinstance(one, bench.options)]} {named}")
            return copy.deepcopy(answer)

        return ask

    for module, function, answer in MEASURING:
        monkeypatch.setattr(module, function, measuring(function, answer))
    for module in (start, standby):
        monkeypatch.setattr(module.subprocess, "Popen", lambda command, **_: Command(asked, command))
    result = bench.run(
        dataclasses.replace(bench.defaults(more.get("quick", False)), **{**BESIDE.get(name, {}), **more})
    )
    return [*asked, f"{result['messages']} messages, {len(result['runs'])} runs"] if "messages" in result else asked


@pytest.mark.parametrize("quick", [False, True])
@pytest.mark.parametrize(
    ("name", "option"),
    [(name, field.name) for name, bench in BENCHES.items() for field in dataclasses.fields(bench.options)],
)
def test_no_option_of_a_benchmark_is_dead_nor_is_one_beside_quick(
    name: str,
    option: str,
    quick: bool,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    cases = {**ALL, **FAST[name]}
    assert option in cases, f"bench {name} has an option {option!r} without a case here: what does it change?"
    monkeypatch.chdir(tmp_path)
    shorter = {"quick": True} if quick and option != "quick" else {}

    def came(**more: Any) -> Any:
        asked = measured(name, monkeypatch, **{"quiet": True, **shorter, **more})
        made, told = sorted(path.name for path in tmp_path.iterdir()), bool(capsys.readouterr().out)
        return {"json": made, "quiet": told}.get(option, asked)

    own = {"json": {}, "quiet": {"quiet": False}}
    if option in own:
        before = came(**own[option])
    else:
        key = name, bool(shorter)
        before = WITHOUT.get(key) or WITHOUT.setdefault(key, came())
    assert before != came(**{option: cases[option]})


WITHOUT: dict[tuple[str, bool], list[str]] = {}
"""What benchmarks ask for as they are, and when they are to be quick."""
