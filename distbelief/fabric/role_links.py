"""Role links as the carrier of a sum: our schedules between the replicas of a job, over whatever transport it has.

Where processes run, that is TCP, or TLS between hosts: `chunks` says how vectors travel. Where time is simulated, the
story sends them itself, as `messages`.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

import torch

from distbelief.core import roles
from distbelief.core.conversations.grouping import Assemble
from distbelief.fabric.base import LOOK_SECONDS, InOrder, Reduction, Told, schedule_of
from distbelief.fabric.chunks import ChunkedLinks
from distbelief.fabric.player import play
from distbelief.fabric.waiting import ReductionThread
from distbelief.schedules.allreduce import by_host
from distbelief.schedules.price import LinkModel, cheapest
from distbelief.schedules.schedule import RankStep

REST_SECONDS = 2e-3
"""Time of one wait for the thread."""
PROBES, PROBE_BYTES = 5, 1 << 20
"""Times that a link is measured, and with how many bytes."""


class RoleLinks(InOrder):
    """One replica's part in the groups of a job; a thread of its own carries the links, in a step as between groups.

    What is on a GPU goes through memory of the host.

    Args:
        links: of an endpoint of this role, which listens, and is used for nothing else.
        index: of this replica.
        device: where its model is.
        algorithm: how gradients are added up.
        per_host: ranks that are on one host.
        store: where the endpoint listens.
    """

    def __init__(
        self, links: ChunkedLinks, index: int, device: torch.device, algorithm: str, per_host: int, store: str
    ) -> None:
        super().__init__(device)
        self.store = store
        self._links, self._index, self._algorithm, self._per_host = links, index, algorithm, per_host
        self._steps: list[tuple[RankStep, ...]] = []
        self._thread = ReductionThread(links.rest, links.wake, links.close)

    def form(self, group: Assemble, interrupted: Told) -> bool:
        """Be in a group, in the place of the one before, with links to all its members.

        False where that cannot be, or as soon as `interrupted` says that something has arrived.
        """
        self._links.wanted = group.group
        formed = self._thread.do(lambda: self._form(group))
        while not formed.done():
            if interrupted():
                return False
            time.sleep(LOOK_SECONDS)
        try:
            formed.value()
        except RuntimeError as error:
            self.fault = str(error)
            return False
        self._begin_round()
        return True

    def _form(self, group: Assemble) -> None:
        links, rank = self._links, [roles.index_of(member.role) for member in group.members].index(self._index)
        links.form(group.group, group.members, rank)
        ranks, link, inside = len(group.members), None, None
        hosts, name = by_host(ranks, self._per_host), "ring" if self._algorithm == "auto" else self._algorithm
        if self._algorithm == "auto" and ranks > 1:
            link = agree(links, range(ranks))
            if len(hosts) > 1 and max(map(len, hosts)) > 1:
                inside = agree(links, next(host for host in hosts if rank in host))
        names = [cheapest(hosts, b.length, b.item, link, inside) if link else name for b in self._buckets]
        links.settle()
        schedules = [schedule_of(b, name, ranks, self._per_host) for b, name in zip(self._buckets, names, strict=True)]
        self._steps = [schedule.steps_of(rank) for schedule in schedules]

    def _begin(self, bucket: int) -> Reduction:
        done = self._thread.do(lambda: self._reduce(bucket))
        return Reduction(done.done, done.value)

    def _reduce(self, bucket: int) -> None:
        """Add up a bucket; with the last of a round, have the others done with all that this rank has sent them."""
        view = self._views[bucket]
        there = view.cpu()
        play(self._links, there, self._steps[bucket])
        if there is not view:
            view.copy_(there)
        if bucket == len(self._buckets) - 1:
            self._links.settle()

    def _rest(self) -> None:
        self._thread.rest(REST_SECONDS)

    def close(self) -> None:
        """Leave the group, and end all links; safe to call twice."""
        self._links.wanted = -1
        self._thread.end()
        self._thread.join()


def agree(links: ChunkedLinks, group: Sequence[int]) -> LinkModel:
    """Agree on what the slowest of all ranks measures, each on the link to the next of some ranks; all ask at once."""
    if len(group) < 2:
        mine = LinkModel(0.0, 1e12)
    else:
        at = group.index(links.rank)
        ahead, behind = group[(at + 1) % len(group)], group[at - 1]
        small, large = (torch.zeros(size, dtype=torch.uint8) for size in (8, PROBE_BYTES))
        floats = large.view(torch.float32)
        latency = _least(lambda: links.swap(small, ahead, behind))
        whole = _least(lambda: links.swap(large, ahead, behind))
        adding = _least(lambda: floats.add_(floats))
        mine = LinkModel(latency, PROBE_BYTES / max(whole - latency, 1e-9), adding / PROBE_BYTES)
    worst = torch.tensor([mine.latency, 1 / mine.bandwidth, mine.reduction], dtype=torch.float64)
    latency, per_byte, reduction = links.maximum(worst).tolist()
    return LinkModel(latency, 1 / per_byte, reduction)


def _least(act: Callable[[], object]) -> float:
    """The least seconds that something takes, of several times after a first."""
    seconds = []
    for _ in range(PROBES + 1):
        began = time.perf_counter()
        act()
        seconds.append(time.perf_counter() - began)
    return min(seconds[1:])
