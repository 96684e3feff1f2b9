"""Allreduce on real processes, over every carrier, with deaths, and a run that goes on."""

from __future__ import annotations

import contextlib
import json
import socket
from collections.abc import Iterator
from pathlib import Path

import jobs
import msgspec
import pytest
import tally
import torch
from torch.distributed import PrefixStore, TCPStore

from distbelief.core import records
from distbelief.core.conversations.grouping import Assemble, Member
from distbelief.core.messages import Address
from distbelief.core.optimizer import optim
from distbelief.core.records import Record
from distbelief.core.settings import Plan, Settings
from distbelief.errors import UsageError
from distbelief.fabric import process_group
from distbelief.fabric.process_group import ProcessGroup
from distbelief.places.processes.local import Local
from distbelief.sharding.layout import Tensor, lay_out
from distbelief.strategies import Allreduce, Single

PLACES = {"shared": Local(), "tcp": Local(transport="tcp"), "tls": Local(transport="tcp", tls=True)}


@pytest.fixture(scope="module")
def union(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What one process makes of minibatches three times as large."""
    folder = tmp_path_factory.mktemp("union") / "run"
    jobs.run(folder, Single(optimizer=optim("momentum", lr=0.05)), jobs.PLAIN, epochs=2, batch_size=3 * jobs.BATCH)
    return folder


@pytest.mark.parametrize(
    ("carrier", "algorithm"), [("shared", "auto"), ("tcp", "hierarchical:tree"), ("tcp", "auto"), ("tls", "butterfly")]
)
def test_it_is_one_process_with_larger_minibatches(tmp_path: Path, union: Path, carrier: str, algorithm: str) -> None:
    """And the result says what was run."""
    hosts = 2 * algorithm.startswith("hierarchical")
    strategy = Allreduce(3, optim("momentum", lr=0.05), algorithm=algorithm, bucket_mb=0.0003, per_host=hosts)
    result = jobs.run(tmp_path / "run", strategy, PLACES[carrier], epochs=2)
    assert (result["outcome"], result["samples"], result["updates"]) == ("done", 2 * jobs.SAMPLES, 14)
    jobs.assert_close(tmp_path / "run", union)
    told = json.loads((tmp_path / "run" / "result.json").read_text())
    assert (told["strategy"], told["settings"]["algorithm"]) == ("allreduce", algorithm)
    assert (told["shards"], told["replicas"], told["carrier"]) == (0, 3, carrier)
    assert 0 < told["test_accuracy"] <= 1


@pytest.mark.parametrize(
    ("transport", "algorithm", "restarts"),
    [("shared", "auto", 0), ("tcp", "native", 2), ("tcp", "ring", 2), ("tls", "ring", 2)],
)
def test_the_others_go_on_when_one_is_killed_and_every_minibatch_is_in_one_update(
    tmp_path: Path, watch: jobs.Watch, transport: str, algorithm: str, restarts: int
) -> None:
    watch.once(records.Stepped, lambda: jobs.kill("replica 1"), 2)
    strategy = Allreduce(3, tally.ADAGRAD, restarts=restarts, algorithm=algorithm, bucket_mb=0.0003)
    result = jobs.run(tmp_path, strategy, PLACES[transport], task="jobs:tallied", epochs=jobs.LONG, evaluate_every=0)
    assert result["outcome"] == "done"
    assert [record.role for record in watch.of(records.Gone) if record.died] == ["replica 1"]
    assert (result["epochs"], result["samples"]) == (jobs.LONG, jobs.LONG * jobs.SAMPLES)
    assert (tally.times(jobs.weights(tmp_path)[tally.NAME]) == 1).all()


@pytest.mark.parametrize("transport", ["tcp", "tls"])
def test_who_dies_again_on_his_way_to_a_group_holds_up_nobody(
    tmp_path: Path, watch: jobs.Watch, transport: str
) -> None:
    """The others opened their links to him, and waited an hour for his; here he has come, and trains, at the end."""
    came: list[str] = []
    killed: list[int] = []

    def act(record: Record) -> None:
        if isinstance(record, records.Joined):
            came.append(record.role)
        elif isinstance(record, records.Stepped) and record.role == "replica 1":
            if not killed:
                killed.append(jobs.kill("replica 1"))
            elif came.count("replica 1") == 2:  # his first life, and his last
                watch.interrupt()

    watch.act = act
    strategy = Allreduce(replicas=2, restarts=3, bucket_mb=0.0003)
    place = PLACES[transport]
    result = jobs.run(tmp_path, strategy, place, task="jobs:dies_as_it_meets", epochs=jobs.MANY, evaluate_every=0)
    assert result["outcome"] == "interrupted"
    assert [record.role for record in watch.of(records.Gone) if record.died] == ["replica 1"] * 3


@pytest.fixture
def meeting() -> Iterator[tuple[ProcessGroup, Assemble]]:
    """A replica, and a group of it and another."""
    plan = Plan(Settings(), lay_out([Tensor("weight", (4,), "float32")]), (), 0)
    one = ProcessGroup(0, torch.device("cpu"), "127.0.0.1")
    members = tuple(Member(f"replica {i}", Address("", 0), False, one.store) for i in range(2))
    one.open(64, [])
    yield one, Assemble(7, plan, members, 0, 0, 0, "")
    vars(one).clear()  # its store, which goes with it


def test_a_meeting_ends_as_soon_as_another_group_is_named(meeting: tuple[ProcessGroup, Assemble]) -> None:
    one, group = meeting
    asked: list[bool] = []
    assert not one.form(group, lambda: asked.append(True) or len(asked) == 3)  # type: ignore[func-returns-value]
    assert len(asked) == 3


def test_a_meeting_with_one_who_died_as_he_came_ends_within_seconds(
    meeting: tuple[ProcessGroup, Assemble], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert process_group.MEET_SECONDS <= 15
    monkeypatch.setattr(process_group, "MEET_SECONDS", 0.5)
    one, group = meeting
    host, _, port = one.store.partition("|")
    PrefixStore("group 7", TCPStore(host, int(port), is_master=False)).set("here 1", "")
    assert not one.form(group, lambda: False)


def test_a_meeting_at_one_who_is_dead_ends_at_once(
    meeting: tuple[ProcessGroup, Assemble], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The store tried to reach him again and again, for as long as it might."""
    one, group = meeting
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
    monkeypatch.setattr(process_group, "TCPStore", lambda *_, **__: pytest.fail("it is waited for"))
    dead = Member("replica 2", Address("", 0), False, f"127.0.0.1|{port}")
    assert not one.form(msgspec.structs.replace(group, members=(dead, group.members[0])), lambda: False)


def test_a_meeting_at_one_who_does_not_answer_ends_within_seconds(
    meeting: tuple[ProcessGroup, Assemble], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(process_group, "MEET_SECONDS", 0.5)
    one, group = meeting
    with socket.create_server(("127.0.0.1", 0), backlog=0) as silent, contextlib.ExitStack() as waiting:
        for _ in range(2):  # as many as are let in before somebody is listened to
            other = waiting.enter_context(socket.socket())
            other.setblocking(False)
            other.connect_ex(silent.getsockname())
        first = Member("replica 2", Address("", 0), False, f"127.0.0.1|{silent.getsockname()[1]}")
        assert not one.form(msgspec.structs.replace(group, members=(first, group.members[0])), lambda: False)


def test_a_run_goes_on_where_it_was_and_as_another_strategy(tmp_path: Path) -> None:
    adam = optim("adam", lr=0.01)
    jobs.run(tmp_path / "whole", Allreduce(2, adam), jobs.PLAIN, epochs=2)
    jobs.run(tmp_path / "halves", Allreduce(2, adam), epochs=1)
    result = jobs.run(tmp_path / "halves", Allreduce(2, adam), epochs=2, resume=True)
    assert (result["samples"], result["updates"]) == (2 * jobs.SAMPLES, 22)
    jobs.assert_close(tmp_path / "halves", tmp_path / "whole")
    assert jobs.run(tmp_path / "halves", Single(optimizer=adam), epochs=3, resume=True)["samples"] == 3 * jobs.SAMPLES


@pytest.mark.parametrize("place", [Local(listen="127.0.0.1"), Local(listen="0.0.0.0", insecure=True)])
def test_guests_are_refused_where_links_are_in_the_clear(tmp_path: Path, place: Local) -> None:
    with pytest.raises(UsageError, match="guests of allreduce need encrypted links"):
        place.run(jobs.job(tmp_path / "run", Allreduce()))


def test_guests_of_split_replicas_are_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="a guest is one process, and replicas are split over 2"):
        Local(listen="127.0.0.1", tls=True).run(jobs.job(tmp_path / "run", Allreduce(partitions=2)))
