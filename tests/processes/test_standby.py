"""Standbys in processes of their own: shards are killed, over every carrier, and nothing that was acknowledged is
lost.
"""

import contextlib
import os
import random
import socket
from collections.abc import Callable
from pathlib import Path

import jobs
import pytest

from distbelief.core import records
from distbelief.core.records import Record
from distbelief.places.processes.local import Local
from distbelief.strategies import Bounded, Downpour, Softsync, Synchronous
from distbelief.strategies.parameter_server.options import Served

EPOCHS = 12
STRATEGIES = [
    Downpour(2, 2, standby=1), Downpour(2, 2, push_every=3, fetch_every=2, prefetch=1, standby=1), Synchronous(2, 2,
        standby=1),
    Synchronous(3, 2, backup_workers=1, standby=1), Softsync(2, 2, standby=1), Bounded(2, 2, staleness=1, standby=1),
]  # fmt: skip


def mirrored(watch: jobs.Watch, shards: int = 2) -> bool:
    """Whether every shard has a standby that holds all it has acknowledged."""
    return len(watch.of(records.StandbyReady)) >= shards


@pytest.mark.parametrize(
    "strategy", STRATEGIES, ids=lambda s: f"{s.name} {getattr(s, 'prefetch', '')}{getattr(s, 'backup_workers', '')}"
)
@pytest.mark.parametrize("role", ["shard 0", "shard 1"])
def test_a_killed_shard_is_succeeded_and_nothing_is_lost(
    tmp_path: Path, watch: jobs.Watch, strategy: Served, role: str
) -> None:
    moment, reports = random.Random(f"{strategy}{role}").randint(1, 20), iter(range(10**6))

    def act(record: Record) -> None:
        if isinstance(record, records.Stepped) and mirrored(watch) and next(reports) == moment:
            jobs.kill(role)
        elif isinstance(record, records.Stepped) and record.steps and watch.of(records.Succeeded):
            watch.interrupt()

    watch.act = act
    result = jobs.run(tmp_path, strategy, epochs=jobs.MANY)
    assert result["outcome"] == "interrupted"
    assert [record.role for record in watch.of(records.Succeeded)] == [role]
    assert not watch.of(records.Forgotten)
    assert not watch.of(records.Rewound)
    assert not any(record.died for record in watch.of(records.Gone)), "a replica did not outlive its shard"
    assert result["forgotten"] == 0


def named_port() -> str:
    """Ours, and a port that is free, as are those after it: below the ports that the system gives to whoever asks for
    any.
    """
    for first in range(20_000 + 16 * (os.getpid() % 512), 32_000, 16):
        with contextlib.ExitStack() as held, contextlib.suppress(OSError):
            for port in range(first, first + 16):
                held.enter_context(socket.create_server(("127.0.0.1", port)))
            return f"127.0.0.1:{first}"
    raise AssertionError("no 16 ports from 20,000 to 32,000 are free")


@pytest.mark.parametrize(
    "place",
    [lambda: Local("tcp"), lambda: Local("tcp", tls=True), lambda: Local("tcp", named_port())],
    ids=["tcp", "tls", "a port"],
)
@pytest.mark.parametrize("strategy", [STRATEGIES[0], STRATEGIES[2]], ids=lambda s: s.name)
def test_over_a_network_too(tmp_path: Path, watch: jobs.Watch, strategy: Served, place: Callable[[], Local]) -> None:
    def act(record: Record) -> None:
        if isinstance(record, records.Stepped) and mirrored(watch) and not watch.of(records.Succeeded):
            jobs.kill("shard 1")
        elif isinstance(record, records.Stepped) and record.steps and watch.of(records.Succeeded):
            watch.interrupt()

    watch.act = act
    assert jobs.run(tmp_path, strategy, place(), epochs=jobs.MANY)["forgotten"] == 0
    assert [record.role for record in watch.of(records.Succeeded)] == ["shard 1"]


def test_a_killed_standby_is_replaced_and_its_successor_succeeds(tmp_path: Path, watch: jobs.Watch) -> None:
    killed: list[str] = []

    def act(record: Record) -> None:
        if record == records.StandbyReady("standby 0"):
            killed.append("shard 0" if killed else "standby 0")
            jobs.kill(killed[-1])
        elif isinstance(record, records.Stepped) and record.steps and watch.of(records.Succeeded):
            watch.interrupt()

    watch.act = act
    assert jobs.run(tmp_path, Downpour(2, 2, standby=1), epochs=jobs.MANY)["forgotten"] == 0
    assert [(record.role, record.standby) for record in watch.of(records.Succeeded)] == [("shard 0", "standby 0")]


def test_a_shard_whose_standby_died_with_it_goes_on_from_the_checkpoint(tmp_path: Path, watch: jobs.Watch) -> None:
    def act(record: Record) -> None:
        if (
            isinstance(record, records.Stepped)
            and mirrored(watch)
            and watch.of(records.Checkpointed)
            and not watch.of(records.Vacant)
        ):
            jobs.kill("standby 0")
            jobs.kill("shard 0")
        elif (
            isinstance(record, records.Stepped)
            and record.steps
            and any(one.role == "shard 0" for one in watch.of(records.Vacant))
        ):
            watch.interrupt()

    watch.act = act
    assert jobs.run(tmp_path, Downpour(2, 2, standby=1), epochs=jobs.MANY)["outcome"] == "interrupted"
