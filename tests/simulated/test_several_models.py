"""Two models with an optimizer each, in one job: what each is stepped with, in which order, and what a death costs."""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Callable
from typing import Any

import msgspec
import pytest
import torch
from drawn import SEEDS, some
from oracles import classes, minibatches
from split_jobs import vector_of
from torch import nn
from watching.observed import Observed
from watching.replay import Replay

from distbelief.core import roles
from distbelief.core.consistency import Key
from distbelief.core.conversations.dealing import Progress
from distbelief.core.conversations.pushing import Pushed
from distbelief.core.effects import Batch, Computed
from distbelief.core.messages import Message
from distbelief.core.optimizer import Optimizer
from distbelief.core.rounds import Rounds
from distbelief.core.settings import Settings
from distbelief.errors import UsageError
from distbelief.job import Job
from distbelief.places.compute_model import ComputeModel
from distbelief.places.simulated.simulated import Simulated
from distbelief.places.simulated.virtual_cluster import Crash
from distbelief.runtime.player import Compute, PlayedRole
from distbelief.strategies import Bounded, Downpour, Strategy, Synchronous
from distbelief.strategies.cast import Cast
from distbelief.strategies.context import Stage
from distbelief.tasks.flat import FlatModule, layout_of
from distbelief.testing.accounting import Accounting
from distbelief.testing.simulations import Endings, draw_compute, draw_network
from distbelief.transport.cluster_model import NetworkModel

UNEVEN = Simulated(
    compute=ComputeModel(spread="lognormal", slow={0: 3.0}), network=NetworkModel(latency=1e-3, jitter=2.0)
)
LR = 0.05


class Pair(nn.ModuleList):
    """Two models, of which one goes on from what the other has made."""

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        one, two = self
        return two(torch.tanh(one(inputs)))  # type: ignore[no-any-return]


def pair() -> nn.Module:
    return Pair([nn.Linear(6, 10), nn.Sequential(nn.Linear(10, 8), nn.Tanh(), nn.Linear(8, 3))]).double()


def turns(_role: str, _batch: Batch) -> list[int]:
    return [0, 1]


