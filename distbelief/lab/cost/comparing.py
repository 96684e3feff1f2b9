"""Costs of several machines beside each other, from the files that `distbelief cost TASK --json` made on each."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import msgspec

from distbelief.core.records import Json
from distbelief.errors import UsageError

UNITS = {"seconds": "s", "kilowatt_hours": "kWh", "price": "price"}
"""Units of all that is charged."""
PER_MILLION = "_per_million_samples"


class CostFile(msgspec.Struct, frozen=True, kw_only=True):
    """Fields of a file that a comparison reads."""

    task: str
    optimizer: str
    batch_size: Annotated[int, msgspec.Meta(ge=1, le=1 << 40)]
    processor: str
    version: str
    epoch: dict[str, Annotated[float, msgspec.Meta(ge=1e-12, le=1e18)]]

    @property
    def charges(self) -> dict[str, float]:
        """Return all that is charged for a million samples."""
        return {name: self.epoch[name + PER_MILLION] for name in UNITS if name + PER_MILLION in self.epoch}


def compare(paths: Sequence[str]) -> tuple[str, list[Json]]:
    """Return the task, and a row for each file: what a million samples take, and how many times what the first's do.

    Raises:
        UsageError: fewer than two files, or one that is none of a cost, of another task or of another version.
    """
    if len(paths) < 2:
        raise UsageError("--compare: name two files of `distbelief cost TASK --json`, or more")
    first, *others = files = [_read(path) for path in paths]
    for path, other in zip(paths[1:], others, strict=True):
        for what in ("task", "version"):
            if (theirs := getattr(other, what)) != (ours := getattr(first, what)):
                raise UsageError(
                    f"--compare {path}: its {what} is {theirs}, and that of {paths[0]} is {ours}; measure both alike"
                )
    shared = [name for name in first.charges if all(name in other.charges for other in others)]
    rows: list[Json] = []
    for path, file in zip(paths, files, strict=True):
        row = {name: getattr(file, name) for name in ("processor", "optimizer", "batch_size")}
        for name in shared:
            row |= {name: file.charges[name], f"{name}_of_first": file.charges[name] / first.charges[name]}
        rows.append({"file": path, **row})
    return first.task, rows


def _read(path: str) -> CostFile:
    try:
        file = msgspec.json.decode(Path(path).read_bytes(), type=CostFile)
        if "seconds" not in file.charges:
            raise msgspec.ValidationError("it has no seconds")
    except (OSError, msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise UsageError(f"--compare {path}: is no file of `distbelief cost TASK --json`: {error}") from None
    return file
