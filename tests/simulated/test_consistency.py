"""Every consistency against plain PyTorch on union batches, counts by hand, and the papers' numbers."""

from __future__ import annotations

import dataclasses
import random
import statistics
from collections import Counter
from itertools import product
from typing import Any

import msgspec
import pytest
import torch
from drawn import SEEDS, in_chunks, scaled, some, sweep
from oracles import FALLS, STEPPERS, classes, minibatches, mlp, smooth
from split_jobs import state_of, vector_of
from torch import nn
from watching.floors import hold_floors
from watching.lead import Lead
from watching.observed import Observed, Watcher

from distbelief.core import records, roles
from distbelief.core.consistency import Key
from distbelief.core.conversations import checkpointing, evaluating, pushing
from distbelief.core.messages import Message
from distbelief.core.optimizer import Optimizer, optim
from distbelief.core.records import Cause
from distbelief.core.rounds import Rounds
from distbelief.errors import UsageError
from distbelief.job import Job
from distbelief.places.compute_model import ComputeModel, Stopwatch
from distbelief.places.simulated import handling
from distbelief.places.simulated.simulated import Simulated
from distbelief.places.simulated.virtual_cluster import Crash
from distbelief.record.summary import Summary
from distbelief.strategies import Bounded, Downpour, Sandblaster, Softsync, Strategy, Synchronous
from distbelief.strategies.parameter_server.options import Served
from distbelief.tasks import Task
from distbelief.tasks.task import TensorData
from distbelief.testing.accounting import Accounting
from distbelief.testing.simulations import Endings, draw_compute, draw_network, draw_outages, draw_revivals, ways
from distbelief.transport.cluster_model import NetworkModel

CHUNK = 250
FLOORS = {
    "EPOCHS_DONE": 100, "INTERRUPTED": 30, "REPLICAS_DIED": 15, "SHARD_SPENT": 15, "SHARD_UNSAVED": 3,
    "done, and nobody died": 30, "done after a replica died": 40, "done after the coordinator died": 15,
    "done after a shard came again": 3, "done after all went back": 2, "done after a standby succeeded": 8,
    "done with pushes forgotten": 1,
}  # fmt: skip
"""How many of `CHUNK` seeds end in each way, at least."""
MANY = SEEDS >= 1000
"""Whether laws are held with the numbers of the papers, or with fewer."""
DRAWS, APART = (4000, 0.05) if MANY else (1000, 0.1)
INSTANT = NetworkModel(latency=0.0, bandwidth=float("inf"))
UNEVEN = Simulated(
    network=NetworkModel(jitter=5.0, delay_chance=0.05, delay=3e-3),
    compute=ComputeModel(spread="exponential", slow={0: 3.0}),
)


def play(strategy: Strategy, cluster: Simulated | None = None, **options: Any) -> tuple[Observed, Accounting]:
    task = options.pop("task", None) or smooth(options.pop("samples", 43), options.pop("dtype", torch.float32))
    usual = {"batch_size": 4, "evaluate_every": 0, "checkpoint_every": 0}
    run = Observed(Job(task, strategy, **{**usual, **options}), cluster)
    return run, run.accounted()


