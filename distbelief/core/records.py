"""Records: what a job says about itself while it runs; metrics, the live view and the result are made of them."""

from __future__ import annotations

from typing import Any

import msgspec

from distbelief.core.outcomes import Cause, Outcome

Json = dict[str, Any]
"""An object of JSON, whose names depend on what it tells of: a result, the facts of a checkpoint, what a method goes on
with."""


class Record(msgspec.Struct, frozen=True, tag=True, tag_field="event", gc=False):
    """Something that happened; whoever writes it down adds the time."""


class Started(Record, frozen=True, tag=True, gc=False):
    """The shards hold parameters and the first minibatches are dealt. `samples` and `updates` were done before, in a
    resumed job.
    """

    replicas: int
    shards: int
    parameters: int
    samples_per_epoch: int
    batch_size: int
    epochs: int
    samples: int = 0
    done: int = -1
    """Epochs done before; -1 where the samples tell."""
    unit: str = "epoch"
    """Unit of progress: an epoch, or an iteration, which may take all samples more than once."""
    models: int = 1
    """Number of models that are trained, each with an optimizer of its own."""


class Joined(Record, frozen=True, tag=True, gc=False):
    """A replica takes part."""

    role: str


class Stepped(Record, frozen=True, tag=True, gc=False):
    """A replica reports steps that are applied at all shards; `loss` is the mean over the `losses` steps it computed
    since, None where unknown.
    """

    role: str
    steps: int
    samples: int
    pushes: int
    loss: float | None
    dropped: int = 0
    """Pushes that were too late for their round, and whose minibatches are dealt again."""
    losses: int = 0
    """Steps whose losses are known: those computed, which need not be those applied."""


class Rewound(Record, frozen=True, tag=True, gc=False):
    """All go back to a checkpoint, at which so many `samples` were done, and `done` epochs, where the samples do not
    tell (-1).
    """

    samples: int
    done: int = -1


class Forgotten(Record, frozen=True, tag=True, gc=False):
    """A shard that came again has lost a replica's pushes of these clocks, which it had applied: they were not in its
    checkpoint.
    """

    role: str
    replica: str
    incarnation: int
    """Incarnation of the replica."""
    first: int
    last: int


class Vacant(Record, frozen=True, tag=True, gc=False):
    """Nobody plays a role any more, or nobody is to: whoever starts processes ends what plays it, and begins this life
    of it.
    """

    role: str
    incarnation: int


class StandbyReady(Record, frozen=True, tag=True, gc=False):
    """A standby holds all that its shard has acknowledged, and will."""

    role: str


class Succeeded(Record, frozen=True, tag=True, gc=False):
    """A standby plays a shard that is gone, from now on, in this life of the shard."""

    role: str
    incarnation: int
    standby: str


class Iterated(Record, frozen=True, tag=True, gc=False):
    """An iteration of a batch method, or a search that failed (`step` 0): the loss, the gradient's largest component,
    the step along the direction, how often a batch was evaluated, how many work units were dealt to one more, and what
    there is to say.
    """

    iteration: int
    loss: float
    gradient: float
    step: float
    evaluations: int
    copies: int
    note: str = ""


class EpochDone(Record, frozen=True, tag=True, gc=False):
    """Every minibatch of an epoch (counted from 1) is applied."""

    epoch: int


class Tested(Record, frozen=True, tag=True, gc=False):
    """The server's model was measured after `epoch` epochs: its accuracy (0 to 1), None where the task has none, the
    means of other metrics by name, and the seconds that it took.
    """

    epoch: int
    loss: float
    accuracy: float | None
    metrics: dict[str, float] = {}
    took: float = 0.0

    def holds(self, accuracy: float, loss: float) -> bool:
        """Return whether it reaches all targets that are set (0 for none); False where none is.

        >>> tested = Tested(1, 0.2, 0.91)
        >>> tested.holds(0.9, 0.0), tested.holds(0.9, 0.1), tested.holds(0.0, 0.2), tested.holds(0.0, 0.0)
        (True, False, True, False)
        """
        right = not accuracy or (self.accuracy is not None and self.accuracy >= accuracy)
        return bool(accuracy or loss) and right and (not loss or self.loss <= loss)


