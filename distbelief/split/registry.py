"""The ways to split, by name, and how each kind of layer splits in each: a table that users add to."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING

from distbelief.errors import UsageError, unknown

if TYPE_CHECKING:
    from torch import nn

    from distbelief.split.layers import Divided
    from distbelief.split.tidying import Shape

PLACING = {
    "stages": "runs of consecutive layers, balanced by work",
    "branches": "the paths between a fork and where they join",
    "time": "the layers of a recurrent stack, over chunks of the sequence",
    "samples": "what comes before fully connected layers by samples, these by neurons, in a round for each part",
}
"""The ways that say at which partition each node is."""
DIVIDING = {
    "neurons": "fully connected layers by neurons, two at a time: columns, then rows",
    "columns": "fully connected layers by what they give",
    "rows": "fully connected layers by what they take",
    "filters": "convolutions by filters",
    "regions": "convolutions and pooling by rows of the image",
    "groups": "convolutions by groups, or filters where they have none; fully connected layers by columns",
}
"""The ways that divide each layer over all partitions."""


@dataclass(frozen=True)
class LayerCall:
    """A layer that is to be divided, where it is called."""

    layer: nn.Module
    path: str
    takes: tuple[Shape, ...]
    gives: Shape
    partitions: int
    owner: int
    """The partition to which tensors go that are not divided: the one that has the least."""

    def sections(
        self,
        gives: int,
        needs: Callable[[int, int], tuple[int, int, int] | None],
        holds: Mapping[str, int],
        changed: Callable[[int, int], Mapping[str, object]],
        bounds: tuple[int, ...] = (),
    ) -> Divided:
        """Each partition has a run of what the layer gives along a dimension, and computes it by a layer of that shape.

        Args:
            gives: the dimension.
            needs: from the first index of a run and the one behind its last to what of the input that takes: a
                dimension, its first index, and the one behind its last; None where it takes the whole.
            holds: of each parameter that is cut as what the layer gives is, along which dimension.
            changed: from the same two indices to the attributes in which the layer of a run differs.
            bounds: where runs begin, and the last one ends; as equal as can be, where left out.

        Raises:
            UsageError: there are fewer indices than partitions.
        """
        from distbelief.split.layers import Divided, Indices, NodeShare, edges, part_of

        length = self.gives.fixed[gives]
        if length < self.partitions:
            raise self.refuse(f"indices in dimension {gives} of what it gives", length)
        bounds, parts = bounds or edges(length, self.partitions), []
        for start, stop in pairwise(bounds):
            extents: dict[str, Indices | None] = {name: Indices(at, start, stop) for name, at in holds.items()}
            layer = part_of(self.layer, extents, **changed(start, stop))
            taken = needs(start, stop)
            need = Indices(*taken) if taken else None
            parts.append(NodeShare((need,), Indices(gives, start, stop), layer, extents))
        return Divided(tuple(parts), gives, bounds)

    def refuse(self, what: str, most: int) -> UsageError:
        """The error of a layer that has fewer of something than there are partitions."""
        return UsageError(
            f"--partitions {self.partitions}: {self.path} has {most} {what}; split it over at most {most}, or "
            f"another way"
        )


Rule = Callable[[LayerCall], "Divided"]
_RULES: dict[tuple[type, str], Rule] = {}


def register(layer: type[nn.Module], way: str, rule: Rule) -> None:
    """Say how a kind of layer is divided over partitions. Its class can say so itself: by `divisions`, from ways to
    rules.

    Args:
        layer: its class; subclasses are not meant.
        way: a name, known or new, that `Split` then takes.
        rule: from a call of such a layer to what each partition computes, holds and takes of it, as `call.sections`
            makes it. What a partition takes and does not have is sent there; nothing else is.

    Raises:
        UsageError: the way places nodes and divides none.
    """
    if way in PLACING:
        raise UsageError(f"register({layer.__name__}, {way!r}): {way} places whole layers; choose another name")
    DIVIDING.setdefault(way, f"as {layer.__name__} is registered")
    _RULES[layer, way] = rule


def rule_of(layer: nn.Module, way: str) -> Rule | None:
    """Return how a layer is divided in a way: as registered, or by its class's `divisions`; None where it cannot be."""
    return _RULES.get((type(layer), way)) or _own(layer).get(way)


def ways_of(layer: nn.Module) -> list[str]:
    """The ways in which a layer can be divided."""
    return sorted({way for kind, way in _RULES if kind is type(layer)} | _own(layer).keys())


def _own(layer: nn.Module) -> Mapping[str, Rule]:
    """The rules that a layer's class brings: by the name of a way."""
    divisions: Mapping[str, Rule] = getattr(type(layer), "divisions", {})
    return divisions


def check_way(way: str) -> None:
    """Refuse what is no way.

    Raises:
        UsageError: with the nearest.
    """
    if way not in PLACING and way not in DIVIDING:
        raise unknown("way to split", way, (*PLACING, *DIVIDING))
