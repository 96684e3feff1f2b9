"""Allreduce: the updates of one machine with the union of the minibatches, whoever dies at whatever step."""

from __future__ import annotations

import random
from collections import Counter
from itertools import product
from typing import Any

import pytest
import torch
from drawn import SEEDS, in_chunks, some
from oracles import classes, mlp, sequential, smooth
from tally import NAME, Tallied, tallied
from torch import nn
from watching.observed import Observed, Watcher

from distbelief.core import records, roles
from distbelief.core.conversations import checkpointing, grouping
from distbelief.core.messages import Message
from distbelief.core.optimizer import Optimizer, optim
from distbelief.core.records import Cause
from distbelief.job import Job
from distbelief.places.compute_model import ComputeModel
from distbelief.places.simulated.handling import INSTANT
from distbelief.places.simulated.simulated import Simulated
from distbelief.places.simulated.virtual_cluster import Crash
from distbelief.schedules.allreduce import ALGORITHMS, by_host, schedule
from distbelief.schedules.price import LinkModel, price
from distbelief.strategies import Allreduce
from distbelief.strategies.grouped.whole import TorchWhole
from distbelief.tasks import Task
from distbelief.tasks.task import TensorData
from distbelief.testing.simulations import draw_outages, draw_revivals
from distbelief.transport.cluster_model import NetworkModel

OPTIONS = ("replicas", "optimizer", "bucket_mb", "buffers", "per_host", "restarts")


class Sent(Watcher):
    """Counts what is sent: pieces, and their bytes, by sender and receiver."""

    def __init__(self, run: Observed) -> None:
        self.pieces: list[tuple[str, str, grouping.ReducedPiece]] = []
        self.counts: Counter[str] = Counter()
        self.kinds: Counter[type] = Counter()
        run.watch(self)

    def sent(self, sender: str, to: str, message: Message) -> None:
        self.counts[sender] += 1
        self.kinds[type(message)] += 1
        if isinstance(message, grouping.ReducedPiece):
            self.pieces.append((sender, to, message))


def per_host(algorithm: str, count: int = 2) -> int:
    """Of what is told how many are on each host."""
    return count if algorithm.startswith("hierarchical") or algorithm == "auto" else 0


def begin(cluster: Simulated | None = None, algorithm: str = "", **options: Any) -> tuple[Observed, Sent]:
    own = {name: options.pop(name) for name in OPTIONS if name in options}
    usual = {"replicas": 3, "restarts": 0}
    usual |= {"algorithm": algorithm, "per_host": per_host(algorithm)} if algorithm else {}
    task = classes(mlp, samples=options.pop("samples", 40))
    shared = {"task": task, "batch_size": 4, "evaluate_every": 0, "checkpoint_every": 0, **options}
    run = Observed(Job(strategy=Allreduce(**{**usual, **own}), **shared), cluster)
    return run, Sent(run)


def held(run: Observed) -> dict[str, dict[str, torch.Tensor]]:
    """What each replica holds that was there at the end."""
    died = {record.role: record.died for record in run.told(records.Gone)}
    left = {role for role, dead in died.items() if not dead}
    stories: dict[str, Any] = {role: part.player for role, part in run.simulation.parts.items()}
    return {
        role: {name: value.clone() for name, value in stories[role].whole.flat.module.state_dict().items()}
        for role in sorted(left)
        if stories[role].rounds >= 0
    }


def same_on_all(run: Observed) -> dict[str, torch.Tensor]:
    """What all replicas hold, once it is seen to be the same bits."""
    first, *others = held(run).values()
    for other in others:
        for name, value in first.items():
            assert torch.equal(value, other[name]), f"{name} differs between replicas"
    return first


def assert_close(ours: dict[str, torch.Tensor], theirs: dict[str, torch.Tensor], tolerance: float) -> None:
    for name, value in theirs.items():
        torch.testing.assert_close(ours[name], value, rtol=tolerance, atol=tolerance)


class Updates:
    """Looks into every update of a tallied model: which minibatches are in it, and which are in the model."""

    def __init__(self) -> None:
        self._update = TorchWhole.update

    def update(self, whole: TorchWhole, *asked: Any) -> None:
        """No minibatch is in two updates, and each weighs as much as its samples are of those of its update."""
        model = whole.flat.module
        if isinstance(model, Tallied):
            entry = next(entry for entry in whole.layout.entries if entry.tensor.name == NAME)
            weights = (
                whole.gradients.sum[entry.start : entry.start + entry.tensor.size]
                .view(torch.float32)
                .view(entry.tensor.shape)
            )
            here = weights != 0
            again = (here & (model.tally != 0)).nonzero().tolist()
            assert not again, f"(epoch, minibatch) {again} are in an update for the second time"
            torch.testing.assert_close(weights[here], model.sizes[here] / model.sizes[here].sum())
        self._update(whole, *asked)


