"""Studies in simulation: killed and gone on with they are what they are at once; what cannot be run is a row."""

from __future__ import annotations

import dataclasses
import errno
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from drawn import SEEDS, some
from safetensors.torch import load_file

from distbelief.cli.study import preparing
from distbelief.errors import TrainingError, UsageError
from distbelief.job import Job
from distbelief.lab.study import definition, running
from distbelief.lab.study.definition import Arm, Study
from distbelief.lab.study.report import make_report, write_report
from distbelief.lab.study.running import STUDY, Prepared, cost_of, open_study, read_kept, run
from distbelief.lab.study.trials import Trial
from distbelief.places.evaluate import evaluate
from distbelief.places.simulated.simulated import Simulated
from distbelief.tasks import resolve

TEXT = """\
title = "A study"
seeds = [0, 1]
tuning_seeds = [7]
targets = [0.2, 0.99]
place = "simulated"
[common]
epochs = 2
snapshot-every = "0"
[[arms]]
name = "serial"
task = "digits"
strategy = "single"
[[arms]]
name = "downpour"
task = "digits"
strategy = "downpour"
grid = {lr = [0.001, 0.2]}
"""


@pytest.fixture(scope="module")
def study(tmp_path_factory: pytest.TempPathFactory) -> Study:
    file = tmp_path_factory.mktemp("study") / "a.toml"
    file.write_text(TEXT)
    return definition.read(file)


@pytest.fixture(scope="module")
def whole(study: Study, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[Trial]]:
    folder = tmp_path_factory.mktemp("whole") / "out"
    return folder, run(study, folder, preparing())


class Failing:
    def run(self, job: Job) -> dict[str, Any]:
        """It cannot."""
        raise TrainingError("it fails")


class Killed(BaseException):
    """As by kill -9: nothing may catch it."""


def dying(moment: int) -> Callable[[], None]:
    """What dies at the given of the moments at which it is asked."""
    asked = iter(range(10**6))

    def ask() -> None:
        if next(asked) == moment:
            raise Killed

    return ask


