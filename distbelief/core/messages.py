"""The messages that roles send each other; those of attendance and upkeep stand in files of their own.

`Bulk` messages carry bytes [start, stop) of a flat vector: a push or an initialisation from the replica's gradient vector number `slot`, a fetch's
answer into its parameter vector number `slot`. How those bytes travel is the transport's affair.
"""

from __future__ import annotations

from typing import NamedTuple

import msgspec

from distbelief.core.layout import Layout
from distbelief.core.portions import Portion
from distbelief.core.settings import Plan


class Version(NamedTuple):
    """How many updates a shard has applied, within one incarnation of the shard."""

    incarnation: int
    updates: int


class Place(NamedTuple):
    """Where one life of a role listens."""

    address: str
    incarnation: int


class Message(msgspec.Struct, frozen=True, array_like=True, tag=True, gc=False):
    """Anything that one role sends another."""


class Bulk(Message, frozen=True, array_like=True, tag=True, gc=False):
    """A message with bytes [start, stop) of a flat vector behind it."""

    slot: int
    start: int
    stop: int


class Hello(Message, frozen=True, array_like=True, tag=True, gc=False):
    """Who opens this link, of which job, and the vectors it lends: their length in bytes, how many of gradients and of parameters."""

    job: str
    role: str
    incarnation: int
    size: int = 0
    gradients: int = 0
    parameters: int = 0
    peer: int = -1
    """The incarnation of the other end that is meant; -1 for whichever is there."""


# replica to coordinator


class Join(Message, frozen=True, array_like=True, tag=True, gc=False):
    """A replica (or the evaluator) asks to take part. `samples` is the size of its training set; 0 from the evaluator.
    `batch_size` is the user's where his own loop names it, else 0: the job's.
    """

    incarnation: int
    layout: Layout
    samples: int
    batch_size: int = 0


class Rejoin(Message, frozen=True, array_like=True, tag=True, gc=False):
    """A member, or the evaluator, has lost shards, and asks where they are now; it is welcomed again once all shards are there."""

    lost: tuple[tuple[str, int], ...] = ()
    """Which, and the life of each to which the link is gone."""


class Anew(Message, frozen=True, array_like=True, tag=True, gc=False):
    """A replica has begun anew: what it says from here on is of this course of the job."""

    course: int


class Held(Message, frozen=True, array_like=True, tag=True, gc=False):
    """Every push of this replica is applied and reported, and it makes none until checkpoint `number` is made."""

    number: int


class Ready(Message, frozen=True, array_like=True, tag=True, gc=False):
    """The shards, of these incarnations, hold the initial parameters that this replica sent them."""

    shards: tuple[int, ...]


class Progress(Message, frozen=True, array_like=True, tag=True, gc=False):
    """What a replica has done since its last report; `wants` asks for a portion. Of each `dropped` push: after how many of `steps`, and its steps."""

    steps: int
    """Steps whose pushes all shards acknowledged."""
    samples: int
    pushes: int
    loss: float
    """Sum over the `losses` steps computed since the last report."""
    losses: int
    pushed: int
    """Bytes, as are those `fetched`."""
    fetched: int
    wants: bool
    dropped: tuple[tuple[int, int], ...] = ()


class Leave(Message, frozen=True, array_like=True, tag=True, gc=False):
    """A replica has nothing more to do and asks to go in peace."""

    for_good: bool = False
    """Whether it could not take up work again: its own loop is over."""


class Evaluated(Message, frozen=True, array_like=True, tag=True, gc=False):
    """The evaluator's measure of the server's model."""

    number: int
    loss: float
    accuracy: float


# coordinator to replica


class Welcome(Message, frozen=True, array_like=True, tag=True, gc=False):
    """The settings and the plan of the job, and where its shards are; the first replica of a fresh job initialises them."""

    plan: Plan
    initialise: bool
    shards: tuple[Place, ...]
    course: int = 0
    """Greater than before where all have gone back to a checkpoint, and what was pushed since is forgotten."""


class Refused(Message, frozen=True, array_like=True, tag=True, gc=False):
    """A role may not take part; `layout` where it is for its model."""

    reason: str
    layout: bool = False


class Deal(Message, frozen=True, array_like=True, tag=True, gc=False):
    """The next minibatches of a replica."""

    portion: Portion


class Drain(Message, frozen=True, array_like=True, tag=True, gc=False):
    """Nothing to deal at present: push what is accrued, report it and wait."""


class Hold(Message, frozen=True, array_like=True, tag=True, gc=False):
    """Checkpoint `number` is to be made: compute, but push nothing until you may go on, and say when all that you pushed is applied."""

    number: int


class Go(Message, frozen=True, array_like=True, tag=True, gc=False):
    """The checkpoint is made: go on pushing."""


class Finish(Message, frozen=True, array_like=True, tag=True, gc=False):
    """The job is over: push what is accrued, report it and leave."""

    reason: str


class Farewell(Message, frozen=True, array_like=True, tag=True, gc=False):
    """Go in peace: all that you did is in what the shards hold."""


class Evaluate(Message, frozen=True, array_like=True, tag=True, gc=False):
    """Fetch the server's model and measure it."""

    number: int


class Stop(Message, frozen=True, array_like=True, tag=True, gc=False):
    """End in peace: to a shard or the evaluator from the coordinator, to the coordinator from whoever runs the job."""

    reason: str


# replica to shard


class Initialise(Bulk, frozen=True, array_like=True, tag=True, gc=False):
    """The initial values of a range of the vector."""


class Push(Bulk, frozen=True, array_like=True, tag=True, gc=False):
    """The sum of a replica's accrued gradients, each the mean over its minibatch; buffers behind them by value. `tick`: see `core/consistency`."""

    incarnation: int
    clock: int
    version: Version
    """The version of this shard from which the oldest of the accrued gradients was computed."""
    steps: int
    samples: int
    tick: int = 0


class Fetch(Message, frozen=True, array_like=True, tag=True, gc=False):
    """Send bytes [start, stop) into my parameter vector `slot`, once the consistency lets the step of `tick` begin."""

    slot: int
    start: int
    stop: int
    tick: int = 0
    incarnation: int = 0


# shard to replica


class Initialised(Message, frozen=True, array_like=True, tag=True, gc=False):
    """The shard holds the range that was sent."""

    version: Version


class Pushed(Message, frozen=True, array_like=True, tag=True, gc=False):
    """A push of an `incarnation` is in this version of the shard, or was `dropped` as too late for its round; its slot may be written again."""

    slot: int
    clock: int
    version: Version
    dropped: bool = False
    incarnation: int = 0


class Fetched(Bulk, frozen=True, array_like=True, tag=True, gc=False):
    """The parameters as of a version, with the pushes of all ticks below `floor`; they lie in the slot that was asked for."""

    version: Version
    floor: int = 0


Wired = (
    Hello | Join | Rejoin | Anew | Ready | Progress | Held | Leave | Evaluated | Welcome | Refused | Deal | Drain | Hold | Go | Finish | Farewell
    | Evaluate | Stop | Initialise | Push | Fetch | Initialised | Pushed | Fetched
)  # fmt: skip
"""Every message of this file that may stand on a wire."""
