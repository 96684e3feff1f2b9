"""A job: what is trained, how, and what is kept of it; frozen, checked, and the same wherever it runs."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from importlib import import_module
from typing import TYPE_CHECKING, Any

import msgspec

from distbelief.core.learning_rate import LearningRate
from distbelief.core.settings import DataSettings, Settings, option
from distbelief.core.values import Given, check_fields, device_number
from distbelief.errors import UsageError, unknown
from distbelief.strategies import Downpour, Strategy, by_name

if TYPE_CHECKING:
    from distbelief.tasks import Task

MOST_THREADS = 1024
WHOSE = ("shared", "own")
SCALING = ("lr_scaling", "base_batch")
"""Options of a strategy that the learning rate follows."""
UNITS = {"ms": 0.001, "s": 1.0, "min": 60.0, "h": 3600.0}


@dataclass(frozen=True)
class Job:
    """One training job. `db.run(job)` runs it here, `db.run(job, on=db.Simulated(...))` on a virtual cluster.

    >>> Job(task="digits", strategy=Downpour(replicas=3), epochs=2).settings().replicas
    3
    """

    task: str | Task
    """A built-in task, `module:function` of your own, or a `Task`."""
    strategy: Given[Strategy, str] = Given(Downpour(), str, by_name)
    """How it is trained: a strategy, or the name of one that keeps its defaults."""
    epochs: int = 1
    """Passes over the training set."""
    batch_size: int = 64
    """Samples in a minibatch of one replica."""
    drop_last: bool = field(default=False, kw_only=True)
    """Leave out the last minibatch of an epoch where it is smaller than the others; which samples that is differs from
    epoch to epoch.
    """
    order: str = field(default="shuffled", kw_only=True)
    """Of the samples of an epoch: shuffled, or sequential, which gives each replica a contiguous part, in order."""
    data: str = field(default="shared", kw_only=True)
    """What replicas train on: shared (all have the same data, each sample of which one of them is dealt), or own (each
    has data of its own, and all of them).
    """
    lr_schedule: str = "constant"
    """The learning rate after the warm-up, over the samples applied: constant, linear, polynomial, cosine, step, or
    backoff (smaller after phases that grow)."""
    lr_steps: tuple[float, ...] = field(default=(), kw_only=True)
    """The epochs after which the rate becomes smaller: with --lr-schedule step all of them (none: half and three
    quarters of all), with backoff the first (none: 1)."""
    lr_gamma: float = field(default=0.0, kw_only=True)
    """What the rate is multiplied with, with --lr-schedule step at each of its epochs (0.1), with backoff after each
    phase (0.37), by which the next is longer."""
    lr_power: float = field(default=2.0, kw_only=True)
    """With --lr-schedule polynomial, its power."""
    warmup_epochs: float = field(default=0.0, kw_only=True)
    """Epochs in which the rate is warmed up: from that of the base batch, where it is scaled, else from none."""
    warmup: str = field(default="gradual", kw_only=True)
    """How: gradual (it rises with every update), or constant (it stays that of the base batch, then jumps)."""
    clip_norm: float = 0.0
    """Global norm to which each step's gradient is clipped; 0 clips nothing."""
    precision: str = field(default="float32", kw_only=True)
    """In which gradients are computed: float32, bf16, or fp16, whose loss is scaled; parameters and updates are of
    float32.
    """
    fixed_point: str = field(default="", kw_only=True)
    """dynamic:10,12 computes gradients by products in dynamic fixed point of 10 bits, and keeps parameters in 12 after
    each update; a layer's scale follows its values.
    """
    seed: int = 0
    """Of the initial parameters, the order of the data and all other chance."""
    target_accuracy: float = 0.0
    """Test accuracy (0 to 1) that ends the job once two evaluations in a row hold it; 0 sets no target."""
    target_loss: float = field(default=0.0, kw_only=True)
    """Loss on the test set that ends the job once two evaluations in a row are at most that; 0 sets no target."""
    budget: str = field(default="0", kw_only=True)
    """Training time (45s, 5min) after which the job ends; 0 for none."""
    evaluate_every: int | str = 1
    """Epochs between evaluations of the server's model, or applied minibatches (500minibatches); 0 evaluates never."""
    checkpoint_every: int = 1
    """Epochs between checkpoints; one is written at the end in any case."""
    snapshot_every: str = "60s"
    """Training time (30s, 5min), pushes (500) or applied minibatches (500minibatches) between checkpoints beside those,
    which a shard that died goes back to; 0 for none.
    """
    keep_checkpoints: int = 2
    """Checkpoints kept."""
    init_from: Given[str | None, os.PathLike[str]] = Given(None, os.PathLike, os.fspath)
    """A safetensors state dict, a checkpoint or a run folder to start from."""
    device: str = "cpu"
    """Where replicas compute: cpu, cuda, cuda:1."""
    threads: int = 1
    """Torch threads of each process."""
    data_dir: Given[str | None, os.PathLike[str]] = Given(None, os.PathLike, os.fspath)
    """Folder with the data; else $DISTBELIEF_DATA, else the cache."""
    out: Given[str | None, os.PathLike[str]] = Given(None, os.PathLike, os.fspath)
    """Run folder; a new one under runs/ where none is given."""
    resume: bool = False
    """Go on from the newest checkpoint of the run folder `out`."""

    def __post_init__(self) -> None:
        check_fields(self, Task=object if isinstance(self.task, str) else import_module("distbelief.tasks").Task)
        if self.data_dir is None and not isinstance(self.task, str):
            object.__setattr__(self, "data_dir", self.task.data_dir)

    @property
    def reference(self) -> str:
        """The task's name."""
        return self.task if isinstance(self.task, str) else self.task.reference

    def settings(self) -> Settings:
        """What every role of the job is told.

        Raises:
            UsageError: an option has a value that it cannot have.
        """
        if not 1 <= self.threads <= MOST_THREADS:
            raise UsageError(f"--threads {self.threads}: must be 1 or more, and at most {MOST_THREADS}")
        device_number(self.device)
        if self.resume and not self.out:
            raise UsageError("--resume needs the run folder to go on with: name it with --out")
        for name, instead in self.strategy.meaningless.items():
            if getattr(self, name) != getattr(Job, name):
                raise UsageError(
                    f"{option(name)} {getattr(self, name)} means nothing to strategy {self.strategy.name}; {instead}"
                )
        if self.data not in WHOSE:
            raise unknown("--data", self.data, WHOSE)
        spelled = {name: getattr(self.strategy, other) for name, other in self.strategy.spelled.items()}
        cadence = {**_evaluations(self.evaluate_every), **_snapshots(self.snapshot_every), **_budget(self.budget)}
        for name in ("evaluate_every", "snapshot_every"):
            if self.strategy.counts != "minibatches" and cadence[name.replace("every", "minibatches")]:
                raise UsageError(
                    f"{option(name)} {getattr(self, name)}: strategy {self.strategy.name} counts "
                    f"{self.strategy.counts}: give a number of them"
                )
        scaled = {name: getattr(self.strategy, name) for name in SCALING if hasattr(self.strategy, name)}
        values = {**vars(self), **spelled, **cadence, **scaled, "own_data": self.data == "own"}
        data, rate = (kind(**_those(kind, values)) for kind in (DataSettings, LearningRate))
        settings = Settings(**{**_those(Settings, values), "data": data, "rate": rate})
        self.strategy.check_device(self.device)
        settings.check()
        return settings


