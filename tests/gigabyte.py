"""A model of a gigabyte of parameters, none of them above 64 MB; as a program: a job that trains it, of processes of
which none may have more memory of its own than is said.
"""

from __future__ import annotations

import json
import os
import resource
import sys
import threading
from pathlib import Path

import torch
from torch import nn

import distbelief as db
from distbelief.tasks import Task, TensorData

WIDTH, LAYERS = 4000, 16
BATCH, STEPS, RATE = 8, 20, 0.01
INTERVAL = 0.02
"""Seconds between looks at the processes."""


def gigabyte() -> Task:
    """16 layers of 64 MB, measured on what they are trained on."""
    return Task(model=_layers, train=_noise, test=_noise, loss=nn.functional.mse_loss, metric=None)


def _layers() -> nn.Module:
    return nn.Sequential(*(part for _ in range(LAYERS) for part in (nn.Linear(WIDTH, WIDTH, bias=False), nn.Tanh())))


def _noise() -> TensorData:
    chance = torch.Generator().manual_seed(0)
    return TensorData(*(torch.randn(STEPS * BATCH, WIDTH, generator=chance) for _ in range(2)))


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


def main(limit: int, partitions: int, out: str, init_from: str = "") -> None:
    """Train it for `STEPS` steps on one replica, and measure it; prints the outcome, and what each process had."""
    resource.setrlimit(resource.RLIMIT_DATA, (limit, limit))
    more = {"partitions": partitions, "split": "stages"} if partitions > 1 else {}
    strategy = db.Downpour(replicas=1, shards=4, optimizer=db.optim("sgd", lr=RATE), **more)
    job = db.Job(
        task="gigabyte:gigabyte", strategy=strategy, batch_size=BATCH, checkpoint_every=0, out=out,
        init_from=init_from or None,
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
    main(int(sys.argv[1]), int(sys.argv[2]), *sys.argv[3:])
