"""Replicas that update one memory, simulated: oracles, races, locks, and deaths at any moment."""

from __future__ import annotations

import copy
import dataclasses
import math
import random
from collections import Counter, deque
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from drawn import SEEDS, in_chunks, scaled, some, sweep
from oracles import classes, minibatches, mlp, sequential
from safetensors.torch import load_file
from split_jobs import state_of
from tally import ADAGRAD, NAME, tallied, times
from torch import nn
from watching.floors import hold_floors
from watching.observed import Observed, mapping_of

from distbelief.core import records, roles
from distbelief.core.conversations import dealing, pushing
from distbelief.core.effects import Batch
from distbelief.core.optimizer import optim
from distbelief.core.portions import ANEW, StartingPoint
from distbelief.core.records import Cause
from distbelief.errors import UsageError
from distbelief.job import Job
from distbelief.places.compute_model import ComputeModel
from distbelief.places.simulated.handling import Handling
from distbelief.places.simulated.simulated import Simulated
from distbelief.places.simulated.simulation import Simulation
from distbelief.places.simulated.virtual_cluster import Crash
from distbelief.record.checkpoints import Checkpoints, read_manifest
from distbelief.strategies import Allreduce, Downpour, Hogwild, Locking, Single, Synchronous
from distbelief.strategies.context import LoopContext
from distbelief.strategies.single.loop import SingleLoop
from distbelief.tasks import Task, TensorData
from distbelief.tasks.worker import build_model
from distbelief.testing.simulations import draw_compute, draw_network, draw_revivals, ways

SLOW = Handling(message=0.0, memory=2e5)
"""An update of the small MLP, 412 bytes, takes 4 ms; a step takes 1 ms."""
STEADY = ComputeModel(spread="constant")
WAYS: dict[str, Callable[..., Any]] = {
    "hogwild": Hogwild,
    "one lock": Locking,
    "shards": lambda **o: Locking(shards=3, **o),
    "round-robin": lambda **o: Locking(locks="round-robin", **o),
}
PLAIN: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "sgd": torch.optim.SGD,
    "momentum": lambda p, **o: torch.optim.SGD(p, momentum=0.9, fused=True, **o),
    "nesterov": lambda p, **o: torch.optim.SGD(p, momentum=0.9, nesterov=True, fused=True, **o),
    "adagrad": lambda p, **o: torch.optim.Adagrad(p, fused=True, **o),
}


def race(task: Task, strategy: Any, cluster: Simulated | None = None, **options: Any) -> tuple[Observed, Simulation]:
    run = Observed(
        Job(task=task, strategy=strategy, batch_size=4, **options), cluster or Simulated(handling=SLOW, compute=STEADY)
    )
    run.run()
    return run, run.simulation


def updater(simulation: Simulation) -> Any:
    """Who makes the updates of the first replica."""
    return simulation.parts["replica 0"].worker.update.__self__  # type: ignore[attr-defined]  # a bound method


def weights(simulation: Simulation) -> list[torch.Tensor]:
    vector = mapping_of(simulation)
    entries = [entry for entry in simulation.coordinator.plan.layout.entries if entry.tensor.kind == "parameter"]
    return [
        vector[e.start : e.start + e.tensor.size].view(getattr(torch, e.tensor.dtype)).view(e.tensor.shape)
        for e in entries
    ]


def loop(task: Task, make: Callable[..., torch.optim.Optimizer], rate: float = 0.05) -> list[Any]:
    """One loop of plain PyTorch, of three epochs."""
    torch.manual_seed(0)
    model, data = task.model().train(), task.train()
    optimizer = make(model.parameters(), lr=rate)
    for key, numbers in minibatches(len(data), 4, 3, 0):
        torch.manual_seed(key)
        inputs, targets = data.batch(numbers)
        optimizer.zero_grad()
        task.loss(model(inputs), targets).backward()
        optimizer.step()
    return [p.detach() for p in model.parameters()]


class Bag(nn.Module):
    """Rows that are looked up, and a dense layer behind them."""

    def __init__(self, sparse: bool = True) -> None:
        super().__init__()
        self.rows = nn.Embedding(50, 3, sparse=sparse)
        self.last = nn.Linear(3, 3)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return self.last(self.rows(inputs).sum(1))  # type: ignore[no-any-return]


