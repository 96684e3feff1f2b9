"""A user's own process takes part in a job by its ticket, whoever has started it, and outlives that part."""

import multiprocessing
import os
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import jobs
import pytest
from patience import SECONDS, SLOWNESS

import distbelief as db
from distbelief.core import records
from distbelief.core.records import Record
from distbelief.errors import UsageError
from distbelief.places.processes.local import Local
from distbelief.strategies import Allreduce, Downpour, Strategy, Synchronous

HERE = Local(listen="127.0.0.1")
BEGIN = """
import os, signal, sys, threading, time, torch, distbelief as db
def loop(replica):
    model = torch.nn.Linear(4, 2)
    optimizer = replica.optimizer(model)
    for number, (x, y) in enumerate(replica.batches([(torch.ones(4), 0) for _ in range(640)])):
        optimizer.zero_grad(); torch.nn.functional.cross_entropy(model(x), y).backward()
        yield number, optimizer
        optimizer.step()
def wait(path):
    while not os.path.exists(path): time.sleep(0.01)
"""
LAUNCHED = BEGIN + "for _ in loop(db.join()): pass\n"
FIRST_STEP_SECONDS = 3.0
"""Limit from `join()` to the end of the first step, with torch imported."""


class Processes:
    """Users' own processes beside a job."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.started: list[subprocess.Popen[str]] = []

    def python(self, source: str, *how: str, **environment: str) -> None:
        """Start a script of this source, by Python or a module of its."""
        script = self.folder / f"own{len(self.started)}.py"
        script.write_text(BEGIN + source)
        one = subprocess.Popen(
            [sys.executable, *how, str(script)], cwd=self.folder, text=True, stdout=subprocess.PIPE,
            stderr=subprocess.PIPE, env={**os.environ, **environment},
        )  # fmt: skip
        self.started.append(one)

    def said(self) -> str:
        """Return what the last has printed, which has ended well."""
        said, errors = self.started[-1].communicate(timeout=SECONDS)
        assert self.started[-1].returncode == 0, said + errors
        return said


@pytest.fixture
def processes(tmp_path: Path) -> Iterator[Processes]:
    processes = Processes(tmp_path)
    yield processes
    for one in processes.started:
        one.kill()
        one.communicate()


def launch(folder: Path, strategy: Strategy, source: str = LAUNCHED, place: Local = HERE) -> None:
    script = folder.with_suffix(".py")
    script.write_text(source)
    place.launch(jobs.job(folder, strategy, epochs=jobs.MANY), [str(script)])


TWO_JOBS = """
for run in ("one", "two"):
    wait(run + "/ticket.json")
    began = time.process_time()
    replica = db.join(ticket=run + "/ticket.json")
    for number, _ in loop(replica):
        if number == 1: print(run, replica.role, db.join() is replica, time.process_time() - began)
    print("over", os.environ.get("DISTBELIEF_ROLE"), signal.getsignal(signal.SIGINT) is signal.default_int_handler)
for ticket in ("one/ticket.json", "copy.json", "spoilt.json"):
    try: db.join(ticket=ticket)
    except db.DistbeliefError as error: print(type(error).__name__, error)
"""


def test_a_process_outlives_a_job_and_joins_another(tmp_path: Path, watch: jobs.Watch, processes: Processes) -> None:
    """Its first step comes soon; tickets that are spoilt, or of a job that is over, are refused in a sentence."""

    def act(record: Record) -> None:
        if isinstance(record, records.Stepped) and record.role == "replica 1" and record.steps:
            steps.append(record)
            if len(steps) == 3:
                if not copy.exists():
                    shutil.copy(tmp_path / "one" / "ticket.json", copy)
                watch.interrupt()

    steps, copy = list[Record](), tmp_path / "copy.json"
    (tmp_path / "spoilt.json").write_text('{"job": 3}')
    watch.act = act
    processes.python(TWO_JOBS)
    for run in ("one", "two"):
        watch.interrupted = False
        steps.clear()
        launch(tmp_path / run, Downpour(1, 1))
    one, over, two, again, *refused = processes.said().splitlines()
    assert [line.split()[:4] for line in (one, two)] == [[run, "replica", "1", "True"] for run in ("one", "two")]
    assert max(float(line.split()[4]) for line in (one, two)) < FIRST_STEP_SECONDS * SLOWNESS
    assert over == again == "over None True"
    says = ["UsageError no ticket can be read", "JobFailed the job does not answer: ", "UsageError spoilt.json is"]
    assert [line[: len(words)] for line, words in zip(refused, says, strict=True)] == says
    assert [one.died for one in watch.of(records.Gone) if one.role == "replica 1"] == [False, False]


CELLS = """
cells = ["replica = db.join(ticket='run/ticket.json')", '''
child = os.fork()
if not child:
    try: os.kill(os.getpid(), signal.SIGINT); time.sleep(60)
    except KeyboardInterrupt: pass
    try: db.join()
    except db.UsageError: os._exit(7)
print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
for number, optimizer in loop(replica):
    if number == 2: INTERRUPT
''', "print(1 + 1, os.environ.get('DISTBELIEF_ROLE'))", '''
replica = db.join(ticket='run/ticket.json')
first, again = replica, db.join(ticket='run/ticket.json')
print(first.role, again.role)
for _ in loop(again): pass
''', "print('over')"]
wait("run/ticket.json")
kept = []
for cell in cells:  # as the kernel of a notebook runs them, which keeps what they have raised
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try: exec(compile(cell, "cell", "exec"), globals())
    except BaseException as error: kept.append(error); print(type(error).__name__)
    signal.signal(signal.SIGINT, before)
