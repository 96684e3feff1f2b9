"""Beginning of a script: it asks where the job is before it takes part, and goes on with what was kept."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import nn

from distbelief.core import roles
from distbelief.core.conversations.membership import Finish
from distbelief.core.conversations.scripting import AskReached, JobReached
from distbelief.core.effects import PAUSE, RECEIVE, Arrival, Batch, Compute, Computed, Send, Story
from distbelief.core.records import Record
from distbelief.core.settings import Settings
from distbelief.errors import CheckpointError, UsageError
from distbelief.record.restore import load_script
from distbelief.replica.links import unwanted
from distbelief.runtime.driver import Driver
from distbelief.runtime.kept import KeptObjects, KeptState, KeptValues, kept_of
from distbelief.runtime.player import Answer, PlayedRole, ScriptedLoop, Store, Worker
from distbelief.runtime.pump import Pump
from distbelief.runtime.server_optimizer import ServerOptimizer
from distbelief.transport.base import Endpoint


@dataclass(frozen=True)
class ScriptStage:
    """Stage of a replica whose loop is the user's."""

    driver: Driver
    """Plays its story."""
    endpoint: Endpoint
    make: Callable[[ScriptedLoop], PlayedRole]
    """Makes what it plays."""
    settings: Settings = Settings()
    """Settings of the job, as it was launched."""
    device: torch.device = torch.device("cpu")
    """Device that the job would have it compute on."""
    pump: Pump | None = None
    """Carries the links during a step, where that needs a thread."""
    rest: Callable[[float], float] | None = None
    """Says how long to sleep after a step of so many seconds, where the replica is to be slower than it is."""
    store: Store | None = None
    """Store of its checkpoints."""
    fill: Callable[[nn.Module], None] = lambda _: None
    """Gives a model the weights that the job begins with, where they are not its own."""
    tell: Callable[[Record], None] = lambda _: None
    """Takes a record of what happens."""


class ScriptStory:
    """The story of a replica as its script goes through it: what it knows of the job before it takes part, and keeps.

    Args:
        role: of its replica.
        stage: of that.
        moment: says in which epoch the script is, and which optimizers it has.
    """

    def __init__(
        self, role: str, stage: ScriptStage, moment: Callable[[], tuple[int, Sequence[ServerOptimizer]]]
    ) -> None:
        self._role, self._stage = role, stage
        self._own = roles.lead_of(role) in roles.leads(stage.settings.mesh)
        """True where the job has started it: a guest may not have the run folder at hand."""
        self._kept, self._moment = KeptObjects(stage.device), moment
        self.in_step = False
        """True while it waits in its step."""
        self._reached: JobReached | None = None
        self._saved: KeptState | None = None
        self._gone = ""
        """A checkpoint that the job has named, and that is not there."""
        self._unread = ""
        """Why nothing can be kept."""
        self._paused: Answer | None = None
        self._story: Story | None = None

    @property
    def saves(self) -> bool:
        """True where it keeps something that goes into checkpoints."""
        return self._kept.asked and self._own

    def keep(self, objects: Mapping[str, object], optimizers: Sequence[ServerOptimizer]) -> KeptValues:
        """Keep objects and values, and have them, and the rates, be what was kept of them."""
        self._ask()
        if self._unread:
            raise UsageError(self._unread)
        values = self._kept.keep(objects, self._saved)
        if self._saved is not None:
            self._kept.load_options(optimizers, self._saved)
        return values

    def epoch(self, number: int) -> int:
        """With which of so many the script begins: that in which it was when it was kept, or else the job is."""
        reached = self._ask()
        kept = self._saved.epoch if self._saved is not None and self._kept.asked else -1
        return min(kept if kept >= 0 else reached.epoch, number - 1)

    def part(self) -> dict[str, torch.Tensor]:
        """Return all that the script keeps, as a part of a checkpoint."""
        return self._kept.part(*self._moment())

    def check(self, optimizers: Sequence[ServerOptimizer]) -> None:
        """Refuse to go on without what was kept; and tell once of a scheduler that was not.

        Raises:
            UsageError: it does not keep what was kept.
        """
        resumed = self._ask().resumed
        if self._saved is not None:
            self._kept.check_names(self._saved)
        first = not (roles.index_of(self._role) or roles.partition_of(self._role))
        if resumed and first and (scheduler := self._kept.unkept_scheduler(optimizers)) is not None:
            warnings.warn(
                f"{type(scheduler).__name__} begins anew, and the run goes on: have it go on with it, from the first "
                "attempt on, by replica.keep(scheduler=scheduler) before the loop",
                stacklevel=4,
            )

    def go_on(self, story: Story, worker: Worker) -> None:
        """Take part: play the replica's story, now that it is known."""
        self._ask()
        self._story = story
        self._stage.driver.work_for(self._role, worker)
        self.end_pause()

    def _ask(self) -> JobReached:
        """Ask once where the job is, and what was kept: the first part of the story."""
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
            elif not isinstance(arrival.event, Finish):  # who joins a job that ends is told so again
                unwanted(self._role, arrival)
        yield Compute(PAUSE)
        assert self._story is not None
        yield from self._story

    def _take(self, reached: JobReached) -> None:
        """Know where the job is; ask again where its checkpoint is gone, since a newer one may have taken its place."""
        part: dict[str, torch.Tensor] = {}
        try:
            part = load_script(reached.checkpoint) if self._own and reached.checkpoint else part
        except CheckpointError:
            if Path(reached.checkpoint).is_dir():
                raise
            before, self._gone = self._gone, reached.checkpoint
            if before != self._gone:
                return
            self._unread = (
                f"replica.keep(): {self._role} does not find {reached.checkpoint}: what scripts keep is in the run "
                "folder, which all hosts must see (--out)"
            )
        self._reached, self._saved = reached, kept_of(part, reached.checkpoint)

    @property
    def paused(self) -> bool:
        """True while the story waits for the script, which goes on meanwhile."""
        return self._paused is not None

    def pause(self, _: Batch, answer: Answer) -> Computed | None:
        """Let the script go on."""
        self._paused = answer
        return None

    def end_pause(self, written: bool = False) -> None:
        """Go on with the story; the script may have written to its parameters."""
        answer, self._paused = self._paused, None
        assert answer is not None
        answer(Computed(None, 0, 0.0, written=True) if written else None)