def bags() -> Task:
    def data() -> TensorData:
        chance = torch.Generator().manual_seed(5)
        return TensorData(torch.randint(0, 50, (22, 4), generator=chance), torch.randint(0, 3, (22,), generator=chance))

    return Task(model=Bag, train=data)


@pytest.mark.parametrize(
    ("way", "optimizer"),
    [*(("hogwild", one) for one in PLAIN), *(("shards", one) for one in PLAIN), ("one lock", "adagrad"),
        ("round-robin", "nesterov")],
)  # fmt: skip
def test_one_replica_is_sequential_sgd(way: str, optimizer: str) -> None:
    task = classes(mlp)
    _, simulation = race(task, WAYS[way](replicas=1, optimizer=optim(optimizer, lr=0.05)), epochs=3)
    expected = loop(task, PLAIN[optimizer])
    for ours, theirs in zip(weights(simulation), expected, strict=True):
        if way == "hogwild" or optimizer == "sgd":
            assert torch.equal(ours, theirs)
        else:  # shards step one flat vector, which fused kernels may round otherwise
            torch.testing.assert_close(ours, theirs)


def normalised() -> nn.Module:
    return nn.Sequential(nn.Linear(6, 10), nn.BatchNorm1d(10), nn.Tanh(), nn.Linear(10, 3))


@pytest.mark.parametrize("way", WAYS)
def test_the_buffers_of_one_replica_are_those_of_a_plain_loop(way: str) -> None:
    task = classes(normalised, samples=20)
    run, _ = race(task, WAYS[way](replicas=1), epochs=3)
    expected = sequential(task, "sgd", lr=0.1, epochs=3)
    assert all(torch.equal(value, expected[name]) for name, value in state_of(run).items())


def test_a_forward_pass_of_hogwild_writes_buffers_in_place() -> None:
    _, simulation = race(classes(normalised), Hogwild(replicas=2), epochs=1)
    layout = simulation.coordinator.plan.layout  # type: ignore[union-attr]
    buffers = mapping_of(simulation)[layout.trained.stop : layout.moving]
    before = buffers.clone()
    simulation.parts["replica 0"].worker.compute(Batch(0, 0), lambda _: None)
    assert not torch.equal(buffers, before)


@pytest.mark.parametrize("optimizer", ["sgd", "adagrad"])
def test_one_replica_with_sparse_gradients_too(optimizer: str) -> None:

    def make(parameters: Any, lr: float) -> torch.optim.Optimizer:
        rows, *dense = parameters
        groups = [
            {"params": [rows]},
            {"params": dense, "fused": True},
        ]  # torch's fused kernel rounds otherwise, and takes no sparse gradients
        return torch.optim.Adagrad(groups, lr=lr) if optimizer == "adagrad" else torch.optim.SGD([rows, *dense], lr=lr)

    _, simulation = race(bags(), Hogwild(replicas=1, optimizer=optim(optimizer, lr=0.05)), epochs=3)
    expected = loop(bags(), make)
    found = {value.shape: value for value in weights(simulation)}
    for theirs in expected:
        assert torch.equal(found[theirs.shape], theirs)
    for ours, theirs in zip(alone(Single(optim(optimizer, lr=0.05)), "", 3).parameters(), expected, strict=True):
        assert torch.equal(ours, theirs)


def alone(strategy: Single, folder: str, epochs: int, checkpoint: Path | None = None) -> nn.Module:
    """The model of the plain loop at its end, from a checkpoint or from the beginning."""
    job = Job(bags(), strategy, epochs=epochs, batch_size=4, evaluate_every=0)
    model = build_model(bags(), 0, "cpu")
    made = read_manifest(checkpoint) if checkpoint else None
    start = StartingPoint(str(checkpoint), made.position, made.samples, made.number + 1) if made else ANEW
    SingleLoop(LoopContext(bags(), model, job.settings(), lambda _: None, lambda: None, folder, start)).run()
    return model


