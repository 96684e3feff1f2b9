"""Nameless sockets of multiprocessing, reached by a descriptor: TMPDIR may be long, and no file is left behind."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import tempfile
from collections.abc import Iterator
from multiprocessing import resource_sharer


@contextlib.contextmanager
def socket_folder() -> Iterator[str]:
    """Have multiprocessing make its sockets in a folder that goes in the end: a short name of it, in this process."""
    config = multiprocessing.current_process()._config  # type: ignore[attr-defined]  # its stubs lack it
    with tempfile.TemporaryDirectory(prefix="distbelief-", ignore_cleanup_errors=True) as folder:
        place = os.open(folder, os.O_PATH)  # whatever TMPDIR is: the name of a socket has room for 107 characters
        before, config["tempdir"] = config.get("tempdir"), f"/proc/self/fd/{place}"
        try:
            yield config["tempdir"]
        finally:
            config["tempdir"] = before
            os.close(place)


def nameless(address: str, process: int | str = "self") -> str:
    """Another address of a socket, good for as long as this process is there: for itself, or by its id for others."""
    return f"/proc/{process}/fd/{os.open(address, os.O_PATH)}"


def share_descriptors() -> None:
    """Have others ask this process and its forks for sent descriptors (a minibatch's tensors) at a nameless socket."""
    resource_sharer._resource_sharer._start = _listen  # type: ignore[attr-defined]  # its stubs lack it


def _listen() -> None:
    sharer = resource_sharer._resource_sharer  # type: ignore[attr-defined]  # as above
    with socket_folder():
        type(sharer)._start(sharer)
        sharer._listener._listener._unlink.cancel()
        sharer._address = nameless(sharer._address, os.getpid())
