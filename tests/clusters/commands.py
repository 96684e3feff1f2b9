"""Commands that train on hosts, and what they say."""

from __future__ import annotations

import contextlib
import json
import os
import queue
import shlex
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from time import monotonic
from typing import Any

from hosts import Hosts, wait_for_end

ROOT = Path(__file__).parents[2]
SECONDS = 100.0
"""How long anything may take."""
KEPT = ("HOME", "LANG", "DISTBELIEF_DATA", "XDG_CACHE_HOME")
Record = dict[str, Any]


def environment() -> dict[str, str]:
    """What a login of a user of distbelief has."""
    path = os.pathsep.join([str(ROOT / "tests" / "processes"), str(ROOT), *filter(None, sys.path)])
    programs = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    kept = {name: value for name, value in os.environ.items() if name in KEPT}
    return {**kept, "PYTHONPATH": path, "PATH": programs, "OMP_NUM_THREADS": "1"}


def documented(begin: str) -> list[str]:
    """The command in docs/clusters.md that begins so, without what of the training it says."""
    [line] = [line for line in (ROOT / "docs/clusters.md").read_text().splitlines() if line.startswith(begin)]
    words = shlex.split(line)
    return words[: words.index("train")]


class Command:
    """A job: one command, or one on each of several hosts, whose first shows the job.

    Args:
        hosts: that there are.
        commands: by host, the first first.
        folder: where they run.
        seen: whether they see this machine's processes, and not those of their host.
    """

    def __init__(self, hosts: Hosts, commands: dict[str, list[str]], folder: Path, seen: bool = False) -> None:
        self._hosts, self.folder = hosts, folder
        self.records: list[Record] = []
        self._said: queue.Queue[str | None] = queue.Queue()
        self._errors = (folder / f"errors {len(list(folder.glob('errors *')))}").open("w+")
        self._shells = [
            subprocess.Popen(
                hosts[name].command(words, str(folder), seen), stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL if number else subprocess.PIPE, stderr=self._errors, text=True,
                env=hosts.environment, start_new_session=True,
            )
            for number, (name, words) in enumerate(commands.items())
        ]  # fmt: skip
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        assert self._shells[0].stdout
        for line in self._shells[0].stdout:
            self._said.put(line)
        self._said.put(None)

    def pids(self) -> list[int]:
        """The commands' own processes."""
        found = []
        for shell in self._shells:
            with contextlib.suppress(OSError):  # it has ended
                children = Path(f"/proc/{shell.pid}/task/{shell.pid}/children").read_text().split()
                found += [int(pid) for pid in children]
        return found

    def until(self, reached: Callable[[Record], object], seconds: float = SECONDS) -> Record:
        """The next record that is so.

        Raises:
            AssertionError: there is none, or not in time.
        """
        end = monotonic() + seconds
        while True:
            try:
                line = self._said.get(timeout=max(0.0, end - monotonic()))
            except queue.Empty:
                raise AssertionError(f"not within {seconds} s: {self.records[-5:]}, {self.errors()}") from None
            if line is None:
                raise AssertionError(f"it has ended: {self.records[-5:]}, {self.errors()}")
            if not line.startswith("{"):
                continue
            self.records.append(json.loads(line))
            if reached(self.records[-1]):
                return self.records[-1]

    def until_all_work(self, replicas: int = 4, standbys: int = 2) -> None:
        """Until so many replicas have made a step, and so many standbys hold what their shards do."""
        work: set[str] = set()
        ready: set[str] = set()

        def do(record: Record) -> bool:
            if record.get("event") == "Stepped" and record["steps"]:
                work.add(record["role"])
            elif record.get("event") == "StandbyReady":
                ready.add(record["role"])
            return len(work) >= replicas and len(ready) >= standbys

        self.until(do)

    def result(self) -> Record:
        """What is said at the end of the job."""
        return self.until(lambda record: "per_replica" in record)

    def wait(self, seconds: float = SECONDS) -> list[int]:
        """How all commands have ended."""
        end = monotonic() + seconds
        return [shell.wait(max(0.0, end - monotonic())) for shell in self._shells]

    def is_silent(self, seconds: float) -> None:
        """Let time pass, in which the job does not end."""
        assert not wait_for_end(self._shells[0].pid, seconds), self.errors()

    def errors(self) -> str:
        """What was printed on standard error."""
        return Path(self._errors.name).read_text()

    def died(self) -> set[str]:
        """Who died, of those that were told of."""
        return {
            str(one["role"])
            for one in self.records
            if (one.get("event") == "Gone" and one["died"]) or one.get("event") == "Succeeded"
        }

    def close(self) -> None:
        """End it."""
        self._hosts.kill(self.pids())
        for shell in self._shells:
            shell.kill()
            shell.wait()
        self._reader.join(SECONDS)
        assert self._shells[0].stdout
        self._shells[0].stdout.close()
        self._errors.close()


def roles_of(hosts: Hosts, name: str) -> dict[str, int]:
    """The processes of roles on a host, but of the coordinator and the evaluator."""
    found = {words.removeprefix("distbelief: "): pid for pid, words in hosts[name].processes().items()}
    return {role: pid for role, pid in found.items() if role.split()[0] in ("replica", "shard", "standby")}


def process(hosts: Hosts, name: str, title: str) -> int:
    """The process on a host that is called so."""
    [found] = [pid for pid, words in hosts[name].processes().items() if words == title]
    return found


def first_process(hosts: Hosts, name: str) -> int:
    """The process that holds a job: the one whose child the coordinator's forkserver is."""
    return parent(parent(process(hosts, name, "distbelief: coordinator")))


def parent(pid: int) -> int:
    """The parent of a process."""
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
