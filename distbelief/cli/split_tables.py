"""Tables of a split model and what it costs."""

from __future__ import annotations

from distbelief.cli.tables import count, number, show
from distbelief.lab.cost.splitting import KINDS, PartitionCost, SplitCost
from distbelief.lab.cost.trace import WHOLE


def show_split(cost: SplitCost) -> None:
    """Print the tables of a split, and what it says in words."""
    split = cost.split
    cut = f" in {split.chunks} chunks" if split.chunks else ""
    show(
        f"{cost.task}, {split.text}{cut} over {split.partitions} partitions, traced by {cost.traced}: operations "
        "(forward) and bytes that leave, of one sample",
        ("module", "partition", "parameters", "operations", "sends, B", "sends of the model, B"),
        [
            [
                part.module or WHOLE,
                str(part.partition),
                *map(count, (part.parameters, part.operations, part.sends, part.tensors)),
            ]
            for part in cost.placements
        ],
    )
    how = f", {cost.schedule} with {cost.microbatches} microbatches" if cost.microbatches > 1 else ""
    whole = cost.whole
    row = ["one process", number(1e3 * whole.computes), "", number(1e3 * whole.update), "", "", *_memory(whole.memory)]
    show(
        f"a step of {cost.batch_size} samples{how}, and memory when most is held",
        ("ms, kB, MB", "computes", "waits", "update", "messages", "sends", *KINDS, "all"),
        [*map(_partition, cost.partition_costs), row],
    )
    if len(cost.ways) > 1:
        show(
            "ways, by a guess from their operations; the first was measured",
            ("way", "times as fast", "why not"),
            [[way.split, number(way.speedup) if way.speedup else "", way.reason] for way in cost.ways],
        )
    print(cost.verdict)
    print("\n".join(f"note: {note}" for note in cost.notes), end="\n" * bool(cost.notes))


def _partition(partition: PartitionCost) -> list[str]:
    times = [number(round(1e3 * seconds, 6)) for seconds in (partition.computes, partition.waits, partition.update)]
    return [
        f"partition {partition.partition}",
        *times,
        str(partition.messages),
        number(partition.sent / 1e3),
        *_memory(partition.memory),
    ]


def _memory(memory: dict[str, int]) -> list[str]:
    return [f"{size / 1e6:,.2f}" for size in (*(memory[kind] for kind in KINDS), sum(memory.values()))]
