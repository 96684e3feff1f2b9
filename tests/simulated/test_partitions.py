"""Split replicas: several processes that are one replica, against the whole one, and under faults."""

from __future__ import annotations

import dataclasses
import random
from collections import Counter
from typing import Any

import pytest
import torch
from drawn import in_chunks, sweep
from oracles import classes, minibatches, sequential
from split_jobs import smooth, state_of
from torch import nn
from watching.observed import Observed

import distbelief as db
from distbelief.core import records
from distbelief.core.conversations import partitioning
from distbelief.core.optimizer import Optimizer
from distbelief.errors import JobFailed, UsageError
from distbelief.job import Job
from distbelief.places.compute_model import ComputeModel
from distbelief.places.simulated.simulated import Simulated
from distbelief.places.simulated.virtual_cluster import Crash
from distbelief.record.live import summary
from distbelief.strategies import Allreduce, Bounded, Downpour, Softsync, Synchronous
from distbelief.strategies.parameter_server.options import ServedWithOptimizer
from distbelief.tasks import Task
from distbelief.testing.accounting import Accounting
from distbelief.testing.simulations import Endings, draw_compute, draw_network, draw_revivals
from distbelief.transport.cluster_model import NetworkModel

CHUNK = 50
SPLITS = {
    "stages": {"split": "stages", "partitions": 2},
    "neurons": {"split": "neurons", "partitions": 2},
    "three stages": {"split": "stages", "partitions": 3, "shards": 3},
    "samples": {"split": "0=samples,2=columns,4=rows", "partitions": 4, "shards": 4},  # the last minibatch has 3
}
SAMPLES = 43
UNEVEN = Simulated(
    network=NetworkModel(latency=1e-3, jitter=5.0, delay_chance=0.2, delay=2e-2),
    compute=ComputeModel(spread="exponential", slow={0: 3.0}),
)


def play(strategy: ServedWithOptimizer, cluster: Simulated | None = None, **job: Any) -> Observed:
    dtype = job.pop("dtype", torch.float32)
    task = classes(lambda: smooth().to(dtype), samples=SAMPLES, dtype=dtype)
    given = {"batch_size": 4, "evaluate_every": 0, "checkpoint_every": 0, **job}
    return Observed(Job(task=task, strategy=strategy, **given), cluster)


@pytest.mark.parametrize("how", SPLITS)
@pytest.mark.parametrize("optimizer", ["sgd", "adagrad"])
def test_one_split_replica_is_the_whole_one(how: str, optimizer: str) -> None:
    """Downpour's steps on a split replica end in the parameters that a plain loop ends in; in stages bit for bit."""
    split = Downpour(1, optimizer=Optimizer(optimizer, 0.05), **SPLITS[how])  # type: ignore[arg-type]  # its options
    run = play(split, epochs=2, dtype=torch.float64)
    run.simulation.run()
    task = classes(lambda: smooth().to(torch.float64), samples=SAMPLES, dtype=torch.float64)
    oracle = sequential(task, optimizer, lr=0.05, epochs=2, batch_size=4)
    for name, tensor in state_of(run).items():
        torch.testing.assert_close(tensor, oracle[name], rtol=1e-11, atol=1e-11)


@pytest.mark.parametrize("how", SPLITS)
@pytest.mark.parametrize("clip_norm", [0.02, 0.3])  # every step, and some of them
def test_a_gradient_is_clipped_by_the_norm_of_all_its_partitions(how: str, clip_norm: float) -> None:
    split = Downpour(1, optimizer=Optimizer("momentum", 0.05), push_every=2, **SPLITS[how])  # type: ignore[arg-type]  # its options
    whole = Downpour(1, optimizer=Optimizer("momentum", 0.05), push_every=2)
    found = []
    for strategy, clips in ((split, clip_norm), (whole, clip_norm), (whole, 0.0)):
        run = play(strategy, epochs=2, dtype=torch.float64, clip_norm=clips)
        run.simulation.run()
        found.append(state_of(run))
    for name, tensor in found[0].items():
        torch.testing.assert_close(tensor, found[1][name], rtol=1e-11, atol=1e-11)
    assert any(not torch.allclose(tensor, found[2][name], rtol=1e-4) for name, tensor in found[0].items())


