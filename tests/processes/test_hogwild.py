"""Replicas on one mapping, as real processes: the same arithmetic as simulated, locks that survive their holders, and
deaths of everybody.
"""

from __future__ import annotations

import contextlib
import mmap
import multiprocessing
import os
import random
import threading
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from time import monotonic
from types import SimpleNamespace
from typing import Any

import jobs
import numpy as np
import pytest
import torch
from patience import SECONDS
from safetensors.torch import load_file

from distbelief.core import records
from distbelief.core.optimizer import optim
from distbelief.core.records import Record
from distbelief.errors import JobFailed, UsageError
from distbelief.places import signals, status
from distbelief.places.evaluate import evaluate
from distbelief.places.processes.local import Local
from distbelief.places.simulated.simulated import Simulated
from distbelief.strategies import Hogwild, Locking
from distbelief.strategies.shared_memory import worker
from distbelief.strategies.shared_memory.counts import UPDATES, Counts, size_of
from distbelief.strategies.shared_memory.mapped import LockedStep
from distbelief.strategies.shared_memory.turns import UpdateTurns
from distbelief.transport import locks
from distbelief.transport.locks import Locks

LOCKED = [
    Locking(replicas=3, locks="shard", shards=5),
    Locking(replicas=3, locks="round-robin"),
]


def weights(folder: Path) -> dict[str, torch.Tensor]:
    return load_file(folder / "model.safetensors")


def assert_same(ours: Path, theirs: Path) -> None:
    expected = weights(theirs)
    for name, value in weights(ours).items():
        assert torch.equal(value, expected[name])


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
    Simulated(keep=True).run(jobs.job(tmp_path / "simulated", strategy, epochs=epochs))
    assert (result["outcome"], result["updates"], result["samples"]) == ("done", 21 * epochs, epochs * jobs.SAMPLES)
    assert result["staleness"]["max"] == 0  # type: ignore[index]
    assert_same(tmp_path / "real", tmp_path / "simulated")


def test_sparse_gradients_and_their_evaluation(tmp_path: Path) -> None:
    result = jobs.run(tmp_path / "run", Locking(replicas=2, locks="shard"), task="jobs:bags", epochs=2)
    assert result["outcome"] == "done"
    assert result["test_accuracy"] == evaluate(tmp_path / "run")["test_accuracy"]


def memory() -> int:
    """This process's descriptor of the mapping of the job that it supervises."""
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):
            if os.readlink(f"/proc/self/fd/{name}").startswith("/memfd:distbelief parameters"):
                return int(name)
    raise AssertionError("there is no mapping")


