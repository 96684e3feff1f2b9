"""All-reduce by torch.distributed, across hosts and on GPUs: schedules point to point, or the library's own, in a thread beside the backward pass.

What a rank receives is added as it comes, in parts, while the rest is on its way. A group whose member dies raises on the others; one that is to be
halted for another reason is left, and what its thread still receives is thrown away.
"""

from __future__ import annotations

import contextlib
import queue
import socket
import threading
import time
import traceback
from collections.abc import Callable, Sequence
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.distributed import PrefixStore, Store, TCPStore  # type: ignore[attr-defined]
from torch.distributed.distributed_c10d import _set_pg_timeout

from distbelief.core import roles
from distbelief.core.buckets import Bucket
from distbelief.core.conversations.grouping import Assemble
from distbelief.errors import JobFailed
from distbelief.schedules.allreduce import broadcast, by_host, schedule
from distbelief.schedules.price import CHOICES, Link, cheapest
from distbelief.schedules.schedule import Schedule
from distbelief.transport.window import Window

PART = 2 << 20
"""Bytes of a transfer that are sent and added at a time."""
LOOK_SECONDS = 2e-3
"""How often who waits for the thread looks whether something has arrived."""
MEET_SECONDS = 15.0
"""How long the members of a group may take to find its store, and to open their links once all are at the store: nothing can break that off."""
STEP_SECONDS = 3600.0
"""How long one may wait for a gradient of another who lives, or for him to come to the store of a group; a death is noticed at once."""
LEAVE_SECONDS = 2.0
"""How long the thread of a group that is left may take to notice."""
PROBES = 5
PROBE_BYTES = 1 << 20

Told = Callable[[], bool]