@pytest.mark.parametrize(
    ("how", "schedule", "microbatches"),
    [
        ("stages", "gpipe", 3), ("stages", "1f1b", 4), ("stages", "auto", 2), ("three stages", "1f1b", 3),
        ("three stages", "gpipe", 3), ("three stages", "1f1b", 4), ("neurons", "gpipe", 3), ("neurons", "1f1b", 4),
        ("samples", "1f1b", 3), ("samples", "auto", 2),
    ],
)  # fmt: skip
@pytest.mark.long
def test_microbatches_make_the_step_of_the_minibatch(how: str, schedule: str, microbatches: int) -> None:
    """Also of the last minibatch, which has 3 samples, and so fewer microbatches than 4."""
    options: dict[str, Any] = {**SPLITS[how], "schedule": schedule, "microbatches": microbatches}
    run = play(Downpour(1, optimizer=Optimizer("sgd", 0.05), **options), epochs=2, dtype=torch.float64)
    run.simulation.run()
    task = classes(lambda: smooth().to(torch.float64), samples=SAMPLES, dtype=torch.float64)
    oracle = sequential(task, "sgd", lr=0.05, epochs=2, batch_size=4)
    for name, tensor in state_of(run).items():
        torch.testing.assert_close(tensor, oracle[name], rtol=1e-11, atol=1e-11)


class Rows(nn.Module):
    """Two recurrent layers over the inputs, one after the other."""

    def __init__(self) -> None:
        super().__init__()
        self.gru, self.head = nn.GRU(1, 4, num_layers=2, batch_first=True), nn.Linear(4, 3)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return self.head(self.gru(inputs.unsqueeze(2))[0][:, -1])  # type: ignore[no-any-return]  # of torch


@pytest.mark.parametrize(("chunks", "crosses"), [(0, 6), (1, 1), (2, 2), (3, 3)])
def test_a_sequence_is_cut_in_as_many_chunks_as_are_named(chunks: int, crosses: int) -> None:
    """Of six steps, at most; each crosses forward, and its gradient back, in each of ten steps of plain SGD."""
    task = classes(lambda: Rows().double(), samples=40, dtype=torch.float64)
    strategy = Downpour(1, optimizer=Optimizer("sgd", 0.05), partitions=2, split="time", chunks=chunks)
    run = Observed(Job(task=task, strategy=strategy, batch_size=4, evaluate_every=0, checkpoint_every=0, epochs=1))
    sent: Counter[str] = Counter()
    run.look(delivered=lambda _who, _to, what: sent.update([type(what).__name__]))
    run.simulation.run()
    assert sent["Boundary"] == 10 * 2 * crosses
    oracle = sequential(task, "sgd", lr=0.05, epochs=1, batch_size=4)
    for name, tensor in state_of(run).items():
        torch.testing.assert_close(tensor, oracle[name], rtol=1e-11, atol=1e-11)


@pytest.mark.parametrize("backup", [0, 2])
@pytest.mark.parametrize("how", ["stages", "neurons"])
def test_rounds_of_split_replicas_are_sgd_on_the_unions(how: str, backup: int) -> None:
    """All shards make a round of the same, and it is one step of plain SGD on that; also where replicas come late."""
    strategy = Synchronous(3, optimizer=Optimizer("sgd", 0.05), backup_workers=backup, **SPLITS[how])  # type: ignore[arg-type]  # its options
    run = play(strategy, UNEVEN, epochs=4, batch_size=2, dtype=torch.float64)
    accounting = run.accounted()
    groups = [accounting.groups[shard] for shard in accounting.shards]
    assert groups[0] == groups[1]
    task = classes(lambda: smooth().to(torch.float64), samples=SAMPLES, dtype=torch.float64)
    torch.manual_seed(0)
    model, data = task.model(), task.train()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    order = [numbers for _, numbers in minibatches(SAMPLES, 2, 4, 0)]
    for _, group in sorted(groups[0].items()):
        numbers = torch.cat([order[epoch * 22 + index] for epoch, index in accounting.batches(group)])
        inputs, targets = data.batch(numbers)
        optimizer.zero_grad()
        task.loss(model(inputs), targets).backward()
        optimizer.step()
    for name, tensor in state_of(run).items():
        torch.testing.assert_close(tensor, model.state_dict()[name], rtol=1e-11, atol=1e-11)


