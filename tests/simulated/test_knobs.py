"""What options do, one by one, beside what oracles hold; that none is dead is in test_options."""

from __future__ import annotations

import dataclasses
import json
import signal
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from oracles import classes, mlp
from safetensors.torch import save_file
from torch import nn
from watching.observed import Observed, Watcher

from distbelief.core import records
from distbelief.core.conversations import pushing
from distbelief.core.messages import Message
from distbelief.core.optimizer import optim
from distbelief.errors import JobFailed, UsageError
from distbelief.job import Job
from distbelief.places.compute_model import ComputeModel, Stopwatch
from distbelief.places.simulated.simulated import Simulated
from distbelief.places.simulated.virtual_cluster import Crash
from distbelief.strategies import Bounded, Downpour, Softsync, Synchronous
from distbelief.tasks.worker import build_model
from distbelief.testing.simulations import attach
from distbelief.transport.cluster_model import NetworkModel, Outage


class Traffic(Watcher):
    def __init__(self, run: Observed) -> None:
        self.pushes: list[tuple[str, pushing.Push]] = []
        self.counts: Counter[type] = Counter()
        attach(run.simulation.network, self)

    def delivered(self, sender: str, to: str, message: Message) -> None:
        self.counts[type(message)] += 1
        if isinstance(message, pushing.Push) and to == "shard 0":
            self.pushes.append((sender, message))


def play(cluster: Simulated | None = None, **options: Any) -> tuple[Observed, Traffic]:
    own = {field.name for field in dataclasses.fields(Downpour)}
    strategy = Downpour(
        **{"replicas": 3, "shards": 2, **{name: value for name, value in options.items() if name in own}}
    )
    shared = {name: value for name, value in options.items() if name not in own}
    run = Observed(Job(**{"task": classes(mlp, samples=40), "strategy": strategy, "batch_size": 4, **shared}), cluster)
    traffic = Traffic(run)
    return run.run(), traffic


@pytest.mark.parametrize("spread", ["constant", "exponential"])
@pytest.mark.parametrize("options", [{}, {"push_every": 3}, {"prefetch": 1}], ids=str)
def test_the_first_steps_of_a_warm_start_are_one_replicas(options: dict[str, int], spread: str) -> None:
    late = Simulated(network=NetworkModel(jitter=50.0), compute=ComputeModel(spread=spread))
    for seed in range(5):
        _, traffic = play(late, replicas=4, warm_start_steps=7, epochs=2, seed=seed, **options)
        steps = [sender for sender, push in traffic.pushes for _ in range(push.steps)]
        assert len(set(steps[:7])) == 1
        assert len(set(steps)) > 1
        # the others begin when the first steps are applied everywhere, not before
        assert next(push.version.updates for sender, push in traffic.pushes if sender != steps[0]) > 0


def test_evaluate_every_and_target_accuracy() -> None:
    def tested(run: Observed) -> list[int]:
        return [record.epoch for record in run.told(records.Tested)]

    assert tested(play(epochs=4)[0]) == [1, 2, 3, 4]
    assert tested(play(epochs=4, evaluate_every=2)[0]) == [2, 4]
    assert tested(play(epochs=4, evaluate_every=3)[0]) == [3, 4]
    assert tested(play(epochs=4, evaluate_every=0)[0]) == []
    run, _ = play(epochs=40, target_accuracy=1e-9)
    assert run.outcome == "target"
    assert tested(run)[0] == 1
    assert run.rules.counted < 40 * 40


@pytest.mark.parametrize(
    ("every", "count"), [("0", 1), ("60s", 2), ("10", 2 + 3), ("20", 2 + 1), ("4ms", 2 + 4), ("0.1min", 2)]
)
def test_snapshot_every_so_many_pushes_or_so_long(every: str, count: int) -> None:
    """One at the beginning and one at the end; those between are of 40 pushes in 20 ms."""
    never = {"checkpoint_every": 0, "evaluate_every": 0}
    run, _ = play(Simulated(compute=ComputeModel(step=1e-3)), replicas=2, epochs=4, snapshot_every=every, **never)
    assert len(run.told(records.Checkpointed)) == count


