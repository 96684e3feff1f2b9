"""Processes of this machine are a place: they keep what a supervisor relies on."""

from __future__ import annotations

import multiprocessing
import multiprocessing.connection
from collections.abc import Callable
from pathlib import Path
from time import monotonic

import jobs

from distbelief.places.attempt import Attempt
from distbelief.places.place import Event
from distbelief.places.processes import forkserver
from distbelief.places.processes.local import Local
from distbelief.places.processes.processes import Processes
from distbelief.places.processes.running import Running
from distbelief.strategies import Downpour
from distbelief.testing import Site, check_place


def test_processes_are_a_place(tmp_path: Path) -> None:
    """Replicas that nobody tells where the coordinator listens wait for that until they are ended."""
    runs = 0

    def make(happens: Callable[[Event], None]) -> Site:
        nonlocal runs
        runs += 1
        local, job = Local(), jobs.job(tmp_path / f"run {runs}", Downpour(replicas=2))
        settings = local.settings(job)
        running = Running(local, Attempt(job, settings, None, monotonic()), False)
        processes = Processes(running._spec, lambda *_: None, happens)
        lives: dict[int | None, tuple[str, int]] = {}
        forkserver.start()

        def there() -> list[tuple[str, int]]:
            lives.update({child.process.pid: (child.role, child.incarnation) for child in processes.children})
            return [lives[process.pid] for process in multiprocessing.active_children() if process.pid in lives]

        def strike(role: str, incarnation: int) -> None:
            assert (role, incarnation) in there()
            assert jobs.kill(role)

        def pump() -> None:
            processes.look(set(map(id, multiprocessing.connection.wait(processes.waitables, 0.01))))

        def close() -> None:
            processes.close()
            running.close()
            running.attempt.finish()

        return Site(processes, ("replica 0", "replica 1"), strike, there, pump, close)

    check_place(make)
