"""Process that trains a few iterations and reports the memory they needed, for comparison with a trace."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import torch
from torch import nn

from distbelief.core.effects import Batch
from distbelief.core.optimizer import optim
from distbelief.core.settings import Settings
from distbelief.errors import JobFailed
from distbelief.lab.cost.cost import held
from distbelief.server.optimizers import build, stepper
from distbelief.tasks import resolve
from distbelief.tasks.worker import Trainer, build_model, load, with_data

ITERATIONS = 3
PATIENCE = 120.0
"""Time limit of the process in seconds."""


def peak(task: str, batch_size: int, optimizer: str) -> float:
    """Return the most bytes that iterations need in a fresh process, beyond those held without a model."""
    # without the threshold glibc keeps ever more freed memory
    env = {**os.environ, "MALLOC_MMAP_THRESHOLD_": "65536", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", __name__, json.dumps([task, batch_size, optimizer])]
    ended = subprocess.run(command, env=env, capture_output=True, text=True, timeout=PATIENCE, check=False)
    if ended.returncode:
        raise JobFailed(f"iterations of {task} with {batch_size} samples failed: {ended.stderr.strip()[-500:]}")
    return float(ended.stdout)


def main() -> None:
    """Train, and print the bytes."""
    task_name, batch_size, optimizer = json.loads(sys.argv[1])
    torch.set_num_threads(1)
    task = resolve(task_name)
    data = load(task, "training")
    data.batch(torch.arange(1))
    _load_kernels()
    before = held()
    model = build_model(task, 0, "cpu")
    trainer = Trainer(with_data(task, data), model, Settings(batch_size=batch_size))
    step = stepper(build(optim(optimizer), [{"params": list(model.parameters())}]))
    for number in range(ITERATIONS):
        if number == ITERATIONS - 1:
            Path("/proc/self/clear_refs").write_text("5")  # reset the peak
        trainer.compute(Batch(0, number % trainer.order.batches))
        with torch.no_grad():
            step()
    print(held("VmHWM") - before)


def _load_kernels() -> None:
    """Make torch load the code of layers and optimizers, so that its memory does not count."""
    model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(8 * 7 * 7, 10))
    nn.functional.cross_entropy(model(torch.zeros(2, 3, 16, 16)), torch.zeros(2, dtype=torch.int64)).backward()
    step = stepper(build(optim("adam"), [{"params": list(model.parameters())}]))
    with torch.no_grad():
        step()


if __name__ == "__main__":
    main()
