"""`report` and `runs`, of run folders that jobs have left."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

import distbelief as db
from distbelief.cli import main
from distbelief.cli.study import preparing
from distbelief.lab.study import definition
from distbelief.lab.study.running import run
from distbelief.lab.study.runs import study_of


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("runs")
    for seed in (0, 1):
        for strategy in (db.Single(), db.Downpour(replicas=2)):
            out = made / f"{strategy.name}-{seed}"
            db.run(db.Job("digits", strategy, epochs=2, seed=seed, out=out), on=db.Simulated())
    (made / "spoilt").mkdir()
    (made / "spoilt" / "job.json").write_text("{")
    (made / "short").mkdir()
    (made / "short" / "job.json").write_text('{"task": "digits", "strategy": "single", "seed": 4}')
    return made


@pytest.mark.long
def test_runs_are_listed_sorted_and_filtered(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def listed(*words: str) -> list[dict[str, object]]:
        assert main.run(["runs", str(folder), "--json", *words]) == 0
        return [json.loads(line) for line in capsys.readouterr().out.splitlines()]

    everything = listed()
    assert len(everything) == 6
    assert [one["state"] for one in listed("--state", "spoilt")] == ["spoilt"]
    assert [one["seed"] for one in listed("--state", "cut short")] == [4]
    assert {one["strategy"] for one in listed("--strategy", "downpour")} == {"downpour"}
    best = [one["accuracy"] for one in listed("--sort", "accuracy", "--state", "done")]
    assert best == sorted(best, reverse=True)  # type: ignore[type-var]  # of one kind
    assert listed("--task", "mnist") == []
    assert main.run(["runs", str(folder)]) == 0
    assert len(capsys.readouterr().out.splitlines()) == 7


def test_the_runs_of_a_study_are_listed_with_what_it_has_measured_afterwards(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file, studies = tmp_path / "a.toml", tmp_path / "studies"
    file.write_text('title = "A"\nseeds = [3]\nplace = "simulated"\n[[arms]]\nname = "b"\ntask = "digits"\n'
                    'strategy = "single"\n')  # fmt: skip
    [trial] = run(definition.read(file), studies / "a", preparing())
    assert main.run(["runs", str(studies), "--json"]) == 0
    [listed] = map(json.loads, capsys.readouterr().out.splitlines())
    assert (listed["seed"], listed["accuracy"]) == (3, trial.accuracy)
    assert trial.accuracy
    next(studies.glob("a/trials/*/*/trial.json")).write_text("{")
    assert main.run(["runs", str(studies), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["state"] == "spoilt"


def test_runs_that_differ_in_their_seed_are_one_arm(folder: Path) -> None:
    paths = [folder / f"{strategy}-{seed}" for strategy in ("single", "downpour") for seed in (0, 1)]
    study, trials = study_of(paths, (0.9,))
    assert len(study.arms) == 2
    assert [one.arm for one in trials] == [study.arms[0].name] * 2 + [study.arms[1].name] * 2
    result = json.loads((paths[0] / "result.json").read_text())
    assert [point.accuracy for point in trials[0].points] == [row["test_accuracy"] for row in result["history"]]


def test_a_run_ends_with_its_efficiency_beside_one_of_one_replica(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Which is the newest that is as it is, but for replicas, seed and epochs; and so does a report of both."""

    def ended(name: str, *words: str) -> str:
        args = ["simulate", "digits", "downpour", "--out", str(tmp_path / name), *words]
        assert main.run(args) == 0
        return next((line for line in capsys.readouterr().out.splitlines() if line.startswith("efficiency")), "")

    def rate(name: str) -> float:
        return float(json.loads((tmp_path / name / "result.json").read_text())["samples_per_second"])

    assert ended("alone", "--replicas", "2") == ""
    assert ended("one", "--replicas", "1", "--epochs", "2", "--seed", "3") == ""
    others = (["--batch-size", "32"], ["--network", "latency=1ms"], ["--lr", "0.2"], ["--threads", "2"])
    for number, other in enumerate(others):
        ended(f"other {number}", "--replicas", "1", *other)
    (tmp_path / "spoilt").mkdir()
    (tmp_path / "spoilt" / "result.json").write_text("{")
    told = ended("four", "--replicas", "4")
    share = 100 * rate("four") / (4 * rate("one"))
    assert told == f"efficiency  {share:.0f} % of 4 times {rate('one'):,.0f} samples/s, those of {tmp_path / 'one'}"
    assert ended("two", "--replicas", "2", "--epochs", "2")
    share = 100 * rate("two") / (2 * rate("one"))
    main.run(["report", *(str(tmp_path / name) for name in ("one", "two")), "--out", str(tmp_path / "page.html")])
    head, *rows = [line.split("  ") for line in capsys.readouterr().out.splitlines()[1:4]]
    assert head[-1] == "efficiency"
    assert [row[-1].strip() for row in rows] == ["100 %", f"{share:.0f} %"]


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["report"], "which runs?"),
        (["report", "nowhere"], "nowhere is not a run folder"),
        (["report", "spoilt"], "is corrupt"),
        (["report", "short"], "has no result.json"),
        (["report", "single-0", "--targets", "97"], "target 97: is neither a test accuracy"),
        (["runs", "nowhere"], "nowhere is no folder"),
        (["runs", "--sort", "acuracy"], "unknown column 'acuracy'; did you mean 'accuracy'"),
        (["runs", "--state", "cut"], "unknown state 'cut'; did you mean 'cut short'"),
        (["runs", "a", "b"], "'b' is one word too many"),
    ],
)
def test_wrong_words_are_one_line(
    words: list[str], told: str, folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(folder)
    (folder / "runs").mkdir(exist_ok=True)
    assert main.run(words) in (1, 2)
    shown = capsys.readouterr().err
    assert told in shown
    assert shown.count("\n") == 1