@pytest.fixture(autouse=True)
def updates(monkeypatch: pytest.MonkeyPatch) -> None:
    updates = Updates()
    monkeypatch.setattr(TorchWhole, "update", lambda whole, *asked: updates.update(whole, *asked))


def assert_each_once(run: Observed) -> None:
    """All replicas hold the same bits, and every minibatch of every epoch is in them."""
    assert (same_on_all(run)[NAME] != 0).all()


def normed() -> nn.Module:
    return nn.Sequential(nn.Linear(6, 10), nn.BatchNorm1d(10), nn.Tanh(), nn.Linear(10, 3))


# the oracles


@pytest.mark.parametrize(("algorithm", "replicas"), some(product([*ALGORITHMS, "auto"], [1, 2, 3, 5]), 3 * SEEDS))
def test_n_replicas_are_sequential_sgd_on_the_union(algorithm: str, replicas: int) -> None:
    """22 samples in minibatches of four: the last round is short, and so is its last minibatch."""
    task = smooth(dtype=torch.float64)
    own = {"optimizer": Optimizer("momentum", 0.05, {"weight_decay": 0.03}), "bucket_mb": 0.0004}
    both = {"epochs": 3, "clip_norm": 0.3}
    run, _ = begin(None, algorithm, replicas=replicas, task=task, lr_schedule="cosine", **own, **both)
    run.run()
    size = 4 * replicas
    theirs = sequential(task, "momentum", lr=0.05, batch_size=size, schedule="cosine", weight_decay=0.03, **both)
    assert_close(same_on_all(run), theirs, 1e-11)


@pytest.mark.parametrize("algorithm", [*ALGORITHMS, "auto"])
def test_alone_it_is_sequential_sgd_bit_for_bit(algorithm: str) -> None:
    task = classes(mlp)
    run, _ = begin(None, algorithm, replicas=1, task=task, optimizer=optim("adam", lr=0.01), epochs=2)
    run.run()
    for name, value in sequential(task, "adam", lr=0.01, epochs=2).items():
        assert torch.equal(same_on_all(run)[name], value)


# a job is what it is elsewhere


def test_evaluations_checkpoints_and_epochs_are_in_the_result() -> None:
    run, _ = begin(epochs=3, evaluate_every=1, checkpoint_every=2)
    run.run()
    told = run.summary()
    assert [row["epoch"] for row in told["history"]] == [1, 2, 3]
    assert all(row["test_accuracy"] is not None and row["train_loss"] is not None for row in told["history"])
    assert (told["samples"], told["steps"], told["updates"], told["outcome"]) == (120, 30, 12, "done")
    assert [one["steps"] for one in told["per_replica"]] == [12, 9, 9]
    assert [r.number for r in run.told(records.Checkpointed) if not r.error] == [1, 2]


def test_pushes_between_checkpoints() -> None:
    made = []
    for every in ("0", "3"):
        run, _ = begin(replicas=2, epochs=2, snapshot_every=every)
        run.run()
        made.append(len(run.told(records.Checkpointed)))
        same_on_all(run)
    assert made == [1, 4]  # after each third of ten rounds, and at the end


# every option does something


