"""Store of checkpoints: each is a folder with a file per shard, the model's weights, and a manifest.

A checkpoint is made in `.making-<number>` and renamed when all of it is on disk, so a folder named by a number is
complete. Nothing is ever pickled or unpickled.
"""

from __future__ import annotations

import contextlib
import os
import re
import resource
import shutil
import zlib
from collections.abc import Iterator, Mapping
from pathlib import Path

import msgspec
import torch

from distbelief.core import roles
from distbelief.core.effects import SCRIPT
from distbelief.core.portions import Position
from distbelief.core.records import Json
from distbelief.core.settings import Plan, read_strategy_or_name
from distbelief.errors import CheckpointError, LocalProtocolError
from distbelief.record.folder import RunFolder, sync, write_atomically, written_whole
from distbelief.record.model_file import write_arrays, write_model

FORMAT = 4
"""Version of the format; another version is refused."""
MODEL = "model.safetensors"
MANIFEST = "manifest.json"
SCRIPT_LIMIT = 16 << 20
"""Most bytes of the tensors that a script may keep."""
_PART = re.compile(r"shard[- ](\d+)")
_NUMBER = re.compile(r"\d{6,}")


class CheckpointFile(msgspec.Struct, frozen=True):
    """One file of a checkpoint."""

    file: str
    size: int
    """Length in bytes."""
    crc32: int
    facts: Json = {}
    """Values that the shard saved besides its arrays."""


class Manifest(msgspec.Struct, frozen=True):
    """Contents of a checkpoint."""

    format: int
    number: int
    samples: int
    """Number of samples applied when the checkpoint was made."""
    position: Position
    plan: Plan
    parts: tuple[CheckpointFile, ...]
    """One per shard, in the order of the plan's assignments."""
    model: CheckpointFile
    script: CheckpointFile | None = None
    """Tensors of a script."""


class _Sealed(msgspec.Struct, frozen=True):
    crc32: int
    manifest: msgspec.Raw


