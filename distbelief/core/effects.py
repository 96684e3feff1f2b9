"""Effects: what machines and stories ask of the driver, and what it answers them.

A machine returns a list of effects from `handle`. A story yields them one by one; `Receive`, `Compute` and `Measure`
are answered, the others are answered with None at once.
"""

from __future__ import annotations

from collections.abc import Generator
from typing import Any, Protocol, TypeVar

import msgspec

from distbelief.core.conversations.grouping import Assemble
from distbelief.core.events import Event
from distbelief.core.messages import Address, Message
from distbelief.core.optimizer import GroupOption
from distbelief.core.portions import Position
from distbelief.core.records import Record as RecordOf
from distbelief.core.settings import Plan
from distbelief.core.timers import AnyTimer


class Payload(Protocol):
    """Bytes of a flat vector, or a stand-in that knows only how many they are."""

    @property
    def nbytes(self) -> int:
        """Length in bytes."""
        ...


class Phantom(msgspec.Struct, frozen=True, gc=False):
    """A payload of no bytes that counts as `nbytes`: for simulations that compute nothing."""

    nbytes: int


class Batch(msgspec.Struct, frozen=True, gc=False):
    """One minibatch of the epoch's permutation, by number."""

    epoch: int
    index: int


PAUSE = Batch(-1, -1)
"""In the place of a minibatch: a user's script goes on with what it does before the next."""


class Send(msgspec.Struct, frozen=True, gc=False):
    """Send a message; a payload stays as it is until it is acknowledged (a push) or the sender is next told something
    (an answer).
    """

    to: str
    message: Message
    payload: Payload | None = None


class Receive(msgspec.Struct, frozen=True, gc=False):
    """Wait for the next arrival; answered by an `Arrival`, or None at once where it is not to `wait` and nothing has
    arrived.
    """

    wait: bool = True


RECEIVE = Receive()
GLANCE = Receive(wait=False)


class Compute(msgspec.Struct, frozen=True, gc=False):
    """Compute the gradient of a minibatch at the current parameters; answered by `Computed`."""

    batch: Batch


class Work(msgspec.Struct, frozen=True, gc=False):
    """The story is about to do a share of the work of a step by itself; answered when the time is over that this takes,
    where time is simulated.
    """

    share: float
    begins: bool
    """True for the first share of the step."""


class Measure(msgspec.Struct, frozen=True, gc=False):
    """Measure the current parameters on the test set; answered by `Measured`."""


class Form(msgspec.Struct, frozen=True, gc=False):
    """Let the worker, which adds up gradients by itself, know its group; answered by whether it could be made."""

    group: Assemble


class ReduceGradients(msgspec.Struct, frozen=True, gc=False):
    """Have the worker add up the gradients of a round; answered by whether it could, before something arrived."""


class Update(msgspec.Struct, frozen=True, gc=False):
    """Have the worker update the parameters, which it shares with others, with the gradient of the last minibatch, of
    so many samples; answered by True once it has.
    """

    samples: int


class Attach(msgspec.Struct, frozen=True, gc=False):
    """Make the vectors that a plan asks for."""

    plan: Plan
    gradients: int
    parameters: int


class Lend(msgspec.Struct, frozen=True, gc=False):
    """Make vectors of `size` bytes, from which a machine sends bytes to peers; answered by `Lent`."""

    size: int
    vectors: int


class Become(msgspec.Struct, frozen=True, gc=False):
    """The machine that yields it ends; a machine that it has made plays another role in its place, and says that it is
    there.
    """

    role: str
    incarnation: int
    machine: Any


class Connect(msgspec.Struct, frozen=True, gc=False):
    """Open a link to a life of a role, in the place of the one before; a story is answered by whether it is open, a
    machine by `Lost` where not.
    """

    to: str
    place: Address


class Wake(msgspec.Struct, frozen=True, gc=False):
    """Say `Woke(timer)` in so many seconds."""

    seconds: float
    timer: AnyTimer


class WriteRecord(msgspec.Struct, frozen=True, gc=False):
    """Write down something that happened."""

    record: RecordOf


SCRIPT = "script"
"""The part of a checkpoint that a script keeps: it is of no number, and in the checkpoint that is made next."""


class Save(msgspec.Struct, frozen=True, gc=False):
    """Write a shard's arrays as its part of checkpoint `number`; the store answers `Saved`."""

    number: int
    part: str
    arrays: dict[str, Any]
    facts: dict[str, Any]


class Commit(msgspec.Struct, frozen=True, gc=False):
    """Make checkpoint `number` the newest, all its parts being on disk; the store answers `Saved`, which says where it
    is.
    """

    number: int
    plan: Plan
    position: Position
    samples: int
    script: bool = False
    """True where what a script keeps, as last saved, is a part of it."""


class Discard(msgspec.Struct, frozen=True, gc=False):
    """Clear away the parts of checkpoint `number`, of which one could not be written; the store answers `Saved`."""

    number: int


class Load(msgspec.Struct, frozen=True, gc=False):
    """Read a shard's part of a checkpoint, cut to the plan; the store answers `Loaded`."""

    checkpoint: str
    plan: Plan
    shard: int


class End(msgspec.Struct, frozen=True, gc=False):
    """The role that yields it is done."""

    reason: str


Effect = (
    Send | Receive | Compute | Work | Measure | Form | ReduceGradients | Update | Attach | Lend | Become
    | Connect | Wake | WriteRecord | Save | Commit | Discard | Load | End
)  # fmt: skip


class Arrival(msgspec.Struct, frozen=True, gc=False):
    """Something that a role is told: by whom, what, and the bytes behind it."""

    sender: str
    event: Event
    payload: Payload | None = None


class Computed(msgspec.Struct, frozen=True, gc=False):
    """A gradient is in place: the mean loss of the minibatch (None where unknown), its samples, the seconds it took."""

    loss: float | None
    samples: int
    seconds: float
    rate: float = 1.0
    """Factor that a user's own loop puts on the job's learning rate."""
    options: tuple[GroupOption, ...] = ()
    """Other options of its parameter groups that it has changed."""
    model: int = 0
    """Number of the model that it steps, of several: they are stepped one after another until an answer is `held`."""
    held: bool = False
    """True where this minibatch has no step: its gradient is in that of a later one, or, without samples, in none."""
    ended: bool = False
    """True where there was no such minibatch: the replica's stream has ended before it."""
    written: bool = False
    """True where a user's loop has written to its parameters since they were fetched."""
    overflows: int = 0
    """In fp16, how often it was computed again, since its gradient overflowed; in fixed point, values that were cut."""
    counted: int = 0
    """Number that `overflows` is out of: computations in fp16, values in fixed point; 0 where nothing can overflow."""


class Measured(msgspec.Struct, frozen=True, gc=False):
    """Mean loss and accuracy (0 to 1) on the test set, None where the task has none, the means of its other metrics by
    name, and the seconds that measuring took.
    """

    loss: float
    accuracy: float | None
    metrics: dict[str, float] = {}
    seconds: float = 0.0


Returned = TypeVar("Returned")
Steps = Generator[Effect, Any, Returned]
"""Part of a story; the answer to an effect depends on the effect, which the type of a generator cannot express."""
Story = Steps[None]


class Machine(Protocol):
    """Answers messages; waits for nobody, and does no I/O."""

    def handle(self, sender: str, event: Event, payload: Payload | None) -> list[Effect]:
        """Take one event and say what is to be done."""
        ...
