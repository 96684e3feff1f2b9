"""Plans that run candidates for real, and one that is interrupted."""

from __future__ import annotations

import contextlib
import os
import pty
import re
import signal
import subprocess
import sys
from multiprocessing.connection import Connection
from pathlib import Path

import pytest
from patience import SECONDS

from benchmarks.parts.peers import Peers
from distbelief.core.optimizer import optim
from distbelief.lab.cost.options import PlanRequest
from distbelief.lab.plan import halving
from distbelief.lab.plan.candidates import PlanCandidate
from distbelief.strategies import Downpour, Hogwild, Single, Strategy
from distbelief.strategies import Synchronous as Rounds

SGD = optim("sgd")


@pytest.mark.parametrize(
    "strategy",
    [
        Downpour(replicas=1, shards=1, optimizer=SGD),
        Rounds(replicas=2, shards=1, optimizer=SGD),
        Single(partitions=2, optimizer=SGD),
    ],
)
def test_a_candidate_is_run_and_tells_what_its_steps_were_made_of(strategy: Strategy) -> None:
    """Of some thousand epochs, until its time is over."""
    found = halving.run("digits", PlanCandidate(strategy), PlanRequest(batch_size=16), 0.5)
    assert min(found.compute, found.wait, found.samples_per_second, found.bytes_per_step) > 0
    replicas = PlanCandidate(strategy).replicas
    assert found.step == pytest.approx(16 * replicas / found.samples_per_second, rel=0.3)


def test_candidates_are_run_by_turns_the_best_first() -> None:
    asked = [PlanCandidate(one) for one in (Single(optimizer=SGD), Hogwild(2, optimizer=SGD))]
    said: list[str] = []
    found = halving.measure("digits", asked, PlanRequest(seconds=2.0), said.append)
    turns = [f"rung 1 of 1, run {at} of 4: {one}" for at, one in enumerate((*asked, *reversed(asked)), 1)]
    # the second turn ends with the seconds, which a busy machine has spent by then
    assert len(said) >= len(asked)
    assert [one.rpartition(", ")[0] for one in said] == turns[: len(said)]
    assert found.failed == {}
    rates = [terms.samples_per_second for terms in found.terms.values()]
    assert rates == sorted(rates, reverse=True)
    assert {*found.terms} == {str(one) for one in asked}


def test_a_quiet_core_computes_most_of_the_time() -> None:
    assert 1.0 <= halving.busy() < 1000.0


def test_a_peer_that_fails_since_nobody_is_there_any_more_tells_nobody() -> None:
    """So that an interrupted measurement says one line."""
    with Peers() as peers:
        left, kept = (peers.start("replica 1", 1, fails_when_left) for _ in (0, 1))
        left.connection.close()
        kept.say()
        for peer in (left, kept):
            peer.process.join(SECONDS)
    assert (left.process.exitcode, kept.process.exitcode) == (0, 1)


def fails_when_left(connection: Connection) -> None:
    """Fail as somebody says so, or is gone."""
    with contextlib.suppress(EOFError):
        connection.recv_bytes()
    raise OSError("no such memory")


LINE = "distbelief: interrupted: an unfinished measurement is not kept; --seconds N makes it shorter"
PROGRESS = "[\u2800-\u28ff] planning "


def test_a_plan_that_is_interrupted_says_one_line_and_leaves_nothing(tmp_path: Path) -> None:
    """By Ctrl-C at a terminal, which all its processes are sent, while a candidate with a shard is run."""
    main, side = pty.openpty()
    environment = {**os.environ, "XDG_CACHE_HOME": str(tmp_path), "TMPDIR": str(tmp_path), "COLUMNS": "200"}
    command = [sys.executable, "-m", "distbelief", "plan", "digits", "--strategies", "downpour"]
    process = subprocess.Popen(command, stdout=side, stderr=side, env=environment, start_new_session=True)
    os.close(side)
    shown, sent = "", False
    with contextlib.suppress(OSError):  # which the end of the last process is
        while more := os.read(main, 4096).decode(errors="replace"):
            shown += more
            if not sent and "run 1 of" in shown:
                os.killpg(process.pid, signal.SIGINT)
                sent = True
    os.close(main)
    assert process.wait(SECONDS) == 130
    assert sent
    assert shown.rfind("\x1b[?25h") > shown.rfind("\x1b[?25l")  # the cursor is there again
    lines = re.split(r"[\r\n]+", re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", shown))
    [line] = [line for line in lines if line and not re.match(PROGRESS, line)]
    assert line == LINE
    assert [*tmp_path.rglob("*distbelief*")] == []
