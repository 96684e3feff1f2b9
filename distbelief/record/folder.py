"""Run folder, which holds everything that a run leaves, and how its files are written."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import platform
import secrets
import shutil
import tempfile
import time
import weakref
from collections.abc import Callable, Iterator
from functools import partial
from importlib import metadata
from pathlib import Path
from typing import BinaryIO, TypeVar

import msgspec

from distbelief.core.records import Json
from distbelief.errors import CheckpointError, UsageError, limit

LOOKS, LOOK_SECONDS = 5, 0.02
"""Tries to lock a folder, and the time between them: `distbelief status` holds the lock for a moment."""
PACKED_LIMIT = 256 << 20
"""Longest file of sums in bytes."""
OWNER_ALONE = 0o600
"""Mode of a file that only its owner may read."""
UNSUPPORTED = (errno.EINVAL, errno.ENOTSUP, errno.EPERM)
"""Errors of file systems that cannot sync a folder and do not need it: network file systems, some FUSE."""

T = TypeVar("T", bound=msgspec.Struct)


@contextlib.contextmanager
def written_whole(path: Path, mode: int = 0o666, lasts: bool = True) -> Iterator[BinaryIO]:
    """Open a temporary file that replaces `path` when the block ends, with `mode` less the umask.

    Readers see the old file or the complete new one; if it `lasts`, even after a power cut.

    Raises:
        OSError: the disk is full or cannot be written; the old file stays.
    """
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(4)}")
    try:
        with open(temporary, "x+b", opener=partial(os.open, mode=mode)) as file:
            yield file
            file.flush()
            if lasts:
                _sync(file.fileno())
        os.replace(temporary, path)
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(temporary)
        raise
    if lasts:
        sync(path.parent)


def write_atomically(path: Path, data: bytes, lasts: bool = True) -> None:
    """Write `data` to `path` as `written_whole` does."""
    with written_whole(path, lasts=lasts) as file:
        file.write(data)


def read_packed(path: Path, kind: type[T]) -> T | None:
    """Read a struct from a file of msgpack; None if it is missing, corrupt, or longer than `PACKED_LIMIT`."""
    try:
        if path.stat().st_size <= PACKED_LIMIT:
            return msgspec.msgpack.decode(path.read_bytes(), type=kind)
    except (OSError, ValueError, RecursionError):  # names that are no text, and depth, have errors of their own
        pass
    return None


def check_output(path: Path) -> None:
    """Refuse a file for results (`--out`) that cannot be there: it is a folder, or its folder is missing."""
    if path.is_dir() or not path.parent.is_dir():
        raise UsageError(f"--out {path}: {'is a folder' if path.is_dir() else f'there is no folder {path.parent}'}")


def sync(folder: Path) -> None:
    """Wait until the names in a folder are on disk, if its file system can sync a folder."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        _sync(descriptor)
    finally:
        os.close(descriptor)


def _sync(descriptor: int) -> None:
    try:
        os.fsync(descriptor)
    except OSError as error:
        if error.errno not in UNSUPPORTED:
            raise


def versions() -> dict[str, str]:
    """Return the versions of distbelief, torch and Python."""
    import torch  # imported here, since a ticket is written without it

    return {
        "distbelief": metadata.version("distbelief"),
        "torch": str(torch.__version__),
        "python": platform.python_version(),
    }


