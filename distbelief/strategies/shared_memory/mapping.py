"""The mapping: memory of one machine that replicas without a server update, with locks or without (Niu et al. 2011).

It holds, one behind the other: the flat vector; the optimizer's state, element by element as the vector; the steps that
the optimizer counts; and what replicas count (`counts.py`). Nothing in it is of one moment: each element is
written by itself.
"""

from __future__ import annotations

from itertools import pairwise

import msgspec

from distbelief.core.optimizer import Optimizer
from distbelief.errors import UsageError, unknown
from distbelief.sharding.layout import ALIGNMENT, ITEM_SIZES, Layout, Range
from distbelief.strategies.shared_memory.counts import size_of

LOCKS = ("none", "shard", "global", "round-robin")
"""Locks of an update: none, each range that it writes to, everything, or everything in the order of replicas."""
WHOLE = ("global", "round-robin")
"""Choices with one lock of everything."""
RANGES = 8
"""Ranges with a lock of their own, where none are asked for; parts of a simulated update where nothing is locked."""
STATES = {"sgd": "", "momentum": "momentum_buffer", "nesterov": "momentum_buffer", "adagrad": "sum"}
"""The optimizers that may step a mapping, and the state that each keeps for every element."""


def check(strategy: str, optimizer: Optimizer, locks: str, shards: int) -> None:
    """Refuse what replicas cannot do by themselves, in one memory.

    Args:
        strategy: its name.
        optimizer: what every update is made by.
        locks: one of `LOCKS`.
        shards: ranges with a lock of their own.

    Raises:
        UsageError: naming the option, and the remedy.
    """
    if optimizer.name not in STATES:
        raise UsageError(
            f"--optimizer {optimizer.name}: its step needs several numbers of one moment, which memory that others "
            "write to does not have; strategy"
            f" {strategy} steps with {', '.join(STATES)}, a server (downpour) with any"
        )
    if optimizer.options.get("dampening"):
        raise UsageError(
            "--optimizer-options dampening: torch leaves it out of the first step, and nobody here knows which is the "
            "first; leave it off"
        )
    if locks not in LOCKS:
        raise unknown("--locks", locks, LOCKS)
    if locks != "shard" and shards != 1:
        raise UsageError(
            f"--shards {shards} with --locks {locks}: says how many ranges have a lock of their own; they do with "
            "--locks shard"
        )


def state_of(optimizer: Optimizer) -> str:
    """The name of the state that the optimizer keeps for every element; "" for none."""
    named = STATES[optimizer.name]
    return "momentum_buffer" if not named and optimizer.options.get("momentum") else named


def ranges(layout: Layout, count: int) -> tuple[Range, ...]:
    """Cut the trained parameters in so many parts, as equal as can be, at multiples of `ALIGNMENT` in a tensor.

    Raises:
        UsageError: there are more parts than parameters.

    >>> from distbelief.sharding.layout import Tensor, lay_out
    >>> ranges(lay_out([Tensor("a", (10,), "float32"), Tensor("b", (90,), "float32")]), 2)
    (Range(start=0, stop=168), Range(start=168, stop=400))
    """
    if count > layout.parameters:
        raise UsageError(
            f"--shards {count} is more than the model's {layout.parameters} parameters; use at most that many"
        )
    entries, stop, edges = layout.trained_entries, layout.trained.stop, [0]
    for part in range(1, count):
        edge = round(stop * part / count)
        entry = max((e for e in entries if e.start <= edge), key=lambda e: e.start)
        snapped = entry.start + round((edge - entry.start) / ALIGNMENT) * ALIGNMENT
        edges.append(max(edges[-1], min(snapped, entry.stop)))
    return tuple(Range(a, b) for a, b in pairwise([*edges, stop]))


class MappingLayout(msgspec.Struct, frozen=True):
    """Places of everything in a mapping, in bytes.

    >>> from distbelief.sharding.layout import Tensor, lay_out
    >>> from distbelief.core.optimizer import optim
    >>> lie = mapping_layout(lay_out([Tensor("w", (100,), "float32")]), optim("adagrad"), shards=2, replicas=2)
    >>> lie.state, lie.steps, lie.counts, lie.length
    (512, 1024, 1152, 2688)
    """

    state: int
    steps: int
    counts: int
    length: int


def mapping_layout(layout: Layout, optimizer: Optimizer, shards: int, replicas: int) -> MappingLayout:
    """Return where everything lies, for this layout and optimizer, so many locked ranges, and so many replicas."""

    def after(start: int, size: int) -> int:
        return -(-(start + size) // ALIGNMENT) * ALIGNMENT

    state = after(0, layout.total)
    steps = after(state, layout.moving if state_of(optimizer) else 0)
    pieces = len(layout.trained_entries) + max(shards, RANGES)  # in at most so many the optimizer steps the vector
    counts = after(steps, pieces * ITEM_SIZES["float32"])
    return MappingLayout(state, steps, counts, counts + 8 * size_of(replicas))
