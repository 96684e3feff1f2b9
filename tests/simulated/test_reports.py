"""`report` and `runs`, of run folders that jobs have left."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from asking import Ask

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
def test_runs_are_listed_sorted_and_filtered(folder: Path, ask: Ask) -> None:
    def listed(*words: str) -> list[dict[str, object]]:
        return [json.loads(line) for line in ask(["runs", str(folder), "--json", *words]).out.splitlines()]

    everything = listed()
    assert len(everything) == 6
    assert [one["state"] for one in listed("--state", "spoilt")] == ["spoilt"]
    assert [one["seed"] for one in listed("--state", "cut short")] == [4]
    assert {one["strategy"] for one in listed("--strategy", "downpour")} == {"downpour"}
    best = [one["accuracy"] for one in listed("--sort", "accuracy", "--state", "done")]
    assert best == sorted(best, reverse=True)  # type: ignore[type-var]  # of one kind
    assert listed("--task", "mnist") == []
    assert len(ask(["runs", str(folder)]).out.splitlines()) == 7


def test_the_runs_of_a_study_are_listed_with_what_it_has_measured_afterwards(tmp_path: Path, ask: Ask) -> None:
    file, studies = tmp_path / "a.toml", tmp_path / "studies"
    file.write_text('title = "A"\nseeds = [3]\nplace = "simulated"\n[[arms]]\nname = "b"\ntask = "digits"\n'
                    'strategy = "single"\n')  # fmt: skip
    [trial] = run(definition.read(file), studies / "a", preparing())
    [listed] = map(json.loads, ask(["runs", str(studies), "--json"]).out.splitlines())
    assert (listed["seed"], listed["accuracy"]) == (3, trial.accuracy)
    assert trial.accuracy
    next(studies.glob("a/trials/*/*/trial.json")).write_text("{")
    assert json.loads(ask(["runs", str(studies), "--json"]).out)["state"] == "spoilt"


def test_runs_that_differ_in_their_seed_are_one_arm(folder: Path) -> None:
    paths = [folder / f"{strategy}-{seed}" for strategy in ("single", "downpour") for seed in (0, 1)]
    study, trials = study_of(paths, (0.9,))
    assert len(study.arms) == 2
    assert [one.arm for one in trials] == [study.arms[0].name] * 2 + [study.arms[1].name] * 2
    result = json.loads((paths[0] / "result.json").read_text())
    assert [point.accuracy for point in trials[0].points] == [row["test_accuracy"] for row in result["history"]]


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
