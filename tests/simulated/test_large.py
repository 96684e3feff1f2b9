"""Large minibatches: LARS and LAMB are those of their papers; accumulated gradients are the union's."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import pytest
import torch
from drawn import SEEDS, some
from oracles import classes, minibatches
from split_jobs import state_of
from torch import nn
from watching.observed import Observed

from distbelief.core import records, roles
from distbelief.core.effects import Batch
from distbelief.core.optimizer import Optimizer
from distbelief.job import Job
from distbelief.places.compute_model import ComputeModel
from distbelief.places.simulated.handling import INSTANT
from distbelief.places.simulated.simulated import Simulated
from distbelief.places.simulated.virtual_cluster import Crash
from distbelief.replica.split_compute import SplitCompute
from distbelief.server import layerwise, optimizers
from distbelief.strategies import Allreduce, Synchronous
from distbelief.strategies.grouped.whole import TorchWhole
from distbelief.tasks import Task
from distbelief.testing.accounting import Accounting, Minibatch
from distbelief.transport.cluster_model import NetworkModel

CALM = Simulated(
    network=NetworkModel(latency=0.0, bandwidth=float("inf")), compute=ComputeModel(spread="constant"), handling=INSTANT
)
"""Rounds take the minibatches in their order."""
Update = Callable[[nn.Module, dict[str, dict[str, torch.Tensor]], float, int], None]


def model() -> nn.Module:
    """163 parameters or so; over five shards, its first weight is cut three times."""
    return nn.Sequential(
        nn.Linear(6, 14), nn.BatchNorm1d(14, track_running_stats=False), nn.Tanh(), nn.Linear(14, 3)
    ).double()


def lars(
    decay: float = 0.01, momentum: float = 0.9, trust: float = 0.001, correction: bool = True, exempt: bool = False
) -> Update:
    """Algorithm 1 of You, Gitman and Ginsburg (2017): v <- m v + rate * local * (g + decay w), w <- w - v; and Goyal's
    remark 2, which rescales v.
    """

    def update(net: nn.Module, state: dict[str, dict[str, torch.Tensor]], rate: float, _step: int) -> None:
        for name, w in net.named_parameters():
            own = state.setdefault(name, {"v": torch.zeros_like(w), "rate": torch.tensor(rate)})
            size, slope = math.sqrt(float((w.data * w.data).sum())), math.sqrt(float((w.grad * w.grad).sum()))
            local = trust * size / (slope + decay * size) if size and slope and not (exempt and w.ndim < 2) else 1.0
            scale = rate / float(own["rate"]) if correction and float(own["rate"]) else 1.0
            own["v"] = momentum * scale * own["v"] + rate * local * (w.grad + decay * w.detach())
            own["rate"] = torch.tensor(rate, dtype=torch.float64)
            w.data -= own["v"]

    return update


def lamb(
    decay: float = 0.01, eps: float = 1e-6, exempt: bool = False, betas: tuple[float, float] = (0.9, 0.999)
) -> Update:
    """Algorithm 2 of You et al. (2020), with the identity for phi."""

    def update(net: nn.Module, state: dict[str, dict[str, torch.Tensor]], rate: float, step: int) -> None:
        for name, w in net.named_parameters():
            own = state.setdefault(name, {"m": torch.zeros_like(w), "v": torch.zeros_like(w)})
            own["m"] = betas[0] * own["m"] + (1 - betas[0]) * w.grad
            own["v"] = betas[1] * own["v"] + (1 - betas[1]) * w.grad**2
            r = (own["m"] / (1 - betas[0] ** (step + 1))) / (
                (own["v"] / (1 - betas[1] ** (step + 1))).sqrt() + eps
            ) + decay * w.detach()
            ratio = (
                float(w.detach().norm() / r.norm())
                if w.detach().norm() and r.norm() and not (exempt and w.ndim < 2)
                else 1.0
            )
            w.data -= rate * ratio * r

    return update


def sgd(decay: float, momentum: float, exempt: bool) -> Update:
    """Momentum, torch's way; decay of all, or of what has two dimensions."""

    def update(net: nn.Module, state: dict[str, dict[str, torch.Tensor]], rate: float, _step: int) -> None:
        for name, w in net.named_parameters():
            g = w.grad + (0.0 if exempt and w.ndim < 2 else decay) * w.detach()
            own = state.setdefault(name, {"v": torch.zeros_like(w)})
            own["v"] = momentum * own["v"] + g
            w.data -= rate * own["v"]

    return update


