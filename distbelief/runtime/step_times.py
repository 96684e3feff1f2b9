"""Times of a replica's steps: computation, updates, communication and waits."""

from __future__ import annotations

from collections.abc import Callable

from distbelief.core import records, roles
from distbelief.core.effects import Arrival, Computed

COMPUTE, SHARE, UPDATE, WORK, WAIT, ASIDE = "compute", "share", "update", "work", "wait", "aside"
"""Uses of a replica's time: a gradient, a share of a gradient, an update of shared memory, other work for the step, a
wait, and work outside of steps, such as measuring the model.
"""
PARTS = (COMPUTE, SHARE, UPDATE, WORK, WAIT)


class StepTimes:
    """Times of one replica, from its first gradient to its last.

    Args:
        role: the replica.
        now: the clock.
        worked: in simulated time, seconds of work that were neither gradients nor waits. There a thread may work while
            the client waits. None for real time, where this is the rest.

    >>> moments = iter([0.0, 2.0, 3.0, 6.0, 6.5, 8.5])
    >>> times = StepTimes("replica 0", lambda: next(moments), None)
    >>> times.begin(COMPUTE); times.go_on(Computed(None, 1, 2.0))  # until 2.0
    >>> times.begin(WAIT); times.go_on(Arrival("shard 1", None))  # from 3.0 until 6.0
    >>> times.begin(COMPUTE); times.go_on(Computed(None, 1, 2.0))
    >>> times.tell()
    StepsTimed(role='replica 0', steps=2, compute=4.0, update=0.0, communicate=1.5, wait=3.0, waits_for='shard',
               overflows=0, counted=0)
    """

    def __init__(self, role: str, now: Callable[[], float], worked: Callable[[], float] | None) -> None:
        self._role, self._now, self._worked = role, now, worked
        self.doing = ""
        """Present use of the time; "" before the first gradient."""
        self._since = self._first_worked = self._before = 0.0
        self._spent = dict.fromkeys((*PARTS, ASIDE), 0.0)
        self._waited: dict[str, float] = {}
        self._steps, self._seconds = 0, 0.0
        self._overflows = self._counted = 0
        self._last: tuple[float, ...] = ()

    def begin(self, doing: str) -> None:
        """Begin another use of the time."""
        if not self.doing:
            if doing not in (COMPUTE, SHARE):
                return
            self._since, self._first_worked = self._now(), self._worked() if self._worked else 0.0
        elif doing != self.doing:
            self._pass(self.doing)
            if self.doing == SHARE:
                self._end()
        if doing == COMPUTE and self._worked:
            self._before = self._worked()
        self.doing = doing

    def go_on(self, answer: object = None, sender: str = "") -> None:
        """Note that an effect is answered, and that the replica goes on with its work."""
        if not self.doing or self.doing == SHARE:  # a share goes on through several effects
            return
        before, self.doing = self.doing, WORK
        elapsed = self._pass(before)
        if type(answer) is Computed:
            self._steps += 1
            self._overflows, self._counted = self._overflows + answer.overflows, self._counted + answer.counted
            # a gradient that shares its cores takes longer in simulated time than it reports
            slowed = elapsed - (self._worked() - self._before) if self._worked else 0.0
            self._seconds += max(answer.seconds, slowed)
            self._end()
        elif before == WAIT and (sender := sender or (answer.sender if type(answer) is Arrival else "")):
            self._waited[sender] = self._waited.get(sender, 0.0) + elapsed

    def tell(self) -> records.StepsTimed | None:
        """Return all times up to the last gradient, once; None where there was none, or the lead reports them."""
        if not self._last or roles.partition_of(self._role) > 0:
            return None
        (*parts, seconds, worked), self._last = self._last, ()
        _, share, update, _, wait = parts
        compute = seconds + share
        rest = max(0.0, sum(parts) - compute - update)
        communicate = min(rest, max(0.0, worked - update)) if self._worked else max(0.0, rest - wait)
        waited: dict[str, float] = {}
        for sender, elapsed in self._waited.items():
            kind = roles.kind(sender).value
            waited[kind] = waited.get(kind, 0.0) + elapsed
        longest = max(waited, key=lambda kind: waited[kind], default="")
        spent = compute, update, communicate, rest - communicate
        return records.StepsTimed(self._role, self._steps, *spent, longest, self._overflows, self._counted)

    def _pass(self, doing: str) -> float:
        """Add the time since the last change to a use; return it."""
        now = self._now()
        if elapsed := now - self._since:  # in simulated time it is mostly 0
            self._since = now
            self._spent[doing] += elapsed
        return elapsed

    def _end(self) -> None:
        """Note the end of a gradient, or of a share of it."""
        worked = self._worked() - self._first_worked if self._worked else 0.0
        self._last = (*(self._spent[part] for part in PARTS), self._seconds, worked)
