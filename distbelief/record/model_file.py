"""Weights as a safetensors file that PyTorch loads, written in chunks, so that no process holds the whole vector."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import BinaryIO, NamedTuple

import msgspec
import numpy
import torch

from distbelief.core.settings import Plan
from distbelief.errors import CheckpointError
from distbelief.sharding.layout import ITEM_SIZES, Entry, Layout, Range, Tensor

CHUNK = 1 << 20
"""Bytes copied at a time."""
HEADER_LIMIT = 64 << 20
"""Longest header of a file in bytes."""
_DTYPES: Mapping[str, str] = {
    "float64": "F64", "float32": "F32", "bfloat16": "BF16", "float16": "F16",
    "int64": "I64", "int32": "I32", "int16": "I16", "int8": "I8", "uint8": "U8", "bool": "BOOL",
}  # fmt: skip


class StoredTensor(msgspec.Struct, frozen=True):
    """A tensor in a safetensors file."""

    dtype: str
    shape: tuple[int, ...]
    data_offsets: tuple[int, int]
    """Offsets in the file of its first byte and of the end."""


class _Place(NamedTuple):
    """Place on disk of a range of the flat vector."""

    file: Path
    offset: int
    bytes: Range


def write_arrays(out: BinaryIO, arrays: Mapping[str, torch.Tensor]) -> None:
    """Write a safetensors file.

    Raises:
        OSError: it cannot be written.
        CheckpointError: an array has an unsupported dtype.
    """
    named = [Tensor(name, tuple(t.shape), str(t.dtype).removeprefix("torch.")) for name, t in arrays.items()]
    if foreign := next((tensor for tensor in named if tensor.dtype not in _DTYPES), None):
        raise CheckpointError(f"array {foreign.name!r} has dtype {foreign.dtype}; {', '.join(_DTYPES)} can be kept")
    named.sort(key=lambda tensor: -ITEM_SIZES[tensor.dtype])
    out.write(header(named))
    for tensor in named:
        out.write(arrays[tensor.name].detach().cpu().reshape(-1).view(torch.uint8).numpy().data)


def write_model(out: BinaryIO, plan: Plan, parts: Sequence[Path]) -> None:
    """Write the state dict from the shards' files, one for each assignment of the plan; tied tensors become copies.

    Raises:
        OSError: a file cannot be read or written.
        CheckpointError: a shard's file does not hold its range of the plan.
    """
    places = [
        place
        for part, assignment in zip(parts, plan.assignments, strict=True)
        for place in _places(part, assignment.moving, assignment.frozen)
    ]
    named = _named(plan.layout)
    out.write(header([tensor for tensor, _ in named]))
    for _, pieces in named:
        for chunk in _whole(pieces, places):
            out.write(chunk)


def _whole(pieces: Sequence[Entry], places: Sequence[_Place]) -> Iterator[bytes]:
    """Yield the bytes of a tensor: piece by piece if it is cut along its first dimension, else all at once."""
    if all(entry.piece.dimension == 0 for entry in pieces):
        for entry in pieces:
            yield from _bytes(entry, places)
        return
    parts = [
        numpy.frombuffer(b"".join(_bytes(entry, places)), dtype=f"V{ITEM_SIZES[entry.tensor.dtype]}")
        for entry in pieces
    ]
    shaped = [part.reshape(entry.shape) for part, entry in zip(parts, pieces, strict=True)]
    yield numpy.concatenate(shaped, axis=pieces[0].piece.dimension).tobytes()


def _bytes(entry: Entry, places: Sequence[_Place]) -> Iterator[bytes]:
    for place in places:
        common = Range(entry.start, entry.stop).common(place.bytes)
        if common.size:
            yield from _read(place.file, place.offset + common.start - place.bytes.start, common.size)


def _named(layout: Layout) -> list[tuple[Tensor, list[Entry]]]:
    """Return each tensor under each of its names with its pieces; the widest dtypes come first, for alignment."""
    pieces: dict[str, list[Entry]] = {}
    for entry in layout.entries:
        pieces.setdefault(entry.tensor.name, []).append(entry)
    for entries in pieces.values():
        entries.sort(key=lambda entry: entry.piece.start)
    named = [(entries[0].tensor, entries) for entries in pieces.values()]
    named += [
        (msgspec.structs.replace(pieces[name][0].tensor, name=alias), pieces[name])
        for alias, name in layout.aliases.items()
    ]
    return sorted(named, key=lambda pair: -ITEM_SIZES[pair[0].dtype])


def header(tensors: Sequence[Tensor], room: int = 0) -> bytes:
    """Return the header of a safetensors file, a JSON text after its length, padded to `room` bytes."""
    entries: dict[str, object] = {"__metadata__": {"format": "pt"}}
    position = 0
    for tensor in tensors:
        entries[tensor.name] = {
            "dtype": _DTYPES[tensor.dtype],
            "shape": tensor.shape,
            "data_offsets": (position, position + tensor.size),
        }
        position += tensor.size
    text = msgspec.json.encode(entries)
    text = text.ljust(room - 8) + b" " * (-max(len(text), room - 8) % 8)
    return len(text).to_bytes(8, "little") + text


def _places(part: Path, moving: Range, frozen: Range) -> Iterator[_Place]:
    tensors = stored(part)
    for name, held in (("vector.moving", moving), ("vector.frozen", frozen)):
        start, stop = tensors[name].data_offsets if name in tensors else (0, -1)
        if stop - start != held.size:
            raise CheckpointError(f"{name} of {part.name} has {stop - start} bytes where the plan has {held.size}")
        yield _Place(part, start, held)


def stored(path: Path) -> dict[str, StoredTensor]:
    """Read the tensors in a safetensors file by name, with dtypes as a layout names them.

    Raises:
        OSError: the file cannot be read.
        CheckpointError: the header is too long, or not one of safetensors.
    """
    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        if length > HEADER_LIMIT:
            raise CheckpointError(f"{path} begins with a header of {length} bytes; at most {HEADER_LIMIT} are read")
        header = file.read(length)
    try:
        texts = msgspec.json.decode(header, type=dict[str, msgspec.Raw])
        texts.pop("__metadata__", None)
        entries = {name: msgspec.json.decode(entry, type=StoredTensor) for name, entry in texts.items()}
    except msgspec.DecodeError as error:
        raise CheckpointError(f"{path} has no header of a safetensors file: {error}") from error
    named = {short: dtype for dtype, short in _DTYPES.items()}
    tensors = {}
    for name, entry in entries.items():
        start, stop = (8 + length + at for at in entry.data_offsets)
        tensors[name] = StoredTensor(named.get(entry.dtype, entry.dtype), entry.shape, (start, stop))
    return tensors


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
