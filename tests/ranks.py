"""Threads that each are one rank, and a vector for each."""

from __future__ import annotations

import threading
from collections.abc import Callable

import torch
from patience import SECONDS

from distbelief.fabric.buckets import Bucket
from distbelief.strategies.grouped.whole import Whole


def in_threads(ranks: int, act: Callable[[int, Callable[[], object]], object]) -> None:
    """Have each rank act, given its number and what waits for all others; the first error is raised."""
    gate = threading.Barrier(ranks, timeout=SECONDS)
    errors: list[BaseException] = []

    def one(rank: int) -> None:
        try:
            act(rank, gate.wait)
        except BaseException as error:
            errors.append(error)
            gate.abort()

    threads = [threading.Thread(target=one, args=(rank,)) for rank in range(ranks)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]


class Vector(Whole):
    """Bytes that are read and written."""

    def __init__(self, values: torch.Tensor) -> None:
        self.values = values

    def read(self, bucket: Bucket, start: int, stop: int) -> bytes:
        return self.values[start:stop].numpy().tobytes()

    def write(self, bucket: Bucket, start: int, data: bytes, adds: bool) -> None:
        there = torch.frombuffer(bytearray(data), dtype=getattr(torch, bucket.dtype))
        here = self.values[start : start + len(data)].view(there.dtype)
        here.add_(there) if adds else here.copy_(there)