"""
AT_ONCE = "os.kill(os.getpid(), signal.SIGINT); time.sleep(60)"
AMID_A_ROUND = """
        open("waits", "w")
        threading.Timer(0.5, lambda: [os.kill(os.getpid(), signal.SIGINT), open("goes on", "w")]).start()
"""
"""The other replica does not come to the round until then."""
WAITS = (
    BEGIN
    + """
for number, _ in loop(db.join()):
    if os.path.exists("waits"): wait("goes on")
"""
)


@pytest.mark.parametrize(
    ("strategy", "interrupt", "source"),
    [(Downpour(1, 1), AT_ONCE, LAUNCHED), (Synchronous(1, 1), AMID_A_ROUND, WAITS)],
    ids=["computing", "waiting"],
)
def test_a_cell_that_is_interrupted_leaves_the_job(
    tmp_path: Path, watch: jobs.Watch, processes: Processes, strategy: Strategy, interrupt: str, source: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    """The next cell joins again, leaves for another part, and takes that to the end of the job."""

    def act(record: Record) -> None:
        if isinstance(record, records.Gone) and record.role == "replica 1":
            gone.append(record.died)
        elif isinstance(record, records.Stepped) and record.role == "replica 3" and record.steps > 0:
            watch.interrupt()

    monkeypatch.chdir(tmp_path)
    gone: list[bool] = []
    watch.act = act
    processes.python(CELLS.replace("INTERRUPT", interrupt))
    launch(tmp_path / "run", strategy, source)
    assert processes.said().splitlines() == ["7", "KeyboardInterrupt", "2 None", "replica 2 replica 3", "over"]
    assert gone == [False]


def test_a_program_that_a_replica_starts_joins_only_by_a_ticket_that_it_names(monkeypatch: pytest.MonkeyPatch) -> None:
    """A worker of its script, which runs the same lines, does not join at all."""
    monkeypatch.setenv("DISTBELIEF_ROLE", "replica 1")
    monkeypatch.setenv("DISTBELIEF_TICKET", "nowhere")
    with pytest.raises(UsageError, match="replica 1 has joined already"):
        db.join()
    with pytest.raises(UsageError, match="no ticket can be read from elsewhere"):
        db.join(ticket="elsewhere")
    monkeypatch.setattr(multiprocessing, "parent_process", multiprocessing.current_process)
    with pytest.raises(UsageError, match="replica 1 has joined already"):
        db.join(ticket="elsewhere")


THREE_PARTS = """
import gc, json
wait("run/ticket.json")
secret, counts = json.load(open("run/ticket.json"))["secret"].encode(), []
for part in range(3):
    replica = db.join(ticket="run/ticket.json")
    for number, _ in loop(replica):
        if number == 2: break
    files = [open(f"/proc/{os.getpid()}/{name}", "rb").read() for name in ("cmdline", "environ")]
    replica.leave()
    gc.collect()
    counts.append((threading.active_count(), len(os.listdir("/proc/self/fd"))))
    assert len(secret) > 20 and not any(secret in text for text in files)
print(counts[1] == counts[2], counts)
open("three", "w")
"""


def test_parts_that_are_over_leave_no_thread_and_no_file_open(
    tmp_path: Path, watch: jobs.Watch, processes: Processes
) -> None:
    """Nor was the ticket's secret on the command line or in the environment."""

    def act(_: Record) -> None:
        if (tmp_path / "three").exists():
            watch.interrupt()

    watch.act = act
    processes.python(THREE_PARTS)
    launch(tmp_path / "run", Allreduce(1), place=Local("tcp", listen="127.0.0.1", tls=True))
    assert processes.said().startswith("True")


@pytest.mark.long
def test_the_ranks_of_torchrun_join_by_the_ticket_that_the_environment_names(
    tmp_path: Path, watch: jobs.Watch, processes: Processes
) -> None:
    def act(record: Record) -> None:
        if isinstance(record, records.Stepped) and record.steps > 0:
            worked.add(record.role)
        if {"replica 1", "replica 2"} <= worked:
            watch.interrupt()

    def start() -> None:
        by_torchrun = ("-m", "torch.distributed.run", "--nproc-per-node", "2")
        processes.python("for _ in loop(db.join()): pass", *by_torchrun, DISTBELIEF_TICKET="run/ticket.json")

    worked: set[str] = set()
    watch.act = act
    threading.Timer(0.0, start).start()
    launch(tmp_path / "run", Downpour(1, 1))
    processes.said()


@pytest.mark.long
def test_a_process_outlives_a_job_that_is_killed(tmp_path: Path, processes: Processes) -> None:
    (tmp_path / "job.py").write_text(LAUNCHED)
    words = ["launch", "downpour", "--replicas", "1", "--restarts", "0", "--listen", "127.0.0.1", "--epochs", "999999"]
    job = subprocess.Popen([sys.executable, "-m", "distbelief", *words, "--out", "run", "job.py"], cwd=tmp_path)
    try:
        processes.python(
            "wait('run/ticket.json')\n"
            "try:\n    for number, _ in loop(db.join(ticket='run/ticket.json')): number == 3 and print(3, flush=True)\n"
            "except db.DistbeliefError as error: print(type(error).__name__, error)\n"
        )
        assert processes.started[-1].stdout
        assert processes.started[-1].stdout.readline() == "3\n"
    finally:
        job.send_signal(signal.SIGKILL)
        job.wait()
    assert "JobFailed" in processes.said()
