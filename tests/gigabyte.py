"""A model of a gigabyte of parameters, none of them above 64 MB, and one of a quarter of that; as a program: a job that
trains one of them, of processes of which none may have more memory of its own than is said.
"""

from __future__ import annotations

import json
import os
import resource
import subprocess
import sys
import threading
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch
from torch import nn

import distbelief as db
from distbelief.strategies import Strategy
from distbelief.tasks import Task, TensorData

WIDTH, LAYERS = 4000, 16
BATCH, STEPS, RATE = 8, 20, 0.01
INTERVAL = 0.02
"""Seconds between looks at the processes."""


def gigabyte() -> Task:
    """16 layers of 64 MB, measured on what they are trained on."""
    return _task(WIDTH, LAYERS)


def quarter() -> Task:
    """8 layers of 36 MB."""
    return _task(3000, 8)


def _task(width: int, layers: int) -> Task:
    model, noise = partial(_layers, width, layers), partial(_noise, width)
    return Task(model=model, train=noise, test=noise, loss=nn.functional.mse_loss, metric=None)


def _layers(width: int, layers: int) -> nn.Module:
    return nn.Sequential(*(part for _ in range(layers) for part in (nn.Linear(width, width, bias=False), nn.Tanh())))


def _noise(width: int) -> TensorData:
    chance = torch.Generator().manual_seed(0)
    return TensorData(*(torch.randn(STEPS * BATCH, width, generator=chance) for _ in range(2)))


def _look(most: dict[str, list[int]], ended: threading.Event) -> None:
    """Note the most that each process of this session has: of its own, and with what it has mapped."""
    while not ended.wait(INTERVAL):
        for folder in Path("/proc").iterdir():
            try:
                if not folder.name.isdecimal() or os.getsid(int(folder.name)) != os.getsid(0):
                    continue
                title = (folder / "cmdline").read_bytes().replace(b"\0", b" ").decode().strip()
                lines = dict(line.split(":", 1) for line in (folder / "status").read_text().splitlines())
                own, shared, files = (int(lines[f"Rss{kind}"].split()[0]) << 10 for kind in ("Anon", "Shmem", "File"))
            except (OSError, KeyError, ValueError):  # it has ended
                continue
            most[title] = [max(pair) for pair in zip(most.get(title, [0, 0]), (own, own + shared + files), strict=True)]


def train(limit: int, model: str, strategy: str, out: Path, begin: str = "") -> subprocess.CompletedProcess[str]:
    """Run this program.

    Args:
        limit: of what each process may have of its own, in bytes.
        model: of those here, by name.
        strategy: of those in `main`.
        out: the run folder.
        begin: a file of the weights to begin with.
    """
    path = os.pathsep.join([str(Path(__file__).parent), *filter(None, [os.environ.get("PYTHONPATH")])])
    words = [sys.executable, "-m", "gigabyte", str(limit), model, strategy, str(out), begin]
    environment = {**os.environ, "PYTHONPATH": path}
    return subprocess.run(words, env=environment, start_new_session=True, capture_output=True, text=True, check=False)


def main(limit: int, model: str, strategy: str, out: str, begin: str) -> None:
    """Train it for `STEPS` steps, and measure it; prints the outcome, and what each process had."""
    resource.setrlimit(resource.RLIMIT_DATA, (limit, limit))
    optimizer, split = db.optim("sgd", lr=RATE), {"partitions": 4, "split": "stages"}
    strategies: dict[str, Callable[[], Strategy]] = {
        "whole": lambda: db.Downpour(1, 4, optimizer=optimizer),
        "downpour": lambda: db.Downpour(1, 4, optimizer=optimizer, **split),
        "allreduce": lambda: db.Allreduce(2, optimizer=optimizer, **{**split, "partitions": 2}),
        "single": lambda: db.Single(optimizer=optimizer, **split),
    }
    job = db.Job(
        task=f"gigabyte:{model}", strategy=strategies[strategy](), batch_size=BATCH, checkpoint_every=0, out=out,
        init_from=begin or None,
    )  # fmt: skip
    most: dict[str, list[int]] = {}
    ended = threading.Event()
    watcher = threading.Thread(target=_look, args=(most, ended))
    watcher.start()
    try:
        result = db.run(job)
    finally:
        ended.set()
        watcher.join()
    kept = {name: result[name] for name in ("outcome", "steps", "split", "test_loss")}
    print(json.dumps({**kept, "most": most}))


if __name__ == "__main__":
    main(int(sys.argv[1]), *sys.argv[2:])
