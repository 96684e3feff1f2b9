"""All-reduce over links of our own, encrypted between hosts: one replica's part in the groups of a job."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable

import torch

from distbelief.core import roles
from distbelief.core.conversations.grouping import Assemble
from distbelief.fabric.base import Told
from distbelief.fabric.choosing import ScheduleChoice
from distbelief.fabric.in_order import LOOK_SECONDS, InOrder
from distbelief.fabric.link_lines import LinkLines
from distbelief.fabric.player import play
from distbelief.schedules.allreduce import broadcast, schedule
from distbelief.schedules.schedule import RankStep

REST_SECONDS = 2e-3
"""Time of one wait for the thread."""
NATIVE = "ring"
"""The schedule that goes by the name native: these links have none of their own."""


class Links(InOrder):
    """One replica's part in the groups of a job; a thread of its own carries the links, in a step as between groups.

    What is on a GPU goes through memory of the host.

    Args:
        lines: of an endpoint of this role, which listens, and is used for nothing else.
        index: of this replica.
        device: where its model is.
        algorithm: how gradients are added up.
        per_host: ranks that are on one host.
        store: where the endpoint listens.
    """

    def __init__(
        self, lines: LinkLines, index: int, device: torch.device, algorithm: str, per_host: int, store: str
    ) -> None:
        super().__init__(device)
        self.store = store
        """Address at which the other members of a group reach this one."""
        self._lines, self._index, self._algorithm, self._per_host = lines, index, algorithm, per_host
        self._steps: list[tuple[RankStep, ...]] = []
        self._tasks: deque[Callable[[], None]] = deque()
        self._done = threading.Event()
        self._ended = ""
        self._thread = threading.Thread(target=self._run, name="all-reduce", daemon=True)
        self._thread.start()

    def form(self, group: Assemble, interrupted: Told) -> bool:
        """Be in a group, in the place of the one before, with links to all its members.

        False where that cannot be, or as soon as `interrupted` says that something has arrived.
        """
        self._lines.wanted = group.group
        formed = self._do(lambda: self._form(group))
        while not formed.done():
            if interrupted():
                return False
            time.sleep(LOOK_SECONDS)
        try:
            formed.value()
        except RuntimeError as error:
            self.fault = str(error)
            return False
        self._begin_round()
        return True

    def _form(self, group: Assemble) -> None:
        lines = self._lines
        ranks, rank = len(group.members), [roles.index_of(member.role) for member in group.members].index(self._index)
        lines.form(group.group, group.members, rank)
        name = NATIVE if self._algorithm == "native" else self._algorithm
        choice = ScheduleChoice(lines, name, self._per_host)
        schedules = [
            (choice.of(b.length, b.item) or schedule(NATIVE, ranks, b.length)) if b.adds else broadcast(ranks, b.length)
            for b in self._buckets
        ]
        lines.settle()
        self._steps = [schedule.steps_of(rank) for schedule in schedules]

    @property
    def _formed(self) -> bool:
        return bool(self._steps)

    def _start(self, bucket: int) -> torch.futures.Future[torch.Tensor]:
        return self._do(lambda: self._reduce(bucket))

    def _reduce(self, bucket: int) -> None:
        """Add up a bucket; with the last of a round, have the others done with all that this rank has sent them."""
        view = self._views[bucket]
        there = view.cpu()
        play(self._lines, there, self._steps[bucket])
        if there is not view:
            view.copy_(there)
        if bucket == len(self._buckets) - 1:
            self._lines.settle()

    def _rest(self) -> None:
        if self._done.wait(REST_SECONDS):
            self._done.clear()

    def close(self) -> None:
        """Leave the group, and end all links; safe to call twice."""
        self._lines.wanted = -1
        self._do(self._end)
        self._thread.join()

    def _end(self) -> None:
        self._ended = "its links are closed"
        self._lines.close()

    # the thread

    def _do(self, act: Callable[[], None]) -> torch.futures.Future[torch.Tensor]:
        """Have the thread do something; returns what will have its end, or the error."""
        future: torch.futures.Future[torch.Tensor] = torch.futures.Future()

        def task() -> None:
            try:
                if self._ended:
                    raise RuntimeError(self._ended)
                act()
                future.set_result(self._vector)
            except Exception as error:  # of a peer that is gone: told to whoever waits
                error.__traceback__ = None  # its frames hold the vectors
                future.set_exception(error)  # type: ignore[arg-type]  # its stubs take a future's value only
            self._done.set()

        self._tasks.append(task)
        if self._ended:
            self._work_off()
        else:
            self._lines.wake()
        return future

    def _run(self) -> None:
        try:
            while not self._ended:
                self._work_off()
                if not self._ended:
                    self._lines.rest()
        except Exception as error:
            self._ended = f"its links cannot be carried any more: {error!r}"
            self._lines.close()
        self._work_off()  # who waits for it is not to wait for ever

    def _work_off(self) -> None:
        while self._tasks:
            self._tasks.popleft()()
