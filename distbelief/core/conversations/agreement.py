"""Agreement: the messages by which all shards make the same rounds: which pushes are in one, and the norms of layers
that are cut.
"""

from __future__ import annotations

from distbelief.core import roles
from distbelief.core.consistency import Key
from distbelief.core.conversations.table import Conversation, Says
from distbelief.core.messages import Address, Message
from distbelief.core.roles import Kind


class Ruling(Message, frozen=True, array_like=True, tag=True, gc=False):
    """Pushes that a round takes; with none, pushes that are dropped."""

    round: int
    taken: tuple[Key, ...]
    dropped: tuple[Key, ...]

    def at_partition(self, partition: int) -> Ruling:
        """The same, for a shard that is pushed to by another partition of each replica than the shard that rules."""
        if not partition:
            return self
        taken, dropped = (
            tuple(key._replace(who=roles.at_partition(key.who, partition)) for key in keys)
            for keys in (self.taken, self.dropped)
        )
        return Ruling(self.round, taken, dropped)


class Follow(Message, frozen=True, array_like=True, tag=True, gc=False):
    """Request for every ruling from this round on."""

    round: int


Squares = tuple[tuple[int, float, float], ...]
"""Squared norms of layers, by their number in the layout: of the weights, and of what moves them."""


class Norms(Message, frozen=True, array_like=True, tag=True, gc=False):
    """Squared norms of a shard's parts of cut layers in a round; from the shard that rules, their sums over all."""

    round: int
    of: Squares
    whole: bool = False
    """True for sums over all shards, repeated as the ruler before had them."""


class Ruler(Message, frozen=True, array_like=True, tag=True, gc=False):
    """Address at which the shard that rules has come again."""

    place: Address


AGREEMENT = Conversation(
    "Agreement",
    (
        Says(Follow, by=(Kind.SHARD,), to=(Kind.SHARD,)),
        Says(Ruling, by=(Kind.SHARD,), to=(Kind.SHARD,)),
        Says(Norms, by=(Kind.SHARD,), to=(Kind.SHARD,)),
        Says(Ruler, by=(Kind.COORDINATOR,), to=(Kind.SHARD,)),
    ),
)
