"""The page of a report: what is on it, how large it is, and what the charts say."""

from __future__ import annotations

import json
import math
import time

import msgspec
import pytest
from made_studies import made_report, made_trial
from patience import SLOWNESS

from distbelief.lab import number
from distbelief.lab.study.charts import charts
from distbelief.lab.study.claims import Claim
from distbelief.lab.study.definition import Arm, Study
from distbelief.lab.study.figures import Report, table
from distbelief.lab.study.report import make_report, page

SCRIPT_BYTES = 4_900_000
"""Of plotly 7.1's, which is put into every page."""


def test_a_page_of_200_runs_is_small_and_made_soon() -> None:
    began = time.process_time()
    found = made_report(arms=40, seeds=5, points=60)
    made = page(found, "")
    assert time.process_time() - began < 10 * SLOWNESS
    assert len(found.trials) == 200
    assert len(made.encode()) + SCRIPT_BYTES < 6_000_000


def test_a_page_needs_no_network_and_escapes_what_a_user_has_written() -> None:
    made = page(made_report(), "/*the script*/")
    assert "http://" not in made
    assert "https://" not in made
    assert "A study &lt;of&gt; nothing" in made
    assert "Does &amp; it show?" in made
    for arm in made_report().arms:
        assert f"<li>{arm.name}<br><code>{arm.command}</code></li>" in made
    assert "/*the script*/" in made


def test_every_trial_is_drawn_and_what_was_simulated_is_marked() -> None:
    found = made_report()
    drawn = {name: chart for name, _, chart in charts(found)}
    assert list(drawn) == ["accuracy", "loss", "target-0.9", "target-0.95", "scaling", "parts", "bytes", "staleness",
                           "efficiency"]  # fmt: skip
    assert drawn["bytes"]["data"][0]["x"] == [2.0] * len(found.arms)
    lines = drawn["accuracy"]["data"]
    assert len(lines) == len(found.trials)
    assert {line["line"]["dash"] for line in lines if line["name"] != "alone"} == {"dot"}
    assert {line["line"]["dash"] for line in lines if line["name"] == "alone"} == {"solid"}
    assert [button["label"] for button in drawn["accuracy"]["layout"]["updatemenus"][0]["buttons"]] == [
        "against seconds", "against epochs", "against samples",
    ]  # fmt: skip
    points = [x for one in drawn["target-0.9"]["data"] if one["name"] == "alone" for x in one["x"]]
    assert len(points) == 5
    ideal = next(one for one in drawn["scaling"]["data"] if one["name"] == "ideal")
    assert ideal["x"] == ideal["y"] == [1, 16]
    menu = drawn["scaling"]["layout"]["updatemenus"][0]["buttons"]
    many, line = zip(*(button["args"][0]["y"] for button in menu), strict=True)
    # n replicas take n + 1 milliseconds a step here, and so do all of them together
    rates = [2 / (2 + at) for at in range(5)]
    assert many[0] == pytest.approx(rates, abs=2e-3)
    assert many[1] == pytest.approx([rate / 2**at for at, rate in enumerate(rates)], abs=2e-3)
    assert many[2] == pytest.approx(rates, abs=2e-3)
    assert line == ([1, 16], [1, 1], [1, 16])
    assert {one["name"] for one in drawn["parts"]["data"]} == {"compute", "update", "communicate", "wait"}


def test_a_miss_is_drawn_as_so_many_of_so_many() -> None:
    found = made_report()
    short = [made_trial("alone", seed, "local", 1, 0.001, 3 if seed > 2 else 30) for seed in range(5)]
    others = [one for one in found.trials if one.arm != "alone"]
    again = make_report(found.study, [*short, *others], {"cores": 2})
    notes = {
        note["y"]: note["text"]
        for note in next(chart for name, _, chart in charts(again) if name == "target-0.9")["layout"]["annotations"]
    }
    assert notes["alone"] == "3 of 5"
    assert math.isfinite(again.arm("alone").at(0.9).median)
    assert any("alone (3 of 5)" in one for one in again.sentences)


def test_the_sentences_follow_from_the_figures_and_only_what_is_alike_is_compared() -> None:
    found = made_report()
    assert 3 <= len(found.sentences) <= 10
    alone = found.arm("alone").at(0.95)
    assert f"alone reaches 95.00 % first, after {number(alone.median)} s" in " ".join(found.sentences)
    assert (found.arm("alone").at(0.95).speed_up.low, found.arm("alone").at(0.95).speed_up.high) == (1.0, 1.0)
    assert found.arm("many, replicas 4").baseline == "many, replicas 1"
    assert found.arm("many, replicas 4").at(0.95).speed_up.ratio == pytest.approx(2 / 4, rel=0.01)
    scaled = next(one for one in found.sentences if one.startswith("From 1 to 16 replicas"))
    assert "(simulated)" in scaled


