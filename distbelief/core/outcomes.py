"""Outcomes of jobs and their causes: code decides by these values, never by the sentence beside them."""

from __future__ import annotations

from enum import StrEnum

from distbelief import errors


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
    **dict.fromkeys(
        (
            Cause.EPOCHS_DONE,
            Cause.SCRIPT_STOPPED,
            Cause.DONE_BEFORE,
            Cause.CONVERGED,
            Cause.NO_DESCENT,
            Cause.BUDGET_SPENT,
        ),
        Outcome.DONE,
    ),
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
