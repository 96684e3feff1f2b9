"""The scripts of `make scripts` and `make test-frameworks`: a few lines are what each is away from the plain one."""

import re
import sys

import pytest
import recipe

FOLDER = recipe.RECIPES / "scripts"
RUNNER = recipe.load("scripts/run.py")


@pytest.mark.parametrize("name", RUNNER.ALL)
def test_a_script_is_few_lines_away_from_the_plain_one(name: str) -> None:
    least = 2 if name in RUNNER.FRAMEWORKS else 4
    assert least <= RUNNER.lines_changed(name) <= RUNNER.ALL[name].lines


def test_the_documents_table_is_of_these_scripts() -> None:
    table = (FOLDER.parents[1] / "docs" / "scripts.md").read_text().partition("| script |")[2].partition("\n\n")[0]
    rows = [[cell.strip(" `") for cell in line.split("|")[1:-1]] for line in table.splitlines()[2:]]
    told = {row[0]: (row[1], row[2], row[5], row[8]) for row in rows}
    assert told == {
        name: (str(RUNNER.lines_changed(name)), one.result, "yes", RUNNER.options(one))
        for name, one in RUNNER.ALL.items()
    }


def test_every_script_is_run() -> None:
    pairs = {path.stem.removesuffix("_distributed") for path in FOLDER.glob("*_distributed.py")}
    assert pairs == set(RUNNER.ALL)
    assert {path.stem for path in FOLDER.glob("*.py")} == {
        *pairs,
        *(f"{one}_distributed" for one in pairs),
        "data",
        "run",
    }


def test_a_recipe_says_how_it_is_called(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    by_number = [path for path in recipe.RECIPES.rglob("*.py") if re.search(r"sys\.argv\[\d+\]", path.read_text())]
    assert not by_number
    monkeypatch.setattr(sys, "argv", ["mnist.py"])
    with pytest.raises(SystemExit):
        recipe.load("scripts/data.py").arguments(seed=int, columns=int)
    assert "usage: mnist.py [-h] seed columns" in capsys.readouterr().err


def test_a_row_says_whether_the_results_agree() -> None:
    """The median of the distributed seeds, within the plain median plus or minus the range of the plain seeds."""
    rates = {(False, seed): (0.9 + seed / 100, 50.0) for seed in range(3)}
    module = recipe.load("scripts/run.py")
    for shift, within in ((0.015, True), (0.03, False)):
        both = {**rates, **{(True, seed): (0.91 + shift, 40.0) for seed in range(3)}}
        module.run = lambda _, seed, distributed, both=both: both[distributed, seed]
        found = module.compare("mnist", 3)
        assert found["within"] is within
        assert f"| {'yes' if within else 'no'} | 50 | 40 |" in module.row(found)