def _those(kind: type[msgspec.Struct], values: Mapping[str, Any]) -> dict[str, Any]:
    """The values of the fields of a struct."""
    return {name: values[name] for name in kind.__struct_fields__ if name in values}


def _evaluations(every: int | str) -> dict[str, int]:
    """The settings that `evaluate_every` stands for.

    >>> _evaluations(2), _evaluations("500minibatches")
    ({'evaluate_every': 2, 'evaluate_minibatches': 0}, {'evaluate_every': 0, 'evaluate_minibatches': 500})
    """
    found = re.fullmatch(r"(-?\d+)\s*(minibatches)?", str(every).strip())
    if not found or (found[2] and int(found[1]) < 1):
        raise UsageError(
            f"--evaluate-every {every!r}: is a number of epochs such as 2, one of minibatches such as 500minibatches, "
            "or 0 for never"
        )
    number = int(found[1])
    return {"evaluate_every": 0 if found[2] else number, "evaluate_minibatches": number if found[2] else 0}


def _snapshots(every: str) -> dict[str, float]:
    """The settings that `snapshot_every` stands for.

    >>> _snapshots("5min")
    {'snapshot_seconds': 300.0, 'snapshot_pushes': 0, 'snapshot_minibatches': 0}
    >>> _snapshots("500minibatches")["snapshot_minibatches"], _snapshots("500")["snapshot_pushes"]
    (500, 500)
    """
    found = re.fullmatch(r"(\d+)\s*(minibatches)?", str(every).strip())
    seconds = 0.0 if found else _seconds(every)
    if seconds is None:
        raise UsageError(
            f"--snapshot-every {every!r}: is a time such as 30s or 5min, a number of pushes such as 500, of "
            "minibatches such as 500minibatches, or 0 for none"
        )
    number, counted = (int(found[1]), bool(found[2])) if found else (0, False)
    return {
        "snapshot_seconds": seconds,
        "snapshot_pushes": 0 if counted else number,
        "snapshot_minibatches": number if counted else 0,
    }


def _budget(told: str) -> dict[str, float]:
    """The settings that `budget` stands for.

    >>> _budget("45s"), _budget("0")
    ({'budget_seconds': 45.0}, {'budget_seconds': 0.0})
    """
    seconds = 0.0 if str(told).strip() == "0" else _seconds(told)
    if seconds is None:
        raise UsageError(f"--budget {told!r}: is a time such as 45s, 5min or 2h, or 0 for none")
    return {"budget_seconds": seconds}


def _seconds(told: str) -> float | None:
    """The seconds of a time with its unit; None of anything else.

    >>> _seconds("5min"), _seconds("500ms"), _seconds("5")
    (300.0, 0.5, None)
    """
    found = re.fullmatch(rf"(\d+(?:\.\d+)?)\s*({'|'.join(UNITS)})", str(told).strip())
    return float(found[1]) * UNITS[found[2]] if found else None
