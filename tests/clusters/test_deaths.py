"""What survives what, on hosts: the table of docs/clusters.md."""

from __future__ import annotations

import re
import signal
from collections.abc import Callable
from pathlib import Path

import jobs
import pytest
from commands import Command, first_process, process, roles_of
from engines import ENGINES, Engine, Srun
from hosts import Hosts

pytestmark = pytest.mark.timeout(480)  # a test, and END_SECONDS for what it leaves
EPOCHS = 100
SMALL = ("--batch-size", str(jobs.BATCH), "--pad", "10ms", "--evaluate-every", "0", "--checkpoint-every", "20")
"""Steps so slow that there is time for what happens."""
DOWNPOUR = ("jobs:tiny", "downpour", *SMALL, "--replicas", "4", "--shards", "2", "--standby", "1")
AGENT = "distbelief: agent"
ON_N1 = {"replica 1", "shard 1"}
Start = Callable[..., Command]


ACTS: dict[str, tuple[Callable[[Hosts, Engine], None], set[str]]] = {
    "kill a role": (lambda hosts, _: hosts.kill([roles_of(hosts, "n1")["replica 1"]]), {"replica 1"}),
    "kill all roles": (lambda hosts, _: hosts.kill(roles_of(hosts, "n1").values()), ON_N1),
    "kill the agent": (lambda hosts, _: hosts.kill([process(hosts, "n1", AGENT)]), ON_N1),
    "kill the daemon": (lambda hosts, engine: hosts.kill(engine.daemon(hosts, "n1")), ON_N1),
    "cut the line": (lambda hosts, _: hosts.cut("n1"), ON_N1),
}
"""What happens on a host, and who is gone after that."""
GO_ON = ("ssh", "srun", "salloc", "ray")
"""The engines on which all others go on."""


@pytest.mark.parametrize(
    ("engine", "act"),
    [(engine, act) for engine in ENGINES for act in ACTS if engine in GO_ON or "role" in act],
    indirect=["engine"],
)
def test_the_others_go_on(start: Start, hosts: Hosts, engine: Engine, act: str) -> None:
    """No minibatch is lost; what is on a host that is gone ends there too, also while its line is cut."""
    does, gone = ACTS[act]
    if act == "kill the daemon" and not engine.carries:
        gone = set()
    job = start(*DOWNPOUR, "--epochs", str(EPOCHS))
    job.until_all_work()
    does(hosts, engine)
    result = job.result()
    assert (result["outcome"], result["samples"]) == ("done", EPOCHS * jobs.SAMPLES), job.errors()
    assert job.died() == gone
    status = job.wait()
    assert set(status) == {0} or "role" not in act, job.errors()
    hosts.wait_until_empty(100.0, but=engine.daemons)


@pytest.mark.parametrize("engine", ENGINES, indirect=True)
def test_a_line_that_is_cut_for_5_s_costs_time_only(start: Start, hosts: Hosts) -> None:
    job = start(*DOWNPOUR, "--epochs", str(EPOCHS))
    job.until_all_work()
    hosts.cut("n1")
    job.is_silent(5.0)
    hosts.cut("n1", down=False)
    result = job.result()
    assert (result["outcome"], result["samples"]) == ("done", EPOCHS * jobs.SAMPLES), job.errors()
    assert job.died() == set()


@pytest.mark.parametrize("engine", ["ssh", "salloc", "srun", "ray", "mpirun"], indirect=True)
def test_a_host_whose_agent_is_told_to_go_leaves(start: Start, hosts: Hosts, engine: Engine) -> None:
    """Its replica is no death, its shard is its standby, and what the engine has started there ends well."""
    job = start(*DOWNPOUR, "--epochs", str(EPOCHS), "--leave-within", "60")
    job.until_all_work()
    hosts.kill([process(hosts, "n1", AGENT)], signal.SIGTERM)
    result = job.result()
    assert (result["outcome"], result["samples"]) == ("done", EPOCHS * jobs.SAMPLES), job.errors()
    assert job.died() == {"shard 1"}
    left = [one for one in job.records if one.get("event") == "Gone" and one["role"] == "replica 1"]
    assert [one["died"] for one in left] == [False]
    assert set(job.wait()) == {0}, job.errors()
    hosts.wait_until_empty(20.0, but=engine.daemons)


def begin(start: Start, run: Path, *words: str) -> Command:
    """Start a job with a run folder, and wait until there is a checkpoint to go on from."""
    job = start(*DOWNPOUR, "--epochs", str(EPOCHS), "--out", str(run), *words)
    job.until_all_work()
    job.until(lambda record: record.get("event") == "Checkpointed" and not record["error"])
    return job


def goes_on(start: Start, run: Path) -> None:
    """What is left of a job goes on, to its end."""
    again = start(*DOWNPOUR, "--epochs", str(EPOCHS), "--out", str(run), "--resume")
    result = again.result()
    assert (result["outcome"], result["samples"]) == ("done", EPOCHS * jobs.SAMPLES), again.errors()


@pytest.mark.parametrize("engine", ["ssh", "salloc", "ray", "srun", "mpirun"], indirect=True)
def test_after_kill_9_of_the_first_process_nothing_is_left_and_the_job_can_go_on(
    start: Start, hosts: Hosts, engine: Engine, tmp_path: Path
) -> None:
    begin(start, tmp_path / "run")
    hosts.kill([first_process(hosts, engine.first)])
    hosts.wait_until_empty(60.0)
    goes_on(start, tmp_path / "run")


