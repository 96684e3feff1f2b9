"""The weights alone, as a safetensors file that plain PyTorch loads, put together from the shards' files by chunks:
nobody holds the vector.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import msgspec

from distbelief.core.settings import Plan
from distbelief.errors import CheckpointError
from distbelief.sharding.layout import ITEM_SIZES, Layout, Range, Tensor

CHUNK = 1 << 20
"""Bytes that are copied at a time."""
HEADER_LIMIT = 64 << 20
"""Longest header of a file in bytes."""
_DTYPES: Mapping[str, str] = {
    "float64": "F64", "float32": "F32", "bfloat16": "BF16", "float16": "F16",
    "int64": "I64", "int32": "I32", "int16": "I16", "int8": "I8", "uint8": "U8", "bool": "BOOL",
}  # fmt: skip


class _Place(NamedTuple):
    """Where some bytes of the flat vector lie on disk."""

    file: Path
    offset: int
    bytes: Range


def write_model(path: Path, plan: Plan, parts: Sequence[Path]) -> None:
    """Write the state dict that the shards' files (one per assignment of the plan) hold; tied names as copies.

    Raises:
        OSError: a file cannot be read or written.
        CheckpointError: a shard's file does not hold its range of the plan.
    """
    places = [
        place
        for part, own in zip(parts, plan.assignments, strict=True)
        for place in _places(part, own.moving, own.frozen)
    ]
    with path.open("wb") as out:
        named = _named(plan.layout)
        out.write(_header([tensor for tensor, _ in named]))
        for tensor, start in named:
            for place in places:
                common = Range(max(start, place.bytes.start), min(start + tensor.size, place.bytes.stop))
                if common.size > 0:
                    for chunk in _read(place.file, place.offset + common.start - place.bytes.start, common.size):
                        out.write(chunk)


def _named(layout: Layout) -> list[tuple[Tensor, int]]:
    """Each tensor under each of its names, and where it begins in the vector; the widest dtypes first, so that all are
    aligned.
    """
    entries = {entry.tensor.name: entry for entry in layout.entries}
    named = [(entry.tensor, entry.start) for entry in layout.entries]
    named += [
        (msgspec.structs.replace(entries[name].tensor, name=alias), entries[name].start)
        for alias, name in layout.aliases.items()
    ]
    return sorted(named, key=lambda one: -ITEM_SIZES[one[0].dtype])


def _header(tensors: Sequence[Tensor]) -> bytes:
    """What a safetensors file begins with: the length of a JSON text, and the text, which says what lies where after
    it.
    """
    told: dict[str, object] = {"__metadata__": {"format": "pt"}}
    position = 0
    for tensor in tensors:
        told[tensor.name] = {
            "dtype": _DTYPES[tensor.dtype],
            "shape": tensor.shape,
            "data_offsets": (position, position + tensor.size),
        }
        position += tensor.size
    text = msgspec.json.encode(told)
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


def _places(part: Path, moving: Range, frozen: Range) -> Iterator[_Place]:
    with part.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        if length > HEADER_LIMIT:
            raise CheckpointError(f"{part} begins with a header of {length} bytes; at most {HEADER_LIMIT} are read")
        told = msgspec.json.decode(file.read(length), type=dict[str, dict[str, object]])
    for name, own in (("vector.moving", moving), ("vector.frozen", frozen)):
        start, stop = msgspec.convert(told.get(name, {}).get("data_offsets", (0, -1)), tuple[int, int])
        if stop - start != own.size:
            raise CheckpointError(f"{name} of {part.name} has {stop - start} bytes where the plan has {own.size}")
        yield _Place(part, 8 + length + start, own)


def _read(file: Path, offset: int, size: int) -> Iterator[bytes]:
    descriptor = os.open(file, os.O_RDONLY)
    try:
        while size:
            chunk = os.pread(descriptor, min(size, CHUNK), offset)
            if not chunk:
                raise CheckpointError(f"{file} ends {size} bytes too early")
            yield chunk
            offset, size = offset + len(chunk), size - len(chunk)
    finally:
        os.close(descriptor)
