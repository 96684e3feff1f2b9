"""A job whose replicas are on two hosts: two network namespaces and a cable between them, which is cut, for a while and
for good.
"""

import contextlib
import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from time import monotonic
from typing import Any

import jobs
import pytest
from patience import SECONDS

from distbelief.places.join import join_server
from distbelief.transport.secure import MUTE

EPOCHS, PAD = 25, "10ms"
"""Rounds enough for 2.6 s, so that the cable is cut long before the end."""
HERE, THERE = "10.213.0.1", "10.213.0.2"
SILENCE = 3
"""Seconds of silence that are borne, where a test makes them short."""
SITES = {
    "the kernel": f"import distbelief.transport.tcp as tcp\ntcp.SILENCE_SECONDS = {SILENCE}.0\ntcp.TcpEndpoint._feel "
    "= lambda "
    "*_: None\n",
    "the pulse": f"import distbelief.transport.tcp as tcp\ntcp.LEAST_SECONDS = {SILENCE}.0\n",
}
"""Run by every Python process as it starts: those of a job are not the test's own to patch."""


def ip(*words: str) -> str:
    """Run `ip`."""
    made = subprocess.run(["ip", *words], capture_output=True, text=True, timeout=SECONDS, check=False)
    if made.returncode:
        raise OSError(f"ip {' '.join(words)}: {made.stderr.strip()}")
    return made.stdout


@dataclass
class Hosts:
    """Two hosts and the cable between them; what runs on them."""

    run: Path
    environment: dict[str, str]
    names: tuple[str, str] = (f"db{os.getpid()}a", f"db{os.getpid()}b")
    started: list[subprocess.Popen[str]] = field(default_factory=list)

    def build(self) -> None:
        """Lay the cable; what is there already when this fails, `clear` takes away."""
        here, there = self.names
        for name in self.names:
            ip("netns", "add", name)
            ip("-n", name, "link", "set", "lo", "up")
        ip("-n", here, "link", "add", "cable", "type", "veth", "peer", "name", "cable", "netns", there)
        for name, address in zip(self.names, (HERE, THERE), strict=True):
            ip("-n", name, "addr", "add", f"{address}/24", "dev", "cable")
            ip("-n", name, "link", "set", "cable", "up")
            ip("netns", "exec", name, "true")

    def shell(self, folder: Path) -> str:
        """A remote shell that comes to each of them by its name."""
        script = folder / "shell"
        own = """'hostname "$0" && exec sh -c "$1"'"""
        script.write_text(f'#!/bin/sh\nhost=$1; shift\nexec ip netns exec $host unshare --uts sh -c {own} $host "$*"\n')
        script.chmod(0o700)
        return str(script)

    def cable(self, state: str) -> None:
        """Cut it ("down") or mend it ("up")."""
        ip("-n", self.names[1], "link", "set", "cable", state)

    def start(self, host: int, *words: str) -> subprocess.Popen[str]:
        """Run a command of distbelief on a host."""
        command = ["ip", "netns", "exec", self.names[host], sys.executable, "-m", "distbelief", *words]
        folder = Path(jobs.__file__).parent
        one = subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=self.environment, cwd=folder
        )
        self.started.append(one)
        return one

    def tries(self) -> int:
        """How often, at most, either host has sent some bytes again without an answer, each time waiting twice as
        long.
        """
        told = "".join(
            subprocess.check_output(
                ["ip", "netns", "exec", name, "ss", "-tinH"], text=True, timeout=SECONDS, stderr=subprocess.DEVNULL
            )
            for name in self.names
        )
        return max((int(found) for found in re.findall(r"\bbackoff:(\d+)", told)), default=0)

    def clear(self) -> None:
        """End what runs, and take both hosts away."""
        for one in self.started:
            one.kill()
            one.wait()
            assert one.stdout
            one.stdout.close()
        for name in self.names:
            with contextlib.suppress(OSError):  # it was never made
                ip("netns", "delete", name)


@pytest.fixture
def hosts(tmp_path: Path) -> Iterator[Hosts]:
    """Two hosts, where the test may make them."""
    for tool in ("ip", "ss"):
        if shutil.which(tool) is None:
            pytest.skip(f"needs {tool}, of iproute2")
    if os.geteuid():
        pytest.skip("needs root, to make network namespaces")
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    site = tmp_path / "site"
    site.mkdir()
    path = os.pathsep.join([str(site), str(Path(jobs.__file__).parent), *sys.path])
    hosts = Hosts(tmp_path / "run", {**os.environ, "PYTHONPATH": path, "PIPE": str(pipe)})
    try:
        try:
            hosts.build()
        except OSError as error:
            pytest.skip(f"no network namespaces here: {error}")
        yield hosts
    finally:
        hosts.clear()
        assert not set(hosts.names) & set(ip("netns", "list").split())


