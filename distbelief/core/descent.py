"""Descent: the settings of a job that trains in large batches, and which portions a batch is made of."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

import msgspec

from distbelief.core.consistency import Policy, Stage
from distbelief.core.portions import Portion
from distbelief.core.settings import Settings, StrategySettings
from distbelief.errors import UsageError, unknown

METHODS = ("lbfgs", "cg", "gradient")
LINE_SEARCHES = ("wolfe", "backtracking", "none")

PARTS = ("g",)
"""The vector that a whole batch's gradient is summed into."""
OVERLAPPING = ("g.head", "g.middle", "g.tail")
"""Those of a batch that shares its head with the batch before and its tail with the next."""


class Descent(StrategySettings, frozen=True, kw_only=True):
    """How Sandblaster descends, and how a batch is shared out; each field is told of in
    `strategies/sandblaster/options.py`.
    """

    one_moment: ClassVar[bool] = True
    slots: ClassVar[int] = 2
    unit: ClassVar[str] = "iteration"
    spelled: ClassVar[Mapping[str, str]] = {"epochs": "iterations", "batch_size": "portion_size"}

    method: str = "lbfgs"
    batch: int = 0
    overlap: float = 0.25
    history: int = 10
    line_search: str = "wolfe"
    step: float = 1.0
    damping: bool = False
    weight_decay: float = 0.0
    tolerance: float = 1e-7
    send_every: int = 4
    backup_portions: int = 1
    deterministic: bool = False

    def policy(self, settings: Settings, rules: bool) -> Policy:
        """Parameters are fetched for an evaluation."""
        return Stage()

    def check(self, settings: Settings) -> None:
        """Refuse what no job can have.

        Raises:
            UsageError: naming the option, its value and what it may be.
        """
        if self.method not in METHODS:
            raise unknown("method", self.method, METHODS)
        if self.line_search not in LINE_SEARCHES:
            raise unknown("line search", self.line_search, LINE_SEARCHES)
        for name, least in {
            "history": 1,
            "send_every": 1,
            "backup_portions": 0,
            "batch": 0,
            "weight_decay": 0,
            "tolerance": 0,
        }.items():
            value = getattr(self, name)
            if not least <= value < (1 << 63 if isinstance(value, int) else float("inf")):
                shown = {"batch": "batch-size"}.get(name, name.replace("_", "-"))
                raise UsageError(f"--{shown} {value}: must be {least} or more, and fit into 64 bits")
        if self.history > HISTORY_LIMIT:
            raise UsageError(
                f"--history {self.history}: must be at most {HISTORY_LIMIT}; every pair is two vectors on the shards"
            )
        if not 0 < self.step < float("inf"):
            raise UsageError(f"--step {self.step}: must be more than 0")
        if not 0 < self.overlap <= 0.5:
            raise UsageError(
                f"--overlap {self.overlap}: is the fraction of a batch that the next one shares, more than 0 and at "
                "most 0.5"
            )
        if self.overlap != Descent().overlap and not self.batch:
            raise UsageError(
                f"--overlap {self.overlap}: is of consecutive batches, and each is the whole training set here: set "
                "--batch-size, or leave it off"
            )
        if self.history != Descent().history and self.method != "lbfgs":
            raise UsageError(
                f"--history {self.history}: counts the curvature pairs of lbfgs, and --method {self.method} has none: "
                "leave it off"
            )
        if self.damping and self.method != "lbfgs":
            raise UsageError(
                f"--damping is of the curvature pairs of lbfgs, and --method {self.method} has none: leave it off"
            )

    @property
    def parts(self) -> tuple[str, ...]:
        """The vectors that the gradient of a batch is summed into."""
        return OVERLAPPING if self.batch else PARTS


HISTORY_LIMIT = 100
"""Most curvature pairs."""


class WorkUnit(msgspec.Struct, frozen=True, array_like=True):
    """Portions that are dealt, computed, sent and counted together, and the part of the batch that they are in."""

    portion: Portion
    part: int = 0


class Batches:
    """The batches of a job: batch 0, 1, 2, ... is each the whole training set, or a window that moves over it, pass
    after pass.

    The training set is cut into `portions` portions, in the order of its seeded permutation of each pass. Consecutive
    windows overlap.

    Args:
        descent: of the job.
        samples: in the training set.
        portion_size: samples in a portion; the last of a pass may be smaller.

    >>> batches = Batches(Descent(send_every=2), samples=50, portion_size=10)
    >>> [(work_unit.portion.first, work_unit.portion.count) for work_unit in batches.work_units(7)]
    [(0, 2), (2, 2), (4, 1)]
    >>> windows = Batches(Descent(batch=40, overlap=0.25, send_every=2), samples=50, portion_size=10)
    >>> [(b.portion.epoch, b.portion.first, b.portion.count, b.part) for b in windows.work_units(1)]
    [(0, 3, 1, 0), (0, 4, 1, 1), (1, 0, 1, 1), (1, 1, 1, 2)]
    """

    def __init__(self, descent: Descent, samples: int, portion_size: int) -> None:
        self._each = descent.send_every
        self.portions = -(-samples // portion_size)
        self._size = min(self.portions, -(-descent.batch // portion_size)) if descent.batch else 0
        self._shared = max(1, round(self._size * descent.overlap)) if self._size else 0
        if self._size and self._size < 2 * self._shared + 1:
            raise UsageError(
                f"--batch-size {descent.batch} is {self._size} portions of {portion_size} (--portion-size), of which "
                f"{self._shared} are shared with"
                " the batch before and as many with the next: it needs one more at least"
            )

    @property
    def whole(self) -> bool:
        """Whether every batch is the whole training set."""
        return not self._size

    def work_units(self, batch: int) -> list[WorkUnit]:
        """The work units of a batch, in order; always cut alike."""
        if self.whole:
            return self._cut(0, self.portions, 0)
        first = batch * (self._size - self._shared)
        edges = (first, first + self._shared, first + self._size - self._shared, first + self._size)
        return [work_unit for part in range(3) for work_unit in self._cut(edges[part], edges[part + 1], part)]

    def _cut(self, start: int, stop: int, part: int) -> list[WorkUnit]:
        """Portions `start` to `stop` of the endless row of passes, as work units, none of which is in two passes."""
        cut = []
        while start < stop:
            epoch, first = divmod(start, self.portions)
            count = min(self._each, stop - start, self.portions - first)
            cut.append(WorkUnit(Portion(epoch, first, count), part))
            start += count
        return cut
