"""Role links as the carrier of a sum: our schedules between the replicas of a job, over its transport.

Processes use TCP, or TLS between hosts, and vectors travel in chunks. Each link has a window at its receiver, which
fits a fixed number of chunks. The receiver acknowledges chunks that it has taken out, so that more may follow. So data
for a later step takes only that memory, and its sender waits. In simulation the story sends `messages` itself.
"""

from __future__ import annotations

import os
import threading
import time
from collections import defaultdict, deque
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import torch

from distbelief.core import roles
from distbelief.core.conversations.grouping import Assemble, ChunkBack, ChunksTaken, Member, ReducedChunk
from distbelief.core.effects import Arrival
from distbelief.core.events import Lost
from distbelief.errors import DistbeliefError
from distbelief.fabric.base import LOOK_SECONDS, InOrder, Told, play, schedule_of
from distbelief.fabric.waiting import ReductionThread
from distbelief.schedules.allreduce import by_host, schedule
from distbelief.schedules.price import LinkModel, cheapest
from distbelief.schedules.schedule import Move, RankStep
from distbelief.sharding.layout import Range

if TYPE_CHECKING:
    from distbelief.transport.base import NetworkEndpoint

CHUNK = 512 << 10
"""Most bytes of a chunk."""
CHUNKS = 8
"""Chunks in the window of a link, which holds what a fast line carries in a round trip: 1 Gbyte/s times 4 ms."""
WINDOW = CHUNK * CHUNKS
PROBES, PROBE_BYTES = 5, 1 << 20
"""Number of measurements of a link, and their bytes."""


