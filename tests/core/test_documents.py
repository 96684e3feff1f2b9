"""What documents tell a reader to type: the command line takes every command, and every example compiles."""

import ast
import re
import runpy
import shlex
import textwrap
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import distbelief as db
from benchmarks import BENCHES, Bench
from benchmarks import __main__ as benchmarks
from distbelief.cli import commands, costs, main, options, results, tables
from distbelief.cli.commands import CheckOptions
from distbelief.cli.results import CompressOptions, ExpandOptions, PredictOptions, ReportOptions, RunsOptions
from distbelief.cli.study import StudyOptions
from distbelief.cli.watch import WatchOptions
from distbelief.core.protocol import MESSAGES
from distbelief.core.settings import option
from distbelief.lab.compress import compressing
from distbelief.lab.cost import cost, splitting
from distbelief.lab.draw import split as drawing
from distbelief.lab.plan import plan
from distbelief.lab.study import definition
from distbelief.lab.study import report as study_report
from distbelief.lab.study import running as studying
from distbelief.lab.study import runs as study_runs
from distbelief.lab.watch import reading, serving
from distbelief.places import evaluate, status
from distbelief.places.cluster import meeting
from distbelief.places.cluster.hosts import Host
from distbelief.places.join import guest
from distbelief.places.prediction import predict
from distbelief.places.processes import forkserver
from distbelief.places.simulated import sweep
from distbelief.strategies import STRATEGIES