@pytest.mark.parametrize("shard", ["shard 0", "shard 1"])
def test_a_shard_that_comes_again_is_found_by_the_partition_that_pushes_to_it(shard: str) -> None:
    """The one that has lost it asks its lead, which asks the coordinator; the job goes on."""
    strategy = Downpour(2, partitions=2, split="stages", restarts=2)
    run = play(strategy, Simulated(crashes=(Crash(shard, 30),)), epochs=6, snapshot_every="5")
    run.simulation.run()
    assert run.outcome == "done"
    assert run.simulation.killed == [shard]


def draw(seed: int) -> tuple[ServedWithOptimizer, dict[str, Any], Simulated]:
    chance = random.Random(f"partitions {seed}")
    pick = chance.choice
    replicas, partitions = chance.randint(1, 3), pick((2, 2, 3))
    common = {
        "replicas": replicas, "shards": chance.randint(partitions, 4), "partitions": partitions,
        "split": pick(("stages", "neurons")) if partitions == 2 else "stages",
        "optimizer": Optimizer(pick(("sgd", "adagrad")), 0.02), "push_every": pick((1, 1, 2)),
        "restarts": pick((0, 1, 3)), "standby": pick((0, 0, 1)),
    }  # fmt: skip
    cadence = {"fetch_every": pick((1, 1, 2)), "prefetch": pick((0, 1))}
    strategy: ServedWithOptimizer = pick(
        (
            lambda: Synchronous(**common, backup_workers=chance.randint(0, replicas - 1)),
            lambda: Softsync(**common, **cadence, n=chance.randint(1, replicas)),
            lambda: Bounded(**common, **cadence, staleness=pick((0, 1, 3))),
            lambda: Downpour(**common, **cadence),
        )
    )()
    crashes: list[Crash] = []
    if chance.random() < 0.8:
        named = [f"replica {i}.{part}" for i in range(replicas) for part in range(partitions)]
        named += [f"shard {i}" for i in range(strategy.shards)] * (chance.random() < 0.4)
        dying = chance.sample(named, chance.randint(1, 2))
        crashes += [Crash(role, chance.randint(1, pick((8, 80)))) for role in dying]
    options = {"epochs": pick((1, 2)), "batch_size": pick((3, 8)), "seed": seed, "evaluate_every": pick((0, 1))}
    options |= {"snapshot_every": pick(("0", "5", "10ms"))}
    options |= {"clip_norm": random.Random(f"clip {seed}").choice((0.0, 0.3))}
    crashes += draw_revivals(random.Random(f"coordinator {seed}"), strategy.restarts)
    network, compute = draw_network(chance), draw_compute(chance, slow=0.2)
    return strategy, options, Simulated(network, compute, tuple(crashes), restart_seconds=pick((0.0, 1e-3, 0.5)))


def hold(seed: int) -> str:
    """Run a seed, and hold everything that must hold; returns how it ended."""
    strategy, options, cluster = draw(seed)
    run = play(strategy, cluster, **options)
    accounting, endings = Accounting(run), Endings(run)
    run.simulation.run()
    died = [role for role in run.simulation.killed if role != "coordinator"]
    accounting.finish(run.outcome, died)
    endings.hold()
    if run.outcome == "done" and not died:
        done = run.trained()
        assert done == SAMPLES * options["epochs"]
    who = "a partition" if any("." in role for role in died) else "a shard" if died else "nobody"
    return f"{run.outcome}, {who} died"


