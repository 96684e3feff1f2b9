"""Conformance suite of fabrics: the promises of `distbelief.fabric.base`, checked by all ranks together."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from time import monotonic
from typing import NamedTuple

import torch

from distbelief.fabric.base import Fabric
from distbelief.fabric.buckets import Bucket

PATIENCE_SECONDS = 60.0
"""Longest time of a round."""
MOMENT_SECONDS = 30.0
"""Longest time of a call that waits for no rank, even on a busy machine."""
ROUNDS = 4
LOOKS = 9
"""Number of times to look whether a round ends without a rank."""
GUARD = 64
"""Bytes between two vectors, which the fabric must not write to."""
LONG = 700_000
"""Elements of a vector that is longer than any chunk of a fabric."""


class Side(NamedTuple):
    """Open side of a fabric for one rank."""

    fabric: Fabric
    slot: torch.Tensor
    """Bytes into which this rank writes its values."""
    total: torch.Tensor
    """Bytes in which it finds the sums; it may be the slot."""
    leave: Callable[[], None] | None = None
    """Function that ends this side, as other ranks then notice; None if only the fabric's driver can end it."""


Open = Callable[[str, int, Sequence[Bucket]], Side]
"""Function that opens a side, given the algorithm, the number of bytes, and the vectors in them.

It is called several times, and opens a fresh side each time.
"""


def check_fabric(open_side: Open, rank: int, ranks: int, meet: Callable[[], object], algorithms: Sequence[str]) -> None:
    """Check every promise of `distbelief.fabric.base`; all ranks call this together, in threads or processes.

    `open_side` opens a fresh side for this rank, and `meet` waits until all ranks have called it.

    Raises:
        AssertionError: a promise is broken; the message names it.
    """
    for algorithm in algorithms:
        _Check(open_side, rank, ranks, meet, algorithm).play()


