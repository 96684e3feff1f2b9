"""PipeDream: one model in stages, each of which makes its own updates while others are at other minibatches, against a
plain loop that keeps every version of every stage.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from drawn import in_chunks, sweep
from split_jobs import SAMPLES, marked, play, smooth, weights
from torch import nn
from torch.func import functional_call
from watching.observed import Observed

from distbelief.core import records
from distbelief.core.conversations import dealing
from distbelief.core.messages import Message
from distbelief.core.optimizer import Optimizer
from distbelief.errors import UsageError
from distbelief.job import Job
from distbelief.places.compute_model import ComputeModel
from distbelief.places.simulated.simulated import Simulated
from distbelief.places.simulated.virtual_cluster import Crash
from distbelief.strategies import Allreduce, Downpour, Single, Synchronous
from distbelief.strategies.grouped.coordinator import AHEAD
from distbelief.strategies.grouped.round_batches import ROUNDS_LIMIT
from distbelief.strategies.grouped.torch_whole import TorchWhole
from distbelief.strategies.grouped.versions import WeightVersions
from distbelief.tasks import Task, as_data
from distbelief.testing.simulations import attach, draw_compute, draw_network
from distbelief.transport.virtual import NetworkModel

BATCH = 4
BATCHES = -(-SAMPLES // BATCH)


def pipedream(partitions: int = 3, optimizer: Optimizer | None = None, **more: Any) -> Single:
    return Single(
        optimizer=optimizer or Optimizer("sgd", 0.05), partitions=partitions, split="stages", schedule="pipedream",
        **more,
    )  # fmt: skip


class Sloped(nn.Module):
    """Multiplies each feature by a factor of its own, which autograd keeps as it is: not, as of a linear layer, a view
    of what it was.
    """

    def __init__(self) -> None:
        super().__init__()
        self.factor = nn.Parameter(torch.ones(6))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(x * self.factor)


def sloped() -> nn.Module:
    """Three stages, of which the weights are looked up when they go back."""
    return nn.Sequential(*[nn.Sequential(nn.Linear(6, 6), Sloped()) for _ in range(3)])


def even() -> nn.Module:
    """Three stages that take equally long."""
    return nn.Sequential(*[nn.Linear(6, 6) for _ in range(3)])


def homes_of(run: Observed) -> dict[str, int]:
    """Which stage holds each tensor."""
    parts: dict[str, Any] = run.simulation.parts
    layout = next(part.player.whole.layout for role, part in parts.items() if role.startswith("replica"))
    return {entry.tensor.name: entry.piece.home for entry in layout.entries}


def staged(
    plain: SimpleNamespace, task: Task, homes: dict[str, int], optimizer: str, lr: float, epochs: int, drains: set[int],
    schedule: str = "constant", **options: Any,
) -> dict[str, torch.Tensor]:  # fmt: skip
    """Stage k of K (from 1) computes minibatch t with the weights after t - K + k updates, and no earlier ones than
    when the pipeline was last empty, which it is before each of `drains`.
    """
    torch.manual_seed(0)
    model, data = task.model().train(), as_data(task.train())
    depth = 1 + max(homes.values())
    named = dict(model.named_parameters())
    own = [[name for name in named if homes[name] == stage] for stage in range(depth)]
    flats = [nn.Parameter(torch.cat([named[name].detach().reshape(-1) for name in names])) for names in own]
    steppers = [plain.optimizers[optimizer]([{"params": [flat]}], lr=lr, **options) for flat in flats]
    versions = [[flat.detach().clone()] for flat in flats]

    def values(stage: int, version: int) -> dict[str, torch.Tensor]:
        parts = versions[stage][version].split([named[name].numel() for name in own[stage]])
        return {name: part.view(named[name].shape) for name, part in zip(own[stage], parts, strict=True)}

    start = applied = 0
    for t, (_, numbers) in enumerate(plain.minibatches(len(data), BATCH, epochs, 0)):
        start = t if t in drains else start
        used: dict[str, torch.Tensor] = {}
        for k in range(1, depth + 1):
            used |= values(k - 1, max(start, t - depth + k))
        used = {name: used[name].clone().requires_grad_() for name in named}
        inputs, targets = data.batch(numbers)
        task.loss(functional_call(model, used, (inputs,)), targets).backward()
        for stage, (flat, stepper) in enumerate(zip(flats, steppers, strict=True)):
            flat.grad = torch.cat([used[name].grad.reshape(-1) for name in own[stage]])  # type: ignore[union-attr]  # it is there
            for group in stepper.param_groups:
                group["lr"] = lr * plain.schedules[schedule](min(1.0, applied / (epochs * len(data))))
            stepper.step()
            versions[stage].append(flat.detach().clone())
        applied += len(numbers)
    return {name: value for stage in range(depth) for name, value in values(stage, -1).items()}


def every_epoch(epochs: int) -> set[int]:
    return set(range(0, epochs * BATCHES, BATCHES))


# the oracles


@pytest.mark.parametrize("partitions", [2, 3])
@pytest.mark.parametrize("optimizer", ["sgd", "momentum", "adam"])
def test_a_stage_computes_with_the_weights_that_the_paper_says(
    plain: SimpleNamespace, partitions: int, optimizer: str
) -> None:
    """Over the ends of epochs, with a last minibatch that is short and a rate that falls."""
    lr = 0.02
    run = play(
        plain, pipedream(partitions, Optimizer(optimizer, lr)), epochs=3, dtype=torch.float64, lr_schedule="cosine"
    )
    run.run()
    task = plain.classes(lambda: smooth().to(torch.float64), samples=SAMPLES, dtype=torch.float64)
    oracle = staged(plain, task, homes_of(run), optimizer, lr, 3, set(), "cosine")
    plainly = plain.sequential(task, optimizer, lr=lr, epochs=3, batch_size=BATCH, schedule="cosine")
    for name, tensor in oracle.items():
        torch.testing.assert_close(weights(run)[name], tensor, rtol=1e-11, atol=1e-11)
    assert any((plainly[name] - tensor).abs().max() > 1e-6 for name, tensor in oracle.items()), "it is no plain loop"


@pytest.mark.parametrize("model", [smooth, sloped])
def test_it_is_that_bit_for_bit(plain: SimpleNamespace, model: Callable[[], nn.Module]) -> None:
    run = play(plain, pipedream(optimizer=Optimizer("adam", 0.01)), model=model, epochs=2)
    run.run()
    task = plain.classes(model, samples=SAMPLES)
    for name, tensor in staged(plain, task, homes_of(run), "adam", 0.01, 2, set()).items():
        assert torch.equal(weights(run)[name], tensor)


@pytest.mark.parametrize(
    ("options", "drains"),
    [
        ({"evaluate_every": 1}, every_epoch(3)),
        ({"evaluate_every": 2}, {2 * BATCHES}),
        ({"checkpoint_every": 2}, {2 * BATCHES}),
        ({"snapshot_every": "4minibatches"}, set(range(0, 3 * BATCHES, 4))),
        ({"evaluate_every": "5minibatches"}, set(range(0, 3 * BATCHES, 5))),
    ],
)
def test_evaluations_and_checkpoints_are_of_a_moment(
    plain: SimpleNamespace, options: dict[str, Any], drains: set[int]
) -> None:
    """Before each of them everything that is under way is brought back."""
    run = play(plain, pipedream(), epochs=3, dtype=torch.float64, **options)
    run.run()
    task = plain.classes(lambda: smooth().to(torch.float64), samples=SAMPLES, dtype=torch.float64)
    for name, tensor in staged(plain, task, homes_of(run), "sgd", 0.05, 3, drains).items():
        torch.testing.assert_close(weights(run)[name], tensor, rtol=1e-11, atol=1e-11)


def test_batch_norms_have_one_version_of_their_statistics(plain: SimpleNamespace) -> None:
    """They move with each minibatch that goes forward, in order: those of a first stage, whose input is the data, are
    the plain loop's.
    """

    def model() -> nn.Module:
        return nn.Sequential(nn.BatchNorm1d(6), nn.Linear(6, 10), nn.Tanh(), nn.Linear(10, 3))

    run = play(plain, pipedream(2), model=model, epochs=2)
    run.run()
    task = plain.classes(model, samples=SAMPLES)
    whole = plain.sequential(task, "sgd", lr=0.05, epochs=2, batch_size=BATCH)
    for name in ("0.running_mean", "0.running_var", "0.num_batches_tracked"):
        assert torch.equal(weights(run)[name], whole[name])


@pytest.mark.parametrize("partitions", [2, 3])
def test_a_stage_keeps_no_more_versions_than_minibatches_may_be_under_way(
    plain: SimpleNamespace, monkeypatch: pytest.MonkeyPatch, partitions: int
) -> None:
    """Stage k of K at most K - k + 1, and none is kept longer than its minibatch; the last stage copies nothing."""
    most: Counter[int] = Counter()
    keep = WeightVersions.keep

    def spied(versions: WeightVersions) -> None:
        keep(versions)
        kept = len(versions._kept)
        at = next(p.split_depth for p in stages if p.versions is versions)
        most[at] = max(most[at], kept)

    run = play(plain, pipedream(partitions), epochs=2)
    stages: list[Any] = []
    made = WeightVersions.__init__

    def noted(versions: WeightVersions, flat: Any, newest: torch.Tensor, count: int) -> None:
        made(versions, flat, newest, count)
        stages.append(SimpleNamespace(versions=versions, split_depth=count))

    monkeypatch.setattr(WeightVersions, "__init__", noted)
    monkeypatch.setattr(WeightVersions, "keep", spied)
    run.run()
    assert most == {depth: depth for depth in range(2, partitions + 1)} | {1: 0}
    assert all(not one.versions._kept for one in stages)


# a job is what it is elsewhere


def test_its_staleness_is_told(plain: SimpleNamespace) -> None:
    """Of K stages, K - k updates lie between a gradient of stage k and its forward pass, once the pipeline is full."""
    run = play(plain, pipedream(3), epochs=2)
    run.run()
    [applied] = [one for one in run.records if isinstance(one, records.Applied)]
    full = 2 * BATCHES
    assert applied.updates == full
    assert applied.staleness == {0: full + 2, 1: (full - 1) + 1, 2: full - 2}


@pytest.mark.parametrize(
    ("victim", "evaluate_every"),
    [("replica 0.0", 0), ("replica 0.1", "6minibatches"), ("replica 0.2", 0), ("replica 0.2", "6minibatches")],
)
def test_where_a_stage_dies_all_begin_anew_where_they_were_saved(
    plain: SimpleNamespace, victim: str, evaluate_every: int | str
) -> None:
    """It ends where an undisturbed one does, bit for bit: what was under way is dealt again, and it is brought back for
    evaluations where it would have been.
    """
    found = []
    for crashes in ((), (Crash(victim, 70), Crash(victim, 9))):
        cluster = Simulated(crashes=crashes)
        run = play(plain, pipedream(), cluster, epochs=3, snapshot_every="4minibatches", evaluate_every=evaluate_every)
        run.run()
        assert run.outcome == "done"
        found.append(weights(run))
    assert run.simulation.killed.count(victim) == 2
    assert any(isinstance(record, records.Rewound) for record in run.records)
    assert all(torch.equal(found[1][name], tensor) for name, tensor in found[0].items())


class Updates:
    """The samples in each update of each partition, since it last began."""

    def __init__(self) -> None:
        self.made: dict[Any, list[set[int]]] = {}

    def note(self, whole: Any) -> None:
        own = whole.layout.homes[whole._partition].trained.size
        there = {i for i, value in enumerate(whole.gradients.sum[:own].view(torch.float32).tolist()) if value}
        self.made.setdefault(whole, []).append(there)


@pytest.mark.parametrize("stop", range(30, 126, 8))
def test_a_job_that_is_stopped_anywhere_has_made_the_same_updates_at_all_stages(
    monkeypatch: pytest.MonkeyPatch, stop: int
) -> None:
    """Told to halt, it begins nothing more and brings back what is under way; each minibatch counts once."""
    run = Observed(
        Job(task=marked(), strategy=pipedream(2, Optimizer("sgd", 0.1)), batch_size=2, evaluate_every=0,
            checkpoint_every=0, epochs=2),
        Simulated(),
    )  # fmt: skip
    updates, update = Updates(), TorchWhole.update

    def spied(whole: TorchWhole, *asked: Any) -> None:
        updates.note(whole)
        update(whole, *asked)

    monkeypatch.setattr(TorchWhole, "update", spied)
    counted = 0

    def sent(*_: object) -> None:
        nonlocal counted
        counted += 1

    run.simulation.stopped = lambda: "Ctrl-C" if counted >= stop else None
    run.watch(SimpleNamespace(sent=sent, delivered=lambda *_: None))  # type: ignore[arg-type]  # a checker
    run.run()
    first, second = updates.made.values()
    assert first == second
    assert sum(map(len, first)) == sum(one.samples for one in run.records if isinstance(one, records.Stepped))
    assert run.outcome == "interrupted"


def draw(seed: int) -> tuple[Single, Simulated]:
    """The stages and the faults of a seed."""
    chance = random.Random(f"pipedream {seed}")
    partitions = chance.choice((2, 3))
    named = [f"replica 0.{part}" for part in range(partitions)]
    crashes = [Crash(role, chance.randint(1, 150)) for role in chance.sample(named, chance.randint(0, 2))]
    crashes += [Crash("coordinator", chance.randint(1, 60))] * chance.randint(0, 1)
    cluster = Simulated(
        network=draw_network(chance), compute=draw_compute(chance, slow=0.2), crashes=tuple(crashes),
        restart_seconds=chance.choice((0.0, 1e-3, 0.5)),
    )  # fmt: skip
    return pipedream(partitions), cluster


@in_chunks(50)
@pytest.mark.long
def test_it_ends_where_a_calm_run_does_however_slow_anybody_is_and_whoever_dies(
    plain: SimpleNamespace, seeds: range
) -> None:
    """Bit for bit: what is computed with which weights depends on nobody's speed."""
    calm: dict[int, dict[str, torch.Tensor]] = {}

    def hold(seed: int) -> Counter[str]:
        strategy, cluster = draw(seed)
        options: dict[str, Any] = {"epochs": 3, "evaluate_every": 2, "snapshot_every": "7minibatches"}
        if strategy.partitions not in calm:
            calm[strategy.partitions] = weights(play(plain, strategy, **options).run())
        run = play(plain, strategy, cluster, **options).run()
        assert run.outcome == "done"
        for name, tensor in calm[strategy.partitions].items():
            assert torch.equal(weights(run)[name], tensor)
        return Counter(role.partition(" ")[0] for role in run.simulation.killed)

    killed = sweep(seeds, hold, draw)
    if len(seeds) >= 50:
        assert min(killed["replica"], killed["coordinator"]) > 5