def test_a_best_value_at_an_end_of_its_grid_is_told() -> None:
    """The grids of three arms hold the value that was best as the least, in between, and as the largest."""
    made = made_report(arms=3)
    grids = ((0.1, 0.2, 0.3), (0.01, 0.1, 0.3), (0.01, 0.02, 0.1))
    arms = [msgspec.structs.replace(arm, tuned="--lr", grid=grid)
            for arm, grid in zip(made.study.arms, grids, strict=True)]  # fmt: skip
    study = msgspec.structs.replace(made.study, arms=tuple(arms))
    trials = [msgspec.structs.replace(one, value=0.1) for one in made.trials]
    told = next(one for one in make_report(study, trials, {}).sentences if "of its grid" in one)
    assert told.endswith(f": {arms[0].name} (lr 0.1, the least), {arms[2].name} (lr 0.1, the largest).")
    assert not any("of its grid" in one for one in made.sentences)


def test_charts_are_json_that_has_no_infinity() -> None:
    for _, _, chart in charts(made_report(points=4)):
        assert "Infinity" not in json.dumps(chart)


def test_histograms_of_staleness_and_what_is_claimed_are_drawn() -> None:
    made = made_report()
    claims = (Claim("it is so", "mean staleness", "flat", tuple(arm.name for arm in made.arms)),)
    report = make_report(msgspec.structs.replace(made.study, claims=claims), made.trials, {})
    drawn = {name: chart for name, _, chart in charts(report)}
    assert drawn["staleness"]["data"][0]["x"] == [0, 2]
    assert drawn["staleness"]["data"][0]["y"] == [0.25, 0.75]  # one push of four was of the newest parameters
    assert drawn["claimed-0"]["data"][0]["x"] == [1.5] * len(made.arms)


def test_a_page_says_what_arms_begin_with_and_what_a_farm_costs() -> None:
    made = made_report()
    first, *others = made.study.arms
    start = Arm("start", "mnist", "single", "local", ("--epochs", "1"))
    farm = msgspec.structs.replace(first, members=4)
    study = msgspec.structs.replace(made.study, starts=(start,), arms=(farm, *others))
    told = page(make_report(study, made.trials, {}), "")
    assert "All arms begin with the model that single --epochs 1 trained with the same seed" in told
    assert "alone: 4 models are trained one after another, and their outputs averaged" in told
    assert "begin with" not in page(made, "")


def two_tasks(targets: tuple[float, ...] = (0.9, 0.99)) -> Report:
    """A perceptron in one process and on replicas of two batch sizes, measured and simulated; and another task, whose
    steps take twice as long: the baseline is of the first.
    """
    rows = [
        ("MLP, serial", "mnist", "local", 1, 0.004), ("MLP, whole batch on 2", "mnist", "local", 2, 0.0001),
        ("MLP, downpour, replicas 1", "mnist", "local", 1, 0.006),
        ("MLP, downpour, replicas 2", "mnist", "local", 2, 0.002),
        ("MLP, simulated downpour with Adagrad, replicas 1", "mnist", "simulated", 1, 0.001),
        ("MLP, simulated downpour with Adagrad, replicas 64", "mnist", "simulated", 64, 0.0001),
        ("LeNet, serial", "lenet", "local", 1, 0.04), ("LeNet, downpour", "lenet", "local", 2, 0.01),
    ]  # fmt: skip
    arms = tuple(Arm(name, task, "downpour", place, ()) for name, task, place, _, _ in rows)
    # the batch is so large that it never gets there
    trials = [
        msgspec.structs.replace(made_trial(name, seed, place, replicas, each, 3 if "whole" in name else 30), task=task)
        for name, task, place, replicas, each in rows for seed in range(3)
    ]  # fmt: skip
    return make_report(Study("Two tasks", arms, (0, 1, 2), targets, "MLP, serial"), trials, {"cores": 2})


