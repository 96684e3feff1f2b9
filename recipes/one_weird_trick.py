"""One weird trick (Krizhevsky 2014), simulated: how many times faster 2, 4 and 8 workers train an AlexNet of one
column, split by samples.

python recipes/one_weird_trick.py

Each worker takes 128 samples through the convolutions, and all take 128 after 128 of them through the fully connected
layers. What a sample costs is that of the paper's one worker; the lines are those of its bus. Both are remembered, not
read: it is the shape that counts. Unlike the paper's, a step here updates the fully connected layers once, after all
rounds (its last row, of batches of 1024 in both), a worker has a line of its own to each other, and the copies of the
images to it cost nothing.
"""

import sys
from functools import partial

import distbelief as db
from distbelief.tasks.task import Task
from distbelief.zoo.convnets import convolutional, draw

FILTERS = (64, 192, 384, 384, 256)
"""Parameters of the paper's one column."""
EACH = 128
"""Samples of a worker."""
SAMPLE = 98.05 * 3600 / (90 * 1_281_167)
"""Seconds of a sample: of the paper's one worker, a K20, in 98.05 hours for 90 passes of ImageNet."""
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