@pytest.mark.parametrize("optimizer", ["sgd", "adagrad"])
def test_a_checkpoint_of_sparse_gradients_goes_on_anywhere(tmp_path: Path, optimizer: str) -> None:
    """Hogwild, alone, and back: the same bits as alone all the way; a server goes on from it too."""
    stepped = optim(optimizer, lr=0.05)
    for epochs, strategy in enumerate((Hogwild(1, stepped), Single(stepped), Hogwild(1, stepped)), 1):
        if isinstance(strategy, Single):
            alone(strategy, str(tmp_path), epochs, Checkpoints(tmp_path).latest())
        else:
            job = Job(
                bags(), strategy, epochs=epochs, batch_size=4, evaluate_every=0, out=str(tmp_path), resume=epochs > 1
            )
            Simulated().run(job)
    expected = alone(Single(stepped), "", 3).state_dict()
    for name, value in load_file(tmp_path / "model.safetensors").items():
        assert torch.equal(value, expected[name])
    job = Job(bags(), Downpour(2, 3, stepped), epochs=4, batch_size=4, evaluate_every=0, out=str(tmp_path), resume=True)
    assert Simulated().run(job)["samples"] == 4 * 22


DENSE = [Downpour(1, 1), Downpour(1, 3), Downpour(1, 2, push_every=2), Synchronous(1, 2), Locking(1), Allreduce(1)]


@pytest.mark.parametrize(
    "strategy", DENSE, ids=["downpour 1", "downpour 3", "downpour 2", "synchronous 2", "locking", "allreduce"]
)
@pytest.mark.parametrize("optimizer", ["momentum", "adam"])
def test_elsewhere_sparse_gradients_are_made_dense(strategy: Any, optimizer: str) -> None:
    """The result is that of the same model with sparse=False, bit for bit, with any optimizer, and with clipping."""
    strategy = strategy.with_options(optimizer=optim(optimizer, lr=0.05))
    clip = 0.0 if isinstance(strategy, Allreduce) else 0.5  # which clips the sum, with a norm in float64
    job = Job(bags(), strategy, epochs=2, batch_size=4, clip_norm=clip, evaluate_every=0)
    run = Observed(job, Simulated(compute=STEADY))
    run.run()
    dense = dataclasses.replace(bags(), model=lambda: Bag(sparse=False))
    options = {
        "push_every": getattr(strategy, "push_every", 1),
        "groups": lambda model: [{"params": list(part.parameters())} for part in model.children()],
    }
    expected = sequential(dense, optimizer, lr=0.05, epochs=2, clip_norm=clip, **options)
    assert all(torch.equal(value, expected[name]) for name, value in state_of(run).items())


SIGNALLING = 0x7F800001
"""The bits of a float32 that are others after any addition, also of zero."""


def test_a_sparse_update_writes_to_its_rows_only() -> None:
    _, simulation = race(bags(), Hogwild(replicas=1, optimizer=optim("sgd", lr=0.05)), epochs=1)
    peer = updater(simulation)
    [sparse] = [part for part in peer.held.steps() if part.size == 16 * 3 * 4 or part.size == 8 * 3 * 4]
    rows = simulation.parts["replica 0"].player.vectors.module.rows.weight  # type: ignore[attr-defined]  # of a replica
    touched = rows.grad.coalesce().indices()[0]
    others = torch.ones(50, dtype=torch.bool)
    others[touched] = False
    bits = rows.detach().view(torch.int32)
    bits[others] = SIGNALLING
    before = bits.clone()
    with torch.no_grad():
        sparse.act()
    assert torch.equal(bits[others], before[others])
    assert not torch.equal(bits[touched], before[touched])
    assert others.sum() > 30


@pytest.mark.parametrize("way", WAYS)
def test_the_optimizers_state_is_one_for_all(way: str) -> None:
    """With a learning rate of 0, Adagrad's sums are those of all gradients, whoever computed them."""
    task = classes(lambda: nn.Linear(6, 3))
    _, simulation = race(task, WAYS[way](replicas=3, optimizer=optim("adagrad", lr=0.0)), epochs=2)
    torch.manual_seed(0)
    model, data = task.model(), task.train()
    expected = [torch.zeros_like(p) for p in model.parameters()]
    for _, numbers in minibatches(len(data), 4, 2, 0):
        model.zero_grad()
        inputs, targets = data.batch(numbers)
        task.loss(model(inputs), targets).backward()
        for total, p in zip(expected, model.parameters(), strict=True):
            total += p.grad**2
    sums = torch.cat(
        [sums for shard in simulation.shards if (sums := shard.held.arrays().get("state.0.sum")) is not None]
    )
    torch.testing.assert_close(sums, torch.cat([total.view(-1) for total in expected]))


