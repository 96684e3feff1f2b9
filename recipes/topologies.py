"""Effect of the order of hosts on a tree of switches, and of the topology at equal cost of cables: simulated without
computing; needs matplotlib.

python recipes/topologies.py docs/topologies.png

Left: the load of an all-reduce of 100 MB on the busiest uplink of 8 racks of 8 hosts, and its time if all cables have
10 Gbit/s. Right: AlexNet's samples a second on 128 hosts with minibatches of 32, over a tree, a fat tree and a Slim
Fly. In each topology all cables have one speed, and together they have the capacity of the fat tree's cables at 10
Gbit/s.
"""

import argparse
from collections.abc import Sequence

import matplotlib.pyplot as plt
import torch

import distbelief as db
from distbelief.network.graph import Routes, Topology, loads
from distbelief.network.shapes import shape
from distbelief.schedules.allreduce import schedule
from distbelief.schedules.price import LinkModel, price_on
from distbelief.strategies import Strategy

LINE = LinkModel(latency=20e-6, bandwidth=1.25e9)
SIZE, ALEXNET, STEP = 100e6, 61_100_840, 0.14
"""Bytes to add; parameters; seconds of a minibatch at 1e12 operations a second."""
SHAPES = ("tree:16x8", "fat-tree:8", "slim-fly:5")


def far_first(hosts: Sequence[int]) -> list[int]:
    """Order ranks so that the first partners of a swap are far apart in the walk; for powers of two."""
    bits = len(hosts).bit_length() - 1
    return [hosts[int(f"{rank:0{bits}b}"[::-1], 2)] for rank in range(len(hosts))]


def orders(topology: Topology) -> dict[str, tuple[str, list[int]]]:
    """Algorithms, and the host of each rank."""
    walk = list(topology.walk)
    generator = torch.Generator().manual_seed(0)
    drawn = [walk[place] for place in torch.randperm(len(walk), generator=generator)]
    return {
        "ring, walk order": ("ring", walk),
        "ring, at random": ("ring", drawn),
        "halving-doubling, near first": ("halving-doubling", walk),
        "halving-doubling, far first": ("halving-doubling", far_first(walk)),
        "butterfly": ("butterfly", walk),
    }


def uplink(routes: Routes, algorithm: str, hosts: Sequence[int]) -> tuple[float, float]:
    """Return how many vectors the busiest link between switches carries one way, and the seconds of the all-reduce."""
    made = schedule(algorithm, len(hosts), len(hosts))
    moves = [(hosts[one.source], hosts[one.target], one.length / made.length) for one in made.moves]
    between = [load for link, load in loads(routes, moves).items() if not routes.topology.ends_at_host(link)]
    return max(between), price_on(made, routes, hosts, LINE, SIZE)


def bandwidth(name: str, hosts: int, like: str = "fat-tree:8") -> float:
    """Return the bandwidth of each cable with which all together have the capacity of `like`'s at 1.25 GB/s."""

    def cables(topology: Topology) -> int:
        return len(topology.cables) - len(topology.hosts) + hosts

    return LINE.bandwidth * cables(shape(like)) / cables(shape(name))


def rate(strategy: Strategy, name: str, replicas: int, parameters: int, rounds: int) -> float:
    """Return the samples per second."""
    data = db.TensorData(torch.zeros(32 * rounds * replicas, 1), torch.zeros(32 * rounds * replicas, dtype=torch.int64))
    task = db.Task(model=lambda: torch.nn.Linear(parameters, 1, bias=False), train=lambda: data)
    place = db.Simulated(
        db.NetworkModel(latency=LINE.latency, bandwidth=bandwidth(name, replicas)),
        db.ComputeModel(step=STEP, spread="lognormal"),
        phantom=True,
        topology=name,
    )
    job = db.Job(task=task, strategy=strategy, batch_size=32, evaluate_every=0, checkpoint_every=0)
    result = db.run(job, on=place)
    print(f"{strategy.name} on {result['network']['told']}: {result['samples_per_second']:,.0f} samples/s")
    return float(result["samples_per_second"])


def main(path: str, replicas: int = 128, parameters: int = ALEXNET, rounds: int = 3) -> None:
    """Simulate, and draw."""
    _, (left, right) = plt.subplots(1, 2, figsize=(14, 4.5))
    routes = Routes(shape("tree:8x8"))
    found = {name: uplink(routes, *one) for name, one in orders(routes.topology).items()}
    for name, (load, seconds) in found.items():
        print(f"{name}: {load:.2f} times the vector on an uplink, {1e3 * seconds:.0f} ms")
    bars = left.barh([*found], [load for load, _ in found.values()])
    left.bar_label(bars, [f"{load:.2f}, {1e3 * seconds:.0f} ms" for load, seconds in found.values()], padding=3)
    left.set(xlabel="times the vector, on the busiest uplink of tree:8x8", xlim=(0, 36))
    left.invert_yaxis()
    shards = min(16, replicas)
    strategies: dict[str, Strategy] = {
        "downpour": db.Downpour(replicas, shards=shards),
        "synchronous": db.Synchronous(replicas, shards=shards),
        "allreduce": db.Allreduce(replicas, algorithm="ring", bucket_mb=1e3),
    }
    for at, (label, strategy) in enumerate(strategies.items()):
        rates = [rate(strategy, name, replicas, parameters, rounds) for name in SHAPES]
        right.bar([place + 0.27 * (at - 1) for place in range(len(SHAPES))], rates, 0.25, label=label)
    right.set_xticks(
        range(len(SHAPES)), [f"{name}\n{bandwidth(name, replicas) / 1.25e8:.1f} Gbit/s" for name in SHAPES]
    )
    right.set(ylabel=f"samples/s, {replicas} replicas, {shards} shards")
    right.legend()
    plt.tight_layout()
    plt.savefig(path, dpi=110)


if __name__ == "__main__":
    asked = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    asked.add_argument("path", help="of the picture, such as docs/topologies.png")
    main(**vars(asked.parse_args()))