@pytest.mark.parametrize("moment", some([1, 8, 15], SEEDS // 3))
@pytest.mark.long
def test_a_study_that_is_killed_and_gone_on_with_is_what_it_is_at_once(
    moment: int, study: Study, whole: tuple[Path, list[Trial]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After its job, when its points are measured, and before the next: of three of six trials."""
    ask = dying(moment)

    def prepare(arm: Arm, words: Sequence[str]) -> Prepared:
        ask()
        return preparing()(arm, words)

    with monkeypatch.context() as patch:
        for name in ("measure_points", "tidy"):
            real = getattr(running, name)
            patch.setattr(running, name, lambda *args, real=real: (real(*args), ask())[0])
        with pytest.raises(Killed):
            run(study, tmp_path / "out", prepare)
    assert run(study, tmp_path / "out", preparing()) == whole[1]


@pytest.mark.long
def test_a_study_in_time_goes_on_where_it_was(study: Study, whole: tuple[Path, list[Trial]], tmp_path: Path) -> None:
    assert run(study, tmp_path / "out", preparing(), minutes=-1.0) == []
    assert make_report(study, [], {}).left == 6
    assert run(study, whole[0], preparing(), minutes=-1.0) == whole[1]


def test_the_value_of_a_grid_is_chosen_on_its_own_seeds_and_they_count_for_nothing_else(
    study: Study, whole: tuple[Path, list[Trial]]
) -> None:
    _, trials = whole
    assert {(one.arm, one.seed, one.value, one.tuning) for one in trials} == {
        *(("downpour", 7, value, True) for value in (0.001, 0.2)),
        *(("serial", seed, None, False) for seed in (0, 1)),
        *(("downpour", seed, 0.2, False) for seed in (0, 1)),
    }
    assert {one.seed for one in make_report(study, trials, {}).trials} == {0, 1}


def test_points_are_the_checkpoints_with_their_time_and_cost_the_job_nothing(whole: tuple[Path, list[Trial]]) -> None:
    _, trials = whole
    serial = next(one for one in trials if one.arm == "serial")
    assert [point.epochs for point in serial.points] == [1.0, 2.0]
    assert serial.points[-1].samples == serial.samples
    assert serial.points[-1].steps == serial.steps
    assert serial.points[-1].seconds == pytest.approx(serial.seconds, rel=0.01)


def test_the_report_counts_misses_and_names_its_baseline(study: Study, whole: tuple[Path, list[Trial]]) -> None:
    folder, trials = whole
    made = write_report(folder, study, trials)
    never = made.arm("downpour").at(0.99)
    assert (never.reached, never.of, never.median) == (0, 2, float("inf"))
    assert made.arm("downpour").baseline == "serial"
    assert len((folder / "trials.csv").read_text().splitlines()) == 1 + 4
    assert len((folder / "points.csv").read_text().splitlines()) == 1 + sum(len(one.points) for one in made.trials)
    assert made.left == 0
    assert 3 <= len(made.sentences) <= 10
    kept = json.loads((folder / "report.json").read_text())
    assert [one["name"] for one in kept["arms"]] == ["serial", "downpour"]
    assert (kept["sentences"], len(kept["trials"])) == (made.sentences, 4)


@pytest.mark.long
def test_an_arm_that_cannot_run_is_a_row_with_the_reason(tmp_path: Path) -> None:
    file = tmp_path / "a.toml"
    file.write_text(TEXT.replace('strategy = "single"', 'strategy = "single"\noptions = {init-from = "/nowhere"}'))
    study = definition.read(file)
    trials = run(study, tmp_path / "out", preparing())
    row = make_report(study, trials, {}).arm("serial")
    assert (row.failed, row.trials) == (2, 2)
    assert "/nowhere" in row.reason
    assert row.at(0.2).seconds == [float("inf")] * 2
    assert make_report(study, trials, {}).arm("downpour").failed == 0


def test_a_folder_of_another_study_or_version_is_refused(
    study: Study, whole: tuple[Path, list[Trial]], tmp_path: Path
) -> None:
    other = definition.Study(study.title, study.arms, (0, 1, 2), study.targets, study.baseline, study.tuning_seeds)
    with pytest.raises(UsageError, match="holds another study, or an earlier version"):
        run(other, whole[0], preparing())
    (tmp_path / "something").write_text("")
    with pytest.raises(UsageError, match="is not empty, and holds no study"):
        run(study, tmp_path, preparing())
    (tmp_path / "study.json").write_text('{"title": 3}')
    with pytest.raises(UsageError, match="is corrupt, or of another version"):
        read_kept(tmp_path / STUDY, Study)


def test_a_full_disk_ends_the_study_and_not_the_trial(
    study: Study, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(path: Path, _: bytes) -> None:
        raise OSError(errno.ENOSPC, "No space left on device", str(path))

    open_study(tmp_path, study)
    with monkeypatch.context() as patch:
        patch.setattr(running, "write_atomically", full)
        with pytest.raises(OSError, match="No space left"):
            run(study, tmp_path, preparing())
    assert not list(tmp_path.glob("trials/*/*/trial.json"))


def test_a_study_tells_what_it_took_beside_its_jobs(whole: tuple[Path, list[Trial]], study: Study) -> None:
    """A line for each trial: of the job, of measuring afterwards, and of the study itself, which is the rest."""
    cost = cost_of(whole[0])
    assert len((whole[0] / "costs.jsonl").read_text().splitlines()) == len(whole[1])
    assert min(cost.jobs, cost.measuring, cost.beside) > 0
    with (whole[0] / "costs.jsonl").open("ab") as file:
        file.write(b'{"jobs": 1')  # as a full disk leaves it
    assert cost_of(whole[0]) == cost
    told = write_report(whole[0], study, whole[1]).lines()
    assert (
        f"the study itself {cost.beside:,.1f} s, {100 * cost.beside / (cost.jobs + cost.measuring):.1f} % of both."
        in " ".join(told)
    )


def test_points_are_kept_where_the_job_would_measure(tmp_path: Path) -> None:
    """Of 23 minibatches an epoch, two epochs: after every 20, and at the end."""
    file = tmp_path / "a.toml"
    text = TEXT.replace('snapshot-every = "0"', 'evaluate-every = "20minibatches"').replace("[0, 1]", "[0]")
    file.write_text(text.replace("grid = {lr = [0.001, 0.2]}", ""))
    trials = run(definition.read(file), tmp_path / "out", preparing())
    assert [point.steps for point in trials[0].points] == [20, 40, 46]
    assert len(trials[1].points) >= 3


@pytest.mark.long
def test_an_arm_compresses_what_another_has_trained_with_the_same_seed(tmp_path: Path) -> None:
    """It is no arm of the table of those that train; its figures are those of the files, which are kept."""
    file = tmp_path / "a.toml"
    file.write_text(
        'title = "Small"\nseeds = [0, 1]\n[[arms]]\nname = "whole"\ntask = "digits"\nstrategy = "single"\n'
        'options = {epochs = 4}\n[[arms]]\nname = "small"\ncompress = "whole"\noptions = {fine-tune = 0}\n'
        "each = {bits = [4, 1]}\n"
    )
    read, here = definition.read(file), Simulated(keep=True)

    def prepare(arm: Arm, words: Sequence[str]) -> Prepared:
        made = preparing()(arm, words)
        return dataclasses.replace(made, run=here.run) if made.job else made

    trials = run(read, tmp_path / "out", prepare)
    few, fewer = "small, bits 4", "small, bits 1"
    assert [one.arm for one in trials] == ["whole", "whole", few, fewer, fewer, few]  # files after what trains
    report = write_report(tmp_path / "out", read, trials)
    assert [one.name for one in report.arms] == ["whole"]
    for trial, seed in zip(trials, (0, 1, 0, 0, 1, 1), strict=True):
        assert trial.seed == seed
        if trial.arm != "whole":
            path = tmp_path / "out" / "trials" / trial.arm.replace(",", "-").replace(" ", "-") / f"seed-{seed}" / "run"
            assert trial.shrunk["bytes"] == (path / "model.dbz").stat().st_size
            assert trial.shrunk["test_error"] == pytest.approx(
                100 - 100 * evaluate(path / "model.dbz")["test_accuracy"]
            )
            whole = next(one for one in trials if (one.arm, one.seed) == ("whole", seed))
            assert trial.shrunk["dense_error"] == pytest.approx(100 - 100 * (whole.accuracy or 0))
    last = report.shrunk[1]
    sizes = [one.shrunk["bytes"] for one in trials if one.arm == fewer]
    assert (last.name, last.of, last.trials, last.means["bytes"]) == (fewer, "whole", 2, sum(sizes) / 2)
    assert f"{last.means['test_error']:.2f} ± {last.spreads['test_error']:.2f}" in "\n".join(report.lines())
    assert run(read, tmp_path / "out", prepare) == trials, "nothing is run again"


def test_a_farm_is_the_mean_prediction_of_its_models_and_costs_what_all_of_them_do(tmp_path: Path) -> None:
    """Held against the models of its runs by hand; as much is trained as by one model with the whole budget."""
    file = tmp_path / "a.toml"
    file.write_text(
        'title = "A farm"\nseeds = [1]\nplace = "simulated"\n[common]\nepochs = 1000\ndrop-last = true\n'
        'budget = "60ms"\nevaluate-every = "10minibatches"\n[cluster]\ncompute = "constant:1ms"\n'
        '[[arms]]\nname = "one"\ntask = "digits"\nstrategy = "single"\n'
        '[[arms]]\nname = "farm"\ntask = "digits"\nstrategy = "single"\nmembers = 3\n'
    )
    read = definition.read(file)
    one, farm = run(read, tmp_path / "out", preparing())
    runs = [tmp_path / "out" / "trials" / "farm" / "seed-1" / f"run-{number}" for number in range(3)]
    states = [load_file(path / "model.safetensors") for path in runs]
    assert not torch.equal(states[0]["fc1.weight"], states[1]["fc1.weight"])
    assert [f"--seed {seed}" in farm.command for seed in (3, 4, 5)] == [True] * 3
    task = resolve("digits")
    inputs, targets = task.test().batch(torch.arange(len(task.test())))  # type: ignore[misc]  # it has a test set
    outputs = []
    for state in states:
        model = task.model()
        model.load_state_dict(state)
        outputs.append(model.eval()(inputs))
    mean = torch.stack(outputs).mean(0)
    last = farm.points[-1]
    assert last.accuracy == pytest.approx((mean.argmax(1) == targets).float().mean().item())
    assert last.loss == pytest.approx(torch.nn.functional.cross_entropy(mean, targets).item(), rel=1e-4)
    assert [point.steps for point in farm.points] == [30, 60]
    assert [point.steps for point in one.points] == [10, 20, 30, 40, 50, 60]
    assert (farm.steps, farm.samples, last.samples) == (one.steps, one.samples, one.samples)
    assert farm.seconds == pytest.approx(one.seconds, rel=0.1)
    assert last.seconds == pytest.approx(farm.seconds, rel=0.1)


@pytest.mark.long
def test_what_all_arms_begin_with_is_trained_once_for_each_seed_and_counts_for_none(tmp_path: Path) -> None:
    """Arms that learn nothing, since their rate is none, end where it ended."""
    file = tmp_path / "a.toml"
    arm = 'strategy = "single"\ntask = "digits"\n'
    file.write_text(
        'title = "Warm"\nseeds = [0, 1]\ntuning_seeds = [7]\nplace = "simulated"\n'
        f"[start]\n{arm}options = {{epochs = 2}}\n[common]\nepochs = 1\n"
        f'[[arms]]\nname = "still"\n{arm}options = {{lr = 0}}\n'
        f'[[arms]]\nname = "further"\n{arm}grid = {{lr = [0, 0.1]}}\n'
    )
    read = definition.read(file)
    trials = run(read, tmp_path / "out", preparing())
    begun = {one.seed: one.accuracy for one in trials if one.arm == "start"}
    assert set(begun) == {0, 1, 7}
    assert {one.seed: one.accuracy for one in trials if one.arm == "still"} == {seed: begun[seed] for seed in (0, 1)}
    assert [one.accuracy for one in trials if one.tuning and one.value == 0] == [begun[7]]
    assert len({*begun.values()}) == 3, "each seed has its own"
    made = make_report(read, trials, {})
    assert ({one.arm for one in made.trials}, made.left) == ({"still", "further"}, 0)
    assert make_report(read, [], {}).left == 3 + 2 + 4
    assert next(one for one in trials if one.arm == "still").points[-1].epochs == 1
    assert run(read, tmp_path / "out", preparing()) == trials


def test_what_was_not_trained_cannot_be_compressed_and_says_so(tmp_path: Path) -> None:
    arms = (Arm("whole", "digits", "single", "local", ()), Arm("small", "digits", "single", "local", ("--bits", "4"),
            compresses="whole"))  # fmt: skip

    def prepare(arm: Arm, words: Sequence[str]) -> Prepared:
        made = preparing()(arm, words)
        return dataclasses.replace(made, run=Failing().run) if made.job else made

    found = run(Study("a", arms, (0,), (), "whole"), tmp_path / "out", prepare)
    assert [one.failed for one in found] == [True, True]
    assert "is not a run folder" in found[1].reason