def phantom(strategy: Any) -> float:
    """Simulated seconds of a job that computes nothing."""
    cluster = Simulated(handling=SLOW, compute=STEADY, phantom=True)
    return race(classes(mlp, samples=200), strategy, cluster)[1].clock.now()


def test_locks_wait_and_ranges_wait_less() -> None:
    seconds = {way: phantom(make(replicas=4)) for way, make in WAYS.items()}
    wider = phantom(Locking(shards=2, replicas=4))
    assert seconds["one lock"] > wider > seconds["shards"] > seconds["hogwild"]
    # with one lock for all, the updates of all replicas follow each other
    assert seconds["one lock"] > 50 * 2 * 412 / SLOW.memory


UNEVEN = Simulated(handling=Handling(message=0.0, memory=2e6), compute=ComputeModel(0.01, "exponential", slow={1: 4.0}))
"""One replica takes four times as long as the others, and no step is as long as the one before."""


def writers(run: Observed) -> list[int]:
    """Run a job, and say who made each update."""
    made: list[int] = []

    def delivered(sender: str, _to: str, message: object) -> None:
        if isinstance(message, pushing.Push):
            made.append(roles.index_of(sender))

    run.look(delivered=delivered)
    run.run()
    return made


@pytest.mark.parametrize("replicas", [2, 3, 4])
def test_by_turns_replicas_update_one_after_another(replicas: int) -> None:
    """However unlike their steps are: strictly in a circle, while all have minibatches; without turns they do not."""

    def order(locks: str) -> list[int]:
        strategy = Locking(replicas, locks=locks)
        return writers(Observed(Job(classes(mlp, samples=160), strategy, batch_size=4), UNEVEN))

    found = order("round-robin")
    circle = [turn % replicas for turn in range(len(found))]
    assert len(found) == 40
    assert found[:30] == circle[:30]
    assert order("shard")[:30] != circle[:30]


@pytest.mark.parametrize("optimizer", ["sgd", "momentum", "adagrad"])
@pytest.mark.parametrize("replicas", [2, 3])
def test_by_turns_it_is_one_loop_with_gradients_of_one_turn_ago(replicas: int, optimizer: str) -> None:
    """Bit for bit, whatever steps take: a gradient is that of the parameters which its replica left behind, and of
    these who has no minibatch left is passed over.
    """
    task, waiting = classes(mlp, samples=160), [deque[int]() for _ in range(replicas)]

    def deal(_sender: str, to: str, message: object) -> None:
        if isinstance(message, dealing.Deal):
            first = message.portion.first
            waiting[roles.index_of(to)].extend(range(first, first + message.portion.count))

    strategy = Locking(replicas, optim(optimizer, lr=0.05), locks="round-robin")
    run = Observed(Job(task, strategy, batch_size=4), UNEVEN)
    run.look(delivered=deal)
    run.run()

    torch.manual_seed(0)
    model, data = task.model().train(), task.train()
    stepped = PLAIN[optimizer](model.parameters(), lr=0.05)
    left_behind = [copy.deepcopy(model) for _ in range(replicas)]
    batches = list(minibatches(len(data), 4, 1, 0))
    while any(waiting):
        for at, seen in enumerate(left_behind):
            if waiting[at]:
                key, numbers = batches[waiting[at].popleft()]
                torch.manual_seed(key)
                inputs, targets = data.batch(numbers)
                gradients = torch.autograd.grad(task.loss(seen(inputs), targets), list(seen.parameters()))
                for parameter, gradient in zip(model.parameters(), gradients, strict=True):
                    parameter.grad = gradient
                stepped.step()
                seen.load_state_dict(model.state_dict())
    for ours, theirs in zip(weights(run.simulation), model.parameters(), strict=True):
        # shards step one flat vector, which a fused kernel may round otherwise
        assert torch.allclose(ours, theirs) if optimizer == "momentum" else torch.equal(ours, theirs)


def test_by_turns_nobody_waits_for_who_waits_for_a_checkpoint() -> None:
    """Of replicas that hear of it after unlike numbers of steps."""
    strategy = Locking(3, locks="round-robin")
    run = Observed(Job(classes(mlp, samples=400), strategy, batch_size=4, snapshot_every="10"), UNEVEN)
    assert run.run().outcome == "done"
    assert len(run.told(records.Checkpointed)) > 3
    assert run.simulation.clock.now() < 2  # a checkpoint that is waited for in vain is given up after a second