class Gone(Record, frozen=True, tag=True, gc=False):
    """A replica left, or died and lost `lost` minibatches, which are dealt again."""

    role: str
    lost: int
    reason: str
    died: bool
    given_up: int = 0
    """Minibatches of its own that nobody does now; -1 of a stream, where nobody knows."""


class Checkpointed(Record, frozen=True, tag=True, gc=False):
    """A checkpoint was written, or could not be: then the last good one stays."""

    number: int
    error: str


class Applied(Record, frozen=True, tag=True, gc=False):
    """All that one shard applied."""

    role: str
    updates: int
    samples: int
    staleness: dict[int, int]


class StepsTimed(Record, frozen=True, tag=True, gc=False):
    """Seconds of a replica by their use, from its first gradient to its last."""

    role: str
    steps: int
    compute: float
    """Its gradients."""
    update: float
    """Its own updates of parameters that it shares in memory, or that it alone has."""
    communicate: float
    """Its other work: bringing gradients to where they leave from, sending, taking what arrives, adding it up."""
    wait: float
    """Until something arrives."""
    waits_for: str = ""
    """Kind of role that ended the longest of these waits: shard, replica or coordinator."""
    overflows: int = 0
    """In fp16, minibatches that were computed again; in fixed point, values that were cut."""
    counted: int = 0
    """Number that `overflows` is out of."""


class BytesCounted(Record, frozen=True, tag=True, gc=False):
    """Bytes that a role has sent, received, and read in memory that it shares, since its last account, by kind
    (`core/messages`).
    """

    role: str
    sent: dict[str, int]
    received: dict[str, int]
    shared_memory: dict[str, int]


class Parted(Record, frozen=True, tag=True, gc=False):
    """The replicas are split: how, as it is written on a command line, and in a sentence what that is worth."""

    split: str
    told: str


class PartBuilt(Record, frozen=True, tag=True, gc=False):
    """A partition holds its part of the model."""

    role: str
    of: int
    """Number of partitions with which the job begins."""


class Note(Record, frozen=True, tag=True, gc=False):
    """A sentence for whoever watches."""

    text: str


def ended(cause: Cause, reason: str, unsaved: str) -> tuple[Cause, str]:
    """Why a job ends: it has failed where its last checkpoint, which holds what it has trained, could not be made; what
    had failed already stays so.

    >>> ended(Cause.EPOCHS_DONE, "all epochs are done", "checkpoint 4 was not written")
    (<Cause.CHECKPOINT_FAILED: 'the last checkpoint was not written'>,
     'all epochs are done; checkpoint 4 was not written')
    >>> ended(Cause.REPLICAS_DIED, "every replica is gone", "checkpoint 4 was not written")[0]
    <Cause.REPLICAS_DIED: 'every replica died'>
    """
    if not unsaved:
        return cause, reason
    keeps = cause is Cause.INTERRUPTED or cause.outcome is Outcome.FAILED
    return cause if keeps else Cause.CHECKPOINT_FAILED, f"{reason}; {unsaved}"


class Ending(Record, frozen=True, tag=True, gc=False):
    """The replicas are asked to leave; then come the last evaluation and checkpoint, and `Finished`."""

    outcome: Outcome
    cause: Cause
    reason: str

    @classmethod
    def of(cls, cause: Cause, reason: str) -> Ending:
        """The outcome follows from the cause."""
        return cls(cause.outcome, cause, reason)


class Finished(Record, frozen=True, tag=True, gc=False):
    """The job is over: how, why, and the sentence that says so."""

    outcome: Outcome
    cause: Cause
    reason: str
    role: str = ""
    """Role whose death is the cause, where there is one."""

    @classmethod
    def of(cls, cause: Cause, reason: str, role: str = "") -> Finished:
        """The outcome follows from the cause."""
        return cls(cause.outcome, cause, reason, role)


AnyRecord = (
    Started | Joined | Stepped | Rewound | Forgotten | Vacant | StandbyReady | Succeeded | Iterated
    | EpochDone | Tested | Gone | Checkpointed | Applied | StepsTimed | BytesCounted | Parted | PartBuilt | Note
    | Ending | Finished
)  # fmt: skip
