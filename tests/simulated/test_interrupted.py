"""Jobs of long steps that are told to end: within two steps they leave a checkpoint, and go on from it."""

from __future__ import annotations

import contextlib
import json
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from drawn import SEEDS, some
from oracles import classes
from safetensors.torch import load_file
from torch import nn

from distbelief.core.optimizer import Optimizer
from distbelief.job import Job
from distbelief.places.compute_model import ComputeModel
from distbelief.places.place import Interruption
from distbelief.places.simulated import running
from distbelief.places.simulated.simulated import Simulated
from distbelief.places.simulated.simulation import Simulation
from distbelief.runtime.clock import VirtualClock
from distbelief.strategies import (
    STRATEGIES,
    Allreduce,
    Bounded,
    Downpour,
    Hogwild,
    Locking,
    Sandblaster,
    Single,
    Softsync,
    Synchronous,
)

MOMENTUM = Optimizer("momentum", 0.1)
ANY: dict[str, Any] = {
    "downpour": Downpour(3, 2),
    "a push of many steps": Downpour(2, 2, push_every=7, fetch_every=7),
    "local steps": Downpour(2, 2, push_every=7, fetch_every=7, local_lr=0.1),
    "downpour of partitions": Downpour(2, 2, partitions=2, split="stages"),
    "bounded": Bounded(3, 2),
    "bounded at 0": Bounded(2, 2, staleness=0),
    "softsync": Softsync(3, 2),
    "synchronous": Synchronous(3, 2),
    "backup workers": Synchronous(3, 2, backup_workers=1),
    "rounds of many steps": Synchronous(2, 2, push_every=7),
    "synchronous of partitions": Synchronous(2, 2, push_every=3, partitions=2, split="stages"),
    "hogwild": Hogwild(3),
    "locking": Locking(3),
    "sandblaster": Sandblaster(2, 2, 4, portion_size=4),
    "sandblaster of partitions": Sandblaster(2, 2, 4, portion_size=4, partitions=2, split="stages"),
}
ALIKE: dict[str, Any] = {
    "one replica": Downpour(1, 2, prefetch=0, optimizer=MOMENTUM),
    "one replica in rounds": Synchronous(1, 2, push_every=3, optimizer=MOMENTUM),
    "allreduce": Allreduce(3, optimizer=MOMENTUM),
    "accumulated": Allreduce(2, accumulate=4, optimizer=MOMENTUM),
    "allreduce of partitions": Allreduce(2, partitions=2, split="stages", optimizer=MOMENTUM),
    "single": Single(optimizer=MOMENTUM),
    "single of partitions": Single(partitions=2, split="stages", optimizer=MOMENTUM),
    "single in microbatches": Single(partitions=2, split="stages", microbatches=2, optimizer=MOMENTUM),
    "one order of sums": Sandblaster(2, 2, 4, portion_size=4, deterministic=True),
}
"""Those that train the same whenever they are interrupted."""
STEP, EPOCHS, SAMPLES = 2.5, 3, 64
MOMENTS = some([0.1 + 0.55 * number for number in range(32)], max(3, SEEDS // 16))
"""From the first step on."""
SLACK = 0.2
"""Seconds of all that is no step: messages, updates, checkpoints."""


def net() -> nn.Module:
    """Three layers, for as many stages."""
    return nn.Sequential(nn.Linear(6, 10), nn.Tanh(), nn.Dropout(0.2), nn.Linear(10, 8), nn.Tanh(), nn.Linear(8, 3))


@contextlib.contextmanager
def told_at(moment: float) -> Iterator[None]:
    """Has a job be told to end at a moment; that of one process asks by itself, after each step."""
    clock = VirtualClock()

    class Told(Simulation):
        def run(self) -> None:
            self.stopped = lambda: None
            clock.call_later(moment, lambda _: self._do(self._ask(Interruption("Ctrl-C"))), None)
            super().run()

    @contextlib.contextmanager
    def interrupts() -> Iterator[Callable[[], str | None]]:
        yield lambda: "Ctrl-C" if clock.now() >= moment else None

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(running, "VirtualClock", lambda: clock)
        patch.setattr(running, "Simulation", Told)
        patch.setattr(running, "_interrupts", interrupts)
        yield


def play(strategy: Any, run: Path, *, resume: bool = False) -> dict[str, Any]:
    fit = {} if isinstance(strategy, Sandblaster) else {"epochs": EPOCHS, "batch_size": 4}
    task = classes(net, samples=SAMPLES)
    job = Job(task, strategy, snapshot_every="0", evaluate_every=0, out=str(run), resume=resume, **fit)
    return Simulated(compute=ComputeModel(step=STEP, spread="constant")).run(job)


def events(run: Path, name: str) -> list[dict[str, Any]]:
    """The events of one kind that the run has written down."""
    every = map(json.loads, (run / "metrics.jsonl").read_text().splitlines())
    return [one for one in every if one["event"] == name]


def check_left(strategy: Any, run: Path, moment: float) -> None:
    """The job has left in time, with a checkpoint; and goes on, so that each sample counts once."""
    with told_at(moment):
        result = play(strategy, run)
    assert result["outcome"] == "interrupted"
    seconds = events(run, "Finished")[-1]["seconds"] - moment
    assert seconds <= 2 * STEP + SLACK, f"told at {moment} s, it has left after {seconds / STEP:.2f} steps"
    assert not events(run, "Checkpointed")[-1]["error"]
    assert (run / "model.safetensors").exists()
    result = play(strategy, run, resume=True)
    assert result["outcome"] in ("done", "failed" if isinstance(strategy, Sandblaster) else "done")
    if not isinstance(strategy, Sandblaster):
        assert result["samples"] == EPOCHS * SAMPLES


def test_every_strategy_is_told() -> None:
    assert {strategy.name for strategy in (*ANY.values(), *ALIKE.values())} == STRATEGIES.keys()


@pytest.mark.parametrize("way", ANY)
def test_a_job_that_is_interrupted_leaves_within_two_steps_and_goes_on(tmp_path: Path, way: str) -> None:
    for moment in MOMENTS:
        check_left(ANY[way], tmp_path / str(moment), moment)


@pytest.mark.parametrize("way", ALIKE)
def test_a_job_that_was_interrupted_ends_as_if_it_had_not_been(tmp_path: Path, way: str) -> None:
    play(ALIKE[way], tmp_path / "whole")
    whole = load_file(tmp_path / "whole" / "model.safetensors")
    for moment in MOMENTS:
        check_left(ALIKE[way], run := tmp_path / str(moment), moment)
        for name, value in load_file(run / "model.safetensors").items():
            assert torch.equal(value, whole[name]), f"{name}, told at {moment} s"


def test_a_run_of_settings_that_are_no_more_goes_on_without_them(tmp_path: Path) -> None:
    for moment in (4 * STEP, 8 * STEP, None):
        with told_at(moment) if moment else contextlib.nullcontext():
            play(Single(optimizer=MOMENTUM), tmp_path, resume=moment != 4 * STEP)
        if moment != 4 * STEP:
            continue
        job, manifest = tmp_path / "job.json", max(tmp_path.glob("checkpoints/*/manifest.json"))
        begun = json.loads(job.read_text())
        job.write_text(json.dumps({**begun, "settings": {"lightness": 1.0, "darkness": 2, **begun["settings"]}}))
        body = manifest.read_bytes().partition(b'"manifest":')[2][:-1]
        body = body.replace(b'"settings":{', b'"settings":{"lightness":1.0,', 1)
        manifest.write_bytes(b'{"crc32":%d,"manifest":%s}' % (zlib.crc32(body), body))
    without = "its job.json has darkness, lightness, no setting of single: it goes on without"
    assert [note["text"] for note in events(tmp_path, "Note")].count(without) == 1
    assert "lightness" not in job.read_text()
