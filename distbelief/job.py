"""A job: what to train, how, and what to keep; frozen, checked, and the same in every place."""

from __future__ import annotations

import dataclasses
import itertools
import os
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import KW_ONLY, dataclass
from functools import cached_property, partial
from importlib import import_module
from typing import TYPE_CHECKING, Protocol

from distbelief.core.settings import Check, Settings, SharedOptions, option
from distbelief.core.values import Given, admit, check_fields, device_number, shown
from distbelief.errors import Refusals, UsageError
from distbelief.strategies import Downpour, Strategy, by_name

if TYPE_CHECKING:
    from distbelief.tasks import Task

MOST_THREADS = 1024


@dataclass(frozen=True, kw_only=True)
class OnDevice:
    """Device that computes with a model."""

    device: str = "cpu"
    """Device to compute on: cpu, cuda, cuda:1."""


@dataclass(frozen=True, kw_only=True)
class Threaded(OnDevice):
    """Processes that compute with a model."""

    threads: int = 1
    """Torch threads of each process."""

    def process_checks(self) -> Iterator[Check]:
        """Yield checks of the options of each process."""
        yield self._check_threads
        yield partial(device_number, self.device)

    def _check_threads(self) -> None:
        if not 1 <= self.threads <= MOST_THREADS:
            raise UsageError(f"--threads {self.threads}: must be 1 or more, and at most {MOST_THREADS}")


@dataclass(frozen=True)
class Job(SharedOptions, Threaded):
    """A training job. `db.run(job)` runs it here, `db.run(job, on=db.Simulated(...))` on a virtual cluster.

    >>> Job(task="digits", strategy=Downpour(replicas=3), epochs=2).settings().replicas
    3
    """

    task: str | Task
    """A built-in task, `module:function` of your own, or a `Task`."""
    strategy: Given[Strategy, str] = Given(Downpour(), str, by_name)
    """How to train: a strategy, or the name of one with its default options."""
    _: KW_ONLY
    init_from: Given[str | None, os.PathLike[str]] = Given(None, os.PathLike, os.fspath)
    """A safetensors state dict, a checkpoint or a run folder to start from."""
    data_dir: Given[str | None, os.PathLike[str]] = Given(None, os.PathLike, os.fspath)
    """Folder with the data; by default $DISTBELIEF_DATA, or the cache."""
    out: Given[str | None, os.PathLike[str]] = Given(None, os.PathLike, os.fspath)
    """Run folder; by default a new one under runs/."""
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
        """Return the settings that every role gets; refuse options with values that they cannot have."""
        refuse(refusals(self))
        return self.unchecked

    @cached_property
    def unchecked(self) -> Settings:
        """The settings, even if they cannot be used."""
        options = {field.name: getattr(self, field.name) for field in dataclasses.fields(SharedOptions)}
        for name, other in self.strategy.spelled.items():
            if name in options:
                options[name] = getattr(self.strategy, other)
        return Settings(**options, strategy=self.strategy)

    def checks(self) -> Iterator[Check]:
        """Yield checks of each process's options, and of options that mean nothing to the strategy."""
        yield from self.process_checks()
        yield self._check_resume
        yield self._check_begin
        for name, why in self.strategy.meaningless.items():
            if why and hasattr(Job, name):
                yield partial(self._check_meaning, name, why)

    def _check_resume(self) -> None:
        if self.resume and not self.out:
            raise UsageError("--resume needs the run folder: name it with --out")

    def _check_begin(self) -> None:
        if self.init_from and not (self.resume or os.path.exists(self.init_from)):  # --resume uses a checkpoint instead
            raise UsageError(
                f"--init-from {self.init_from}: there is no such file; name a run folder, a checkpoint or a "
                ".safetensors file"
            )

    def _check_meaning(self, name: str, why: str) -> None:
        if getattr(self, name) != getattr(Job, name):
            raise UsageError(
                f"{option(name)} {getattr(self, name)} means nothing to strategy {self.strategy.name}; {why}"
            )


class Checking(Protocol):
    """A place, as it checks jobs."""

    def checks(self, job: Job, settings: Settings) -> Iterable[Check]:
        """Yield the place's checks of a job."""
        ...


def refusals(job: Job, place: Checking | None = None) -> list[UsageError]:
    """List the reasons why a job cannot be run. Each names the option and the remedy.

    Later checks rely on earlier ones: a group of checks is made only if the groups before refuse nothing, and of a
    place's checks only the first refusal is listed.
    >>> [str(error) for error in refusals(Job("digits", epochs=0, threads=0))]
    ['--threads 0: must be 1 or more, and at most 1024', '--epochs 0: must be 1 or more']
    """
    if not isinstance(job, Job):
        admit(job, Job, f"job={shown(job)}")
    settings = job.unchecked
    each = itertools.chain(job.checks(), settings.checks())
    for group in (settings.sizes(), each, settings.checks_together(), [settings.check_policy]):
        if errors := {str(error): error for error in _raised(group)}:
            return list(errors.values())
    return list(itertools.islice(_raised(place.checks(job, settings)), 1)) if place is not None else []


def _raised(checks: Iterable[Check]) -> Iterator[UsageError]:
    for check in checks:
        try:
            check()
        except UsageError as error:
            yield error


def refuse(errors: Sequence[UsageError]) -> None:
    """Raise a job's refusals, if there are any: the only one, or all in one."""
    if errors:
        raise Refusals.of(errors)