def test_arms_are_compared_with_a_baseline_of_their_task_and_place_only() -> None:
    found = two_tasks()
    assert {one.name: round(one.at(0.9).speed_up.ratio, 2) for one in found.arms} == {
        "MLP, serial": 1, "MLP, whole batch on 2": 0, "MLP, downpour, replicas 1": 0.67, "MLP, downpour, replicas 2": 2,
        "MLP, simulated downpour with Adagrad, replicas 1": 1, "MLP, simulated downpour with Adagrad, replicas 64": 10,
        "LeNet, serial": 1, "LeNet, downpour": 4,
    }  # fmt: skip
    assert [[one.task for one in group] for group in found.groups()] == [["mnist"] * 4, ["mnist"] * 2, ["lenet"] * 2]
    first, others, *more = found.sentences
    assert first.startswith("MLP, downpour, replicas 2 reaches 90.00 % first")
    assert first.endswith("2 (2 to 2) times as fast as MLP, serial.")
    assert others.count(" reaches 90.00 % first") == 2
    assert "Of mnist, simulated: MLP, simulated downpour with Adagrad, replicas 64 reaches" in others
    assert "times as fast as MLP, simulated downpour with Adagrad, replicas 1." in others
    assert "Of lenet, measured: LeNet, downpour reaches" in others
    assert others.endswith("times as fast as LeNet, serial.")
    alike = [one for one in more if "simulated" in one or "LeNet" in one]
    assert [one for one in alike if not one.startswith("From ")] == [], "others are in no sentence of the baseline's"


def test_that_no_arm_reaches_a_target_is_told_of_all_that_are_compared() -> None:
    first, others, *_ = two_tasks((0.999,)).sentences
    assert first == "99.90 % is reached by no arm in the median."
    assert others == f"Of mnist, simulated: {first} Of lenet, measured: {first}"


def test_what_replicas_bring_is_told_of_arms_that_differ_in_nothing_else() -> None:
    """A whole batch on two replicas takes sixty times the samples of downpour on one, and is no growth of it."""
    [told] = [one for one in two_tasks().sentences if one.startswith("From ")]
    assert told == (
        "From 1 to 2 replicas MLP, downpour takes 3 times the samples a second, 150 % of the ideal (measured). "
        "From 1 to 64 replicas MLP, simulated downpour with Adagrad takes 10 times the samples a second, 16 % of the "
        "ideal (simulated); no other arm gains more."
    )


def test_tables_are_of_what_is_compared_and_fit_a_terminal() -> None:
    """Each with the highest target that its arms reach, which is not the study's, and its baseline by name."""
    lines = two_tasks().lines()
    assert max(map(len, lines[: lines.index(two_tasks().sentences[0])])) <= 100
    assert [line for line in lines if "; speed-up over" in line] == [
        "mnist, measured, to 90.00 %; speed-up over MLP, serial",
        "mnist, simulated, to 90.00 %; speed-up over MLP, simulated downpour with Adagrad, replicas 1",
        "lenet, measured, to 90.00 %; speed-up over LeNet, serial",
    ]
    [long] = [line for line in lines if line.endswith("3 of 3  10 (10 to 10)")]
    assert long.startswith("MLP, simulated downpour")
    told = page(two_tasks(), "")
    assert "<h3>lenet, measured; speed-ups are over LeNet, serial</h3>" in told
    assert told.count("<table>") == 6
    assert "<th>epochs 90.00 %</th><th>speed-up in epochs 90.00 %</th>" in told


def test_efficiency_is_the_rate_of_so_many_over_so_many_times_that_of_one() -> None:
    """n replicas take n + 1 milliseconds a step here, and so do all of them together; one by itself has no others."""
    alone, many = made_report().groups()
    shares = [2 / (2 + at) / 2**at for at in range(5)]
    head, *rows = table(many, [])
    assert [row[head.index("efficiency")] for row in rows] == [f"{100 * share:.0f} %" for share in shares]
    assert "efficiency" not in table(alone, [])[0]
    assert "efficiency" not in table(many[1:], [])[0], "there is none with one replica"
    assert "<th>efficiency</th>" in page(made_report(), "")


def test_that_a_machine_was_busy_is_told_whatever_else_there_is_to_say() -> None:
    found = two_tasks()
    trials = [msgspec.structs.replace(one, busy=0.5) for one in found.trials]
    broken = msgspec.structs.replace(trials[-1], points=[], reason="it broke")
    arms = tuple(msgspec.structs.replace(one, tuned="--lr", grid=(0.1, 0.2)) for one in found.study.arms)
    study = msgspec.structs.replace(found.study, arms=arms)
    told = make_report(study, [msgspec.structs.replace(one, value=0.1) for one in (*trials[:-1], broken)], {"cores": 2})
    assert len(told.sentences) == 10
    assert any("took up to 50 % of it: the measurement is not clean" in one for one in told.sentences)
    [ends] = [one for one in told.sentences if "of its grid" in one]
    assert ends.endswith(" and 3 more.")
