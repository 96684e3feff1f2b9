"""What survives what, on hosts: the table of docs/clusters.md."""

from __future__ import annotations

import re
import signal
from collections.abc import Callable
from pathlib import Path

import jobs
import pytest
from commands import Command, process, roles_of
from engines import Engine
from hosts import Hosts

pytestmark = pytest.mark.timeout(240)
EPOCHS = 100
SMALL = ("--batch-size", str(jobs.BATCH), "--pad", "10ms", "--evaluate-every", "0", "--checkpoint-every", "20")
"""Steps so slow that there is time for what happens."""
DOWNPOUR = ("jobs:tiny", "downpour", *SMALL, "--shards", "2", "--standby", "1")
ON_N1 = {"replica 1", "shard 1"}
Start = Callable[..., Command]


def kill_a_role(hosts: Hosts, engine: Engine) -> set[str]:
    hosts.kill([roles_of(hosts, "n1")["replica 1"]])
    return {"replica 1"}


def kill_all_roles(hosts: Hosts, engine: Engine) -> set[str]:
    hosts.kill(roles_of(hosts, "n1").values())
    return ON_N1


def kill_the_agent(hosts: Hosts, engine: Engine) -> set[str]:
    hosts.kill([process(hosts, "n1", "distbelief: agent")])
    return ON_N1


def kill_the_daemon(hosts: Hosts, engine: Engine) -> set[str]:
    hosts.kill(engine.daemon(hosts, "n1"))
    return ON_N1


def cut_the_line(hosts: Hosts, engine: Engine) -> set[str]:
    hosts.cut("n1")
    return ON_N1


@pytest.mark.parametrize("act", [kill_a_role, kill_all_roles, kill_the_agent, kill_the_daemon, cut_the_line])
def test_the_others_go_on(start: Start, hosts: Hosts, engine: Engine, act: Callable[[Hosts, Engine], set[str]]) -> None:
    """No minibatch is lost; what is on a host that is gone ends there too, also while its line is cut."""
    job = start(*DOWNPOUR, "--epochs", str(EPOCHS))
    job.until_all_work()
    gone = act(hosts, engine)
    result = job.result()
    assert (result["outcome"], result["samples"]) == ("done", EPOCHS * jobs.SAMPLES), job.errors()
    assert job.died() == gone
    assert job.wait() == [0]
    hosts.wait_until_empty(60.0)


def test_a_line_that_is_cut_for_5_s_costs_time_only(start: Start, hosts: Hosts) -> None:
    job = start(*DOWNPOUR, "--epochs", str(EPOCHS))
    job.until_all_work()
    hosts.cut("n1")
    job.is_silent(5.0)
    hosts.cut("n1", down=False)
    result = job.result()
    assert (result["outcome"], result["samples"]) == ("done", EPOCHS * jobs.SAMPLES), job.errors()
    assert job.died() == set()


def test_after_kill_9_of_the_command_nothing_is_left_and_the_job_can_go_on(
    start: Start, hosts: Hosts, engine: Engine, tmp_path: Path
) -> None:
    words = (*DOWNPOUR, "--epochs", str(EPOCHS), "--out", str(tmp_path / "run"))
    job = start(*words)
    job.until_all_work()
    job.until(lambda record: record.get("event") == "Checkpointed" and not record["error"])
    hosts.kill(job.pids())
    hosts.wait_until_empty(20.0)
    again = start(*words, "--resume")
    result = again.result()
    assert (result["outcome"], result["samples"]) == ("done", EPOCHS * jobs.SAMPLES), again.errors()


def test_sigterm_ends_the_job_in_peace(start: Start, hosts: Hosts, tmp_path: Path) -> None:
    """With a checkpoint, and the command that goes on."""
    job = start(*DOWNPOUR, "--epochs", "100000")
    job.until_all_work()
    hosts.kill(job.pids(), signal.SIGTERM)
    assert job.wait() == [130]
    told = re.search(r"interrupted; go on with: .* --out (\S+)", job.errors())
    assert told, job.errors()
    assert list((tmp_path / told[1] / "checkpoints").iterdir())
    hosts.wait_until_empty(20.0)


def test_another_coordinator_takes_the_place_of_one_that_is_killed(start: Start, hosts: Hosts, engine: Engine) -> None:
    job = start(*DOWNPOUR, "--epochs", str(EPOCHS))
    job.until_all_work()
    hosts.kill([process(hosts, engine.first, "distbelief: coordinator")])
    result = job.result()
    assert (result["outcome"], result["samples"]) == ("done", EPOCHS * jobs.SAMPLES), job.errors()
    assert job.died() <= {"coordinator"}
