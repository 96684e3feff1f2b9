"""Ways to split by name, and rules that divide each kind of layer: a table that users extend."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING

from distbelief.errors import UsageError

if TYPE_CHECKING:
    from torch import nn

    from distbelief.split.layers import Divided
    from distbelief.split.tidying import Shape

PLACING = {
    "stages": "runs of consecutive layers, balanced by work",
    "branches": "the paths between a fork and where they join",
    "time": "the layers of a recurrent stack, over chunks of the sequence",
    "samples": "layers before the fully connected ones by samples; those by neurons, part after part",
}
"""Ways that place each node at a partition."""
DIVIDING = {
    "neurons": "fully connected layers by neurons, two at a time: columns, then rows",
    "columns": "fully connected layers by outputs",
    "rows": "fully connected layers by inputs",
    "filters": "convolutions by filters",
    "regions": "convolutions and pooling by rows of the image",
    "groups": "convolutions by groups, or by filters if they have none; fully connected layers by columns",
}
"""Ways that divide each layer over all partitions."""


@dataclass(frozen=True)
class LayerCall:
    """Call of a layer to divide."""

    layer: nn.Module
    path: str
    takes: tuple[Shape, ...]
    gives: Shape
    partitions: int
    owner: int
    """Partition that gets undivided tensors: the one that holds the least."""

    def sections(
        self,
        gives: int,
        needs: Callable[[int, int], tuple[int, int, int] | None],
        holds: Mapping[str, int],
        changed: Callable[[int, int], Mapping[str, object]],
        bounds: tuple[int, ...] = (),
    ) -> Divided:
        """Divide the layer's output along a dimension, and have each partition compute a run of it by a smaller layer.

        Args:
            gives: dimension of the output.
            needs: returns the needed input of a run, given its first index and the one after its last: a dimension and
                two such indices; None for the whole input.
            holds: dimension of each parameter that is divided as the output is.
            changed: returns the attributes in which a run's layer differs, from the same two indices.
            bounds: first index of each run, and the end of the last; by default runs are as equal as possible.
        """
        from distbelief.split.layers import Divided, Indices, NodeShare, edges, part_of

        length = self.gives.fixed[gives]
        if length < self.partitions:
            raise self.refuse(f"indices in dimension {gives} of its output", length)
        bounds, parts = bounds or edges(length, self.partitions), []
        for start, stop in pairwise(bounds):
            extents: dict[str, Indices | None] = {name: Indices(at, start, stop) for name, at in holds.items()}
            layer = part_of(self.layer, extents, **changed(start, stop))
            needed = needs(start, stop)
            need = Indices(*needed) if needed else None
            parts.append(NodeShare((need,), Indices(gives, start, stop), layer, extents))
        return Divided(tuple(parts), gives, bounds)

    def refuse(self, what: str, most: int) -> UsageError:
        """Return the error for a layer that has fewer of something than there are partitions."""
        return UsageError(
            f"--partitions {self.partitions}: {self.path} has {most} {what}; split it over at most {most}, or "
            f"another way"
        )


Rule = Callable[[LayerCall], "Divided"]
_RULES: dict[tuple[type, str], Rule] = {}


def register(layer: type[nn.Module], way: str, rule: Rule) -> None:
    """Register how a kind of layer is divided over partitions.

    A class can bring its rules itself: as `divisions`, a mapping from ways to rules.

    Args:
        layer: class of the layer, without subclasses.
        way: known or new name, which `Split` then accepts.
        rule: returns what each partition computes, holds and takes in a call, as `call.sections` does; missing inputs
            are sent there.

    Raises:
        UsageError: the way places whole nodes and divides none.
    """
    if way in PLACING:
        raise UsageError(f"register({layer.__name__}, {way!r}): {way} places whole layers; choose another name")
    DIVIDING.setdefault(way, f"as registered for {layer.__name__}")
    _RULES[layer, way] = rule


def rule_of(layer: nn.Module, way: str) -> Rule | None:
    """Return the registered rule of a layer and way, or its class's; None without either."""
    return _RULES.get((type(layer), way)) or _own(layer).get(way)


def ways_of(layer: nn.Module) -> list[str]:
    """Return the ways in which a layer can be divided."""
    return sorted({way for kind, way in _RULES if kind is type(layer)} | _own(layer).keys())


def _own(layer: nn.Module) -> Mapping[str, Rule]:
    divisions: Mapping[str, Rule] = getattr(type(layer), "divisions", {})
    return divisions