class Player:
    """Plays schedules on a process group, one tensor after the other, in a thread.

    Args:
        rank: of this process.
        ranks: how many there are.
        device: where the tensors are.
        group: whose ranks these are; the default one where none is given.
        seconds: how long one may wait for what another sends; as long as the group has it where none are given.
    """

    def __init__(self, rank: int, ranks: int, device: torch.device, group: dist.ProcessGroup | None = None, seconds: float | None = None) -> None:
        self.rank, self.ranks, self.device, self._group = rank, ranks, device, group
        self._patience = () if seconds is None else (timedelta(seconds=seconds),)
        self.left = False
        self._queue: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._scratch: dict[torch.dtype, torch.Tensor] = {}
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        self._thread = threading.Thread(target=self._run, name="all-reduce", daemon=True)
        self._thread.start()

    def start(self, tensor: torch.Tensor, how: Schedule | Window | None) -> torch.futures.Future[torch.Tensor]:
        """Add up a contiguous 1-D tensor in place, by a schedule, a window, or (None) the library's own way; the future has it, or the error."""
        done: torch.futures.Future[torch.Tensor] = torch.futures.Future(devices=[self.device] if self._stream else None)
        made = torch.cuda.current_stream(self.device).record_event() if self._stream else None

        def task() -> None:
            try:
                self._stay()
                with torch.cuda.stream(self._stream) if self._stream else contextlib.nullcontext():
                    if self._stream and made:
                        self._stream.wait_event(made)
                    if how is None:
                        self._add_up(tensor)
                    elif isinstance(how, Window):
                        how.add_up(tensor)
                    else:
                        self.play(tensor, how)
                    self._stay()
                    if self._stream:
                        self._stream.synchronize()
                    done.set_result(tensor)  # with the stream on which it was made: whoever waits on another has that one wait
            except Exception as error:  # of a peer that is gone: told to whoever waits
                traceback.clear_frames(error.__traceback__)  # they hold the group, which ends for the others when nobody does; this one must not
                done.set_exception(error)  # type: ignore[arg-type]

        self._queue.put(task)
        if self.left:  # perhaps nobody takes it any more
            self._drain()
        return done

    def leave(self) -> None:
        """Play nothing more; what is being played is given up."""
        self.left, self._group = True, None
        self._queue.put(None)
        if self._thread is not threading.current_thread():
            self._thread.join(LEAVE_SECONDS)

    def _add_up(self, tensor: torch.Tensor) -> None:
        """The library's own way."""
        group = self._group
        self._stay()
        dist.all_reduce(tensor, group=group)

    def _stay(self) -> None:
        if self.left:
            raise RuntimeError("the group was left before this was added up")

    def _run(self) -> None:
        while (task := self._queue.get()) is not None:
            task()

    def _drain(self) -> None:
        """Fail what was queued: who waits for it is not to wait for ever."""
        with contextlib.suppress(queue.Empty):
            while True:
                if (task := self._queue.get_nowait()) is not None:
                    task()

    def play(self, tensor: torch.Tensor, how: Schedule) -> None:
        """Go through the turns of this rank.

        Raises:
            RuntimeError: a peer is gone.
        """
        part, group = max(PART // tensor.itemsize, 1), self._group
        for turn in () if self.left else how.steps_of(self.rank):
            aside, room, taken = turn.swaps, 0, []
            size = sum(got.length for got in turn.receives if got.adds or aside)
            scratch = self._room(tensor, size)
            operations: list[dist.P2POp] = []
            # first what comes: gloo tells the sender that there is room for it behind whatever leaves to him before
            for got in turn.receives:
                here = there = tensor[got.start : got.stop]
                if got.adds or aside:
                    there = scratch[room : room + got.length]
                    room += got.length
                taken += [(a, b, got.adds, len(operations) + i) for i, (a, b) in enumerate(zip(here.split(part), there.split(part), strict=True))]
                operations += [dist.P2POp(dist.irecv, piece, group=group, group_peer=got.source) for piece in there.split(part)]
            receiving = len(operations)
            for sent in turn.sends:
                whole = tensor[sent.start : sent.stop]
                pieces = (whole.clone() if aside else whole).split(part)
                operations += [dist.P2POp(dist.isend, piece, group=group, group_peer=sent.target) for piece in pieces]
            works = dist.batch_isend_irecv(operations)
            each = len(works) == len(operations)  # NCCL has one work for all of them
            for work in () if each else works:
                work.wait()
            for here, there, adds, number in taken:
                if each:
                    works[number].wait(*self._patience)
                if self.left:
                    return
                if adds:
                    here.add_(there)
                elif there.data_ptr() != here.data_ptr():
                    here.copy_(there)
            for work in works[receiving:] if each else ():  # gloo would wait for ever for what was waited for before
                work.wait(*self._patience)

    def _room(self, tensor: torch.Tensor, elements: int) -> torch.Tensor:
        known = self._scratch.get(tensor.dtype)
        if known is None or known.numel() < elements:
            known = self._scratch[tensor.dtype] = torch.empty(elements, dtype=tensor.dtype, device=tensor.device)
        return known

    def probe(self, group: Sequence[int]) -> Link:
        """What the line to the next of some ranks is like, where all of them ask at once: latency, bandwidth, and what adding costs."""
        at = group.index(self.rank)
        ahead, behind = group[(at + 1) % len(group)], group[at - 1]
        small, large = (torch.zeros(size, dtype=torch.uint8, device=self.device) for size in (8, PROBE_BYTES))

        def swap(tensor: torch.Tensor) -> None:
            come = dist.P2POp(dist.irecv, torch.empty_like(tensor), group=self._group, group_peer=behind)
            for work in dist.batch_isend_irecv([come, dist.P2POp(dist.isend, tensor, group=self._group, group_peer=ahead)]):
                work.wait()

        floats = large.view(torch.float32)
        latency, whole, adding = (self._least(act) for act in (lambda: swap(small), lambda: swap(large), lambda: floats.add_(floats)))
        return Link(latency, PROBE_BYTES / max(whole - latency, 1e-9), adding / PROBE_BYTES)

    def _least(self, act: Callable[[], object]) -> float:
        """The least seconds that something takes, of several times."""
        taken = []
        for _ in range(PROBES + 1):
            began = time.perf_counter()
            act()
            if self._stream:
                torch.cuda.synchronize(self.device)
            taken.append(time.perf_counter() - began)
        return min(taken[1:])

    def agreed(self, group: Sequence[int]) -> Link:
        """What the slowest of all ranks measured, each among those of some ranks that it is one of."""
        own = self.probe(group) if len(group) > 1 else Link(0.0, 1e12)
        worst = torch.tensor([own.latency, 1 / own.bandwidth, own.reduction], dtype=torch.float64, device=self.device)
        dist.all_reduce(worst, dist.ReduceOp.MAX, group=self._group)
        latency, per_byte, reduction = worst.tolist()
        return Link(latency, 1 / per_byte, reduction)


class Choice:
    """By which schedule the ranks of a group add up a vector; with auto, by what is measured as this is made, and all of them agree on.

    Args:
        player: of this rank.
        algorithm: one of `schedules/allreduce`, native or auto.
        per_host: ranks that follow each other on one host; 0 for all.
    """

    def __init__(self, player: Player, algorithm: str, per_host: int) -> None:
        self._ranks, self._name, self._hosts = player.ranks, algorithm, by_host(player.ranks, per_host)
        self._link: Link | None = None
        self._inside: Link | None = None
        if algorithm == "auto" and player.ranks > 1:
            self._link = player.agreed(range(player.ranks))
            if len(self._hosts) > 1 and max(map(len, self._hosts)) > 1:
                self._inside = player.agreed(next(host for host in self._hosts if player.rank in host))

    def of(self, length: int, item: int) -> Schedule | None:
        """For so many elements of so many bytes; None is the library's own way."""
        if self._name == "native" or self._ranks == 1:
            return None
        hosts = self._hosts
        best = cheapest(self._ranks, length, item, self._link, self._inside, hosts, CHOICES) if self._link else self._name
        return schedule(best, self._ranks, length, hosts if best.startswith("hierarchical") else ())


class ProcessGroup:
    """One replica's part in the groups of a job.

    Args:
        index: of this replica.
        device: where its model is.
        algorithm: how gradients are added up.
        per_host: ranks that are on one host.
        host: at which the others reach this process.
    """

    def __init__(self, index: int, device: torch.device, algorithm: str, per_host: int, host: str) -> None:
        self._device, self._algorithm, self._per_host = device, algorithm, per_host
        self._meeting = TCPStore(host, 0, is_master=True, wait_for_workers=False, use_libuv=True)
        self.store = f"{host}|{self._meeting.port}"
        """Where a group meets whose first member this is."""
        self._player: Player | None = None
        self._index = index

    def open(self, size: int, found: Sequence[Bucket]) -> tuple[torch.Tensor, torch.Tensor]:
        """One vector, in which the sum takes the place of the gradient."""
        self._buckets = list(found)
        self._vector = torch.zeros(size, dtype=torch.uint8, device=self._device)
        self._views = [self._vector[b.start : b.stop].view(getattr(torch, b.dtype)) for b in found]
        return self._vector, self._vector

    def form(self, group: Assemble, told: Told) -> bool:
        """Meet the others at the store of the first, in the place of the group before; False where they do not come, or as soon as `told` says so."""
        self.close()
        ranks, own = len(group.members), [roles.index_of(member.role) for member in group.members].index(self._index)
        host, _, port = group.members[0].store.partition("|")
        try:
            socket.create_connection((host, int(port)), MEET_SECONDS).close()  # the store would try to reach one who is dead again and again
            store = TCPStore(host, int(port), is_master=False, timeout=timedelta(seconds=MEET_SECONDS), use_libuv=True)
            named = PrefixStore(f"group {group.group}", store)
            if not self._gather(named, own, ranks, told):
                return False
            backend = "nccl" if self._device.type == "cuda" else "gloo"
            dist.init_process_group(backend, store=named, rank=own, world_size=ranks, timeout=timedelta(seconds=MEET_SECONDS))
            _set_pg_timeout(timedelta(seconds=STEP_SECONDS))
            self._player = Player(own, ranks, self._device, seconds=STEP_SECONDS)
            choice = Choice(self._player, self._algorithm, self._per_host)
            self._schedules = [choice.of(b.length, b.item) if b.adds else broadcast(ranks, b.length) for b in self._buckets]
        except (OSError, RuntimeError, ValueError):
            return False
        self._next_round()
        return True

    @staticmethod
    def _gather(store: Store, own: int, ranks: int, told: Told) -> bool:
        """Wait until all are at the store: what opens links there would wait for one who has died on his way, and hear of nothing."""
        store.set(f"here {own}", "")
        there, give_up = [f"here {rank}" for rank in range(ranks)], time.monotonic() + STEP_SECONDS
        while not store.check(there):
            if told() or time.monotonic() > give_up:
                return False
            time.sleep(LOOK_SECONDS)
        return True

    def _next_round(self) -> None:
        self._ready = [False] * len(self._buckets)
        self._futures: list[torch.futures.Future[torch.Tensor]] = []

    def ready(self, bucket: int) -> None:
        """The gradient of a bucket is there; buckets are reduced in their order, the same on all ranks."""
        self._ready[bucket] = True
        while self._player and len(self._futures) < len(self._buckets) and self._ready[len(self._futures)]:
            number = len(self._futures)
            self._futures.append(self._player.start(self._views[number], self._schedules[number]))

    def reduce(self, round: int, told: Told) -> bool:
        """Wait until all is reduced; False where a member is gone, or as soon as something has arrived."""
        for future in self._futures:
            while not future.done():
                if told():
                    return False
                time.sleep(LOOK_SECONDS / 40)
            try:
                future.value()
            except (RuntimeError, JobFailed):
                return False
        self._next_round()
        return True

    def close(self) -> None:
        """Leave the group."""
        player, self._player = self._player, None
        if player is not None:
            player.leave()
        if dist.is_initialized():
            dist.destroy_process_group()
