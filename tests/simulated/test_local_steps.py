"""Local steps against plain PyTorch: each replica's own optimizer, and the shards' along the changes."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from oracles import FALLS, minibatches, sequential, smooth
from split_jobs import state_of, vector_of
from torch import nn
from watching.observed import Observed

from distbelief.core.consistency import Members
from distbelief.core.optimizer import Optimizer, optim
from distbelief.errors import UsageError
from distbelief.job import Job
from distbelief.places.compute_model import ComputeModel
from distbelief.places.simulated.simulated import Simulated
from distbelief.places.simulated.virtual_cluster import Crash
from distbelief.server.optimizers import build
from distbelief.strategies import Bounded, Downpour, Strategy, Synchronous
from distbelief.tasks import Task
from distbelief.testing.accounting import Accounting, life
from distbelief.transport.cluster_model import NetworkModel

INSTANT = NetworkModel(latency=0.0, bandwidth=float("inf"))
EVEN = Simulated(network=INSTANT, compute=ComputeModel(spread="constant"))
UNEVEN = Simulated(
    network=NetworkModel(jitter=5.0, delay_chance=0.05, delay=3e-3),
    compute=ComputeModel(spread="exponential", slow={0: 3.0}),
)
CLOSE = {"rtol": 1e-12, "atol": 1e-12}
ADAMW = optim("adamw", 0.01)


def play(strategy: Strategy, cluster: Simulated | None = None, **options: Any) -> tuple[Observed, Accounting]:
    task = options.pop("task", None) or smooth(43, torch.float64)
    job = Job(task, strategy, **{"epochs": 3, "batch_size": 4, "evaluate_every": 0, **options})
    run = Observed(job, cluster)
    return run, run.accounted()


class Delayed:
    """Delayed Nesterov as the paper's algorithm lists it, for a constant number of replicas."""

    def __init__(self, lr: float, beta: float, c: float, n: int) -> None:
        self.lr, self.beta, self.c, self.n, self.count = lr, beta, c, n, 0
        self.m: Any = 0.0
        self.d: Any = 0.0

    def step(self, theta: torch.Tensor, delta: torch.Tensor) -> torch.Tensor:
        self.d, self.count, n = self.d + delta, self.count + 1, self.n
        if self.count % n:
            return theta - self.lr * (self.c * self.beta * self.m + delta / n)
        self.m, self.d = self.beta * self.m + self.d / n, 0.0
        return theta - self.lr * ((1 - self.c * n + self.c) * self.beta * self.m + delta / n)


class Momentum:
    """SGD along changes, with torch's Nesterov."""

    def __init__(self, lr: float, beta: float = 0.0) -> None:
        self.lr, self.beta = lr, beta
        self.v: Any = 0.0

    def step(self, theta: torch.Tensor, delta: torch.Tensor) -> torch.Tensor:
        self.v = self.beta * self.v + delta
        return theta - self.lr * (delta + self.beta * self.v)