def reference(
    task: Task, update: Update, rate: Callable[[int], float], batch_size: int, epochs: int = 3
) -> dict[str, torch.Tensor]:
    """A plain loop on minibatches of `batch_size`; `rate` is of the samples that were applied."""
    torch.manual_seed(0)
    net, data, state, applied = task.model().train(), task.train(), dict[str, dict[str, torch.Tensor]](), 0
    for step, (_, numbers) in enumerate(minibatches(len(data), batch_size, epochs, 0)):
        inputs, targets = data.batch(numbers)
        net.zero_grad()
        task.loss(net(inputs), targets).backward()
        update(net, state, rate(applied), step)
        applied += len(numbers)
    return {name: value.detach().clone() for name, value in net.state_dict().items()}


def replayed(
    task: Task, update: Update, rate: Callable[[int], float], made: Sequence[Iterable[Minibatch]], seed: int = 0
) -> dict[str, torch.Tensor]:
    """A plain loop of three epochs whose updates are each of the gradient of the minibatches that are named."""
    torch.manual_seed(seed)
    net, data, state, applied = task.model().train(), task.train(), dict[str, dict[str, torch.Tensor]](), 0
    dealt = [*minibatches(len(data), 4, 3, seed)]
    for step, named in enumerate(made):
        union = [dealt[epoch * len(dealt) // 3 + index] for epoch, index in sorted(named)]
        samples = sum(len(numbers) for _, numbers in union)
        net.zero_grad()
        for key, numbers in union:
            torch.manual_seed(key)
            inputs, targets = data.batch(numbers)
            (task.loss(net(inputs), targets) * (len(numbers) / samples)).backward()
        update(net, state, rate(applied), step)
        applied += samples
    return {name: value.detach().clone() for name, value in net.state_dict().items()}


def task_of(made: Callable[[], nn.Module] = model) -> Task:
    return classes(made, samples=24, dtype=torch.float64)  # type: ignore[no-any-return]


def plainly() -> nn.Module:
    """No batch norm, whose statistics would be those of each minibatch."""
    return nn.Sequential(nn.Linear(6, 14), nn.Tanh(), nn.Linear(14, 3)).double()


def train(task: Task, strategy: Any, cluster: Simulated = CALM, **options: Any) -> Observed:
    shared = {"epochs": 3, "batch_size": 4, "evaluate_every": 0, "checkpoint_every": 0, **options}
    return Observed(Job(task=task, strategy=strategy, **shared), cluster).run()


def apart(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> float:
    assert one.keys() == other.keys()
    return max(float((one[name] - other[name]).abs().max()) for name in one)


STRATEGIES = [
    lambda o: Allreduce(2, o), lambda o: Allreduce(1, o, accumulate=2), lambda o: Synchronous(2, 1, o),
    lambda o: Synchronous(2, 2, o),
    lambda o: Synchronous(2, 5, o), lambda o: Synchronous(1, 3, o, push_every=2), lambda o: Synchronous(2, 3, o,
        standby=1),
    lambda o: Synchronous(1, 2, o, push_every=2, partitions=2, split="neurons"),
    lambda o: Synchronous(1, 5, o, push_every=2, partitions=2, split="neurons", standby=1),
    lambda o: Synchronous(1, 3, o, push_every=2, partitions=2, split="stages"),
    lambda o: Allreduce(2, o, partitions=2, split="neurons"), lambda o: Allreduce(2, o, partitions=3, split="neurons"),
    lambda o: Allreduce(1, o, partitions=2, split="0=columns,2=1", accumulate=2),
]  # fmt: skip
NAMES = [
    "allreduce", "accumulated", "1 shard", "2 shards", "5 shards", "pushed seldom", "standby", "split by neurons",
    "split by neurons, over 5 shards", "split in stages", "allreduce by neurons", "allreduce by neurons over three",
    "one replica, of which one layer is cut",
]  # fmt: skip


UPDATES: list[tuple[str, dict[str, Any], Update]] = [
    ("lars", {}, lars()), ("lamb", {}, lamb()), ("lars", {"trust": 0.01, "momentum": 0.5}, lars(trust=0.01,
        momentum=0.5)),
    ("lamb", {"eps": 1e-3, "exempt": True, "betas": (0.5, 0.9)}, lamb(eps=1e-3, exempt=True, betas=(0.5, 0.9))),
    ("lars", {"correction": False}, lars(correction=False)), ("lars", {"exempt": True}, lars(exempt=True)),
]  # fmt: skip


@pytest.mark.parametrize("which", range(len(STRATEGIES)), ids=NAMES)
def test_lars_and_lamb_are_those_of_the_papers_wherever_a_layer_is_cut(which: int) -> None:
    """Against loops written from the papers, to 1e-12, while the rate changes with every update."""
    task = task_of(plainly)
    for name, options, update in UPDATES if SEEDS >= 1000 else UPDATES[2 * (which % 3) :][:2]:
        lr = 4.0 if name == "lars" and not options.get("exempt") else 0.05
        ours = train(
            task, STRATEGIES[which](Optimizer(name, lr, {"weight_decay": 0.01, **options})), lr_schedule="linear"
        )
        theirs = reference(task, update, lambda applied, lr=lr: lr * (1 - applied / 72), batch_size=8)
        assert apart(state_of(ours), theirs) < 1e-12, (name, options)
        assert apart(theirs, reference(task, update, lambda _: 0.0, batch_size=8)) > 0.01


@pytest.mark.parametrize("partitions", [2, 3])
@pytest.mark.parametrize("name", ["lars", "lamb"])
def test_norms_of_layers_that_partitions_cut_are_of_what_was_clipped(name: str, partitions: int) -> None:
    """Of whole replicas, which are held against torch's clipping elsewhere."""
    task, own = task_of(plainly), made_of(name)
    whole, split = (
        state_of(train(task, Allreduce(2, own, partitions=count, split=way), clip_norm=0.2))
        for count, way in ((1, "auto"), (partitions, "neurons"))
    )
    assert apart(whole, split) < 1e-12
    assert apart(whole, state_of(train(task, Allreduce(2, own)))) > 1e-4


LINEAR: dict[str, Any] = {"epochs": 3, "batch_size": 4, "evaluate_every": 0, "lr_schedule": "linear"}
WILD = {"network": NetworkModel(jitter=3.0), "compute": ComputeModel(spread="exponential")}


OWN = {"lars": (0.5, lars(decay=0.01)), "lamb": (0.01, lamb(decay=0.01))}
"""The rate of each in what follows, and its loop."""


def made_of(name: str) -> Optimizer:
    return Optimizer(name, OWN[name][0], {"weight_decay": 0.01})


def assert_as_in_the_paper(run: Observed, name: str, made: Sequence[Iterable[Minibatch]], seed: int = 0) -> None:
    """A job ends with what a loop from the paper makes of the same updates, which hold every minibatch once."""
    assert sorted(one for group in made for one in group) == [
        (epoch, index) for epoch in range(3) for index in range(6)
    ]
    lr, update = OWN[name]
    theirs = replayed(run.simulation.task, update, lambda applied: lr * (1 - applied / 72), made, seed)
    assert apart(state_of(run), theirs) < 1e-11


def rounds_of(accounting: Accounting) -> list[list[Minibatch]]:
    """The minibatches of each round that counts, the same at all shards."""
    first, *others = (
        [sorted(accounting.batches(group)) for _, group in sorted(accounting.groups[shard].items())]
        for shard in accounting.shards
    )
    assert all(other == first for other in others)
    return first


def strike(strategy: Synchronous, cluster: Simulated, seed: int = 0) -> tuple[Observed, Accounting]:
    job = Job(task_of(plainly), strategy, snapshot_every="5", seed=seed, **LINEAR)
    run = Observed(job, cluster)
    return run, run.accounted()


@pytest.mark.parametrize("which", ["shard 0", "shard 1", "shard 2"])
@pytest.mark.parametrize("standby", [0, 1])
@pytest.mark.parametrize("name", ["lars", "lamb"])
def test_a_death_in_the_middle_of_an_exchange_ends_in_the_same_job(name: str, standby: int, which: str) -> None:
    """Shards die at every message of several rounds; with a standby nobody goes back, and nothing is lost."""
    for moment in some(range(20, 62, 3), SEEDS // 3):
        run, accounting = strike(
            Synchronous(2, 3, made_of(name), standby=standby), Simulated(crashes=(Crash(which, moment),), **WILD)
        )
        assert run.outcome == "done", f"{which} at its message {moment}"
        ways = Counter(type(record) for record in run.told(records.Forgotten, records.Rewound, records.Succeeded))
        assert ways == ({records.Succeeded: 1} if standby else {records.Rewound: 1}), f"{which} at its message {moment}"
        if standby:
            assert run.trained() == 3 * 24
        assert_as_in_the_paper(run, name, rounds_of(accounting))


@pytest.mark.parametrize(("first", "second", "seed"), [(28, 25, 8), (39, 35, 9), (48, 41, 13), (76, 63, 0)])
def test_a_ruler_and_another_shard_that_die_together_leave_no_standby_waiting_for_norms(
    first: int, second: int, seed: int
) -> None:
    """The standby of one had made a round of which that of the ruler knew nothing: it says what it was told."""
    crashes, network = (Crash("shard 0", first), Crash("shard 1", second)), NetworkModel(jitter=3.0)
    run, accounting = strike(Synchronous(2, 3, made_of("lars"), standby=1), Simulated(network, crashes=crashes), seed)
    assert run.outcome == "done"
    assert_as_in_the_paper(run, "lars", rounds_of(accounting), seed)


@pytest.mark.parametrize("victim", ["replica 0.0", "replica 0.1", "replica 1.1"])
@pytest.mark.parametrize("name", ["lars", "lamb"])
def test_partitions_that_die_at_whatever_message_leave_the_parameters_of_the_paper(
    monkeypatch: pytest.MonkeyPatch, name: str, victim: str
) -> None:
    """Also between the norms of whole layers and the update: what was told for a round made again counts nothing."""
    compute, update = SplitCompute.compute, TorchWhole.update
    computed: dict[tuple[str, int, int], Minibatch] = {}
    made: dict[int, list[Minibatch]] = {}
    died = 0

    def remember(split: SplitCompute, batch: Batch, wait: Any) -> Any:
        story: Any = next(part.player for part in run.simulation.parts.values() if part.player._split is split)
        computed[story.role, story._group, story.rounds] = batch.epoch, batch.index
        return (yield from compute(split, batch, wait))

    def note(whole: TorchWhole, *asked: Any) -> None:
        stories: list[Any] = [part.player for part in run.simulation.parts.values()]
        [story] = [story for story in stories if story.whole is whole]
        if roles.is_lead(story.role):
            asked_for = [(member, story._group, story.rounds) for member in story._members]
            made[story.rounds] = [computed[one] for one in asked_for if one in computed]
        update(whole, *asked)

    monkeypatch.setattr(SplitCompute, "compute", remember)
    monkeypatch.setattr(TorchWhole, "update", note)
    messages = some(range(8, 60, 3), SEEDS // 5)
    for message in messages:
        computed.clear()
        made.clear()
        strategy = Allreduce(2, made_of(name), partitions=2, split="neurons", restarts=1, algorithm="ring")
        cluster = Simulated(crashes=(Crash(victim, message),), restart_seconds=0.01)
        job = Job(task_of(plainly), strategy, checkpoint_every=0, **LINEAR)
        run = Observed(job, cluster)
        run.simulation.run()
        assert run.outcome == "done", f"at message {message}"
        assert_as_in_the_paper(run, name, [group for _, group in sorted(made.items())])
        died += victim in run.simulation.killed
    assert died >= 2 * len(messages) // 3


# accumulation


@pytest.mark.parametrize(("replicas", "accumulate"), [(1, 3), (2, 2), (3, 2), (2, 5)])
def test_accumulated_gradients_are_those_of_the_union(replicas: int, accumulate: int) -> None:
    """The last round of an epoch is short, uneven, and its last minibatch has two samples."""
    task = classes(plainly, samples=22, dtype=torch.float64)
    whole = 4 * replicas * accumulate
    theirs = reference(task, sgd(0.03, 0.9, exempt=False), lambda _: 0.1, batch_size=whole)
    optimizer = Optimizer("momentum", 0.1, {"weight_decay": 0.03})
    for bucket_mb in (25.0, 0.0004):
        run = train(task, Allreduce(replicas, optimizer, accumulate=accumulate, bucket_mb=bucket_mb))
        assert apart(state_of(run), theirs) < 1e-12
        assert run.trained() == 66
    assert (
        apart(theirs, reference(task, sgd(0.03, 0.9, exempt=False), lambda _: 0.1, batch_size=whole // accumulate))
        > 1e-3
    )


# the learning rate


def test_the_rate_is_scaled_and_warmed_up_on_every_strategy_in_rounds() -> None:
    """A global batch of 16 and a base batch of 4: linear is 4 times the rate, sqrt twice, after 1.5 epochs."""
    task = classes(plainly, samples=32, dtype=torch.float64)

    def rate(scale: float, gradual: bool) -> Callable[[int], float]:
        return lambda applied: 0.05 * (scale if applied >= 48 else 1 + (scale - 1) * applied / 48 if gradual else 1.0)

    seen = []
    for scaling, scale in (("linear", 4.0), ("sqrt", 2.0)):
        for warmup in ("gradual", "constant"):
            theirs = reference(task, sgd(0.0, 0.9, exempt=False), rate(scale, warmup == "gradual"), batch_size=16)
            own = {"lr_scaling": scaling, "base_batch": 4}
            optimizer = Optimizer("momentum", 0.05)
            for strategy in (Allreduce(2, optimizer, accumulate=2, **own), Synchronous(4, 2, optimizer, **own)):
                ours = state_of(train(task, strategy, warmup=warmup, warmup_epochs=1.5))
                assert apart(ours, theirs) < 1e-12
            seen.append(theirs)
    assert min(apart(one, other) for i, one in enumerate(seen) for other in seen[:i]) > 1e-4


# weight decay


@pytest.mark.parametrize("strategy", STRATEGIES[:5], ids=NAMES[:5])
def test_biases_and_normalisations_do_not_decay(strategy: Any) -> None:
    task = task_of(plainly)
    options = {"weight_decay": 0.3, "momentum": 0.9}
    theirs, all_decay = (
        reference(task, sgd(0.3, 0.9, exempt), lambda _: 0.05, batch_size=8) for exempt in (True, False)
    )
    assert apart(state_of(train(task, strategy(Optimizer("sgd", 0.05, options, decay_exempt=True)))), theirs) < 1e-12
    assert apart(state_of(train(task, strategy(Optimizer("sgd", 0.05, options)))), all_decay) < 1e-12
    assert apart(theirs, all_decay) > 1e-3


def test_both_optimizers_refuse_what_they_cannot_have() -> None:
    parameter = [{"params": [nn.Parameter(torch.zeros(2, 2))]}]
    for name, options, says in (
        ("lars", {"trust": -1.0}, "trust must be 0 or more"), ("lamb", {"betas": (0.9, 1.0)},
            "betas must be two numbers"),
        ("lars", {"betas": (0.9, 0.9)}, "unknown option of optimizer lars 'betas'"),
    ):  # fmt: skip
        with pytest.raises(optimizers.UsageError, match=says):
            optimizers.build(Optimizer(name, 0.1, options), parameter)


def test_a_layer_of_nothing_but_zeros_steps_at_the_rate_itself() -> None:
    w = nn.Parameter(torch.zeros(2, 2))
    w.grad = torch.ones(2, 2)
    layerwise.LARS([w], lr=0.5).step()
    assert torch.equal(w.data, torch.full((2, 2), -0.5))
