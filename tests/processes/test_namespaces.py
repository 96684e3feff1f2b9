"""Jobs on two hosts: two network namespaces and a cable between them."""

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import jobs
import pytest
from patience import SECONDS

from benchmarks.parts.lines import ip
from distbelief.transport.secure import MUTE

HERE, THERE = "10.213.0.1", "10.213.0.2"
pytestmark = pytest.mark.timeout(300)


@dataclass
class Hosts:
    """Two hosts and the cable between them; what runs on them."""

    folder: Path
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

    def start(self, *words: str) -> subprocess.Popen[str]:
        """Run a command of distbelief on the first, with a remote shell that comes to each of them by its name."""
        script, own = self.folder / "shell", """'hostname "$0" && exec sh -c "$1"'"""
        script.write_text(f'#!/bin/sh\nhost=$1; shift\nexec ip netns exec $host unshare --uts sh -c {own} $host "$*"\n')
        script.chmod(0o700)
        command = ["ip", "netns", "exec", self.names[0], sys.executable, "-m", "distbelief", *words]
        self.started.append(
            subprocess.Popen(
                [*command, "--remote-shell", str(script)], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
                env=jobs.environment(), cwd=Path(jobs.__file__).parent,
            )
        )  # fmt: skip
        return self.started[-1]

    def clear(self) -> None:
        """End what runs, and take both hosts away."""
        for one in self.started:
            one.kill()
            one.communicate()
        for name in self.names:
            subprocess.run(["ip", "netns", "delete", name], capture_output=True, check=False)  # if it was made


@pytest.fixture
def hosts(tmp_path: Path) -> Iterator[Hosts]:
    """Two hosts, where the test may make them."""
    if shutil.which("ip") is None:
        pytest.skip("needs ip, of iproute2")
    if os.geteuid():
        pytest.skip("needs root, to make network namespaces")
    hosts = Hosts(tmp_path)
    try:
        try:
            hosts.build()
        except OSError as error:
            pytest.skip(f"no network namespaces here: {error}")
        yield hosts
    finally:
        hosts.clear()


def test_hosts_with_addresses_of_ipv6_alone_train(hosts: Hosts) -> None:
    for number, name in enumerate(hosts.names, 1):
        ip("-n", name, "addr", "flush", "dev", "cable", "scope", "global")
        ip("-n", name, "addr", "add", f"fd77::{number}/64", "dev", "cable", "nodad")
    words = f"train jobs:tiny downpour --epochs 2 --hosts {hosts.names[0]}:1,{hosts.names[1]}:1 --json".split()
    job = hosts.start(*words, "--out", str(hosts.folder / "run"))
    said, _ = job.communicate(timeout=SECONDS)
    assert job.returncode == 0, said
    assert json.loads(said.splitlines()[-1])["samples"] == 2 * jobs.SAMPLES


def test_a_way_that_loses_long_packets_is_told_of_before_a_job_and_by_check(hosts: Hosts) -> None:
    here, there = hosts.names
    ip("-n", here, "link", "set", "cable", "gso_max_segs", "1")
    ip("-n", there, "link", "set", "cable", "mtu", "1280")
    ip("-n", there, "route", "change", f"{HERE.rpartition('.')[0]}.0/24", "dev", "cable", "advmss", "1460")
    train = ["train", "jobs:tiny", "downpour", "--replicas", "1", "--out", str(hosts.folder / "run")]
    for words, status in ((["check"], 1), (train, 1)):
        command = hosts.start(*words, "--hosts", there)
        said, _ = command.communicate(timeout=SECONDS)
        assert (command.returncode, there in said, HERE in said, MUTE in said) == (status, True, True, True), said
