"""The page of a report: what is on it, how large it is, and what the charts say."""

from __future__ import annotations

import json
import math
import time
from pathlib import Path

import msgspec
import pytest
from made_studies import made_report, made_trial

from distbelief.study import page as pages
from distbelief.study.charts import charts
from distbelief.study.claims import Claim
from distbelief.study.definition import Arm
from distbelief.study.figures import number
from distbelief.study.page import page, write_page
from distbelief.study.report import make_report

SCRIPT_BYTES = 4_900_000
"""Of plotly 7.1's, which is put into every page."""


def test_a_page_of_200_runs_is_small_and_made_soon() -> None:
    began = time.process_time()
    found = made_report(arms=40, seeds=5, points=60)
    made = page(found, "")
    assert time.process_time() - began < 10
    assert len(found.trials) == 200
    assert len(made.encode()) + SCRIPT_BYTES < 6_000_000


def test_a_page_needs_no_network_and_escapes_what_a_user_has_written() -> None:
    made = page(made_report(), "/*the script*/")
    assert "http://" not in made
    assert "https://" not in made
    assert "A study &lt;of&gt; nothing" in made
    assert "Does &amp; it show?" in made
    assert "/*the script*/" in made


def test_every_trial_is_drawn_and_what_was_simulated_is_marked() -> None:
    found = made_report()
    drawn = {name: chart for name, _, chart in charts(found)}
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
    assert f"alone is first at 95.00 %, after {number(alone.median)} s" in " ".join(found.sentences)
    assert (found.arm("alone").at(0.95).speed_up.low, found.arm("alone").at(0.95).speed_up.high) == (1.0, 1.0)
    assert found.arm("many, replicas 4").baseline == "many, replicas 1"
    assert found.arm("many, replicas 4").at(0.95).speed_up.ratio == pytest.approx(2 / 4, rel=0.01)
    scaled = next(one for one in found.sentences if one.startswith("From 1 to 16 replicas"))
    assert "many takes" in scaled
    assert "(simulated)" in scaled


def test_each_task_and_place_is_told_of_by_itself_at_a_target_that_it_reaches() -> None:
    """The simulated arms are three steps too short for the higher target: their table and sentence are of the lower."""
    found = made_report()
    short = [
        one if one.arm == "alone" else msgspec.structs.replace(one, points=one.points[:17]) for one in found.trials
    ]
    again = make_report(found.study, short, {"cores": 2})
    assert [[one.name for one in group] for group in again.compared()] == [
        ["alone"], [f"many, replicas {2**at}" for at in range(5)],
    ]  # fmt: skip
    heads = [line for line in again.lines() if "samples/s" in line]
    assert [head.split("  ")[0] for head in heads] == ["mnist, measured", "mnist, simulated"]
    assert ["95 %" in heads[0], "90 %" in heads[1]] == [True, True]
    told = " ".join(again.sentences)
    assert "alone is first at 95.00 %" in told
    assert "many, replicas 1 is first at 90.00 %" in told


def test_arms_of_one_strategy_are_not_taken_for_one_that_grows() -> None:
    """Of two arms that differ in more than replicas nobody says that the one is the other with more of them."""
    found = made_report(arms=2)
    names = {"alone": "plain, replicas 1", "many, replicas 1": "adagrad, replicas 2"}
    arms = tuple(msgspec.structs.replace(arm, name=names[arm.name], place="local") for arm in found.study.arms)
    study = msgspec.structs.replace(found.study, arms=arms, baseline="plain, replicas 1")
    trials = [msgspec.structs.replace(one, arm=names[one.arm], place="local", replicas=1 + (one.arm != "alone"))
              for one in found.trials]  # fmt: skip
    assert not any(one.startswith("From") for one in make_report(study, trials, {}).sentences)


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


def test_the_time_is_the_product_of_its_two_parts() -> None:
    for arm in made_report().arms:
        at = arm.at(0.95)
        assert at.median == pytest.approx(at.seconds_per_step * at.steps, rel=0.02)


def test_without_plotly_the_page_says_what_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pages, "plotly", lambda: None)
    assert "pip install 'distbelief[report]'" in write_page(tmp_path / "report.html", made_report())
    assert not (tmp_path / "report.html").exists()


def test_charts_are_json_that_has_no_infinity() -> None:
    for _, _, chart in charts(made_report(points=4)):
        assert "Infinity" not in json.dumps(chart)


def test_a_picture_is_what_a_browser_shows_of_the_page(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A browser that is none writes down what it was asked for."""
    page_file = tmp_path / "report.html"
    page_file.write_text("<div class='chart' id='a'></div>" * 3)
    browser = tmp_path / "chromium"
    browser.write_text(
        '#!/bin/sh\nfor word in "$@"; do case $word in --screenshot=*) echo "$@" > "${word#*=}";; esac; done\n'
    )
    browser.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    assert pages.write_picture(page_file) == ""
    asked = (tmp_path / "report.png").read_text()
    assert page_file.as_uri() in asked
    assert "--window-size=1200,1980" in asked
    browser.write_text("#!/bin/sh\nexit 1\n")
    (tmp_path / "report.png").unlink()
    assert "could not draw it" in pages.write_picture(page_file)
    monkeypatch.setattr(pages, "BROWSERS", ("no-such-browser",))
    assert pages.write_picture(page_file) == "report.png needs a browser: install chromium"


def test_histograms_of_staleness_and_what_is_claimed_are_drawn() -> None:
    made = made_report()
    claims = (Claim("it is so", "mean staleness", tuple(arm.name for arm in made.arms), "flat"),)
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
    study = msgspec.structs.replace(made.study, start=start, arms=(farm, *others))
    told = page(make_report(study, made.trials, {}), "")
    assert "All arms begin with the model that single --epochs 1 has trained with the same seed" in told
    assert "alone: 4 models are trained one after another, and their outputs averaged" in told
    assert "begin with" not in page(made, "")
