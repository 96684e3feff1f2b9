"""Fabrics that need processes, or what they share, keep their promises: a window and a process group."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from functools import partial

import pytest
import torch
from grouped import play
from ranks import in_threads
from torch.distributed import TCPStore

from benchmarks.parts.peers import Peers
from distbelief.fabric.buckets import Bucket
from distbelief.fabric.memory import Window
from distbelief.fabric.waiting import ReductionThread
from distbelief.testing import Side, check_fabric


class Threaded:
    """A window and the thread that plays over it, as a fabric: vectors go through it in their order."""

    def __init__(self, window: Window, rank: int, slot: torch.Tensor, found: Sequence[Bucket]) -> None:
        self._not_mine = {i for i, bucket in enumerate(found) if rank and not bucket.adds}
        self._window, self._thread = window, ReductionThread()
        self._views = [slot[b.start : b.stop].view(getattr(torch, b.dtype)) for b in found]
        self._begin()

    def _begin(self) -> None:
        self._ready, self._futures = set[int](), list[torch.futures.Future[object]]()

    def ready(self, bucket: int) -> None:
        self._ready.add(bucket)
        while len(self._futures) in self._ready:
            view = self._views[len(self._futures)]
            if len(self._futures) in self._not_mine:
                view.zero_()  # so that the sum is the first rank's
            self._futures.append(self._thread.do(partial(self._window.add_up, view)))

    def reduce(self) -> bool | None:
        if not all(future.done() for future in self._futures):
            return None
        try:
            for future in self._futures:
                future.value()
        except RuntimeError as error:
            error.__traceback__ = None  # the future holds it, and whatever its frames hold
            return False
        self._begin()
        return True

    def leave(self) -> None:
        self._window.leave()
        self._thread.end()


@pytest.mark.parametrize("ranks", [2, 3])
def test_a_window_and_its_thread_are_a_fabric(ranks: int) -> None:
    memory, sides = os.memfd_create("test window"), list[Threaded]()

    def rank(own: int, meet: Callable[[], object]) -> None:
        def side(_: str, size: int, found: Sequence[Bucket]) -> Side:
            slot = torch.zeros(size, dtype=torch.uint8)
            sides.append(Threaded(Window(own, ranks, memory, [os.getpid()] * ranks), own, slot, found))
            return Side(sides[-1], slot, slot, sides[-1].leave)

        check_fabric(side, own, ranks, meet, ["shared"])

    try:
        in_threads(ranks, rank)
    finally:
        for one in sides:
            one.leave()
        os.close(memory)


def test_a_process_group_is_a_fabric() -> None:
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    with Peers() as peers:
        started = [peers.start(f"rank {rank}", 1, play, rank, 3, store.port) for rank in range(3)]
        assert [one.hear() for one in started] == ["done"] * 3
