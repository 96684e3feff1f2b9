"""Packing: the arrays of a slice as plain bytes, in pieces that fit the vectors they are sent in, and back."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import NamedTuple

import torch

from distbelief.core.conversations.mirroring import StatePart
from distbelief.core.effects import Payload
from distbelief.errors import RemoteProtocolError


class ArrayBytes(NamedTuple):
    """Some bytes of one array, and where in it they belong."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    offset: int
    data: torch.Tensor


def pack(arrays: dict[str, torch.Tensor], most: int) -> Iterator[ArrayBytes]:
    """Copy arrays into pieces of at most so many bytes.

    >>> [(piece.name, piece.offset, piece.data.nbytes) for piece in pack({"a": torch.zeros(5)}, most=16)]
    [('a', 0, 16), ('a', 16, 4)]
    """
    for name, array in arrays.items():
        data = as_bytes(array.detach().clone())
        for offset in range(0, max(1, data.nbytes), most):
            yield ArrayBytes(
                name, str(array.dtype).removeprefix("torch."), tuple(array.shape), offset, data[offset : offset + most]
            )


class Unpacking:
    """Arrays that are put together again from pieces.

    Args:
        limit: most bytes that they may have in all.
    """

    # a piece says itself how large its array is: without a limit a few bytes of a peer could take all memory

    def __init__(self, limit: int) -> None:
        self.arrays: dict[str, torch.Tensor] = {}
        self._left = limit

    def take(self, piece: StatePart, payload: Payload | None) -> None:
        """Take a piece; nothing where payloads are phantoms.

        Raises:
            RemoteProtocolError: it fits no array, or there are more bytes than there may be.
        """
        if not isinstance(payload, torch.Tensor):
            return
        if piece.name not in self.arrays:
            dtype, numbers = getattr(torch, piece.dtype, None), math.prod(piece.shape)
            if (
                not isinstance(dtype, torch.dtype)
                or min(piece.shape, default=0) < 0
                or (size := numbers * dtype.itemsize) > self._left
            ):
                raise RemoteProtocolError(
                    f"array {piece.name!r} of {piece.dtype} {piece.shape} does not fit what is left, {self._left} bytes"
                )
            self._left -= size
            self.arrays[piece.name] = torch.zeros(piece.shape, dtype=dtype)
        room = as_bytes(self.arrays[piece.name])[max(0, piece.offset) : max(0, piece.offset) + payload.nbytes]
        if room.nbytes != payload.nbytes:
            raise RemoteProtocolError(
                f"{payload.nbytes} bytes at {piece.offset} are not of array {piece.name!r} {piece.shape}"
            )
        room.copy_(payload.view(torch.uint8))


def as_bytes(array: torch.Tensor) -> torch.Tensor:
    """Return a view of a contiguous array as 1-D bytes."""
    return array.reshape(-1).view(torch.uint8)


def stage(payload: Payload, room: Payload | None) -> Payload:
    """Copy bytes into the beginning of a vector, and return them there; a phantom stays what it is."""
    if not (isinstance(payload, torch.Tensor) and isinstance(room, torch.Tensor)):
        return payload
    return room[: payload.nbytes].copy_(as_bytes(payload))
