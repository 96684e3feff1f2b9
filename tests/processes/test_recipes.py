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


def test_every_recipe_says_how_it_runs() -> None:
    assert all(len(lines(recipe, "distbelief launch") + lines(recipe, "python")) == 1 for recipe in RECIPES)


def test_a_strategy_from_outside_the_package_trains_and_holds_what_a_strategy_must(tmp_path: Path) -> None:
    recipe, environment = ROOT / "recipes" / "own_strategy.py", {**os.environ, "DISTBELIEF_DATA": str(tmp_path)}
    small_mnist(tmp_path)
    assert len(recipe.read_text().splitlines()) < 250
    for command in ("distbelief train", "distbelief simulate", "python"):
        [line] = lines(recipe, command)
        words = shlex.split(line)[1:]
        if command != "python":
            words = ["-m", "distbelief", *words, "--quiet", "--epochs", "1", "--out", str(tmp_path / words[0])]
        ended = subprocess.run(
            [sys.executable, *words], cwd=recipe.parent, env=environment, capture_output=True, text=True, timeout=100
        )
        assert (ended.returncode, ended.stderr) == (0, "")
        if command != "python":
            result = json.loads((tmp_path / words[2] / "result.json").read_text())
            assert (result["outcome"], result["samples"]) == ("done", SAMPLES)


def test_few_bits_are_measured_beside_float32() -> None:
    words = [sys.executable, str(ROOT / "recipes" / "few_bits.py"), "--tasks", "digits", "--turns", "2"]
    ended = subprocess.run(words, capture_output=True, text=True, timeout=110)
    assert (ended.returncode, ended.stderr) == (0, "")
    rows = [line.split(" | ") for line in ended.stdout.splitlines() if line.startswith("| digits")]
    assert len(rows) == 4 + 2 * 4
    held = {row[2]: float(row[4].strip(" |")) for row in rows[4:8]}
    assert held["ids"] < held["float32"]


@pytest.mark.parametrize(
    "recipe",
    [recipe for recipe in RECIPES if len(" ".join(lines(recipe, "python")).split()) == 3],
    ids=lambda path: path.name,
)
def test_a_recipe_that_draws_does(tmp_path: Path, recipe: Path) -> None:
    small_mnist(tmp_path)
    [line] = lines(recipe, "python")
    _, script, _ = line.split()
    ended = subprocess.run(
        [sys.executable, str(ROOT / script), "plot.png", "0.001", "1"], cwd=tmp_path, capture_output=True, text=True,
        timeout=110, check=False,
        env={**os.environ, "PYTHONPATH": str(ROOT), "MPLCONFIGDIR": str(tmp_path), "DISTBELIEF_DATA": str(tmp_path)},
    )  # fmt: skip
    assert ended.returncode == 0, ended.stderr
    assert (tmp_path / "plot.png").read_bytes().startswith(b"\x89PNG")


def test_figures_4_and_5_and_times_to_a_target_are_drawn_of_their_studies(tmp_path: Path) -> None:
    """Of small ones, in which a target is missed."""
    text = 'title = "A"\nseeds = [0, 1]\ntargets = [0.2, 0.999]\nplace = "simulated"\n[common]\nepochs = 6\n[[arms]]\n'
    arm = 'name = "Adagrad"\ntask = "digits"\nstrategy = "downpour"\neach = {replicas = [1, 2]}\n'
    for name in ("figure4", "figure5"):
        (tmp_path / f"{name}.toml").write_text(text + arm)
        words = ["-m", "distbelief", "study", f"{name}.toml", "--quiet"]
        subprocess.run([sys.executable, *words], cwd=tmp_path, check=True, timeout=110)
    figures = ["figure4.py", "studies/figure4", "studies/figure5", "plot.png"]
    times = ["study_times.py", "studies/figure5", "times.png", "digits:simulated:0.2", "digits:simulated:0.999"]
    for script, *words in (figures, times):
        ended = subprocess.run(
            [sys.executable, str(ROOT / "recipes" / script), *words],
            cwd=tmp_path, capture_output=True, text=True, timeout=110,
        )  # fmt: skip
        assert (ended.returncode, ended.stderr) == (0, "")
    for name in ("plot.png", "times.png"):
        assert (tmp_path / name).read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(
    "recipe", [recipe for recipe in RECIPES if lines(recipe, "distbelief launch")], ids=lambda path: path.name
)
def test_a_recipe_runs_as_it_says(tmp_path: Path, recipe: Path) -> None:
    small_mnist(tmp_path)
    [line] = lines(recipe, "distbelief launch")
    command, strategy, *rest = shlex.split(line)[1:]
    words = [command, strategy, "--quiet", "--out", str(tmp_path / "run"), *rest]
    environment = {**os.environ, "DISTBELIEF_DATA": str(tmp_path)}
    ended = subprocess.run(
        [sys.executable, "-m", "distbelief", *words],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
        timeout=100,
    )
    assert (ended.returncode, ended.stderr) == (0, "")
    result = json.loads((tmp_path / "run" / "result.json").read_text())
    assert (result["outcome"], result["samples"]) == ("done", SAMPLES)
    assert result["history"][-1]["train_loss"] > 0
    assert (tmp_path / "run" / "model.safetensors").exists()


def test_alexnet_and_vgg_fall_under_one_half_before_inception() -> None:
    scaling, replicas = recipes.load("scaling.py"), (1, 2, 4)
    fell = {
        name: scaling.falls(scaling.efficiencies(scaling.net(task), scaling.NETWORKS["1 Gbit/s"], replicas), replicas)
        for name, task in scaling.NETS.items()
    }
    assert fell == {"AlexNet": 2, "VGG-16": 2, "Inception v1": 4}