@pytest.fixture
def several(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Have simulated replicas step the children of their module one after another, as a user's loop does."""

    replica = Cast.replica

    def flat(_: Cast, model: nn.Module) -> FlatModule:
        groups = [{"params": list(child.parameters())} for child in model.children()]
        return FlatModule(model, layout=layout_of(model, groups, several=True))

    def have(order: Callable[[str, Batch], list[int]] = turns) -> None:
        def stepping(role: str, inner: Compute) -> Compute:
            at, coming = list[Batch](), list[int]()

            def compute(batch: Batch, answer: Any) -> Computed:
                if not (at and at[0] is batch):
                    at[:], coming[:] = [batch], order(role, batch)
                computed = inner(batch, answer)
                if not coming:
                    return Computed(None, computed.samples, 0.0, held=True)
                return msgspec.structs.replace(computed, model=coming.pop(0), loss=None)

            return compute

        def stepped(cast: Cast, role: str, incarnation: int, stage: Stage) -> PlayedRole:
            own = dataclasses.replace(stage, timed=lambda compute: stage.timed(stepping(role, compute)))
            return replica(cast, role, incarnation, own)

        monkeypatch.setattr(Cast, "_flat", flat)
        monkeypatch.setattr(Cast, "replica", stepped)

    have()
    return have


def play(strategy: Strategy, cluster: Simulated = UNEVEN, **options: Any) -> tuple[Observed, Accounting]:
    task = classes(pair, samples=options.pop("samples", 43), dtype=torch.float64)
    job = Job(
        **{"task": task, "strategy": strategy, "batch_size": 4, "evaluate_every": 0, "checkpoint_every": 0, **options}
    )
    run = Observed(job, cluster, limit=20_000)
    accounting = Accounting(run)
    return run, accounting


def made_of(accounting: Accounting, shard: str, group: list[tuple[str, int]]) -> tuple[int, list[tuple[int, int]]]:
    """The model that an update of a shard has stepped, and the minibatches whose gradients are in it."""
    parts: list[Any] = [(part,) for part in accounting.plan.parts(roles.index_of(shard))]
    models = {parts.index(accounting.sent_pushes[who, shard, clock][0].ranges) for who, clock in group}
    assert len(models) == 1, f"one update of {shard} steps {models}"
    taken: list[tuple[int, int]] = []
    for who, clock in group:
        first = clock
        while not accounting.pushes[who, first]:
            first -= 1  # those after the first push of a minibatch hold the same
        taken += accounting.pushes[who, first]
    return models.pop(), taken


def plainly(accounting: Accounting, epochs: int, lr: float) -> torch.Tensor:
    """Plain SGD on the two models, each update with the mean gradient of what the shard's had in it."""
    torch.manual_seed(0)
    task = classes(pair, samples=43, dtype=torch.float64)
    model, data = task.model().train(), task.train()
    steppers = [torch.optim.SGD(child.parameters(), lr=lr) for child in model.children()]
    numbers = {
        (epoch, index): numbers
        for epoch in range(epochs)
        for index, (_, numbers) in enumerate(list(minibatches(len(data), 4, epochs, 0))[epoch * 11 : epoch * 11 + 11])
    }
    for _, group in sorted(accounting.groups["shard 0"].items()):
        of, taken = made_of(accounting, "shard 0", group)
        inputs, targets = data.batch(torch.cat([numbers[one] for one in taken]))
        model.zero_grad()
        task.loss(model(inputs), targets).backward()
        steppers[of].step()
    return torch.cat([p.detach().reshape(-1) for p in model.parameters()])


@pytest.mark.parametrize("strategy", [Downpour, Bounded, Synchronous])
@pytest.mark.parametrize("shards", [1, 3])
@pytest.mark.usefixtures("several")
def test_one_replica_steps_each_model_as_plain_torch_does(strategy: type[Strategy], shards: int) -> None:
    run, accounting = play(strategy(1, shards, Optimizer("sgd", LR)), epochs=2)  # type: ignore[call-arg]
    run.run()
    assert run.outcome == "done"
    accounting.finish(run.outcome, [])
    assert [made_of(accounting, "shard 0", group)[0] for _, group in sorted(accounting.groups["shard 0"].items())] == (
        [0, 1] * 22
    )
    assert torch.equal(vector_of(run), plainly(accounting, 2, LR))
    assert sum(run.simulation.shards[0].staleness.values()) == 44
    assert set(run.simulation.shards[0].staleness) == {0}, "a step of the other model made this one's older"


@pytest.mark.parametrize(("replicas", "shards"), [(2, 3), (3, 1), (5, 3)])
@pytest.mark.usefixtures("several")
def test_rounds_of_each_model_are_sgd_on_the_union_batch(replicas: int, shards: int) -> None:
    run, accounting = play(Synchronous(replicas, shards, Optimizer("sgd", LR)), epochs=3)
    run.run()
    assert run.outcome == "done"
    accounting.finish(run.outcome, [])
    updates = [group for _, group in sorted(accounting.groups["shard 0"].items())]
    assert max(len(group) for group in updates) == replicas
    assert torch.allclose(vector_of(run), plainly(accounting, 3, LR), rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize("strategy", [Downpour, Bounded])
@pytest.mark.parametrize("seed", some(range(4), SEEDS // 3))
@pytest.mark.usefixtures("several")
def test_what_is_pushed_is_applied_to_its_model_and_nothing_else(strategy: type[Strategy], seed: int) -> None:
    """Each shard is a twin of plain optimizers, one for each model, whoever is slow."""
    chance = random.Random(seed)
    cluster = Simulated(compute=draw_compute(chance, 0.5), network=draw_network(chance))
    run, accounting = play(strategy(3, 2, Optimizer("momentum", LR)), cluster, seed=seed, epochs=2)  # type: ignore[call-arg]
    replay = Replay(run.simulation.network, lambda groups: torch.optim.SGD(groups, lr=LR, momentum=0.9, fused=True))
    run.watch(replay)
    run.run()
    accounting.finish(run.outcome, [])
    assert run.outcome == "done"
    assert b"".join(bytes(replay.twins[f"shard {i}"].values.numpy()) for i in range(2)) == run.vector()


@pytest.mark.parametrize("strategy", [Downpour, Bounded, Synchronous])
@pytest.mark.parametrize("message", some([9, 20, 31, 33, 34, 35, 36, 37, 38, 50], SEEDS // 2))
@pytest.mark.usefixtures("several")
def test_a_replica_that_dies_between_two_steps_comes_again(strategy: type[Strategy], message: int) -> None:
    """Its minibatch is done again, by whoever; in rounds it takes part from the next minibatch on."""
    cluster = dataclasses.replace(UNEVEN, crashes=(Crash("replica 1", message),))
    run, accounting = play(strategy(3, 1, Optimizer("sgd", LR)), cluster, epochs=3)  # type: ignore[call-arg]
    run.run()
    assert run.simulation.killed == ["replica 1"]
    accounting.finish(run.outcome, run.simulation.killed)
    assert run.outcome == "done"
    for group in accounting.groups["shard 0"].values():
        made_of(accounting, "shard 0", group)
    if strategy is Synchronous:
        assert torch.allclose(vector_of(run), plainly(accounting, 3, LR), rtol=1e-12, atol=1e-14)


def test_who_comes_to_rounds_takes_part_when_a_minibatch_begins() -> None:
    policy = Rounds(Settings(strategy=Synchronous(2)), rules=True)
    policy.models = 2
    policy.leave("replica 1", 0)
    assert policy.attend("replica 0", 0, -1) == 0
    for clock, (model, opens) in enumerate([(0, True), (1, False), (0, True)]):
        if clock == 1:
            assert policy.attend("replica 1", 1, -1) == -1
        key = Key("replica 0", 0, clock + 1)
        assert policy.turn(key, clock, model, opens) == ""
        policy.push(key, clock, 8, 0)
        due = policy.due()
        if clock < 2:
            assert (due.model, policy.admitted()) == (model, [])  # type: ignore[union-attr]  # an update, no drop
    assert due is None, "a round was made without one who takes part in it"
    assert policy.admitted() == [("replica 1", 2)]


def test_in_rounds_replicas_that_step_in_different_orders_are_refused(several: Any) -> None:
    """With the first difference: here the third step of all, which opens a minibatch for one and not for the other."""
    several(lambda role, _: [0, 1, 1] if role == "replica 1" else [0, 1])
    run, _ = play(Synchronous(2, 2, Optimizer("sgd", LR)))
    says = r"round 2: replica \d steps model . .*, and replica \d steps model .*; in rounds all step .* in one order"
    with pytest.raises(UsageError, match=says):
        run.simulation.run()


@pytest.mark.usefixtures("several")
def test_a_minibatch_is_done_when_all_of_its_pushes_are() -> None:
    """What a replica reports covers no minibatch of which a shard has not acknowledged the second push."""
    acknowledged: dict[str, int] = {}
    reported = [0]

    def sent(_sender: str, _to: str, message: Message) -> None:
        if isinstance(message, Progress):
            reported[0] += message.steps
            assert 2 * reported[0] <= min(acknowledged.values(), default=0)

    def delivered(sender: str, _to: str, message: Message) -> None:
        if isinstance(message, Pushed):
            acknowledged[sender] = message.clock

    run, _ = play(Downpour(1, 2, Optimizer("sgd", LR)), epochs=2)
    run.look(sent, delivered)
    run.run()
    assert reported == [22]


@pytest.mark.parametrize("seed", range(SEEDS))
@pytest.mark.usefixtures("several")
def test_whatever_the_network_and_whoever_dies_the_job_ends_with_all_of_its_steps(seed: int) -> None:
    chance = random.Random(seed)
    crashes = tuple(
        Crash(chance.choice(["replica 0", "replica 1", "replica 2", "shard 0", "shard 1"]), chance.randint(14, 120))
        for _ in range(chance.randint(0, 3))
    )
    cluster = Simulated(compute=draw_compute(chance, 0.5), network=draw_network(chance), crashes=crashes)
    strategy = chance.choice([Downpour, Bounded, Synchronous, Synchronous])(3, chance.choice((2, 3)))
    run, accounting = play(strategy, cluster, seed=seed, epochs=3, checkpoint_every=1)
    endings = Endings(run)
    run.simulation.run()
    accounting.finish(run.outcome, run.simulation.killed)
    endings.hold()
