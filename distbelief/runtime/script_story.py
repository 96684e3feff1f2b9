"""Beginning of a script: before it joins it asks how far the job is, and goes on with the state that was kept."""

from __future__ import annotations

import contextlib
import os
import threading
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import nn

from distbelief.core import roles
from distbelief.core.conversations.membership import AskReached, Finish, JobReached
from distbelief.core.effects import PAUSE, RECEIVE, Arrival, Batch, Compute, Computed, Send, Story
from distbelief.core.records import Record
from distbelief.core.settings import Settings
from distbelief.errors import CheckpointError, UsageError
from distbelief.record.restore import load_script
from distbelief.replica.links import unwanted
from distbelief.runtime.driver import Driver
from distbelief.runtime.kept import KeptObjects, KeptState, KeptValues, kept_of
from distbelief.runtime.player import Answer, PlayedRole, ScriptedLoop, Store, Worker
from distbelief.runtime.server_optimizer import ServerOptimizer
from distbelief.transport.base import Endpoint, NetworkEndpoint


class Pump:
    """Thread that polls an endpoint, but only inside `running`: an endpoint is used by one thread at a time."""

    def __init__(self, endpoint: NetworkEndpoint) -> None:
        self._endpoint = endpoint
        self._wake = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._start, self._stopped = threading.Semaphore(0), threading.Semaphore(0)
        self._stopping = False
        self._error: BaseException | None = None
        endpoint.watch(self._wake, self._woken)
        threading.Thread(target=self._run, name="pump", daemon=True).start()

    @contextlib.contextmanager
    def running(self) -> Iterator[None]:
        """Carry the links while the caller does something else, without touching the endpoint."""
        self._stopping = False
        self._start.release()
        try:
            yield
        finally:
            self._stopping = True
            os.eventfd_write(self._wake, 1)
            self._stopped.acquire()
        if self._error is not None:
            raise self._error

    def _woken(self) -> None:
        with contextlib.suppress(BlockingIOError):
            os.eventfd_read(self._wake)

    def _run(self) -> None:
        while True:
            self._start.acquire()
            try:
                while not self._stopping:
                    self._endpoint.poll(None)
            except BaseException as error:  # the thread that waits for this one raises the error
                self._error = error
            self._stopped.release()


@dataclass(frozen=True)
class ScriptStage:
    """Surroundings of a replica whose loop is a user's script."""

    driver: Driver
    endpoint: Endpoint
    make: Callable[[ScriptedLoop], PlayedRole]
    """Builds the replica."""
    settings: Settings = Settings()
    """The job's settings at its launch."""
    device: torch.device = torch.device("cpu")
    pump: Pump | None = None
    """Carries the links during a step, where that needs a thread."""
    rest: Callable[[float], float] | None = None
    """Returns how long to sleep after a step of so many seconds, for a replica that is slowed down."""
    store: Store | None = None
    fill: Callable[[nn.Module], None] = lambda _: None
    """Sets the weights with which the job begins, where they are not the model's own."""
    tell: Callable[[Record], None] = lambda _: None


