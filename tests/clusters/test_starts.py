"""Jobs that begin on hosts of which something is wrong: each is told of with what to do, or is no hindrance."""

from __future__ import annotations

import contextlib
import json
import re
import subprocess
import sys
from collections.abc import Callable
from importlib import metadata
from pathlib import Path
from time import monotonic, time

import jobs
import pytest
from commands import ROOT, Command
from hosts import HOME, Hosts

pytestmark = pytest.mark.timeout(240)
TINY = ("jobs:tiny", "downpour", "--shards", "2", "--batch-size", str(jobs.BATCH), "--pad", "10ms")
CLOCK = "LD_PRELOAD=/usr/$LIB/faketime/libfaketime.so.1 FAKETIME=+1h"
Start = Callable[..., Command]


def without(hosts: Hosts, name: str, folder: str) -> None:
    """Have a host find nothing in a folder."""
    hosts[name].run("mount", "-t", "tmpfs", "tmpfs", folder)


def refused(job: Command, hosts: Hosts) -> str:
    """What a job says that does not begin; nothing is left of it."""
    assert set(job.wait()) <= {1, 2}, job.errors()
    hosts.wait_until_empty(20.0)
    return job.errors()


def test_a_host_that_is_not_reachable(start: Start, hosts: Hosts) -> None:
    hosts.cut("n2")
    began = monotonic()
    told = refused(start(*TINY), hosts)
    assert monotonic() < began + 40
    assert "host n2: ssh: connect to host n2 port 22: " in told, told
    assert "is it up, and " in told


def test_a_host_of_another_version(start: Start, hosts: Hosts, tmp_path: Path) -> None:
    version = metadata.version("distbelief")
    for number, found in enumerate(metadata.distributions(name="distbelief", path=[str(ROOT), *sys.path])):
        [real] = [Path(str(one.locate())) for one in found.files or () if one.name in ("METADATA", "PKG-INFO")]
        (tmp_path / str(number)).write_text(real.read_text().replace(f"Version: {version}", "Version: 0.0.1"))
        hosts["n2"].run("mount", "--bind", str(tmp_path / str(number)), str(real))
    told = refused(start(*TINY), hosts)
    assert f"host n2 runs distbelief 0.0.1, this is {version}: install the same on all" in told


def test_a_host_without_data(start: Start, hosts: Hosts, mnist: str) -> None:
    without(hosts, "n2", mnist)
    told = refused(start("mnist", "downpour", "--shards", "2", "--epochs", "1"), hosts)
    assert f"host n2: no MNIST in {mnist}" in told


def test_a_host_whose_clock_is_an_hour_off(start: Start, hosts: Hosts) -> None:
    """It is no hindrance, and `check` tells of it."""
    with (hosts.folder / "ssh_config").open("a") as config:
        config.write(f"Host n2\n  SetEnv {CLOCK}\n")
    assert abs(float(hosts[HOME].run("ssh", "n2", "date +%s")) - time() - 3600) < 60
    assert [bool(re.search(r"clock is 3\d{3} s ahead", " ".join(one))) for one in check(hosts).values()] == [
        False, False, True, False,
    ]  # fmt: skip
    job = start(*TINY, "--epochs", "20")
    assert job.result()["outcome"] == "done"


def check(hosts: Hosts) -> dict[str, list[str]]:
    """What `distbelief check` finds wrong, by host."""
    command = ["distbelief", "check", "--hosts", ",".join(hosts.names), "--json"]
    told = subprocess.run(
        hosts[HOME].command(command), env=hosts.environment, capture_output=True, timeout=100, check=False
    )
    return {one["name"]: one["problems"] for one in json.loads(told.stdout)}


@pytest.mark.parametrize("hosts", [1 << 20], indirect=True)
def test_a_disk_that_is_full(start: Start, hosts: Hosts) -> None:
    """It ends the job before there is a process."""
    with contextlib.suppress(OSError), (hosts.disk / "filler").open("wb", buffering=0) as filler:
        while filler.write(bytes(4096)):
            pass
    told = refused(start(*TINY, "--out", str(hosts.disk / "run")), hosts)
    assert "No space left on device" in told


@pytest.mark.usefixtures("mnist")
@pytest.mark.parametrize("hosts", [400_000], indirect=True)
def test_a_disk_on_which_no_checkpoint_has_room(start: Start, hosts: Hosts) -> None:
    """The job goes on without, and says so at its end, with what to do."""
    job = start("mnist", "downpour", "--shards", "2", "--epochs", "1", "--out", str(hosts.disk / "run"))
    assert job.wait() == [1]
    assert re.search(r"checkpoint \d+ was not written to .*No space left on device.*make room", job.errors())
