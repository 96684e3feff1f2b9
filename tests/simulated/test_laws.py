"""Laws of asynchronous SGD with known numbers, and the staleness that a run reports."""

from __future__ import annotations

import pytest
import torch
from drawn import SEEDS, some
from watching.observed import Observed

from distbelief.core.conversations import pushing
from distbelief.core.messages import Message
from distbelief.job import Job
from distbelief.places.compute_model import ComputeModel
from distbelief.places.simulated.handling import INSTANT
from distbelief.places.simulated.simulated import Simulated
from distbelief.strategies import Downpour
from distbelief.tasks import Task
from distbelief.tasks.task import TensorData
from distbelief.testing.simulations import attach
from distbelief.transport.cluster_model import NetworkModel

MANY = SEEDS >= 1000
"""Whether laws are held with many numbers of replicas, for long."""
AT_ONCE = NetworkModel(latency=0.0, bandwidth=float("inf"))


def points(samples: int) -> Task:
    data = TensorData(torch.zeros(samples, 4), torch.zeros(samples, dtype=torch.int64))
    return Task(model=lambda: torch.nn.Linear(4, 4), train=lambda: data)


class Schedule:
    """The version from which each update of shard 0 was computed, in the order of the updates."""

    def __init__(self) -> None:
        self.based: list[int] = []

    def sent(self, sender: str, to: str, message: Message) -> None:
        pass

    def delivered(self, sender: str, to: str, message: Message) -> None:
        if isinstance(message, pushing.Push) and to == "shard 0":
            self.based.append(message.version.updates)


def schedule(
    replicas: int, samples: int, cluster: Simulated, seed: int = 0, **options: int
) -> tuple[list[int], Observed]:
    job = Job(task=points(samples), strategy=Downpour(replicas=replicas, shards=1, **options), batch_size=1, seed=seed)
    run, seen = Observed(job, cluster, limit=10**9), Schedule()
    attach(run.simulation.network, seen)
    return seen.based, run.run()


@pytest.mark.parametrize(
    "compute",
    [ComputeModel(), ComputeModel(spread="exponential"), ComputeModel(slow={0: 4.0})],
    ids=["lognormal", "exponential", "one slow replica"],
)
@pytest.mark.parametrize("replicas", some([2, 4, 8, 16, 32], SEEDS // 3))
def test_mean_staleness_is_the_number_of_other_replicas_whatever_their_speeds(
    replicas: int, compute: ComputeModel
) -> None:
    based, _ = schedule(
        replicas,
        (300 if MANY else 100) * replicas,
        Simulated(handling=INSTANT, network=AT_ONCE, compute=compute, phantom=True),
    )
    # while all of them have work; exact up to the steps that are under way at the end
    settled = [update - version for update, version in enumerate(based)][replicas : len(based) // 2]
    assert sum(settled) / len(settled) == pytest.approx(replicas - 1, abs=0.02 * replicas)


@pytest.mark.parametrize(
    ("options", "expected"),
    [({}, 0.0), ({"prefetch": 1}, 1.0), ({"fetch_every": 3}, 1.0), ({"push_every": 2}, 0.0)],
    ids=str,
)
def test_one_replica_sees_only_the_staleness_that_its_settings_make(options: dict[str, int], expected: float) -> None:
    """With prefetch, one more step, exactly: not less because the next parameters arrived before the push left."""
    _, run = schedule(1, 600, Simulated(handling=INSTANT, network=AT_ONCE, phantom=True), **options)
    staleness = run.simulation.shards[0].staleness
    assert sum(s * n for s, n in staleness.items()) / sum(staleness.values()) == pytest.approx(expected, abs=0.01)


def windows(based: list[int], first: int, last: int, rate: float, steps: int) -> torch.Tensor:
    """SGD on w^2/2 from w = 1, with the gradients as old as in a stretch of the schedule; rows are stretches."""
    starts = torch.arange(first, last - steps, 2)
    versions = torch.tensor(based)
    w = torch.ones(len(starts), steps + 1, dtype=torch.float64)
    for update in range(steps):
        old = (versions[starts + update] - starts).clamp(min=0)
        w[:, update + 1] = w[:, update] - rate * w.gather(1, old.unsqueeze(1)).squeeze(1)
    return w


@pytest.mark.parametrize("replicas", [2, 4, 8, 16] if MANY else [4])
@pytest.mark.long
def test_asynchrony_is_momentum(replicas: int) -> None:
    """M workers with exponential compute times act in expectation as momentum 1 - 1/M with step lr/M (Mitliagkas et al.
    2016).

    Fitted on the mean of some 7,000 runs of SGD on a quadratic, whose gradients are as old as a simulation says:
    tolerance 0.01 and 2 %.
    """
    rate, steps, means = 0.2, 4 * replicas + 20, []
    for seed in range(2):
        based, _ = schedule(
            replicas,
            8_000,
            Simulated(handling=INSTANT, network=AT_ONCE, compute=ComputeModel(spread="exponential"), phantom=True),
            seed,
        )
        means.append(windows(based, 8 * replicas, len(based) - 100 * replicas, rate, steps).mean(0))
    w = torch.stack(means).mean(0)
    moves = w.diff()
    momentum, step = (
        torch.linalg.lstsq(torch.stack([moves[:-1], -w[1:-1]], 1), moves[1:].unsqueeze(1)).solution.flatten().tolist()
    )
    assert momentum == pytest.approx(1 - 1 / replicas, abs=0.01)
    assert step == pytest.approx(rate / replicas, rel=0.02)
