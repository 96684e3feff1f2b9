"""Every recipe runs as its first lines say, on a few samples."""

import json
import os
import shlex
import struct
import subprocess
import sys
from pathlib import Path

import pytest
import recipe as recipes
import torch
from patience import SECONDS

from distbelief.cli import main

ROOT = Path(__file__).parents[2]
SAMPLES = 320


def small_mnist(folder: Path) -> None:
    for part in ("train", "t10k"):
        (folder / f"{part}-images-idx3-ubyte").write_bytes(
            struct.pack(">4I", 2051, SAMPLES, 28, 28) + bytes(range(256)) * (SAMPLES * 784 // 256)
        )
        (folder / f"{part}-labels-idx1-ubyte").write_bytes(
            struct.pack(">2I", 2049, SAMPLES) + bytes(range(10)) * (SAMPLES // 10)
        )


def lines(recipe: Path, command: str) -> list[str]:
    """What a recipe says is to be typed."""
    return [line for line in recipe.read_text().splitlines() if line.startswith(f"{command} ")]


RECIPES = sorted((ROOT / "recipes").glob("*.py"))


DRAWS = {
    "collectives.py": (0.001, 1),
    "figure3.py": (2,),
    "scaling.py": (),
    "stragglers.py": (0.001, 1),
    "topologies.py": (2, 100, 1),
}
"""Those that are told where to, and what makes them short."""


def test_every_recipe_says_how_it_runs() -> None:
    assert all(len(lines(recipe, "distbelief launch") + lines(recipe, "python")) == 1 for recipe in RECIPES)
    assert {one.name for one in RECIPES if len(" ".join(lines(one, "python")).split()) == 3} == {*DRAWS}


def test_a_strategy_from_outside_the_package_trains_and_holds_what_a_strategy_must(tmp_path: Path) -> None:
    recipe, environment = ROOT / "recipes" / "own_strategy.py", {**os.environ, "DISTBELIEF_DATA": str(tmp_path)}
    small_mnist(tmp_path)
    assert len(recipe.read_text().splitlines()) < 250
    for command in ("distbelief train", "python"):
        [line] = lines(recipe, command)
        words = shlex.split(line)[1:]
        if command != "python":
            words = ["-m", "distbelief", *words, "--quiet", "--epochs", "1", "--out", str(tmp_path / words[0])]
        ended = subprocess.run(
            [sys.executable, *words],
            cwd=recipe.parent,
            env=environment,
            capture_output=True,
            text=True,
            timeout=SECONDS,
        )
        assert (ended.returncode, ended.stderr) == (0, "")
        if command != "python":
            result = json.loads((tmp_path / words[2] / "result.json").read_text())
            assert (result["outcome"], result["samples"]) == ("done", SAMPLES)


def test_few_bits_are_measured_beside_float32(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["few_bits.py", "--tasks", "digits", "--turns", "2"])
    threads = torch.get_num_threads()
    try:
        recipes.load("few_bits.py").main()
    finally:
        torch.set_num_threads(threads)
    rows = [line.split(" | ") for line in capsys.readouterr().out.splitlines() if line.startswith("| digits")]
    assert len(rows) == 4 + 2 * 4
    held = {row[2]: float(row[4].strip(" |")) for row in rows[4:8]}
    assert held["ids"] < held["float32"]


def draws(path: Path) -> bool:
    return path.read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize("recipe", DRAWS)
def test_a_recipe_that_draws_does(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, recipe: str) -> None:
    monkeypatch.setenv("MPLBACKEND", "agg")
    monkeypatch.chdir(tmp_path)
    drawing = recipes.load(recipe)
    if recipe == "scaling.py":  # a minute, with all of them
        monkeypatch.setattr(drawing, "REPLICAS", (1, 2))
        for one in (drawing.efficiencies, drawing.falls):
            monkeypatch.setattr(one, "__defaults__", (drawing.REPLICAS,))
    drawing.main("plot.png", *DRAWS[recipe])
    assert draws(tmp_path / "plot.png")


def test_figures_4_and_5_and_times_to_a_target_are_drawn_of_their_studies(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of a small one, in which a target is missed."""
    monkeypatch.setenv("MPLBACKEND", "agg")
    monkeypatch.chdir(tmp_path)
    text = 'title = "A"\nseeds = [0, 1]\ntargets = [0.2, 0.999]\nplace = "simulated"\n[common]\nepochs = 6\n[[arms]]\n'
    arm = 'name = "Adagrad"\ntask = "digits"\nstrategy = "downpour"\neach = {replicas = [1, 2]}\n'
    Path("figure.toml").write_text(text + arm)
    assert main.run(["study", "figure.toml", "--quiet"]) == 0
    recipes.load("figure4.py").main("studies/figure", "studies/figure", "plot.png")
    targets = ["digits:simulated:0.2", "digits:simulated:0.999"]
    recipes.load("study_times.py").main("studies/figure", "times.png", *targets)
    assert draws(tmp_path / "plot.png")
    assert draws(tmp_path / "times.png")


def test_a_recipe_runs_as_it_says(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    small_mnist(tmp_path)
    monkeypatch.setenv("DISTBELIEF_DATA", str(tmp_path))
    monkeypatch.chdir(ROOT)
    [line] = [line for recipe in RECIPES for line in lines(recipe, "distbelief launch")]
    command, strategy, *rest = shlex.split(line)[1:]
    assert main.run([command, strategy, "--quiet", "--out", str(tmp_path / "run"), *rest]) == 0
    result = json.loads((tmp_path / "run" / "result.json").read_text())
    assert (result["outcome"], result["samples"]) == ("done", SAMPLES)
    assert result["history"][-1]["train_loss"] > 0
    assert (tmp_path / "run" / "model.safetensors").exists()