def test_phantom_stages_send_what_stages_send(plain: SimpleNamespace) -> None:
    counted: list[Counter[str]] = []
    for phantom in (False, True):
        run = play(plain, pipedream(), Simulated(phantom=phantom), epochs=2, snapshot_every="0")
        sent = Counter[str]()

        def note(_sender: str, _to: str, message: Message, sent: Counter[str] = sent) -> None:
            sent[type(message).__name__] += 1

        attach(run.simulation.network, SimpleNamespace(sent=note, delivered=lambda *_: None))  # type: ignore[arg-type]  # a checker
        run.run()
        counted.append(sent)
    assert counted[0] == counted[1]
    assert counted[0]["Boundary"] == 2 * 2 * 2 * BATCHES
    assert counted[0][dealing.Drain.__name__] == 3


def test_stages_that_overlap_take_as_long_as_the_slowest_of_them(plain: SimpleNamespace) -> None:
    """On the same simulated machines: all at once, where one after the other took the sum of them."""
    took = []
    for more in ({"schedule": "pipedream"}, {}):
        strategy = Single(partitions=3, split="stages", **more)  # type: ignore[arg-type]  # its options
        cluster = Simulated(phantom=True, compute=ComputeModel(step=0.03, spread="constant"))
        run = play(plain, strategy, cluster, epochs=20, snapshot_every="0", model=even).run()
        took.append(run.simulation.clock.now())
    assert 2.5 < took[1] / took[0] < 3.0


