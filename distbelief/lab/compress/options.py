"""Options of compression, checked before anything is computed."""

from __future__ import annotations

from dataclasses import dataclass

from distbelief.codecs import MOST_BITS, PRECISIONS
from distbelief.core.settings import at_least
from distbelief.core.values import check_fields
from distbelief.errors import UsageError, unknown
from distbelief.strategies import find

STARTS = ("linear", "density", "random")
"""Initial centers of k-means."""
RESTS = ("float32", *PRECISIONS)


@dataclass(frozen=True)
class Compression:
    """Make the model of a run smaller: prune it (--keep), let its weights share a few values (--bits), code the rest
    (--huffman), and train it between these steps.
    """

    keep: tuple[float, ...] = ()
    """Share of each layer's weights to keep, above 0 and at most 1: one number for all layers, or one for each in
    order; by default nothing is pruned."""
    bits: int = 0
    """Bits of a weight: the weights of a layer share 2**bits values, 1 to 12; 0 shares none."""
    huffman: bool = False
    """Write frequent values and gaps in fewer bits."""
    start: str = "linear"
    """Initial centers of k-means: linear, density or random."""
    rest: str = "float32"
    """Precision of unshared values: float32, bf16, fp16 or int8."""
    fine_tune: int = 3
    """Epochs of training after each pruning (twice as many after the last) and with shared values; 0 prunes at once and
    trains nothing."""
    lr: float = 0.001
    """Adam's learning rate in these epochs, which falls to 0 along a cosine."""
    batch_size: int = 128
    """Samples in a minibatch of one replica."""
    strategy: str = "single"
    """Strategy that trains these epochs, or module:Class of your own."""
    replicas: int = 1
    """Replicas, if the strategy has them."""
    seed: int = 0
    """Seed of the data's order and of random starts."""
    data_dir: str | None = None
    """Folder with the data; by default the run's, then $DISTBELIEF_DATA, then the cache."""

    def __post_init__(self) -> None:
        check_fields(self)
        for share in self.keep:
            if not 0 < share <= 1:
                raise UsageError(f"--keep {share:g}: must be above 0, and at most 1, which keeps all")
        if self.bits and not 1 <= self.bits <= MOST_BITS:
            raise UsageError(f"--bits {self.bits}: must be 1 or more and at most {MOST_BITS}, or 0 to share nothing")
        if self.start not in STARTS:
            raise unknown("start", self.start, STARTS)
        if self.rest not in RESTS:
            raise unknown("precision", self.rest, RESTS)
        at_least(self, 0, ("fine_tune",), {})
        at_least(self, 1, ("batch_size", "replicas"), {})
        if not 0 < self.lr < float("inf"):
            raise UsageError(f"--lr {self.lr:g}: must be above 0")
        self._check_idle()

    def _check_idle(self) -> None:
        fields = getattr(find(self.strategy), "__dataclass_fields__", {})
        if "optimizer" not in fields:
            raise UsageError(f"--strategy {self.strategy}: has no optimizer; name another, such as downpour")
        if self.replicas > 1 and "replicas" not in fields:
            raise UsageError(f"--replicas {self.replicas}: strategy {self.strategy} has none; name one with --strategy")
        if not self.bits and self.start != "linear":
            raise UsageError(f"--start {self.start}: is for shared values, and there are none: set --bits")
        if self.huffman and not (self.bits or any(share < 1 for share in self.keep)):
            raise UsageError("--huffman codes ids and gaps, and there are none: set --bits or --keep")
        if not (self.bits or self.keep or self.rest != "float32"):
            raise UsageError("nothing would be smaller: set --keep, --bits or --rest")
