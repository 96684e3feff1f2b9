"""How a plan is shown."""

from __future__ import annotations

from collections.abc import Sequence

from distbelief.cli.tables import number, show
from distbelief.lab.plan.plan import Row, TrainingPlan

COLUMNS = ("", "what", "step, ms", "compute", "update", "communicate", "wait", "for", "samples/s", "memory, GB",
           "MB a step", "binds")  # fmt: skip
PARTS = ("compute", "update", "communicate", "wait", "step")


def show_plan(plan: TrainingPlan) -> None:
    """Print the table of a plan, and what it says in words; reasons stand below the tables, by their number there."""
    reasons: list[str] = []
    limit = f", {plan.max_memory / 1e9:.3g} GB for a process" if plan.max_memory else ""
    show(
        f"{plan.task} on {plan.machines} (hosts x cores), minibatches of {plan.batch_size}{limit}: a step of each "
        "replica",
        COLUMNS,
        [_cells(place, row, reasons) for place, row in enumerate(plan.rows, 1)],
    )
    _show_measured([row for row in plan.rows if row.terms and (row.measured or row.reason)], reasons)
    told = [f"({number}) {reason}" for number, reason in enumerate(reasons, 1)]
    print("\n".join([*told, plan.why, *plan.changes, *(f"note: {note}" for note in plan.notes)]))
    stepped = "" if plan.optimizer == "sgd" else f" --optimizer {plan.optimizer}"
    print(f"distbelief train {plan.task} {plan.first.command}{stepped} --batch-size {plan.batch_size}")


def _show_measured(rows: Sequence[Row], reasons: list[str]) -> None:
    """Print what was predicted of those that were run, and what was measured."""
    lines = []
    for row in rows:
        if row.measured is None:
            lines.append([row.what, "not run", *[""] * len(PARTS), _noted(row.reason, reasons)])
            continue
        assert row.terms is not None
        of = row.measured.samples_per_second
        lines += [
            [row.what, "predicted", *(_ms(getattr(row.terms, part)) for part in PARTS),
                f"{row.terms.samples_per_second:,.0f}"],
            ["", "measured", *(_ms(getattr(row.measured, part)) for part in PARTS), f"{of:,.0f}"],
            ["", "error", *(_ms(getattr(row.terms, part) - getattr(row.measured, part)) for part in PARTS),
                f"{row.terms.samples_per_second / of - 1:+.0%}"],
        ]  # fmt: skip
    if lines:
        show("trained with for some seconds: a step in ms", ("", "", *PARTS, "samples/s"), lines)


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
    """A row of the table; what cannot be done has no place, and the number of its reason."""
    terms = row.terms
    if terms is None:
        return ["", row.what, *[""] * 7, f"{row.memory / 1e9:.2f}", "", _noted(row.reason, reasons)]
    parts = (terms.step, terms.compute, terms.update, terms.communicate, terms.wait)
    sent = number(terms.bytes_per_step / 1e6) if terms.bytes_per_step else ""
    return [
        str(place), row.what, *(_ms(part) for part in parts), terms.waits_for,
        f"{terms.samples_per_second:,.0f}", f"{row.memory / 1e9:.2f}", sent, terms.binds,
    ]  # fmt: skip
