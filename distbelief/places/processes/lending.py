"""Memory that a process lends to others of its user, by its descriptor there."""

from __future__ import annotations

import contextlib
import mmap
import os
from collections.abc import Iterator


@contextlib.contextmanager
def lend(size: int = 0) -> Iterator[int]:
    """Memory of this process, which others map by its descriptor here."""
    memory = os.memfd_create("distbelief measures")
    try:
        os.ftruncate(memory, size)
        yield memory
    finally:
        os.close(memory)


def map_memory(process: int, memory: int) -> mmap.mmap:
    """The memory of another process, by its descriptor there."""
    descriptor = os.open(f"/proc/{process}/fd/{memory}", os.O_RDWR)
    try:
        return mmap.mmap(descriptor, os.fstat(descriptor).st_size)
    finally:
        os.close(descriptor)