class RunFolder:
    """Folder of one run and the paths in it; TensorBoard events are in `path` itself.

    >>> import tempfile
    >>> folder = RunFolder.create(Path(tempfile.mkdtemp()) / "run", "mnist-downpour")
    >>> folder.write_job({"task": "mnist", "seed": 3})
    >>> RunFolder.open(folder.path).read_job()
    {'task': 'mnist', 'seed': 3}
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.job = path / "job.json"
        self.metrics = path / "metrics.jsonl"
        self.timeline = path / "timeline.msgpack"
        self.result = path / "result.json"
        self.checkpoints = path / "checkpoints"
        self.model = path / "model.safetensors"
        self._let_go: Callable[[], object] = bool
        self._locked = -1

    @classmethod
    def create(cls, path: str | Path | None, name: str) -> RunFolder:
        """Make a new folder: `path` (`--out`), or `runs/<name>-<yyyymmdd-hhmmss>` by default.

        Raises:
            UsageError: `path` is not an empty folder, or cannot be written.
        """
        try:
            folder = cls(_fresh(name) if path is None else Path(path))
            folder.path.mkdir(parents=True, exist_ok=True)
            if any(folder.path.iterdir()):
                raise UsageError(
                    f"--out {folder.path} is not empty; name another folder, or continue its run with --resume"
                )
            with tempfile.TemporaryFile(dir=folder.path):
                pass
        except (FileExistsError, NotADirectoryError) as error:
            raise UsageError(f"--out {path}: {error.filename} is a file, not a folder; name another folder") from error
        except OSError as error:
            remedy = limit(error) or "name another folder with --out"
            raise UsageError(f"--out {path or 'runs'} cannot be written: {error.strerror}; {remedy}") from error
        return folder

    @classmethod
    def open(cls, path: str | Path) -> RunFolder:
        """Open the folder of an earlier run, or raise a `UsageError`."""
        folder = cls(Path(path))
        if not folder.job.is_file():
            missing = "it has no job.json" if folder.path.is_dir() else "there is no such folder"
            raise UsageError(
                f"{path} is not a run folder: {missing}; name the folder that `distbelief train` made (by default "
                "under runs/)"
            )
        return folder

    def lock(self) -> None:
        """Keep other jobs from writing here until `unlock` or the end of this process.

        This is an advisory lock on the folder itself; without locks in the file system it has no effect.

        Raises:
            UsageError: another job has the lock.
        """
        descriptor = os.open(self.path, os.O_RDONLY | os.O_DIRECTORY)
        try:
            held = _locked(descriptor, fcntl.LOCK_EX, LOOKS)
        except BaseException:
            os.close(descriptor)
            raise
        if held:
            os.close(descriptor)
            raise UsageError(
                f"{self.path} is the run folder of a job that is running: wait for its end, or end it with Ctrl-C and "
                f"go on with --resume; or name another folder with --out. `distbelief status {self.path}` shows the job"
            )
        self._locked = descriptor
        self._let_go = weakref.finalize(self, _release, descriptor)
        self._let_go.atexit = False  # a process forked from this one must not release it at its end

    def unlock(self) -> None:
        """Let other jobs write here."""
        self._let_go()
        self._locked = -1

    @property
    def locked(self) -> bool:
        """Return whether a job has the lock."""
        descriptor = os.open(self.path, os.O_RDONLY | os.O_DIRECTORY)
        try:
            return _locked(descriptor, fcntl.LOCK_SH, 1)
        finally:
            os.close(descriptor)

    @property
    def gone(self) -> bool:
        """Return whether the locked folder is no longer at its path."""
        try:
            there, locked = os.stat(self.path), os.fstat(self._locked)
        except OSError:
            return True
        return (there.st_dev, there.st_ino) != (locked.st_dev, locked.st_ino)

    def make_again(self, job: Json) -> None:
        """Create a deleted folder again, with its `job.json`, and lock it.

        Raises:
            UsageError: it cannot be created, or another job has created it.
        """
        self.unlock()
        try:
            self.path.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise UsageError(
                f"the run folder {self.path} was deleted, and cannot be created again: {error.strerror}; do not delete "
                "it while a job runs"
            ) from error
        self.lock()
        self.write_job(job)

    def remove(self) -> None:
        """Delete the folder of a run that never began."""
        shutil.rmtree(self.path, ignore_errors=True)

    def write_job(self, job: Json) -> None:
        """Write `job.json`, or raise a `UsageError`."""
        try:
            write_atomically(self.job, msgspec.json.format(msgspec.json.encode(dict(job)), indent=2) + b"\n")
        except OSError as error:
            raise UsageError(
                f"{self.job} cannot be written: {error.strerror}; {limit(error) or 'name another folder with --out'}"
            ) from error

    def read_job(self) -> Json:
        """Read `job.json`, or raise a `CheckpointError`."""
        try:
            return msgspec.json.decode(self.job.read_bytes(), type=Json)
        except OSError as error:
            raise CheckpointError(
                f"{self.job} cannot be read: {error.strerror}; is {self.path} a run that got that far?"
            ) from error
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            raise CheckpointError(
                f"{self.job} is corrupt: {error}; restore it from a backup, or train anew into another folder"
            ) from error


def _locked(descriptor: int, kind: int, looks: int) -> bool:
    """Try to lock a folder several times; return whether another process holds the lock each time."""
    for look in range(looks):
        try:
            fcntl.flock(descriptor, kind | fcntl.LOCK_NB)
        except BlockingIOError:
            if look + 1 < looks:
                time.sleep(LOOK_SECONDS)
        except OSError:  # a network file system without locks
            return False
        else:
            return False
    return True


def _release(descriptor: int) -> None:
    with contextlib.suppress(OSError):
        fcntl.flock(descriptor, fcntl.LOCK_UN)  # closing alone would leave the lock to any forked process
    os.close(descriptor)


def _fresh(name: str) -> Path:
    """Make a folder under `runs` that no other run of this second has."""
    first = Path("runs") / f"{name}-{time.strftime('%Y%m%d-%H%M%S')}"
    first.parent.mkdir(exist_ok=True)
    path, number = first, 1
    while True:
        try:
            path.mkdir()
        except FileExistsError:
            number += 1
            path = first.with_name(f"{first.name}-{number}")
        else:
            return path
