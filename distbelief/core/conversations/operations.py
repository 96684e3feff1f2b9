"""Operations: how Sandblaster's coordinator has shards work on named vectors, and how the gradients of a batch are
added up.

`x` are the parameters. Vectors whose names begin with `HISTORY` are in checkpoints; all others are made anew by the
first evaluation of a job that goes on. The coordinator sees scalars only, whatever the length of the vectors.
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
    """One operation on the slices of named vectors; what it makes stays on the shard."""


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
    """The dot product of each pair, summed in float64: one scalar each."""

    pairs: Annotated[tuple[tuple[Name, Name], ...], msgspec.Meta(max_length=SCALARS_LIMIT)]


class AbsoluteNorms(Command, frozen=True, array_like=True, tag=True, gc=False):
    """The sum of the absolute values of each vector, in float64, or the largest of them: one scalar each."""

    kind: Literal["sum", "max"]
    of: Annotated[tuple[Name, ...], msgspec.Meta(max_length=TERMS_LIMIT)]


class Gather(Command, frozen=True, array_like=True, tag=True, gc=False):
    """Zero these vectors, and sum the work units of an evaluation into them: work unit by work unit as they come, or
    `ordered`
    by their numbers.
    """

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
    """Operations to do in order; answered where any has scalars."""

    number: int
    commands: Annotated[tuple[AnyCommand, ...], msgspec.Meta(max_length=COMMANDS_LIMIT)]


# shard to coordinator


class Operated(Message, frozen=True, array_like=True, tag=True, gc=False):
    """Shard's share of the scalars of message `number`, in the order of its commands."""

    number: int
    scalars: Annotated[tuple[float, ...], msgspec.Meta(max_length=SCALARS_LIMIT)]


# coordinator to replica


class Assign(Message, frozen=True, array_like=True, tag=True, gc=False):
    """Order to compute work unit `number` of an evaluation. That is the sum of its portions' gradients."""

    evaluation: int
    number: int
    work_unit: WorkUnit


class Withdraw(Message, frozen=True, array_like=True, tag=True, gc=False):
    """Notice that work unit `number` is done by another. Between partitions also, that the evaluation is over."""

    evaluation: int
    number: int


# replica to shard


class Contribute(Bulk, frozen=True, array_like=True, tag=True, gc=False):
    """Gradient of a work unit. It is the sum over its portions, each weighted by its samples' share of a full one."""

    traffic: ClassVar[str] = PUSH

    incarnation: int
    evaluation: int
    number: int
    part: int


# shard to replica


class Contributed(Message, frozen=True, array_like=True, tag=True, gc=False):
    """Confirmation that a work unit is in the sum at this shard, or that its evaluation is over. Its slot may be
    written again.
    """

    incarnation: int
    evaluation: int
    number: int


# replica to coordinator


class Done(Message, frozen=True, array_like=True, tag=True, gc=False):
    """Report that a work unit is in the sum at every shard; from a partition, that its part is. `loss` is the sum over
    its samples.
    """

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
