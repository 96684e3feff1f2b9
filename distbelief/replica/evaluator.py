"""The story of the evaluator: it fetches the server's model on the coordinator's order, and measures it."""

from __future__ import annotations

from collections.abc import Collection

from distbelief.core import events, roles
from distbelief.core.conversations import evaluating, membership, pushing
from distbelief.core.effects import RECEIVE, Arrival, Attach, Measure, Measured, Send, Steps, Story
from distbelief.core.settings import Holder, Plan
from distbelief.replica.links import ShardLinks, unwanted
from distbelief.replica.vectors import Parameters, Vectors

TRIES = 20
"""Most further fetches from shards that are a round behind others."""


# The evaluator waits for an order, fetches the moving ranges, measures, and answers. It takes no part in clocks, rounds
# or bounds, so no shard waits for it. A shard holds its fetch back only amid an update, or until its standby has
# confirmed. In rounds one shard may be a round behind another: its range is fetched again, so that the measured model
# is of one round.
class Evaluator:
    """The evaluator of one job."""

    def __init__(self, vectors: Vectors, incarnation: int = 0) -> None:
        self.vectors, self.incarnation = vectors, incarnation
        self._links = ShardLinks(roles.EVALUATOR)
        self._plan: Plan | None = None

    def waits(self) -> str:
        if self._plan is None:
            return "to be welcomed by the coordinator"
        return self._links.waits_for_lives() or self._links.waits_for_answers() or "to be told to measure"

    def standing(self) -> dict[str, object]:
        return {}

    def story(self) -> Story:
        """Join; then fetch, measure and answer for each `Evaluate`, until `Stop`."""
        # One loop takes any arrival and then acts: an order, a shard's death and its next incarnation come in any
        # order, also while parameters are on their way.
        yield Send(roles.COORDINATOR, membership.Join(self.incarnation, self.vectors.layout, 0))
        while not isinstance(event := _expected((yield RECEIVE)), membership.Welcome):
            if isinstance(event, membership.Stop):
                return
        plan = self._plan = event.plan
        yield Attach(plan, 0, 1)
        yield from self._links.reach(event)
        yield from self._fetch(plan, frozen=True)
        number, tries, held = None, 0, _no_parameters(plan)
        while True:
            arrival: Arrival = yield RECEIVE
            event = _expected(arrival)
            if isinstance(event, membership.Stop):
                return
            if isinstance(event, evaluating.Evaluate):
                number, tries = event.number, TRIES if plan.settings.policy.rounds else 0
                yield from self._fetch(plan, moving=True)
            elif isinstance(event, pushing.Fetched):
                if self._links.answered(arrival.sender, event):
                    held.arrive(arrival.sender, event)
            elif isinstance(event, events.Lost):
                self._links.lose(arrival.sender, event)
            elif isinstance(event, membership.Welcome):
                back = yield from self._reach_again(plan, event, wanted=number is not None)
                held = _no_parameters(plan) if back else held
            if number is not None and not self._links.missing and tries and (behind := held.behind()):
                tries -= 1
                yield from self._fetch(plan, moving=True, of=behind)
            if number is not None and not self._links.missing:
                self.vectors.swap(0)
                measured: Measured = yield Measure()
                yield Send(
                    roles.COORDINATOR,
                    evaluating.Evaluated(number, measured.loss, measured.accuracy, measured.metrics, measured.seconds),
                )
                number = None
            yield from self._links.seek()

    def _reach_again(self, plan: Plan, event: membership.Welcome, wanted: bool) -> Steps[bool]:
        """Reach new incarnations of shards; returns whether earlier answers no longer count."""
        reached = yield from self._links.reach(event)
        if reached and plan.settings.strategy.one_moment:
            # all shards may have gone back to a checkpoint: fetch again from each, moving ranges only for an order
            for index in range(len(plan.assignments)):
                self._links.forget(roles.shard(index))
            yield from self._fetch(plan, frozen=True, moving=wanted)
            return True
        for shard in reached:
            yield from self._links.again(shard)
        return False

    def _fetch(
        self, plan: Plan, frozen: bool = False, moving: bool = False, of: Collection[str] | None = None
    ) -> Steps[None]:
        """Fetch parts of all slices, or of some; where shards hold none, the worker reads them itself."""
        # Moving ranges are fetched only for an order, and never twice at a time: a shard may hold a fetch back, and
        # answers each once.
        for index, assignment in enumerate(plan.assignments if plan.settings.strategy.held_by is Holder.SHARDS else ()):
            if of is not None and roles.shard(index) not in of:
                continue
            for part in (assignment.moving,) * moving + (assignment.frozen,) * frozen:
                if part.size:
                    yield self._links.fetch(roles.shard(index), 0, part, incarnation=self.incarnation)


def _no_parameters(plan: Plan) -> Parameters:
    return Parameters(roles.shard(index) for index, assignment in enumerate(plan.assignments) if assignment.moving.size)


def _expected(arrival: Arrival) -> events.Event:
    event = arrival.event
    # at the end of a job the loss of a shard may arrive before the coordinator's `Stop`
    if isinstance(event, membership.Refused | events.Lost) and arrival.sender == roles.COORDINATOR:
        unwanted("the evaluator", arrival)
    return event