@pytest.mark.parametrize("act", ["kill the agent", "kill the daemon"])
@pytest.mark.parametrize("engine", ["mpirun"], indirect=True)
def test_mpirun_ends_all_when_a_host_is_gone(
    start: Start, hosts: Hosts, engine: Engine, tmp_path: Path, act: str
) -> None:
    does, _ = ACTS[act]
    job = begin(start, tmp_path / "run")
    does(hosts, engine)
    assert job.wait() != [0]
    hosts.wait_until_empty(60.0)
    goes_on(start, tmp_path / "run")


@pytest.mark.parametrize("of", ["n1", "n0"])
@pytest.mark.parametrize("engine", ["torchrun"], indirect=True)
def test_torchrun_starts_all_again(start: Start, hosts: Hosts, engine: Engine, tmp_path: Path, of: str) -> None:
    """The job goes on from its newest checkpoint by itself, whichever process was killed."""
    job = begin(start, tmp_path / "run")
    hosts.kill([process(hosts, of, AGENT) if of == "n1" else first_process(hosts, engine.first)])
    result = job.until(lambda record: record.get("outcome") == "done" and "per_replica" in record)
    assert result["samples"] == EPOCHS * jobs.SAMPLES
    assert [one["event"] for one in job.records if one.get("event") == "Started"] == ["Started"] * 2
    assert job.wait() == [0] * 4


@pytest.mark.parametrize(
    ("engine", "act"),
    [("torchrun", "kill the daemon"), ("torchrun", "cut the line"), ("mpirun", "cut the line")],
    indirect=["engine"],
)
def test_the_others_go_on_and_the_engine_waits_at_its_end(start: Start, hosts: Hosts, engine: Engine, act: str) -> None:
    """For the host that it has lost: torchrun for minutes, mpirun until that is reached again."""
    does, gone = ACTS[act]
    job = start(*DOWNPOUR, "--epochs", str(EPOCHS))
    job.until_all_work()
    does(hosts, engine)
    result = job.result()
    assert (result["outcome"], result["samples"]) == ("done", EPOCHS * jobs.SAMPLES), job.errors()
    assert job.died() == (set() if act == "kill the daemon" else gone)
    hosts.cut("n1", down=False)
    if not engine.daemon(hosts, engine.first):  # torchrun's own processes, which end with the test
        job.wait()


@pytest.mark.parametrize("engine", ["torchrun"], indirect=True)
def test_a_host_whose_torchrun_is_told_to_go_leaves(start: Start, hosts: Hosts, engine: Engine) -> None:
    """The others are not started again; at the end their torchrun waits for it, as for a host that is lost."""
    job = start(*DOWNPOUR, "--epochs", str(EPOCHS), "--leave-within", "25")
    job.until_all_work()
    hosts.kill(engine.daemon(hosts, "n1"), signal.SIGTERM)
    result = job.result()
    assert (result["outcome"], result["samples"]) == ("done", EPOCHS * jobs.SAMPLES), job.errors()
    assert job.died() == {"shard 1"}


@pytest.mark.parametrize("told", [signal.SIGTERM, signal.SIGINT])
@pytest.mark.parametrize("engine", ["ssh", "salloc", "ray", "torchrun"], indirect=True)
def test_a_job_that_is_interrupted_ends_in_peace(
    start: Start, hosts: Hosts, engine: Engine, tmp_path: Path, told: signal.Signals
) -> None:
    """With a checkpoint, and the command that goes on."""
    job = start(*DOWNPOUR, "--epochs", "100000")
    job.until_all_work()
    several = len(job.pids()) > 1
    hosts.kill(job.pids() if several else [first_process(hosts, engine.first)], told)
    assert several or job.wait() == [130]
    job.wait()
    goes_on = re.search(r"interrupted; go on with: .* --out (\S+)", job.errors())
    assert goes_on, job.errors()
    assert list((tmp_path / goes_on[1] / "checkpoints").iterdir())
    hosts.wait_until_empty(20.0)


@pytest.mark.parametrize("told", [signal.SIGTERM, signal.SIGINT])
@pytest.mark.parametrize("engine", ["srun", "mpirun"], indirect=True)
def test_an_interrupted_engine_that_kills_its_tasks_leaves_a_job_that_can_go_on(
    start: Start, hosts: Hosts, engine: Engine, tmp_path: Path, told: signal.Signals
) -> None:
    """From the newest checkpoint: these engines give no time for another."""
    job = begin(start, tmp_path / "run")
    hosts.kill(job.pids(), told)
    if told is signal.SIGINT and isinstance(engine, Srun):
        hosts.kill(job.pids(), told)  # it asks for a second one
    job.wait()
    hosts.wait_until_empty(60.0)
    goes_on(start, tmp_path / "run")


@pytest.mark.parametrize("engine", ["ssh", "srun", "mpirun", "torchrun"], indirect=True)
def test_another_coordinator_takes_the_place_of_one_that_is_killed(start: Start, hosts: Hosts, engine: Engine) -> None:
    job = start(*DOWNPOUR, "--epochs", str(EPOCHS))
    job.until_all_work()
    hosts.kill([process(hosts, engine.first, "distbelief: coordinator")])
    result = job.result()
    assert (result["outcome"], result["samples"]) == ("done", EPOCHS * jobs.SAMPLES), job.errors()
    assert job.died() <= {"coordinator"}