ROOT = Path(__file__).parents[2]
TESTS = [ROOT / "tests", *(path for path in (ROOT / "tests").iterdir() if path.is_dir())]
RECIPES = sorted((ROOT / "recipes").glob("*.py"))
TEXTS = {path.name: path.read_text() for path in [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md")), *RECIPES]}
SPOKEN = {"TASK": "mnist", "STRATEGY": "downpour", "RUN": "run", "FILE": "model.dbz", "NAME": "wire"}
"""Words that stand for one of the reader's own."""
LINES = [
    (name, " ".join(found.split()))
    for name, text in TEXTS.items()
    for found in re.findall(
        r"^\$ (distbelief .*)$|`((?:distbelief|python -m benchmarks) [^`]+)`|"
        r"^(distbelief (?:train|launch|simulate) .*)$",
        text,
        re.MULTILINE,
    )
    for found in ["".join(found)]
]
BLOCKS = [(name, code) for name, text in TEXTS.items() for code in re.findall(r"```python\n(.*?)```", text, re.DOTALL)]
BLOCKS += [(path.name, path.read_text()) for path in RECIPES]


@pytest.fixture
def nothing_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Commands end where they would begin to work, and say what they would have run."""

    def launched(self: db.Local, job: db.Job, script: list[str], _: object) -> None:
        self.settings(job)
        assert (ROOT / script[0]).is_file()

    monkeypatch.syspath_prepend(ROOT / "recipes")
    monkeypatch.setattr(forkserver, "start", bool)
    monkeypatch.setattr(db.Local, "run", lambda self, job, _: self.settings(job))
    monkeypatch.setattr(db.Local, "launch", launched)
    monkeypatch.setattr(db.Simulated, "run", lambda self, job, _: self.settings(job))
    monkeypatch.setattr(
        sweep, "sweep", lambda place, job, count: [sweep.SeedResult(job.seed, "done", str(place.settings(job)))] * count
    )
    monkeypatch.setattr(commands, "_run", lambda run_job, *_: [run_job(), 0][1])
    monkeypatch.setattr(Bench, "run", lambda *_: {})
    monkeypatch.setattr(cost, "measure", lambda *_, **__: SimpleNamespace(as_json=dict))
    monkeypatch.setattr(tables, "show_cost", lambda _: None)
    monkeypatch.setattr(cost, "compare", lambda _: ("", []))
    monkeypatch.setattr(tables, "show_comparison", lambda *_: None)
    monkeypatch.setattr(splitting, "measure", lambda *_, **__: (SimpleNamespace(as_json=dict), [], None, None))
    monkeypatch.setattr(tables, "show_split", lambda _: None)
    monkeypatch.setattr(drawing, "draw_split", lambda _: "")
    monkeypatch.setattr(costs.Path, "write_text", lambda *_: None)
    small = definition.find("small")

    def made_report(*_: object, **__: object) -> SimpleNamespace:
        return SimpleNamespace(lines=list)

    monkeypatch.setattr(definition, "find", lambda _: small)
    monkeypatch.setattr(studying, "run", lambda *_: [])
    monkeypatch.setattr(study_report, "write_report", made_report)
    monkeypatch.setattr(study_report, "make_report", made_report)
    monkeypatch.setattr(study_report, "write_page", lambda *_: "")
    monkeypatch.setattr(study_runs, "study_of", lambda *_: (None, []))
    monkeypatch.setattr(study_runs, "list_runs", lambda _: [])
    first = SimpleNamespace(why="", seconds=1.0, first=SimpleNamespace(command="single"))
    monkeypatch.setattr(plan, "plan", lambda *_, **__: first)
    monkeypatch.setattr(tables, "show_plan", lambda _: None)
    monkeypatch.setattr("distbelief.lab.plan.scaling.scaling", lambda *_, **__: None)
    monkeypatch.setattr("distbelief.lab.plan.scaling.draw_scaling", lambda _: "")
    monkeypatch.setattr(tables, "show_scaling", lambda _: None)
    monkeypatch.setattr(
        evaluate,
        "evaluate",
        lambda *_: {
            "task": "",
            "test_accuracy": 0.0,
            "test_metrics": {},
            "test_loss": 0.0,
            "samples": 0,
            "model_bytes": 0,
            "seconds": 0.0,
        },
    )
    predicted = {"out": "", "samples": 0, "samples_per_second": 0.0}
    monkeypatch.setattr(predict, "predict", lambda *_, **__: predicted)
    made = {"layers": [], "left_alone": {}, "file": "", "bytes": 1, "dense_bytes": 1, "ratio": 1.0}
    monkeypatch.setattr(compressing, "compress", lambda *_, **__: made)
    monkeypatch.setattr(compressing, "expand", lambda *_: "")
    nodes = SimpleNamespace(hosts=(Host("n0", 1), Host("n1", 1)))
    monkeypatch.setattr(meeting, "meet_by_ray", lambda *_: nodes)
    monkeypatch.setattr(db.Cluster, "check", lambda *_: [])
    monkeypatch.setattr(status, "status", lambda _: {"running": False})
    monkeypatch.setattr(status, "lines", lambda _: [])
    monkeypatch.setattr(status, "supervisor", lambda _: 0)
    monkeypatch.setattr(reading, "Reading", lambda _: None)
    monkeypatch.setattr(serving, "serve", lambda *_: None)
    monkeypatch.setattr(guest.Guest, "run", lambda _: None)
    monkeypatch.setattr(guest, "leave", lambda _: 1)


@pytest.mark.usefixtures("nothing_runs")
@pytest.mark.parametrize("document", sorted({name for name, _ in LINES}))
@pytest.mark.long
def test_a_command_that_is_shown_is_one(document: str, capsys: pytest.CaptureFixture[str]) -> None:
    for line in [line for name, line in LINES if name == document]:
        program, *words = [SPOKEN.get(word, word) for word in shlex.split(line, comments=True)]
        if program == "python":
            assert main.run(words[2:], benchmarks.run) == 0, f"{line}: {capsys.readouterr().err}"
        elif words[1:]:
            assert main.run(words) == 0, f"{line}: {capsys.readouterr().err}"
        else:
            assert words[0] in (*commands.COMMANDS, "agent", "--help", "--version"), line


def test_an_example_compiles_and_names_what_there_is() -> None:
    parts = [
        (name, node.attr)
        for name, code in BLOCKS
        for node in ast.walk(ast.parse(code, name))
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "db"
    ]
    assert not [part for part in parts if not hasattr(db, part[1])]


def test_an_option_that_is_named_is_one() -> None:
    known = {"--help", "--version"}
    for command in ("train", "launch", "simulate"):
        for strategy in STRATEGIES:
            known |= {one.option for one in options.arguments(command, strategy)}
    kinds: list[Any] = [
        results.EvaluateOptions,
        StudyOptions,
        ReportOptions,
        RunsOptions,
        commands.StatusOptions,
        WatchOptions,
        CheckOptions,
        commands.JoinOptions,
        costs.DrawPipelineOptions,
        costs.CostOptions,
        costs.PlanOptions,
        costs.SplitOptions,
        CompressOptions,
        ExpandOptions,
        PredictOptions,
        *(bench.options for bench in BENCHES.values()),
    ]
    known |= {option(name) for kind in kinds for name in kind.__dataclass_fields__}
    named = {
        word
        for text in TEXTS.values()
        for code in re.findall(r"`([^`\n]+)`", text)
        for word in re.findall(r"(?<!\S)--[a-z][a-z-]*", code)
    }
    assert len(named) > 10
    assert named <= known


def test_the_protocol_is_written_down_as_it_is() -> None:
    made = runpy.run_path(str(ROOT / "docs" / "protocol.py"))["document"]()
    assert TEXTS["protocol.md"] == made, "docs/protocol.md is not what the tables say: run python docs/protocol.py"
    assert all(f"`{message.__name__}`" in made for message in MESSAGES)


def test_the_house_is_drawn_with_the_rooms_that_there_are() -> None:
    [drawn] = re.findall(r"^## The house\n.*?^```\n(.*?)^```", TEXTS["design.md"], re.DOTALL | re.MULTILINE)
    rooms = re.findall(r"^([a-z]+)|\|  ([a-z]+)", drawn, re.MULTILINE)
    there = {path.parent.name for path in (ROOT / "distbelief").glob("*/__init__.py")} - {"testing"}
    assert {first or beside for first, beside in rooms} == there | {"job", "references", "errors"}


def test_the_walks_name_functions_that_there_are() -> None:
    steps = re.findall(r"`(\w+)`(?:\s\(|, )`([\w/]+\.py)`\)", TEXTS["design.md"])
    assert len(steps) > 70
    lacking = [
        (name, path)
        for name, path in steps
        if not re.search(rf"^ *(?:def|class) {name}\b", (ROOT / "distbelief" / path).read_text(), re.MULTILINE)
    ]
    assert not lacking


def test_the_strategy_from_outside_uses_what_is_promised_to_it() -> None:
    [told] = re.findall(r"^What it may build on, .*?:(.*?)\.\s", TEXTS["design.md"], re.DOTALL | re.MULTILINE)
    promised = {f"distbelief.{module}" for module in re.findall(r"`([\w.]+)`", told)}
    used = {
        node.module
        for node in ast.walk(ast.parse(TEXTS["own_strategy.py"]))
        if isinstance(node, ast.ImportFrom) and node.module and node.module.startswith("distbelief")
    }
    assert len(used) > 10
    assert used <= promised
    assert all(
        (ROOT / module.replace(".", "/")).with_suffix(".py").exists() or (ROOT / module.replace(".", "/")).is_dir()
        for module in promised
    )


def test_a_goal_that_is_named_is_one() -> None:
    goals = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    assert {goal for text in TEXTS.values() for goal in re.findall(r"(?:`|\$ )make ([a-z-]+)", text)} <= goals


def test_there_are_commands_and_examples_in_the_readme_and_in_every_recipe() -> None:
    shown = {name for name, _ in LINES}
    assert {"README.md", "bench.md", *(path.name for path in RECIPES if "db.join()" in TEXTS[path.name])} <= shown
    assert sum(name == "README.md" for name, _ in LINES) >= 8
    assert sum(name == "README.md" for name, _ in BLOCKS) >= 3


def test_the_file_of_a_study_that_is_shown_is_read(tmp_path: Path) -> None:
    [shown] = re.findall(r"^## The file\n\n((?:    .*\n|\n)+)", TEXTS["study.md"], re.MULTILINE)
    (tmp_path / "mine.toml").write_text(textwrap.dedent(shown))
    study = definition.read(tmp_path / "mine.toml")
    assert [arm.name for arm in study.arms if arm.compresses] == ["alone, small, bits 2", "alone, small, bits 4"]
    assert len(study.claims) == 1


def test_files_that_documents_name_are_there() -> None:
    """As they stand, in the package, or among the tests; a bare name is that of a file in some room."""
    named = {
        (name, path)
        for name, text in TEXTS.items()
        if name.endswith(".md")
        for path in re.findall(r"`([\w/]+(?:\.py|/))`", text)
    }
    assert len(named) > 60
    bare = {path.name for path in (ROOT / "distbelief").rglob("*.py")}
    places = (ROOT, ROOT / "distbelief", *TESTS)
    lacking = [
        (name, path)
        for name, path in sorted(named)
        if path not in bare and not any((at / path).exists() for at in places)
    ]
    assert not lacking
