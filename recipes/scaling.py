"""Where more replicas stop paying: AlexNet, VGG-16 and Inception on 1 to 64 machines at 1 and 10 Gbit/s, simulated
without computing; needs matplotlib.

python recipes/scaling.py docs/scaling.png

Each replica computes minibatches of 32 samples, and all add up their gradients (`allreduce`). Efficiency is the rate of
n replicas divided by n times the rate of one. A machine makes RATE operations a second for every net, which no real
machine does. So only the order of the nets counts, and where each falls below one half.
"""

import argparse
from collections.abc import Sequence
from typing import NamedTuple

import torch

from distbelief.lab.cost.cost import sample_of
from distbelief.lab.cost.trace import Tracer
from distbelief.lab.plan.candidates import Machines, PlanCandidate
from distbelief.lab.plan.pricing import STEPS, PricedCluster, Pricing
from distbelief.lab.study.figures import efficiency
from distbelief.places.simulated.handling import Handling
from distbelief.strategies import Allreduce, Single
from distbelief.tasks import as_data, resolve
from distbelief.transport.cluster_model import NetworkModel

REPLICAS = (1, 2, 4, 8, 16, 32, 64)
BATCH = 32
RATE = 1e12
"""Floating-point operations of a machine per second: some ten cores, or a small GPU."""
OPERATIONS = 6
"""Operations per multiply-add and sample: two forward, and twice as many backward."""
NETS = {"AlexNet": "alexnet", "VGG-16": "vgg16", "Inception v1": "inception-v1"}
NETWORKS = {f"{gigabits} Gbit/s": NetworkModel(latency=50e-6, bandwidth=gigabits * 1.25e8) for gigabits in (1, 10)}
HALF = 0.5


class Net(NamedTuple):
    """Sizes of a net that matter here."""

    pricing: Pricing
    parameters: int
    step: float
    """Return the seconds of a minibatch on one machine."""


def net(task: str) -> Net:
    """Measure a net by the name of its task."""
    made = resolve(task)
    layers = Tracer(made, sample_of(as_data(made.train()))).layers
    operations = OPERATIONS * sum(layer.multiply_adds for layer in layers) * BATCH
    return Net(Pricing(made, BATCH, STEPS), sum(layer.parameters for layer in layers), operations / RATE)


def efficiencies(one: Net, network: NetworkModel, replicas: Sequence[int] = REPLICAS) -> list[float]:
    """Return the rate of each number of replicas, relative to that many times the rate of one."""

    def rate(count: int) -> float:
        cluster = PricedCluster(Machines(count, 1), network, one.step, Handling(), Handling())
        candidate = PlanCandidate(Allreduce(replicas=count) if count > 1 else Single())
        return one.pricing.price(candidate, cluster).samples_per_second

    alone = rate(1)
    return [efficiency(rate(count), count, alone) for count in replicas]


def falls(found: Sequence[float], replicas: Sequence[int] = REPLICAS) -> int | None:
    """Return the number of replicas from which the efficiency is below one half, or None.

    >>> falls([1.0, 0.7, 0.4, 0.3], (1, 2, 4, 8)), falls([1.0, 0.9], (1, 2))
    (4, None)
    """
    return next((count for count, part in zip(replicas, found, strict=True) if part < HALF), None)


def reason(name: str, line: str, one: Net, found: Sequence[float]) -> str:
    """Explain the efficiency."""
    sent = 2 * torch.float32.itemsize * one.parameters
    seconds, fell = sent / NETWORKS[line].bandwidth, falls(found)
    where = f"under one half from {fell} replicas on" if fell else f"never under one half ({found[-1]:.2f} on 64)"
    return (
        f"{name} at {line}: {where}; a step computes {one.step:.3f} s, and sends up to {sent / 1e6:,.0f} MB in "
        f"{seconds:.3f} s"
    )


def main(path: str) -> None:
    """Print, and draw."""
    import matplotlib.pyplot as plt

    plots = plt.subplots(1, len(NETWORKS), figsize=(9, 4), sharey=True)[1]
    for name, task in NETS.items():
        one = net(task)
        for plot, (line, network) in zip(plots, NETWORKS.items(), strict=True):
            found = efficiencies(one, network)
            print(reason(name, line, one, found))
            plot.semilogx(REPLICAS, found, marker=".", label=name, base=2)
    for plot, line in zip(plots, NETWORKS, strict=True):
        plot.axhline(HALF, color="grey", linewidth=0.5)
        plot.set(title=line, xlabel="replicas, a machine each", xticks=REPLICAS, xticklabels=REPLICAS, ylim=(0, 1.05))
        plot.legend()
    plots[0].set_ylabel("efficiency: rate relative to ideal scaling")
    plt.savefig(path, dpi=110, bbox_inches="tight")


if __name__ == "__main__":
    asked = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    asked.add_argument("path", help="of the picture, such as docs/scaling.png")
    main(**vars(asked.parse_args()))
