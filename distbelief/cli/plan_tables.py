"""How a plan is shown."""

from __future__ import annotations

from distbelief.bench.parts.timing import number, show
from distbelief.planner.plan import Plan, Row

COLUMNS = ("", "what", "step, ms", "compute", "update", "network", "wait", "samples/s", "memory, GB", "MB a step",
           "binds")  # fmt: skip


def show_plan(plan: Plan) -> None:
    """Print the table of a plan, and what it says in words."""
    show(
        f"{plan.task} on {plan.machines} (hosts x cores), minibatches of {plan.batch_size}: a step of each replica",
        COLUMNS,
        [_cells(place, row) for place, row in enumerate((row for row in plan.rows if row.terms), 1)],
    )
    print("\n".join(f"not {row.what}: {row.reason}" for row in plan.rows if row.terms is None), end="")
    print("\n".join(["", plan.why, *plan.changes, *(f"note: {note}" for note in plan.notes)]).lstrip("\n"))
    print(f"distbelief train {plan.task} {plan.first.command} --batch-size {plan.batch_size}")


def _cells(place: int, row: Row) -> list[str]:
    """A row of the table."""
    terms = row.terms
    assert terms is not None
    parts = (terms.step, terms.compute, terms.update, terms.communicate, terms.wait)
    return [
        str(place), row.what, *(number(1e3 * part) for part in parts), f"{terms.samples_per_second:,.0f}",
        f"{row.memory / 1e9:.2f}", number(terms.bytes_per_step / 1e6) if terms.bytes_per_step else "", terms.binds,
    ]  # fmt: skip
