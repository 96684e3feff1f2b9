"""Split replicas that add up their gradients among themselves, against whole replicas, and under deaths."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from drawn import SEEDS, in_chunks, some, sweep
from oracles import classes, sequential
from split_jobs import SAMPLES, WIDTH, marked, normed, play, smooth, weights
from watching.observed import Observed

from distbelief.core import records
from distbelief.core.conversations import grouping
from distbelief.core.messages import Message
from distbelief.core.optimizer import Optimizer
from distbelief.job import Job
from distbelief.places.compute_model import ComputeModel
from distbelief.places.simulated.simulated import Simulated
from distbelief.places.simulated.virtual_cluster import Crash
from distbelief.strategies import Allreduce, Single
from distbelief.strategies.grouped.replica import CHUNK
from distbelief.strategies.grouped.whole import TorchWhole
from distbelief.testing.simulations import attach, draw_compute, draw_network, draw_revivals
from distbelief.transport.cluster_model import NetworkModel

SEEDS_AT_ONCE = 50
SPLITS = {
    "stages": {"split": "stages", "partitions": 2},
    "neurons": {"split": "neurons", "partitions": 2},
    "three stages": {"split": "stages", "partitions": 3},
}


# the oracles


@pytest.mark.parametrize("replicas", [1, 2, 3])
@pytest.mark.parametrize("how", SPLITS)
def test_split_replicas_are_sequential_sgd_on_the_union(how: str, replicas: int) -> None:
    """43 samples in minibatches of four: the last round is short, and so is its last minibatch."""
    optimizer = Optimizer("momentum", 0.05, {"weight_decay": 0.03})
    strategy = Allreduce(replicas, optimizer=optimizer, bucket_mb=0.0004, **SPLITS[how])  # type: ignore[arg-type]  # its options
    run = play(strategy, epochs=2, dtype=torch.float64, lr_schedule="cosine", clip_norm=0.3)
    run.run()
    task = classes(lambda: smooth().to(torch.float64), samples=SAMPLES, dtype=torch.float64)
    oracle = sequential(
        task, "momentum", lr=0.05, epochs=2, batch_size=4 * replicas, schedule="cosine", clip_norm=0.3,
        weight_decay=0.03,
    )  # fmt: skip
    for name, tensor in oracle.items():
        for replica in range(replicas):
            torch.testing.assert_close(weights(run, replica)[name], tensor, rtol=1e-11, atol=1e-11)


@pytest.mark.parametrize("kind", [Allreduce, Single])
def test_stages_of_one_replica_are_the_plain_loop_bit_for_bit(kind: type[Allreduce | Single]) -> None:
    more = {"replicas": 1} if kind is Allreduce else {}
    strategy = kind(optimizer=Optimizer("adam", 0.01), partitions=2, split="stages", **more)  # type: ignore[arg-type]  # its options
    run = play(strategy, epochs=2)
    run.run()
    task = classes(smooth, samples=SAMPLES)
    for name, tensor in sequential(task, "adam", lr=0.01, epochs=2, batch_size=4).items():
        assert torch.equal(weights(run)[name], tensor)


@pytest.mark.parametrize(("schedule", "microbatches"), [("gpipe", 3), ("1f1b", 4), ("auto", 2)])
def test_microbatches_and_accumulation_make_the_round_of_the_union(schedule: str, microbatches: int) -> None:
    strategy = Allreduce(
        2, optimizer=Optimizer("sgd", 0.05), partitions=3, split="stages", schedule=schedule,
        microbatches=microbatches, accumulate=2,
    )  # fmt: skip
    run = play(strategy, epochs=2, dtype=torch.float64)
    run.run()
    task = classes(lambda: smooth().to(torch.float64), samples=SAMPLES, dtype=torch.float64)
    for name, tensor in sequential(task, "sgd", lr=0.05, epochs=2, batch_size=16).items():
        torch.testing.assert_close(weights(run)[name], tensor, rtol=1e-11, atol=1e-11)


@pytest.mark.parametrize("how", SPLITS)
def test_one_model_over_several_processes_is_the_plain_loop(how: str) -> None:
    """With microbatches, a rate that is scheduled and scaled, and the last minibatch short."""
    schedule = {"schedule": "1f1b", "microbatches": 3} if "stages" in how else {}
    strategy = Single(optimizer=Optimizer("adagrad", 0.05), **SPLITS[how], **schedule)  # type: ignore[arg-type]  # its options
    run = play(strategy, epochs=2, dtype=torch.float64, lr_schedule="cosine")
    run.run()
    task = classes(lambda: smooth().to(torch.float64), samples=SAMPLES, dtype=torch.float64)
    oracle = sequential(task, "adagrad", lr=0.05, epochs=2, batch_size=4, schedule="cosine")
    for name, tensor in oracle.items():
        torch.testing.assert_close(weights(run)[name], tensor, rtol=1e-11, atol=1e-11)


@pytest.mark.parametrize("buffers", ["broadcast", "local"])
def test_buffers_are_those_of_whole_replicas(buffers: str) -> None:
    found = []
    for more in ({}, {"partitions": 2, "split": "stages"}):
        run = play(Allreduce(2, buffers=buffers, **more), model=normed, epochs=2)  # type: ignore[arg-type]  # its options
        run.run()
        found.append([weights(run, replica) for replica in range(2)])
    for whole, split in zip(*found, strict=True):
        assert whole.keys() == split.keys()
        assert all(torch.equal(split[name], tensor) for name, tensor in whole.items())


# a job is what it is elsewhere


def test_it_is_measured_and_saved_as_whole_replicas_are() -> None:
    """Also in the middle: after each epoch what is measured is of that epoch."""
    found = []
    for more in ({}, {"partitions": 2, "split": "stages"}):
        run = play(Allreduce(2, **more), epochs=3, evaluate_every=1, checkpoint_every=2)  # type: ignore[arg-type]  # its options
        run.run()
        tested = [(r.loss, r.accuracy) for r in run.told(records.Tested)]
        saved = [r.number for r in run.told(records.Checkpointed) if not r.error]
        losses = [(r.role.partition(".")[0], r.loss) for r in run.told(records.Stepped)]
        found.append((tested, saved, losses))
    assert found[0] == found[1]
    assert len(found[0][0]) == 3


def test_all_gone_it_goes_on_from_the_parts_of_its_checkpoint() -> None:
    """The only replica dies after a checkpoint: it ends where an undisturbed one does, bit for bit."""
    found = []
    for crashes in ((), (Crash("replica 0.1", 60),)):
        strategy = Allreduce(1, optimizer=Optimizer("adam", 0.01), partitions=2, split="stages", restarts=2)
        run = play(strategy, Simulated(crashes=crashes), epochs=3, snapshot_every="4")
        run.run()
        assert run.outcome == "done"
        found.append(weights(run))
    assert any(isinstance(record, records.Rewound) and record.samples for record in run.records)
    assert all(torch.equal(found[1][name], tensor) for name, tensor in found[0].items())


class OnItsWay:
    """The most bytes of what one has of another that were on their way at once, by sender and receiver."""

    def __init__(self, run: Observed) -> None:
        self._now: Counter[tuple[str, str]] = Counter()
        self.most: dict[type[Message], int] = {}
        attach(run.simulation.network, self)

    def sent(self, sender: str, to: str, message: Message) -> None:
        self._count(sender, to, message, 1)

    def delivered(self, sender: str, to: str, message: Message) -> None:
        self._count(sender, to, message, -1)

    def _count(self, sender: str, to: str, message: Message, sign: int) -> None:
        if isinstance(message, grouping.State | grouping.PartValues):
            self._now[sender, to] += sign * len(message.data)
            self.most[type(message)] = max(self.most.get(type(message), 0), self._now[sender, to])


def test_what_partitions_hold_comes_to_who_measures_in_parts_that_wait_until_those_before_are_taken(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    found = []
    for chunk in (CHUNK, 100):
        monkeypatch.setattr("distbelief.strategies.grouped.replica.CHUNK", chunk)
        run = play(Allreduce(2, partitions=3, split="stages"), epochs=3, evaluate_every=1)
        way = OnItsWay(run)
        run.run()
        found.append([(r.loss, r.accuracy) for r in run.told(records.Tested)])
    assert way.most.keys() == {grouping.PartValues}
    assert way.most[grouping.PartValues] <= 2 * chunk
    assert found[0] == found[1]


def test_who_comes_again_is_given_what_another_holds_in_parts_that_wait_until_those_before_are_taken(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("distbelief.strategies.grouped.replica.CHUNK", chunk := 100)
    strategy = Allreduce(2, optimizer=Optimizer("adam", 0.01), partitions=2, split="stages", restarts=1)
    run = play(strategy, Simulated(crashes=(Crash("replica 1.0", 40),), restart_seconds=1e-3), epochs=3)
    way = OnItsWay(run)
    run.run()
    assert run.simulation.killed.count("replica 1.1") == 1
    assert way.most.keys() == {grouping.State}
    assert way.most[grouping.State] <= 2 * chunk
    assert all(torch.equal(weights(run, 1)[name], tensor) for name, tensor in weights(run).items())


# deaths


class Updates:
    """The samples in each update: at each partition, by the rounds made before it."""

    def __init__(self) -> None:
        self.by_part: dict[tuple[int, int], set[int]] = {}
        self.by_model: list[tuple[TorchWhole, int]] = []
        self.story: Any = None

    def note(self, whole: TorchWhole) -> None:
        own = whole.layout.partitions[whole._partition].trained.size
        there = {i for i, value in enumerate(whole.gradients.sum[:own].view(torch.float32).tolist()) if value}
        rounds = next(p.rounds for p in self.stories() if p.whole is whole)
        assert not any(one is whole and number == rounds for one, number in self.by_model), f"round {rounds} twice"
        self.by_model.append((whole, rounds))
        self.by_part[rounds, whole._partition] = there

    def stories(self) -> Iterator[Any]:
        return (part.player for part in self.story.parts.values())


def hold(monkeypatch: pytest.MonkeyPatch, strategy: Allreduce, cluster: Simulated, **job: Any) -> Observed:
    """Play a job of marked samples: each is in exactly one update of the parameters that are left, at both stages."""
    run = Observed(Job(task=marked(), strategy=strategy, evaluate_every=0, checkpoint_every=0, **job), cluster)
    updates, update = Updates(), TorchWhole.update
    updates.story = run.simulation

    def spied(whole: TorchWhole, *asked: Any) -> None:
        updates.note(whole)
        update(whole, *asked)

    with monkeypatch.context() as patched:
        patched.setattr(TorchWhole, "update", spied)
        run.run()
    if run.outcome == "done":
        rounds = max(player.rounds for player in updates.stories())
        for partition in range(strategy.partitions):
            made = [updates.by_part[number, partition] for number in range(rounds)]
            assert sorted(i for one in made for i in one) == list(range(WIDTH)), f"partition {partition}: {made}"
    return run


@pytest.mark.parametrize("victim", ["replica 0.0", "replica 0.1", "replica 1.1"])
def test_whoever_dies_at_whatever_message_each_minibatch_is_in_one_update(
    monkeypatch: pytest.MonkeyPatch, victim: str
) -> None:
    """A partition takes its replica with it, which comes again; the other goes on, and nothing is half updated."""
    ended, messages = Counter[str](), some(range(1, 38, 3), SEEDS // 2)
    for message in messages:
        strategy = Allreduce(2, optimizer=Optimizer("sgd", 0.1), partitions=2, split="stages", restarts=1)
        cluster = Simulated(crashes=(Crash(victim, message),), restart_seconds=1e-3)
        try:
            run = hold(monkeypatch, strategy, cluster, batch_size=2)
        except BaseException as error:
            error.add_note(f"{victim} at its message {message}")
            raise
        assert run.outcome == "done"
        ended["died"] += victim in run.simulation.killed
    assert ended["died"] > len(messages) // 2


def draw(seed: int) -> tuple[Allreduce, dict[str, Any], Simulated]:
    chance = random.Random(f"columns {seed}")
    pick = chance.choice
    replicas = chance.randint(1, 3)
    strategy = Allreduce(
        replicas, optimizer=Optimizer("sgd", 0.1), partitions=2, split="stages", accumulate=pick((1, 1, 2)),
        algorithm=pick(("ring", "auto", "tree", "direct")), microbatches=pick((1, 1, 2)),
        restarts=pick((0, 1, 3)), on_death=pick(("regroup", "regroup", "stop")),
    )  # fmt: skip
    named = [f"replica {index}.{part}" for index in range(replicas) for part in range(2)]
    crashes = [Crash(role, chance.randint(1, pick((12, 90)))) for role in chance.sample(named, chance.randint(0, 2))]
    crashes += draw_revivals(random.Random(f"coordinator {seed}"), strategy.restarts)
    cluster = Simulated(
        network=draw_network(chance), compute=draw_compute(chance, slow=0.2), crashes=tuple(crashes),
        restart_seconds=pick((0.0, 1e-3, 0.5)),
    )  # fmt: skip
    return strategy, {"batch_size": pick((2, 3)), "seed": seed, "snapshot_every": pick(("0", "3", "5ms"))}, cluster


@in_chunks(SEEDS_AT_ONCE)
def test_no_fault_loses_or_repeats_a_minibatch_of_split_replicas(monkeypatch: pytest.MonkeyPatch, seeds: range) -> None:
    def ended(seed: int) -> Counter[str]:
        strategy, options, cluster = draw(seed)
        run = hold(monkeypatch, strategy, cluster, **options)
        died = any(role != "coordinator" for role in run.simulation.killed)
        return Counter([f"{run.outcome}, {'a partition' if died else 'nobody'} died"])

    found = sweep(seeds, ended, draw)
    if len(seeds) >= SEEDS_AT_ONCE:
        assert found["done, a partition died"] > 5
        assert found["done, nobody died"] > 5
        assert len(found) > 2


# what is said


def test_partitions_say_for_whom_they_wait() -> None:
    uneven = Simulated(network=NetworkModel(latency=1e-3), compute=ComputeModel(slow={1: 3.0}))
    run = play(Allreduce(2, partitions=2, split="neurons"), uneven)
    said: dict[str, set[str]] = {"replica 0.0": set(), "replica 0.1": set()}
    parts = run.simulation.parts

    def listen(*_: object) -> None:
        for role, known in said.items():
            known.add(parts[role].player.waits())

    run.look(delivered=listen)
    run.run()
    assert {"for work from replica 0.0", "for gradients from replica 1.1"} <= said["replica 0.1"]
    assert {"for replica 0.1 to do the same", "for gradients from replica 1.0"} <= said["replica 0.0"]
    assert "for the gradient of what 2 needed from replica 0.0" in said["replica 0.1"]
    assert not any("coordinator" in one for one in said["replica 0.1"])