@pytest.mark.parametrize(
    "algorithm",
    ["naive", "tree", "butterfly", "halving-doubling", "ring", "direct", "hierarchical", "hierarchical:tree"],
)
def test_the_algorithm_is_what_travels(algorithm: str) -> None:
    run, sent = begin(None, algorithm, replicas=4, epochs=1)
    run.run()
    made = schedule(algorithm, 4, 103, by_host(4, 2) if "hier" in algorithm else ())
    first = [(m.step, a, b, m.start // 4, m.adds) for a, b, m in sent.pieces if m.round == 0]
    assert sorted(first) == sorted(
        (step, roles.replica(t.source), roles.replica(t.target), t.start, t.adds)
        for step, ts in enumerate(made.steps)
        for t in ts
    )


def test_buffers_are_the_first_ones_or_each_ones_own() -> None:
    task = classes(normed, samples=40)
    run, _ = begin(task=task, buffers="broadcast", epochs=2)
    same_on_all(run.run())
    own, _ = begin(task=task, buffers="local", epochs=2)
    kept = held(own.run())
    means = [state["1.running_mean"] for state in kept.values()]
    assert not torch.equal(means[0], means[1])
    assert torch.equal(kept["replica 0"]["0.weight"], kept["replica 1"]["0.weight"])
    assert int(kept["replica 0"]["1.num_batches_tracked"]) == 8


@pytest.mark.parametrize("ranks", [8, 32])
@pytest.mark.parametrize("size", [4_000, 1_000_000])
@pytest.mark.parametrize("algorithm", ["ring", "halving-doubling", "butterfly", "tree", "naive"])
def test_a_simulated_round_takes_the_price(ranks: int, size: int, algorithm: str) -> None:
    """On the network of which schedules/price gives the table; adding up costs too, where it is to."""
    for reduction in (0.0, 1e-10):
        network = NetworkModel(latency=20e-6, bandwidth=1.25e9, reduction=reduction)
        data = TensorData(torch.zeros(ranks, 1), torch.zeros(ranks, dtype=torch.int64))
        task = Task(model=lambda: nn.Linear(size // 4, 1, bias=False), train=lambda data=data: data)  # type: ignore[misc]
        cluster = Simulated(network, ComputeModel(1e-3, "constant"), phantom=True, handling=INSTANT)
        strategy = Allreduce(replicas=ranks, algorithm=algorithm)
        run = Observed(Job(task, strategy, batch_size=1, evaluate_every=0, checkpoint_every=0), cluster)
        computed, summed = moments(run)
        run.run()
        assert len(computed) == ranks
        expected = price(schedule(algorithm, ranks, size // 4), 4, LinkModel(20e-6, 1.25e9, reduction))
        assert max(summed) - max(computed) == pytest.approx(expected, rel=0.01)


def moments(run: Observed) -> tuple[list[float], list[float]]:
    """When each replica has its gradient, and when it has the sum."""
    computed: list[float] = []
    summed: list[float] = []
    for part in run.simulation.parts.values():
        story: Any = part.player
        story.whole.gather = lambda: computed.append(run.simulation.clock.now())
        story.whole.update = lambda *_: summed.append(run.simulation.clock.now())
    return computed, summed


# deaths


def dying(algorithm: str, who: int, message: int, **options: Any) -> tuple[Observed, Sent]:
    cluster = Simulated(crashes=(Crash(roles.replica(who), message),), restart_seconds=0.01)
    return begin(cluster, algorithm, replicas=4, bucket_mb=0.0002, **{"samples": 24, **options})


@pytest.mark.parametrize("algorithm", [*ALGORITHMS, "hierarchical:tree"])
@pytest.mark.parametrize("who", [0, 1, 3])
def test_a_death_at_any_message_is_survived_by_the_others(algorithm: str, who: int) -> None:
    task = tallied(classes(mlp, samples=22), 4)
    run, counted = begin(None, algorithm, replicas=4, bucket_mb=0.0002, task=task)
    run.run()
    for message in some(range(1, counted.counts[roles.replica(who)] + 1), SEEDS // 6):
        run, _ = dying(algorithm, who, message, task=task)
        run.run()
        assert (run.outcome, run.simulation.killed) == ("done", [roles.replica(who)])
        assert run.summary()["samples"] == 22, f"at message {message}"
        assert_each_once(run)


@pytest.mark.parametrize("restarts", [0, 1])
@pytest.mark.parametrize("who", [0, 2])
def test_who_comes_again_is_given_what_the_others_hold(who: int, restarts: int) -> None:
    """With momentum, whose state must come along: with the next life there are four again, else three."""
    task = tallied(classes(normed, samples=160), 4, epochs=4)
    run, _ = dying("ring", who, 40, task=task, restarts=restarts, optimizer=optim("momentum", lr=0.01), epochs=4)
    run.run()
    assert run.summary()["samples"] == 640
    assert_each_once(run)
    last = [r.role for r in run.told(records.Stepped)][-4:]
    assert (roles.replica(who) in last) is bool(restarts)
    [gone] = [r for r in run.told(records.Gone) if r.died]
    assert gone.lost >= 1
    assert next(one["lost"] for one in run.summary()["per_replica"] if one["id"] == who) == gone.lost


def test_when_all_die_the_next_lives_go_back_to_the_newest_checkpoint() -> None:
    """Before the first of them, and after each: there is one for every epoch."""
    task, back = tallied(classes(mlp, samples=46), 4, epochs=6), Counter[int]()
    for message in some(range(3, 46)):
        crashes = tuple(Crash(roles.replica(i), message + i) for i in range(2))
        cluster = Simulated(crashes=crashes, restart_seconds=5.0)
        run, _ = begin(cluster, replicas=2, restarts=1, epochs=6, checkpoint_every=1, task=task)
        run.run()
        assert run.outcome == "done", f"at message {message}"
        back.update(rewound := [r.samples for r in run.told(records.Rewound)])
        gone = next(at for at, record in enumerate(run.records) if isinstance(record, records.Gone))
        made = any(isinstance(record, records.Stepped) for record in run.records[:gone])
        assert len(rewound) == made, f"at message {message}"
        assert run.summary()["epochs"] == 6
        assert_each_once(run)
    epochs = {46 * epoch for epoch in range(6)}
    assert epochs == set(back) if SEEDS >= 20 else len(epochs & set(back)) > 2


def test_a_group_that_breaks_up_before_any_round_is_no_end_of_all() -> None:
    """A replica dies as the first group is formed: nobody holds anything yet, and nothing is lost."""
    for restarts in (0, 1):
        run, sent = begin(Simulated(crashes=(Crash("replica 0", 2),)), restarts=restarts)
        run.run()
        assert (run.outcome, sent.kinds[grouping.Halt] > 0) == ("done", True)
        assert not run.told(records.Rewound, records.Note)
        assert [r.role for r in run.told(records.Gone) if r.died] == ["replica 0"]
        assert run.summary()["samples"] == 40


def test_a_ctrl_c_while_the_job_ends_counts_where_all_go_back() -> None:
    """The last checkpoint is asked for; all die, and come again: nobody is to be asked twice."""
    run, sent = begin(Simulated(restart_seconds=1.0), replicas=2, restarts=1, epochs=2)
    simulation = run.simulation

    def asked() -> str | None:
        if not sent.kinds[checkpointing.Snapshot]:
            return None
        for role in ("replica 0", "replica 1"):
            simulation.clock.call_later(0.0, simulation.kill, role)
        return "Ctrl-C"

    simulation.stopped = asked
    simulation.run()
    assert [record.samples for record in run.told(records.Rewound)] == [0]
    [finished] = run.told(records.Finished)
    assert (finished.cause, finished.reason) == (Cause.INTERRUPTED, "Ctrl-C")
    assert run.summary()["samples"] < 80


@in_chunks(200)
def test_sweep(seeds: range) -> None:
    """Seeds x deaths, late messages and outages: every minibatch is in one update, and all end with the same bits."""
    ways = Counter[str]()
    for seed in seeds:
        chance = random.Random(f"allreduce {seed}")
        replicas = chance.randint(1, 6)
        restarts = chance.choice((0, 0, 1, 2))
        dead = chance.sample(range(replicas), chance.randint(0, replicas - 1 if not restarts else replicas))
        at = chance.randint(1, chance.choice((20, 150)))
        crashes = tuple(Crash(roles.replica(i), max(1, at + chance.randint(-3, 3))) for i in dead)
        crashes += draw_revivals(random.Random(f"coordinator {seed}"), restarts)
        network = NetworkModel(
            jitter=chance.choice((0.0, 2.0)),
            delay_chance=chance.choice((0.0, 0.02)),
            delay=5e-3,
            outages=tuple(
                p for p in draw_outages(chance, replicas, 0, [c.role for c in crashes]) if len(p.side) <= replicas
            ),
        )
        spread, pause = chance.choice(("constant", "exponential")), chance.choice((0.001, 0.1))
        cluster = Simulated(network, ComputeModel(spread=spread), crashes, restart_seconds=pause)
        algorithm, bucket_mb = chance.choice([*ALGORITHMS, "auto"]), chance.choice((25.0, 0.0002))
        count, epochs = per_host(algorithm, chance.choice((0, 1, 2))), chance.choice((1, 2))
        own = {"replicas": replicas, "restarts": restarts, "bucket_mb": bucket_mb, "per_host": count}
        often = {name: chance.choice((0, 1)) for name in ("checkpoint_every", "evaluate_every")}
        task = tallied(classes(mlp, samples=39), 4, epochs, seed)
        run, _ = begin(cluster, algorithm, task=task, epochs=epochs, seed=seed, **own, **often)
        run.run()
        told = run.summary()
        assert (run.outcome, told["epochs"]) == ("done", epochs), f"seed {seed}: {told['reason']}"
        died = {role for role in run.simulation.killed if roles.is_replica(role)}
        rewound = [r.samples for r in run.told(records.Rewound)]
        assert len(died) == replicas or not any(rewound), (
            f"seed {seed}: only {died} died, and what the others held is lost"
        )
        assert told["samples"] == 39 * epochs, f"seed {seed}"
        assert_each_once(run)
        ways["went back" if rewound else "went on" if died else "undisturbed"] += 1
    assert len(seeds) < 50 or min(ways["went on"], ways["undisturbed"]) > 0, ways