class RoleLinks(InOrder):
    """One replica's part in the groups of a job; a thread carries the links. Vectors on a GPU go through the host.

    Nobody else uses the links, whose endpoint is at `store`. The algorithm is the name of a schedule, or "auto".
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
        """Link to all members of a group, as `Carrier.form`."""
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

    def _begin(self, bucket: int) -> torch.futures.Future[object]:
        return self._thread.do(lambda: self._reduce(bucket))

    def _reduce(self, bucket: int) -> None:
        """Add up a bucket; after the last of a round, wait until the others have taken all chunks of this rank."""
        view = self._views[bucket]
        there = view.cpu()
        play(self._links, there, self._steps[bucket])
        if there is not view:
            view.copy_(there)
        if bucket == len(self._buckets) - 1:
            self._links.settle()

    def close(self) -> None:
        """Leave the group, and end all links; safe to call twice."""
        self._links.wanted = -1
        self._thread.end()
        self._thread.join()


def agree(links: ChunkedLinks, group: Sequence[int]) -> LinkModel:
    """Measure the link to the next rank of a group, and return the slowest that any rank has; all ranks call this."""
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
    """Return the least seconds of several calls, after a first."""
    seconds = []
    for _ in range(PROBES + 1):
        began = time.perf_counter()
        act()
        seconds.append(time.perf_counter() - began)
    return min(seconds[1:])


class _Link:
    __slots__ = ("acknowledged", "arrived", "posted", "taken", "told", "waiting")

    def __init__(self) -> None:
        self.arrived: deque[tuple[ReducedChunk, torch.Tensor]] = deque()
        self.begin(0)

    def begin(self, group: int) -> None:
        """Reset the counts, and drop the chunks of earlier groups."""
        self.waiting: deque[tuple[ReducedChunk, torch.Tensor]] = deque()
        self.posted = self.acknowledged = self.taken = self.told = 0
        self.arrived = deque(chunk for chunk in self.arrived if chunk[0].group >= group)

    def has_come(self, group: int) -> bool:
        """Return whether a chunk of this group has come; a sender may be in the next group already."""
        return bool(self.arrived) and self.arrived[0][0].group == group

    @property
    def has_room(self) -> bool:
        """Return whether the next waiting chunk fits the window."""
        return bool(self.waiting) and self.waiting[0][0].number < self.acknowledged + CHUNKS


class ChunkedLinks:
    """One rank's ends of the links, for one tensor at a time. Other threads may use only `wake` and `wanted`.

    The endpoint listens for these links only. `index` is also the number of this replica's window at each receiver.
    """

    def __init__(self, endpoint: NetworkEndpoint, index: int, replicas: int) -> None:
        self.rank, self.ranks = 0, 1
        self.wanted = -1
        """Number of the group that this rank should be in; work for another group is given up."""
        self._endpoint, self._group = endpoint, -1
        self._members: list[Member] = []
        self._links = defaultdict[str, _Link](_Link)
        self._lost = ""
        self._sent: list[tuple[torch.Tensor, Move, _Link, int]] = []
        self._at = (0, -1)
        endpoint.deliver = self._take_in
        self._window = index * WINDOW
        endpoint.allocate(Range(0, replicas * WINDOW), 1, 1)  # memory is used only once it is written
        self._awake = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self._closing, self._closed = threading.Lock(), False
        endpoint.watch(self._awake, self._awaken)

    def wake(self) -> None:
        """Make `rest` return, unless the links are closed."""
        with self._closing:
            if not self._closed:
                os.eventfd_write(self._awake, 1)

    def _awaken(self) -> None:
        os.eventfd_read(self._awake)

    def rest(self) -> None:
        """Send and receive until something arrives, or until `wake`."""
        self._endpoint.poll(None)

    def close(self) -> None:
        """End all links."""
        with self._closing:
            self._closed = True
        self._endpoint.close()
        os.close(self._awake)

    def form(self, group: int, members: Sequence[Member], rank: int) -> None:
        """Join a group: open the links to higher ranks, and wait for those of lower ranks.

        A member that cannot be reached raises a `RuntimeError`, and so does a group that is not wanted any more.
        """
        self._group, self._members, self.rank, self.ranks = group, list(members), rank, len(members)
        self._lost, self._at = "", (0, -1)
        self._sent.clear()
        for link in self._links.values():
            link.begin(group)
        for member in members[rank + 1 :]:
            self._stay()
            if self._endpoint.incarnation_of(member.role) != member.place.incarnation:
                try:
                    self._endpoint.connect(member.role, member.store, member.place.incarnation)
                except DistbeliefError as error:  # no answer, an unknown name, or another incarnation
                    raise RuntimeError(str(error)) from None
                # the other end notices a link only with its first message
                self._endpoint.send(member.role, ChunksTaken(group, 0))
        while any(self._endpoint.incarnation_of(member.role) != member.place.incarnation for member in members[:rank]):
            self._wait()

    # called by the player

    def post(self, vector: torch.Tensor, step: RankStep) -> None:
        """Send the elements that leave at a step; send a copy if the step receives into the same place."""
        swaps, most = step.swaps, CHUNK // vector.itemsize
        for move in step.sends:
            link, role = self._to(move.target)
            leaves = vector[move.start : move.stop]
            kind = ReducedChunk if move.target > self.rank else ChunkBack
            for at, piece in enumerate((leaves.clone() if swaps else leaves).split(most)):
                start = self._window + link.posted % CHUNKS * CHUNK
                first = move.start + at * most
                chunk = kind(0, start, start + piece.nbytes, self._group, link.posted, step.number, first)
                link.waiting.append((chunk, piece))
                link.posted += 1
            self._send(role, link)
            if not swaps:
                self._sent.append((vector, move, link, link.posted))

    def take(self, vector: torch.Tensor, step: RankStep) -> bool:
        """Add or store what has arrived for a step, and rest if more must come.

        A lost peer, or a group that is not wanted any more, raises a `RuntimeError`.
        """
        self._sent = [sending for sending in self._sent if sending[2].acknowledged < sending[3]]
        if any(source is vector and move.overlaps(got) for source, move, *_ in self._sent for got in step.receives):
            self._wait()  # parts that have not left yet would be overwritten
            return False
        number, first = self._at
        for move in step.receives[number:]:
            first = self._take_move(vector, step.number, move, move.start if first < 0 else first)
            if first < move.stop:
                self._at = number, first
                self._wait()
                return False
            number, first = number + 1, -1
        self._at = (0, -1)
        return True

    def _take_move(self, vector: torch.Tensor, step: int, move: Move, first: int) -> int:
        """Take the arrived chunks of a move; return its next element."""
        link, role = self._to(move.source)
        while first < move.stop and link.has_come(self._group):
            chunk, payload = link.arrived.popleft()
            there = payload.view(vector.dtype)
            if (chunk.step, chunk.first) != (step, first) or first + len(there) > move.stop:
                raise RuntimeError(
                    f"{role} has sent elements from {chunk.first} on at step {chunk.step}, not those from {first} on "
                    f"at step {step}: it uses another schedule"
                )
            here = vector[first : first + len(there)]
            here.add_(there) if move.adds else here.copy_(there)
            first += len(there)
            link.taken += 1
        if link.taken > link.told:
            link.told = link.taken
            self._endpoint.send(role, ChunksTaken(self._group, link.taken))
        return first

    def settle(self) -> None:
        """Wait until the others have taken all chunks; raises as `take` does."""
        self._endpoint.flush()
        while any(link.acknowledged < link.posted for link in self._links.values()):
            self._wait()

    # called to choose a schedule

    def swap(self, tensor: torch.Tensor, ahead: int, behind: int) -> None:
        """Send a tensor to one rank, and receive another into it."""
        size = len(tensor)
        go, come = Move(self.rank, ahead, 0, size, False), Move(behind, self.rank, 0, size, False)
        play(self, tensor, [RankStep(0, (go,), (come,))])

    def maximum(self, values: torch.Tensor) -> torch.Tensor:
        """Return the largest of each value over all ranks."""
        everybody = torch.zeros(self.ranks, len(values), dtype=values.dtype)
        everybody[self.rank] = values
        play(self, everybody.view(-1), schedule("ring", self.ranks, everybody.numel()).steps_of(self.rank))
        return everybody.max(0).values

    # arrivals

    def _take_in(self, arrival: Arrival) -> None:
        event, role = arrival.event, arrival.sender
        match event:
            case ReducedChunk() if event.group >= self._group:
                assert isinstance(arrival.payload, torch.Tensor)
                link = self._links[role]
                link.arrived.append((event, arrival.payload))
                if len(link.arrived) > 2 * CHUNKS:
                    self._endpoint.drop(role, f"{role} sends more than the window of {CHUNKS} chunks holds")
            case ChunksTaken() if event.group == self._group:
                link = self._links[role]
                link.acknowledged = max(link.acknowledged, min(event.count, link.posted))
                self._send(role, link)
            case Lost():
                self._lose(role, event)

    def _lose(self, role: str, event: Lost) -> None:
        """Note a lost link; if it was a member's, the group is broken."""
        for member in self._members:
            if member.role == role and not 0 <= event.incarnation < member.place.incarnation:
                self._lost = self._lost or f"its link to {role} is gone ({event.reason})"

    def _to(self, rank: int) -> tuple[_Link, str]:
        role = self._members[rank].role
        return self._links[role], role

    def _send(self, role: str, link: _Link) -> None:
        """Send the chunks that fit the window."""
        while link.has_room:
            self._endpoint.send(role, *link.waiting.popleft())

    def _wait(self) -> None:
        self._stay()
        if self._lost:
            raise RuntimeError(self._lost)
        self.rest()
        self._stay()

    def _stay(self) -> None:
        if self.wanted != self._group:
            raise RuntimeError(f"group {self._group} was left")
