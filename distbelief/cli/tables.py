"""Tables that commands print: of costs, plans and splits."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence

from rich.console import Console
from rich.table import Table
from rich.text import Text

from distbelief.core.records import Json
from distbelief.lab import number
from distbelief.lab.cost.cost import MARGIN, PER_MILLION, SPARE, UNITS, TrainingCost
from distbelief.lab.cost.splitting import KINDS as HELD
from distbelief.lab.cost.splitting import PartitionCost, SplitCost
from distbelief.lab.cost.trace import KINDS, REST, WHOLE
from distbelief.lab.plan.plan import Row, TrainingPlan
from distbelief.lab.plan.scaling import Scaling, ScalingPoint
from distbelief.record.summary import PARTS, duration


def show(title: str, columns: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """Print a table."""
    table = Table(*columns, title=Text(title), title_justify="left")
    for column in table.columns[1:]:
        column.justify = "right"
    for row in rows:
        table.add_row(*map(Text, row))  # a name may look like markup
    console = Console()
    Console(width=console.width if console.is_terminal else 150).print(table)


def count(value: int) -> str:
    """Format a count; "" for none."""
    return f"{value:,}" if value else ""


@contextlib.contextmanager
def progress(what: str) -> Iterator[Callable[[str], None]]:
    """Show progress on a terminal; yield a function that the block calls with what it is doing."""
    console = Console(stderr=True)
    with console.status(what) as status:
        yield lambda doing: status.update(f"{what}: {doing}")


def show_cost(cost: TrainingCost) -> None:
    """Print the tables of a cost and its summary."""
    _show_layers(cost)
    _show_iteration(cost)
    _show_memory(cost)
    print("\n".join(_words(cost)))


def show_comparison(task: str, rows: Sequence[Json]) -> None:
    """Print what a million samples cost on each machine, also relative to the first."""
    charged = [name for name in UNITS if name in rows[0]]
    columns = [column for name in charged for column in (UNITS[name], "of the first")]
    cells = [
        [
            *(row["file"], row["processor"], row["optimizer"], str(row["batch_size"]), number(1e6 / row["seconds"])),
            *(f"{row[key]:.3g}" for name in charged for key in (name, f"{name}_of_first")),
        ]
        for row in rows
    ]
    title = f"{task}: what a million samples take on each machine"
    show(title, ("", "processor", "optimizer", "batch", "samples/s", *columns), cells)


def _show_layers(cost: TrainingCost) -> None:
    rows, times, trace = [], cost.profile.layers, cost.trace
    # an unprofiled batch size has the layers' shares of the largest profiled one
    measured = cost.profile.points[-1]
    grown = [cost.point.forward / max(1e-12, measured.forward), cost.point.backward / max(1e-12, measured.backward)]
    for layer in cost.layers:
        forward, backward = (1e3 * seconds * scale for seconds, scale in zip(times[layer.name], grown, strict=True))
        kind = layer.kind + (f" x{layer.calls}" if layer.calls > 1 else "")
        adds = "unknown" if layer.uncounted else count(layer.multiply_adds)
        counts = ["x".join(map(str, layer.output)), count(layer.parameters), adds]
        if layer.name == REST and not layer.parameters and not layer.multiply_adds:
            counts = ["", "", ""]
        sizes = [_mega(bytes_of.get(layer.name, 0)) for bytes_of in (trace.maps, trace.gradients)]
        rows.append([layer.name, kind, *counts, number(forward), number(backward), *sizes])
    sums = [f"{sum(getattr(layer, what) for layer in cost.layers):,}" for what in ("parameters", "multiply_adds")]
    seconds = [number(1e3 * duration) for duration in (cost.point.forward, cost.point.backward)]
    sizes = [_mega(sum(bytes_of.values())) for bytes_of in (trace.maps, trace.gradients)]
    rows.append(["all", "", "", *sums, *seconds, *sizes])
    what = "output and multiply-adds (forward) of one sample; times, maps and gradients of a minibatch of"
    columns = ("layer", "kind", "output", "parameters", "multiply-adds", "forward, ms", "backward, ms", "maps, MB")
    show(f"{cost.task}: {what} {cost.request.batch_size}", (*columns, "gradients, MB"), rows)


def _mega(size: float) -> str:
    """Format bytes in MB.

    >>> _mega(1234567), _mega(123456789)
    ('1.235', '123.5')
    """
    return f"{size / 1e6:,.{1 if size >= 1e8 else 3}f}"


def _show_iteration(cost: TrainingCost) -> None:
    point, chosen = cost.point, cost.updates[0]
    parts = {"input": point.input, "forward": point.forward, "backward": point.backward}
    parts |= {f"update, {chosen.optimizer}": chosen.seconds, "an iteration": cost.step}
    show(
        "one iteration",
        ("", "ms", "share"),
        [[name, number(1e3 * seconds), f"{seconds / cost.step:.0%}"] for name, seconds in parts.items()],
    )
    rows = []
    for step in sorted(cost.updates, key=lambda step: step.seconds):
        share = f"{step.seconds / (point.step + step.seconds):.1%}"
        rows.append([step.optimizer, number(1e3 * step.seconds), share, _mega(step.state)])
    show("optimizers", ("", "update, ms", "of an iteration", "state, MB"), rows)


def _show_memory(cost: TrainingCost) -> None:
    memory = cost.memory
    rows = [[kind, _mega(memory[kind])] for kind in KINDS]
    held, peak = sum(memory[kind] for kind in KINDS), sum(memory.values())
    rows += [["all of the model", _mega(held)], ["Python, torch and the data", _mega(cost.process)]]
    rows += [["the process", _mega(peak)]]
    show(f"memory at its peak, {cost.optimizer}", ("", "MB"), rows)


def _words(cost: TrainingCost) -> Iterator[str]:
    yield (
        f"{number(cost.samples / cost.epoch_seconds)} samples/s; times are this thread's CPU time, each the lower "
        f"quartile of {min(point.steps for point in cost.profile.points)} steps or more"
    )
    for epochs in dict.fromkeys((1, cost.request.epochs)):
        charges = cost.charges(epochs)
        more = [f"{charges['kilowatt_hours']:.3g} kWh"] if cost.request.watts is not None else []
        more += [f"a price of {charges['price']:.3g}"] if cost.request.price_per_hour is not None else []
        yield f"{'an epoch' if epochs == 1 else f'{epochs} epochs'}: {', '.join([duration(charges['seconds']), *more])}"
    charges = cost.charges(1)
    million = [f"{charges[name + PER_MILLION]:.3g} {unit}" for name, unit in UNITS.items() if name in charges]
    yield f"normalised, for a million samples: {', '.join(million)}"
    if cost.largest_batch is not None:
        yield (
            f"{(cost.max_memory or 0) / 1e9:g} GB hold a batch of {cost.largest_batch}, with a margin of "
            f"{MARGIN - 1:.0%} and {SPARE / 1e6:g} MB; start the process with MALLOC_MMAP_THRESHOLD_=65536, or glibc "
            "keeps freed memory and needs a margin of 60 %"
        )
    yield from (f"note: {note}" for note in cost.notes)


COLUMNS = ("", "what", "samples/s", "step, ms", *PARTS, "for", "memory, GB", "MB a step")
PRICED = ("", "what", "predicted", "measured", "error", "step, ms", *PARTS, "memory, GB", "binds")
"""Columns of a plan in which some rows are priced."""
SCALED = ("step, ms", "measured", "simulated", "error", "speed-up", "efficiency", "one more", "binds")
"""Columns after the one with the number of replicas or partitions."""


def show_plan(plan: TrainingPlan) -> None:
    """Print the table of a plan and its summary; reasons are numbered below the table."""
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


def show_scaling(scaling: Scaling) -> None:
    """Print what one more replica or partition brings, a table for each way."""
    reasons: list[str] = []
    for curve in scaling.curves:
        show(
            f"{scaling.task}, {curve.name}, minibatches of {scaling.batch_size}: samples/s of all {curve.of}s",
            (f"{curve.of}s", *SCALED),
            [_scaled_cells(point, reasons) for point in curve.points],
        )
    numbered = [f"({number}) {reason}" for number, reason in enumerate(reasons, 1)]
    notes = [f"note: {note}" for note in scaling.notes]
    print("\n".join([*numbered, *filter(None, (curve.told for curve in scaling.curves)), *notes]))


def _scaled_cells(point: ScalingPoint, reasons: list[str]) -> list[str]:
    rates = [f"{rate:,.0f}" if rate else "" for rate in (point.measured, point.simulated)]
    error = f"{point.simulated / point.measured - 1:+.0%}" if point.measured and point.simulated else ""
    shares = ["" if share is None else f"{round(100 * share)}%" for share in (point.efficiency, point.more)]
    step, speedup = (number(value) if value else "" for value in (1e3 * (point.step or 0.0), point.speedup))
    binds = _noted(point.reason, reasons) if point.reason else point.binds
    return [str(point.count), step, *rates, error, speedup, *shares, binds]


def _ms(seconds: float) -> str:
    """Format seconds in ms; less than a nanosecond is a rounding error.

    >>> _ms(0.0015), _ms(3e-19)
    ('1.5', '0')
    """
    return number(round(1e3 * seconds, 6))


def _noted(reason: str, reasons: list[str]) -> str:
    """Return the number of a reason in the list below the tables; add the reason if it is new.

    >>> reasons = ["too large"]
    >>> _noted("cannot be split", reasons), _noted("too large", reasons), reasons
    ('(2)', '(1)', ['too large', 'cannot be split'])
    """
    if reason not in reasons:
        reasons.append(reason)
    return f"({reasons.index(reason) + 1})"


def _cells(place: int, row: Row, reasons: list[str]) -> list[str]:
    """Format a measured row; one that was not measured has the number of the reason instead of a rate."""
    terms, memory = row.terms, f"{row.memory / 1e9:.2f}"
    if terms is None:
        return ["", row.what, _noted(row.reason, reasons), *[""] * 6, memory, ""]
    parts = (_ms(getattr(terms, part)) for part in ("step", *PARTS))
    sent = number(terms.bytes_per_step / 1e6) if terms.bytes_per_step else ""
    return [str(place), row.what, f"{row.rate:,.0f}", *parts, terms.waits_for, memory, sent]


def _priced_cells(place: int, row: Row, reasons: list[str]) -> list[str]:
    """Format a row with a predicted price, and a measured one if it ran on this machine."""
    terms, memory = row.predicted, f"{row.memory / 1e9:.2f}"
    rates = [f"{figures.samples_per_second:,.0f}" if figures else "" for figures in (terms, row.measured)]
    error = f"{terms.samples_per_second / row.rate - 1:+.0%}" if terms and row.measured else ""
    parts = (_ms(getattr(terms, part)) if terms else "" for part in ("step", *PARTS))
    binds = terms.binds if terms else _noted(row.reason, reasons)
    what = f"here: {row.what}" if row.measured else row.what
    return ["" if row.measured or row.reason else str(place), what, *rates, error, *parts, memory, binds]


def show_split(cost: SplitCost) -> None:
    """Print the tables of a split and its verdict."""
    split = cost.split
    cut = f" in {split.chunks} chunks" if split.chunks else ""
    placed = []
    for part in cost.placements:
        counts = map(count, (part.parameters, part.operations, part.sends, part.tensors))
        placed.append([part.module or WHOLE, str(part.partition), *counts])
    show(
        f"{cost.task}, {split.text}{cut} over {split.partitions} partitions, traced by {cost.traced}: operations "
        "(forward) and bytes that leave, of one sample",
        ("module", "partition", "parameters", "operations", "sends, B", "sends of the model, B"),
        placed,
    )
    how = f", {cost.schedule} with {cost.microbatches} microbatches" if cost.microbatches > 1 else ""
    whole = cost.whole
    row = ["one process", number(1e3 * whole.computes), "", number(1e3 * whole.update), "", "", *_memory(whole.memory)]
    show(
        f"a step of {cost.batch_size} samples{how}, and memory at its peak",
        ("ms, kB, MB", "computes", "waits", "update", "messages", "sends", *HELD, "all"),
        [*map(_partition, cost.partition_costs), row],
    )
    if len(cost.ways) > 1:
        show(
            "ways, by an estimate from their operations; the first was measured",
            ("way", "times as fast", "why not"),
            [[way.split, number(way.speedup) if way.speedup else "", way.reason] for way in cost.ways],
        )
    print(cost.verdict)
    print("\n".join(f"note: {note}" for note in cost.notes), end="\n" * bool(cost.notes))


def _partition(partition: PartitionCost) -> list[str]:
    times = map(_ms, (partition.computes, partition.waits, partition.update))
    sends = str(partition.messages), number(partition.sent / 1e3)
    return [f"partition {partition.partition}", *times, *sends, *_memory(partition.memory)]


def _memory(memory: dict[str, int]) -> list[str]:
    return [f"{size / 1e6:,.2f}" for size in (*(memory[kind] for kind in HELD), sum(memory.values()))]