def test_init_from_is_where_training_begins(tmp_path: Path) -> None:
    task, path = classes(mlp, samples=40), tmp_path / "weights.safetensors"
    weights = {name: value + 1 for name, value in build_model(task, 9, "cpu").state_dict().items()}
    save_file(weights, path)
    run, _ = play(init_from=str(path), optimizer=optim("sgd", lr=0.0))
    assert run.vector() == b"".join(bytes(weights[name].flatten().view(torch.uint8).numpy()) for name in weights)


STEADY = ComputeModel(spread="constant")


@pytest.mark.parametrize(
    "strategy", [Downpour(2, 2), Bounded(2, 2, staleness=1), Softsync(2, 2), Synchronous(2, 2)], ids=lambda s: s.name
)
@pytest.mark.parametrize("side", [("shard 0",), ("replica 0", "replica 1"), ("coordinator", "shard 1")], ids=str)
def test_a_job_waits_for_a_partition_to_heal_and_trains_every_sample_once(strategy: Any, side: tuple[str, ...]) -> None:
    """On these sides nobody can go on without the others; a longer outage takes as much longer."""

    def seconds(*outages: Outage) -> float:
        job = Job(classes(mlp, samples=40), strategy, epochs=3, batch_size=4, checkpoint_every=0)
        run = Observed(job, Simulated(network=NetworkModel(outages=outages), compute=STEADY))
        run.accounted()
        assert run.outcome == "done"
        assert not run.simulation.killed
        assert run.trained() == 3 * 40
        return run.simulation.clock.now()

    fair, short, long = seconds(), seconds(Outage(5e-3, 1.0, side)), seconds(Outage(5e-3, 15.005, side))
    assert short > fair + 0.9
    assert long == pytest.approx(short + 14.005, abs=5e-3)


@pytest.mark.parametrize(
    ("compute", "mean", "deviation"),
    [
        (ComputeModel(step=2.0, spread="constant"), 2.0, 0.0),
        (ComputeModel(step=2.0, spread="lognormal", variation=0.2), 2.0, 0.4),
        (ComputeModel(step=2.0, spread="lognormal", variation=0.5), 2.0, 1.0),
        (ComputeModel(step=2.0, spread="exponential"), 2.0, 2.0),
        (ComputeModel(step=2.0, spread="constant", slow={3: 4.0}), 8.0, 0.0),
        (ComputeModel(step=2.0, spread="constant", slow={2: 4.0}), 2.0, 0.0),
        (ComputeModel(step=1.0, spread="constant", straggle_chance=0.25, straggle_factor=5.0), 2.0, 4 * 0.1875**0.5),
        (ComputeModel(step=1.0, spread="constant", straggle_chance=0.25, straggle_factor=9.0), 3.0, 8 * 0.1875**0.5),
    ],
    ids=str,
)
def test_a_pace_has_the_mean_and_the_spread_it_names(compute: ComputeModel, mean: float, deviation: float) -> None:
    stopwatch = Stopwatch(compute, 3, seed=0)
    drawn = torch.tensor([stopwatch.draw() for _ in range(20_000)], dtype=torch.float64)
    assert drawn.mean().item() == pytest.approx(mean, rel=0.03)
    assert drawn.std().item() == pytest.approx(deviation, rel=0.05, abs=1e-12)


def test_a_phantom_takes_the_time_of_the_real_job_and_sends_its_messages() -> None:
    real, phantom = (
        play(Simulated(phantom=phantom), evaluate_every=0, checkpoint_every=0) for phantom in (False, True)
    )
    assert real[1].pushes == phantom[1].pushes
    assert real[0].simulation.clock.now() == phantom[0].simulation.clock.now()
    assert phantom[0].simulation.network.endpoints["replica 0"].arena.parameters == ()


EVERYBODY = ("coordinator", "replica 0", "replica 1", "replica 2", "shard 0", "shard 1")


