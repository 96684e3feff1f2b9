"""Plans that train for real: what was predicted beside what was measured, and cores that compute at the same time; and
those that are interrupted.
"""

from __future__ import annotations

import contextlib
import itertools
import multiprocessing
import os
import pty
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from patience import SECONDS
from torch import nn

from distbelief.core.optimizer import Optimizer, optim
from distbelief.lab.plan import lockstep, together, trials, trips
from distbelief.lab.plan.candidates import Machines, PlanCandidate
from distbelief.lab.plan.pricing import PricedCluster, Pricing
from distbelief.lab.plan.shards import GRADIENT, DirectTrips, plan_of, update_when_told
from distbelief.places.processes.peers import Peers
from distbelief.places.simulated.handling import Handling
from distbelief.strategies import Downpour, Hogwild, Single, Synchronous
from distbelief.tasks import Task, TensorData, resolve
from distbelief.transport.virtual import NetworkModel


def test_a_candidate_is_trained_with_and_tells_what_its_steps_were_made_of() -> None:
    one = PlanCandidate(Downpour(replicas=1, shards=1, optimizer=optim("sgd")))
    found = trials.run("digits", one, 64, 2.0, seconds=2.0)
    assert min(found.compute, found.wait, found.communicate, found.samples_per_second) > 0
    assert found.waits_for in ("shard", "coordinator")  # whichever it hears from last on a busy machine
    assert found.step == pytest.approx(64 / found.samples_per_second, rel=0.7)


def test_a_moment_of_a_job_of_a_split_model_ends_when_it_is_over_and_tells_its_parts() -> None:
    """Of some thousand epochs, as it is told that they are short."""
    one = PlanCandidate(Single(partitions=2, optimizer=optim("sgd")))
    found = trials.run("digits", one, 16, 1e-4, seconds=0.2, whole=False)
    assert min(found.compute, found.step, found.samples_per_second) > 0


def test_a_real_job_of_each_kind_says_what_it_costs_to_wait_for_each_other() -> None:
    """Its price is then that of the steps which were seen, so that nothing is left of it but what was tried once."""
    task, seen = resolve("digits"), list[str]()
    usual = Handling()
    cluster = PricedCluster(Machines(1, 2), NetworkModel(), 1e-3, usual, usual)
    asked = [PlanCandidate(one) for one in (Hogwild(2), Synchronous(2, shards=1), Synchronous(3, shards=1))]
    met = lockstep.measure("digits", asked, Pricing(task, 64), cluster, 64, 1500, None, seen.append)
    assert met.failed == {}
    assert [*met.found] == [asked[1].kind]
    assert seen == ["steps of synchronous, 2 replicas, 1 shard"]
    assert met.found[asked[1].kind].gradient > 0
    assert lockstep.LEAST <= met.found[asked[1].kind].messages <= lockstep.MOST


def test_steps_are_timed_in_processes_of_a_job_alone_and_together() -> None:
    found = together.measure("digits", None, 64, 2, optim("sgd"))
    assert found is not None
    assert found.step > found.update > 0
    assert 0.0 < found.speed <= 1.0
    alone = together.measure("digits", None, 64, 1, optim("sgd"))
    assert alone is not None
    assert alone.speed == 1.0


def test_a_model_that_cannot_be_stepped_has_no_steps(capfd: pytest.CaptureFixture[str]) -> None:
    assert together.measure("tests.made:nowhere", None, 64, 2, optim("sgd")) is None
    capfd.readouterr()


def test_a_trip_to_a_real_shard_costs_messages_and_memory() -> None:
    found = trips.measure(resolve("digits"), 64, 0.5)
    assert 0 <= found.message < 0.1
    assert found.memory > 1e6
    assert multiprocessing.active_children() == []


def test_an_update_in_memory_costs_its_turns_and_its_vectors() -> None:
    """A turn takes the lock, and plays the machine; a vector of some MB is not touched in no time."""
    found = trips.measure_direct(Task(model=lambda: nn.Linear(1024, 1024), train=wide), 8, 0.5, optim("adam"))
    for one in found:
        assert 1e-6 < one.message < 0.1
        assert 1e8 < one.memory < 1e12
    assert multiprocessing.active_children() == []