def look_under_the_lock(looks: list[bool], over: threading.Event) -> None:
    """Look at the mapping of `jobs:counting` under the lock of its first range: whether that range is of one update,
    and the buffer of one.
    """
    locks = Locks(memory())
    with mmap.mmap(memory(), 0, prot=mmap.PROT_READ) as mapped:
        while not over.is_set() and locks.take([0], over.is_set):
            values = np.frombuffer(mapped, np.float32, 2 * jobs.COUNTERS)
            looks.append(
                all(bool(part.min() == part.max()) for part in (values[: jobs.COUNTERS // 8], values[jobs.COUNTERS :]))
            )
            del values
            locks.give([0])


@pytest.mark.parametrize("strategy", LOCKED, ids=lambda one: one.locks)
def test_under_locks_no_update_is_lost_and_ranges_and_buffers_are_whole(
    tmp_path: Path, watch: jobs.Watch, strategy: Locking
) -> None:
    """Whoever has the lock sees no update in its middle, while three replicas write nearly all of the time: without
    locks, most looks would.
    """
    looks: list[bool] = []
    over = threading.Event()
    looker = threading.Thread(target=look_under_the_lock, args=(looks, over))

    def act(record: Record) -> None:
        if isinstance(record, records.Stepped) and not looker.ident:
            looker.start()
        elif isinstance(record, records.Ending):
            over.set()
            looker.join()

    watch.act = act
    result = jobs.run(
        tmp_path / "run",
        strategy.with_options(optimizer=optim("sgd", lr=1.0)),
        task="jobs:counting",
        epochs=6,
    )
    assert result["updates"] == 126
    assert weights(tmp_path / "run")["count"].unique().tolist() == [-126.0]
    assert len(looks) > 5
    assert all(looks)


def catch(role: str) -> int:
    """Stop a replica while it holds the one lock; returns its process id."""
    locks, process, deadline = Locks(memory()), jobs.process_of(role), monotonic() + SECONDS
    while monotonic() < deadline:
        if locks.holder(0) != process:
            os.sched_yield()
            continue
        os.kill(process, jobs.signal.SIGSTOP)
        while not signals.is_stopped(process):
            os.sched_yield()
        if locks.holder(0) == process:
            return process
        os.kill(process, jobs.signal.SIGCONT)
    raise AssertionError(f"{role} is never seen with the lock")


@pytest.mark.parametrize(
    ("locks", "said"),
    [
        ("global", {"for the lock of range 0, which replica 1 holds"}),
        # it may be stopped when the turn is passed on and the lock is not given yet
        ("round-robin", {"for its turn, which replica 1 has", "for the lock of range 0, which replica 1 holds"}),
    ],
)
def test_the_status_says_who_waits_for_whose_lock_and_kill_9_of_its_holder_frees_it(
    tmp_path: Path, watch: jobs.Watch, locks: str, said: set[str]
) -> None:
    found: list[str] = []

    def ask(process: int) -> None:
        try:
            deadline = monotonic() + SECONDS
            while not found and monotonic() < deadline:
                members = status.status(tmp_path / "run")["members"]
                found.extend(
                    one["waits_for"]
                    for one in members
                    if one["role"] == "replica 0" and one["waits_for"].startswith(("for the lock", "for its turn"))
                )
        finally:
            os.kill(process, jobs.signal.SIGKILL)

    def act(record: Record) -> None:
        if isinstance(record, records.EpochDone) and record.epoch == 2 and not threads:
            threads.append(threading.Thread(target=ask, args=(catch("replica 1"),)))
            threads[0].start()
        elif isinstance(record, records.Stepped) and record.steps and watch.of(records.Gone):
            watch.interrupt()  # the other goes on

    threads: list[threading.Thread] = []
    watch.act = act
    strategy = Locking(replicas=2, locks=locks, restarts=0)
    result = jobs.run(tmp_path / "run", strategy, task="jobs:counting", epochs=jobs.MANY, evaluate_every=0)
    threads[0].join()
    assert found[0] in said
    assert result["outcome"] == "interrupted"
    assert [record.role for record in watch.of(records.Gone) if record.died] == ["replica 1"]


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


@contextlib.contextmanager
def beside(does: Any, size: int = 0) -> Iterator[tuple[int, Any]]:
    """A file of so many bytes, and another process, which has done something with it, and waits."""
    descriptor, context = os.memfd_create("shared"), multiprocessing.get_context("fork")
    os.ftruncate(descriptor, size)
    ours, theirs = context.Pipe()
    other = context.Process(target=does, args=(os.getpid(), descriptor, theirs))
    other.start()
    try:
        assert ours.recv()
        yield descriptor, other
    finally:
        other.kill()
        other.join()
        ours.close()
        theirs.close()
        os.close(descriptor)


def _compute(supervisor: int, descriptor: int, connection: Any) -> None:
    file = os.open(f"/proc/{supervisor}/fd/{descriptor}", os.O_RDWR)
    with mmap.mmap(file, 0) as memory:
        turns_of(0, 2, file, memory).enter()
        connection.send(True)
        connection.recv()


def test_the_turn_of_the_dead_goes_to_who_waits_for_it() -> None:
    with beside(_compute, 8 * size_of(2)) as (descriptor, other), mmap.mmap(descriptor, 0) as memory:
        turns, said = turns_of(1, 2, descriptor, memory), list[str]()
        assert not turns.take([0], lambda: bool(said.append(turns.waits())) or len(said) > 1)
        assert said[0] == "for its turn, which replica 0 has"
        other.kill()
        other.join()
        deadline = monotonic() + SECONDS
        assert turns.take([0], lambda: monotonic() > deadline)


def turns_of(index: int, replicas: int, file: int, memory: mmap.mmap) -> UpdateTurns:
    """The turns of one replica, in a mapping of counts; the kernel takes its locks with any of its descriptors."""

    def counts() -> Counts:
        return Counts(np.frombuffer(memory, np.int64), replicas, index)  # type: ignore[arg-type]  # whole numbers

    return UpdateTurns(Locks(file), counts, index, replicas)


def _take_turns(supervisor: int, descriptor: int, index: int, begin: Any) -> None:
    """Write this replica's number behind those of the others, in ever other lengths of time."""
    file = os.open(f"/proc/{supervisor}/fd/{descriptor}", os.O_RDWR)
    memory = mmap.mmap(file, 0)
    turns, numbers, chance = (
        turns_of(index, TAKERS, file, memory),
        np.frombuffer(memory, np.int64),
        random.Random(index),
    )
    turns.enter()
    begin.wait()
    for _ in range(ROUNDS):
        turns.enter()
        for _ in range(chance.choice((0, 100, 10_000))):
            pass
        assert turns.take([0], lambda: False)
        written = size_of(TAKERS)
        numbers[written] += 1
        numbers[written + numbers[written]] = index
        turns.give([0])
        if index == LEAVER and chance.random() < 0.5:
            turns.leave()
            for _ in range(chance.choice((0, 100, 10_000))):
                pass
    turns.leave()


TAKERS, ROUNDS, LEAVER = 4, 100, 2


def test_turns_of_processes_are_in_order() -> None:
    """Each number once in each round, in order, however long anybody takes; who takes no part now and then is passed
    over, and has his turn in his place, or none.
    """
    descriptor, context = os.memfd_create("turns"), multiprocessing.get_context("fork")
    os.ftruncate(descriptor, 8 * (size_of(TAKERS) + 1 + TAKERS * ROUNDS))
    begin = context.Barrier(TAKERS)
    others = [
        context.Process(target=_take_turns, args=(os.getpid(), descriptor, index, begin)) for index in range(TAKERS)
    ]
    for other in others:
        other.start()
    try:
        for other in others:
            other.join(SECONDS)
        with mmap.mmap(descriptor, 0) as memory:
            count, *written = np.frombuffer(memory, np.int64)[size_of(TAKERS) :].tolist()
        others_turns = [one for one in range(TAKERS) if one != LEAVER] * ROUNDS
        assert (count, [one for one in written if one != LEAVER]) == (TAKERS * ROUNDS, others_turns)
        together = written[: len(written) - written[::-1].index(TAKERS - 1)]  # then the others are done
        assert {one for one, behind in pairwise(together) if behind == LEAVER} == {LEAVER - 1}
    finally:
        for other in others:
            other.kill()
            other.join()
        os.close(descriptor)


def test_an_update_is_counted_and_its_turn_passed_on_before_its_lock_is_given(monkeypatch: pytest.MonkeyPatch) -> None:
    """Otherwise who passes over somebody could write the turn that was passed on back."""
    found, file = list[tuple[int, int]](), os.memfd_create("update")
    counts = Counts([0] * size_of(2), 2, 0)
    held = SimpleNamespace(counts=counts, locked_steps=lambda: [LockedStep((0,), 4, lambda: None)])
    settings = SimpleNamespace(own=lambda _: Locking(locks="round-robin"), replicas=2)
    monkeypatch.setattr(Locks, "give", lambda *_: found.append((counts.total(UPDATES), counts.turn)))
    stage: Any = SimpleNamespace(descriptor=lambda: file)
    updates = worker.ProcessUpdater(stage, lambda: held, 0, settings)  # type: ignore[arg-type,return-value]  # stand-ins
    assert updates.update(64, lambda: False, bool)
    assert found == [(1, 1)]
    os.close(file)


@pytest.mark.parametrize("turn", [0, 1], ids=["its turn", "the turn of who takes no part"])
def test_by_turns_the_lock_is_waited_for_as_any(monkeypatch: pytest.MonkeyPatch, turn: int) -> None:
    """Where another process has it: with a limit, and a sentence that names who."""
    with beside(_hold, 8 * size_of(2)) as (descriptor, other), mmap.mmap(descriptor, 0) as memory:
        seconds, said = (0.01 * tick for tick in range(10**6)), list[str]()  # one look at the clock after another
        monkeypatch.setattr(locks, "time", SimpleNamespace(monotonic=lambda: next(seconds), sleep=bool))
        Counts(np.frombuffer(memory, np.int64), 2, 0).turn = turn  # type: ignore[arg-type]  # whole numbers
        turns = turns_of(0, 2, descriptor, memory)
        sentence = f"for the lock of range 0, which process {other.pid} holds"
        turns.enter()
        with pytest.raises(JobFailed, match=f"waited 60 s {sentence}"):
            turns.take([0], lambda: bool(said.append(turns.waits())) or len(said) > 10**5)
        assert set(said) == {sentence}
        assert turns.waits() == ""


def _hold(supervisor: int, descriptor: int, connection: Any) -> None:
    locks = Locks(os.open(f"/proc/{supervisor}/fd/{descriptor}", os.O_RDWR))
    connection.send(locks.take([0], lambda: False))
    connection.recv()


def test_locks_are_the_kernels() -> None:
    """Another process has it until it dies."""
    with beside(_hold) as (descriptor, other):
        locks = Locks(descriptor)
        looks: list[str] = []
        assert not locks.take([0], lambda: bool(looks.append(locks.waits())) or len(looks) > 1)
        assert looks[0] == f"for the lock of range 0, which process {other.pid} holds"
        assert locks.take([1], lambda: True)
        other.kill()
        other.join()
        assert locks.take([0], lambda: True)


def test_a_killed_replica_costs_nothing_but_time_and_others_begin_again(tmp_path: Path, watch: jobs.Watch) -> None:
    killed: list[str] = []

    def act(record: Record) -> None:
        if isinstance(record, records.EpochDone) and watch.of(records.Checkpointed) and len(killed) < 3:
            killed.append(("replica 1", "evaluator", "coordinator")[len(killed)])
            jobs.kill(killed[-1])

    watch.act = act
    result = jobs.run(tmp_path / "run", Hogwild(replicas=2), epochs=jobs.LONG)
    assert (result["outcome"], result["epochs"], result["samples"]) == ("done", jobs.LONG, jobs.LONG * jobs.SAMPLES)
    assert len(killed) == 3
    assert 0 < result["test_accuracy"] <= 1  # type: ignore[operator]


@pytest.mark.parametrize("place", [Local(transport="tcp"), Local(listen="127.0.0.1")])
def test_it_is_of_one_machine(tmp_path: Path, place: Local) -> None:
    with pytest.raises(UsageError, match="is of one machine, whose memory its replicas update"):
        place.run(jobs.job(tmp_path / "run", Hogwild()))


def test_it_needs_a_task_and_no_script(tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text("")
    with pytest.raises(UsageError, match="a script means nothing to strategy hogwild"):
        Local().launch(jobs.job(tmp_path / "run", Hogwild()), [str(tmp_path / "script.py")])


def test_low_precision_is_refused_with_the_reason(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="is bfloat16, whose steps need float32 masters"):
        jobs.run(tmp_path / "run", Hogwild(), task="jobs:low", evaluate_every=0)
