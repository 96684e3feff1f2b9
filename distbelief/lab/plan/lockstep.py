"""What it costs processes to wait for each other in every step: a short real job of each kind of them says so.

Nothing that is timed in one process by itself shows it: caches hold what was exchanged and not what is computed with,
who waits is woken late, and coordinator and shards have their turns on the same cores. So a gradient is timed inside of
the real exchange, and so is the rest of a step; both are held against the price of the same job, and what they take
more is told to the virtual cluster, of all candidates of the kind.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterable, Mapping
from typing import NamedTuple

from distbelief.errors import DistbeliefError, Interrupted
from distbelief.lab.plan import trials
from distbelief.lab.plan.candidates import PlanCandidate
from distbelief.lab.plan.pricing import LockstepCost, PricedCluster, Pricing, Terms
from distbelief.tasks import Task

SECONDS = 1.0
"""That a job of each kind is trained for."""
LEAST, MOST, HALVINGS = 0.1, 10.0, 10
"""What messages cost at least and at most, as multiples of what they are said to cost; how often that is halved."""


class LockstepCosts(NamedTuple):
    """What was found."""

    found: Mapping[tuple[str, bool], LockstepCost]
    """By the kind of candidate."""
    failed: Mapping[str, str]
    """Candidates whose jobs could not be run, and why."""


def measure(
    task: Task | str, asked: Iterable[PlanCandidate], pricing: Pricing, cluster: PricedCluster, batch_size: int,
    samples: int, data_dir: str | None, told: Callable[[str], None],
) -> LockstepCosts:  # fmt: skip
    """Train for a moment with the first candidate of each kind that waits.

    Args:
        task: what is trained.
        asked: what this machine can hold, those of fewest processes first.
        pricing: of that task.
        cluster: this machine.
        batch_size: samples in a minibatch of a replica.
        samples: in the training set.
        data_dir: folder with it.
        told: is told what is done.

    Raises:
        Interrupted: somebody has ended it.
    """
    found: dict[tuple[str, bool], LockstepCost] = {}
    failed: dict[str, str] = {}
    first: dict[tuple[str, bool], PlanCandidate] = {}
    for one in asked:
        if pricing.meets(one):
            first.setdefault(one.kind, one)
    for one in first.values():
        told(f"steps of {one}")
        try:
            expected = samples / pricing.price(one, cluster).samples_per_second
            seen = trials.run(task, one, batch_size, expected, data_dir, SECONDS, whole=False)
            found[one.kind] = explained(one, pricing, cluster, seen)
        except Interrupted:
            raise
        except DistbeliefError as error:  # one that fails ends no plan, and its price is that without it
            failed[str(one)] = " ".join(str(error).split())
    return LockstepCosts(found, failed)


def explained(one: PlanCandidate, pricing: Pricing, cluster: PricedCluster, seen: Terms) -> LockstepCost:
    """What is to be told to the virtual cluster so that its steps are as long as those that were seen: of gradients
    what these took more, and of messages so much that the rest of a step is there.
    """

    def price(cost: LockstepCost) -> Terms:
        return pricing.price(one, dataclasses.replace(cluster, lockstep={one.kind: cost}))

    gradient = seen.compute / price(LockstepCost()).compute
    low, high = LEAST, MOST
    for _ in range(HALVINGS):
        middle = math.sqrt(low * high)
        low, high = (low, middle) if price(LockstepCost(gradient, middle)).step > seen.step else (middle, high)
    return LockstepCost(gradient, math.sqrt(low * high))