@pytest.mark.parametrize(
    ("cluster", "options", "says"),
    [
        (Simulated(network=NetworkModel(latency=-1.0)), {}, "network latency -1.0 must be 0 or more"),
        (Simulated(network=NetworkModel(delay_chance=2.0)), {}, "delay chance 2.0 must be between 0 and 1"),
        (
            Simulated(network=NetworkModel(outages=(Outage(2.0, 1.0, ("replica 0",)),))),
            {},
            "outage from 2.0 s until 1.0 s: it must begin at 0 or",
        ),
        (Simulated(network=NetworkModel(outages=(Outage(0.0, 1.0, ()),))), {}, "no role is on its side; name one"),
        (
            Simulated(network=NetworkModel(outages=(Outage(0.0, 1.0, EVERYBODY),))),
            {"evaluate_every": 0},
            "everybody is on one side",
        ),
        (Simulated(compute=ComputeModel(spread="lognorml")), {}, "did you mean 'lognormal'"),
        (Simulated(compute=ComputeModel(step=-1.0)), {}, "a step of -1.0 s"),
        (Simulated(compute=ComputeModel(straggle_chance=-0.1)), {}, "stragglers -0.1x10.0"),
        (Simulated(compute=ComputeModel(slow={1: 0.0})), {}, "replica 1 slower 0.0 times"),
        (
            Simulated(crashes=(Crash("replica 1", 5), Crash("replica 1", 9))),
            {"restarts": 0},
            "replica 1 cannot crash 2 times: it comes back 0 times",
        ),
        (Simulated(restart_seconds=-1.0), {}, "restart_seconds -1.0: must be 0 or more"),
        (
            Simulated(crashes=(Crash("replica 1", 1),)),
            {"partitions": 2, "shards": 2},
            "replica 1 cannot crash: there are the coordinator, the evaluator, replicas 0.0 to 2.1 and shards 0 to 1",
        ),
    ],
)
def test_what_no_cluster_can_be_is_refused(cluster: Simulated, options: dict[str, Any], says: str) -> None:
    with pytest.raises(UsageError, match=says):
        play(cluster, **options)


def test_a_target_without_a_test_set_is_refused_before_anything_is_made(tmp_path: Path) -> None:
    task = dataclasses.replace(classes(mlp), test=None)
    with pytest.raises(UsageError, match=r"--target-accuracy 0.5: task '.*' has no test set"):
        Simulated().run(Job(task=task, target_accuracy=0.5, out=str(tmp_path / "run")))
    assert not (tmp_path / "run").exists()


def ended(folder: Path) -> tuple[str, str]:
    result = json.loads((folder / "result.json").read_text())
    return result["outcome"], result["reason"]


def test_a_simulation_that_fails_raises_and_leaves_its_result(tmp_path: Path) -> None:
    job = Job(task=classes(mlp), strategy=Downpour(replicas=1, restarts=0), batch_size=4, out=str(tmp_path))
    with pytest.raises(JobFailed, match="every replica is gone; the last was replica 0"):
        Simulated(crashes=(Crash("replica 0", 10),)).run(job)
    assert ended(tmp_path)[0] == "failed"


def test_a_crashed_replica_comes_back_as_often_as_it_may_and_so_late() -> None:
    job = Job(task=classes(mlp), strategy=Downpour(replicas=1, restarts=2), batch_size=4, evaluate_every=0)
    whole = Simulated().run(job)
    crashes = (Crash("replica 0", 10), Crash("replica 0", 10))
    early, late = (Simulated(crashes=crashes, restart_seconds=seconds).run(job) for seconds in (0.5, 2.0))
    assert early["outcome"] == late["outcome"] == "done"
    assert early["per_replica"][0]["lost"] > 0
    assert late["seconds"] - early["seconds"] == pytest.approx(3.0)
    assert early["seconds"] == pytest.approx(whole["seconds"] + 1.0, abs=0.5)
    with pytest.raises(JobFailed, match="every replica is gone"):
        Simulated(crashes=(*crashes, Crash("replica 0", 10))).run(job)


class Interrupting(nn.Linear):
    steps = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.steps += 1
        if self.steps == 3:
            signal.raise_signal(signal.SIGINT)
        return super().forward(x)


def test_ctrl_c_ends_a_simulation_in_peace_with_a_checkpoint(tmp_path: Path) -> None:
    before = signal.getsignal(signal.SIGINT)
    task = classes(lambda: Interrupting(6, 3), samples=40)
    result = Simulated().run(Job(task, Downpour(replicas=1), batch_size=4, epochs=9, out=str(tmp_path)))
    assert (result["outcome"], result["reason"]) == ended(tmp_path) == ("interrupted", "Ctrl-C")
    assert 0 < result["samples"] < 9 * 40
    assert list((tmp_path / "checkpoints").iterdir())
    assert signal.getsignal(signal.SIGINT) is before
