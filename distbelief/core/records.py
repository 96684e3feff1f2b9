"""Records of a job while it runs: its metrics, live view and result are computed from them.

Its end has an outcome and a cause: code decides by these values, never by the sentence beside them.
"""

from __future__ import annotations

from enum import StrEnum
from typing import Any

import msgspec

from distbelief import errors
from distbelief.core import roles

Json = dict[str, Any]
"""JSON object whose names depend on its subject: a result, the facts of a checkpoint, the state of a method."""


class Outcome(StrEnum):
    """Outcome of a job."""

    DONE = "done"
    TARGET = "target"
    INTERRUPTED = "interrupted"
    LEFT = "left"
    """Every replica left before the job was done."""
    FAILED = "failed"


class Cause(StrEnum):
    """Cause of a job's end; each has one outcome."""

    EPOCHS_DONE = "all epochs are done"
    SCRIPT_STOPPED = "a script has stopped the job"
    DONE_BEFORE = "all epochs were done before"
    CONVERGED = "the gradient is within the tolerance"
    NO_DESCENT = "nothing lowers the loss"
    BUDGET_SPENT = "the budget is spent"

    TARGET_REACHED = "the target is reached"

    INTERRUPTED = "interrupted"

    REPLICAS_LEFT = "every replica left"

    REPLICAS_DIED = "every replica died"
    DEATH_FORBIDDEN = "a replica died, which is to stop the job"
    NO_ROUND = "groups of replicas broke up without a round"
    SHARD_UNSAVED = "a shard died before a checkpoint"
    SHARD_SPENT = "a shard died in its last life"
    SHARD_CLOSING = "a shard died while the job closed"
    SHARD_DESERTED = "a shard died, and the replicas had left"
    UNKEPT = "every replica died before the last checkpoint"
    CHECKPOINT_FAILED = "the last checkpoint was not written"
    COORDINATOR_DIED = "the coordinator died"
    PROCESS_DIED = "a process died that has no other in its place"
    CUT_SHORT = "interrupted, and ended at once"
    LOSS_NOT_FINITE = "the loss is not finite"
    TASK_RAISED = "the task raised"
    WRONG_OPTION = "an option cannot be used"
    WRONG_DATA = "the data cannot be used"
    WRONG_MODEL = "the model is not the server's"
    WRONG_CHECKPOINT = "the checkpoint cannot be used"
    BUG = "an error of distbelief"

    @property
    def outcome(self) -> Outcome:
        """Outcome of a job that ends for this cause.

        >>> Cause.NO_DESCENT.outcome, Cause.CUT_SHORT.outcome
        (<Outcome.DONE: 'done'>, <Outcome.FAILED: 'failed'>)
        """
        return _OUTCOMES.get(self, Outcome.FAILED)


_OUTCOMES = {
    **dict.fromkeys((Cause.EPOCHS_DONE, Cause.SCRIPT_STOPPED, Cause.DONE_BEFORE), Outcome.DONE),
    **dict.fromkeys((Cause.CONVERGED, Cause.NO_DESCENT, Cause.BUDGET_SPENT), Outcome.DONE),
    Cause.TARGET_REACHED: Outcome.TARGET,
    Cause.INTERRUPTED: Outcome.INTERRUPTED,
    Cause.REPLICAS_LEFT: Outcome.LEFT,
}
_OF_ERRORS: dict[type[BaseException], Cause] = {
    errors.LossNotFinite: Cause.LOSS_NOT_FINITE,
    errors.TrainingError: Cause.TASK_RAISED,
    errors.UsageError: Cause.WRONG_OPTION,
    errors.DataError: Cause.WRONG_DATA,
    errors.LayoutError: Cause.WRONG_MODEL,
    errors.CheckpointError: Cause.WRONG_CHECKPOINT,
    errors.Interrupted: Cause.CUT_SHORT,
    errors.JobFailed: Cause.PROCESS_DIED,
}


