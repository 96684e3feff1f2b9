"""The paper's figure 3, simulated: how much faster several machines that share one model compute a minibatch; needs
matplotlib.

python recipes/figure3.py docs/figure3.png

Its nets are split by the code that splits any model, and trained on the virtual cluster, which computes nothing: each
machine has one partition, and makes RATE operations a second. The speech net is the paper's, split by `columns`. Of the
image nets the paper states patches of 10x10, pools, local contrast normalisation, the numbers of maps and 21,000
classes. Their sides are reconstructed, so that 36 maps make 1.7 billion parameters. Images are cut into a grid of
tiles, one for each machine. A message costs its receiver MESSAGE seconds, chosen so that the speech net is fastest on 8
machines as in the paper; nothing is fitted to the image nets.
"""

import argparse
import math
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from itertools import pairwise
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor, nn

import distbelief as db
from distbelief.places.simulated.handling import Handling
from distbelief.split.layers import Divided, Indices, NodeShare, edges, part_of
from distbelief.tasks.task import Task
from distbelief.zoo.mnist import LocallyConnected

MACHINES = (1, 2, 4, 8, 16, 36, 64, 81, 100, 128)
BATCH, STEPS = 100, 6
RATE = 1e11
"""Floating-point operations per second of a machine: at most 20 cores of 2012."""
OPERATIONS = 6
"""Operations for each weight and sample: two forward, and twice as many backward."""
NETWORK = db.NetworkModel(latency=100e-6, bandwidth=1.25e8)
"""Network of 1 Gbit/s."""
MESSAGE = 0.62e-3
VARIATION = 0.2
"""Standard deviation of a machine's time for a step, relative to the mean: all wait for the slowest."""
SPEECH, IMAGE, CLASSES = (440, 2560, 2560, 2560, 2560, 8192), (3, 100, 100), 21_000
PATCH, POOL, NORM, STAGES, PLACES = 10, 5, 9, 3, 8
"""Sides of a patch, a pool and a normalised square; number of stages; places on a side of the final maps."""
SIDE = IMAGE[1] - STAGES * (PATCH - 1)
"""Side of the last maps."""

Sample = tuple[Tensor, Tensor]
"""Inputs and labels: every machine has both, and adds its classes' part of the loss."""


def _added(call: Any) -> Divided:
    """Divide the loss: each partition holds the scores that it computed, and gives their part of the loss."""
    runs = pairwise(edges(call.takes[0].fixed[1], call.partitions))
    layers = [(Indices(1, *run), part_of(call.layer, {}, first=run[0])) for run in runs]
    return Divided(tuple(NodeShare((scores, None), None, layer) for scores, layer in layers), None)


class Scored(nn.Module):
    """Part of a sample's loss: a sum over the scores of some classes, and the right class's if it is among them."""

    divisions: ClassVar[Mapping[str, Callable[[Any], Divided]]] = {"columns": _added}

    def __init__(self, of: Callable[[Tensor], Tensor], first: int = 0) -> None:
        super().__init__()
        self.of, self.first = of, first

    def forward(self, scores: Tensor, labels: Tensor) -> Tensor:
        """Return these two numbers for each sample."""
        classes = torch.arange(self.first, self.first + scores.shape[1], device=scores.device)
        right = scores.masked_fill(classes != labels.unsqueeze(1), 0.0)
        return torch.stack((self.of(scores).sum(1), right.sum(1)), 1)


class Speech(nn.Module):
    """Net for speech: 440 inputs, four layers of 2560, and a softmax of 8192."""

    def __init__(self) -> None:
        super().__init__()
        layers = [nn.Linear(*widths) for widths in pairwise(SPEECH)]
        self.layers = nn.Sequential(*(one for layer in layers[:-1] for one in (layer, nn.Sigmoid())), layers[-1])
        self.softmax = Scored(torch.exp)

    def forward(self, sample: Sample) -> Tensor:
        return self.softmax(self.layers(sample[0]), sample[1])


class Box(NamedTuple):
    """Rows and columns of maps, each as the first and the one after the last."""

    rows: tuple[int, int]
    columns: tuple[int, int]

    def wider(self, before: int, after: int, side: int) -> "Box":
        """Return this box widened on either side, within maps of `side`."""
        return Box(*((max(0, start - before), min(side, stop + after)) for start, stop in self))

    def within(self, other: "Box") -> "Box | None":
        """Return the part of it inside another box, counted from that box's start; None if there is none."""
        both = [(max(a, c) - c, min(b, d) - c) for (a, b), (c, d) in zip(self, other, strict=True)]
        return Box(*both) if all(start < stop for start, stop in both) else None


def tiles(side: int, rows: int, columns: int) -> list[Box]:
    """Return the tiles of a map, row after row.

    >>> tiles(4, 1, 2)
    [Box(rows=(0, 4), columns=(0, 2)), Box(rows=(0, 4), columns=(2, 4))]
    """
    return [Box(row, column) for row in pairwise(edges(side, rows)) for column in pairwise(edges(side, columns))]


