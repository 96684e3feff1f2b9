"""One weird trick (Krizhevsky 2014), simulated: how many times faster 2, 4 and 8 workers train an AlexNet of one
column, split by samples.

python recipes/one_weird_trick.py

Each worker takes 128 samples through the convolutions. All workers together take 128 samples at a time through the
fully connected layers. The cost of a sample is that of the paper's single worker, and the lines are those of its bus.
Both are quoted from memory: only the shape counts. Unlike in the paper, a step here updates the fully connected layers
once, after all rounds (as in its last row, with batches of 1024 for both); each worker has its own line to each other;
and copying the images costs nothing.
"""

import sys
from functools import partial

import distbelief as db
from distbelief.tasks.task import Task
from distbelief.zoo.convnets import convolutional, draw

FILTERS = (64, 192, 384, 384, 256)
"""Parameters of the paper's one column."""
EACH = 128
"""Samples of one worker in a step."""
SAMPLE = 98.05 * 3600 / (90 * 1_281_167)
"""Seconds for a sample of the paper's single worker, a K20: 98.05 hours for 90 passes over ImageNet."""
BANDWIDTH, LATENCY = 6e9, 10e-6
"""Bytes per second and latency in seconds of a line: PCI Express 2 with 16 lanes."""
PAPER = {2: 1.93, 4: 3.66, 8: 6.25}
"""The paper's speedups; with 8 workers 6.16 if the fully connected layers have batches of 128."""


def task() -> Task:
    """Make the task of AlexNet in one column, on synthetic images."""
    model = partial(convolutional, FILTERS, columns=1)
    return Task(model=model, train=partial(draw, test=False), test=partial(draw, test=True)).named("one-column")


def speedup(workers: int, split: str = "samples") -> float:
    """Return the speedup over one worker."""
    samples = workers * EACH
    place = db.Simulated(
        network=db.NetworkModel(latency=LATENCY, bandwidth=BANDWIDTH),
        compute=db.ComputeModel(step=samples * SAMPLE, spread="constant"),
        phantom=True,
    )
    strategy = db.Single(partitions=workers, split=split)
    job = db.Job(
        task=task(), strategy=strategy, batch_size=samples, epochs=2 * workers, evaluate_every=0, checkpoint_every=0
    )
    return float(db.run(job, on=place)["samples_per_second"]) * SAMPLE


def main(split: str = "samples") -> None:
    """Print the speedups with the paper's."""
    print("workers  speedup  paper's")
    for workers, found in PAPER.items():
        print(f"{workers:7}  {speedup(workers, split):7.2f}  {found:7.2f}")


if __name__ == "__main__":
    main(*sys.argv[1:])
