"""Standard streams, and what the processes of a job print, in lines. Text is UTF-8 wherever its encoding is ours to
choose.
"""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Iterator
from pathlib import Path

PIECES, PIECE = 16, 1 << 16
"""Pieces that are read at once, at most, and bytes of each: who prints without end is not listened to without end."""
LINE_LIMIT = 1 << 14
"""Longest line that is handed on in one piece, in bytes."""


def open_streams() -> None:
    """Have the standard streams of this process, and have them take any text: what their encoding lacks is escaped."""
    while (descriptor := os.open(os.devnull, os.O_RDWR)) <= 2:
        pass  # one that was closed: the next socket would have its number
    os.close(descriptor)
    sys.stdout = sys.stdout or open(os.devnull, "w")  # noqa: SIM115
    sys.stderr = sys.stderr or open(os.devnull, "w")  # noqa: SIM115
    for stream in (sys.stdout, sys.stderr):
        stream.reconfigure(errors="backslashreplace")  # type: ignore[union-attr]  # text of this process, which can be


def print_into(descriptor: int) -> None:
    """Have this process print, with all that it starts, into the pipe of an `Output`."""
    for stream in (1, 2):
        os.dup2(descriptor, stream)
    sys.stdout, sys.stderr = (
        open(stream, "w", buffering=1, encoding="utf-8", errors="backslashreplace", closefd=False)  # noqa: SIM115
        for stream in (1, 2)
    )


class Output:
    """A pipe into which a process prints."""

    def __init__(self) -> None:
        self.reads, self.writes = os.pipe()
        os.set_blocking(self.reads, False)
        self._rest = b""

    def fileno(self) -> int:
        """Ready when there is something to read."""
        return self.reads

    def lines(self, last: bool = False) -> list[str]:
        """Whole lines that have come; at the last, what is left too. Of a line that was written over again and again,
        as a bar of progress is, what it is at its end.
        """
        with contextlib.suppress(BlockingIOError):
            for _ in range(PIECES):
                self._rest += os.read(self.reads, PIECE)
        *whole, rest = self._rest.split(b"\n")
        if rest and (last or len(rest) > LINE_LIMIT):
            whole, rest = [*whole, rest], b""
        self._rest = rest
        return [line.rstrip(b"\r").rpartition(b"\r")[2].decode(errors="replace") for line in whole]

    def close(self) -> None:
        """Read no more."""
        os.close(self.reads)
        os.close(self.writes)


class Logs:
    """A file for each role that prints: RUN/logs/replica-0.log.

    Args:
        run: the run folder.
    """

    def __init__(self, run: Path) -> None:
        self._folder = run / "logs"

    def kept(self) -> Iterator[tuple[str, list[str]]]:
        """The roles that have printed, as their files are called, and what."""
        for path in sorted(self._folder.glob("*.log")):
            yield path.stem, path.read_text(encoding="utf-8", errors="replace").splitlines()

    def write(self, role: str, lines: list[str]) -> None:
        """Write down what a role has printed.

        Raises:
            OSError: the folder is gone, or the disk is full.
        """
        self._folder.mkdir(exist_ok=True)
        with open(self._folder / f"{role.replace(' ', '-')}.log", "a", encoding="utf-8", errors="replace") as file:
            file.writelines(f"{line}\n" for line in lines)
