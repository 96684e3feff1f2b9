"""File `.dbz`: a model's tensors, each pruned, shared or dense. Its size is bounded, and it contains no code.

Its bytes are `DBZ2`, the length of the header (four bytes), the header (msgpack), the positions and values of each
tensor, and the CRC-32 of everything before.
"""

from __future__ import annotations

import zlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

import msgspec
import torch

from distbelief.codecs import PRECISIONS
from distbelief.codecs.codec import cut
from distbelief.codecs.stored import DTYPES, VALUES_LIMIT, Stored, TensorHeader
from distbelief.errors import DataError

MAGIC, EARLIER = b"DBZ2", b"DBZ1"
HEADER_LIMIT = 16 << 20
"""Longest header in bytes."""
FILE_LIMIT = 1 << 36
"""Longest file in bytes."""
UNNAMED = ("", "__metadata__")
"""Names that a tensor in a safetensors file cannot have."""


class _Header(msgspec.Struct, array_like=True, frozen=True):
    task: str
    huffman: bool
    entries: tuple[TensorHeader, ...]
    aliases: dict[str, str]

    def __post_init__(self) -> None:
        names = {entry.name for entry in self.entries}
        if len(names) < len(self.entries):
            raise ValueError("a tensor is listed twice")
        if strange := [name for name in (*names, *self.aliases) if not name.isprintable() or name in UNNAMED]:
            raise ValueError(f"{strange[0]!r} is no name of a tensor")
        if (total := sum(entry.size for entry in self.entries)) > VALUES_LIMIT:
            raise ValueError(f"its tensors have {total:,} values; at most {VALUES_LIMIT:,} are read")
        if strange := [alias for alias, name in self.aliases.items() if name not in names or alias in names]:
            raise ValueError(f"{strange[0]!r} is another name of a missing tensor")


@dataclass(frozen=True)
class ModelFile:
    """A model in a `.dbz` file."""

    task: str
    """Task of the model: a built-in name, or `module:function`, which reading never imports."""
    tensors: Mapping[str, Stored]
    huffman: bool = True
    """True if ids and gaps have Huffman codes; else all have the same number of bits."""
    aliases: Mapping[str, str] = field(default_factory=dict)
    """Other names of tied tensors, each with the name of the stored tensor."""
    name: str = "the model"
    """Name of the file in messages."""

    def state(self) -> dict[str, torch.Tensor]:
        """Return the dense state dict, in which tied names share a tensor.

        One that exceeds the memory raises a `DataError`.
        """
        try:
            dense = {name: stored.dense() for name, stored in self.tensors.items()}
        except RuntimeError as error:  # the error of torch's allocator
            raise DataError(f"its {self.dense_bytes:,} bytes do not fit into this machine's memory") from error
        return dense | {alias: dense[name] for alias, name in self.aliases.items()}

    @property
    def dense_bytes(self) -> int:
        """Number of bytes of all values before compression."""
        return sum(stored.size * stored.values.itemsize for stored in self.tensors.values())

    def encode(self) -> bytes:
        parts = [stored.encode(self.huffman) for stored in self.tensors.values()]
        entries = tuple(
            TensorHeader(
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
    """Read the model in a file, or raise a `DataError`.

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
    """Decode the bytes of a file, named in messages, or raise a `DataError`."""
    if data[:4] == EARLIER:
        raise DataError("was written by an earlier version, and can no longer be read: compress its run again")
    if data[:4] != MAGIC:
        raise DataError(f"begins with {data[:4]!r}, but a compressed model begins with {MAGIC!r}")
    length = int.from_bytes(data[4:8], "little")
    if length > HEADER_LIMIT or 12 + length > len(data):
        raise DataError(f"has {len(data):,} bytes and a header of {length:,}: it was truncated or spoilt")
    if zlib.crc32(memoryview(data)[:-4]) != int.from_bytes(data[-4:], "little"):
        raise DataError("its checksum does not match: it was truncated or spoilt; compress the model again")
    try:
        header = msgspec.msgpack.decode(data[8 : 8 + length], type=_Header)
    except (msgspec.MsgspecError, ValueError, RecursionError) as error:  # ValueError: text that is no UTF-8
        raise DataError(f"its header cannot be read: {error}") from error
    sizes = [size for entry in header.entries for size in (entry.where, entry.what)]
    parts = iter(cut(data[8 + length : -4], (*sizes, 0), "all tensors together"))
    tensors: dict[str, Stored] = {}
    for entry in header.entries:
        try:
            tensors[entry.name] = entry.decode(header.huffman, next(parts), next(parts))
        except DataError as error:
            raise DataError(f"tensor {entry.name!r}: {error}") from error
    return ModelFile(header.task, tensors, header.huffman, header.aliases, name)
