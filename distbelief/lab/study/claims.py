"""Claims of a study about its arms, such as a paper's, and rules that judge them."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import msgspec

FIGURES: Mapping[str, Callable[[Any], float]] = {
    "accuracy": lambda arm: arm.accuracy_with_failed,
    "seconds to the target": lambda arm: arm.targets[-1].median if arm.targets else math.nan,
    "epochs to the target": lambda arm: arm.targets[-1].epochs if arm.targets else math.nan,
    "milliseconds a step": lambda arm: 1e3 * arm.seconds_per_step,
    "milliseconds an update": lambda arm: 1e3 * arm.seconds_per_update,
    "samples to the target": lambda arm: arm.targets[-1].samples if arm.targets else math.nan,
    "microseconds a sample": lambda arm: 1e6 / arm.samples_per_second,
    "samples a second": lambda arm: arm.samples_per_second,
    "milliseconds of waiting": lambda arm: 1e3 * arm.parts.get("wait", math.nan),
    "milliseconds of computing": lambda arm: 1e3 * arm.parts.get("compute", math.nan),
    "mean staleness": lambda arm: arm.staleness,
    "most staleness": lambda arm: arm.most_staleness,
    "momentum": lambda arm: arm.momentum,
    "cosine": lambda arm: arm.cosine,
}
"""Figures that a claim may name; reading a file needs no `ArmFigures`."""


class Claim(msgspec.Struct, frozen=True):
    """Expectation of some arms in order."""

    says: str
    of: str
    """Its figure: one of `FIGURES`."""
    shape: str
    """Course of the figure from arm to arm: one of `SHAPES`."""
    arms: tuple[str, ...] = ()
    """Arms by name; all if none is named."""
    values: tuple[float, ...] = ()
    within: float = 0.0
    """Fraction by which a value may miss the shape."""


class Judged(msgspec.Struct, frozen=True):
    """Claim with its verdict."""

    says: str
    found: str
    agrees: bool

    def line(self) -> str:
        """Return the verdict as one sentence."""
        return f"{'agrees' if self.agrees else 'does not agree'}: {self.says} ({self.found})"


def judge(claim: Claim, values: Sequence[float]) -> Judged:
    """Judge whether arms agree with a claim; without a figure they do not."""
    expected = claim.values or (math.nan,) * len(values)
    known = not any(math.isnan(value) for value in values)
    figures = ", ".join(f"{name} {_number(value)}" for name, value in zip(claim.arms, values, strict=True))
    return Judged(claim.says, f"{claim.of}: {figures}", known and SHAPES[claim.shape](values, expected, claim.within))


def _number(value: float) -> str:
    return "never" if math.isinf(value) else "nothing" if math.isnan(value) else f"{value:.4g}"


def _rises(values: Sequence[float], _: Sequence[float], within: float) -> bool:
    """Return whether values rise overall, and from each to the next, within the allowed fraction.

    >>> _rises([1.0, 2.0, 1.99, 3.0], [], 0.01), _rises([1.0, 2.0, 1.5, 3.0], [], 0.01), _rises([1.0, 1.0], [], 0.0)
    (True, False, False)
    """
    steady = all(after >= before * (1 - within) for before, after in itertools.pairwise(values))
    return steady and values[-1] > values[0] * (1 + within)


VALUED = ("near", "most")
"""Shapes with a value for each arm."""
SHAPES: Mapping[str, Callable[[Sequence[float], Sequence[float], float], bool]] = {
    "rises": _rises,
    "falls": lambda values, _, within: _rises(values[::-1], _, within),
    "flat": lambda values, _, within: math.isfinite(max(values)) and max(values) <= min(values) * (1 + within),
    # less in between than at both ends
    "dips": lambda values, _, within: min(values[1:-1], default=math.inf) * (1 + within) < min(values[0], values[-1]),
    "near": lambda values, wanted, within: all(
        abs(value - expected) <= within * abs(expected) for value, expected in zip(values, wanted, strict=True)
    ),
    "most": lambda values, wanted, within: all(
        value <= expected * (1 + within) for value, expected in zip(values, wanted, strict=True)
    ),
}


def momentum(staleness: Mapping[str, int]) -> float:
    """Return the momentum equivalent to a staleness: the factor by which each age of gradients is rarer than the last.

    It is fitted to the logarithms of the histogram, weighted by the counts (Mitliagkas et al. 2016).

    >>> round(momentum({str(age): round(1e6 * 0.5**age) for age in range(12)}), 3)
    0.5
    """
    counts = [(int(age), count) for age, count in staleness.items() if count]
    total = sum(count for _, count in counts)
    if len(counts) < 2:
        return 0.0
    age = sum(count * updates for updates, count in counts) / total
    level = sum(count * math.log(count) for _, count in counts) / total
    spread = sum(count * (updates - age) ** 2 for updates, count in counts)
    return math.exp(sum(count * (updates - age) * (math.log(count) - level) for updates, count in counts) / spread)
