"""Problems of a study: how uneven gradients are, and where one way to train is sooner at a loss than others."""

from __future__ import annotations

import math
from pathlib import Path

import numpy
import pytest
import torch
from safetensors.torch import load_file

from distbelief.cli.study import preparing
from distbelief.lab.study import definition
from distbelief.lab.study.figures import ProblemFigures
from distbelief.lab.study.report import make_report, page, write_report
from distbelief.lab.study.running import run
from distbelief.lab.study.sentences import findings
from distbelief.lab.study.trials import MISSED, Interval, Trial, ratio_of_medians, unevenness
from distbelief.tasks import resolve
from distbelief.tasks.worker import load

TEXT = """\
title = "A way beside another"
seeds = [0, 1]
tuning_seeds = [7]
place = "simulated"
observed = "Adagrad"
[start]
strategy = "single"
options = {epochs = 1, batch-size = 50}
[common]
epochs = 2
batch-size = 16
evaluate-every = "20minibatches"
checkpoint-every = 0
[[problems]]
name = "digits"
task = "digits"
loss = 0.5
options = {batch-size = 20}
[[arms]]
name = "fixed rate"
strategy = "downpour"
each = {replicas = [2]}
grid = {lr = [0.001, 0.2]}
[[arms]]
name = "Adagrad"
strategy = "downpour"
options = {optimizer = "adagrad"}
each = {replicas = [2]}
grid = {lr = [0.001, 0.05]}
[[arms]]
name = "L-BFGS"
strategy = "sandblaster"
without = ["epochs", "batch-size", "evaluate-every"]
options = {iterations = 3, snapshot-every = "0"}
"""


@pytest.fixture(scope="module")
def study(tmp_path_factory: pytest.TempPathFactory) -> definition.Study:
    file = tmp_path_factory.mktemp("study") / "a.toml"
    file.write_text(TEXT)
    return definition.read(file)


@pytest.fixture(scope="module")
def whole(study: definition.Study, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[Trial]]:
    folder = tmp_path_factory.mktemp("whole") / "out"
    return folder, run(study, folder, preparing())


def first_of_two(trial: Trial, loss: float) -> float:
    """Seconds of the first of two points in a row that are at a loss or below it."""
    low = [point.loss <= loss for point in trial.points]
    for at in range(len(low) - 1):
        if low[at] and low[at + 1]:
            return trial.points[at].seconds
    return math.inf


def test_a_way_is_compared_with_others_by_the_time_to_the_problems_loss(
    study: definition.Study, whole: tuple[Path, list[Trial]]
) -> None:
    folder, trials = whole
    report = write_report(folder, study, trials)
    assert [one.way for one in report.problems] == ["fixed rate", "Adagrad", "L-BFGS"]
    times = {
        one.way: [
            first_of_two(trial, 0.5)
            for seed in study.seeds
            for trial in trials
            if (trial.arm.removeprefix("digits: ").partition(",")[0], trial.seed) == (one.way, seed)
        ]
        for one in report.problems
    }
    assert {one.way: one.seconds for one in report.problems} == times
    assert all(math.isfinite(time) for time in times["Adagrad"])
    ends = [one.points[-1].loss for one in trials if one.arm.startswith("digits: Adagrad") and not one.tuning]
    assert report.problems[1].last == pytest.approx(sum(ends) / 2)
    slower = next(one for one in report.problems if one.way == "fixed rate")
    assert slower.longer == ratio_of_medians(times["fixed rate"], times["Adagrad"])
    for shown in ("\n".join(report.lines()), page(report, "")):
        assert "digits: to a loss of 0.5; unevenness of gradients 1." in shown
        assert f"With 2 replicas Adagrad compared with fixed rate is sooner on digits ({slower.gain})." in shown


def test_each_problem_has_a_beginning_whose_unevenness_is_that_of_its_seeds_that_count(
    study: definition.Study, whole: tuple[Path, list[Trial]]
) -> None:
    _, trials = whole
    begun = {one.seed: one.uneven for one in trials if one.arm == "start, digits"}
    assert set(begun) == {0, 1, 7}
    assert all(one.uneven is None for one in trials if one.arm != "start, digits")
    expected = numpy.median([begun[0], begun[1]])
    [uneven] = {one.uneven for one in make_report(study, trials, {}).problems}
    assert uneven == pytest.approx(expected)


def test_unevenness_is_the_root_mean_square_of_the_sizes_of_gradients_over_their_mean(
    whole: tuple[Path, list[Trial]],
) -> None:
    """In float64, by a loop over an epoch that the package has no part in."""
    folder, trials = whole
    path = folder / "trials" / "start--digits" / "seed-0" / "run"
    task, squares = resolve("digits"), numpy.zeros(64 * 64 + 64 + 640 + 10)
    model = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.ReLU(), torch.nn.Linear(64, 10))
    kept = load_file(path / "model.safetensors")
    for mine, theirs in zip(model.parameters(), ("fc1.weight", "fc1.bias", "fc2.weight", "fc2.bias"), strict=True):
        mine.data.copy_(kept[theirs])
    inputs, targets = load(task, "training").batch(torch.arange(1437))
    batches = torch.randperm(1437, generator=torch.Generator().manual_seed(0)).split(50)
    for batch in batches:
        grads = torch.autograd.grad(
            torch.nn.functional.cross_entropy(model(inputs[batch]), targets[batch]), list(model.parameters())
        )
        squares = squares + numpy.concatenate([grad.double().numpy().ravel() for grad in grads]) ** 2
    sizes = numpy.sqrt(squares / len(batches))
    wanted = math.sqrt(numpy.mean(sizes**2)) / numpy.mean(sizes)
    assert unevenness(path, task, 50, 0) == pytest.approx(wanted, rel=1e-6)
    assert next(one.uneven for one in trials if one.arm == "start, digits" and one.seed == 0) == pytest.approx(wanted)
    assert wanted > 1


def standing(problem: str, longer: Interval, uneven: float) -> ProblemFigures:
    return ProblemFigures(problem, 1.0, "fixed rate", 16, 0.1, [MISSED], 1.0, longer, 15.0, 0.9, uneven)


def test_what_is_found_is_by_the_intervals_and_by_ranks(study: definition.Study) -> None:
    surely, never, perhaps, not_so = (
        Interval(1.5, 2.0, 3.0),
        Interval(math.inf, math.inf, math.inf),
        Interval(0.9, 1.2, 1.4),
        Interval(0.2, 0.5, 0.8),
    )
    ones = [
        standing("a", surely, 2.0),
        standing("b", never, 3.0),
        standing("c", perhaps, 1.5),
        standing("d", not_so, 1.0),
    ]
    nobody = standing("e", Interval(0.0, math.nan, math.inf), 9.0)
    [text, *_] = findings(study, [*ones, nobody])
    assert text == (
        "With 16 replicas Adagrad compared with fixed rate is sooner on a (2 (1.5 to 3)), b (never); not "
        "distinguishable on c (1.2 (0.9 to 1.4)); later on d (0.5 (0.2 to 0.8)). Gain and unevenness of gradients have "
        "a rank correlation of 1.00."
    )