@in_chunks(CHUNK)
def test_no_fault_loses_or_repeats_a_gradient_of_split_replicas(seeds: range) -> None:
    found = sweep(seeds, lambda seed: Counter([hold(seed)]), draw)
    if len(seeds) >= CHUNK:
        assert found["done, a partition died"] > 4
        assert found["done, nobody died"] > 2


@pytest.mark.parametrize(
    ("strategy", "options", "told"),
    [
        (
            Downpour(shards=1, partitions=2),
            {},
            "--shards 1 of replicas in 2 partitions: each partition has shards of its own",
        ),
        (Downpour(split="stages"), {}, "--split stages: says how replicas are split, and they are whole"),
        (Downpour(microbatches=2), {}, "--microbatches 2: says how minibatches go through the partitions"),
        (Downpour(schedule="gpipe"), {}, "--schedule gpipe: says how minibatches go through the partitions"),
        (Downpour(partitions=2, schedule="1f2b"), {}, "unknown schedule '1f2b'; did you mean '1f1b'?"),
        (Downpour(partitions=2, microbatches=0), {}, "--microbatches 0: must be 1 or more"),
        (Downpour(partitions=2, microbatches=5), {}, "--microbatches 5 of a minibatch of 4 samples"),
        (Downpour(partitions=2, microbatches=2, schedule="sequential"), {}, "--microbatches 2: schedule sequential"),
        (Downpour(chunks=3), {}, "--chunks 3: says how minibatches go through the partitions"),
        (Downpour(partitions=2, split="stages", chunks=3), {}, "--chunks 3: is for a split by time, and"),
        (Downpour(partitions=2, chunks=3), {}, "--chunks 3: is for a split by time, and auto is none"),
        (Downpour(partitions=2, split="time", chunks=-1), {}, "--chunks -1: a sequence is cut into 1 chunk or more"),
        (Downpour(partitions=2, split="time", chunks=3), {}, "there is no nn.GRU, nn.LSTM or nn.RNN"),
        (Downpour(partitions=0), {}, "--partitions 0: must be 1 or more"),
        (Downpour(partitions=2), {"precision": "bf16"}, "--precision bf16 of split replicas: what crosses"),
        (Downpour(partitions=2), {"precision": "fp16"}, "--precision fp16 of split replicas: no partition sees"),
        (Downpour(partitions=2, optimizer=Optimizer("lars", 1.0)), {}, "which shards tell each other in rounds only"),
        (Downpour(partitions=2, split="stage"), {}, "unknown way to split 'stage'; did you mean 'stages'?"),
        (Downpour(shards=9, partitions=9), {}, "--partitions 9: there are 3 layers with parameters"),
    ],
)
def test_what_cannot_be_split_so_is_told_before_anybody_trains(
    strategy: Downpour, options: dict[str, Any], told: str
) -> None:
    with pytest.raises(UsageError) as found:
        play(strategy, **options).simulation.run()
    assert told in str(found.value)


@pytest.mark.parametrize("microbatches", [1, 3])
def test_split_phantoms_send_what_split_replicas_send(microbatches: int) -> None:
    counted = []
    for cluster in (Simulated(), Simulated(phantom=True)):
        strategy = Synchronous(2, partitions=2, split="neurons", microbatches=microbatches)
        run = play(strategy, cluster, epochs=1, snapshot_every="0")
        sent: Counter[str] = Counter()
        run.look(delivered=lambda _who, _to, what, sent=sent: sent.update([type(what).__name__]))
        run.simulation.run()
        kinds = ("Boundary", "Push", "Fetch", "PushPart", "PartPushed", "AtRound")
        counted.append({name: sent[name] for name in kinds})
    assert counted[0] == counted[1]
    assert counted[0]["Boundary"]


