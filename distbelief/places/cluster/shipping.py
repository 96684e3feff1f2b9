"""Data that are sent to hosts which lack them: a small folder, over each agent's line, into one that ends with it."""

from __future__ import annotations

import contextlib
import hashlib
import itertools
import os
import shutil
import subprocess
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path, PurePosixPath
from typing import IO, NoReturn

from distbelief.errors import JobFailed, UsageError
from distbelief.places.cluster.opening import START_SECONDS, Opened
from distbelief.places.cluster.remote_agent import RemoteAgent
from distbelief.places.cluster.words import (
    BEAT_SECONDS,
    SILENCE_SECONDS,
    Beat,
    DataFile,
    DataPiece,
    DataTaken,
    OfferData,
)

SHIP_LIMIT = 256_000_000
"""Most bytes of data that are sent to a host."""
MOST_FILES = 1 << 12
"""Most of them, with their folders."""
PIECE = 1 << 16
"""Bytes in one word; the next is sent when a host has taken the last. It fits the buffer of a line: a host that stops
keeps nobody from being heard.
"""
OFFERED = 1 << 5
"""Files in one word, which fits as well, however long their names are."""
SLOWEST = 1 << 19
"""Bytes a second, below which the start of a job takes too long."""
END_SECONDS = 10.0
"""Limit for an ending agent's folder to be gone."""
CHANGED = "changed while it was sent, or did not arrive whole; start again, and let nobody write there"


def data_folder(data_dir: str | None) -> Path:
    """The folder that is sent.

    Args:
        data_dir: as of a job; None for what `$DISTBELIEF_DATA` names.

    Raises:
        UsageError: none is named, or it is no folder.
    """
    named = data_dir or os.environ.get("DISTBELIEF_DATA")
    if not named:
        raise UsageError("--ship-data: which folder? Name the one that holds the data, with --data-dir")
    folder = Path(os.path.expanduser(named)).absolute()
    if not folder.is_dir():
        raise UsageError(f"--ship-data: {folder} is no folder here; name the one that holds the data, with --data-dir")
    return folder


def list_data(folder: Path) -> list[Path]:
    """The files of a folder that may be sent.

    Raises:
        UsageError: there are none, too many or too large ones, or one cannot be read or sent.
    """
    try:
        found = list(itertools.islice(_entries(folder), MOST_FILES + 1))
        paths = sorted(path for path in found if not path.is_dir())
        size = sum(path.stat().st_size for path in paths)
    except OSError as error:
        raise UsageError(f"--ship-data: {folder} cannot be read: {error}") from error
    if size > SHIP_LIMIT or len(found) > MOST_FILES:
        many = f"{len(paths)} files" if len(found) <= MOST_FILES else f"more than {MOST_FILES} files and folders"
        raise UsageError(
            f"--ship-data: {folder} holds {size / 1e6:.0f} MB in {many}, and at most "
            f"{SHIP_LIMIT / 1e6:.0f} MB in {MOST_FILES} are sent; copy it to the hosts, at the same path, and leave "
            "--ship-data off, or name a folder with this task's data alone, with --data-dir"
        )
    if not paths:
        raise UsageError(f"--ship-data: {folder} is empty; name the folder that holds the data, with --data-dir")
    return paths


def _entries(folder: Path) -> Iterator[Path]:
    """The files and folders below a folder, also by links."""
    for above, folders, files in os.walk(folder, onerror=_refuse, followlinks=True):
        for path in (Path(above, name) for name in (*folders, *files)):
            if not _is_text(str(path)):
                raise UsageError(f"--ship-data: {str(path)!a} is no name in UTF-8; rename it")
            if not (path.is_file() or path.is_dir()):
                raise UsageError(
                    f"--ship-data: {path} is neither a file nor a folder, nor a link to one; move it elsewhere, or "
                    "name a folder with this task's data alone, with --data-dir"
                )
            if path.is_symlink() and Path(above).resolve().is_relative_to(path.resolve()):
                raise UsageError(f"--ship-data: {path} leads back to a folder above it; remove the link")
            yield path


