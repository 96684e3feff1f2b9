"""Tables of what training costs."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence

from rich.console import Console

from distbelief.cli.tables import count, number, show
from distbelief.core.records import Json
from distbelief.lab.cost.cost import MARGIN, PER_MILLION, SPARE, UNITS, TrainingCost
from distbelief.lab.cost.trace import KINDS, REST


@contextlib.contextmanager
def progress(what: str) -> Iterator[Callable[[str], None]]:
    """Show what is under way, where there is a terminal."""
    console = Console(stderr=True)
    with console.status(what) as status:
        yield lambda doing: status.update(f"{what}: {doing}")


def show_cost(cost: TrainingCost) -> None:
    """Print the tables of a cost, and what it says in words."""
    _show_layers(cost)
    _show_iteration(cost)
    _show_memory(cost)
    print("\n".join(_words(cost)))


def show_comparison(task: str, rows: Sequence[Json]) -> None:
    """Print what a million samples take on each machine, and how many times what they take on the first."""
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
    # where this batch size was not profiled, the layers have the shares that they have of the largest that was
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
    """Bytes in MB.

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
    rows = [
        [
            step.optimizer,
            number(1e3 * step.seconds),
            f"{step.seconds / (point.step + step.seconds):.1%}",
            _mega(step.state),
        ]
        for step in sorted(cost.updates, key=lambda step: step.seconds)
    ]
    show("optimizers", ("", "update, ms", "of an iteration", "state, MB"), rows)


def _show_memory(cost: TrainingCost) -> None:
    memory = cost.memory
    rows = [[kind, _mega(memory[kind])] for kind in KINDS]
    held, peak = sum(memory[kind] for kind in KINDS), sum(memory.values())
    rows += [["all of the model", _mega(held)], ["Python, torch and the data", _mega(cost.process)]]
    rows += [["the process", _mega(peak)]]
    show(f"memory when most is held, {cost.optimizer}", ("", "MB"), rows)


def _words(cost: TrainingCost) -> Iterator[str]:
    yield (
        f"{number(cost.samples / cost.epoch_seconds)} samples/s; times are of this thread's processor, each the lower "
        f"quartile of {min(point.steps for point in cost.profile.points)} steps or more"
    )
    for epochs in dict.fromkeys((1, cost.request.epochs)):
        charges = cost.charges(epochs)
        more = [f"{charges['kilowatt_hours']:.3g} kWh"] if cost.request.watts is not None else []
        more += [f"a price of {charges['price']:.3g}"] if cost.request.price_per_hour is not None else []
        yield f"{'an epoch' if epochs == 1 else f'{epochs} epochs'}: {', '.join([_time(charges['seconds']), *more])}"
    charges = cost.charges(1)
    million = [f"{charges[name + PER_MILLION]:.3g} {unit}" for name, unit in UNITS.items() if name in charges]
    yield f"normalised, for a million samples: {', '.join(million)}"
    if cost.largest_batch is not None:
        yield (
            f"{(cost.max_memory or 0) / 1e9:g} GB hold a batch of {cost.largest_batch}, with a margin of "
            f"{MARGIN - 1:.0%} and {SPARE / 1e6:g} MB; start the process with MALLOC_MMAP_THRESHOLD_=65536, or glibc "
            "keeps what is freed and the margin is 60 %"
        )
    yield from (f"note: {note}" for note in cost.notes)


def _time(seconds: float) -> str:
    """A time in the unit in which it is read at once.

    >>> _time(0.5), _time(90.0), _time(9000.0)
    ('0.500 s', '1.5 min', '2.5 h')
    """
    if seconds < 60:
        return f"{seconds:.3f} s"
    return f"{seconds / 60:.1f} min" if seconds < 3600 else f"{seconds / 3600:.1f} h"
