"""Who dies, and what becomes of the job: real processes, killed at chosen and at random moments."""

import contextlib
import multiprocessing.forkserver
import os
import re
import select
import signal
import subprocess
import sys
import tempfile
import threading
from pathlib import Path
from time import monotonic

import jobs
import pytest
from patience import SECONDS

from distbelief.core import records
from distbelief.core.optimizer import optim
from distbelief.core.records import Cause, Record
from distbelief.errors import JobFailed
from distbelief.places.place import Deadlines
from distbelief.places.processes import forkserver, local, running
from distbelief.places.processes.processes import Child
from distbelief.record import limits
from distbelief.strategies import Downpour, Single

SIGKILL = "its process was killed by SIGKILL"
EPOCHS = 30
"""So many that the job does not end before the supervisor has heard of its beginning, however busy the machine is."""


@pytest.fixture
def pipe(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """On which a replica of `jobs:stubborn` waits."""
    path = tmp_path / "pipe"
    os.mkfifo(path)
    monkeypatch.setenv("PIPE", str(path))
    return path


@pytest.mark.parametrize(
    ("options", "kind", "after", "victim"),
    [({}, records.Joined, 0, 1), ({"prefetch": 1, "push_every": 3}, records.Stepped, 4, 0)],
    ids=["plain", "prefetch"],
)
def test_the_job_ends_without_a_killed_replica_and_does_its_work(
    tmp_path: Path, watch: jobs.Watch, options: dict[str, int], kind: type[Record], after: int, victim: int
) -> None:
    watch.once(kind, lambda: jobs.kill(f"replica {victim}"), after)
    strategy = Downpour(replicas=3, restarts=0, optimizer=optim("sgd", lr=1.0), **options)
    result = jobs.run(tmp_path, strategy, task="jobs:once", epochs=EPOCHS, evaluate_every=0)
    assert min(jobs.times_trained(tmp_path)) >= EPOCHS, "a sample was lost with the replica"
    gone = [record for record in watch.of(records.Gone) if record.died]
    assert [(record.role, record.reason) for record in gone] == [(f"replica {victim}", SIGKILL)]
    assert result["outcome"] == "done"
    assert result["epochs"] == EPOCHS
    assert result["samples"] == EPOCHS * jobs.SAMPLES
    assert all(record.samples >= EPOCHS * jobs.SAMPLES for record in watch.accounts())
    assert sum(one["lost"] for one in result["per_replica"]) == gone[0].lost == result["per_replica"][victim]["lost"]


def test_a_death_by_memory_is_called_that_and_one_by_another_hand_is_not(
    tmp_path: Path, watch: jobs.Watch, monkeypatch: pytest.MonkeyPatch
) -> None:
    kills = 3
    monkeypatch.setattr(limits, "memory_kills", lambda: kills)

    def act(record: Record) -> None:
        nonlocal kills
        if isinstance(record, records.Joined) and record.role == "replica 1":
            kills += not watch.of(records.Gone)
            jobs.kill("replica 1")
        elif isinstance(record, records.Stepped) and len(watch.of(records.Gone)) == 2:
            watch.interrupt()  # the other goes on

    watch.act = act
    jobs.run(tmp_path, Downpour(replicas=2, restarts=1), epochs=jobs.MANY, evaluate_every=0)
    first, second = (record.reason for record in watch.of(records.Gone) if record.died)
    assert first.startswith(f"{SIGKILL}, because memory ran out (oom_kill): have fewer --replicas")
    assert second == SIGKILL


def test_a_killed_single_process_fails_the_job_with_the_remedy(tmp_path: Path, watch: jobs.Watch) -> None:
    watch.once(records.Checkpointed, lambda: jobs.kill("single"))
    told = r"^single is gone: its process was killed by SIGKILL; .*checkpoint \d+ with --resume"
    with pytest.raises(JobFailed, match=told):
        jobs.run(tmp_path, Single(), epochs=jobs.MANY, checkpoint_every=1)
    assert [record.cause for record in watch.of(records.Finished)] == [Cause.PROCESS_DIED]


@pytest.mark.parametrize(
    ("role", "transport"), [("coordinator", "shared"), ("shard 0", "tcp"), ("replica 1", "shared")]
)
def test_a_process_that_dies_before_the_job_begins(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, role: str, transport: str
) -> None:
    listened: list[str] = []
    take = running.Running._take

    def kill_at_once(self: running.Running, child: Child, word: object) -> None:
        if not listened:
            listened.append(child.role)
            jobs.kill(role)
        take(self, child, word)

    monkeypatch.setattr(running.Running, "_take", kill_at_once)
    strategy, on = Downpour(replicas=2), local.Local(transport=transport)
    assert jobs.run(tmp_path, strategy, on, epochs=1, evaluate_every=0)["samples"] == jobs.SAMPLES


def test_an_evaluator_that_ends_by_itself_before_it_has_come_is_not_waited_for(
    tmp_path: Path, watch: jobs.Watch
) -> None:
    """With status 0, as if it were done."""
    result = jobs.run(tmp_path, Downpour(restarts=1), task="jobs:unmeasured", epochs=2)
    assert (result["outcome"], result["samples"], result["test_accuracy"]) == ("done", 2 * jobs.SAMPLES, None)
    gone = [
        one.text for one in watch.of(records.Note) if "evaluator is gone (its process ended with status 0)" in one.text
    ]
    assert len(gone) == 2
    assert "goes on without evaluations" in gone[-1]


def test_the_supervisor_says_for_whom_it_waits(
    tmp_path: Path, watch: jobs.Watch, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(running, "DEADLINES", Deadlines(silence=0.3))
    monkeypatch.setattr(running, "TICK", 0.05)
    stopped: list[int] = []

    def act(record: records.Record) -> None:
        if isinstance(record, records.Started):
            stopped.append(jobs.kill("shard 0", signal.SIGSTOP))
        if isinstance(record, records.Note) and "nothing was heard" in record.text:
            jobs.kill("shard 0", signal.SIGCONT)

    watch.act = act
    assert jobs.run(tmp_path, epochs=2)["outcome"] == "done"
    told = "".join(record.text for record in watch.of(records.Note))
    assert f"shard 0 is stopped, `kill -CONT {stopped[0]}` lets it go on" in told


def test_an_error_of_the_supervisor_itself_leaves_nobody_behind(tmp_path: Path, watch: jobs.Watch) -> None:
    def fail() -> None:
        raise ZeroDivisionError("in the supervisor")

    watch.once(records.EpochDone, fail)
    with pytest.raises(ZeroDivisionError):
        jobs.run(tmp_path, epochs=jobs.MANY)


def test_a_killed_forkserver_is_named_and_nobody_outlives_it(
    pipe: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also not in an endless step. The coordinator was blamed, and another forkserver left its socket behind."""
    (tmp_path / "temporary").mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "temporary"))
    monkeypatch.setitem(multiprocessing.current_process()._config, "tempdir", None)  # type: ignore[attr-defined]
    descriptors, over = list[int](), threading.Event()

    def strike() -> None:
        with pipe.open("w"):  # opens when a replica opens its end, and holds it up until this one is closed
            descriptors.extend(os.pidfd_open(child.pid) for child in multiprocessing.active_children() if child.pid)
            os.kill(forkserver.pid(), signal.SIGKILL)
            over.wait(SECONDS)

    striker = threading.Thread(target=strike, daemon=True)
    striker.start()
    told = r"^the forkserver, which starts .* is gone: its process was killed by SIGKILL; "
    with pytest.raises(JobFailed, match=told):
        jobs.run(tmp_path / "run", Downpour(replicas=2), task="jobs:stubborn", epochs=jobs.MANY)
    all_end(descriptors)
    over.set()
    striker.join(SECONDS)
    assert not list((tmp_path / "temporary").iterdir())
    assert jobs.run(tmp_path / "next", epochs=1)["outcome"] == "done"


@pytest.mark.parametrize("gone", [False, True])
def test_a_forkserver_whose_parent_is_gone_as_it_begins_ends_at_once(gone: bool) -> None:
    """It imported torch first, and outlived by seconds a command that was ended early."""
    environment = {**os.environ, "DISTBELIEF_STARTED_BY": str(os.getppid() if gone else os.getpid())}
    words = [sys.executable, "-c", "import distbelief.places.processes.ends_with_parent"]
    assert subprocess.run(words, env=environment, check=False).returncode == (-signal.SIGKILL if gone else 0)


def all_end(descriptors: list[int]) -> None:
    """Of processes."""
    deadline = monotonic() + SECONDS
    for descriptor in descriptors:
        poll = select.poll()
        poll.register(descriptor, select.POLLIN)
        assert poll.poll(max(0.0, deadline - monotonic()) * 1000), "a process is left"
        os.close(descriptor)


SUPERVISOR = """
import multiprocessing, sys
import distbelief as db
from distbelief.places.attempt import Attempt
from distbelief.core import records
record, told = Attempt.record, []
def tell(self, moment, role, what):
    record(self, moment, role, what)
    if isinstance(what, (records.Stepped, records.Tested)) and not told:
        told.append(True)
        print(*(child.pid for child in multiprocessing.active_children()), flush=True)
Attempt.record = tell
db.run(db.Job(sys.argv[3], db.Downpour(), epochs=100_000, out=sys.argv[1]), on=db.Local(transport=sys.argv[2]))
"""


@pytest.mark.parametrize(
    ("stuck", "transport"),
    [
        pytest.param(False, "tcp", id="at work", marks=pytest.mark.long),
        pytest.param(True, "shared", id="in an endless step"),
    ],
)
def test_nobody_outlives_a_killed_supervisor(pipe: Path, tmp_path: Path, transport: str, stuck: bool) -> None:
    environment = jobs.environment(TMPDIR=str(tmp_path / ("long" * 40)))
    (tmp_path / ("long" * 40)).mkdir()
    words = [str(tmp_path / "run"), transport, "jobs:stubborn" if stuck else "jobs:tiny"]
    with (
        subprocess.Popen(
            [sys.executable, "-c", SUPERVISOR, *words], stdout=subprocess.PIPE, text=True, env=environment
        ) as process,
        pipe.open("w")
        if stuck
        else contextlib.nullcontext(),  # open once a replica waits on it, and then until the end
    ):
        children = [int(word) for word in process.stdout.readline().split()]
        assert len(children) >= 5
        descriptors = [os.pidfd_open(pid) for pid in children]
        process.kill()
        all_end(descriptors)
    assert not list((tmp_path / ("long" * 40)).iterdir())
    assert re.search(rb'"event":"Started"', (tmp_path / "run" / "metrics.jsonl").read_bytes())