class Checkpoints:
    """Checkpoints of one run: the shards' processes save parts, and the coordinator's process commits.

    Args:
        run: the run folder; checkpoints lie in `run/checkpoints`.
    """

    def __init__(self, run: str | Path) -> None:
        folder = RunFolder(Path(run))
        self.folder, self._model = folder.checkpoints, folder.model
        self._script = self.folder / f"{SCRIPT}.safetensors"

    def save_part(self, number: int, part: str, arrays: Mapping[str, torch.Tensor], facts: Json) -> None:
        """Write a shard's arrays as its part of checkpoint `number`, and wait until they are on disk.

        Args:
            number: number of the checkpoint, from 0.
            part: `shard-<index>`; or `SCRIPT`, of which every checkpoint uses the latest tensors.
            arrays: `vector.moving` and `vector.frozen` (1-D uint8, the shard's ranges of the flat vector), and for each
                section of parameters `master.<section>` and `state.<section>.<key>`: 1-D, with one element per
                parameter in the shard's range, or with one element (`step`).
            facts: JSON values (`updates`, `samples`, `staleness`), which `load_part` returns.

        Raises:
            CheckpointError: the disk is full or cannot be written. The unfinished checkpoint is removed; the last good
                one stays.
        """
        if part == SCRIPT:
            self._save_script(number, arrays)
            return
        index = _PART.fullmatch(part)
        if index is None:
            raise LocalProtocolError(
                f"checkpoint {number} has no part {part!r}; parts are named 'shard-0', 'shard-1', ..."
            )
        making = self._making(number)
        path = making / f"shard-{index[1]}.safetensors"
        with self._whole_or_nothing(number):
            making.mkdir(parents=True, exist_ok=True)
            with written_whole(path) as file:
                write_arrays(file, arrays)
            write_atomically(path.with_suffix(".json"), msgspec.json.encode(sealed(path, facts)))

    def _save_script(self, number: int, arrays: Mapping[str, torch.Tensor]) -> None:
        with self._whole_or_nothing(number):
            self.folder.mkdir(parents=True, exist_ok=True)
            with written_whole(self._script) as file:
                write_arrays(file, arrays)

    def commit(self, number: int, plan: Plan, position: Position, samples: int, script: bool = False) -> Path:
        """Complete checkpoint `number`, whose parts are on disk, and copy its model to the run folder.

        Older checkpoints beyond `keep_checkpoints` are deleted. So are those with larger numbers, from before a job
        went back to an earlier one.

        Args:
            number: number of the checkpoint.
            plan: plan of the job.
            position: position of the job in its data.
            samples: number of samples applied.
            script: whether the tensors that a script saved last belong to it.

        Raises:
            CheckpointError: a part is missing, or the disk is full. The unfinished checkpoint is removed; the last good
                one stays.
        """
        making, final = self._making(number), self.folder_of(number)
        # an earlier coordinator may have died after its commit, before reporting it
        again = not making.exists() and self._holds(final, number, position, samples)
        if not again:
            with self._whole_or_nothing(number):
                self._make(making, number, plan, position, samples, script)
                self._install(making, final)
        try:
            sync(self.folder)
        except OSError as error:
            raise CheckpointError(
                f"{final} exists but may not survive a power cut: {error}; older checkpoints are kept. Repair that disk"
            ) from error
        self._tidy(number, max(plan.settings.keep_checkpoints, 1))
        self._place(final / MODEL)
        return final

    def _make(self, making: Path, number: int, plan: Plan, position: Position, samples: int, script: bool) -> None:
        """Complete the checkpoint whose parts are in a folder."""
        parts = tuple(_part(making, index) for index in range(len(plan.assignments)))
        with written_whole(making / MODEL) as file:
            write_model(file, plan, [making / part.file for part in parts])
        if script:
            _copy(self._script, making / self._script.name)
        kept = sealed(making / self._script.name) if script else None
        manifest = Manifest(FORMAT, number, samples, position, plan, parts, sealed(making / MODEL), kept)
        body = msgspec.json.encode(manifest)
        write_atomically(making / MANIFEST, msgspec.json.encode(_Sealed(zlib.crc32(body), msgspec.Raw(body))))
        known = {MODEL, MANIFEST, self._script.name, *(part.file for part in parts)}
        for path in making.iterdir():
            if path.name not in known:
                path.unlink()

    @staticmethod
    def _holds(final: Path, number: int, position: Position, samples: int) -> bool:
        """Return whether a folder holds that checkpoint."""
        try:
            manifest = read_manifest(final)
        except CheckpointError:
            return False
        return (manifest.number, manifest.position, manifest.samples) == (number, position, samples)

    def discard(self, number: int) -> None:
        """Delete the unfinished checkpoint `number`."""
        shutil.rmtree(self._making(number), ignore_errors=True)

    def latest(self) -> Path | None:
        """Return the newest checkpoint, or None."""
        return next(iter(self.newest()), None)

    def newest(self) -> list[Path]:
        """List all checkpoints, the newest first."""
        return sorted(self._all(), key=lambda path: int(path.name), reverse=True)

    def folder_of(self, number: int) -> Path:
        """Return the folder of a checkpoint."""
        return self.folder / f"{number:06d}"

    def _all(self) -> list[Path]:
        return [path for path in self.folder.glob("*") if _NUMBER.fullmatch(path.name)]

    def _making(self, number: int) -> Path:
        return self.folder / f".making-{number}"

    @contextlib.contextmanager
    def _whole_or_nothing(self, number: int) -> Iterator[None]:
        try:
            yield
        except (OSError, CheckpointError, msgspec.MsgspecError) as error:
            self.discard(number)
            last = self.latest()
            kept = f"{last} stays the last good one" if last else "there is no earlier one"
            remedy = "" if isinstance(error, CheckpointError) else f"; {_room()}"
            raise CheckpointError(
                f"checkpoint {number} was not written to {self.folder}: {error}; {kept}{remedy}"
            ) from error

    def _install(self, making: Path, final: Path) -> None:
        """Rename a checkpoint into place, after moving an abandoned one of the same number aside."""
        aside = final.with_name(f".making-{final.name}-aside")
        if final.exists():
            shutil.rmtree(aside, ignore_errors=True)
            os.rename(final, aside)
        try:
            os.rename(making, final)
        except OSError:
            if aside.exists():
                os.rename(aside, final)
            raise

    def _tidy(self, number: int, keep: int) -> None:
        kept = [version for path in self.newest() if (version := int(path.name)) <= number][:keep]
        for path in self._all():
            if int(path.name) not in kept:
                shutil.rmtree(path, ignore_errors=True)
        for path in self.folder.glob(".making-*"):
            other = path.name.removeprefix(".making-")
            if not other.isdigit() or int(other) <= number:  # a larger number may be in the making now
                shutil.rmtree(path, ignore_errors=True)

    def _place(self, model: Path) -> None:
        temporary = self._model.with_name(f".{MODEL}.new")
        try:
            temporary.unlink(missing_ok=True)
            try:
                os.link(model, temporary)
            except OSError:  # a file system without hard links
                _copy(model, temporary)
            os.replace(temporary, self._model)
            sync(self._model.parent)
        except OSError as error:
            with contextlib.suppress(OSError):
                temporary.unlink(missing_ok=True)
            raise CheckpointError(
                f"{self._model} could not be replaced: {error}; the same weights are in {model}. Make room on that disk"
            ) from error


