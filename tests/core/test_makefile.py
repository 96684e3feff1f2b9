"""What `make train` does where MNIST cannot be had, without a network, a Python environment or a training run."""

import os
import shutil
import subprocess
from pathlib import Path

import pytest
from patience import SECONDS

MAKEFILE = Path(__file__).parents[2] / "Makefile"


def make_train(folder: Path, why: str) -> list[str]:
    """The lines that `make train` shows where `available` answers `why`, with programs in the place of others."""
    for name, lines in {
        "python": f"""case "$2" in *'available("mnist")'*) echo "{why}";; *) exit 9;; esac""",
        "distbelief": 'echo "$@"',
    }.items():
        path = folder / ".venv/bin" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"#!/bin/sh\n{lines}\n")
        path.chmod(0o755)
    (folder / ".venv/installed").touch()
    for name in ("pyproject.toml", "constraints.txt"):
        os.utime(shutil.copy(MAKEFILE.with_name(name), folder), (0, 0))
    done = subprocess.run(
        ["make", "--no-print-directory", "-f", MAKEFILE, "train"],
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=SECONDS,
        check=True,
    )
    return done.stdout.splitlines()


@pytest.mark.skipif(shutil.which("make") is None, reason="there is no make here")
@pytest.mark.long
def test_make_train_trains_mnist_or_says_in_one_line_why_it_trains_digits(tmp_path: Path) -> None:
    line = "train {} downpour --replicas 2 --shards 2 --optimizer adagrad --lr 0.02 --epochs 5"
    assert make_train(tmp_path, "") == [line.format("mnist")]
    why = "no MNIST: no network; put the files into ~/.cache"
    assert make_train(tmp_path, why) == [f"training on digits, since there is {why}", line.format("digits")]
