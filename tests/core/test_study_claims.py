"""What a study expects of its arms: the rules by which that was found or not, and what is refused."""

from __future__ import annotations

import math
import random
from pathlib import Path

import msgspec
import pytest
from made_studies import made_report

from distbelief.errors import UsageError
from distbelief.lab.study import definition
from distbelief.lab.study.claims import FIGURES, SHAPES, Claim, judge, momentum
from distbelief.lab.study.report import make_report, page

NAMES = ("a", "b", "c", "d")


def judged(shape: str, values: list[float], expected: tuple[float, ...] = (), within: float = 0.0) -> bool:
    return judge(Claim("so it is", "accuracy", shape, NAMES[: len(values)], expected, within), values).agrees


@pytest.mark.parametrize(
    ("shape", "values", "agrees"),
    [
        ("rises", [1.0, 2.0, 3.0], True), ("rises", [1.0, 3.0, 2.0], False), ("rises", [1.0, 1.0, 1.0], False),
        ("falls", [3.0, 2.0, 1.0], True), ("falls", [3.0, 1.0, 2.0], False), ("falls", [math.inf, 2.0, 1.0], True),
        ("flat", [1.0, 1.0, 1.0], True), ("flat", [1.0, 1.1, 1.0], False), ("flat", [1.0, math.inf], False),
        ("dips", [2.0, 1.0, 2.0], True), ("dips", [2.0, 1.0, 0.5], False), ("dips", [1.0, 2.0, 1.0], False),
        *((shape, [1.0, math.nan, 3.0], False) for shape in ("rises", "falls", "flat", "dips")),
    ],
)  # fmt: skip
def test_a_shape_is_what_the_figure_does_from_arm_to_arm(shape: str, values: list[float], agrees: bool) -> None:
    assert judged(shape, values) == agrees


@pytest.mark.parametrize("shape", ["near", "most"])
def test_a_value_is_missed_by_a_fraction_of_it_at_most(shape: str) -> None:
    assert judged(shape, [10.9, 20.0], (10.0, 20.0), 0.1)
    assert not judged(shape, [11.1, 20.0], (10.0, 20.0), 0.1)
    assert judged(shape, [8.9, 20.0], (10.0, 20.0), 0.1) == (shape == "most")


def test_staleness_of_exponential_times_is_the_momentum_of_the_law() -> None:
    """Ages of gradients of M memoryless workers are geometric; drawn here, not simulated."""
    for workers in (2, 4, 8, 16):
        chance, ages = random.Random(workers), dict[str, int]()
        for _ in range(50_000):
            age = 0
            while chance.random() > 1 / workers:
                age += 1
            ages[str(age)] = ages.get(str(age), 0) + 1
        assert momentum(ages) == pytest.approx(1 - 1 / workers, abs=0.01)
    assert momentum({"0": 100}) == 0.0


def test_what_is_claimed_is_judged_once_all_is_run_and_stands_on_the_page() -> None:
    made = made_report()
    names = tuple(arm.name for arm in made.arms)
    claims = tuple(Claim(f"claim <{shape}>", "seconds to the target", shape, names[1:]) for shape in ("rises", "falls"))
    study = msgspec.structs.replace(made.study, claims=claims)
    report = make_report(study, made.trials, {"cores": 2})
    assert [one.agrees for one in report.claims] == [True, False]
    assert "agrees: claim &lt;rises&gt;" in page(report, "")
    assert "does not agree: claim <falls>" in "\n".join(report.lines())
    assert make_report(study, made.trials[1:], {}).claims == []


def test_every_figure_can_be_told_of_an_arm() -> None:
    arm = made_report().arms[0]
    assert {name for name, of in FIGURES.items() if math.isnan(of(arm))} == {"cosine"}


WRONG = {
    "a figure that there is not": (
        ('of = "accuracy"', 'of = "accuracies"'),
        r"a\.toml: claim 'it grows': unknown of 'accuracies'; .*'accuracy'",
    ),
    "a shape that there is not": (('"rises"', '"raises"'), r"claim 'it grows': .*'raises'; did you mean 'rises'"),
    "an arm that there is not": (('arms = ["x"]', 'arms = ["y"]'), r"claim 'it grows': unknown arm 'y'"),
    "values that are missing": (('"rises"', '"near"'), r"claim 'it grows': 0 values for 2 arms: give one for each"),
}
TEXT = """\
title = "A study"
seeds = [0]
targets = []
[[claims]]
says = "it grows"
of = "accuracy"
arms = ["x"]
shape = "rises"
within = 0.1
[[arms]]
name = "x"
task = "digits"
strategy = "downpour"
each = {replicas = [1, 2]}
"""


@pytest.mark.parametrize(("change", "told"), WRONG.values(), ids=WRONG)
def test_a_wrong_claim_is_refused_with_its_place(change: tuple[str, str], told: str, tmp_path: Path) -> None:
    file = tmp_path / "a.toml"
    file.write_text(TEXT)
    assert definition.read(file).claims[0].arms == ("x, replicas 1", "x, replicas 2")
    file.write_text(TEXT.replace(*change))
    with pytest.raises(UsageError, match=told):
        definition.read(file)


def test_a_name_is_of_one_arm_though_others_go_on_from_it(tmp_path: Path) -> None:
    """x is itself, and not x, replicas 1 too; y, which there is not, is all that begin with it."""
    more = TEXT.replace('arms = ["x"]', 'arms = ["x", "y"]').replace('name = "x"', 'name = "y"')
    whole = f'{more}[[arms]]\nname = "x"\ntask = "digits"\nstrategy = "single"\n'
    file = tmp_path / "a.toml"
    file.write_text(f'{whole}[[arms]]\nname = "x, later"\ntask = "digits"\nstrategy = "single"\n')
    assert definition.read(file).claims[0].arms == ("x", "y, replicas 1", "y, replicas 2")


@pytest.mark.parametrize("name", [name for name in definition.names() if definition.read(definition.find(name)).claims])
def test_the_packages_figures_say_where_their_shape_is_from(name: str) -> None:
    study = definition.read(definition.find(name))
    assert all(claim.shape in SHAPES and claim.of in FIGURES for claim in study.claims)
    assert {claim.of for claim in study.claims} == {"accuracy"} or all(arm.place == "simulated" for arm in study.arms)