def read_manifest(path: str | Path) -> Manifest:
    """Read the manifest of the checkpoint in folder `path`.

    Raises:
        CheckpointError: the manifest is missing, corrupt or of another version of the format.
    """
    file = Path(path) / MANIFEST
    try:
        outer = msgspec.json.decode(file.read_bytes(), type=_Sealed)
        if zlib.crc32(outer.manifest) != outer.crc32:
            raise corrupt(file, "its checksum does not match")
        version = msgspec.json.decode(outer.manifest, type=Json).get("format")
        if version != FORMAT:
            raise CheckpointError(
                f"{file} is in format {version}, but this distbelief reads {FORMAT}: go on with the version "
                "that wrote it"
            )
        manifest = msgspec.json.decode(outer.manifest, type=Manifest, dec_hook=read_strategy_or_name)
        if len(manifest.parts) != len(manifest.plan.assignments):
            raise corrupt(file, f"it names {len(manifest.parts)} parts of {len(manifest.plan.assignments)} shards")
        return manifest
    except OSError as error:
        raise unreadable(file, error) from error
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise corrupt(file, str(error)) from error


def corrupt(file: Path, how: str) -> CheckpointError:
    """Make the error for a corrupt file of a checkpoint, with the remedy."""
    return CheckpointError(f"{file} is corrupt: {how}; {_remedy(file.parent)}")


def unreadable(file: Path, error: OSError) -> CheckpointError:
    """Make the error for an unreadable file of a checkpoint, with the remedy."""
    if isinstance(error, FileNotFoundError | NotADirectoryError):
        return CheckpointError(f"{file} is missing; {_remedy(file.parent)}")
    return CheckpointError(f"{file} cannot be read: {error.strerror}; fix that, and go on with --resume")


def _remedy(spoilt: Path) -> str:
    before = (path for path in spoilt.parent.glob("*") if _NUMBER.fullmatch(path.name) and path.name < spoilt.name)
    older = max(before, default=None)
    remedy = f"delete {spoilt} to go on from {older}, the previous one, or " if older else "there is none before it: "
    return f"{remedy}train anew into another folder"


def _room() -> str:
    """Return the remedy for a file that cannot be written."""
    most, _ = resource.getrlimit(resource.RLIMIT_FSIZE)
    limited = "" if most == resource.RLIM_INFINITY else f", or let a file be longer than {most:,} bytes (ulimit -f)"
    return f"make room on that disk or repair it{limited}"


def sealed(path: Path, facts: Json | None = None) -> CheckpointFile:
    """Return the manifest's entry for a file, or raise an `OSError`."""
    return CheckpointFile(path.name, path.stat().st_size, checksum(path), dict(facts or {}))


def _copy(file: Path, to: Path) -> None:
    with file.open("rb") as source, written_whole(to) as copy:
        shutil.copyfileobj(source, copy)


def checksum(path: Path) -> int:
    """Return the CRC-32 of a file, or raise an `OSError`."""
    crc = 0
    with path.open("rb") as file:
        while chunk := file.read(1 << 20):
            crc = zlib.crc32(chunk, crc)
    return crc


def _part(making: Path, index: int) -> CheckpointFile:
    path = making / f"shard-{index}.json"
    try:
        return msgspec.json.decode(path.read_bytes(), type=CheckpointFile)
    except (OSError, msgspec.DecodeError) as error:
        raise CheckpointError(f"the part of {roles.shard(index)} is missing ({error})") from error
