"""Effects: requests of machines and stories to their driver, and its answers.

A machine returns a list of effects from `handle`. A story yields them one by one, and is sent the answer to each: that
of `Receive`, `Compute` or `Measure` when there is one, None at once for the others.
"""

from __future__ import annotations

from collections.abc import Generator
from typing import Any, Protocol, TypeVar

import msgspec

from distbelief.core.conversations.grouping import Assemble
from distbelief.core.events import AnyTimer, Event
from distbelief.core.messages import Address, Message
from distbelief.core.optimizer import GroupOption
from distbelief.core.portions import Position
from distbelief.core.records import Record as RecordOf
from distbelief.core.settings import Plan


class Payload(Protocol):
    """Bytes of a flat vector, or a stand-in that has only their number."""

    @property
    def nbytes(self) -> int:
        """Length in bytes."""
        ...


class Phantom(msgspec.Struct, frozen=True, gc=False):
    """Payload without bytes that counts as `nbytes`, for simulations that compute nothing."""

    nbytes: int


class Batch(msgspec.Struct, frozen=True, gc=False):
    """Minibatch of an epoch's permutation, by number."""

    epoch: int
    index: int


PAUSE = Batch(-1, -1)
"""Stand-in for a minibatch: a user's script goes on with what it does between two of them."""


class Send(msgspec.Struct, frozen=True, gc=False):
    """Request to send a message.

    A push's payload must not change until the push is acknowledged, an answer's until the sender's next event.
    """

    to: str
    message: Message
    payload: Payload | None = None


class Receive(msgspec.Struct, frozen=True, gc=False):
    """Request for the next arrival; answered by an `Arrival`, or without `wait` by None if there is none yet."""

    wait: bool = True


RECEIVE = Receive()
GLANCE = Receive(wait=False)


class Compute(msgspec.Struct, frozen=True, gc=False):
    """Request for a minibatch's gradient at the present parameters; answered by `Computed`."""

    batch: Batch


class Work(msgspec.Struct, frozen=True, gc=False):
    """Share of a step's work that a story is about to do by itself; answered once its simulated time has passed."""

    share: float
    begins: bool
    """True for the first share of the step."""


class Measure(msgspec.Struct, frozen=True, gc=False):
    """Request to measure the present parameters on the test set; answered by `Measured`."""


class Form(msgspec.Struct, frozen=True, gc=False):
    """Request to a worker that adds up gradients to form its group; the answer is whether it succeeded."""

    group: Assemble


class ReduceGradients(msgspec.Struct, frozen=True, gc=False):
    """Request to a worker to add up the gradients of a round; the answer is whether it finished before an arrival."""


class Update(msgspec.Struct, frozen=True, gc=False):
    """Request to a worker to update parameters that it shares with others, by its last gradient; answered by True."""

    samples: int


class Attach(msgspec.Struct, frozen=True, gc=False):
    """Request to make the vectors of a plan."""

    plan: Plan
    gradients: int
    parameters: int


class Lend(msgspec.Struct, frozen=True, gc=False):
    """Request for vectors of `size` bytes, from which a machine sends to peers; answered by `Lent`."""

    size: int
    vectors: int


class Become(msgspec.Struct, frozen=True, gc=False):
    """End of a machine; another one takes its place, and plays a role from now on."""

    role: str
    incarnation: int
    machine: Any


class Connect(msgspec.Struct, frozen=True, gc=False):
    """Request to open a link to an incarnation of a role, in place of any earlier link.

    The answer to a story is whether the link is open; a machine is sent `Lost` if it is not.
    """

    to: str
    place: Address


class Wake(msgspec.Struct, frozen=True, gc=False):
    """Request for `Woke(timer)` after so many seconds."""

    seconds: float
    timer: AnyTimer


class WriteRecord(msgspec.Struct, frozen=True, gc=False):
    """Request to write a record."""

    record: RecordOf


SCRIPT = "script"
"""Name of a checkpoint's part for a script's state, which has no number and goes into the next checkpoint."""


class Save(msgspec.Struct, frozen=True, gc=False):
    """Request to write a shard's part of checkpoint `number`; answered by `Saved`."""

    number: int
    part: str
    arrays: dict[str, Any]
    facts: dict[str, Any]


class Commit(msgspec.Struct, frozen=True, gc=False):
    """Request to make checkpoint `number`, whose parts are all on disk, the newest; answered by `Saved`."""

    number: int
    plan: Plan
    position: Position
    samples: int
    script: bool = False
    """True where the script's state, as last saved, is a part of it."""


class Discard(msgspec.Struct, frozen=True, gc=False):
    """Request to remove the parts of checkpoint `number`, one of which could not be written; answered by `Saved`."""

    number: int


class Load(msgspec.Struct, frozen=True, gc=False):
    """Request to read a shard's part of a checkpoint, cut to a plan; answered by `Loaded`."""

    checkpoint: str
    plan: Plan
    shard: int


class End(msgspec.Struct, frozen=True, gc=False):
    """End of the role that yields it."""

    reason: str


Effect = (
    Send | Receive | Compute | Work | Measure | Form | ReduceGradients | Update | Attach | Lend | Become
    | Connect | Wake | WriteRecord | Save | Commit | Discard | Load | End
)  # fmt: skip


class Arrival(msgspec.Struct, frozen=True, gc=False):
    """Event at a role, with its sender and its payload."""

    sender: str
    event: Event
    payload: Payload | None = None


class Computed(msgspec.Struct, frozen=True, gc=False):
    """Gradient that is in place, with the minibatch's mean loss and number of samples.

    The loss is None where it is unknown. The seconds are those of the computation, without loading.
    """

    loss: float | None
    samples: int
    seconds: float
    rate: float = 1.0
    """Factor that a user's own loop puts on the job's learning rate."""
    options: tuple[GroupOption, ...] = ()
    """Other options of parameter groups that the loop has changed."""
    model: int = 0
    """Number of the model that is stepped, of several: they are stepped in turn until an answer is `held`."""
    held: bool = False
    """True where this minibatch has no step: a later one's gradient includes it or, without samples, none does."""
    ended: bool = False
    """True where the replica's stream has ended before this minibatch."""
    written: bool = False
    """True where a user's loop has written to its parameters since the fetch."""
    overflows: int = 0
    """In fp16, computations repeated as the gradient overflowed; in fixed point, values that were clipped."""
    counted: int = 0
    """Number that `overflows` is out of: computations in fp16, values in fixed point; 0 where nothing can overflow."""
    load: float = 0.0
    """Seconds of loading the minibatch."""


class Measured(msgspec.Struct, frozen=True, gc=False):
    """Mean loss, accuracy (0 to 1; None where the task has none) and other metrics on the test set, and the seconds."""

    loss: float
    accuracy: float | None
    metrics: dict[str, float] = {}
    seconds: float = 0.0


Returned = TypeVar("Returned")
Steps = Generator[Effect, Any, Returned]
"""Part of a story; the answer to an effect depends on the effect, which the type of a generator cannot express."""
Story = Steps[None]


class Machine(Protocol):
    """State machine: answers events with effects, never waits, and performs no I/O."""

    def handle(self, sender: str, event: Event, payload: Payload | None) -> list[Effect]:
        """Take one event; return its effects."""
        ...
