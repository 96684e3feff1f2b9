"""The direct path: the bits of the served one, and whoever is killed or stopped, nothing is torn or made twice."""

import contextlib
import mmap
import os
import signal
import time
from collections import Counter
from collections.abc import Callable, Iterator
from itertools import count as numbered
from itertools import cycle
from pathlib import Path
from typing import Any

import jobs
import pytest
import torch
from made import made

from distbelief.core import records
from distbelief.core.conversations import attendance, checkpointing, initialising, pushing
from distbelief.core.messages import Version
from distbelief.core.optimizer import LEARNING_RATES, OUTER, Optimizer, optim
from distbelief.core.settings import Plan
from distbelief.errors import UsageError
from distbelief.places.place import Deadlines
from distbelief.places.processes import running
from distbelief.places.processes.local import Local
from distbelief.runtime.direct import DirectEndpoint, OwnedShard, SharedShard
from distbelief.server.passed import PassedLayout, PassedSlice
from distbelief.server.shard import Shard
from distbelief.server.slice import TorchSlice
from distbelief.sharding.assignments import cut
from distbelief.sharding.layout import Range, Tensor, lay_out
from distbelief.strategies import Bounded, Downpour, Softsync, Strategy
from distbelief.transport.shared import Locks

DIRECT, SERVED = Local(path="direct"), Local(path="served")
EPOCHS = 3
EPOCHS_OF_A_LIFE = 60
"""In which shards die some times; the job ends when they have come again, also where all is done before that."""
CHANCE = int(os.environ.get("DISTBELIEF_CHANCE", "0"))
"""By which shards die."""


POINTS = ("_copy", "apply", "_settle", "_write_note", "_point_to")
"""The steps of an update."""
MOMENTS = [(point, behind) for point in POINTS for behind in (False, True)]
"""When a process may die: before each of them, and behind it."""
DEATHS = int(os.environ.get("DISTBELIEF_DEATHS", str(len(MOMENTS))))
"""Of shards in jobs, and of each optimizer's updates; `make test-all` has 400."""


CADENCES: dict[str, dict[str, Any]] = {
    "plain": {},
    "sums": {"push_every": 3, "fetch_every": 2},
    "several": {"push_every": 3},
    "apart": {"fetch_every": 3, "local_lr": 0.05},
    "ahead": {"prefetch": 1, "push_every": 2},
    "scaled": {"staleness_scaling": "inverse"},
}


@pytest.mark.parametrize(
    ("optimizer", "shards", "cadence", "task"),
    [("sgd", 1, "plain", "jobs:tiny"), ("adagrad", 3, "plain", "jobs:tiny"), ("adam", 2, "sums", "jobs:dropped"),
     ("momentum", 1, "ahead", "jobs:tiny"), ("sgd", 3, "apart", "jobs:dropped"),
     ("rmsprop", 2, "scaled", "jobs:dropped"), ("sgd", 2, "several", "jobs:tiny"), ("sgd", 3, "scaled", "jobs:tiny")],
)  # fmt: skip
def test_one_replica_makes_the_bits_that_the_shards_processes_make(
    tmp_path: Path, optimizer: str, shards: int, cadence: str, task: str
) -> None:
    strategy = Downpour(replicas=1, shards=shards, optimizer=optim(optimizer, lr=0.05), **CADENCES[cadence])
    made_by = {
        place.path: jobs.run(tmp_path / place.path, strategy, place, task=task, epochs=EPOCHS)
        for place in (DIRECT, SERVED)
    }
    assert {path: result["path"] for path, result in made_by.items()} == {"direct": "direct", "served": "served"}
    assert jobs.same(*(tmp_path / path for path in made_by))
    for count in ("pushes", "updates", "samples", "staleness"):
        assert made_by["direct"][count] == made_by["served"][count], count
    told = {path: result["bytes"] for path, result in made_by.items()}
    assert told["direct"]["pushed"] == 0
    assert told["direct"]["shared_memory"]["push"] == told["served"]["shared_memory"]["push"] > 0


