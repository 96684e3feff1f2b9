"""Threads that each are one rank."""

from __future__ import annotations

import threading
from collections.abc import Callable

from patience import SECONDS


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
