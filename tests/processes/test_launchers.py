"""A command that a launcher has started several times: one job, whose processes find each other by a ticket."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from time import sleep

import jobs
import pytest
from patience import SECONDS

from distbelief.transport.addresses import own_addresses

SIZE, SHOWN = 3, ("cmdline", "environ")
ELSEWHERE = (
    "from distbelief.places.cluster import network; network.network_identity = lambda: 'of another host'; "
    "from distbelief.cli.main import main; main()"
)
"""Runs a command as one on another host would."""
pytestmark = pytest.mark.skipif(
    all(name == "lo" for name in own_addresses()), reason="this machine has no address but loopback"
)


class Start:
    """The three processes of a start: two here, one on what passes for another host."""

    def __init__(self, folder: Path, restarts: tuple[int, ...], words: tuple[str, ...], now: int) -> None:
        self.folder, self.restarts = folder, restarts
        command = ["train", "jobs:tiny", "downpour", "--batch-size", "16", "--json", "--shards", "1", *words]
        self._common = jobs.environment(WORLD_SIZE=str(SIZE), TORCHELASTIC_RUN_ID="a start")
        self._command = command
        self.processes: list[subprocess.Popen[str]] = []
        self.begin(now)

    def begin(self, ranks: int) -> None:
        """Start the next ones, up to so many."""
        for rank in range(len(self.processes), ranks):
            program = ["-c", ELSEWHERE] if rank == 2 else ["-m", "distbelief"]
            own = {
                "RANK": str(rank),
                "LOCAL_RANK": str(rank % 2),
                "TORCHELASTIC_RESTART_COUNT": str(self.restarts[rank]),
            }
            self.processes.append(
                subprocess.Popen(
                    [sys.executable, *program, *self._command], env={**self._common, **own}, cwd=self.folder, text=True,
                    stdout=subprocess.DEVNULL if rank else subprocess.PIPE, stderr=subprocess.PIPE,
                )
            )  # fmt: skip

    def until(self, name: str) -> dict[str, object]:
        """The first record that has a field, or is of an event, of a name."""
        first = self.processes[0]
        assert first.stdout
        for line in first.stdout:
            record: dict[str, object] = json.loads(line)
            if name in record or record.get("event") == name:
                return record
        raise AssertionError(f"it has ended: {[one.communicate() for one in self.processes]}")

    def statuses(self) -> list[int]:
        """How each has ended."""
        for one in self.processes:
            one.communicate(timeout=SECONDS)
        return [one.returncode for one in self.processes]

    def shown(self) -> dict[str, bytes]:
        """All command lines and environments of its processes."""
        several = [Path(f"/proc/{pid}/{what}") for pid in jobs.processes_in(self.folder) for what in SHOWN]
        return {str(one): one.read_bytes() for one in several}

    def leaves_nobody(self) -> None:
        """Within seconds."""
        jobs.wait_until(lambda: not jobs.processes_in(self.folder))
        assert not list(self.folder.glob(".distbelief-*"))


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Callable[..., Start]]:
    """Starts such a command; none outlives the test."""
    started: list[Start] = []

    def begin(*words: str, restarts: tuple[int, ...] = (0,) * SIZE, now: int = SIZE) -> Start:
        started.append(Start(tmp_path, restarts, words, now))
        return started[-1]

    yield begin
    for one in started:
        for process in one.processes:
            process.kill()
            process.communicate()
        one.leaves_nobody()


def test_a_start_that_ends_early_goes_on_from_its_newest_checkpoint_when_it_is_started_again(
    start: Callable[..., Start],
) -> None:
    """On none of the hosts the launcher counts that, where the same process of it has started this, or on whichever.
    It ends all by SIGTERM, which is one interruption; after kill -9 of the first, nobody else stays.
    """
    words = ("--replicas", "2", "--epochs", "10000")
    one = start(*words)
    one.until("Stepped")
    for restarts in ((0, 0, 0), (0, 0, 1)):
        for process in one.processes:
            process.send_signal(signal.SIGTERM)
        assert one.statuses() == [130] * SIZE
        one.leaves_nobody()
        [run] = (one.folder / "runs").iterdir()
        assert list((run / "checkpoints").iterdir())
        if any(restarts):
            kept = json.loads((run / "job.json").read_text())
            kept["start"]["by"] = "another process"
            (run / "job.json").write_text(json.dumps(kept))
        one = start(*words, restarts=restarts)
        one.until("Stepped")
        assert [run] == list((one.folder / "runs").iterdir())
    one.processes[0].kill()
    assert one.statuses() == [-signal.SIGKILL, 1, 1]
    one.leaves_nobody()


def test_a_host_that_a_launcher_tells_to_go_leaves_and_its_process_ends_well(start: Callable[..., Start]) -> None:
    """As do the others, when the job is over; each host has one agent."""
    words = ("--leave-within", "60", "--standby", "1", "--pad", "10ms", "--out")
    one = start("--replicas", "2", "--epochs", "30", *words, "r")
    one.until("Stepped")
    one.processes[2].send_signal(signal.SIGTERM)
    assert one.until("Gone")["died"] is False
    assert one.processes[2].wait(SECONDS) == 0
    assert one.processes[0].poll() is None, "the job goes on"
    result = one.until("per_replica")
    assert (result["outcome"], result["samples"]) == ("done", 30 * jobs.SAMPLES)
    assert one.statuses() == [0] * SIZE


def test_a_ticket_is_on_no_command_line_and_in_no_environment(start: Callable[..., Start]) -> None:
    one = start("--replicas", "2", "--epochs", "10000", now=1)
    while not (found := list(one.folder.glob(".distbelief-*.ticket"))):
        assert one.processes[0].poll() is None
        sleep(0.01)
    assert found[0].stat().st_mode & 0o777 == 0o600
    identity = json.loads(found[0].read_bytes())["identity"]
    one.begin(SIZE)
    one.until("Stepped")
    shown = one.shown()
    assert len(shown) >= 2 * (SIZE + 5), "the commands, a forkserver, and the roles"
    secrets = [line.encode() for line in identity["key"].splitlines()[1:-1]]
    assert secrets
    assert not [where for where, text in shown.items() for secret in secrets if secret in text]
    one.processes[0].send_signal(signal.SIGTERM)
    assert one.statuses()[0] == 130