class Pooled(nn.Module):
    """Mean over a square around each place of a tile, or with `differs` each place's difference from it."""

    def __init__(self, size: int, gives: Box, side: int, differs: bool) -> None:
        super().__init__()
        self.takes, self.differs = gives.wider(size // 2, size // 2, side), differs
        axes = zip(gives, self.takes, strict=True)
        above, aside = ((size // 2 - (g[0] - t[0]), size // 2 - (t[1] - g[1])) for g, t in axes)
        self.pad, self.mean = (*aside, *above), nn.AvgPool2d(size, 1)
        self.own, self.whole, self.cut = gives.within(self.takes), self.takes.within(self.takes), Cut()

    def forward(self, maps: Tensor) -> Tensor:
        mean = self.mean(nn.functional.pad(maps, self.pad))
        return self.cut(maps, self.own, self.whole) - mean if self.differs else mean


class Tile(nn.Module):
    """Computation of one machine: a tile of all maps, and some of the classes."""

    def __init__(self, maps: int, rows: int, columns: int, number: int) -> None:
        super().__init__()
        self.layers, side, before = nn.ModuleList(), IMAGE[1], IMAGE[0]
        self.takes: list[Box] = []
        """Box that each layer takes from the output of the layer before."""
        for _ in range(STAGES):
            side -= PATCH - 1
            gives = tiles(side, rows, columns)[number]
            self.takes.append(gives.wider(0, PATCH - 1, side + PATCH - 1))
            sizes = [stop - start for start, stop in self.takes[-1]]
            self.layers.append(LocallyConnected(before, maps, (sizes[0], sizes[1]), PATCH))
            for size, differs in ((POOL, False), (NORM, True)):
                self.layers.append(pooled := Pooled(size, gives, side, differs))
                self.takes.append(pooled.takes)
            before = maps
        each = side // PLACES
        own = [[place for place in range(PLACES) if start <= each * place + each // 2 < stop] for start, stop in gives]
        self.places = Box(*((each * one[0], each * one[-1] + each) for one in own)) if all(own) else None
        """Box of the last maps under the final places whose middles lie in this tile; None without any."""
        self.last = nn.Sequential(nn.AvgPool2d(each), nn.Flatten())
        first, behind = list(pairwise(edges(CLASSES, rows * columns)))[number]
        self.out, self.logistic = nn.Linear(maps * PLACES**2, behind - first), Scored(nn.functional.softplus, first)
        self.cut, self.joined = Cut(), Joined()

    def scored(self, parts: Sequence[Tensor], labels: Tensor) -> Tensor:
        """Return its classes' part of the loss."""
        return self.logistic(self.out(self.joined([parts])), labels)


class Cut(nn.Module):
    """Cut of a tile, computed where the tile is."""

    def forward(self, maps: Tensor, part: Box, whole: Box) -> Tensor:
        """Return a part of a whole tile; both boxes count from the tile's start."""
        for dimension, (run, every) in enumerate(zip(part, whole, strict=True), 2):
            if run != every:
                maps = maps.narrow(dimension, run[0], run[1] - run[0])
        return maps


class Joined(nn.Module):
    """Join of parts of several tiles, computed where they are needed."""

    def forward(self, rows: Sequence[Sequence[Tensor]]) -> Tensor:
        lines = [row[0] if len(row) == 1 else torch.cat(list(row), -1) for row in rows]
        return lines[0] if len(lines) == 1 else torch.cat(lines, -2)


class Images(nn.Module):
    """Net of three times patches, a pool and a normalisation, then 21,000 classes; each machine has a tile."""

    def __init__(self, maps: int, rows: int, columns: int) -> None:
        super().__init__()
        self.grid = rows, columns
        self.tiles = nn.ModuleList(Tile(maps, rows, columns, number) for number in range(rows * columns))

    def forward(self, sample: Sample) -> Tensor:
        maps = self.maps(sample[0])
        last = [(tile, self._brought(maps, SIDE, tile, tile.places)) for tile in self.tiles if tile.places]
        parts = [tile.last(places) for tile, places in last]
        return sum((tile.scored(parts, sample[1]) for tile in self.tiles[1:]), self.tiles[0].scored(parts, sample[1]))

    def maps(self, images: Tensor) -> list[Tensor]:
        """Return the last maps of each tile."""
        whole = Box((0, IMAGE[1]), (0, IMAGE[2]))
        values = [tile.layers[0](tile.cut(images, tile.takes[0], whole)) for tile in self.tiles]
        side = IMAGE[1] - PATCH + 1
        for layer in range(1, len(self.tiles[0].layers)):
            values = [tile.layers[layer](self._brought(values, side, tile, tile.takes[layer])) for tile in self.tiles]
            side -= (PATCH - 1) * (layer % 3 == 0)
        return values

    def _brought(self, values: Sequence[Tensor], side: int, tile: Tile, need: Box) -> Tensor:
        """Return the part of all tiles' maps that a tile needs."""
        rows: dict[int, list[Tensor]] = {}
        for owner, value, has in zip(self.tiles, values, tiles(side, *self.grid), strict=True):
            if part := need.within(has):
                rows.setdefault(has.rows[0], []).append(owner.cut(value, part, has.within(has)))
        return tile.joined([*rows.values()])


def grid(machines: int) -> tuple[int, int]:
    """Return the most even grid of this many tiles.

    >>> grid(36), grid(128), grid(2)
    ((6, 6), (8, 16), (1, 2))
    """
    rows = max(number for number in range(1, math.isqrt(machines) + 1) if machines % number == 0)
    return rows, machines // rows


class Samples:
    """Samples without values, to count and to trace a model with."""

    def __init__(self, shape: Sequence[int]) -> None:
        self._shape = shape

    def __len__(self) -> int:
        return BATCH * STEPS

    def batch(self, indices: Tensor) -> tuple[Sample, Tensor]:
        labels = torch.zeros(len(indices), dtype=torch.int64)
        return (torch.zeros(len(indices), *self._shape), labels), labels


class Net(NamedTuple):
    """Net of the figure."""

    model: Callable[[int], nn.Module]
    """Function that makes the model for a number of machines."""
    shape: Sequence[int]
    """Shape of a sample."""
    split: Callable[[int], str]
    """Function that returns the split over a number of machines."""
    loss: Callable[[Tensor, Any], Tensor]


def speech() -> Net:
    """Return the net for speech, with each layer and the softmax split by outputs."""
    return Net(
        lambda _: Speech(),
        SPEECH[:1],
        lambda _: "layers=columns,softmax=columns",
        lambda parts, _: (parts[:, 0].log() - parts[:, 1]).mean(),
    )


def image(maps: int) -> Net:
    """Return a net for images, with a tile on each machine."""
    return Net(
        lambda machines: Images(maps, *grid(machines)),
        IMAGE,
        lambda machines: ",".join(f"tiles.{number}={number}" for number in range(machines)),
        lambda parts, _: (parts[:, 0] - parts[:, 1]).mean(),
    )


def parameters(net: Net, machines: int = 1) -> int:
    """Return the number of parameters."""
    with torch.device("meta"):
        return sum(one.numel() for one in net.model(machines).parameters())


def seconds(net: Net, machines: int) -> float:
    """Return the seconds of a minibatch on some number of virtual machines."""
    alone = OPERATIONS * BATCH * parameters(net) / RATE
    if machines == 1:
        return alone
    model, train = partial(net.model, machines), partial(Samples, net.shape)
    task = Task(model=model, train=train, loss=net.loss, metric=None, split=net.split(machines))
    job = db.Job(task, db.Single(partitions=machines), batch_size=BATCH, evaluate_every=0, checkpoint_every=0)
    place = db.Simulated(
        NETWORK, db.ComputeModel(step=alone, variation=VARIATION), handling=Handling(MESSAGE, math.inf), phantom=True
    )
    return BATCH / float(db.run(job, on=place)["samples_per_second"])


def speedups(net: Net, machines: Sequence[int] = MACHINES) -> list[float]:
    """Return the speedups over one machine."""
    return [seconds(net, 1) / seconds(net, count) for count in machines]


NETS = {
    "speech, dense, 42 M parameters": speech(),
    "images, locally connected, 108 M": image(8),
    "images, locally connected, 370 M": image(16),
    "images, locally connected, 1.7 G": image(36),
}


def main(path: str, most: int = MACHINES[-1]) -> None:
    """Print and draw the speedups for up to `most` machines."""
    import matplotlib.pyplot as plt

    machines = [count for count in MACHINES if count <= int(most)]
    plt.figure(figsize=(7, 4))
    for name, net in NETS.items():
        found = speedups(net, machines)
        plt.plot(machines, found, marker=".", label=name)
        print(f"{name}: " + ", ".join(f"{made:.2f} on {count}" for count, made in zip(machines, found, strict=True)))
    plt.axhline(1, color="grey", linewidth=0.5)
    plt.xlabel("machines that hold one model")
    plt.ylabel("times faster than one")
    plt.title("A minibatch of a model that is split, simulated")
    plt.legend()
    plt.savefig(path, dpi=110, bbox_inches="tight")


if __name__ == "__main__":
    asked = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    asked.add_argument("path", help="of the picture, such as docs/figure3.png")
    asked.add_argument("--most", type=int, default=MACHINES[-1], help="machines; all of them take 20 minutes")
    main(**vars(asked.parse_args()))
