"""Ctrl-C at every moment of a start: the command ends as interrupted, and leaves nothing."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

STARTS = int(os.environ.get("DISTBELIEF_STARTS", "40"))
FIRST, STEP = 0.3, 0.1
"""Seconds: Python itself has begun by the first, and does with the signal what it likes before."""
COMMANDS = [
    "train digits downpour",
    "train digits allreduce",
    "simulate digits downpour --keep",
    "launch downpour {script}",
]
SCRIPT = """
import torch, distbelief
replica = distbelief.join()
model = torch.nn.Linear(4, 2)
optimizer = replica.optimizer(model)
data = torch.utils.data.TensorDataset(torch.randn(64, 4), torch.zeros(64, dtype=torch.long))
for x, y in replica.batches(data, batch_size=8):
    torch.nn.functional.cross_entropy(model(x), y).backward()
    optimizer.step()
"""


@pytest.mark.parametrize("at", range(STARTS))
def test_a_ctrl_c_at_any_moment_of_a_start_ends_the_job(tmp_path: Path, at: int) -> None:
    (tmp_path / "script.py").write_text(SCRIPT)
    words = COMMANDS[at % len(COMMANDS)].format(script=tmp_path / "script.py").split()
    command = [sys.executable, "-m", "distbelief", *words[: len(words) - (words[0] == "launch")], "--epochs", "100000"]
    command += words[-1:] if words[0] == "launch" else []
    process = subprocess.Popen(
        command, cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True
    )
    time.sleep(FIRST + STEP * (at // len(COMMANDS)))  # any moment will do
    os.killpg(process.pid, signal.SIGINT)
    _, said = process.communicate(timeout=60)
    assert process.returncode == 130, said
    assert said.splitlines()[-1].startswith("distbelief: interrupted"), said