def cause_of(error: BaseException) -> Cause:
    """Return the cause of a job's end by an error.

    >>> cause_of(errors.LossNotFinite("the loss is nan")), cause_of(KeyError("x"))
    (<Cause.LOSS_NOT_FINITE: 'the loss is not finite'>, <Cause.BUG: 'an error of distbelief'>)
    """
    return next((cause for kind, cause in _OF_ERRORS.items() if isinstance(error, kind)), Cause.BUG)


class Record(msgspec.Struct, frozen=True, tag=True, tag_field="event", gc=False):
    """Something that happened; the writer adds the time."""


class Started(Record, frozen=True, tag=True, gc=False):
    """Start of training: the parameters are there. A resumed job has done `samples` and `done` epochs before."""

    replicas: int
    shards: int
    parameters: int
    samples_per_epoch: int
    batch_size: int
    epochs: int
    samples: int = 0
    done: int = -1
    """Epochs done before; -1 where they follow from the samples."""
    unit: str = "epoch"
    """Unit of progress: an epoch, or an iteration, which may need all samples several times."""
    models: int = 1
    """Number of models that are trained, each with an optimizer of its own."""


class Joined(Record, frozen=True, tag=True, gc=False):
    """Replica that takes part from now on."""

    role: str


class Stepped(Record, frozen=True, tag=True, gc=False):
    """Steps of a replica that are applied at all shards; `loss` is the mean over `losses` steps, None if unknown."""

    role: str
    steps: int
    samples: int
    pushes: int
    loss: float | None
    dropped: int = 0
    """Pushes that came too late for their round; their minibatches are dealt again."""
    losses: int = 0
    """Steps whose loss is known: those computed since the last report, not those applied."""


class Rewound(Record, frozen=True, tag=True, gc=False):
    """Return of all roles to a checkpoint, at which `samples` and `done` epochs (-1: see the samples) were done."""

    samples: int
    done: int = -1


class Forgotten(Record, frozen=True, tag=True, gc=False):
    """Pushes of a replica, by their clocks, that a restarted shard has lost: its checkpoint is older."""

    role: str
    replica: str
    incarnation: int
    """Incarnation of the replica."""
    first: int
    last: int


class Vacant(Record, frozen=True, tag=True, gc=False):
    """Role whose process must be ended, if there is one, and replaced by this incarnation."""

    role: str
    incarnation: int


class StandbyReady(Record, frozen=True, tag=True, gc=False):
    """Standby that holds all that its shard has acknowledged."""

    role: str


class Succeeded(Record, frozen=True, tag=True, gc=False):
    """Standby that takes a shard's place, as this incarnation of it."""

    role: str
    incarnation: int
    standby: str


class Iterated(Record, frozen=True, tag=True, gc=False):
    """Iteration of a batch method, or a line search that failed (`step` 0)."""

    iteration: int
    loss: float
    gradient: float
    """Largest component of the gradient, by magnitude."""
    step: float
    """Length of the step along the direction."""
    evaluations: int
    """Evaluations of a batch."""
    copies: int
    """Work units that were dealt to a second replica."""
    note: str = ""


class EpochDone(Record, frozen=True, tag=True, gc=False):
    """End of an epoch (counted from 1): its minibatches are all applied."""

    epoch: int


class Tested(Record, frozen=True, tag=True, gc=False):
    """Measure of the server's model after `epoch` epochs; `accuracy` is 0 to 1, None where the task has none."""

    epoch: int
    loss: float
    accuracy: float | None
    metrics: dict[str, float] = {}
    took: float = 0.0
    """Seconds that measuring took."""

    def holds(self, accuracy: float, loss: float) -> bool:
        """Return whether it reaches all targets that are set (0: not set); False where none is.

        >>> tested = Tested(1, 0.2, 0.91)
        >>> tested.holds(0.9, 0.0), tested.holds(0.9, 0.1), tested.holds(0.0, 0.2), tested.holds(0.0, 0.0)
        (True, False, True, False)
        """
        right = not accuracy or (self.accuracy is not None and self.accuracy >= accuracy)
        return bool(accuracy or loss) and right and (not loss or self.loss <= loss)


