"""A job: what is trained, how, and what is kept of it; frozen, checked, and the same wherever it runs."""

from __future__ import annotations

import dataclasses
import os
from dataclasses import KW_ONLY, dataclass
from importlib import import_module
from typing import TYPE_CHECKING

from distbelief.core.settings import Settings, SharedOptions, option
from distbelief.core.values import Given, check_fields, device_number
from distbelief.errors import UsageError
from distbelief.strategies import Downpour, Strategy, by_name

if TYPE_CHECKING:
    from distbelief.tasks import Task

MOST_THREADS = 1024


@dataclass(frozen=True, kw_only=True)
class OnDevice:
    """Device that computes with a model."""

    device: str = "cpu"
    """Where to compute: cpu, cuda, cuda:1."""


@dataclass(frozen=True, kw_only=True)
class Threaded(OnDevice):
    """Processes that compute with a model."""

    threads: int = 1
    """Torch threads of each process."""


@dataclass(frozen=True)
class Job(SharedOptions, Threaded):
    """One training job. `db.run(job)` runs it here, `db.run(job, on=db.Simulated(...))` on a virtual cluster.

    >>> Job(task="digits", strategy=Downpour(replicas=3), epochs=2).settings().replicas
    3
    """

    task: str | Task
    """A built-in task, `module:function` of your own, or a `Task`."""
    strategy: Given[Strategy, str] = Given(Downpour(), str, by_name)
    """How it is trained: a strategy, or the name of one that keeps its defaults."""
    _: KW_ONLY
    init_from: Given[str | None, os.PathLike[str]] = Given(None, os.PathLike, os.fspath)
    """A safetensors state dict, a checkpoint or a run folder to start from."""
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
        options = {field.name: getattr(self, field.name) for field in dataclasses.fields(SharedOptions)}
        spelled = {name: getattr(self.strategy, other) for name, other in self.strategy.spelled.items()}
        settings = Settings(**options | spelled, strategy=self.strategy)
        self.strategy.check_device(self.device)
        settings.check()
        return settings
