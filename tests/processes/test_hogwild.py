"""Replicas that update one memory, as real processes: the same arithmetic as simulated, and deaths of everybody."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import threading
from pathlib import Path
from time import monotonic
from typing import Any

import jobs
import pytest
from patience import SECONDS

from distbelief.core import records
from distbelief.core.optimizer import optim
from distbelief.core.records import Record
from distbelief.errors import UsageError
from distbelief.places import status
from distbelief.places.evaluate import evaluate
from distbelief.places.processes.local import Local
from distbelief.strategies import Hogwild, Locking
from distbelief.transport.shared import Locks

LOCKED = [Locking(replicas=3, shards=5), Locking(replicas=3, locks="round-robin")]


@pytest.mark.parametrize(("kind", "optimizer"), [(Hogwild, "adagrad"), (Locking, "momentum")])
def test_one_replica_makes_what_the_simulated_one_does_also_where_it_was_interrupted(
    tmp_path: Path, watch: jobs.Watch, kind: Any, optimizer: str
) -> None:
    """Which is held against plain PyTorch, in tests/simulated."""
    strategy = kind(replicas=1, optimizer=optim(optimizer, lr=0.05))
    watch.once(records.EpochDone, watch.interrupt, 1)
    broken = jobs.run(tmp_path / "real", strategy, epochs=jobs.MANY, evaluate_every=0)
    assert broken["outcome"] == "interrupted"
    watch.rest()
    epochs = int(broken["epochs"]) + 2  # type: ignore[call-overload]
    result = jobs.run(tmp_path / "real", strategy, epochs=epochs, resume=True)
    jobs.run(tmp_path / "simulated", strategy, jobs.PLAIN, epochs=epochs)
    assert (result["outcome"], result["updates"], result["samples"]) == ("done", 21 * epochs, epochs * jobs.SAMPLES)
    assert result["staleness"]["max"] == 0  # type: ignore[index]
    assert jobs.same(tmp_path / "real", tmp_path / "simulated")


def test_sparse_gradients_and_their_evaluation(tmp_path: Path) -> None:
    result = jobs.run(tmp_path / "run", Hogwild(replicas=2), task="jobs:bags", epochs=2)
    assert result["outcome"] == "done"
    assert result["test_accuracy"] == evaluate(tmp_path / "run")["test_accuracy"]


@pytest.mark.parametrize("strategy", LOCKED, ids=lambda one: one.locks)
def test_under_locks_no_update_is_lost(tmp_path: Path, strategy: Locking) -> None:
    """While three replicas write nearly all of the time: without locks, most would be."""
    sgd = strategy.with_options(optimizer=optim("sgd", lr=1.0))
    result = jobs.run(tmp_path / "run", sgd, task="jobs:counting", epochs=6)
    assert result["updates"] == 126
    assert jobs.weights(tmp_path / "run")["count"].unique().tolist() == [-126.0]


def test_kill_9_of_who_is_waited_for_gives_its_turn_to_the_next(
    tmp_path: Path, watch: jobs.Watch, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All wait for one replica whose step never ends; one that comes in its place takes turns again."""
    pipe, waiting, replicas = tmp_path / "pipe", list[str](), {f"replica {index}" for index in range(3)}
    os.mkfifo(pipe)
    monkeypatch.setenv("PIPE", str(pipe))

    def strike() -> None:
        deadline, who = monotonic() + SECONDS, ""
        while len(waiting) < 2 and monotonic() < deadline:
            with contextlib.suppress(OSError, KeyError):
                who = os.readlink(f"{pipe}.who").rpartition(" ")[2]
                members = status.status(tmp_path / "run")["members"]
                waiting[:] = [m["role"] for m in members if m["waits_for"] == f"for its turn, which replica {who} has"]
        if len(waiting) < 2:  # no step hangs from here on
            pipe.unlink()
        for role in [f"replica {who}"] if len(waiting) == 2 else replicas:
            jobs.kill(role)

    striker = threading.Thread(target=strike)
    watch.once(records.Started, striker.start)
    try:
        result = jobs.run(tmp_path / "run", Locking(3, locks="round-robin"), task="jobs:stubborn", epochs=20)
    finally:
        striker.join()
        assert len(waiting) == 2, f"after {SECONDS:.0f} s only {waiting} wait for their turns"
    [dead] = [record.role for record in watch.of(records.Gone) if record.died]
    assert {dead, *waiting} == replicas
    assert (result["outcome"], result["samples"]) == ("done", 20 * jobs.SAMPLES)
    assert result["staleness"]["max"] <= 2  # type: ignore[index]


def hold(supervisor: int, descriptor: int, connection: Any) -> None:
    locks = Locks(os.open(f"/proc/{supervisor}/fd/{descriptor}", os.O_RDWR))
    connection.send(locks.take(0, lambda: False))
    connection.recv()


def test_locks_are_the_kernels() -> None:
    """Another process has it until it dies."""
    descriptor, context = os.memfd_create("shared"), multiprocessing.get_context("fork")
    ours, theirs = context.Pipe()
    other = context.Process(target=hold, args=(os.getpid(), descriptor, theirs))
    other.start()
    try:
        assert ours.recv()
        locks = Locks(descriptor)
        assert not locks.take(0, lambda: True)
        assert locks.holder(0) == other.pid
        assert locks.take(1, lambda: True)
        other.kill()
        other.join()
        assert locks.take(0, lambda: True)
    finally:
        other.kill()
        other.join()
        ours.close()
        theirs.close()
        os.close(descriptor)


def test_a_killed_replica_costs_nothing_but_time_and_others_begin_again(tmp_path: Path, watch: jobs.Watch) -> None:
    killed: list[str] = []

    def act(record: Record) -> None:
        if isinstance(record, records.EpochDone) and watch.of(records.Checkpointed) and len(killed) < 4:
            killed.append(("replica 1", "evaluator", "shard 0", "coordinator")[len(killed)])
            jobs.kill(killed[-1])

    watch.act = act
    result = jobs.run(tmp_path / "run", Hogwild(replicas=2), epochs=jobs.LONG)
    assert (result["outcome"], result["epochs"], result["samples"]) == ("done", jobs.LONG, jobs.LONG * jobs.SAMPLES)
    assert len(killed) == 4
    assert 0 < result["test_accuracy"] <= 1  # type: ignore[operator]


@pytest.mark.parametrize("place", [Local(transport="tcp"), Local(listen="127.0.0.1")])
def test_it_is_of_one_machine(tmp_path: Path, place: Local) -> None:
    with pytest.raises(UsageError, match="update the memory of one machine"):
        place.run(jobs.job(tmp_path / "run", Hogwild()))


def test_it_needs_a_task_and_no_script(tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text("")
    with pytest.raises(UsageError, match="a script means nothing to strategy hogwild"):
        Local().launch(jobs.job(tmp_path / "run", Hogwild()), [str(tmp_path / "script.py")])


def test_low_precision_is_refused_with_the_reason(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="is bfloat16, which needs a float32 master"):
        jobs.run(tmp_path / "run", Hogwild(), task="jobs:low", evaluate_every=0)