@pytest.mark.parametrize("victim", ["replica 0", "replica 1", "replica 2"])
@pytest.mark.parametrize("restarts", [0, 1])
def test_by_turns_the_dead_are_passed_over_till_they_come_again(victim: str, restarts: int) -> None:
    task = classes(mlp, samples=400)
    job = Job(task, Locking(3, restarts=restarts, locks="round-robin"), batch_size=4)
    run = Observed(job, Simulated(handling=SLOW, compute=STEADY, restart_seconds=0.05))
    simulation, dead = run.simulation, roles.index_of(victim)

    def strike(_: None) -> None:
        if any(turn[0].role == victim for turn in [*simulation.network.memories["shard 0"].turns][:1]):
            simulation.kill(victim)
        else:
            simulation.clock.call_later(1e-3, strike, None)

    simulation.clock.call_at(0.05, strike, None)
    made = writers(run)
    assert run.outcome == "done"
    again = [at for at, (one, other) in enumerate(pairwise(made)) if (one + 1) % 3 == dead != other]
    assert again, "it was killed too late"
    without = made[again[0] + 1 : again[-1]]
    assert set(without) == {0, 1, 2} - {dead}
    assert all(one != other for one, other in pairwise(without))
    behind = made[again[-1] + 1 :]
    assert behind[:6] == [(behind[0] + turn) % 3 for turn in range(6)] if restarts else dead not in behind