class Gone(Record, frozen=True, tag=True, gc=False):
    """Replica that has left or died; its `lost` minibatches are dealt again."""

    role: str
    lost: int
    reason: str
    died: bool
    given_up: int = 0
    """Minibatches of its allotment that are given up; -1 where their number is unknown."""


class Checkpointed(Record, frozen=True, tag=True, gc=False):
    """Checkpoint that was written, or failed with an `error`: then the one before stays the newest."""

    number: int
    error: str
    took: float = 0.0
    """Seconds of writing, in which nothing was applied."""


class Resources(Record, frozen=True, tag=True, gc=False):
    """Cores, memory and disk that a job on processes of this machine has, and may still use."""

    cores: int
    computing: int
    """Threads that compute gradients here."""
    free_memory: int
    memory: int
    """Bytes of the whole memory, within the limit of the container."""
    free_disk: int
    """Bytes that may still be written where the run folder is."""
    disk: int


class Applied(Record, frozen=True, tag=True, gc=False):
    """Account of all that a shard has applied."""

    role: str
    updates: int
    samples: int
    staleness: dict[int, int]
    busy: float = 0.0
    """Seconds that its process has worked; 0 where unknown."""


class StepsTimed(Record, frozen=True, tag=True, gc=False):
    """Seconds of a replica by use, from the last gradient of its record before to its last one now."""

    role: str
    steps: int
    compute: float
    """Seconds in gradients."""
    update: float
    """Seconds in updates that the replica makes itself."""
    communicate: float
    """Seconds in copying, sending, receiving and adding up."""
    wait: float
    """Seconds without an arrival."""
    load: float = 0.0
    """Seconds in loading data."""
    waited: dict[str, float] = {}
    """Seconds of waits by the role that ended them."""
    overflows: int = 0
    """In fp16, computations repeated; in fixed point, values that were clipped."""
    counted: int = 0
    """Computations or values that `overflows` is a part of."""

    def waited_by_kind(self) -> dict[str, float]:
        """Return the seconds of waits by the kind of role that ended them."""
        kinds: dict[str, float] = {}
        for role, seconds in self.waited.items():
            kind = str(roles.kind(role))
            kinds[kind] = kinds.get(kind, 0.0) + seconds
        return kinds


class BytesCounted(Record, frozen=True, tag=True, gc=False):
    """Bytes that a role has sent, received and read in shared memory since its last account, by kind."""

    role: str
    sent: dict[str, int]
    received: dict[str, int]
    shared_memory: dict[str, int]


class Parted(Record, frozen=True, tag=True, gc=False):
    """Split of the replicas, as a command line names it, with a sentence on its price."""

    split: str
    told: str


class PartBuilt(Record, frozen=True, tag=True, gc=False):
    """Partition that has built its part of the model."""

    role: str
    of: int
    """Number of partitions at the job's start."""


class Note(Record, frozen=True, tag=True, gc=False):
    """Sentence for people who watch the job."""

    text: str


def ended(cause: Cause, reason: str, unsaved: str) -> tuple[Cause, str]:
    """Return the cause and reason of a job's end; a job whose last checkpoint was not written has failed.

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
    """Beginning of a job's end: replicas leave, the last evaluation and checkpoint are made, and `Finished` follows."""

    outcome: Outcome
    cause: Cause
    reason: str

    @classmethod
    def of(cls, cause: Cause, reason: str) -> Ending:
        """Make the record of a cause."""
        return cls(cause.outcome, cause, reason)


class Finished(Record, frozen=True, tag=True, gc=False):
    """End of a job."""

    outcome: Outcome
    cause: Cause
    reason: str
    role: str = ""
    """Role whose death is the cause, if any."""

    @classmethod
    def of(cls, cause: Cause, reason: str, role: str = "") -> Finished:
        """Make the record of a cause."""
        return cls(cause.outcome, cause, reason, role)


AnyRecord = (
    Started | Joined | Stepped | Rewound | Forgotten | Vacant | StandbyReady | Succeeded | Iterated
    | EpochDone | Tested | Gone | Checkpointed | Resources | Applied | StepsTimed | BytesCounted | Parted | PartBuilt
    | Note | Ending | Finished
)  # fmt: skip
