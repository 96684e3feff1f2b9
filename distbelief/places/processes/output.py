"""Standard streams, and the output of a job's processes in lines; text is UTF-8 unless the encoding is prescribed."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Iterator
from pathlib import Path

PIECES, PIECE = 16, 1 << 16
"""Most pieces to read at once, and bytes of each, so that a process that prints endlessly does not delay others."""
LINE_LIMIT = 1 << 14
"""Longest line that is passed on in one piece, in bytes."""


def open_streams() -> None:
    """Open closed standard streams, and let all escape the characters that their encoding lacks."""
    while (descriptor := os.open(os.devnull, os.O_RDWR)) <= 2:
        pass  # fills a closed standard stream: otherwise the next socket would get its number
    os.close(descriptor)
    sys.stdout = sys.stdout or open(os.devnull, "w")  # noqa: SIM115
    sys.stderr = sys.stderr or open(os.devnull, "w")  # noqa: SIM115
    for stream in (sys.stdout, sys.stderr):
        stream.reconfigure(errors="backslashreplace")  # type: ignore[union-attr]  # a text stream, which has it


def print_into(descriptor: int) -> None:
    """Redirect the output of this process, and of those that it starts, into the pipe of an `Output`."""
    for stream in (1, 2):
        os.dup2(descriptor, stream)
    sys.stdout, sys.stderr = (
        open(stream, "w", buffering=1, encoding="utf-8", errors="backslashreplace", closefd=False)  # noqa: SIM115
        for stream in (1, 2)
    )


class Output:
    """Pipe into which a process prints."""

    def __init__(self) -> None:
        self.reads, self.writes = os.pipe()
        os.set_blocking(self.reads, False)
        self._rest = b""

    def fileno(self) -> int:
        """Return the descriptor to read from, so that `wait` takes this object."""
        return self.reads

    def lines(self, last: bool = False) -> list[str]:
        """Return the complete lines that have arrived; with `last`, also the remaining incomplete one.

        Of a line that is overwritten repeatedly, such as a progress bar, only the last form is returned.
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
        os.close(self.reads)
        os.close(self.writes)


class Logs:
    """Log files of a run, one for each role that prints, such as RUN/logs/replica-0.log."""

    def __init__(self, run: Path) -> None:
        self._folder = run / "logs"

    def kept(self) -> Iterator[tuple[str, list[str]]]:
        """Yield the file name, without its ending, and the lines of each role that has printed."""
        for path in sorted(self._folder.glob("*.log")):
            yield path.stem, path.read_text(encoding="utf-8", errors="replace").splitlines()

    def write(self, role: str, lines: list[str]) -> None:
        """Append lines that a role has printed to its file."""
        self._folder.mkdir(exist_ok=True)
        with open(self._folder / f"{role.replace(' ', '-')}.log", "a", encoding="utf-8", errors="replace") as file:
            file.writelines(f"{line}\n" for line in lines)