class Told:
    """The records of a job, as its command shows them; the job begins in earnest once a guest has joined, and `act` is
    called when it has worked.
    """

    def __init__(self, job: subprocess.Popen[str], hosts: Hosts) -> None:
        self.job, self.hosts = job, hosts
        self.records: list[dict[str, Any]] = []

    def until_a_guest_works(self) -> None:
        """Let a guest in and have it work."""
        for record in self:
            if record["event"] == "Started":
                self.hosts.start(1, "join", str(self.hosts.run / join_server.TICKET))
            elif record["event"] == "Joined" and record["role"] == "replica 1":
                Path(self.hosts.environment["PIPE"]).write_bytes(b"")
            elif record["event"] == "Stepped" and record["role"] == "replica 1" and record["steps"]:
                return
        raise AssertionError(f"the job is over, and no guest has worked: {self.records[-3:]}")

    def result(self) -> dict[str, Any]:
        """What the job ended with."""
        for _ in self:
            pass
        assert self.job.wait(SECONDS) == 0, self.records[-3:]
        return self.records[-1]

    def died(self) -> list[str]:
        """Who died."""
        return [record["role"] for record in self.records if record.get("event") == "Gone" and record["died"]]

    def __iter__(self) -> Iterator[dict[str, Any]]:
        assert self.job.stdout
        while line := self.job.stdout.readline():
            try:
                self.records.append(json.loads(line))
            except json.JSONDecodeError:
                raise AssertionError(f"the job says {line}{self.job.stdout.read()}") from None
            if "event" in self.records[-1]:
                yield self.records[-1]


def train(hosts: Hosts) -> Told:
    """Start a job of one replica on the first host, with a join server for the second."""
    words = f"jobs:stubborn synchronous --replicas 1 --shards 2 --batch-size {jobs.BATCH} --epochs {EPOCHS}".split()
    words += ["--checkpoint-every", "0", "--pad", PAD, "--listen", HERE, "--out", str(hosts.run), "--json"]
    return Told(hosts.start(0, "train", *words), hosts)


@pytest.mark.timeout(300)
def test_hosts_with_addresses_of_ipv6_alone_train(hosts: Hosts, tmp_path: Path) -> None:
    for number, name in enumerate(hosts.names, 1):
        ip("-n", name, "addr", "flush", "dev", "cable", "scope", "global")
        ip("-n", name, "addr", "add", f"fd77::{number}/64", "dev", "cable", "nodad")
    words = f"train jobs:tiny downpour --epochs 2 --hosts {hosts.names[0]}:1,{hosts.names[1]}:1 --json".split()
    job = hosts.start(0, *words, "--remote-shell", hosts.shell(tmp_path), "--out", str(hosts.run))
    assert Told(job, hosts).result()["samples"] == 2 * jobs.SAMPLES


@pytest.mark.timeout(300)
def test_a_way_that_loses_long_packets_is_told_of_before_a_job_and_by_check(hosts: Hosts, tmp_path: Path) -> None:
    here, there = hosts.names
    ip("-n", here, "link", "set", "cable", "gso_max_segs", "1")
    ip("-n", there, "link", "set", "cable", "mtu", "1280")
    ip("-n", there, "route", "change", f"{HERE.rpartition('.')[0]}.0/24", "dev", "cable", "advmss", "1460")
    own = ["--hosts", there, "--remote-shell", hosts.shell(tmp_path)]
    told = f"host {there} cannot reach this host: {HERE} ({MUTE})"
    for words, status in (
        (["check", *own], 1),
        (["train", "jobs:tiny", "downpour", *own, "--replicas", "1", "--out", str(hosts.run)], 2),
    ):
        command = hosts.start(0, *words)
        said, _ = command.communicate(timeout=SECONDS)
        assert (command.returncode, told in said) == (status, True), said


@pytest.mark.timeout(300)
def test_a_cable_that_is_cut_for_seconds_costs_these_seconds_and_nobody_dies(hosts: Hosts) -> None:
    told = train(hosts)
    told.until_a_guest_works()
    hosts.cable("down")
    deadline = monotonic() + SECONDS
    while hosts.tries() < 4:  # the kernel has waited 0.2 s, 0.4 s, 0.8 s and 1.6 s
        assert monotonic() < deadline, "nothing was sent that needs an answer"
        assert told.job.poll() is None, "the job has ended with the cable cut"
    hosts.cable("up")
    result = told.result()
    assert (result["outcome"], told.died()) == ("done", [])
    assert result["samples"] == EPOCHS * jobs.SAMPLES
    assert {one["id"]: (one["lost"], one["steps"] > 0) for one in result["per_replica"]} == {0: (0, True), 1: (0, True)}
    guest = hosts.started[1]
    said, _ = guest.communicate(timeout=SECONDS)
    assert (guest.returncode, said.splitlines()[1:]) == (0, ["joined as replica 1"])


@pytest.mark.timeout(300)
@pytest.mark.parametrize("by", [pytest.param("the kernel", marks=pytest.mark.long), "the pulse"])
def test_a_cable_that_stays_cut_is_a_death_and_the_others_end_the_job(hosts: Hosts, tmp_path: Path, by: str) -> None:
    """Seen by the kernel, which bears no silence for longer; or before that by the pulse of the link."""
    (tmp_path / "site" / "sitecustomize.py").write_text(SITES[by])
    told = train(hosts)
    told.until_a_guest_works()
    hosts.cable("down")
    result = told.result()
    assert (result["outcome"], told.died()) == ("done", ["replica 1"])
    assert result["samples"] == EPOCHS * jobs.SAMPLES
    guest = hosts.started[1]
    said, _ = guest.communicate(timeout=SECONDS)
    assert guest.returncode == 1
    assert "replica 1 died: its process ended with status 1; another takes its place" in said, said
    assert re.search(rf"the job does not answer: {HERE}:\d+", said), said
