"""Evaluations of a job: the newest model is measured as soon as the measuring role is free."""

from __future__ import annotations

from distbelief.core import roles
from distbelief.core.conversations import evaluating
from distbelief.core.effects import Effect, Send


class Evaluations:
    """Evaluations that are under way or due.

    `expected` is true if the job has a role that measures.
    """

    def __init__(self, expected: bool) -> None:
        self.expected = expected
        """True while some role measures or is going to."""
        self.who, self.measuring = "", ""
        """Role that does due evaluations, and the role that is measuring now; "" for none."""
        self.owed = False
        self.tried = not expected
        """True once an evaluator has tried to measure the model, or has died trying: training waits for that once."""
        self.unmeasured = 0
        """Minibatches applied since their number last made an evaluation due."""

    @property
    def pending(self) -> bool:
        """True while an evaluation is under way or owed."""
        return bool(self.measuring) or self.owed

    def due(self, minibatches: int, every: int) -> bool:
        """Count applied minibatches; return whether an evaluation is due: after `every` of them, 0 for never.

        >>> evaluations = Evaluations(expected=True)
        >>> evaluations.due(7, 5), evaluations.due(2, 5), evaluations.due(1, 5), evaluations.due(1, 0)
        (True, False, True, False)
        """
        self.unmeasured += minibatches if every else 0
        due = 0 < every <= self.unmeasured
        if due:  # minibatches beyond that count towards the next evaluation
            self.unmeasured %= every
        return due

    def measure(self, epoch: int) -> list[Effect]:
        """Have the model measured now, or as soon as the measuring role has joined and is free."""
        # one at a time: all that fall due meanwhile become one evaluation, of the newest model
        self.owed = self.expected and not (self.who and not self.measuring)
        if not self.expected or self.owed:
            return []
        self.measuring = self.who
        return [Send(self.who, evaluating.Evaluate(epoch))]

    def comes(self) -> None:
        """Note that an evaluator has joined; it measures once it is welcomed."""
        self.tried, self.expected, self.who = True, True, ""

    def joined(self, epoch: int, who: str = roles.EVALUATOR) -> list[Effect]:
        """Let a role measure from now on, beginning with any evaluation that is due."""
        self.who = who
        return self.measure(epoch) if self.owed else []

    def gone(self, for_good: bool) -> str:
        """Continue without the measuring role; return a clause on what happens to evaluations."""
        self.owed = not for_good and self.pending
        self.who, self.measuring, self.tried, self.expected = "", "", True, not for_good
        return "the job goes on without evaluations" if for_good else "another takes its place"

    @property
    def watchers(self) -> list[str]:
        """Return the evaluator, if it takes part."""
        return [roles.EVALUATOR] if self.who == roles.EVALUATOR else []
