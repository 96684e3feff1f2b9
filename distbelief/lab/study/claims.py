"""What a study expects of its arms, as a paper says it, and whether that was found: each by a rule, none by hand."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Mapping, Sequence

import msgspec

OF = (
    "accuracy", "seconds to the target", "samples to the target", "milliseconds a step", "milliseconds an update",
    "microseconds a sample", "samples a second", "milliseconds of waiting", "milliseconds of computing",
    "mean staleness", "most staleness", "momentum", "cosine",
)  # fmt: skip
"""The figures of an arm that a claim may be about; `study.figures.FIGURES` has them."""


class Claim(msgspec.Struct, frozen=True):
    """What is expected of some arms, in their order."""

    says: str
    """What the paper says, in words, and where."""
    of: str
    """The figure that it is about: one of `OF`."""
    arms: tuple[str, ...]
    shape: str
    """What the figure does from arm to arm: one of `SHAPES`."""
    values: tuple[float, ...] = ()
    """With the shape near: the value of each arm."""
    within: float = 0.0
    """The fraction by which a value may miss the shape."""


class Judged(msgspec.Struct, frozen=True):
    """A claim, and what was found."""

    says: str
    found: str
    agrees: bool

    def line(self) -> str:
        """In one sentence.

        >>> Judged("it rises", "accuracy: a 1, b 2", True).line()
        'agrees: it rises (accuracy: a 1, b 2)'
        """
        return f"{'agrees' if self.agrees else 'does not agree'}: {self.says} ({self.found})"


def judge(claim: Claim, values: Sequence[float]) -> Judged:
    """Whether arms do what is claimed; what has no figure agrees with nothing.

    Args:
        claim: what is expected.
        values: the figure of each of its arms.
    """
    expected = claim.values or (math.nan,) * len(values)
    known = not any(math.isnan(value) for value in values)
    told = ", ".join(f"{name} {_number(value)}" for name, value in zip(claim.arms, values, strict=True))
    return Judged(claim.says, f"{claim.of}: {told}", known and SHAPES[claim.shape](values, expected, claim.within))


def _number(value: float) -> str:
    return "never" if math.isinf(value) else "nothing" if math.isnan(value) else f"{value:.4g}"


def _rises(values: Sequence[float], _: Sequence[float], within: float) -> bool:
    """From each arm to the next, but for what it may miss; and on the whole by more than that.

    >>> _rises([1.0, 2.0, 1.99, 3.0], [], 0.01), _rises([1.0, 2.0, 1.5, 3.0], [], 0.01), _rises([1.0, 1.0], [], 0.0)
    (True, False, False)
    """
    steady = all(after >= before * (1 - within) for before, after in itertools.pairwise(values))
    return steady and values[-1] > values[0] * (1 + within)


def _falls(values: Sequence[float], expected: Sequence[float], within: float) -> bool:
    return _rises(values[::-1], expected, within)


def _flat(values: Sequence[float], _: Sequence[float], within: float) -> bool:
    """The largest is larger than the least by what it may miss, at most.

    >>> _flat([1.0, 1.05, 0.99], [], 0.1), _flat([1.0, math.inf], [], 0.1)
    (True, False)
    """
    return math.isfinite(max(values)) and max(values) <= min(values) * (1 + within)


def _dips(values: Sequence[float], _: Sequence[float], within: float) -> bool:
    """Less than at both ends, by more than what it may miss, in between.

    >>> _dips([3.0, 1.0, 2.0], [], 0.1), _dips([3.0, 2.0, 1.0], [], 0.1)
    (True, False)
    """
    return min(values[1:-1], default=math.inf) * (1 + within) < min(values[0], values[-1])


def _near(values: Sequence[float], expected: Sequence[float], within: float) -> bool:
    """Each is what is expected.

    >>> _near([1.0, 2.1], [1.0, 2.0], 0.1), _near([1.0, 2.1], [1.0, 2.0], 0.01)
    (True, False)
    """
    return all(abs(value - one) <= within * abs(one) for value, one in zip(values, expected, strict=True))


def _most(values: Sequence[float], expected: Sequence[float], within: float) -> bool:
    """Each is no more than what is expected.

    >>> _most([1.0, 2.1], [1.0, 2.0], 0.1), _most([1.0, 2.5], [1.0, 2.0], 0.1)
    (True, False)
    """
    return all(value <= one * (1 + within) for value, one in zip(values, expected, strict=True))


VALUED = ("near", "most")
"""Shapes that say a value for each arm."""
SHAPES: Mapping[str, Callable[[Sequence[float], Sequence[float], float], bool]] = {
    "rises": _rises, "falls": _falls, "flat": _flat, "dips": _dips, "near": _near, "most": _most,
}  # fmt: skip
"""What a figure may do from arm to arm."""


def momentum(staleness: Mapping[str, int]) -> float:
    """The momentum as which staleness acts: the factor by which each age of gradients is rarer than the one before,
    fitted to the histogram by the logarithms, weighted by the counts (Mitliagkas et al. 2016).

    >>> round(momentum({str(age): round(1e6 * 0.5**age) for age in range(12)}), 3)
    0.5
    """
    found = [(int(age), count) for age, count in staleness.items() if count]
    total = sum(count for _, count in found)
    if len(found) < 2:
        return 0.0
    age, level = (sum(count * one(age, count) for age, count in found) / total
                  for one in (lambda age, _: age, lambda _, count: math.log(count)))  # fmt: skip
    spread = sum(count * (one - age) ** 2 for one, count in found)
    return math.exp(sum(count * (one - age) * (math.log(count) - level) for one, count in found) / spread)
