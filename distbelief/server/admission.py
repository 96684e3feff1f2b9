"""Who may take part: a replica must have the model, the data and the batch size of the job."""

from __future__ import annotations

from distbelief.core.layout import check_same
from distbelief.core.messages import Join
from distbelief.core.settings import Plan
from distbelief.errors import UsageError


def check(plan: Plan, who: str, event: Join) -> None:
    """Refuse a replica that does not fit a plan.

    Raises:
        LayoutError: its model differs.
        UsageError: it has other data, or asks for other batches.
    """
    check_same(plan.layout, event.layout, who)
    if event.samples != plan.samples:
        raise UsageError(f"{who} has {event.samples} training samples, the job has {plan.samples}: give every replica the same data")
    if event.batch_size not in (0, plan.settings.batch_size):
        raise UsageError(f"{who} asks for batches of {event.batch_size}, the job has {plan.settings.batch_size}: it is one for all")
