"""From the words of a virtual cluster to the place."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from distbelief.cli import words
from distbelief.cli.options import VirtualOptions

if TYPE_CHECKING:
    from distbelief.places.simulated.simulated import Simulated


def cluster(virtual: VirtualOptions) -> Callable[[], Simulated]:
    """Return a maker of the place, for which torch is imported; its words are checked at once.

    Raises:
        UsageError: a word that is none.
    """
    line = words.network(virtual.network)
    steps = {**words.compute(virtual.compute), **words.stragglers(virtual.stragglers)}
    faults, hosts = words.faults(virtual.faults), words.hosts(virtual.hosts)
    handling = words.handling(virtual.handling)

    def make() -> Simulated:
        from distbelief.places.compute_model import ComputeModel
        from distbelief.places.simulated.handling import Handling
        from distbelief.places.simulated.simulated import Simulated
        from distbelief.places.simulated.virtual_cluster import Crash, LeavingHost
        from distbelief.transport.processors import Hosts
        from distbelief.transport.virtual import NetworkModel, Outage

        crashes = tuple(Crash(*crash) for crash in faults.crashes)
        outages = tuple(Outage(*outage) for outage in faults.outages)
        leaves = tuple(LeavingHost(*leaving) for leaving in faults.leaves)
        return Simulated(
            NetworkModel(**line, **faults.delays, outages=outages), ComputeModel(**steps), crashes,
            phantom=virtual.phantom, keep=virtual.keep, handling=Handling(**handling),
            hosts=Hosts(**hosts) if hosts else None, path=virtual.path, leaves=leaves,
            topology=virtual.topology, **faults.place,
        )  # fmt: skip

    return make
