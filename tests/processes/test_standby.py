"""Standbys in processes of their own: shards are killed, and nothing that was acknowledged is lost."""

import os
from collections.abc import Callable
from pathlib import Path

import jobs
import pytest

from distbelief.core import records
from distbelief.core.records import Record
from distbelief.places.processes.local import Local
from distbelief.strategies import Bounded, Downpour, Synchronous
from distbelief.strategies.parameter_server.options import Served


def mirrored(watch: jobs.Watch, shards: int = 2) -> bool:
    """Whether every shard has a standby that holds all it has acknowledged."""
    return len(watch.of(records.StandbyReady)) >= shards


def named_port() -> str:
    """A port of a loopback address that is ours alone, where nobody who asks for any port is given one."""
    own = os.getpid()
    return f"127.{64 + own // 65_536 % 64}.{own // 256 % 256}.{own % 256}:20000"


@pytest.mark.parametrize(
    ("strategy", "place", "role"),
    [
        (Downpour(2, 2, push_every=3, fetch_every=2, prefetch=1, standby=1), Local, "shard 0"),
        (Synchronous(2, 2, standby=1), lambda: Local("tcp", tls=True), "shard 1"),
        (Bounded(2, 2, staleness=1, standby=1), lambda: Local("tcp", named_port()), "shard 0"),
    ],
    ids=["shared", "tls", "a port"],
)
def test_a_killed_shard_is_succeeded_and_nothing_is_lost(
    tmp_path: Path, watch: jobs.Watch, strategy: Served, place: Callable[[], Local], role: str
) -> None:
    def act(record: Record) -> None:
        if isinstance(record, records.Stepped) and mirrored(watch) and not watch.of(records.Succeeded):
            jobs.kill(role)
        elif isinstance(record, records.Stepped) and record.steps and watch.of(records.Succeeded):
            watch.interrupt()

    watch.act = act
    result = jobs.run(tmp_path, strategy, place(), epochs=jobs.MANY, evaluate_every=0)
    assert (result["outcome"], result["forgotten"]) == ("interrupted", 0)
    assert [record.role for record in watch.of(records.Succeeded)] == [role]
    assert not watch.of(records.Forgotten)
    assert not watch.of(records.Rewound)
    assert not any(record.died for record in watch.of(records.Gone)), "a replica did not outlive its shard"


def test_a_killed_standby_is_replaced_and_its_successor_succeeds(tmp_path: Path, watch: jobs.Watch) -> None:
    killed: list[str] = []

    def act(record: Record) -> None:
        if record == records.StandbyReady("standby 0"):
            killed.append("shard 0" if killed else "standby 0")
            jobs.kill(killed[-1])
        elif isinstance(record, records.Stepped) and record.steps and watch.of(records.Succeeded):
            watch.interrupt()

    watch.act = act
    assert jobs.run(tmp_path, Downpour(2, 2, standby=1), epochs=jobs.MANY, evaluate_every=0)["forgotten"] == 0
    assert [(record.role, record.standby) for record in watch.of(records.Succeeded)] == [("shard 0", "standby 0")]
