"""The file `.dbz`: a model's tensors, each pruned, shared or as it was; bounded, with a checksum, and nothing in it is
run.

Its bytes: `DBZ1`, the length of the header (four bytes), the header (msgpack), each tensor's positions and values, and
the CRC-32 of all before it.
"""

from __future__ import annotations

import zlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

import msgspec
import torch

from distbelief.codecs.huffman import fits
from distbelief.codecs.low_precision import PRECISIONS
from distbelief.codecs.stored import DTYPES, Stored, decode
from distbelief.errors import DataError

MAGIC = b"DBZ1"
HEADER_LIMIT = 16 << 20
"""Longest header in bytes."""
FILE_LIMIT = 1 << 36
"""Longest file in bytes."""
VALUES_LIMIT = 1 << 34
"""Most values of all tensors: what is pruned has no bytes in a file, and needs memory all the same."""
DIMENSIONS = 16


class _Entry(msgspec.Struct, array_like=True, frozen=True):
    """What the header says of one tensor."""

    name: str
    dtype: int
    shape: tuple[int, ...]
    kept: int | None
    bits: int
    precision: int
    """0 for as they are, else one of `PRECISIONS`, counted from 1."""
    where: int
    """Bytes of its positions."""
    what: int
    """Bytes of its values."""


class _Header(msgspec.Struct, array_like=True, frozen=True):
    task: str
    huffman: bool
    entries: tuple[_Entry, ...]
    aliases: dict[str, str]


@dataclass(frozen=True)
class ModelFile:
    """What a `.dbz` file holds."""

    task: str
    """Of which task the model is: a built-in name, or `module:function`, which is only told and never imported."""
    tensors: Mapping[str, Stored]
    huffman: bool = True
    """Whether ids and gaps are written by their frequency; else each in as many bits."""
    aliases: Mapping[str, str] = field(default_factory=dict)
    """Further names of tensors, by the one under which they are stored."""
    name: str = "the model"
    """In messages."""

    def state(self) -> dict[str, torch.Tensor]:
        """The dense state dict; a tied name is the same tensor."""
        dense = {name: stored.dense() for name, stored in self.tensors.items()}
        return dense | {alias: dense[name] for alias, name in self.aliases.items()}

    @property
    def dense_bytes(self) -> int:
        """Bytes of all values as they were."""
        return sum(stored.size * stored.values.itemsize for stored in self.tensors.values())

    def encode(self) -> bytes:
        """The bytes of the file."""
        parts = [stored.encode(self.huffman) for stored in self.tensors.values()]
        entries = tuple(
            _Entry(
                name,
                DTYPES.index(str(stored.values.dtype).removeprefix("torch.")),
                stored.shape,
                None if stored.positions is None else stored.kept,
                stored.bits,
                1 + PRECISIONS.index(stored.precision) if stored.precision else 0,
                len(where),
                len(what),
            )
            for (name, stored), (where, what) in zip(self.tensors.items(), parts, strict=True)
        )
        header = msgspec.msgpack.encode(_Header(self.task, self.huffman, entries, dict(self.aliases)))
        body = MAGIC + len(header).to_bytes(4, "little") + header + b"".join(where + what for where, what in parts)
        return body + zlib.crc32(body).to_bytes(4, "little")


def read(path: Path) -> ModelFile:
    """The model in a file.

    Raises:
        DataError: there is none, or it is truncated, foreign or spoilt.

    >>> import tempfile
    >>> path = Path(tempfile.mkdtemp()) / "small.dbz"
    >>> file = ModelFile("digits", {"weight": Stored((2,), torch.ones(2))})
    >>> path.write_bytes(file.encode())
    47
    >>> read(path).state()
    {'weight': tensor([1., 1.])}
    """
    try:
        if (size := path.stat().st_size) > FILE_LIMIT:
            raise DataError(f"{path} is {size:,} bytes long; at most {FILE_LIMIT:,} are read")
        data = path.read_bytes()
    except OSError as error:
        raise DataError(f"{path} cannot be read: {error}; name a file that `distbelief compress` wrote") from error
    try:
        return decoded(data, str(path))
    except DataError as error:
        raise DataError(f"{path}: {error}") from error