def _refuse(error: OSError) -> NoReturn:
    raise error


def _is_text(name: str) -> bool:
    try:
        name.encode()
    except UnicodeEncodeError:
        return False
    return True


def files_of(folder: Path) -> list[DataFile]:
    """Return what a folder holds, by name.

    Raises:
        UsageError: as `list_data`.

    >>> made = tempfile.TemporaryDirectory(); folder = Path(made.name)
    >>> (folder / "b").mkdir(); _ = (folder / "b" / "c").write_text("data")
    >>> [(file.name, file.size) for file in files_of(folder)]; made.cleanup()
    [('b/c', 4)]
    """
    try:
        return [
            DataFile(path.relative_to(folder).as_posix(), path.stat().st_size, _digest(path))
            for path in list_data(folder)
        ]
    except OSError as error:
        raise UsageError(f"--ship-data: {folder} cannot be read: {error}") from error


def _digest(path: Path) -> bytes:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").digest()


def ship(opened: Opened, folder: Path) -> str:
    """Send a folder to all hosts that have not the same at the same path; returns what is told of that.

    Raises:
        UsageError: as `list_data`.
        JobFailed: a host has no room for it or is gone, or it takes too long.
    """
    files = files_of(folder)
    size = sum(file.size for file in files)
    words = {agent.name: _words(folder, files) for agent in opened.agents}
    for agent in opened.agents:
        agent.line.say(next(words[agent.name]))
    sent: set[str] = set()
    beaten = time.monotonic()

    def all_have_it() -> bool:
        nonlocal beaten
        now = time.monotonic()
        if now > beaten + BEAT_SECONDS:
            beaten = now
            for agent in opened.agents:
                if now < agent.heard + SILENCE_SECONDS:  # those that it does not read fill the buffer
                    agent.line.say(Beat())
        left = [agent for agent in opened.agents if not _feed(agent, words[agent.name], sent)]
        return not left

    opened.until(all_have_it, "still takes the data", seconds=START_SECONDS + size / SLOWEST)
    if not sent:
        return f"data: every host has what is in {folder}"
    names = [agent.name for agent in opened.agents if agent.name in sent]
    more = f" and {len(names) - 8} more" if len(names) > 8 else ""
    return f"data: {size / 1e6:.1f} MB of {folder} were sent to {', '.join(names[:8])}{more}, until the job ends"


def _feed(agent: RemoteAgent, words: Iterator[OfferData | DataPiece], sent: set[str]) -> bool:
    """Send a host its next word, where it has taken the last; whether it has all."""
    taken, agent.taken = agent.taken, None
    if agent.has_data or taken is None:
        return agent.has_data
    if taken.error:
        raise JobFailed(f"host {agent.name}: {taken.error}")
    if not taken.missing:
        agent.has_data = True
        return True
    if taken.missing > 0:
        sent.add(agent.name)
    agent.line.say(next(words))
    return False


def _words(folder: Path, files: Sequence[DataFile]) -> Iterator[OfferData | DataPiece]:
    yield from _offers(folder, files)
    yield from _pieces(folder, files)


def _offers(folder: Path, files: Sequence[DataFile]) -> Iterator[OfferData]:
    for first in range(0, len(files), OFFERED):
        after = first + OFFERED
        yield OfferData(str(folder), list(files[first:after]), more=after < len(files))


def _pieces(folder: Path, files: Sequence[DataFile]) -> Iterator[DataPiece]:
    for file in files:
        left = file.size
        try:
            with (folder / file.name).open("rb") as source:
                while left:
                    piece = source.read(min(left, PIECE))
                    if not piece:
                        raise EOFError(f"{left} bytes of it are gone")
                    left -= len(piece)
                    yield DataPiece(piece)
        except (OSError, EOFError) as error:
            raise JobFailed(f"--ship-data: {folder / file.name} {CHANGED} ({error})") from error


