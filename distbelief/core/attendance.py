"""Attendance: the messages by which shards know which replicas take part, and which pushes are in a round."""

from __future__ import annotations

from distbelief.core.consistency import Key
from distbelief.core.messages import Message, Place

# replica to shard


class Attend(Message, frozen=True, array_like=True, tag=True, gc=False):
    """A replica takes part from `tick` on, or asks from where on (-1)."""

    incarnation: int
    tick: int


class SitOut(Message, frozen=True, array_like=True, tag=True, gc=False):
    """A replica has no minibatch, and is not to be waited for."""


class Return(Message, frozen=True, array_like=True, tag=True, gc=False):
    """A replica has reached the next life of a shard that died, which had acknowledged its pushes up to `clock`; those that it had not come again."""

    incarnation: int
    clock: int


# shard to replica


class Admitted(Message, frozen=True, array_like=True, tag=True, gc=False):
    """The tick from which on a replica takes part here."""

    tick: int


class Excused(Message, frozen=True, array_like=True, tag=True, gc=False):
    """A replica sits out here: nobody waits for it, and what it pushed is in the parameters or in a round."""


# the shard that rules to the others


class Ruling(Message, frozen=True, array_like=True, tag=True, gc=False):
    """The pushes that a round takes; or, with none, pushes that are dropped."""

    round: int
    taken: tuple[Key, ...]
    dropped: tuple[Key, ...]


class Follow(Message, frozen=True, array_like=True, tag=True, gc=False):
    """To the shard that rules: tell me of every round from this one on."""

    round: int


Squares = tuple[tuple[int, float, float], ...]
"""Of layers, by their number in the layout: the squared norms of the weights, and of what moves them."""


class Norms(Message, frozen=True, array_like=True, tag=True, gc=False):
    """What the parts of cut layers on a shard add to the norms of a round; back from the shard that rules, what all of them add up to."""

    round: int
    of: Squares
    whole: bool = False
    """Whether it is told what they add up to, as the ruler of before did."""


# coordinator to shard


class Ruler(Message, frozen=True, array_like=True, tag=True, gc=False):
    """The shard that rules has come again: there."""

    place: Place


class Gone(Message, frozen=True, array_like=True, tag=True, gc=False):
    """A replica has died or left; it may never have had a link to this shard."""

    who: str
    incarnation: int


Attendance = Attend | SitOut | Return | Admitted | Excused | Ruling | Follow | Norms | Ruler | Gone
"""Every message of this file."""
