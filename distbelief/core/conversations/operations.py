"""Operations: commands of Sandblaster's coordinator on named vectors at the shards, and messages about a batch.

`x` are the parameters. Vectors whose names begin with `HISTORY` are in checkpoints; the first evaluation of a resumed
job computes all others anew. The coordinator sees scalars only, however long the vectors are.
"""

from __future__ import annotations

from typing import Annotated, ClassVar, Literal

import msgspec

from distbelief.core.conversations.table import Conversation, Says
from distbelief.core.messages import PUSH, Bulk, Message
from distbelief.core.portions import WorkUnit
from distbelief.core.roles import Kind

HISTORY = "history."
COMMANDS_LIMIT, TERMS_LIMIT, SCALARS_LIMIT = 64, 1024, 1 << 16
"""Most commands of one message, most terms of a combination, most scalars of an answer."""

Name = Annotated[str, msgspec.Meta(max_length=24)]


class Command(msgspec.Struct, frozen=True, array_like=True, tag=True, gc=False):
    """Operation on the slices of named vectors, whose result stays at the shard."""


class Zero(Command, frozen=True, array_like=True, tag=True, gc=False):
    """into = 0."""

    into: Name


class Copy(Command, frozen=True, array_like=True, tag=True, gc=False):
    """into = of."""

    of: Name
    into: Name


class Scale(Command, frozen=True, array_like=True, tag=True, gc=False):
    """into = by * into."""

    by: float
    into: Name


class Add(Command, frozen=True, array_like=True, tag=True, gc=False):
    """into = into + by * of (axpy)."""

    by: float
    of: Name
    into: Name


class Combine(Command, frozen=True, array_like=True, tag=True, gc=False):
    """into = the sum over terms of factor * vector; `into` may be one of them."""

    terms: Annotated[tuple[tuple[float, Name], ...], msgspec.Meta(max_length=TERMS_LIMIT)]
    into: Name


class Dots(Command, frozen=True, array_like=True, tag=True, gc=False):
    """Dot product of each pair, summed in float64: one scalar each."""

    pairs: Annotated[tuple[tuple[Name, Name], ...], msgspec.Meta(max_length=SCALARS_LIMIT)]


class AbsoluteNorms(Command, frozen=True, array_like=True, tag=True, gc=False):
    """Sum of the absolute values of each vector, in float64, or the largest: one scalar each."""

    kind: Literal["sum", "max"]
    of: Annotated[tuple[Name, ...], msgspec.Meta(max_length=TERMS_LIMIT)]


class Gather(Command, frozen=True, array_like=True, tag=True, gc=False):
    """Set these vectors to 0, and sum an evaluation's work units into them, as they come or `ordered` by number."""

    evaluation: int
    into: Annotated[tuple[Name, ...], msgspec.Meta(max_length=COMMANDS_LIMIT)]
    ordered: bool = False


AnyCommand = Zero | Copy | Scale | Add | Combine | Dots | AbsoluteNorms | Gather


def scalars(command: AnyCommand) -> tuple[str, ...]:
    """Return how the shards' answers to a command become one: for each scalar "sum", or "max" for the largest.

    >>> scalars(Dots((("x", "x"), ("x", "g")))), scalars(Zero("g"))
    (('sum', 'sum'), ())
    """
    if isinstance(command, Dots):
        return ("sum",) * len(command.pairs)
    return (command.kind,) * len(command.of) if isinstance(command, AbsoluteNorms) else ()


# coordinator to shard


class Operate(Message, frozen=True, array_like=True, tag=True, gc=False):
    """Commands to execute in order; answered if any has scalars."""

    number: int
    commands: Annotated[tuple[AnyCommand, ...], msgspec.Meta(max_length=COMMANDS_LIMIT)]


# shard to coordinator


class Operated(Message, frozen=True, array_like=True, tag=True, gc=False):
    """Share of a shard in the scalars of message `number`, in the order of its commands."""

    number: int
    scalars: Annotated[tuple[float, ...], msgspec.Meta(max_length=SCALARS_LIMIT)]


# coordinator to replica


class Assign(Message, frozen=True, array_like=True, tag=True, gc=False):
    """Request to compute work unit `number`: the sum of its gradients at the parameters of that evaluation."""

    evaluation: int
    number: int
    work_unit: WorkUnit


class Withdraw(Message, frozen=True, array_like=True, tag=True, gc=False):
    """News that work unit `number` is done by another replica; between partitions also that the evaluation is over."""

    evaluation: int
    number: int


# replica to shard


class Contribute(Bulk, frozen=True, array_like=True, tag=True, gc=False):
    """Gradient of a work unit: the sum over its portions, each weighted by its share of a full portion's samples."""

    traffic: ClassVar[str] = PUSH

    incarnation: int
    evaluation: int
    number: int
    part: int


# shard to replica


class Contributed(Message, frozen=True, array_like=True, tag=True, gc=False):
    """Acknowledgement: a copy of the work unit is in the shard's sum, or the evaluation is over; the slot is free."""

    incarnation: int
    evaluation: int
    number: int


# replica to coordinator


class Done(Message, frozen=True, array_like=True, tag=True, gc=False):
    """Report that a work unit is in the sum at all shards of its sender; `loss` is the sum over its samples."""

    evaluation: int
    number: int
    loss: float


OPERATIONS = Conversation(
    "Operations",
    (
        Says(Operate, by=(Kind.COORDINATOR,), to=(Kind.SHARD,)),
        Says(Operated, by=(Kind.SHARD,), to=(Kind.COORDINATOR,), answers=Operate),
        Says(Assign, by=(Kind.COORDINATOR,), to=(Kind.REPLICA,)),
        Says(Withdraw, by=(Kind.COORDINATOR,), to=(Kind.REPLICA,)),
        Says(Contribute, by=(Kind.REPLICA,), to=(Kind.SHARD,)),
        Says(Contributed, by=(Kind.SHARD,), to=(Kind.REPLICA,), answers=Contribute),
        Says(Done, by=(Kind.REPLICA,), to=(Kind.COORDINATOR,), answers=Assign),
        *(Says(message, by=(Kind.REPLICA,), to=(Kind.REPLICA,)) for message in (Assign, Withdraw, Done)),
    ),
)
