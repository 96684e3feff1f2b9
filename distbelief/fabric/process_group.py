"""All-reduce by torch.distributed, across hosts and on GPUs: one replica's part in the groups of a job."""

from __future__ import annotations

import socket
import time
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.distributed import PrefixStore, Store, TCPStore  # type: ignore[attr-defined]  # its stubs name none
from torch.distributed.distributed_c10d import _set_pg_timeout

from distbelief.core import roles
from distbelief.core.conversations.grouping import Assemble
from distbelief.core.messages import Traffic
from distbelief.fabric.base import Told
from distbelief.fabric.choosing import ScheduleChoice
from distbelief.fabric.in_order import LOOK_SECONDS, MEET_SECONDS, InOrder
from distbelief.fabric.lines import Lines
from distbelief.fabric.thread import ReductionThread
from distbelief.schedules.allreduce import broadcast
from distbelief.schedules.schedule import Schedule

REST_SECONDS = 50e-6
"""Time of one wait for the thread."""
STEP_SECONDS = 3600.0
"""Longest wait for a gradient of another who lives, or for him at the store; a death is noticed at once."""


class ProcessGroup(InOrder):
    """One replica's part in the groups of a job.

    Args:
        index: of this replica.
        device: where its model is.
        algorithm: how gradients are added up.
        per_host: ranks that are on one host.
        host: at which the others reach this process.
    """

    def __init__(self, index: int, device: torch.device, algorithm: str, per_host: int, host: str) -> None:
        super().__init__(device)
        self._algorithm, self._per_host = algorithm, per_host
        self._meeting = TCPStore(host, 0, is_master=True, wait_for_workers=False, use_libuv=True)
        self.store = f"{host}|{self._meeting.port}"
        """Address at which a group meets whose first member this is."""
        self.traffic = Traffic()
        self._thread: ReductionThread | None = None
        self._index = index
        self._schedules: list[Schedule | None] = []

    def form(self, group: Assemble, interrupted: Told) -> bool:
        """Meet the others at the store of the first, in the place of the group before.

        False where they do not come, or as soon as `interrupted` says that something has arrived.
        """
        self.close()
        self.fault = ""
        ranks, rank = len(group.members), [roles.index_of(member.role) for member in group.members].index(self._index)
        host, _, port = group.members[0].store.partition("|")
        try:
            # the store would try to reach one who is dead again and again
            socket.create_connection((host, int(port)), MEET_SECONDS).close()
            store = TCPStore(host, int(port), is_master=False, timeout=timedelta(seconds=MEET_SECONDS), use_libuv=True)
            named = PrefixStore(f"group {group.group}", store)
            if not self._gather(named, rank, ranks, interrupted):
                return False
            self._check_devices(named, rank, ranks)
            backend = "nccl" if self._device.type == "cuda" else "gloo"
            patience = timedelta(seconds=MEET_SECONDS)
            dist.init_process_group(backend, store=named, rank=rank, world_size=ranks, timeout=patience)
            _set_pg_timeout(timedelta(seconds=STEP_SECONDS))
            lines = Lines(rank, ranks, self._device, seconds=STEP_SECONDS)
            lines.traffic = self.traffic
            self._thread = ReductionThread(lines)
            choice = ScheduleChoice(lines, self._algorithm, self._per_host)
            self._schedules = [
                choice.of(b.length, b.item) if b.adds else broadcast(ranks, b.length) for b in self._buckets
            ]
        except (OSError, RuntimeError, ValueError) as error:
            why = str(error) or type(error).__name__
            self.fault = f"its part in the group could not be made: {why.splitlines()[0]}"
            return False
        self._begin_round()
        return True

    @staticmethod
    def _gather(store: Store, rank: int, ranks: int, interrupted: Told) -> bool:
        """Wait until all are at the store.

        What opens links there would wait for one who has died on his way, and hear of nothing.
        """
        store.set(f"here {rank}", "")
        there, give_up = [f"here {rank}" for rank in range(ranks)], time.monotonic() + STEP_SECONDS
        while not store.check(there):
            if interrupted() or time.monotonic() > give_up:
                return False
            time.sleep(LOOK_SECONDS)
        return True

    def _check_devices(self, store: Store, own_rank: int, ranks: int) -> None:
        """Refuse a GPU that is two ranks', where NCCL would say no more than that it failed.

        Raises:
            RuntimeError: naming the ranks.
        """
        if self._device.type != "cuda":
            return
        store.set(f"device {own_rank}", str(torch.cuda.get_device_properties(self._device).uuid))
        devices = [store.get(f"device {rank}") for rank in range(ranks)]
        for rank, device in enumerate(devices):
            if (first := devices.index(device)) < rank:
                raise RuntimeError(
                    f"ranks {first} and {rank} share a GPU, and NCCL wants one for each: add --tls, whose links may"
                    " share one, or take fewer replicas"
                )

    @property
    def _formed(self) -> bool:
        return self._thread is not None

    def _start(self, bucket: int) -> torch.futures.Future[torch.Tensor]:
        assert self._thread is not None
        return self._thread.start(self._views[bucket], self._schedules[bucket])

    def _rest(self) -> None:
        time.sleep(REST_SECONDS)

    def close(self) -> None:
        """Leave the group."""
        thread, self._thread = self._thread, None
        if thread is not None:
            thread.leave()
        if dist.is_initialized():
            dist.destroy_process_group()
