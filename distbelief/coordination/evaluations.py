"""The coordinator's dealings with the evaluator: the server's model is measured as soon as somebody is free to."""

from __future__ import annotations

from distbelief.coordination.cadence import MinibatchCount
from distbelief.core import roles
from distbelief.core.conversations import evaluating
from distbelief.core.conversations.evaluating import EVALUATOR, EvaluatorStanding
from distbelief.core.effects import Effect, Send


class Evaluations:
    """Evaluations that are under way, and those still to come.

    Args:
        expected: whether an evaluator takes part.
    """

    def __init__(self, expected: bool) -> None:
        self.evaluator = EvaluatorStanding.EXPECTED if expected else EvaluatorStanding.NONE
        self.measuring = self.owed = False
        self.tried = not expected
        """True once it is known whether the model can be measured, or nobody is waited for to try it. An evaluator that
        comes has tried it before; one that dies before that is not waited for again.
        """
        self.minibatches = MinibatchCount()
        """Since a measure was due by them."""

    @property
    def pending(self) -> bool:
        """True while a measure is made, or will be."""
        return self.measuring or self.owed

    def measure(self, epoch: int) -> list[Effect]:
        """Have the model measured now, or as soon as the evaluator is there and free."""
        # one measure at a time: those that fall due while the evaluator is busy or away are one, of the newest model
        self.owed = self.evaluator is EvaluatorStanding.EXPECTED or (self.there and self.measuring)
        if not self.there or self.measuring:
            return []
        self.measuring = True
        return [Send(roles.EVALUATOR, evaluating.Evaluate(epoch))]

    def comes(self) -> None:
        """An evaluator has come; it is there once it is welcomed."""
        self.tried = True
        self._move(EvaluatorStanding.EXPECTED)

    def joined(self, epoch: int) -> list[Effect]:
        """The evaluator was welcomed: it measures what is owed."""
        self._move(EvaluatorStanding.JOINED)
        return self.measure(epoch) if self.owed else []

    def gone(self, for_good: bool) -> str:
        """The evaluator is gone; what it was measuring its next life measures, or nobody: returns which."""
        self.owed = not for_good and self.pending
        self.measuring, self.tried = False, True
        self._move(EvaluatorStanding.NONE if for_good else EvaluatorStanding.EXPECTED)
        return "the job goes on without evaluations" if for_good else "another takes its place"

    def _move(self, standing: EvaluatorStanding) -> None:
        self.evaluator = EVALUATOR.move(self.evaluator, standing)

    @property
    def there(self) -> bool:
        """True while the evaluator takes part."""
        return self.evaluator is EvaluatorStanding.JOINED

    @property
    def watchers(self) -> list[str]:
        """The evaluator, where it takes part."""
        return [roles.EVALUATOR] if self.there else []
