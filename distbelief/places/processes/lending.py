"""Memory that a process lends to other processes of its user, by a descriptor."""

from __future__ import annotations

import contextlib
import mmap
import os
from collections.abc import Iterator


@contextlib.contextmanager
def lend(size: int = 0) -> Iterator[int]:
    """Lend memory of this process while the block runs; yield the descriptor by which other processes map it."""
    memory = os.memfd_create("distbelief measures")
    try:
        os.ftruncate(memory, size)
        yield memory
    finally:
        os.close(memory)


def map_memory(process: int, memory: int) -> mmap.mmap:
    """Map memory that another process lends, by its descriptor there."""
    descriptor = os.open(f"/proc/{process}/fd/{memory}", os.O_RDWR)
    try:
        return mmap.mmap(descriptor, os.fstat(descriptor).st_size)
    finally:
        os.close(descriptor)
