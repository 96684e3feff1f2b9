"""The coordinator's dealings with who measures: the model is measured as soon as somebody is free to."""

from __future__ import annotations

from distbelief.core import roles
from distbelief.core.conversations import evaluating
from distbelief.core.effects import Effect, Send


class Evaluations:
    """Evaluations that are under way, and those still to come.

    Args:
        expected: whether somebody measures.
    """

    def __init__(self, expected: bool) -> None:
        self.expected = expected
        """True unless nobody measures, nor will."""
        self.who, self.measuring = "", ""
        """The role that measures what falls due now, and the one that measures now; each "" for none."""
        self.owed = False
        self.tried = not expected
        """True once it is known whether the model can be measured, or nobody is waited for to try it. An evaluator that
        comes has tried it before; one that dies before that is not waited for again.
        """
        self.unmeasured = 0
        """Minibatches that were applied since a measure was due by them."""

    @property
    def pending(self) -> bool:
        """True while a measure is made, or will be."""
        return bool(self.measuring) or self.owed

    def due(self, minibatches: int, every: int) -> bool:
        """Count applied minibatches; return whether a measure is due, as after `every` of them (0 for never).

        >>> evaluations = Evaluations(expected=True)
        >>> evaluations.due(7, 5), evaluations.due(2, 5), evaluations.due(1, 5), evaluations.due(1, 0)
        (True, False, True, False)
        """
        self.unmeasured += minibatches
        due = 0 < every <= self.unmeasured
        if due:  # those beyond count for the next time
            self.unmeasured %= every
        return due

    def measure(self, epoch: int) -> list[Effect]:
        """Have the model measured now, or as soon as somebody is there and free."""
        # one measure at a time: those that fall due while nobody is free are one, of the newest model
        self.owed = self.expected and not (self.who and not self.measuring)
        if not self.expected or self.owed:
            return []
        self.measuring = self.who
        return [Send(self.who, evaluating.Evaluate(epoch))]

    def comes(self) -> None:
        """An evaluator has come; it is there once it is welcomed."""
        self.tried, self.expected, self.who = True, True, ""

    def joined(self, epoch: int, who: str = roles.EVALUATOR) -> list[Effect]:
        """Somebody is there, who measures what is owed."""
        self.who = who
        return self.measure(epoch) if self.owed else []

    def gone(self, for_good: bool) -> str:
        """Go on without who measures; what it was measuring another does, or nobody: returns which."""
        self.owed = not for_good and self.pending
        self.who, self.measuring, self.tried, self.expected = "", "", True, not for_good
        return "the job goes on without evaluations" if for_good else "another takes its place"

    @property
    def watchers(self) -> list[str]:
        """The evaluator, where it takes part."""
        return [roles.EVALUATOR] if self.who == roles.EVALUATOR else []
