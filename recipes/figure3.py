"""The paper's figure 3, from a price: how much faster one minibatch is on so many machines that hold one model; needs
matplotlib.

python recipes/figure3.py docs/figure3.png

A machine computes its part of every layer, and all wait for the slowest; then it sends its neighbours, or everybody,
what they need of it, and their gradients come back. A dense layer needs all inputs everywhere. A locally connected one
needs a border of its image region, a halo, that is as wide as its patches. The speech net is the paper's; of the image
nets it says patches of 10x10, pools, local contrast normalisation and the numbers of maps: their sides are
reconstructed, so that 36 maps make 1.7 thousand million parameters. Speeds are fitted to the paper's curves.
"""

import argparse
import math
from collections.abc import Sequence
from itertools import pairwise
from typing import NamedTuple

from distbelief.schedules.price import LinkModel

MACHINES = (1, 2, 4, 8, 16, 36, 64, 81, 100, 128)
BATCH, FLOAT = 100, 4
RATE = 1e11
"""Floating-point operations that a machine makes in a second."""
LINE = LinkModel(latency=0.3e-3, bandwidth=1.25e8)
"""Of 1 Gbit/s; a message to each peer takes its latency."""
SPREAD = 0.2
"""Deviation of the logarithm of a machine's time."""


class Dense(NamedTuple):
    """A layer all of whose inputs are needed by everybody."""

    inputs: int
    weights: int

    def exchange(self, machines: int) -> tuple[float, int]:
        """Numbers of a sample that come to each machine, and from how many."""
        return self.inputs * (machines - 1) / machines, machines - 1


class Local(NamedTuple):
    """A layer over an image that is cut into regions, of which each needs a border."""

    side: int
    maps: int
    patch: int
    weights: int = 0

    def exchange(self, machines: int) -> tuple[float, int]:
        """As of a dense layer: the border of the largest region of a grid, from 8 neighbours."""
        rows, columns = (math.ceil(self.side / parts) for parts in grid(machines))
        wide, high = (min(part + self.patch - 1, self.side) for part in (rows, columns))
        return float((wide * high - rows * columns) * self.maps), 8


class Net(NamedTuple):
    """A net by its layers; the first one's inputs are data, which every machine has."""

    first: int
    """Weights of the first layer."""
    others: tuple[Dense | Local, ...]

    @property
    def weights(self) -> int:
        """Of all layers."""
        return self.first + sum(layer.weights for layer in self.others)


def grid(machines: int) -> tuple[int, int]:
    """The most even grid of so many regions.

    >>> grid(36), grid(128), grid(2)
    ((6, 6), (8, 16), (1, 2))
    """
    rows = max(number for number in range(1, math.isqrt(machines) + 1) if machines % number == 0)
    return rows, machines // rows


def speech() -> Net:
    """The net for speech: 440 inputs, four layers of 2560 and one of 8192."""
    widths = (2560, 2560, 2560, 2560, 8192)
    return Net(440 * 2560, tuple(Dense(one, one * other) for one, other in pairwise(widths)))


def image(maps: int) -> Net:
    """A net for images of 100x100 in three colours: patches, a pool and a normalisation three times, and 21,000 classes
    of 8x8 places.
    """
    patch, pool, norm, sides = 10, 5, 9, (91, 82, 73)
    layers: list[Dense | Local] = []
    for before, side in zip((None, *sides), sides, strict=False):
        if before:
            layers.append(Local(before, maps, patch, side * side * maps * maps * patch * patch))
        layers += [Local(side, maps, pool), Local(side, maps, norm)]
    inputs = 8 * 8 * maps
    return Net(sides[0] ** 2 * maps * 3 * patch * patch, (*layers, Dense(inputs, inputs * 21_000)))


def slowest(machines: int, spread: float = SPREAD, points: int = 4001) -> float:
    """The expected time of the slowest of so many machines, whose times are lognormal with mean 1.

    >>> round(slowest(1), 6), round(slowest(1, 0.5), 6), slowest(100) > slowest(10) > 1
    (1.0, 1.0, True)
    """
    width, total = 16 / (points - 1), 0.0
    for number in range(points):
        x = -8 + number * width
        below = 0.5 * math.erfc(-x / math.sqrt(2))
        density = math.exp(-x * x / 2) / math.sqrt(2 * math.pi)
        total += math.exp(spread * x - spread * spread / 2) * machines * below ** (machines - 1) * density * width
    return total


def seconds(net: Net, machines: int) -> float:
    """Of a minibatch forward and back: 6 operations for a weight and sample, and what crosses, once each way."""
    takes = 6 * BATCH * net.weights / machines / RATE * slowest(machines)
    for layer in net.others if machines > 1 else ():
        numbers, peers = layer.exchange(machines)
        takes += 2 * (FLOAT * BATCH * numbers / LINE.bandwidth + LINE.latency * peers)
    return takes


def speedups(net: Net, machines: Sequence[int] = MACHINES) -> list[float]:
    """How many times faster than one machine so many are."""
    return [seconds(net, 1) / seconds(net, count) for count in machines]


NETS = {
    "speech, dense, 42 M parameters": speech(),
    "images, locally connected, 108 M": image(8),
    "images, locally connected, 370 M": image(16),
    "images, locally connected, 1.7 G": image(36),
}


def main(path: str) -> None:
    """Print, and draw."""
    import matplotlib.pyplot as plt

    plt.figure(figsize=(7, 4))
    for name, net in NETS.items():
        found = speedups(net)
        plt.plot(MACHINES, found, marker=".", label=name)
        print(f"{name}: " + ", ".join(f"{made:.2f} on {count}" for count, made in zip(MACHINES, found, strict=True)))
    plt.axhline(1, color="grey", linewidth=0.5)
    plt.xlabel("machines that hold one model")
    plt.ylabel("times faster than one")
    plt.title("A minibatch of a model that is split, by its price")
    plt.legend()
    plt.savefig(path, dpi=110, bbox_inches="tight")


if __name__ == "__main__":
    asked = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    asked.add_argument("path", help="of the picture, such as docs/figure3.png")
    main(**vars(asked.parse_args()))
