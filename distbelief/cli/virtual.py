"""From the words of a virtual cluster to the place."""

from __future__ import annotations

from distbelief.cli import words
from distbelief.cli.options import VirtualOptions
from distbelief.places.compute_model import ComputeModel
from distbelief.places.simulated.handling import Handling
from distbelief.places.simulated.simulated import Simulated
from distbelief.places.simulated.virtual_cluster import Crash, LeavingHost
from distbelief.transport.network_model import NetworkModel, Outage
from distbelief.transport.processors import Hosts


def cluster(virtual: VirtualOptions) -> Simulated:
    """Make the place.

    Raises:
        UsageError: a word that is none.
    """
    line, hosts = words.network(virtual.network), words.hosts(virtual.hosts)
    steps = {**words.compute(virtual.compute), **words.stragglers(virtual.stragglers)}
    faults = words.faults(virtual.faults)
    crashes, outages = tuple(Crash(*one) for one in faults.crashes), tuple(Outage(*one) for one in faults.outages)
    leaves = tuple(LeavingHost(*one) for one in faults.leaves)
    return Simulated(
        NetworkModel(**line, **faults.delays, outages=outages), ComputeModel(**steps), crashes,
        phantom=virtual.phantom, keep=virtual.keep, handling=Handling(**words.handling(virtual.handling)),
        hosts=Hosts(**hosts) if hosts else None, path=virtual.path, leaves=leaves,
        topology=virtual.topology, **faults.place,
    )  # fmt: skip