def test_what_a_trip_costs_is_not_what_computing_beside_it_takes(monkeypatch: pytest.MonkeyPatch) -> None:
    """The gradients before trips take 40 ms longer than those before none, which would be 10 for each message."""
    computed = itertools.count()

    def compute(*_: object) -> None:
        end = time.thread_time() + 0.04 * (next(computed) % 2)
        while time.thread_time() < end:
            pass

    monkeypatch.setattr(trips.Trainer, "compute", compute)
    assert all(one.message < 5e-3 for one in trips.measure_direct(resolve("digits"), 64, 0.1))


def wide() -> TensorData:
    """Data of a layer of 1024 units."""
    return TensorData(torch.zeros(64, 1024), torch.zeros(64, dtype=torch.int64))


def test_trips_on_the_direct_path_make_the_updates_that_they_are_timed_for() -> None:
    """Of this process, and of the other one: every push is in the parameters that the last trip has fetched."""
    with Peers() as peers, contextlib.closing(DirectTrips(peers, 4096, Optimizer("sgd", 0.5))) as ours:
        assert ours.trips(3) > 0
        ours.have_updated()
        ours.trips(1)
        assert ours.parameters.view(torch.float32).tolist() == pytest.approx([-0.5 * GRADIENT * 5] * 1024)


def test_a_peer_that_fails_since_nobody_is_there_any_more_tells_nobody() -> None:
    """So that an interrupted plan says one line."""
    with Peers() as peers:
        left, kept = (
            peers.start("replica 1", 1, update_when_told, plan_of(64, 1), os.getpid(), 1 << 20) for _ in (0, 1)
        )
        left.connection.close()
        for peer in (left, kept):
            peer.process.join(SECONDS)
    assert (left.process.exitcode, kept.process.exitcode) == (0, 1)


PART = "interrupted: a part of a profile says nothing, and nothing is kept; --seconds N makes it shorter"
TRIAL = "replicas(, 1 shard)?: its trial was interrupted; the plan ends, and keeps nothing of its trials"
PROGRESS = "[\u2800-\u28ff] (planning|what) "
SHORT = ("--seconds", "0.1", "--strategies")


@pytest.mark.parametrize(
    ("words", "doing"),
    [
        (["plan", "digits"], "digits: round "),
        pytest.param(["plan", "digits", *SHORT, "hogwild", "--run", "1"], "training with", marks=pytest.mark.long),
    ],
)
def test_who_is_interrupted_says_one_line_and_leaves_nothing(words: list[str], doing: str, tmp_path: Path) -> None:
    """By Ctrl-C at a terminal, which all its processes are sent, while it says that it is doing this."""
    main, side = pty.openpty()
    environment = {**os.environ, "XDG_CACHE_HOME": str(tmp_path), "TMPDIR": str(tmp_path), "COLUMNS": "200"}
    command = [sys.executable, "-m", "distbelief", *words]
    process = subprocess.Popen(command, stdout=side, stderr=side, env=environment, start_new_session=True)
    os.close(side)
    shown, sent = "", False
    with contextlib.suppress(OSError):  # which the end of the last process is
        while more := os.read(main, 4096).decode(errors="replace"):
            shown += more
            if not sent and doing in shown:
                os.killpg(process.pid, signal.SIGINT)
                sent = True
    os.close(main)
    assert process.wait(SECONDS) == 130
    assert sent
    assert shown.rfind("\x1b[?25h") > shown.rfind("\x1b[?25l")  # the cursor is there again
    lines = re.split(r"[\r\n]+", re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", shown))
    [line] = [line for line in lines if line and not re.match(PROGRESS, line)]
    assert re.fullmatch(f"distbelief: ({PART}|.*{TRIAL})", line)
    assert [*tmp_path.rglob("*distbelief*")] == []