class ScriptStory:
    """The client of a replica with a script: before it joins, it asks how far the job is.

    `moment` returns the script's epoch and its optimizers.
    """

    def __init__(
        self, role: str, stage: ScriptStage, moment: Callable[[], tuple[int, Sequence[ServerOptimizer]]]
    ) -> None:
        self._role, self._stage = role, stage
        self._started = roles.lead_of(role) in roles.leads(stage.settings.mesh)
        """True if the job has started it; a guest may not have the run folder."""
        self._kept, self._moment = KeptObjects(stage.device), moment
        self.in_step = False
        """True while the script waits in its step."""
        self._reached: JobReached | None = None
        self._saved: KeptState | None = None
        self._gone = ""
        """A checkpoint that the job has named, but that does not exist."""
        self._unread = ""
        """Reason that nothing can be kept."""
        self._paused: Answer | None = None
        self._story: Story | None = None

    @property
    def saves(self) -> bool:
        """True if the script keeps something in checkpoints."""
        return self._kept.active and self._started

    def keep(self, objects: Mapping[str, object], optimizers: Sequence[ServerOptimizer]) -> KeptValues:
        """Keep objects and values; give them, and the rates, their saved state."""
        self._ask()
        if self._unread:
            raise UsageError(self._unread)
        values = self._kept.keep(objects, self._saved)
        if self._saved is not None:
            self._kept.load_options(optimizers, self._saved)
        return values

    def epoch(self, number: int) -> int:
        """Return the epoch with which the script begins: the saved one if it keeps state, else the job's."""
        reached = self._ask()
        kept = self._saved.epoch if self._saved is not None and self._kept.active else -1
        return min(kept if kept >= 0 else reached.epoch, number - 1)

    def part(self) -> dict[str, torch.Tensor]:
        """Return the script's state as a part of a checkpoint."""
        return self._kept.part(*self._moment())

    def check(self, optimizers: Sequence[ServerOptimizer]) -> None:
        """Refuse to go on without the state that was kept; warn of a scheduler that is not kept."""
        resumed = self._ask().resumed
        if self._saved is not None:
            self._kept.check_names(self._saved)
        first = not (roles.index_of(self._role) or roles.partition_of(self._role))
        if resumed and first and (scheduler := self._kept.unkept_scheduler(optimizers)) is not None:
            warnings.warn(
                f"{type(scheduler).__name__} begins anew although the run goes on: keep it, from the first attempt on, "
                "with replica.keep(scheduler=scheduler) before the loop",
                stacklevel=4,
            )

    def go_on(self, story: Story, worker: Worker) -> None:
        """Join: run the replica's client, now that it is known."""
        self._ask()
        self._story = story
        self._stage.driver.work_for(self._role, worker)
        self.end_pause()

    def _ask(self) -> JobReached:
        """Return how far the job is; ask once, as the first part of the client."""
        if self._reached is None:
            driver, stage, worker = self._stage.driver, self._stage, Worker(compute=self.pause)
            driver.add_story(self._role, self._play(), stage.endpoint, worker, stage.store)
            driver.link(self._role)
            driver.begin(self._role)
            driver.run_while(lambda: not self.paused)
        assert self._reached is not None
        return self._reached

    def _play(self) -> Story:
        while self._reached is None:
            yield Send(roles.COORDINATOR, AskReached())
            arrival: Arrival = yield RECEIVE
            if isinstance(arrival.event, JobReached):
                self._take(arrival.event)
            elif not isinstance(arrival.event, Finish):  # a job that ends says so again to a replica that joins
                unwanted(self._role, arrival)
        # the client waits here until the script has built its model and joins
        yield Compute(PAUSE)
        assert self._story is not None
        yield from self._story

    def _take(self, reached: JobReached) -> None:
        """Note how far the job is. Where its checkpoint is gone ask again: a newer one may have replaced it."""
        part: dict[str, torch.Tensor] = {}
        try:
            part = load_script(reached.checkpoint) if self._started and reached.checkpoint else part
        except CheckpointError:
            if Path(reached.checkpoint).is_dir():
                raise
            before, self._gone = self._gone, reached.checkpoint
            if before != self._gone:
                return
            self._unread = (
                f"replica.keep(): {self._role} does not find {reached.checkpoint}: a script's state is in the run "
                "folder, which all hosts must share (--out)"
            )
        self._reached, self._saved = reached, kept_of(part, reached.checkpoint)

    @property
    def paused(self) -> bool:
        """True while the client waits for the script."""
        return self._paused is not None

    def pause(self, _: Batch, answer: Answer) -> Computed | None:
        """Let the script go on while the client waits."""
        self._paused = answer
        return None

    def end_pause(self, written: bool = False) -> None:
        """Let the client go on; note whether the script has written to its parameters."""
        answer, self._paused = self._paused, None
        assert answer is not None
        answer(Computed(None, 0, 0.0, written=True) if written else None)