class ShippedData:
    """The data of a job on a host that is sent them: a folder that is there whole, or not at all, until the agent ends,
    however that does.
    """

    def __init__(self) -> None:
        self.folder = ""
        """Folder of the data; "" where the host has had them, or nothing was sent."""
        self._made: Path | None = None
        self._lifeline: subprocess.Popen[bytes] | None = None
        self._files: list[DataFile] = []
        self._file: IO[bytes] | None = None
        self._missing = 0

    def take_offer(self, offer: OfferData) -> DataTaken:
        """Look whether the same files are here, once all are told; if not, make room for them."""
        self._files += offer.files
        if offer.more:
            return DataTaken(-1)
        if all(_has(Path(offer.folder), file) for file in self._files):
            return DataTaken(0)
        self._missing = sum(file.size for file in self._files)
        try:
            if strange := next((file.name for file in self._files if not _is_inside(file.name)), ""):
                raise JobFailed(f"{strange!r} is no name of a file in a folder")
            room = shutil.disk_usage(tempfile.gettempdir()).free
            if room < self._missing:
                raise OSError(f"{room / 1e6:.0f} MB are free")
            self._made = Path(tempfile.mkdtemp(prefix="distbelief-data-"))
            # it goes with this process, even where that is killed
            self._lifeline = subprocess.Popen(
                ["sh", "-c", 'cat; rm -rf -- "$1"', "sh", str(self._made)], stdin=subprocess.PIPE,
                stdout=subprocess.DEVNULL, start_new_session=True,
            )  # fmt: skip
            self._open_next()
        except (JobFailed, OSError) as error:
            return self._fails(error)
        return DataTaken(self._missing)

    def take_piece(self, piece: DataPiece) -> DataTaken:
        """Write what comes next; all of it is used when the last is there, and every file is what it was."""
        try:
            if self._file is None:
                raise JobFailed("more was sent than was offered")
            self._file.write(piece.data)
            self._missing -= len(piece.data)
            if self._file.tell() >= self._files[0].size:
                self._close_file()
                self._open_next()
        except (JobFailed, OSError) as error:
            return self._fails(error)
        if not self._missing:
            self.folder = str(self._made)
        return DataTaken(self._missing)

    def _open_next(self) -> None:
        """Begin the next file that has anything in it."""
        assert self._made
        while self._files and self._file is None:
            path = self._made / self._files[0].name
            path.parent.mkdir(parents=True, exist_ok=True)
            self._file = path.open("wb")
            if not self._files[0].size:
                self._close_file()

    def _close_file(self) -> None:
        assert self._file
        assert self._made
        self._file.close()
        self._file = None
        file = self._files.pop(0)
        if not _has(self._made, file):
            raise JobFailed(f"{file.name} {CHANGED}")

    def _fails(self, error: JobFailed | OSError) -> DataTaken:
        if isinstance(error, JobFailed):
            return DataTaken(self._missing, str(error))
        where = tempfile.gettempdir()
        why = f"the data cannot be kept in {where}: {error}; make room there, or name another folder with TMPDIR"
        return DataTaken(self._missing, why)

    def close(self) -> None:
        """Leave nothing of it."""
        if self._file:
            with contextlib.suppress(OSError):  # the disk is full
                self._file.close()
        if self._lifeline:
            assert self._lifeline.stdin
            self._lifeline.stdin.close()
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._lifeline.wait(END_SECONDS)
            self._lifeline = None
        if self._made:  # where there was no lifeline, or it did not come to its end
            shutil.rmtree(self._made, ignore_errors=True)


def _has(folder: Path, file: DataFile) -> bool:
    """Return whether a folder holds a file, bit for bit."""
    path = folder / file.name
    try:
        return path.stat().st_size == file.size and _digest(path) == file.digest
    except OSError:
        return False


def _is_inside(name: str) -> bool:
    path = PurePosixPath(name)
    return bool(name) and not path.is_absolute() and ".." not in path.parts
