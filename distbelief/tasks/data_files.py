"""Files of data: the cache folder, and idx files, the format of MNIST (unsigned bytes after a short header)."""

from __future__ import annotations

import gzip
import math
import os
import struct
import zlib
from pathlib import Path
from typing import IO

import numpy as np
import torch
from torch import Tensor

from distbelief.errors import DataError

BYTES_LIMIT = 1 << 30
"""Most data bytes of a file: twenty times MNIST's."""
GZIP_RATIO = 1032
"""The most that deflate can shrink anything."""
CHUNK = 1 << 20


def read_idx(path: Path, shape: tuple[int, ...]) -> Tensor:
    """Read the samples of an idx file, plain or gzipped: uint8 of shape (n, *shape), n at least 1.

    The shape of a sample is (28, 28) for MNIST's images, () for labels. No memory is allocated before the size of the
    file agrees with its header.

    Raises:
        DataError: the file cannot be read, or is not a complete idx file.
    """
    try:
        if not path.is_file():
            raise _unfit(path, "is not a file")
        with path.open("rb") as plain:
            size = os.fstat(plain.fileno()).st_size
            packed = plain.read(2) == b"\x1f\x8b"
            plain.seek(0)
            if not packed:
                return _parse(path, plain, shape, size)
            with gzip.GzipFile(fileobj=plain) as unpacked:
                return _parse(path, unpacked, shape, size * GZIP_RATIO)
    except (OSError, EOFError, zlib.error) as error:
        raise _unfit(path, f"cannot be read: {type(error).__name__}: {error}") from error


def _parse(path: Path, file: IO[bytes] | gzip.GzipFile, shape: tuple[int, ...], at_most: int) -> Tensor:
    header = struct.Struct(f">4B{1 + len(shape)}I")
    head = file.read(header.size)
    magic = bytes((0, 0, 8, 1 + len(shape)))
    if head[:4] != magic:
        raise _unfit(
            path,
            f"starts with {head[:4].hex() or 'nothing'}, not with {magic.hex()} (unsigned bytes in {1 + len(shape)} "
            "dimensions)",
        )
    if len(head) < header.size:
        raise _unfit(path, f"ends within its header, after {len(head)} bytes")
    count, *sides = header.unpack(head)[4:]
    promised = count * math.prod(shape)
    if tuple(sides) != shape or not count:
        raise _unfit(path, f"holds {count} samples of shape {tuple(sides)}, not one or more of {shape}")
    if promised > min(BYTES_LIMIT, at_most - header.size):
        holds = (
            f"a file of its size holds at most {at_most - header.size}"
            if promised <= BYTES_LIMIT
            else f"the limit is {BYTES_LIMIT}"
        )
        raise _unfit(path, f"promises {promised} bytes of data, but {holds}")
    array = np.empty(promised, np.uint8)
    filled = 0
    while filled < promised:
        piece = file.read(min(CHUNK, promised - filled))
        if not piece:
            raise _unfit(path, f"promises {promised} bytes of data, but holds {filled}")
        array[filled : filled + len(piece)] = np.frombuffer(piece, np.uint8)
        filled += len(piece)
    if file.read(1):
        raise _unfit(path, f"goes on after the {promised} bytes of data that its header promises")
    return torch.from_numpy(array).view(count, *shape)


def _unfit(path: Path, what: str) -> DataError:
    return DataError(f"{path} {what}; put the original file there (plain or .gz), or remove it")


NO_HOME = "this user has no home folder: name a folder for caches by $XDG_CACHE_HOME"


def cache_folder() -> Path | None:
    """Return the cache folder of distbelief for this user, or None without a home folder."""
    folder = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    return None if folder.startswith("~") else Path(folder, "distbelief")