@pytest.mark.parametrize("strategy", [Downpour(2), Downpour(1, partitions=2, split="columns")])
def test_a_phantom_may_have_a_model_for_which_no_machine_has_the_memory(strategy: Downpour) -> None:
    """Of 16 thousand million parameters: it has no values."""
    wide = 1 << 17
    task = Task(
        model=lambda: nn.Sequential(nn.Linear(16, wide), nn.Linear(wide, wide)),
        train=lambda: (torch.zeros(8, 16), torch.zeros(8, dtype=torch.int64)),
    )
    job = Job(task=task, strategy=strategy, batch_size=2, evaluate_every=0, checkpoint_every=0, snapshot_every="0")
    result = db.run(job, on=Simulated(phantom=True))
    assert result["steps"] == 4
    assert result["bytes"]["pushed"] > 4 * 4 * wide**2


def test_a_phantom_whose_model_needs_values_to_be_split_has_them() -> None:
    task = Task(
        model=lambda: nn.Sequential(ByValue(), ByValue()),
        train=lambda: (torch.zeros(8, 4), torch.zeros(8, dtype=torch.int64)),
    )
    job = Job(task=task, strategy=Downpour(1, partitions=2, split="stages"), batch_size=2, evaluate_every=0)
    assert db.run(job, on=Simulated(phantom=True))["steps"] == 4


class ByValue(nn.Module):
    """Whose pass depends on a parameter's value."""

    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.fc(x) if float(self.fc.weight.detach().sum()) < 1e9 else x


@pytest.mark.parametrize(("way", "told"), [("auto", "neurons over 2 partitions: "), ("stages", "does not pay in time")])
def test_a_result_says_how_the_model_was_split_and_what_that_is_worth(way: str, told: str) -> None:
    result = db.run(db.Job("digits", Downpour(2, partitions=2, split=way)), on="simulated")
    assert result["split"]["ways"] == ("neurons" if way == "auto" else way)
    assert told in result["split"]["told"]
    assert result["split"]["told"] in summary(result)
    assert "split" not in db.run(db.Job("digits", Downpour(1)), on="simulated")


@pytest.mark.parametrize(("named", "ways"), [({}, "0=columns,2=rows,4=0"), ({"split": "stages"}, "stages")])
def test_a_task_brings_a_split_of_its_own(named: dict[str, Any], ways: str) -> None:
    task = dataclasses.replace(classes(smooth, samples=SAMPLES), split="0=columns,2=rows,4=0")
    job = Job(task=task, strategy=Downpour(1, partitions=2, **named), batch_size=4, evaluate_every=0)
    [parted] = [one for one in Observed(job).run().records if isinstance(one, records.Parted)]
    assert parted.split == ways


@pytest.mark.parametrize("strategy", [Downpour, Synchronous, Allreduce], ids=lambda one: one.name)
@pytest.mark.parametrize("at", [1, 20])
@pytest.mark.parametrize("who", [0, 1])
def test_partitions_whose_link_breaks_while_both_live_do_not_wait_for_ever(
    strategy: type[Downpour | Synchronous | Allreduce], at: int, who: int
) -> None:
    """Nobody dies, so that no supervisor ends them."""
    run = play(strategy(2, partitions=2, split="stages"), Simulated(), epochs=3)  # type: ignore[arg-type]  # allreduce too
    pair, crossed = ("replica 0.0", "replica 0.1"), 0

    def cut(sender: str, to: str, what: object) -> None:
        nonlocal crossed
        if isinstance(what, partitioning.Boundary) and {sender, to} == {*pair}:
            crossed += 1
            if crossed == at:
                run.simulation.network.endpoints[pair[who]].drop(pair[1 - who], "it was cut")

    run.look(delivered=cut)
    with pytest.raises(JobFailed, match=r"replica 0\.[01]: its link to replica 0\.[01] broke .*it was cut"):
        run.simulation.run()