def expected(
    accounting: Accounting, outer: Any, local: Any = torch.optim.AdamW, lr: float = 0.01, **of: Any
) -> torch.Tensor:
    """The shard's vector after all updates; each change is computed from the version that its replica had fetched."""
    schedule, clip = of.pop("schedule", lambda _: 1.0), of.pop("clip", 0.0)
    replicas = len({who.partition(" again")[0] for who, _ in accounting.pushes})
    task = smooth(of.pop("samples", 43), torch.float64)
    torch.manual_seed(0)
    model, data = task.model(), task.train()
    theta = nn.utils.parameters_to_vector(model.parameters()).detach()
    versions, applied, movers = [theta], [0], {}
    per_epoch = -(-len(data) // 4)
    order = enumerate(minibatches(len(data), 4, 3, 0))
    batches = {divmod(at, per_epoch): numbers for at, (_, numbers) in order}
    for _, group in sorted(accounting.groups["shard 0"].items()):
        changes = []
        for who, clock in group:
            at = accounting.based[who, "shard 0", clock]
            base, accrued = versions[at], 0
            if who not in movers:
                own = [nn.Parameter(p.detach().clone()) for p in model.parameters()]
                movers[who] = own, local(own, lr=lr, **of)
            own, optimizer = movers[who]
            nn.utils.vector_to_parameters(base.clone(), own)
            taken = accounting.pushes[who, clock]
            for one in taken:
                for theirs, mine in zip(model.parameters(), own, strict=True):
                    theirs.data, theirs.grad = mine.detach().clone(), None
                inputs, targets = data.batch(batches[one])
                task.loss(model(inputs), targets).backward()
                for theirs, mine in zip(model.parameters(), own, strict=True):
                    mine.grad = theirs.grad
                if clip:
                    nn.utils.clip_grad_norm_(own, clip)
                optimizer.param_groups[0]["lr"] = lr * schedule((applied[at] + accrued * replicas) / (3 * len(data)))
                optimizer.step()
                accrued += len(batches[one])
            changes.append((accrued, base - nn.utils.parameters_to_vector(own).detach()))
        whole = sum(samples for samples, _ in changes)
        theta = outer.step(theta, sum(change * (samples / whole) for samples, change in changes))
        versions.append(theta)
        applied.append(applied[-1] + whole)
    return theta


@pytest.mark.parametrize(
    ("outer", "theirs"),
    [
        (optim("nesterov", 0.7), lambda: Momentum(0.7, 0.9)),
        (optim("average"), lambda: Momentum(1.0)),
        (optim("sgd", 0.5), lambda: Momentum(0.5)),
    ],
    ids=["nesterov", "average", "sgd"],
)
@pytest.mark.parametrize("shards", [1, 3])
def test_rounds_of_local_steps_are_diloco(outer: Optimizer, theirs: Any, shards: int) -> None:
    strategy = Synchronous(3, shards, outer, push_every=3, local_optimizer=ADAMW)
    run, accounting = play(strategy, UNEVEN)
    torch.testing.assert_close(vector_of(run), expected(accounting, theirs()), **CLOSE)


def test_the_rate_of_local_steps_follows_the_samples_of_the_job_and_gradients_are_clipped() -> None:
    strategy = Synchronous(3, 2, optim("nesterov", 0.7), push_every=3, local_optimizer=ADAMW)
    run, accounting = play(strategy, UNEVEN, lr_schedule="cosine", clip_norm=0.1)
    mine = {"schedule": FALLS["cosine"], "clip": 0.1}
    torch.testing.assert_close(vector_of(run), expected(accounting, Momentum(0.7, 0.9), **mine), **CLOSE)
    for name in mine:
        other = expected(accounting, Momentum(0.7, 0.9), **{key: mine[key] for key in mine if key != name})
        assert not torch.allclose(vector_of(run), other, rtol=1e-6), f"{name} makes no difference"


@pytest.mark.parametrize("share", [0.0, 1 / 3])
def test_local_steps_that_wait_for_nobody_are_delayed_nesterov(share: float) -> None:
    outer = optim("delayed-nesterov", 0.7, momentum=0.8, share=share)
    run, accounting = play(Downpour(3, 1, outer, push_every=3, local_optimizer=ADAMW), EVEN)
    assert len(accounting.groups["shard 0"]) > 9
    torch.testing.assert_close(vector_of(run), expected(accounting, Delayed(0.7, 0.8, share, 3)), **CLOSE)


def test_local_steps_by_sgd_that_wait_for_nobody() -> None:
    strategy = Downpour(3, 1, optim("sgd", 0.4), push_every=3, local_optimizer=optim("momentum", 0.05))
    run, accounting = play(strategy, UNEVEN)
    outer = Momentum(0.4)
    torch.testing.assert_close(
        vector_of(run), expected(accounting, outer, torch.optim.SGD, lr=0.05, momentum=0.9), **CLOSE
    )


@pytest.mark.parametrize("split", [{}, {"partitions": 2, "split": "stages"}], ids=["whole", "split"])
def test_one_replica_at_rate_1_is_the_plain_loop_of_its_optimizer(split: Any) -> None:
    task = smooth(43, torch.float64)
    strategy = Downpour(1, 2, optim("average"), push_every=5, local_optimizer=ADAMW, **split)
    run, _ = play(strategy, task=task, lr_schedule="linear")
    theirs = sequential(task, "adamw", lr=0.01, epochs=3, schedule="linear")
    torch.testing.assert_close(state_of(run), theirs, **CLOSE)


def test_one_step_of_plain_sgd_is_a_round_of_gradients() -> None:
    """But for rounding: a change is a difference of parameters, and theta - (theta - x) is seldom x."""
    local = Synchronous(3, 2, optim("average"), local_optimizer=optim("sgd", 0.05))
    pushed = Synchronous(3, 2, optim("sgd", 0.05))
    ours, theirs = (vector_of(play(strategy, EVEN)[0]) for strategy in (local, pushed))
    torch.testing.assert_close(ours, theirs, **CLOSE)


def test_all_replicas_in_step_make_the_milestones_of_rounds() -> None:
    """Where all have fetched before one pushes, delayed Nesterov ends each period where rounds of Nesterov are."""
    options: dict[str, Any] = {"push_every": 2, "local_optimizer": ADAMW}
    task = smooth(48, torch.float64)
    late = Bounded(3, 1, optim("delayed-nesterov", 0.7), staleness=0, **options)
    rounds = Synchronous(3, 1, optim("nesterov", 0.7), **options)
    ours, theirs = (vector_of(play(strategy, EVEN, task=task)[0]) for strategy in (late, rounds))
    torch.testing.assert_close(ours, theirs, **CLOSE)


@pytest.mark.parametrize("message", range(4, 30, 4))
def test_a_replica_that_dies_begins_anew_from_what_it_fetches(message: int) -> None:
    cluster = Simulated(network=UNEVEN.network, compute=UNEVEN.compute, crashes=(Crash("replica 1", message),))
    outer = optim("nesterov", 0.7)
    for restarts in (0, 1):
        strategy = Synchronous(3, 1, outer, push_every=3, local_optimizer=ADAMW, restarts=restarts)
        run, accounting = play(strategy, cluster)
        assert run.simulation.killed
        torch.testing.assert_close(vector_of(run), expected(accounting, Momentum(0.7, 0.9)), **CLOSE)


@pytest.mark.parametrize("message", range(9, 49, 8))
def test_a_standby_has_the_momentum_and_the_period(message: int) -> None:
    outer = optim("delayed-nesterov", 0.7, share=0.2)
    strategy = Downpour(3, 1, outer, push_every=3, local_optimizer=ADAMW, standby=1)
    cluster = Simulated(network=INSTANT, compute=UNEVEN.compute, crashes=(Crash("shard 0", message),))
    run, accounting = play(strategy, cluster)
    assert run.simulation.killed
    torch.testing.assert_close(vector_of(run), expected(accounting, Delayed(0.7, 0.9, 0.2, 3)), **CLOSE)


def test_a_shard_that_takes_over_counts_only_the_replicas_that_are_left() -> None:
    policy = Members("none", replicas=3)
    policy.begin([])
    assert policy.taking_part == 3, "those that are starting"
    policy.begin([("replica 0", 0), ("replica 2", 1)])
    assert policy.taking_part == 2


def changes_of(accounting: Accounting, who: str) -> list[tuple[int, Any]]:
    """The clock of each push of a replica, and what it sent to the only shard."""
    sent = accounting.sent_pushes
    return [(clock, sent[one, to, clock]) for one, to, clock in sorted(sent) if one == who]


def test_a_change_that_is_late_for_its_round_is_pushed_again() -> None:
    """Its minibatches are not repeated, but for those of the last round of an epoch; and no replica is left out."""
    slow = Simulated(network=INSTANT, compute=ComputeModel(spread="constant", slow={0: 2.5}))
    options: dict[str, Any] = {"push_every": 2, "local_optimizer": optim("sgd", 0.05), "quorum": 2}
    task = smooth(240, torch.float64)
    run, accounting = play(Synchronous(3, 1, optim("average"), **options), slow, task=task, epochs=1)
    late = [clock for who, clock in sorted(accounting.dropped) if who == "replica 0"]
    sent = dict(changes_of(accounting, "replica 0"))
    again = [clock for clock in late if clock + 1 in sent]
    assert len(again) > 3
    for clock in again:
        (before, change), (after, same) = sent[clock], sent[clock + 1]
        assert (before.steps, before.samples) == (after.steps, after.samples)
        assert torch.equal(change, same)
        assert clock + 1 not in late, "it comes first in the next round, and is late again"
    theirs = expected(accounting, Momentum(1.0), torch.optim.SGD, 0.05, samples=240)
    torch.testing.assert_close(vector_of(run), theirs, **CLOSE)
    assert run.summary()["samples"] == 240


def test_a_weight_of_speed_is_samples_times_samples_a_second() -> None:
    uneven = Simulated(network=INSTANT, compute=ComputeModel(spread="constant", slow={0: 4.0}))
    options: dict[str, Any] = {"push_every": 2, "local_optimizer": ADAMW, "push_weight": "speed"}
    _, accounting = play(Synchronous(3, 1, optim("average"), **options), uneven)
    first = {who: changes_of(accounting, who)[0][1][0] for who in ("replica 0", "replica 1")}
    assert first["replica 1"].weight == pytest.approx(4 * first["replica 0"].weight)
    assert first["replica 1"].weight == pytest.approx(8 * 8 / 0.002, rel=1e-3)


def test_steps_by_speed_are_those_of_the_fastest_in_proportion() -> None:
    uneven = Simulated(network=INSTANT, compute=ComputeModel(spread="constant", slow={0: 4.0, 1: 2.0, 2: 10.0}))
    strategy = Downpour(4, 1, optim("delayed-nesterov"), push_every="auto:24", local_optimizer=ADAMW)
    _, accounting = play(strategy, uneven, task=smooth(4000, torch.float64), epochs=1)
    steps = {index: {push.steps for _, (push, _) in changes_of(accounting, f"replica {index}")} for index in range(4)}
    assert max(steps[3]) == 24
    assert 6 in steps[0]
    assert 12 in steps[1]
    assert 5 in steps[2], "fewer than five steps, or a number that does not follow the speed"


def test_steps_by_speed_are_at_most_those_that_are_named() -> None:
    options: dict[str, Any] = {"push_every": "auto:3", "local_optimizer": ADAMW}
    _, accounting = play(Downpour(2, 2, optim("delayed-nesterov"), **options), UNEVEN)
    assert max(push.steps for push, _ in accounting.sent_pushes.values()) == 3
    with pytest.raises(UsageError, match="--push-every auto:3: with --partitions"):
        play(Downpour(2, 2, optim("delayed-nesterov"), partitions=2, split="stages", **options))


def streaming(task: Task, run: Observed, replicas: int, steps: int, delay: int, mix: float) -> Any:
    """Streaming DiLoCo by hand, of equal replicas in step: one epoch, AdamW inside and Nesterov outside.

    At its end what each fragment has changed since it was sent is sent as well.
    """
    plan = run.simulation.coordinator.plan
    parts = [slice(held.moving.start // 8, held.moving.stop // 8) for held in plan.assignments]
    phases = [-(-(number + 1) * steps // len(parts)) for number in range(len(parts))]
    torch.manual_seed(0)
    model, data = task.model(), task.train()
    theta = nn.utils.parameters_to_vector(model.parameters()).detach()
    outers = [Momentum(0.7, 0.9) for _ in parts]
    owns = [[nn.Parameter(p.detach().clone()) for p in model.parameters()] for _ in range(replicas)]
    optimizers = [torch.optim.AdamW(own, lr=0.01) for own in owns]
    order = [numbers for _, numbers in minibatches(len(data), 4, 1, 0)]
    total = len(order) // replicas
    due: dict[int, list[tuple[int, torch.Tensor]]] = {}

    def send(number: int, step: int) -> None:
        here = [nn.utils.parameters_to_vector(own).detach()[parts[number]] for own in owns]
        change = sum(theta[parts[number]] - mine for mine in here) / replicas
        due.setdefault(step + delay, []).append((number, outers[number].step(theta[parts[number]].clone(), change)))

    def take(step: int) -> None:
        for number, value in due.pop(step, []):
            theta[parts[number]] = value
            for own in owns:
                mine = nn.utils.parameters_to_vector(own).detach()
                mine[parts[number]] = mix * mine[parts[number]] + (1 - mix) * value
                nn.utils.vector_to_parameters(mine.clone(), own)

    for step in range(1, total + 1):
        for index, (own, optimizer) in enumerate(zip(owns, optimizers, strict=True)):
            for theirs, mine in zip(model.parameters(), own, strict=True):
                theirs.data, theirs.grad = mine.detach().clone(), None
            inputs, targets = data.batch(order[(step - 1) * replicas + index])
            task.loss(model(inputs), targets).backward()
            for theirs, mine in zip(model.parameters(), own, strict=True):
                mine.grad = theirs.grad
            optimizer.step()
        take(step)
        for number, phase in enumerate(phases):
            if (step - phase) % steps == 0 and step >= phase:
                send(number, step)
        take(step)
    for step in sorted(due):
        take(step)
    for number in range(len(parts)):
        send(number, 10**9)
    take(10**9 + delay)
    return theta


@pytest.mark.parametrize(("shards", "delay", "mix"), [(2, 0, 0.0), (3, 1, 0.5), (4, 2, 0.25), (2, 3, 1.0)])
def test_staggered_rounds_are_streaming_diloco(shards: int, delay: int, mix: float) -> None:
    task = smooth(96, torch.float64)
    options: dict[str, Any] = {"stagger": True, "stagger_delay": delay, "stagger_mix": mix}
    strategy = Synchronous(2, shards, optim("nesterov", 0.7), push_every=4, local_optimizer=ADAMW, **options)
    run, _ = play(strategy, EVEN, task=task, epochs=1)
    theirs = streaming(task, run, 2, 4, delay, mix)
    torch.testing.assert_close(vector_of(run), theirs, **CLOSE)


def test_one_shard_that_is_staggered_is_not() -> None:
    options: dict[str, Any] = {"push_every": 3, "local_optimizer": ADAMW}
    one, other = (
        vector_of(play(Synchronous(3, 1, optim("nesterov", 0.7), stagger=stagger, **options), UNEVEN)[0])
        for stagger in (False, True)
    )
    assert torch.equal(one, other)


def test_a_fresh_replica_is_no_quorum_of_one() -> None:
    """Where each push makes a round, a new replica steps from the shards' model, and does not replace it by its own."""
    cluster = Simulated(network=INSTANT, compute=EVEN.compute, crashes=(Crash("replica 1", 9),), restart_seconds=1e-3)
    options: dict[str, Any] = {"push_every": 2, "quorum": 1, "local_optimizer": optim("sgd", 0.05)}
    run, accounting = play(Synchronous(2, 1, optim("average"), **options), cluster)
    assert run.simulation.killed
    again = [version for (who, _, _), version in accounting.based.items() if who == life("replica 1", 1)]
    assert min(again) > 0
    theirs = expected(accounting, Momentum(1.0), torch.optim.SGD, 0.05)
    torch.testing.assert_close(vector_of(run), theirs, **CLOSE)


@pytest.mark.parametrize(
    ("outer", "period", "positions"),
    [
        (optim("nesterov", 0.7), 0, (0.867, 0.5443, -0.01913, -0.869217)),
        (optim("momentum", 1.0, momentum=0.5), 0, (0.9, 0.65, 0.225, -0.3875)),  # SlowMo
        (optim("delayed-nesterov", 0.7), 2, (0.965, 0.8005, 0.6955, 0.24995)),
        (optim("delayed-nesterov", 0.7, share=0.25), 2, (0.965, 0.824125, 0.6955, 0.3263375)),
        (optim("delayed-nesterov", 0.7, share=0.5), 2, (0.965, 0.84775, 0.6955, 0.402725)),
        (optim("delayed-nesterov", 0.7, share=1.0), 2, (0.965, 0.895, 0.6955, 0.5555)),
        (optim("delayed-nesterov", 0.7), 4, (0.9825, 0.9475, 0.895, 0.6675)),
        (optim("delayed-nesterov", 0.7), 1, (0.867, 0.5443, -0.01913, -0.869217)),
    ],
    ids=str,
)
def test_changes_are_followed_as_by_hand(outer: Optimizer, period: int, positions: tuple[float, ...]) -> None:
    theta = torch.ones(1, dtype=torch.float64)
    optimizer, made = build(outer, [{"params": [theta]}]), []
    for change in (0.1, 0.2, 0.3, 0.4):
        theta.grad = torch.full_like(theta, change)
        optimizer.param_groups[0].update({"period": period} if period else {})
        optimizer.step()
        made.append(float(theta))
    assert made == pytest.approx(positions, abs=1e-12)