def test_a_job_whose_budget_is_spent_makes_no_more_than_where_none_overlap(plain: SimpleNamespace) -> None:
    """What was dealt by then is all that is still made."""
    cluster = Simulated(phantom=True, compute=ComputeModel(step=0.3, spread="constant"))
    run = play(plain, pipedream(), cluster, epochs=20, batch_size=1, budget="8s", snapshot_every="0", model=even).run()
    made = next(record.updates for record in run.records if isinstance(record, records.Applied))
    assert 70 < made <= 80 + AHEAD * ROUNDS_LIMIT, "eighty in the budget"


def test_stages_say_for_whom_they_wait(plain: SimpleNamespace) -> None:
    run = play(plain, pipedream(2), Simulated(network=NetworkModel(latency=1e-3)))
    said: dict[str, set[str]] = {"replica 0.0": set(), "replica 0.1": set()}

    def listen(*_: object) -> None:
        for role, known in said.items():
            known.add(run.simulation.parts[role].player.waits())

    run.watch(SimpleNamespace(sent=lambda *_: None, delivered=listen))  # type: ignore[arg-type]  # a checker
    run.run()
    assert "for the gradient of what 1 needed from replica 0.1" in said["replica 0.0"]
    assert {"for what 1 needs from replica 0.0", "for work from replica 0.0"} <= said["replica 0.1"]


@pytest.mark.parametrize(
    ("strategy", "options", "told"),
    [
        (
            Allreduce(1, partitions=2, schedule="pipedream"),
            {},
            "strategy allreduce all partitions of all replicas",
        ),
        (Synchronous(partitions=2, schedule="pipedream"), {}, "with strategy synchronous all partitions of all"),
        (
            Downpour(partitions=2, schedule="pipedream"),
            {},
            "strategy downpour partitions push a minibatch together",
        ),
        (pipedream(microbatches=2), {}, "--microbatches 2 in pipedream, which takes whole minibatches forward"),
        (pipedream(), {"clip_norm": 1.0}, "--clip-norm 1.0 with --schedule pipedream: no partition waits"),
        (Single(partitions=2, split="neurons", schedule="pipedream"), {}, "none can begin a minibatch before the one"),
    ],
)
def test_what_has_no_meaning_with_it_is_refused(
    plain: SimpleNamespace, strategy: Single, options: dict[str, Any], told: str
) -> None:
    with pytest.raises(UsageError) as found:
        play(plain, strategy, **options).simulation.run()
    assert told in str(found.value)