def union_sgd(
    accounting: Accounting,
    task: Task,
    optimizer: str,
    lr: float,
    seed: int = 0,
    batch_size: int = 4,
    schedule: str = "constant",
) -> torch.Tensor:
    """Plain PyTorch on the union batch of each round: the vector at the end."""
    torch.manual_seed(seed)
    model, data = task.model().train(), task.train()
    flat = nn.Parameter(torch.cat([p.detach().reshape(-1) for p in model.parameters()]))
    stepper = STEPPERS[optimizer]([{"params": [flat]}], lr=lr)
    epochs, applied = 1 + max(epoch for minibatches in accounting.pushes.values() for epoch, _ in minibatches), 0
    samples = [list(minibatches(len(data), batch_size, epochs, seed))]
    per_epoch = -(-len(data) // batch_size)
    for _, group in sorted(accounting.groups["shard 0"].items()):
        numbers = torch.cat([samples[0][epoch * per_epoch + index][1] for epoch, index in accounting.batches(group)])
        nn.utils.vector_to_parameters(flat.detach(), model.parameters())
        model.zero_grad()
        inputs, targets = data.batch(numbers)
        task.loss(model(inputs), targets).backward()
        flat.grad = torch.cat([p.grad.reshape(-1) for p in model.parameters()])  # type: ignore[union-attr]
        stepper.param_groups[0]["lr"] = lr * FALLS[schedule](applied / (epochs * len(data)))
        applied += len(numbers)
        stepper.step()
    return flat.detach()


# synchronous


@pytest.mark.parametrize(
    ("replicas", "shards", "optimizer", "dtype", "tolerance"),
    [
        (1, 1, "sgd", torch.float32, 1e-6), (1, 3, "momentum", torch.float64, 1e-12),
        (2, 3, "adagrad", torch.float32, 1e-6), (2, 1, "rmsprop", torch.float64, 1e-12),
        (3, 1, "momentum", torch.float32, 1e-6), (3, 3, "sgd", torch.float64, 1e-12),
        (4, 3, "rmsprop", torch.float32, 1e-6), (4, 1, "adagrad", torch.float64, 1e-12),
        (5, 3, "sgd", torch.float32, 1e-6), (5, 1, "momentum", torch.float64, 1e-12),
    ],
)  # fmt: skip
def test_synchronous_replicas_are_sgd_on_the_union_batch(
    replicas: int, shards: int, optimizer: str, dtype: torch.dtype, tolerance: float
) -> None:
    strategy = Synchronous(replicas, shards, Optimizer(optimizer, 0.02), push_every=1 + (replicas == 3))
    run, accounting = play(strategy, UNEVEN, dtype=dtype, epochs=3)
    rounds = accounting.groups["shard 0"]
    assert all(accounting.groups[shard] == rounds for shard in accounting.shards), "shards made other rounds"
    assert len(rounds[1]) == replicas
    assert not accounting.dropped
    expected = union_sgd(accounting, run.simulation.task, optimizer, 0.02)
    torch.testing.assert_close(vector_of(run), expected, rtol=tolerance * 10, atol=tolerance)
    assert run.summary()["staleness"]["max"] == 0


def test_a_round_waits_for_the_slowest_and_not_for_the_dead() -> None:
    slow = ComputeModel(spread="constant", slow={1: 50.0})
    waiting, _ = play(Synchronous(3, 2), Simulated(compute=slow))
    without_it, accounting = play(Synchronous(3, 2), Simulated(compute=slow, crashes=(Crash("replica 1", 9),)))
    assert waiting.outcome == without_it.outcome == "done"
    assert without_it.simulation.clock.now() < waiting.simulation.clock.now() / 2
    assert any(len(group) == 2 for group in accounting.groups["shard 0"].values())


@pytest.mark.parametrize("message", range(1, 16))
def test_a_first_round_does_not_wait_for_one_that_died_at_any_message(message: int) -> None:
    run, _ = play(Synchronous(2, 3), Simulated(crashes=(Crash("replica 1", message),)))
    assert run.outcome == "done"


def test_buffers_are_averaged_in_rounds() -> None:
    task = classes(lambda: nn.Sequential(nn.Linear(6, 4), nn.BatchNorm1d(4, momentum=1.0), nn.Linear(4, 3)), samples=16)
    steady = Simulated(compute=ComputeModel(spread="constant"))
    run, accounting = play(Synchronous(2, 1, Optimizer("sgd", 0.0)), steady, task=task, batch_size=8)
    mean = next(e for e in accounting.plan.layout.entries if e.tensor.name == "1.running_mean")
    (group,) = accounting.groups["shard 0"].values()
    pushed = [
        accounting.sent_pushes[who, "shard 0", clock][1][mean.start : mean.start + 16].view(torch.float32)
        for who, clock in group
    ]
    assert not torch.equal(*pushed)
    torch.testing.assert_close(state_of(run)["1.running_mean"], (pushed[0] + pushed[1]) / 2)


# backup workers


THREE_OF_FIVE = ({"backup_workers": 2}, {"quorum": 3}, {"quorum": 0.6})


@pytest.mark.parametrize("waits", THREE_OF_FIVE, ids=str)
def test_a_round_takes_exactly_the_first_gradients_and_the_others_are_dealt_again(waits: dict[str, Any]) -> None:
    strategy = Synchronous(5, 3, **waits)
    run, accounting = play(strategy, UNEVEN, samples=203, epochs=2)
    assert run.summary()["dropped"] == len(accounting.dropped) > 5
    first: dict[int, list[tuple[str, int]]] = {}
    for who, push in accounting.arrivals["shard 0"]:
        first.setdefault(push.tick, []).append((who, push.clock))
    early = [version for version, group in accounting.groups["shard 0"].items() if len(group) == 3]
    assert len(early) > 20
    for version in early:
        assert sorted(first[version - 1][:3]) == sorted(accounting.groups["shard 0"][version]), (
            f"round {version - 1} took others than its first three"
        )
    # the accounting has held that each minibatch was applied exactly once; and those that were dropped had two deals at
    # least
    again = {minibatch for key in accounting.dropped for minibatch in accounting.pushes[key]}
    assert all(sum(minibatch in holds for holds in accounting.pushes.values()) >= 2 for minibatch in again)
    assert run.outcome == "done"


@pytest.mark.parametrize("waits", THREE_OF_FIVE, ids=str)
def test_backup_workers_and_quorums_are_sgd_on_the_union_of_what_was_taken(waits: dict[str, Any]) -> None:
    run, accounting = play(Synchronous(5, 3, Optimizer("momentum", 0.02), **waits), UNEVEN, samples=83, epochs=2)
    assert accounting.dropped
    expected = union_sgd(accounting, run.simulation.task, "momentum", 0.02)
    torch.testing.assert_close(vector_of(run), expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(("waits", "alive", "needed"), [
    ({"backup_workers": 2}, 2, 2), ({"quorum": 0.5}, 2, 1), ({"quorum": 0.5}, 3, 2), ({"quorum": 2.0}, 2, 2),
    ({"quorum": 0.75}, 4, 3), ({"quorum": 2.0}, 1, 1),
], ids=str)  # fmt: skip
def test_a_fraction_follows_deaths_where_a_count_of_backup_workers_does_not(
    waits: dict[str, Any], alive: int, needed: int
) -> None:
    strategy = Synchronous(4, 1, **waits)
    policy = Rounds(Job("digits", strategy).settings(), True, strategy.backup_workers, strategy.quorum)
    for index in range(4):
        policy.attend(f"replica {index}", 0, -1)
    for index in range(alive, 4):
        policy.leave(f"replica {index}", 0)
    for index in range(needed):
        assert policy.due() is None, f"a round of {index} gradients"
        policy.push(Key(f"replica {index}", 0, 1), 0, 8, 0)
    assert policy.due() is not None


@pytest.mark.parametrize(("waits", "told"), [
    ({"backup_workers": 1, "quorum": 0.75}, "--quorum 0.75 and --backup-workers 1 both set how many"),
    ({"quorum": 5.0}, "--quorum 5 of 4 replicas"), ({"quorum": 1.5}, "--quorum 1.5 of 4 replicas"),
    ({"quorum": -0.5}, "--quorum -0.5"),
], ids=str)  # fmt: skip
def test_a_quorum_beside_backup_workers_or_of_what_is_no_part_is_refused(waits: dict[str, Any], told: str) -> None:
    with pytest.raises(UsageError, match=told):
        Job("digits", Synchronous(4, 1, **waits)).settings()


TABLE = {  # papers.md section 4: E[(100 - b)-th fastest of 100], mean time 1
    "lognormal": (
        ComputeModel(step=1.0, variation=0.3),
        {0: 2.02, 1: 1.81, 2: 1.70, 4: 1.58, 6: 1.49, 10: 1.38, 20: 1.22},
    ),
    "stragglers": (
        ComputeModel(step=1.0, variation=0.03, straggle_chance=0.02),
        {0: 8.96, 1: 6.38, 2: 3.91, 4: 1.50, 6: 1.09, 10: 1.04, 20: 1.03},
    ),
}


@pytest.mark.parametrize("mix", TABLE)
@pytest.mark.long
def test_the_first_round_of_100_machines_takes_the_time_of_its_order_statistic(mix: str) -> None:
    """The first round ends when the (100 - b)-th of the drawn times has passed; their mean is the table's."""
    compute, table = TABLE[mix]
    draws = [sorted(Stopwatch(compute, i, seed).draw() for i in range(100)) for seed in range(DRAWS)]
    for backups, expected in some(table.items(), SEEDS // 2):
        assert statistics.mean(drawn[99 - backups] for drawn in draws) == pytest.approx(expected, rel=APART), (
            f"{backups} backup workers"
        )
        for seed in range(1 + 3 * MANY):
            job = Job(task=points(100), strategy=Synchronous(100, 1, backup_workers=backups), batch_size=1, seed=seed)
            run = Observed(job, Simulated(network=INSTANT, compute=compute, handling=handling.INSTANT, phantom=True))
            accounting = Accounting(run)
            run.simulation.run()
            assert accounting.moments["shard 0", 1] == pytest.approx(draws[seed][99 - backups], abs=1e-9)


def test_a_step_of_a_round_computes_on_the_same_round_of_every_shard() -> None:
    """Also after a round that was made without its replica, when some shards have made the next and others have not."""
    stormy = Simulated(
        network=NetworkModel(latency=3e-3, jitter=5.0, delay_chance=0.2, delay=2e-2),
        compute=ComputeModel(spread="exponential"),
    )
    _, accounting = play(Synchronous(5, 4, backup_workers=3), stormy, samples=203, epochs=2)
    assert len(accounting.dropped) > 20
    for who, clock in accounting.pushes:
        versions = {accounting.sent_pushes[who, shard, clock][0].version.updates for shard in accounting.shards}
        assert len(versions) == 1, f"push {clock} of {who} was computed on rounds {versions}"


def test_rounds_are_made_where_a_shard_holds_nothing_but_frozen_parameters() -> None:
    def model() -> nn.Module:
        small = nn.Sequential(nn.Linear(6, 60), nn.Linear(60, 3), nn.Linear(3, 3, bias=False))
        small[0].requires_grad_(False)
        small[1].requires_grad_(False)
        return small

    for strategy in (Synchronous(3, 4, backup_workers=1), Bounded(3, 4, staleness=0)):
        run, accounting = play(strategy, UNEVEN, task=classes(model, samples=43))
        assert (run.outcome, len(accounting.shards)) == ("done", 1)


# softsync


def points(samples: int) -> Task:
    data = TensorData(torch.zeros(samples, 4), torch.zeros(samples, dtype=torch.int64))
    return Task(model=lambda: nn.Linear(4, 4), train=lambda: data)


@pytest.mark.parametrize("n", some([1, 2, 6, 15, 30], SEEDS // 2))
@pytest.mark.long
def test_softsyncs_staleness_is_about_n_and_almost_never_above_2n(n: int) -> None:
    """Zhang et al. 2016, section 3: 30 learners, mean about n, P(> 2n) under 1e-4."""
    samples = 30 * (700 if MANY else 150)
    run, accounting = play(
        Softsync(30, 1, n=n), Simulated(network=INSTANT, phantom=True), task=points(samples), batch_size=1
    )
    groups, pushes = accounting.groups["shard 0"], accounting.sent_pushes
    # while all have work: with fewer replicas, fewer pushes make an update
    whole = [(version, group) for version, group in sorted(groups.items()) if version <= 0.95 * len(groups)]
    found = [
        version - 1 - pushes[who, "shard 0", clock][0].version.updates
        for version, group in whole
        for who, clock in group
    ]
    assert statistics.mean(found) == pytest.approx(n, rel=0.07)
    assert sum(staleness > 2 * n for staleness in found) / len(found) < 1e-4
    assert sum(run.simulation.shards[0].staleness.values()) == samples


@pytest.mark.parametrize(("n", "size"), [(1, 4), (2, 2), (3, 1), (4, 1)])
def test_softsync_updates_after_every_floor_of_replicas_by_n_pushes(n: int, size: int) -> None:
    _, accounting = play(Softsync(4, 2, n=n), UNEVEN, samples=203)
    sizes = [len(group) for _, group in sorted(accounting.groups["shard 0"].items())]
    assert set(sizes[4 : len(sizes) // 2]) == {size}
    assert set(sizes) <= set(range(1, size + 1))


def test_softsync_wants_no_pushes_of_the_dead() -> None:
    dying = Simulated(crashes=tuple(Crash(f"replica {i}", 12) for i in (1, 2, 3)))
    run, accounting = play(Softsync(4, 1, n=1, restarts=0), dying, samples=203)
    sizes = [len(group) for _, group in sorted(accounting.groups["shard 0"].items())]
    assert len(run.simulation.killed) == 3
    assert max(sizes) > 1
    assert sizes[-20:] == [1] * 20


def test_what_softsync_has_acknowledged_is_in_every_checkpoint() -> None:
    """An update that has not all its pushes yet is made at once, with those that it has."""
    run = Observed(Job(smooth(), Softsync(4, 1, n=1), batch_size=4, evaluate_every=0), UNEVEN)
    shard, short = run.simulation.shards[0], list[tuple[int, int, int]]()

    def sent(_sender: str, _to: str, message: Any) -> None:
        if (
            isinstance(message, pushing.Pushed)
            and not short
            and message.version.updates > (before := shard.version.updates)
        ):
            shard.handle("coordinator", checkpointing.Snapshot(9), None)
            short.append((before, message.version.updates, shard.version.updates))

    run.simulation.network.before_send = sent
    run.simulation.run()
    [(before, acknowledged, saved)] = short
    assert before < acknowledged == saved


# bounded


OLDER = [{}, {"prefetch": 1}, {"fetch_every": 4}, {"prefetch": 1, "fetch_every": 3, "push_every": 2}]


@pytest.mark.parametrize(("bound", "options"), some(product([0, 1, 3], OLDER)), ids=str)
def test_no_step_begins_more_than_the_bound_ahead_of_what_is_applied(bound: int, options: dict[str, int]) -> None:
    strategy = Bounded(4, 3, staleness=bound, warm_start_steps=5, **options)
    run = Observed(Job(smooth(203), strategy, batch_size=2, epochs=2, evaluate_every=0), UNEVEN)
    lead = Lead(run, bound)
    run.accounted()
    assert run.outcome == "done"
    assert lead.steps >= 204
    assert lead.most == bound, "the bound is not reached: too strict, or never tried"


def test_the_bound_holds_whichever_message_a_replica_dies_at() -> None:
    """Seed 1,009,988 of the sweep died between saying from where on it takes part, and its step."""
    for message in some(range(1, 80)):
        strategy = Bounded(3, 3, staleness=2, fetch_every=3, warm_start_steps=4)
        job = Job(smooth(43), strategy, batch_size=4, epochs=2)
        run = Observed(job, Simulated(crashes=(Crash("replica 0", message),)))
        Lead(run, 2)
        run.accounted()
        assert run.outcome == "done"


class Steady(Watcher):
    """Holds that nothing lands in the parameters that a step computes with, from its beginning to its end."""

    def __init__(self, run: Observed) -> None:
        self.landed_beside = 0
        self._computing: set[str] = set()
        self._in_use: dict[str, int] = {}
        run.watch(self)
        for role, player in run.simulation.driver._players.items():
            if role.startswith("replica"):
                self._watch(role, player)

    def _watch(self, role: str, player: Any) -> None:
        vectors = player.story.gi_frame.f_locals["self"].vectors
        compute, swap = player.worker.compute, vectors.swap

        def computes(batch: Any, answer: Any) -> Any:
            self._computing.add(role)
            return compute(batch, lambda computed: (self._computing.discard(role), answer(computed)))

        def swaps(landing: int) -> None:
            self._in_use[role] = landing
            swap(landing)

        player.worker, vectors.swap = dataclasses.replace(player.worker, compute=computes), swaps

    def delivered(self, sender: str, to: str, message: Message) -> None:
        if isinstance(message, pushing.Fetched) and to in self._computing:
            assert message.slot != self._in_use[to], (
                f"what {sender} sends lands in the parameters that {to} computes with"
            )
            self.landed_beside += 1


@pytest.mark.parametrize("options", [{}, {"fetch_every": 2}, {"push_every": 3, "fetch_every": 3}], ids=str)
@pytest.mark.parametrize("kind", [Downpour, Softsync, Bounded])
def test_what_is_fetched_ahead_never_lands_in_the_parameters_that_a_step_computes_with(
    kind: type[Any], options: dict[str, int]
) -> None:
    run = Observed(Job(smooth(), kind(3, 2, prefetch=1, **options), batch_size=4, epochs=3), UNEVEN)
    steady = Steady(run)
    run.simulation.run()
    assert run.outcome == "done"
    assert steady.landed_beside > 3, "nothing landed while a step computed: this run shows nothing"


@pytest.mark.parametrize("options", [{}, {"prefetch": 1}, {"push_every": 2, "fetch_every": 3}], ids=str)
def test_an_infinite_bound_is_downpour(options: dict[str, int]) -> None:
    """Bit for bit, with the same times: where messages take none, so that saying who takes part takes none either."""
    cluster = Simulated(network=INSTANT, compute=ComputeModel(slow={0: 3.0}), handling=handling.INSTANT)
    runs = [
        play(kind, cluster, epochs=2)[0]
        for kind in (Downpour(4, 3, **options), Bounded(4, 3, staleness=10**9, **options))
    ]
    assert runs[0].vector() == runs[1].vector()
    assert runs[0].simulation.clock.now() == runs[1].simulation.clock.now()
    assert runs[0].vector() != play(Bounded(4, 3, staleness=0, **options), cluster, epochs=2)[0].vector()


def test_a_fetch_holds_all_own_pushes_made_before_it_was_asked() -> None:
    run = Observed(Job(smooth(83), Bounded(3, 2, staleness=2), batch_size=2, evaluate_every=0), UNEVEN)
    asked: dict[tuple[str, str], int] = {}
    pushed: dict[str, int] = {}
    seen: dict[tuple[str, str], int] = {}

    def sent(sender: str, to: str, message: Any) -> None:
        if isinstance(message, pushing.Push):
            pushed[sender] = message.clock
        elif isinstance(message, pushing.Fetch):
            asked[sender, to] = pushed.get(sender, 0)
        elif isinstance(message, pushing.Fetched):
            assert seen.get((to, sender), 0) >= asked[to, sender], f"{to} reads from {sender} without its own writes"

    def delivered(sender: str, to: str, message: Any) -> None:
        if isinstance(message, pushing.Push):
            seen[sender, to] = message.clock

    run.simulation.network.before_send, run.simulation.network.watch = sent, delivered
    run.simulation.run()
    assert run.outcome == "done"
    assert len(pushed) == 3


# the staleness of a push and its learning rate


def line(samples: int) -> Task:
    """Least squares: nothing that saturates hides that it diverges."""
    chance = torch.Generator().manual_seed(5)
    inputs = torch.randn(samples, 6, generator=chance, dtype=torch.float64)
    data = TensorData(inputs, inputs @ torch.arange(6, dtype=torch.float64).unsqueeze(1))
    model = lambda: nn.Linear(6, 1, dtype=torch.float64)  # noqa: E731
    return Task(model=model, train=lambda: data, loss=nn.functional.mse_loss)


def final_loss(strategy: Strategy) -> float:
    task = line(6000 if MANY else 1500)
    run, _ = play(strategy, Simulated(compute=ComputeModel(step=1e-2)), task=task)
    state, data = state_of(run), task.train()
    inputs, targets = data.batch(torch.arange(len(data)))
    return float(((inputs @ state["weight"].T + state["bias"] - targets) ** 2).mean())


@pytest.mark.parametrize("kind", [Downpour, Bounded, Softsync])
@pytest.mark.long
def test_with_30_replicas_a_fixed_learning_rate_fails_where_inverse_scaling_learns(kind: Any) -> None:
    """The shape of Zhang et al. 2016, figure 3. The loss begins at 55."""
    own = {"n": 30} if kind is Softsync else {"staleness": 60} if kind is Bounded else {}
    assert final_loss(Downpour(1, 1, optim("sgd", lr=0.06))) < 1e-6, "the rate is no problem without staleness"
    assert not final_loss(kind(30, 1, optim("sgd", lr=0.06), **own)) < 55
    assert final_loss(kind(30, 1, optim("sgd", lr=0.06), staleness_scaling="inverse", **own)) < 0.5


@pytest.mark.parametrize("kind", [Downpour, Bounded, Softsync])
def test_each_scaling_is_another(kind: Any) -> None:
    runs = {name: play(kind(4, 2, staleness_scaling=name))[0].vector() for name in ("none", "inverse", "exponential")}
    assert len(set(runs.values())) == 3


@pytest.mark.parametrize("which", range(3))
def test_all_shards_go_back_together_also_when_one_falls_before_the_others_have_come_again(which: int) -> None:
    """Seed 14,177 of the sweep: some were about to begin a life in which they would have been alone."""
    role = f"shard {which}"
    cluster = Simulated(crashes=(Crash(role, 14), Crash(role, 1)))
    run, _ = play(Synchronous(2, 3, restarts=3), cluster, epochs=3, snapshot_every="5")
    assert run.outcome == "done"
    assert {shard.version.incarnation for shard in run.simulation.shards} == {2}


# the sweep


def draw(seed: int) -> tuple[Served, dict[str, Any], Simulated]:
    """The job and the faults of a seed."""
    chance = random.Random(seed)
    pick = chance.choice
    replicas, shards = chance.randint(1, 5), chance.randint(1, 4)
    optimizer = Optimizer(pick(("sgd", "momentum", "adagrad")), 0.02)
    cadence = {
        "push_every": pick((1, 1, 2, 3)),
        "fetch_every": pick((1, 1, 2, 3)),
        "prefetch": pick((0, 1)),
        "warm_start_steps": pick((0, 0, 3, 8)),
    }
    scaling = pick(("none", "inverse", "exponential"))
    kind = pick(("synchronous", "backup", "softsync", "bounded", "downpour"))
    strategy: Served
    own: dict[str, Any] = {"staleness_scaling": scaling, **cadence}
    if kind in ("synchronous", "backup"):
        backup = chance.randint(0, replicas - 1) if kind == "backup" else 0
        strategy = Synchronous(replicas, shards, optimizer, push_every=cadence["push_every"], backup_workers=backup)
    elif kind == "softsync":
        strategy = Softsync(replicas, shards, optimizer, n=chance.randint(1, replicas), **own)
    elif kind == "bounded":
        strategy = Bounded(replicas, shards, optimizer, staleness=pick((0, 0, 1, 2, 5)), **own)
    else:
        strategy = Downpour(replicas, shards, optimizer, **own)
    options = {"samples": chance.randint(4, 60), "batch_size": pick((2, 3, 8)), "epochs": pick((1, 2, 3)), "seed": seed}
    options |= {"interrupted": pick((None, None, None, chance.expovariate(20.0)))}
    options |= {
        "evaluate_every": pick((0, 1)),
        "checkpoint_every": pick((0, 1)),
        "lr_schedule": pick(("constant", "linear")),
    }
    network, compute = draw_network(chance), draw_compute(chance, slow=0.2)
    dying = chance.sample(range(replicas), pick((0, chance.randint(0, replicas), replicas)))
    strategy = dataclasses.replace(strategy, restarts=pick((0, 0, 1, 3)))
    lives = [i for i in dying for _ in range(chance.randint(1, 1 + strategy.restarts))]
    crashes = tuple(Crash(f"replica {i}", chance.randint(1, pick((12, 80)))) for i in lives)
    if chance.random() < 0.5:
        fallen = chance.choices(range(shards), k=chance.randint(1, 3))
        crashes += tuple(
            Crash(f"shard {i}", chance.randint(1, 60)) for i in fallen if fallen.count(i) <= 1 + strategy.restarts
        )
        options["snapshot_every"] = pick(("0", "1", "5", "20", "10ms", "1s"))
    restart_seconds = pick((0.0, 1e-3, 0.05, 2.0))
    network = msgspec.structs.replace(
        network, outages=draw_outages(chance, replicas, shards, [crash.role for crash in crashes])
    )
    if (more := random.Random(f"standby {seed}")).random() < 0.4:
        strategy = dataclasses.replace(strategy, standby=1)
        roles = [f"{kind} {i}" for kind in ("shard", "standby") for i in range(shards)]
        fallen = [crash.role for crash in crashes]
        for role in more.choices(roles, k=more.randint(0, 4)):
            if fallen.count(role) <= strategy.restarts:
                fallen.append(role)
                crashes += (Crash(role, more.randint(1, more.choice((30, 90)))),)
    crashes += draw_revivals(random.Random(f"coordinator {seed}"), strategy.restarts)
    if options["evaluate_every"] and (late := random.Random(f"evaluator {seed}")).random() < 0.4:
        crashes += (Crash("evaluator", late.randint(1, late.choice((2, 20)))),)
    if (local := random.Random(f"local {seed}")).random() < 0.3:
        part = options["samples"] // replicas // options["batch_size"]
        strategy = stepping_locally(strategy, max(1, min(local.randint(1, 5), part)), local)
    return (
        strategy,
        options,
        Simulated(network=network, compute=compute, crashes=crashes, restart_seconds=restart_seconds),
    )


def stepping_locally(strategy: Any, steps: int, chance: random.Random) -> Any:
    """The same strategy with local steps, and without what these give no meaning."""
    own: dict[str, Any] = {"push_every": steps, "local_optimizer": optim(chance.choice(("sgd", "adamw")), 0.01)}
    if not isinstance(strategy, Synchronous):
        own |= {"fetch_every": 1, "prefetch": 0, "warm_start_steps": 0, "staleness_scaling": "none"}
        own |= {} if isinstance(strategy, Softsync) else {"optimizer": Optimizer("sgd", 0.5)}
    if chance.random() < 0.5 and hasattr(strategy, "stagger") and not getattr(strategy, "backup_workers", 0):
        several = strategy.shards > 1
        own |= {"stagger": True, "stagger_delay": chance.randint(0, steps - 1) * several}
        own |= {"stagger_mix": chance.choice((0.0, 0.5)) * several}
    return dataclasses.replace(strategy, **own)


SCALES = {
    "none": lambda _: 1.0,
    "inverse": lambda tau: 1 / max(tau, 1),
    "exponential": lambda tau: 2.718281828459045 ** (1 - max(tau, 1)),
}
TWINS: dict[str, Any] = {
    "sgd": lambda p: torch.optim.SGD(p, lr=0.02),
    "momentum": lambda p: torch.optim.SGD(p, lr=0.02, momentum=0.9),
    "adagrad": lambda p: torch.optim.Adagrad(p, lr=0.02),
}


def twin(accounting: Accounting, shard: str, strategy: Any, job: Job) -> torch.Tensor:
    """What plain `torch.optim` makes of the updates of a shard, weighted by hand."""
    parameter = nn.Parameter(accounting.initial[shard].view(torch.float32).clone())
    optimizer = TWINS[strategy.optimizer.name]([parameter])
    applied, total = 0, accounting.plan.samples * job.epochs
    for version, group in sorted(accounting.groups[shard].items()):
        pushes = [accounting.sent_pushes[who, shard, clock] for who, clock in group]
        values = [payload.view(torch.float32) for _, payload in pushes]
        scales = [
            SCALES[getattr(strategy, "staleness_scaling", "none")](version - 1 - accounting.based[who, shard, clock])
            for who, clock in group
        ]
        falls = job.lr_schedule == "linear" and not strategy.local
        rate = strategy.optimizer.lr * (1 - min(1.0, applied / total) if falls else 1)
        applied += sum(push.samples for push, _ in pushes)
        if isinstance(strategy, Synchronous):
            union = sum(push.samples for push, _ in pushes)
            several = strategy.push_every > 1 and not strategy.local
            weights = [job.batch_size if several else push.samples for push, _ in pushes]
            weights, union = (weights, union) if union else ([1] * len(pushes), len(pushes))
            parameter.grad = sum(v * w / union for v, w in zip(values, weights, strict=True))  # type: ignore[assignment]
        elif isinstance(strategy, Softsync):
            parameter.grad = sum(v * s for v, s in zip(values, scales, strict=True)) / len(values)  # type: ignore[assignment]
        else:
            (parameter.grad,), (scale,) = values, scales
            rate *= scale
        optimizer.param_groups[0]["lr"] = rate
        optimizer.step()
    return parameter.detach()


def hold(seed: int) -> Counter[str]:
    """Run a seed, and hold everything that must hold; returns the ways in which it ended."""
    strategy, options, cluster = draw(seed)
    samples, moment = options.pop("samples"), options.pop("interrupted")
    task = smooth(samples)
    job = Job(task=task, strategy=strategy, **options)
    run = Observed(job, cluster)
    run.simulation.stopped = lambda: "Ctrl-C" if moment is not None and run.simulation.clock.now() > moment else None
    accounting, endings = Accounting(run), Endings(run)
    if isinstance(strategy, Bounded):
        Lead(run, strategy.staleness)
    run.simulation.run()
    died = [role for role in run.simulation.killed if role != "coordinator"]  # which changes nothing
    accounting.finish(run.outcome, died)
    mortal = [role for role in died if role.startswith("replica")]
    cause, counted = endings.hold(), run.summary()
    # a late change of local steps is pushed again, and its minibatches are not dealt again
    assert counted["dropped"] == len(accounting.dropped) or died or strategy.local
    if run.outcome == "done" and not died:
        assert counted["samples"] == samples * options["epochs"]
    for index, shard in enumerate(run.simulation.shards):
        role = f"shard {index}"
        unsettled = run.outcome == "failed" and (isinstance(strategy, Softsync) or strategy.standby)
        last = run.simulation.supervisor._gone.get(role)
        dead = last is not None and last.incarnation == run.simulation.network.endpoints[role].incarnation
        if dead or shard.waits() or unsettled:
            continue  # it died, and no other took its place yet; or half an update was gathered when the job failed
        assert shard.version.updates == len(accounting.groups[role])
        assert shard.samples == sum(
            accounting.sent_pushes[who, role, clock][0].samples
            for group in accounting.groups[role].values()
            for who, clock in group
        )
        if role in accounting.initial:
            held = shard.held.moving().view(torch.float32)  # type: ignore[attr-defined]
            torch.testing.assert_close(held, twin(accounting, role, strategy, job), rtol=1e-3, atol=1e-4)
        if isinstance(strategy, Synchronous) and not mortal and role in accounting.shards and run.outcome != "failed":
            assert accounting.groups[role] == accounting.groups[accounting.shards[0]]
    if (
        isinstance(strategy, Synchronous) and not (mortal or strategy.local) and run.outcome == "done"
    ):  # also where all have gone back, and made rounds anew
        expected = union_sgd(
            accounting, task, strategy.optimizer.name, 0.02, seed, options["batch_size"], options["lr_schedule"]
        )
        torch.testing.assert_close(vector_of(run), expected, rtol=1e-3, atol=1e-4)
    return ways(run, cause)


@pytest.mark.parametrize(
    "strategy", [Synchronous(2, 2), Sandblaster(2, 2, iterations=4)], ids=lambda strategy: strategy.name
)
def test_a_ctrl_c_while_the_job_ends_counts_where_all_go_back(strategy: Any) -> None:
    """There is work again once a shard has died, and nobody is to be asked twice."""
    run = Observed(
        Job(classes(mlp), dataclasses.replace(strategy, restarts=1)), Simulated(network=NetworkModel(latency=5e-3))
    )
    simulation = run.simulation

    def asked() -> str | None:
        if not run.told(records.Ending):
            return None
        simulation.clock.call_later(0.0, simulation.kill, "shard 1")
        return "Ctrl-C"

    simulation.stopped = asked
    endings = Endings(run)
    simulation.run()
    told = run.told(records.Ending, records.Rewound)
    assert [type(record) for record in told] == [records.Ending, records.Rewound, records.Ending]
    assert told[-1] == records.Ending.of(Cause.INTERRUPTED, "Ctrl-C")
    assert endings.hold() is Cause.INTERRUPTED


def test_a_job_that_goes_back_once_its_target_was_reached_trains_until_it_is_reached_again() -> None:
    """What had reached it was lost with a shard, and the end named an older checkpoint as what had."""
    job = Job(
        classes(mlp),
        Synchronous(2, 2, restarts=1, optimizer=optim("sgd", lr=0.1)),
        epochs=60,
        target_accuracy=0.4,
        checkpoint_every=20,
    )
    run = Observed(job, Simulated(network=NetworkModel(latency=5e-3)))
    simulation, killed = run.simulation, []

    def asked() -> None:
        if not killed and bool(run.told(records.Ending)):
            killed.append(simulation.clock.call_later(0.0, simulation.kill, "shard 1"))

    simulation.stopped = asked
    simulation.run()
    moves = run.told(records.Ending, records.Rewound, records.Finished)
    assert [type(one) for one in moves] == [records.Ending, records.Rewound, records.Ending, records.Finished]
    assert moves[-1].cause is Cause.TARGET_REACHED
    after = run.records[run.records.index(moves[1]) :]
    reached, saved = (
        [i for i, one in enumerate(after) if held(one)]
        for held in (_reaches, lambda one: isinstance(one, records.Checkpointed))
    )
    assert reached[0] < saved[-1], "what is saved is of before"
    summary = Summary({"settings": {"target_accuracy": 0.4}})
    for one in run.records:
        summary.take(0.0, one)
    assert summary.reached == {"seconds": 0.0, "epochs": next(one.epoch for one in after if _reaches(one))}  # type: ignore[attr-defined]


def _reaches(record: records.Record) -> bool:
    return isinstance(record, records.Tested) and (record.accuracy or 0.0) >= 0.4


ONCE = {
    "what was given back is told of after pushes of what was dealt since": 567,
    "a late replica at an heir whose floor was forgotten": 194,
    "a ruler replaced before the job began": 682,
    "a ruling that only the heir's history has": 855,
    "a push that comes again counts as a tick": 859,
    "what is held is not in what a standby is sent": 1245,
    "a fetch of the next life is not the dead one's": 4026,
    "an heir hears of those who died before it was there": 6558,
    "a replica that asked to leave as all went back": 20603,
    "a Ctrl-C while nobody has come again since all went back": 7451,
    "a lead over the last life of one whose next has not joined": 1117,
}
"""Seeds that failed once, and why."""


@pytest.mark.parametrize("why", ONCE)
def test_what_failed_once_does_not_fail_again(why: str) -> None:
    hold(ONCE[why])


MISTAKEN = (12, 14, 34, 47, 52, 88, 116, 126, 134, 155, 156, 170, 182, 214, 225, 286, 614)
"""Seeds of which each mutant that names them fails one or more."""


@pytest.mark.parametrize("seed", MISTAKEN)
def test_a_seed_that_fails_by_a_mistake(seed: int) -> None:
    hold(seed)


@in_chunks(CHUNK)
def test_no_fault_loses_or_repeats_a_gradient_under_any_consistency_and_every_job_ends(seeds: range) -> None:
    found = sweep(seeds, lambda seed: hold(seed), draw)
    hold_floors(found, scaled(FLOORS, seeds, CHUNK))


@pytest.mark.parametrize(
    ("strategy", "crash"),
    [
        (Synchronous(2, 3), None),
        # its last push reached one shard, which has made an update more ever since
        (Synchronous(1, 2), Crash("replica 0", 14)),
        (Synchronous(2, 3), Crash("shard 1", 116)),  # all go back while an evaluation is under way
        (Synchronous(2, 3), Crash("shard 1", 59)),
    ],
    ids=["calm", "a replica dies", "a shard dies", "a shard dies early"],
)
def test_an_evaluation_in_rounds_is_of_one_round(strategy: Synchronous, crash: Crash | None) -> None:
    """A slice that is a round behind the others is fetched again before anything is measured."""
    network = NetworkModel(latency=3e-3, jitter=5.0, delay_chance=0.2, delay=2e-2)
    made: dict[str, tuple[int, int]] = {}
    measured: list[set[tuple[int, int]]] = []
    asked: list[str] = []

    def sent(_sender: str, _to: str, message: Message) -> None:
        if isinstance(message, evaluating.Evaluated):
            measured.append({*made.values()})

    def delivered(sender: str, to: str, message: Message) -> None:
        if to == roles.EVALUATOR and isinstance(message, pushing.Fetched):
            asked.append(sender)
            made[sender] = message.version.incarnation, message.floor

    often = {"evaluate_every": "11minibatches", "snapshot_every": "7"}  # in an epoch, at whose end nothing is pushed
    job = Job(task=classes(mlp, samples=220), strategy=strategy, epochs=2, batch_size=2, **often)
    crashes = (crash,) if crash else ()
    run = Observed(job, Simulated(network, ComputeModel(step=1e-3), crashes, restart_seconds=1e-3))
    run.look(sent, delivered)
    run.simulation.run()
    assert run.outcome == "done"
    assert len(measured) >= 15
    assert all(len(rounds) == 1 for rounds in measured), measured
    assert len(asked) > len(made) * len(measured), "no slice was a round behind: this run shows nothing"
    assert len(asked) < 2 * len(made) * (len(measured) + 1)


@pytest.mark.parametrize(("message", "pause"), some(product([15, 18, 21, 24, 27], [0.0, 1e-3, 5e-3])))
def test_an_evaluator_that_comes_again_measures_although_shards_wait_for_their_standbys(
    message: int, pause: float
) -> None:
    """It is told to measure as soon as it is welcomed, while its shards hold every fetch back."""
    cluster = Simulated(
        network=NetworkModel(latency=1e-3, jitter=1.0),
        compute=ComputeModel(step=1e-3),
        crashes=(Crash("evaluator", message),),
        restart_seconds=pause,
    )
    run, _ = play(Synchronous(2, 2, standby=1, restarts=1), cluster, epochs=10, evaluate_every=1)
    assert run.outcome == "done"
    assert run.simulation.killed == ["evaluator"]
    assert [record.epoch for record in run.told(records.Tested)][-1] == 10
