"""Time of an all-reduce against its size and the number of ranks: simulated, and measured on this machine; needs
matplotlib.

python recipes/collectives.py docs/collectives.png

The simulated times are those of a whole job of phantoms, minus its steps, on lines of 10 Gbit/s with 20 us of latency,
where nothing else takes time. The measured times are those of the benchmark allreduce: gloo's own all-reduce, our ring
over TCP, and gradients in shared memory.
"""

import argparse

import matplotlib.pyplot as plt
import torch

import distbelief as db
from benchmarks import BENCHES
from benchmarks.allreduce import COPY, OWN, PLACE, RING, AllreduceOptions

STEP = 1e-3
ALGORITHMS = ("naive", "tree", "butterfly", "halving-doubling", "ring")


def simulated(algorithm: str, ranks: int, size: int, rounds: int = 4) -> float:
    """Simulate one all-reduce of some bytes; return its seconds."""
    data = db.TensorData(torch.zeros(rounds * ranks, 1), torch.zeros(rounds * ranks, dtype=torch.int64))
    task = db.Task(model=lambda: torch.nn.Linear(size // 4, 1, bias=False), train=lambda: data)
    place = db.Simulated(
        db.NetworkModel(latency=20e-6, bandwidth=1.25e9),
        db.ComputeModel(step=STEP, spread="constant"),
        phantom=True,
        handling=db.INSTANT,
    )
    seconds = db.run(
        db.Job(task=task, strategy=db.Allreduce(ranks, algorithm=algorithm), batch_size=1, evaluate_every=0), on=place
    )["seconds"]
    return max(float(seconds) / rounds - STEP, 1e-6)


def main(path: str, largest: float = 64.0, repeats: int = 5) -> None:
    """Simulate, measure and draw; `largest` is in MB."""
    sizes = [int(mb * 1e6) for mb in (0.004, 0.016, 0.064, 0.25, 1.0, 4.0, 16.0, 64.0) if mb <= max(largest, 0.004)]
    _, (left, middle, right) = plt.subplots(1, 3, figsize=(15, 4))
    for name in ALGORITHMS:
        left.loglog(
            [size / 1e6 for size in sizes], [1e3 * simulated(name, 8, size) for size in sizes], marker=".", label=name
        )
        ranks = (2, 4, 8, 16, 32) if largest > 1 else (2, 4)
        middle.loglog(ranks, [1e3 * simulated(name, count, 1_000_000) for count in ranks], marker=".", label=name)
    middle.set_xticks(ranks, map(str, ranks))
    middle.set_xticks([], minor=True)
    options = AllreduceOptions(sizes=tuple(sizes), ranks=(2,), repeats=repeats, quiet=True)
    found = BENCHES["allreduce"].run(options)["one_host"]["2"]
    for name in (OWN, RING, COPY, PLACE):
        right.loglog(
            [int(size) / 1e6 for size in found],
            [1e3 * one["seconds"][name] for one in found.values()],
            marker=".",
            label=name,
        )
    right.set_ylim(top=30 * right.get_ylim()[1])  # the legend is there
    for axes, title, label in (
        (left, "simulated, 8 ranks", "MB"),
        (middle, "simulated, 1 MB", "ranks"),
        (right, "measured on one machine, 2 ranks", "MB"),
    ):
        axes.set_title(title)
        axes.set_xlabel(label)
        axes.set_ylabel("ms")
        axes.legend(fontsize=8)
    plt.savefig(path, dpi=100, bbox_inches="tight")


if __name__ == "__main__":
    asked = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    asked.add_argument("path", help="of the picture, such as docs/collectives.png")
    main(**vars(asked.parse_args()))