@pytest.mark.parametrize("moment", some([0.001 * step + 0.0003 for step in range(0, 40, 3)], SEEDS // 3))
@pytest.mark.parametrize("way", WAYS)
def test_a_death_at_any_moment_frees_its_locks_and_its_portion(way: str, moment: float) -> None:
    task = classes(mlp, samples=60)
    job = Job(task=task, strategy=WAYS[way](replicas=3, restarts=1), epochs=2, batch_size=4, snapshot_every="10")
    run = Observed(job, Simulated(handling=SLOW, compute=STEADY, restart_seconds=0.01))
    simulation = run.simulation
    for victim in ("replica 0", "replica 1"):
        simulation.clock.call_at(moment, simulation.kill, victim)
    run.run()
    assert run.outcome == "done"
    assert run.trained() == 120
    assert not any(memory.turns for memory in simulation.network.memories.values())


@pytest.mark.parametrize("message", [4, 6, 8])
def test_a_shard_that_dies_costs_hogwild_nothing(message: int) -> None:
    task = classes(mlp)
    crash = Simulated(compute=STEADY, crashes=(Crash("shard 0", message),), restart_seconds=0.01)
    run, simulation = race(task, Hogwild(1), crash, epochs=3, snapshot_every="2")
    assert simulation.killed == ["shard 0"]
    for ours, theirs in zip(weights(simulation), loop(task, PLAIN["sgd"], 0.1), strict=True):
        assert torch.equal(ours, theirs)
    assert [record.updates for record in run.told(records.Applied)] == [3 * 6]


@pytest.mark.parametrize(
    ("strategy", "options", "said"),
    [
        (Hogwild(optimizer=optim("adam")), {}, "--optimizer adam: needs several numbers of the same moment"),
        (Hogwild(optimizer=optim("momentum", dampening=0.5)), {}, "dampening"),
        (Hogwild(241), {}, "--replicas 241: at most 240 can share the memory"),
        (Locking(locks="row"), {}, "--locks"),
        (Locking(locks="none"), {}, "--locks none: updates without locks are strategy hogwild"),
        (Locking(locks="global"), {}, "--locks global: one lock for all parameters is --locks shard --shards 1"),
        (Locking(locks="round-robin", shards=4), {}, "--shards 4: --locks round-robin orders a single lock"),
        (Locking(shards=-1), {}, "--shards -1: must be 1 or more"),
        (
            Hogwild(),
            {"device": "cuda"},
            "--device cuda means nothing to strategy hogwild; its replicas share the host's memory",
        ),
    ],
)
def test_what_makes_no_sense_is_refused(strategy: Any, options: dict[str, Any], said: str) -> None:
    with pytest.raises(UsageError, match=said):
        race(classes(mlp), strategy, **options)


@pytest.mark.parametrize(
    ("strategy", "options", "said"),
    [
        (
            Hogwild(optimizer=optim("momentum")),
            {},
            "--optimizer momentum: the gradients of 'rows.weight' are sparse, and no such rule of torch",
        ),
        (Hogwild(optimizer=optim("sgd", weight_decay=0.1)), {}, "option weight_decay"),
        (Hogwild(), {"clip_norm": 1.0}, "--clip-norm 1.0: torch clips no sparse gradients"),
    ],
)
def test_what_torch_cannot_do_with_sparse_gradients_is_refused(
    strategy: Any, options: dict[str, Any], said: str
) -> None:
    with pytest.raises(UsageError, match=said):
        race(bags(), strategy, **options)


def test_a_phantom_knows_no_rows() -> None:
    with pytest.raises(UsageError, match="what rows an update writes to"):
        race(bags(), Hogwild(), Simulated(phantom=True))


FLOORS = {
    "EPOCHS_DONE": 60, "REPLICAS_DIED": 3, "done, and nobody died": 15,
    "done after a replica died": 25, "done after the coordinator died": 10, "done after a shard came again": 8,
}  # fmt: skip
"""How many of 100 seeds end in each way, at least."""


def drawn(seed: int) -> Observed:
    chance = random.Random(f"hogwild {seed}")
    replicas, restarts = chance.randint(1, 4), chance.choice((0, 1, 2))
    make = chance.choice((Hogwild, Locking))
    own: dict[str, Any] = {"locks": chance.choice(("shard", "round-robin"))} if make is Locking else {}
    if own.get("locks") == "shard":
        own["shards"] = chance.randint(1, 3)
    dying = chance.sample(range(replicas), chance.randint(0, replicas))
    crashes = tuple(
        Crash(f"replica {i}", chance.randint(1, 30)) for i in dying for _ in range(chance.randint(1, 1 + restarts))
    )
    crashes += draw_revivals(chance, restarts)
    if restarts and chance.random() < 0.3:
        crashes += (Crash("shard 0", chance.randint(1, 12)),)
    handling = Handling(message=0.0, memory=chance.choice((math.inf, 2e6)))
    cluster = Simulated(
        draw_network(chance), draw_compute(chance, slow=0.2), crashes, handling=handling,
        restart_seconds=chance.choice((0.0, 1e-3, 0.5))
    )  # fmt: skip
    task = tallied(classes(mlp, samples=30), 4, epochs=2, seed=seed)
    job = Job(task, make(replicas, ADAGRAD, restarts=restarts, **own), epochs=2, batch_size=4, seed=seed,
              checkpoint_every=chance.choice((0, 1)), snapshot_every=chance.choice(("0", "3")))  # fmt: skip
    return Observed(job, cluster)


def hold(run: Observed) -> Counter[str]:
    """Run to the end, and hold what must hold; returns the ways in which it ended."""
    simulation = run.simulation
    simulation.run()
    died = {role for role in simulation.killed if roles.is_replica(role)}
    [finished] = run.told(records.Finished)
    deserted = {Cause.REPLICAS_DIED} if len(died) == simulation.settings.replicas else set()
    assert finished.cause in {Cause.EPOCHS_DONE} | deserted, f"{finished}, {simulation.killed}"
    if finished.cause is Cause.EPOCHS_DONE:
        assert run.trained() == 60
        entry = next(entry for entry in simulation.coordinator.plan.layout.entries if entry.tensor.name == NAME)
        found = times(mapping_of(simulation)[entry.start : entry.start + entry.tensor.size].view(torch.float32))
        applied = [record.samples for record in run.told(records.Applied)]
        assert applied or deserted
        if died:
            assert found.min() >= 1, f"minibatches are lost: {found.tolist()}"
            assert min(applied, default=60) >= 60
        else:
            assert (found == 1).all(), f"minibatches are lost, or in it twice: {found.tolist()}"
            assert set(applied) == {60}
    return ways(run, finished.cause)


@in_chunks(100)
def test_no_fault_loses_a_minibatch_or_leaves_anybody_waiting(seeds: range) -> None:
    """Every job ends, and what the mapping holds at the end has every minibatch in it."""
    found = sweep(seeds, lambda seed: hold(drawn(seed)), lambda seed: drawn(seed).simulation.job)
    hold_floors(found, scaled(FLOORS, seeds, 100))
