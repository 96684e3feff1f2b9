"""Norms of layers that are cut across shards: in each round each shard sends the ruler its parts' share, and gets sums.

A restarted shard sends its shares again, and all shards do so to a restarted ruler. A round's norms are added up once,
and kept for as long as a shard may ask. A shard that makes no update in a round, since none of its pushes came, sends
an empty share.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable

from distbelief.core import roles
from distbelief.core.conversations.agreement import Norms, Squares
from distbelief.core.effects import Send
from distbelief.core.optimizer import LAYERWISE
from distbelief.core.settings import Plan
from distbelief.errors import RemoteProtocolError
from distbelief.sharding.layout import Layout, Range

KEPT = 8
"""Rounds whose norms are kept: no shard is more than two rounds behind (see `core/rounds`)."""


def layers_in(layout: Layout, part: Range) -> list[tuple[int, Range]]:
    """Return the trained tensors in a range: the number of each in the layout (its first piece's), and its bytes."""
    numbers: dict[str, int] = {}
    for number, entry in enumerate(layout.entries):
        numbers.setdefault(entry.tensor.name, number)
    return [(numbers[layer.entry.tensor.name], layer.part) for layer in layout.trained_in(part)]


def cut_layers(plan: Plan) -> dict[int, set[int]]:
    """Return the numbers of the layers that lie on several shards, each with the numbers of these shards.

    There are none where the optimizer needs no norm of a layer.

    >>> from distbelief.sharding.layout import Tensor, lay_out
    >>> from distbelief.core.settings import Settings
    >>> from distbelief.sharding.assignments import cut
    >>> from distbelief.strategies import Downpour
    >>> layout = lay_out([Tensor("bias", (32,), "float32"), Tensor("weight", (96,), "float32")])
    >>> cut_layers(Plan(Settings(strategy=Downpour(optimizer="lars")), layout, cut(layout, 1, 2), 8))
    {1: {0, 1}}
    """
    if plan.settings.optimizer.name not in LAYERWISE:
        return {}
    holders: dict[int, set[int]] = {}
    for shard, assignment in enumerate(plan.assignments):
        for number, _ in layers_in(plan.layout, assignment.moving):
            holders.setdefault(number, set()).add(shard)
    return {number: shards for number, shards in holders.items() if len(shards) > 1}


def added(parts: Iterable[Squares]) -> Squares:
    """Add up the squares of parts of layers, in order.

    >>> added([((1, 9.0, 1.0),), ((1, 16.0, 3.0), (4, 1.0, 1.0))])
    ((1, 25.0, 4.0), (4, 1.0, 1.0))
    """
    sums: dict[int, tuple[float, float]] = {}
    for part in parts:
        for layer, weights, moves in part:
            before = sums.get(layer, (0.0, 0.0))
            sums[layer] = before[0] + weights, before[1] + moves
    return tuple((layer, *both) for layer, both in sums.items())


class Exchange:
    """One shard's side of the exchange.

    >>> from distbelief.sharding.layout import Tensor, lay_out
    >>> from distbelief.core.settings import Settings
    >>> from distbelief.sharding.assignments import cut
    >>> from distbelief.strategies import Synchronous
    >>> layout = lay_out([Tensor("weight", (64,), "float32")])
    >>> settings = Settings(strategy=Synchronous(optimizer="lars"))
    >>> plan = Plan(settings, layout, cut(layout, settings.partitions, 2), 8)
    >>> ruler, other = Exchange(plan, 0), Exchange(plan, 1)
    >>> [said] = other.say(0, ((0, 9.0, 1.0),))
    >>> ruler.say(0, ((0, 16.0, 3.0),)), ruler.take("shard 1", said.message), ruler.whole(0)
    ([], [Send(to='shard 1', message=Norms(round=0, of=((0, 25.0, 4.0),), whole=False), payload=None)],
     ((0, 25.0, 4.0),))
    """

    def __init__(self, plan: Plan, index: int) -> None:
        self._ruler, self._own = roles.shard(plan.ruler), roles.shard(index)
        holders = cut_layers(plan) if plan.settings.policy.rounds else {}
        self._parts = sorted({shard for shards in holders.values() for shard in shards})
        self.takes_part = index in self._parts
        self._next = self._newest = 0
        self._said: deque[Norms] = deque(maxlen=KEPT)
        self._heard: dict[int, dict[str, Norms]] = {}
        self._whole: dict[int, Norms] = {}

    def resume(self, floor: int, known: Iterable[Norms]) -> None:
        """Take the place of a shard that had made `floor` rounds and knew these norms."""
        self._next = self._newest = floor
        for norms in known:
            self._keep(norms)

    def known(self) -> tuple[Norms, ...]:
        """Return the sums of the latest rounds."""
        return tuple(self._whole.values())

    def whole(self, round: int) -> Squares | None:
        """Return the sums of a round; None while they are unknown."""
        return self._whole[round].of if round in self._whole else None

    def say(self, round: int, of: Squares) -> list[Send]:
        """Send this shard's share of a round's norms."""
        sends = self.pass_over(round)
        self._next = round + 1
        norms = Norms(round, of)
        self._said.append(norms)
        return sends + (self.take(self._own, norms) if self._own == self._ruler else [Send(self._ruler, norms)])

    def pass_over(self, floor: int) -> list[Send]:
        """Send empty shares for rounds before `floor` in which this shard made no update."""
        sends: list[Send] = []
        while self.takes_part and self._next < floor:
            self._next += 1
            sends += self.say(self._next - 1, ())
        return sends

    def again(self) -> list[Send]:
        """Return what a new ruler must be sent: this shard's shares, and the sums of the ruler before it."""
        known = [Norms(norms.round, norms.of, whole=True) for norms in self._whole.values()]
        return [Send(self._ruler, norms) for norms in (*self._said, *known)]

    def take(self, sender: str, norms: Norms) -> list[Send]:
        """Take a shard's share, or the ruler's sums; refuse a sender that has no part in the exchange."""
        if self._own != self._ruler:
            if sender != self._ruler:
                raise RemoteProtocolError(f"{sender} sends sums of norms, and is not the ruling shard")
            self._keep(norms)
            return []
        if roles.index_of(sender) not in self._parts or not 0 <= norms.round <= self._newest + KEPT:
            raise RemoteProtocolError(
                f"{sender} sends norms of round {norms.round}: it holds no part of a layer that is cut, or has not "
                "come so far"
            )
        # A restarted shard sends its share again, and so asks for the sums. They are not added up anew, or two shards
        # might scale one layer by two norms.
        if norms.round in self._whole:
            return [] if sender == self._own else [Send(sender, self._whole[norms.round])]
        heard = self._heard.setdefault(norms.round, {})
        # sums of an earlier ruler stay valid: some shard may have made its update with them
        if norms.whole:
            return self._tell(Norms(norms.round, norms.of))
        heard[sender] = norms
        if any(roles.shard(part) not in heard for part in self._parts):
            return []
        # in the order of the shards, so that the sum does not depend on which share came first
        return self._tell(Norms(norms.round, added(heard[roles.shard(part)].of for part in self._parts)))

    def _tell(self, whole: Norms) -> list[Send]:
        """Send the sums to all that have sent their shares."""
        self._keep(whole)
        return [Send(other, whole) for other in self._heard.pop(whole.round) if other != self._own]

    def _keep(self, norms: Norms) -> None:
        self._whole[norms.round] = norms
        self._newest = max(self._newest, norms.round)
        for old in [round for round in self._whole if round <= norms.round - KEPT]:
            del self._whole[old]
