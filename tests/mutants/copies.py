"""Copies of the project, and a Python for each that imports the copy, whatever a test does to the environment."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import sysconfig
import venv
from collections.abc import Iterator
from pathlib import Path

from mutants import Mutant

_TESTS = Path(__file__).parents[1]
_LEFT_OUT = shutil.ignore_patterns(".*", "build", "dist", "runs", "*.egg-info")


def copied(root: Path, folder: Path) -> Path:
    """A copy of the project at `root` in a folder of its own, with the folder for its tests' temporary files."""
    copy = folder / "project"
    shutil.copytree(root, copy, ignore=_LEFT_OUT)  # compiled files too, which stay true: times are copied
    (folder / "tmp").mkdir()
    return copy


def python(copy: Path) -> Path:
    """A Python beside a copy that finds the copy's package first: a virtual environment over this one."""
    home = copy.with_name("python")
    venv.EnvBuilder(symlinks=True).create(home)
    site = next(home.glob("lib/python*/site-packages"))
    installed = dict.fromkeys((sysconfig.get_path("purelib"), sysconfig.get_path("platlib")))
    (site / "copy.pth").write_text(
        "\n".join([str(copy), str(_TESTS), *(f"import site; site.addsitedir({path!r})" for path in installed)])
    )
    return home / "bin" / "python"


def mutate(copy: Path, mutant: Mutant) -> None:
    """Make the change of a mutant in a copy.

    Raises:
        ValueError: its text does not stand exactly once in its file.
    """
    file = copy / "distbelief" / mutant.file
    text = file.read_text()
    if (count := text.count(mutant.text)) != 1:
        raise ValueError(
            f"{mutant.name}: its text stands {count} times in {mutant.file}, once is needed: make it follow the code"
        )
    for compiled in file.parent.glob(f"__pycache__/{file.stem}.*"):
        compiled.unlink()
    file.write_text(text.replace(mutant.text, mutant.replacement))


def end_processes(folder: Path) -> None:
    """Kill every process that works in a folder or below it: the tests that ran there are over, or have to be."""
    for process in _processes(folder):
        with contextlib.suppress(ProcessLookupError):
            os.kill(process, signal.SIGKILL)


def _processes(folder: Path) -> Iterator[int]:
    for entry in Path("/proc").iterdir():
        if entry.name.isdecimal():
            with contextlib.suppress(OSError):
                if (entry / "cwd").readlink().is_relative_to(folder):
                    yield int(entry.name)
