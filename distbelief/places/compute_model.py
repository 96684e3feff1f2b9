"""Compute times of steps: a distribution, slow replicas and stragglers; and padding that slows real steps to match."""

from __future__ import annotations

import math
import random

import msgspec

from distbelief.core import roles
from distbelief.core.values import CheckedStruct
from distbelief.errors import UsageError, unknown

SPREADS = ("constant", "lognormal", "exponential")


class ComputeModel(CheckedStruct, frozen=True):
    """Compute times of the replicas of a cluster."""

    step: float = 1e-3
    """Mean seconds of a step."""
    spread: str = "lognormal"
    """Distribution around the mean: constant, lognormal or exponential."""
    variation: float = 0.2
    """Standard deviation of the lognormal, as a fraction of the mean."""
    slow: dict[int, float] = msgspec.field(default_factory=dict)
    """Replicas that are always slower, each with its factor."""
    straggle_chance: float = 0.0
    """Probability that a step takes `straggle_factor` times as long."""
    straggle_factor: float = 10.0

    def check(self, replicas: int) -> None:
        """Refuse, with a `UsageError`, values that are impossible for this number of replicas."""
        if self.spread not in SPREADS:
            raise unknown("spread of compute times", self.spread, SPREADS)
        if not (0 <= self.step < math.inf and 0 <= self.variation < math.inf):
            raise UsageError(f"a step of {self.step} s with variation {self.variation}: both must be 0 or more")
        if not (0 <= self.straggle_chance <= 1 and 0 <= self.straggle_factor < math.inf):
            raise UsageError(
                f"stragglers {self.straggle_chance}x{self.straggle_factor}: a chance from 0 to 1 and a factor of 0 or "
                "more"
            )
        for replica, factor in self.slow.items():
            if not 0 <= replica < replicas:
                raise UsageError(f"{roles.replica(replica)} cannot be slow: there are replicas 0 to {replicas - 1}")
            if not 0 < factor < math.inf:
                raise UsageError(f"{roles.replica(replica)} slower {factor} times: must be more than 0, and finite")


class Stopwatch:
    """Generator of the compute times of one replica, or of one partition, from a seed.

    >>> Stopwatch(ComputeModel(step=2.0, spread="constant", slow={1: 4.0}), 1, seed=0).draw()
    8.0
    """

    def __init__(self, compute: ComputeModel, replica: int, seed: int, partition: int = 0) -> None:
        self._compute = compute
        self._chance = random.Random(f"{seed}/{replica}.{partition}" if partition else f"{seed}/{replica}")
        self._mean = compute.step * compute.slow.get(replica, 1.0)
        # a lognormal with mean 1 and the standard deviation of the options
        self._sigma = math.sqrt(math.log1p(compute.variation**2))
        self._mu = -(self._sigma**2) / 2

    def draw(self) -> float:
        """Return the seconds of the next step."""
        compute, seconds = self._compute, self._mean
        if compute.spread == "lognormal":
            seconds *= self._chance.lognormvariate(self._mu, self._sigma)
        elif compute.spread == "exponential":
            seconds *= self._chance.expovariate(1.0)
        if compute.straggle_chance and self._chance.random() < compute.straggle_chance:
            seconds *= compute.straggle_factor
        return seconds


class Padding:
    """Generator of a replica's sleeps, which make each step as slow as a compute model says.

    >>> Padding(ComputeModel(step=2.0, spread="constant", slow={1: 4.0}), 1, seed=0).rest(0.5)
    7.5
    """

    def __init__(self, compute: ComputeModel, replica: int, seed: int) -> None:
        self._least, self._factor = compute.step, 1.0
        self._factors = Stopwatch(msgspec.structs.replace(compute, step=1.0), replica, seed)

    def rest(self, elapsed: float, share: float = 1.0, begins: bool = True) -> float:
        """Return the seconds to sleep after a step that took `elapsed` seconds.

        A step may be done in several shares; only the first one `begins` it.
        """
        if begins:
            self._factor = self._factors.draw()
        return max(0.0, max(self._least * share, elapsed) * self._factor - elapsed)
