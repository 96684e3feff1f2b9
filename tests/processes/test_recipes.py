"""Every recipe runs as its first lines say, on a few samples."""

import json
import os
import shlex
import struct
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SAMPLES = 320


def small_mnist(folder: Path) -> None:
    for part in ("train", "t10k"):
        (folder / f"{part}-images-idx3-ubyte").write_bytes(struct.pack(">4I", 2051, SAMPLES, 28, 28) + bytes(range(256)) * (SAMPLES * 784 // 256))
        (folder / f"{part}-labels-idx1-ubyte").write_bytes(struct.pack(">2I", 2049, SAMPLES) + bytes(range(10)) * (SAMPLES // 10))


@pytest.mark.parametrize("recipe", sorted((ROOT / "recipes").glob("*.py")), ids=lambda path: path.name)
def test_a_recipe_runs_as_it_says(tmp_path: Path, recipe: Path) -> None:
    small_mnist(tmp_path)
    [line] = [line for line in recipe.read_text().splitlines() if line.startswith("distbelief launch ")]
    command, strategy, *rest = shlex.split(line)[1:]
    words = [command, strategy, "--quiet", "--out", str(tmp_path / "run"), *rest]
    environment = {**os.environ, "DISTBELIEF_DATA": str(tmp_path)}
    ended = subprocess.run([sys.executable, "-m", "distbelief", *words], cwd=ROOT, env=environment, capture_output=True, text=True, timeout=100)
    assert (ended.returncode, ended.stderr) == (0, "")
    result = json.loads((tmp_path / "run" / "result.json").read_text())
    assert (result["outcome"], result["samples"]) == ("done", SAMPLES)
    assert result["history"][-1]["train_loss"] > 0
    assert (tmp_path / "run" / "model.safetensors").exists()
