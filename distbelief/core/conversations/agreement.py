"""Agreement: messages by which all shards make the same rounds, and share the norms of layers that are cut."""

from __future__ import annotations

from distbelief.core import roles
from distbelief.core.consistency import Key
from distbelief.core.conversations.table import Conversation, Says
from distbelief.core.messages import Address, Message
from distbelief.core.roles import Kind


class Ruling(Message, frozen=True, array_like=True, tag=True, gc=False):
    """Decision of the ruling shard: the pushes that a round takes or, without these, pushes that are dropped."""

    round: int
    taken: tuple[Key, ...]
    dropped: tuple[Key, ...]

    def at_partition(self, partition: int) -> Ruling:
        """Return the same ruling with the keys of another partition of each replica."""
        if not partition:
            return self

        def moved(keys: tuple[Key, ...]) -> tuple[Key, ...]:
            return tuple(key._replace(who=roles.at_partition(key.who, partition)) for key in keys)

        return Ruling(self.round, moved(self.taken), moved(self.dropped))


class Follow(Message, frozen=True, array_like=True, tag=True, gc=False):
    """Request to the ruling shard for the rulings from this round on."""

    round: int


Squares = tuple[tuple[int, float, float], ...]
"""Squared norms of layers, by their number in the layout: of the weights, and of their update."""


class Norms(Message, frozen=True, array_like=True, tag=True, gc=False):
    """Shares of a shard in the squared norms of a round; from the ruling shard, their sums over all shards."""

    round: int
    of: Squares
    whole: bool = False
    """True for sums that an earlier ruler had made."""


class Ruler(Message, frozen=True, array_like=True, tag=True, gc=False):
    """New address of the ruling shard, which was restarted."""

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
