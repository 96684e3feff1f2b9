"""Tables of a plan."""

from __future__ import annotations

from distbelief.cli.tables import number, show
from distbelief.lab.plan.plan import Row, TrainingPlan
from distbelief.lab.plan.scaling import Scaling, ScalingPoint
from distbelief.record.summary import PARTS

COLUMNS = ("", "what", "samples/s", "step, ms", *PARTS, "for", "memory, GB", "MB a step")
PRICED = ("", "what", "predicted", "measured", "error", "step, ms", *PARTS, "memory, GB", "binds")
"""Columns where some are priced."""
SCALED = ("step, ms", "measured", "simulated", "error", "speed-up", "efficiency", "one more", "binds")
"""Columns behind the number of replicas or partitions."""


def show_plan(plan: TrainingPlan) -> None:
    """Print the table of a plan, and what it says in words; reasons stand below the table, by their number there."""
    reasons: list[str] = []
    priced = any(row.predicted for row in plan.rows)
    limit = f", {plan.max_memory / 1e9:.3g} GB for a process" if plan.max_memory else ""
    cells = _priced_cells if priced else _cells
    show(
        f"{plan.task} on {plan.machines} (hosts x cores), minibatches of {plan.batch_size}{limit}: samples/s, and a "
        "step of each replica",
        PRICED if priced else COLUMNS,
        [cells(place, row, reasons) for place, row in enumerate(plan.rows, 1)],
    )
    numbered = [f"({number}) {reason}" for number, reason in enumerate(reasons, 1)]
    notes = [f"note: {note}" for note in plan.notes]
    print("\n".join([*numbered, plan.why, *plan.changes, *notes, f"planned in {plan.seconds:.0f} s"]))
    stepped = "" if plan.optimizer == "sgd" else f" --optimizer {plan.optimizer}"
    print(f"distbelief train {plan.task} {plan.first.command}{stepped} --batch-size {plan.batch_size}")


def show_scaling(found: Scaling) -> None:
    """Print what one more brings, a table for each way."""
    reasons: list[str] = []
    for curve in found.curves:
        show(
            f"{found.task}, {curve.name}, minibatches of {found.batch_size}: samples/s of all {curve.of}s",
            (f"{curve.of}s", *SCALED),
            [_scaled_cells(point, reasons) for point in curve.points],
        )
    numbered = [f"({number}) {reason}" for number, reason in enumerate(reasons, 1)]
    notes = [f"note: {note}" for note in found.notes]
    print("\n".join([*numbered, *filter(None, (curve.told for curve in found.curves)), *notes]))


def _scaled_cells(point: ScalingPoint, reasons: list[str]) -> list[str]:
    rates = [f"{rate:,.0f}" if rate else "" for rate in (point.measured, point.simulated)]
    error = f"{point.simulated / point.measured - 1:+.0%}" if point.measured and point.simulated else ""
    shares = ["" if share is None else f"{round(100 * share)}%" for share in (point.efficiency, point.more)]
    step, speedup = (number(value) if value else "" for value in (1e3 * (point.step or 0.0), point.speedup))
    binds = _noted(point.reason, reasons) if point.reason else point.binds
    return [str(point.count), step, *rates, error, speedup, *shares, binds]


def _ms(seconds: float) -> str:
    """Seconds in ms; less than a nanosecond is what is left of sums that are rounded.

    >>> _ms(0.0015), _ms(3e-19)
    ('1.5', '0')
    """
    return number(round(1e3 * seconds, 6))


def _noted(reason: str, reasons: list[str]) -> str:
    """The number of a reason among those that stand below the tables, where it is noted once.

    >>> reasons = ["too large"]
    >>> _noted("cannot be split", reasons), _noted("too large", reasons), reasons
    ('(2)', '(1)', ['too large', 'cannot be split'])
    """
    if reason not in reasons:
        reasons.append(reason)
    return f"({reasons.index(reason) + 1})"


def _cells(place: int, row: Row, reasons: list[str]) -> list[str]:
    """A row that was measured; what was not has no place, and in the place of its rate the number of its reason."""
    terms, memory = row.terms, f"{row.memory / 1e9:.2f}"
    if terms is None:
        return ["", row.what, _noted(row.reason, reasons), *[""] * 6, memory, ""]
    parts = (_ms(getattr(terms, part)) for part in ("step", *PARTS))
    sent = number(terms.bytes_per_step / 1e6) if terms.bytes_per_step else ""
    return [str(place), row.what, f"{row.rate:,.0f}", *parts, terms.waits_for, memory, sent]


def _priced_cells(place: int, row: Row, reasons: list[str]) -> list[str]:
    """A row that was priced: on other machines, or on this one, where it was measured too."""
    terms, memory = row.predicted, f"{row.memory / 1e9:.2f}"
    rates = [f"{figures.samples_per_second:,.0f}" if figures else "" for figures in (terms, row.measured)]
    error = f"{terms.samples_per_second / row.rate - 1:+.0%}" if terms and row.measured else ""
    parts = (_ms(getattr(terms, part)) if terms else "" for part in ("step", *PARTS))
    binds = terms.binds if terms else _noted(row.reason, reasons)
    what = f"here: {row.what}" if row.measured else row.what
    return ["" if row.measured or row.reason else str(place), what, *rates, error, *parts, memory, binds]
