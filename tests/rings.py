"""The long rings of tests: `python -m rings all` and `python -m rings busy`.

Each step is a command of minutes. When it has ended it is written down in a line, and a ring that was interrupted goes
on behind the last line, as long as no source has changed.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[1]
BURNERS = 2
"""Programs that keep the cores busy in the ring of that name."""
DEATHS, CHANCES = 40, 10
"""Deaths of shards in each run of their test, and runs of it."""
SEEDS = {"DISTBELIEF_SEEDS": "2000", "DISTBELIEF_DEATHS": "200", "DISTBELIEF_FRAMES": "100000"}
"""How much every sweep draws in the ring of all."""


SUFFIXES = (".py", ".toml", ".json", ".md")
BESIDE = ("Makefile", "README.md", "constraints.txt", "pyproject.toml")


class Step(NamedTuple):
    """One command of a ring."""

    name: str
    command: tuple[str, ...]
    environment: Mapping[str, str] = {}


def pytest(*words: str) -> tuple[str, ...]:
    """A run of tests, of which none hangs for more than an hour."""
    return (sys.executable, "-m", "pytest", "--timeout", "3600", *words)


def files(*folders: str) -> list[str]:
    """The files of tests in some folders."""
    return [str(path.relative_to(ROOT)) for one in folders for path in sorted((ROOT / "tests" / one).glob("test_*.py"))]


def deaths() -> list[Step]:
    """Shards that die at every step of a push and a fetch."""
    words = pytest("tests/processes/test_direct.py", "-k", "die_at_any_step")
    return [
        Step(f"deaths {n}", words, {"DISTBELIEF_DEATHS": str(DEATHS), "DISTBELIEF_CHANCE": str(n)})
        for n in range(CHANCES)
    ]


def steps_of_all() -> list[Step]:
    """Every test that needs no other machine, with thousands of seeds; and all mutants."""
    more = {"tests/processes/test_direct.py": {"DISTBELIEF_DEATHS": "400"}}  # so many find every place to die at
    each = [
        Step(file, pytest(file), SEEDS | more.get(file, {}))
        for file in files("core", "machines", "simulated", "plain", "processes", "slow")
    ]
    return [*each, Step("mutants", (sys.executable, "-m", "mutants"))]


def steps_of_busy() -> list[Step]:
    """Every file of tests with processes 20 times, and `make test` three times in a fresh clone."""
    each = [Step(f"{file} {n}", pytest(file)) for n in range(20) for file in files("processes")]
    fresh = "git clone --quiet . {0}/fresh && cd {0}/fresh && make test"
    return [*deaths(), *each, *(Step(f"make test {n}", ("sh", "-ec", fresh)) for n in range(3))]


def hash_of_sources(root: Path) -> str:
    """A hash of all that a test may look at."""
    found = hashlib.sha256()
    folders = ("distbelief", "benchmarks", "tests", "docs", "recipes")
    paths = [path for folder in folders for path in (root / folder).rglob("*") if path.suffix in SUFFIXES]
    for path in sorted([*paths, *(root / name for name in BESIDE if (root / name).exists())]):
        found.update(str(path.relative_to(root)).encode() + b"\0" + path.read_bytes())
    return found.hexdigest()


class Log:
    """The lines of what has ended, of the sources as they are.

    Args:
        name: of what is run.
    """

    def __init__(self, name: str) -> None:
        self.path = ROOT / "runs" / f"{name}-{hash_of_sources(ROOT)[:12]}.txt"
        self.path.parent.mkdir(exist_ok=True)
        self.lines = self.path.read_text().splitlines() if self.path.exists() else []

    def names(self, *verdicts: str) -> set[str]:
        """What has ended so; in any way, where none is named."""
        return {name for line in self.lines if (name := line.split("  ")[2]) and line.startswith(verdicts or "")}

    def write(self, verdict: str, seconds: float, name: str, why: str = "") -> None:
        """Add a line, and show it."""
        line = show(verdict, seconds, name, " ".join(why.split()))
        self.lines.append(line)
        with self.path.open("a") as file:
            file.write(line + "\n")


def show(verdict: str, seconds: float, name: str, why: str = "") -> str:
    """Print how something ended, in one line, and return that."""
    line = f"{verdict}  {seconds:.1f} s  {name}  {why}".rstrip()
    print(line, flush=True)
    return line


@contextlib.contextmanager
def busy_cores(programs: int) -> Iterator[None]:
    """So many programs that compute all the time."""
    burners = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(programs)]
    try:
        yield
    finally:
        for burner in burners:
            burner.kill()
            burner.wait()


def run(step: Step, log: Log, folder: str) -> None:
    """Run a step; the output of one that fails is kept beside the log."""
    began = time.monotonic()
    output = log.path.with_suffix(f".{len(log.lines)}.out")
    with output.open("wb") as file:
        ended = subprocess.run(
            [word.replace("{0}", folder) for word in step.command],
            cwd=ROOT, stdin=subprocess.DEVNULL, stdout=file, stderr=subprocess.STDOUT, check=False,
            env={**os.environ, **step.environment},
        )  # fmt: skip
    if not ended.returncode:
        output.unlink()
    log.write(
        "FAILED" if ended.returncode else "passed",
        time.monotonic() - began,
        step.name,
        str(output.relative_to(ROOT)) if ended.returncode else "",
    )


def main(ring: str) -> int:
    """Run what is left of a ring; returns the status to exit with."""
    steps = {"all": steps_of_all, "busy": steps_of_busy}[ring]()
    log = Log(f"test-{ring}")
    ended = log.names()
    with busy_cores(BURNERS if ring == "busy" else 0):
        for step in steps:
            if step.name not in ended:
                with tempfile.TemporaryDirectory(prefix="rings-", ignore_cleanup_errors=True) as folder:
                    run(step, log, folder)
    failed = log.names("FAILED")
    print(f"{len(log.lines)} of {len(steps)} have run, {len(failed)} failed: {log.path}")
    return int(bool(failed))


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("ended by SIGTERM"))
    try:
        sys.exit(main(sys.argv[1]))
    except KeyboardInterrupt:
        sys.exit("interrupted; the same command goes on from here")