@pytest.mark.parametrize(
    "strategy",
    [Downpour(3, 2), Bounded(3, 2, staleness=0), Bounded(2, 1, staleness=1, prefetch=1), Softsync(2, 2, n=2)],
    ids=lambda s: f"{s.name} {s.replicas}",
)
def test_several_replicas_do_the_work_of_a_job_and_no_sample_twice(tmp_path: Path, strategy: Strategy) -> None:
    strategy = strategy.with_options(optimizer=optim("sgd", lr=1.0))
    result = jobs.run(tmp_path, strategy, DIRECT, task="jobs:once", epochs=4, evaluate_every=0)
    assert jobs.times_trained(tmp_path) == [4] * jobs.SAMPLES
    assert result["updates"] == result["pushes"] == sum(result["staleness"]["histogram"].values()) / strategy.shards
    if isinstance(strategy, Bounded) and not strategy.staleness:
        assert result["staleness"]["max"] <= 2 * strategy.replicas


@pytest.mark.timeout(120 + 3 * DEATHS)
def test_shards_whose_processes_die_at_any_step_of_a_push_and_a_fetch_lose_nothing(
    tmp_path: Path, watch: jobs.Watch, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("KILLED", str(tmp_path / "killed"))
    for number in numbered():
        out, shards = tmp_path / str(number), 1 + number % 2
        monkeypatch.setenv("CHANCE", f"{CHANCE} {number}")
        strategy = Downpour(2, shards, optimizer=optim("sgd", lr=1.0), restarts=1000)
        result = jobs.run(
            out, strategy, DIRECT, task="jobs:kills_shards", epochs=EPOCHS_OF_A_LIFE, evaluate_every=0,
            checkpoint_every=10,
        )  # fmt: skip
        assert (result["outcome"], result["forgotten"]) == ("done", 0)
        assert jobs.times_trained(out) == [EPOCHS_OF_A_LIFE] * jobs.SAMPLES
        killed = Counter((tmp_path / "killed").read_text().splitlines())
        if killed.total() >= DEATHS:
            break
    assert any("nothing that was applied is lost" in note.text for note in watch.of(records.Note))
    assert DEATHS < 400 or len(killed) == 2 * len(jobs.STEPS_OF_A_TURN)


@pytest.mark.parametrize("step", ["_write_note", "_point_to"])
def test_a_replica_that_is_stopped_amid_an_update_is_ended_and_its_work_is_dealt_again(
    tmp_path: Path, watch: jobs.Watch, monkeypatch: pytest.MonkeyPatch, step: str
) -> None:
    monkeypatch.setattr(running, "DEADLINES", Deadlines(ending=2.0))
    monkeypatch.setattr(running, "TICK", 0.05)
    monkeypatch.setenv("AMID", step)
    monkeypatch.setenv("CAUGHT", str(tmp_path / "caught"))
    strategy = Downpour(replicas=3, optimizer=optim("sgd", lr=1.0))
    result = jobs.run(tmp_path / "run", strategy, DIRECT, task="jobs:stops_amid", epochs=12, evaluate_every=0)
    assert (tmp_path / "caught").exists()
    assert next(record.role for record in watch.of(records.Gone) if record.died) == "replica 1"
    assert min(jobs.times_trained(tmp_path / "run")) >= 12
    assert (result["outcome"], result["samples"]) == ("done", 12 * jobs.SAMPLES)


@pytest.mark.parametrize(
    ("strategy", "place", "why"),
    [
        (Downpour(), Local(transport="tcp", path="direct"), "--transport tcp"),
        (Downpour(partitions=2), DIRECT, "--partitions 2"),
        (Softsync(4, n=2), DIRECT, "--n 2 of 4 replicas"),
    ],
)
def test_the_direct_path_is_refused_with_what_stands_against_it(
    tmp_path: Path, strategy: Strategy, place: Local, why: str
) -> None:
    with pytest.raises(UsageError, match=why):
        jobs.run(tmp_path / "run", strategy, place)


# one update, step by step

LAYOUT = lay_out([
    Tensor("weight", (50, 7), "float32"), Tensor("half", (9,), "bfloat16"), Tensor("mean", (4,), "float32", "buffer"),
])  # fmt: skip
WHOLE = Range(0, LAYOUT.moving)


class Memory:
    """The memory of a job with one shard, and what a process does with it."""

    def __init__(self, optimizer: str, **options: Any) -> None:
        settings = made(replicas=2, optimizer=Optimizer(optimizer, 0.1), **options)
        self.plan = Plan(settings, LAYOUT, cut(LAYOUT, 1, 1), samples=100)
        self.layout = PassedLayout(self.plan)
        self.file = os.memfd_create("test")
        self.opened = [self.file]
        os.ftruncate(self.file, self.layout.length)
        length = self.layout.length
        self.bytes = torch.frombuffer(mmap.mmap(self.file, length), dtype=torch.uint8)
        self.owner = OwnedShard(lambda make: Shard(0, make), lambda _: self.bytes, self.locks())
        self.owner.handle("coordinator", initialising.Restore(self.plan, ""), None)
        self.owner.handle("replica 0", initialising.Initialise(0, 0, WHOLE.stop), numbers(0))

    def shared(self, place: int) -> SharedShard:
        """The shard as the process of a replica reaches it: asked for in that process."""
        held = PassedSlice(self.layout, 0, self.bytes, place)
        one = Shard(0, lambda *_: held)
        one.share(self.plan)
        return SharedShard(one, held, self.locks())

    def heir(self) -> OwnedShard:
        """What the process of the shard's second life plays."""
        return OwnedShard(lambda make: Shard(0, make, 1), lambda _: self.bytes, self.locks())

    def locks(self) -> Locks:
        """Locks of whoever asks, as a process has them."""
        self.opened.append(os.open(f"/proc/self/fd/{self.file}", os.O_RDWR))
        return Locks(self.opened[-1])

    def close(self) -> None:
        for descriptor in self.opened:
            os.close(descriptor)

    def push(self, shared: SharedShard, who: str, clock: int, seed: int) -> bool:
        """Push once; whether it was acknowledged."""
        with shared.turn():
            updates = shared.shard.version
            push = pushing.Push(0, 0, WHOLE.stop, 0, clock, updates, 1, 4, ranges=(WHOLE,))
            return bool(shared.shard.handle(who, push, numbers(seed)))


def numbers(seed: int) -> torch.Tensor:
    values = torch.zeros(LAYOUT.total, dtype=torch.uint8)
    chance = torch.Generator().manual_seed(seed)
    for section in LAYOUT.sections_in(WHOLE):
        view = values[section.start : section.stop].view(getattr(torch, section.dtype))
        view.copy_(torch.randn(view.shape, generator=chance))
    return values


@pytest.fixture
def memory_of() -> Iterator[Callable[[str], Memory]]:
    """Makes the memory of a job with an optimizer."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)  # threads of torch do not survive a fork: an update that used some would wait for ever
    with contextlib.ExitStack() as made_ones:
        made_ones.callback(torch.set_num_threads, before)

        def make(optimizer: str) -> Memory:
            one = Memory(optimizer)
            made_ones.callback(one.close)
            return one

        yield make


@pytest.fixture
def child() -> Iterator[Callable[[Callable[[], object]], int]]:
    """Does something in a process of its own; returns its id."""
    begun: list[int] = []

    def start(act: Callable[[], object]) -> int:
        process = os.fork()
        if not process:
            try:
                act()
            finally:
                os._exit(1)
        begun.append(process)
        return process

    yield start
    for process in begun:
        with_none_left(process)


def with_none_left(process: int) -> None:
    """Kill a process, and wait for its end."""
    try:
        os.kill(process, signal.SIGKILL)
        os.waitpid(process, 0)
    except (ProcessLookupError, ChildProcessError):
        return


def dies_at(point: str, behind: bool, patched: pytest.MonkeyPatch) -> None:
    """Have the process end as if by kill -9 when it comes to a step of an update."""
    step = getattr(PassedSlice, point)

    def last(*args: Any) -> None:
        if behind:
            step(*args)
        os.kill(os.getpid(), signal.SIGKILL)

    patched.setattr(PassedSlice, point, last)


@pytest.mark.parametrize("optimizer", sorted(LEARNING_RATES.keys() - {*OUTER}))
def test_whoever_is_killed_at_any_step_of_an_update_has_made_it_or_not(
    optimizer: str, child: Callable[[Callable[[], object]], int], memory_of: Callable[[str], Memory]
) -> None:
    memory = memory_of(optimizer)
    other, twin = memory.shared(1), TorchSlice(memory.plan, 0)
    twin.fill(numbers(0), frozen=False)
    clock = made_by_dead = 0
    for number, (point, behind) in zip(range(DEATHS), cycle(MOMENTS)):
        clock, seed = clock + 1, 1000 + number

        def dying(point: str = point, behind: bool = behind, clock: int = clock, seed: int = seed) -> None:
            dies_at(point, behind, pytest.MonkeyPatch())
            memory.push(memory.shared(0), "replica 0", clock, seed)

        os.waitpid(child(dying), 0)
        assert memory.push(other, "replica 1", number + 1, 2000 + number), "the lock of the dead was not to be had"
        updates = other.shard.version.updates
        made_it = updates == 2 * number + 2
        made_by_dead += made_it
        assert updates in (2 * number + 1, 2 * number + 2)
        # what the dead had not made, its next life pushes again; what it had, is not made twice
        assert memory.push(memory.shared(0), "replica 0", clock, seed)
        for one in [seed, 2000 + number] if made_it else [2000 + number, seed]:
            twin.apply("", 0, numbers(one), 1.0)
        with other.turn():
            assert torch.equal(other.held.moving(), twin.moving()), f"torn by a death at {point}"
            assert other.shard.version.updates == sum(other.shard.staleness.values()) == 2 * number + 2
            assert other.shard.samples == 4 * (2 * number + 2)
    assert made_by_dead == DEATHS // len(MOMENTS), "the one store is what makes an update count"


@pytest.mark.parametrize("optimizer", ["sgd", "adagrad"])
def test_killed_at_random_moments_nobody_leaves_anything_torn(
    optimizer: str, child: Callable[[Callable[[], object]], int], memory_of: Callable[[str], Memory]
) -> None:
    memory, chance = memory_of(optimizer), torch.Generator().manual_seed(1)
    other = memory.shared(1)
    for clock in range(1, max(40, DEATHS) + 1):

        def pushes() -> None:
            own = memory.shared(0)
            with own.turn():
                last = next((one.clock for one in own.shard.ledger.taken() if one.who == "replica 0"), 0)
            while True:
                last += 1
                memory.push(own, "replica 0", last, last % 7)

        process = child(pushes)
        time.sleep(float(torch.rand((), generator=chance)) * 20e-3)
        os.kill(process, signal.SIGKILL)
        os.waitpid(process, 0)
        assert memory.push(other, "replica 1", clock, clock % 7)
        with other.turn():
            assert other.shard.version.updates == sum(one.clock for one in other.shard.ledger.taken())


def test_who_is_stopped_with_a_lock_is_named_and_waited_for_until_it_is_killed(
    child: Callable[[Callable[[], object]], int], memory_of: Callable[[str], Memory]
) -> None:
    memory = memory_of("sgd")
    other = memory.shared(1)

    def stops() -> None:
        with memory.shared(0).turn():
            os.kill(os.getpid(), signal.SIGSTOP)

    process = child(stops)
    os.waitpid(process, os.WUNTRACED)
    assert not other.take(lambda: True)
    assert "for the lock of shard 0, which replica 0 has since" in other.held_by()
    assert memory.owner.waits() == other.held_by()
    assert memory.owner.standing()["version"] == 0
    os.kill(process, signal.SIGKILL)
    os.waitpid(process, 0)
    assert memory.push(other, "replica 1", 1, 1)
    assert other.held_by() == ""


@pytest.mark.parametrize("both", [False, True], ids=["the replica lives", "both die"])
def test_a_shard_whose_process_dies_while_a_replica_updates_goes_on_after_that(
    both: bool, child: Callable[[Callable[[], object]], int], memory_of: Callable[[str], Memory]
) -> None:
    memory, (amid, tell), (go, let) = memory_of("adagrad"), os.pipe(), os.pipe()
    memory.opened += [amid, tell, go, let]
    write_note = PassedSlice._write_note

    def waits(*args: Any) -> None:
        os.write(tell, b".")
        os.read(go, 1)
        if both:
            os.kill(os.getpid(), signal.SIGKILL)
        write_note(*args)

    def updates() -> None:
        pytest.MonkeyPatch().setattr(PassedSlice, "_write_note", waits)
        memory.push(memory.shared(0), "replica 0", 1, 1)

    replica = child(updates)
    assert os.read(amid, 1)
    with_none_left(child(lambda: memory.owner.handle("coordinator", checkpointing.Describe(), None)))
    os.write(let, b".")
    heir = memory.heir()
    heir.handle("coordinator", initialising.Restore(memory.plan, ""), None)
    os.waitpid(replica, 0)
    assert heir.standing()["version"] == (not both)
    assert memory.push(memory.shared(0), "replica 0", 1, 1), "its next life, or itself, has not heard of it"
    other, twin = memory.shared(1), TorchSlice(memory.plan, 0)
    twin.fill(numbers(0), frozen=False)
    twin.apply("", 0, numbers(1), 1.0)
    with other.turn():
        assert other.shard.version == Version(1, 1)
        assert torch.equal(other.held.moving(), twin.moving())


def test_the_next_life_of_a_shard_goes_on_where_its_replicas_are(memory_of: Callable[[str], Memory]) -> None:
    memory = memory_of("adagrad")
    other = memory.shared(1)
    assert memory.push(other, "replica 1", 1, 1)
    heir = memory.heir()
    note, restored = heir.handle("coordinator", initialising.Restore(memory.plan, "checkpoint 1"), None)
    assert "nothing that was applied is lost" in note.record.text
    assert restored.message == initialising.Restored(loaded=True, lasts=True)
    with other.turn():
        assert other.shard.version == Version(1, 1)
    assert memory.push(other, "replica 1", 2, 2)
    assert heir.standing()["version"] == 2


@pytest.fixture
def bounded() -> Iterator[tuple[DirectEndpoint, Memory, SharedShard, list[Any]]]:
    """Replica 0 of a job in which nobody may be ahead: endpoint, memory, what replica 1 reaches, and what arrived."""
    memory, arrived = Memory("sgd", strategy="bounded", staleness=0), list[Any]()
    endpoint, other = DirectEndpoint("replica 0", "job"), memory.shared(1)
    endpoint.deliver = arrived.append
    endpoint.share(memory.plan, lambda _: memory.bytes, memory.locks(), lambda index, held: Shard(index, held))
    endpoint.compute_there()
    for who, attends in (("replica 1", other), ("replica 0", memory.shared(0))):
        with attends.turn():
            attends.shard.handle(who, attendance.Attend(0, 0), None)
    push = pushing.Push(0, 0, WHOLE.stop, 0, 1, Version(0, 0), 1, 4, ranges=(WHOLE,))
    endpoint.send("shard 0", push, numbers(1))
    endpoint.send("shard 0", pushing.Fetch(0, 0, WHOLE.stop, tick=1))
    yield endpoint, memory, other, arrived
    endpoint.close()
    memory.close()


def test_who_waits_for_others_takes_the_lock_again_only_once_something_has_changed(
    bounded: tuple[DirectEndpoint, Memory, SharedShard, list[Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    endpoint, memory, other, arrived = bounded
    taken, take = [], Locks.take

    def counted(*args: Any) -> bool:
        taken.append(args)
        return take(*args)

    with monkeypatch.context() as patched:
        patched.setattr(Locks, "take", counted)
        for _ in range(20):
            endpoint.poll(1e-3)
    assert [type(one.event) for one in arrived] == [pushing.Pushed]
    assert len(taken) == 1
    assert memory.push(other, "replica 1", 1, 2)
    endpoint.poll(1.0)
    assert [type(one.event) for one in arrived] == [pushing.Pushed, pushing.Fetched]


def test_a_change_between_a_turn_and_the_wait_after_it_is_seen(
    bounded: tuple[DirectEndpoint, Memory, SharedShard, list[Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    endpoint, memory, other, arrived = bounded
    give, pushed = SharedShard.give, list[bool]()

    def then_the_other(shared: SharedShard) -> None:
        give(shared)
        if shared is not other and not pushed:
            pushed.append(True)
            assert memory.push(other, "replica 1", 1, 2)

    monkeypatch.setattr(SharedShard, "give", then_the_other)
    for _ in range(3):
        endpoint.poll(1e-3)
    assert pushed
    assert [type(one.event) for one in arrived] == [pushing.Pushed, pushing.Fetched]
