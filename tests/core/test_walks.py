"""Walks: how many files of the package a reader opens to follow what happens."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import torch
from torch import nn

import distbelief as db
from distbelief.core import roles
from distbelief.core.conversations.membership import Here
from distbelief.core.effects import Batch, Computed
from distbelief.core.portions import ANEW
from distbelief.core.settings import Plan
from distbelief.places.processes import forkserver
from distbelief.places.processes.processes import Processes
from distbelief.replica.downpour import DownpourTraining
from distbelief.replica.served_replica import ServedReplica
from distbelief.runtime.clock import WallClock
from distbelief.runtime.direct import DirectEndpoint, OwnedShard
from distbelief.runtime.driver import Driver
from distbelief.runtime.player import Worker
from distbelief.server.shard import Shard
from distbelief.server.slice import TorchSlice
from distbelief.strategies.parameter_server.players import coordinator
from distbelief.tasks import Task, TensorData
from distbelief.tasks.flat import FlatModule
from distbelief.tasks.worker import Trainer
from distbelief.transport.base import Arena
from distbelief.transport.shared import Locks, SharedEndpoint

ROOT = str(Path(db.__file__).parent)
MOST = 30
"""Files between `Local.run` and the start of the first process; 42 when they were first counted. The recorder's sinks
are four of them.
"""
MOST_OF_A_GRADIENT = {"direct": 15, "served": 19}
"""Files between a replica's gradient and the shard's update, of a step that says nothing to the coordinator; 25 and 26
when they were first counted.
"""


class FirstStart(Exception):
    """The first process would be started now."""


class Walk:
    """The files of the package whose functions have run, each with the first of these."""

    def __init__(self) -> None:
        self.files: dict[str, str] = {}

    def begin(self) -> None:
        self.files = {}
        sys.setprofile(self._note)

    def _note(self, frame: FrameType, event: str, _: object) -> None:
        code = frame.f_code
        is_function = code.co_flags & 2  # no class, and no module
        if event == "call" and code.co_filename.startswith(ROOT) and is_function:
            self.files.setdefault(code.co_filename[len(ROOT) + 1 :], code.co_qualname)

    def __str__(self) -> str:
        return "\n".join(f"{file}: {name}" for file, name in self.files.items())


@contextmanager
def unseen() -> Iterator[None]:
    """What runs here is part of no walk."""
    profile = sys.getprofile()
    sys.setprofile(None)
    yield
    sys.setprofile(profile)


def test_few_files_lie_between_a_run_and_its_first_process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def start(*_: object) -> None:
        sys.setprofile(None)
        raise FirstStart

    monkeypatch.setattr(forkserver, "start", lambda *_: True)
    monkeypatch.setattr(Processes, "start", start)
    job, place, walk = db.Job("digits", "downpour", out=str(tmp_path / "run")), db.Local(), Walk()
    for _ in range(2):  # what the first imports and keeps is not walked again
        walk.begin()
        try:
            with pytest.raises(FirstStart):
                place.run(job)
        finally:
            sys.setprofile(None)
    assert len(walk.files) <= MOST, str(walk)


class Turns:
    """The clock of all roles in one process: each looks at its own links in turn, the coordinator unseen."""

    def __init__(self, *endpoints: SharedEndpoint) -> None:
        self._coordinator, *self._others = (WallClock(endpoint) for endpoint in endpoints)

    def now(self) -> float:
        return 0.0

    def call_later(self, *_: Any) -> None: ...

    def turn(self) -> None:
        for clock in self._others:
            clock.glance()
        with unseen():
            self._coordinator.glance()

    glance = turn


class Nowhere:
    """Nothing is kept."""

    def __getattr__(self, _: str) -> Callable[..., None]:
        return lambda *_: None


def walks_of(path: str, monkeypatch: pytest.MonkeyPatch) -> list[Walk]:
    """Train over the carrier of one host, all roles in this process; return the walk of each gradient to its update."""
    memory, file = dict[int, torch.Tensor](), os.memfd_create("memory")
    walks, optimize, locks = [Walk()], TorchSlice._optimize, Locks(file)

    def room(size: int) -> torch.Tensor:
        return memory.setdefault(size, torch.zeros(size, dtype=torch.uint8))

    def optimized(*args: Any) -> None:
        sys.setprofile(None)
        walks.append(Walk())
        optimize(*args)

    monkeypatch.setattr(TorchSlice, "_optimize", optimized)
    data = TensorData(torch.randn(40, 6), torch.randint(0, 3, (40,)))
    task = Task(model=lambda: nn.Linear(6, 3), train=lambda: data, test=lambda: data)
    strategy = db.Downpour(1, 1, optimizer=db.optim("momentum", lr=0.1))
    settings = db.Job(task, strategy, batch_size=4, epochs=2, evaluate_every=0, checkpoint_every=0).settings()
    model = task.model()
    flat, trainer = FlatModule(model), Trainer(task, model, settings, 0.0)
    kind = DirectEndpoint if path == "direct" else SharedEndpoint
    lead, end, shard = (
        SharedEndpoint(roles.COORDINATOR, "job"),
        kind("replica 0", "job"),
        SharedEndpoint("shard 0", "job"),
    )

    def attach(plan: Plan, arena: Arena) -> None:
        flat.bind(arena.gradients, arena.parameters)
        if isinstance(end, DirectEndpoint):
            end.share(plan, room, locks, lambda index, held: Shard(index, held))
            buffers, landed = end.compute_there()
            flat.bind(arena.gradients, buffers, landed, remedy="--path served")

    def compute(batch: Batch, _: object) -> Computed:
        computed = trainer.compute(batch)
        walks[-1].begin()
        return computed

    driver = Driver(Turns(lead, end, shard), lambda *_: None, lasts=True)
    driver.coordinator = lead.listen()
    driver.add_machine(roles.COORDINATOR, coordinator(settings, False, ANEW), lead, Nowhere())
    served = Shard(0, TorchSlice)
    owned = OwnedShard(lambda held: Shard(0, held), room, locks)
    driver.add_machine("shard 0", owned if path == "direct" else served, shard, Nowhere())
    driver.link("shard 0")
    driver.send("shard 0", roles.COORDINATOR, Here(0, shard.listen()))
    story = ServedReplica(DownpourTraining, "replica 0", flat, len(trainer.data)).story()
    driver.add_story("replica 0", story, end, Worker(attach, compute), Nowhere())
    driver.link("replica 0")
    try:
        driver.run()
    finally:
        sys.setprofile(None)
        os.close(file)
    return [walk for walk in walks if walk.files]


@pytest.mark.parametrize("path", MOST_OF_A_GRADIENT)
def test_few_files_lie_between_a_gradient_and_the_update_with_it(path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    walks = walks_of(path, monkeypatch)
    assert len(walks) == 20
    shortest = min(walks, key=lambda walk: len(walk.files))
    assert shortest.files.keys() > {"replica/downpour.py", "server/shard.py", "server/slice.py"}
    assert len(shortest.files) <= MOST_OF_A_GRADIENT[path], str(shortest)