def decoded(data: bytes, name: str) -> ModelFile:
    """The model in the bytes of a file.

    Args:
        data: all of them.
        name: of the file, for messages.

    Raises:
        DataError: they are truncated, foreign or spoilt.
    """
    header, sections = _open(data)
    tensors: dict[str, Stored] = {}
    total = 0
    for entry in header.entries:
        _check(entry)
        total += _values(entry.shape)
        if total > VALUES_LIMIT or entry.name in tensors:
            raise DataError(f"tensor {entry.name!r} is there twice, or makes more than {VALUES_LIMIT:,} values")
        where, what, sections = (
            sections[: entry.where],
            sections[entry.where : entry.where + entry.what],
            sections[entry.where + entry.what :],
        )
        if len(what) != entry.what:
            raise DataError(f"tensor {entry.name!r} ends too early: the file was spoilt")
        try:
            coded = entry.bits, ("", *PRECISIONS)[entry.precision], header.huffman
            dtype = DTYPES[entry.dtype]
            tensors[entry.name] = decode(entry.shape, dtype, entry.kept, coded, bytes(where), bytes(what))
        except DataError as error:
            raise DataError(f"tensor {entry.name!r}: {error}") from error
    if len(sections):
        raise DataError(f"{len(sections)} bytes are behind the last tensor: the file was spoilt")
    if strange := [alias for alias, of in header.aliases.items() if of not in tensors or alias in tensors]:
        raise DataError(f"{strange[0]!r} is a further name of no tensor: the file was spoilt")
    return ModelFile(header.task, tensors, header.huffman, header.aliases, name)


def _open(data: bytes) -> tuple[_Header, memoryview]:
    """The header, and what lies between it and the checksum."""
    if data[:4] != MAGIC:
        raise DataError(f"begins with {data[:4]!r} where a compressed model begins with {MAGIC!r}")
    length = int.from_bytes(data[4:8], "little")
    if length > HEADER_LIMIT or 12 + length > len(data):
        raise DataError(f"has {len(data):,} bytes and a header of {length:,}: it was truncated or spoilt")
    if zlib.crc32(memoryview(data)[:-4]) != int.from_bytes(data[-4:], "little"):
        raise DataError("its checksum is another: it was truncated or spoilt; compress the model again")
    try:
        header = msgspec.msgpack.decode(data[8 : 8 + length], type=_Header)
    except (msgspec.MsgspecError, ValueError, RecursionError) as error:  # ValueError: text that is no UTF-8
        raise DataError(f"its header cannot be read: {error}") from error
    return header, memoryview(data)[8 + length : -4]


def _check(entry: _Entry) -> None:
    """Refuse what no tensor can be like, before anything is made of it."""
    size = _values(entry.shape)
    fine = (
        0 <= entry.dtype < len(DTYPES)
        and (entry.bits == 0 or fits(entry.bits))
        and 0 <= entry.precision <= len(PRECISIONS)
        and (DTYPES[entry.dtype] == "float32" or not (entry.bits or entry.precision))
        and not (entry.bits and entry.precision)
        and (entry.kept is None or 0 <= entry.kept <= size)
        and (entry.kept is not None or entry.where == 0)
        and min(entry.where, entry.what) >= 0
    )
    if not fine:
        raise DataError(f"tensor {entry.name!r} is said to be {entry}: the file was spoilt")


def _values(shape: tuple[int, ...]) -> int:
    """Values of a tensor of this shape, if there may be so many."""
    size = 1
    for side in shape:
        if not 0 <= side <= VALUES_LIMIT or len(shape) > DIMENSIONS:
            raise DataError(f"a tensor of shape {shape[:DIMENSIONS]}: the file was spoilt")
        size *= side
        if size > VALUES_LIMIT:
            raise DataError(f"a tensor of shape {shape} has more than {VALUES_LIMIT:,} values")
    return size