class _Check:
    """Check of one algorithm on six vectors.

    These are integers, one integer, floats, those floats' bits from the last round, a long vector, and bytes of the
    first rank.
    """

    def __init__(self, open_side: Open, rank: int, ranks: int, meet: Callable[[], object], algorithm: str) -> None:
        self.rank, self.ranks, self.meet, self.algorithm = rank, ranks, meet, algorithm
        lengths = [(1003, "float64"), (1, "float64"), (517, "float32"), (517, "float64"), (LONG, "float32")]
        self.buckets, start = list[Bucket](), GUARD
        for length, dtype in lengths:
            size = length * (8 if dtype == "float64" else 4)
            self.buckets.append(Bucket(start, start + size, dtype))
            start += -(-size // GUARD) * GUARD + GUARD
        self.buckets.append(Bucket(start, start + 5, "uint8", adds=False))
        self.size = start = start + 2 * GUARD
        self.side = open_side(algorithm, start, self.buckets)
        for vector in (self.side.slot, self.side.total):
            assert (vector.dtype, vector.numel()) == (torch.uint8, start), f"a vector is {start} bytes: {vector}"

    def play(self) -> None:
        """Play all rounds, each with another late rank; then let the last rank leave."""
        for vector in (self.side.slot, self.side.total):
            self._guard(vector)
        sums: list[torch.Tensor] = []
        for number in range(ROUNDS):
            late = number % self.ranks == self.rank
            if not late:
                self._bring(number, sums)
                self._look(number)
            self.meet()
            if late:
                self._stays(sums)
                self._bring(number, sums)
            self._wait_for_true(number)
            before, sums = sums, [self._view(self.side.total, bucket).clone() for bucket in self.buckets]
            self._check_guards()
            if self.side.total is not self.side.slot:
                self.side.slot.fill_(255)  # the memory belongs to this rank again: a late reader gets garbage
                self._guard(self.side.slot)
            self._holds(number, before, sums)
        self.meet()
        self._stays(sums)
        if self.side.leave is not None and self.ranks > 1:
            self._last_leaves()

    def _bring(self, number: int, sums: list[torch.Tensor]) -> None:
        """Write this rank's values for a round, and make its vectors ready in an order that differs by rank."""
        for bucket, brought in zip(self.buckets, self._brought(number, self.rank, sums), strict=True):
            self._view(self.side.slot, bucket).copy_(brought)
        order = torch.randperm(len(self.buckets), generator=torch.Generator().manual_seed(97 * number + self.rank))
        for bucket in order.tolist():
            self._quickly(partial(self.side.fabric.ready, bucket), "ready")

    def _brought(self, number: int, rank: int, sums: list[torch.Tensor]) -> list[torch.Tensor]:
        """Return a rank's values, which every rank can compute except for the bits of the last round."""
        chance = torch.Generator().manual_seed(1000 * number + rank)
        whole = [torch.randint(-1000, 1000, (length,), generator=chance).double() for length in (1003, 1)]
        loose = torch.randn(517, generator=chance)
        bits = sums[2].view(torch.int32).double() if sums else torch.zeros(517, dtype=torch.float64)
        long = torch.randint(-1000, 1000, (1,), generator=chance).float() + torch.arange(LONG) % 1000
        first = torch.full((5,), 10 * rank + number, dtype=torch.uint8)
        return [*whole, loose, bits, long, first]

    def _look(self, number: int) -> None:
        """Check that asking for progress never blocks, and that no round is done too early."""
        for _ in range(LOOKS):
            done = self._quickly(self.side.fabric.reduce, "reduce")
            assert done is None, f"{self._at(number)} says {done} before every rank has contributed"

    def _wait_for_true(self, number: int) -> None:
        end = monotonic() + PATIENCE_SECONDS
        while (done := self._quickly(self.side.fabric.reduce, "reduce")) is None:
            assert monotonic() < end, f"{self._at(number)} is not done within {PATIENCE_SECONDS:g} s"
        assert done, f"{self._at(number)} says that a rank is gone, but none is"

    def _holds(self, number: int, before: list[torch.Tensor], sums: list[torch.Tensor]) -> None:
        """Check the sums, and that all ranks have the same bits."""
        everybody = [self._brought(number, rank, before) for rank in range(self.ranks)]
        for at, bucket in enumerate(self.buckets):
            wanted = (
                torch.stack([brought[at] for brought in everybody]).double().sum(0) if bucket.adds else everybody[0][at]
            )
            what = f"{self._at(number)}, vector {at}"
            if at == 2:
                torch.testing.assert_close(
                    sums[at].double(), wanted, rtol=0, atol=self.ranks * 1e-5, msg=f"{what} is not the sum of all"
                )
            elif at == 3:
                assert torch.equal(sums[at], wanted), (
                    f"{what}: two ranks had different bits of vector 2 in the round before"
                )
            else:
                assert torch.equal(sums[at].double(), wanted.double()), (
                    f"{what} is not the {'sum' if bucket.adds else 'first'} of all: {sums[at]}"
                )

    def _stays(self, sums: list[torch.Tensor]) -> None:
        """Check that the sums stay until this rank writes its next values."""
        for at, (bucket, kept) in enumerate(zip(self.buckets, sums, strict=bool(sums))):
            now = self._view(self.side.total, bucket)
            assert torch.equal(now.view(torch.uint8), kept.view(torch.uint8)), (
                f"{self.algorithm}: vector {at} changed before its rank wrote anything new"
            )

    def _last_leaves(self) -> None:
        """Check that a waiting rank notices when the awaited rank leaves."""
        assert self.side.leave is not None
        if self.rank != self.ranks - 1:
            self._bring(ROUNDS, [])
        self.meet()
        if self.rank == self.ranks - 1:
            self.side.leave()
        else:
            end = monotonic() + PATIENCE_SECONDS
            while (done := self.side.fabric.reduce()) is None:
                assert monotonic() < end, f"{self.algorithm}: nobody learns that a rank has left"
            assert not done, f"{self.algorithm}: a round is done without a rank that has left"
            self.side.leave()  # so that no rank waits for this one
        self.meet()

    def _quickly(self, act: Callable[[], bool | None] | Callable[[], None], what: str) -> bool | None:
        began = monotonic()
        done = act()
        assert monotonic() - began < MOMENT_SECONDS, f"{self.algorithm}: {what} waited for another rank"
        return done

    def _between(self) -> list[slice]:
        edges = [0, *(edge for bucket in self.buckets for edge in (bucket.start, bucket.stop)), self.size]
        return [slice(edges[i], edges[i + 1]) for i in range(0, len(edges), 2)]

    def _guard(self, vector: torch.Tensor) -> None:
        for between in self._between():
            vector[between] = 77

    def _check_guards(self) -> None:
        for name, vector in (("slot", self.side.slot), ("total", self.side.total)):
            for between in self._between():
                assert bool((vector[between] == 77).all()), (
                    f"{self.algorithm}: it wrote to bytes {between} of the {name}, which belong to no vector"
                )

    def _view(self, vector: torch.Tensor, bucket: Bucket) -> torch.Tensor:
        return vector[bucket.start : bucket.stop].view(getattr(torch, bucket.dtype))

    def _at(self, number: int) -> str:
        return f"{self.algorithm}, round {number}, rank {self.rank}"
