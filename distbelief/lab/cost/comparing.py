"""Costs of several machines beside each other, from the files that `distbelief cost TASK --json` made on each."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import msgspec

from distbelief.core.records import Json
from distbelief.errors import UsageError

UNITS = {"seconds": "s", "kilowatt_hours": "kWh", "price": "price"}
"""Of what is charged."""
PER_MILLION = "_per_million_samples"


class CostFile(msgspec.Struct, frozen=True, kw_only=True):
    """What a comparison reads of a file."""

    task: str
    optimizer: str
    batch_size: int
    processor: str
    version: str
    epoch: dict[str, Annotated[float, msgspec.Meta(gt=0.0)]]

    @property
    def charges(self) -> dict[str, float]:
        """What a million samples take, by what is charged."""
        known = {name: self.epoch.get(name + PER_MILLION) for name in UNITS}
        return {name: value for name, value in known.items() if value is not None}


def compare(paths: Sequence[str]) -> tuple[str, list[Json]]:
    """Put what a million samples take on each machine beside what they take on the first.

    Args:
        paths: of the files.

    Returns:
        The task, and a row for each file; what is not known of all of them is left out.

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
    except OSError as error:
        raise UsageError(f"--compare {path}: {error.strerror}; name a file of `distbelief cost TASK --json`") from None
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise UsageError(f"--compare {path}: is no file of `distbelief cost TASK --json` ({error})") from None
    if "seconds" not in file.charges:
        raise UsageError(f"--compare {path}: is no file of `distbelief cost TASK --json` (it has no seconds)")
    return file
