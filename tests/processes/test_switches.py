"""Rings between real hosts, in the order of their switches and in the worst one, and the simulator beside them."""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import subprocess
import sys
from collections import defaultdict
from collections.abc import Callable, Iterator
from itertools import pairwise
from pathlib import Path

import jobs
import pytest
import wide
from patience import SECONDS

import distbelief as db
from benchmarks.parts.lines import ip
from distbelief.network.slurm import parse_topology

HOSTS = {"h0": "s0", "h1": "s0", "h2": "s1", "h3": "s1", "home": "top"}
"""The bridge of each; home is where jobs are started."""
HOST, UPLINK = 1000, 250
"""Mbit/s of the cables."""
BURST, QUEUE = "512kb", "4mb"
"""A bucket that a machine does not miss to empty while it does other things, and room for all that is under way."""
TREE = f"""SwitchName=s0 Nodes=h0,h1 LinkSpeed={HOST}
SwitchName=s1 Nodes=h2,h3 LinkSpeed={HOST}
SwitchName=top Switches=s0,s1 LinkSpeed={UPLINK}
"""
WORST = ("h0", "h2", "h1", "h3")
"""Each next to one at the other switch."""
ROUNDS, TRIES = 8, 3
BYTES = 4 * wide.PARAMETERS
RING = 2 * 3 / 4 * BYTES / (UPLINK * 125e3)
"""Seconds in which 2 (p - 1) / p of the gradient pass an uplink."""
pytestmark = [pytest.mark.timeout(300), pytest.mark.long]


class Network:
    """The namespaces, and the commands that run in them.

    Args:
        folder: for files.
    """

    def __init__(self, folder: Path) -> None:
        self.folder, self.prefix = folder, f"db{os.getpid()}"
        self.tree = folder / "topology.conf"
        self.tree.write_text(TREE)
        self.shell = folder / "shell"
        self.shell.write_text(f'#!/bin/sh\nhost=$1; shift\nexec ip netns exec {self.prefix}$host sh -c "$*"\n')
        self.shell.chmod(0o755)
        self.names = ("bridges", *HOSTS)

    def build(self) -> None:
        """Lay the cables."""
        for name in self.names:
            ip("netns", "add", self.prefix + name)
            self.ip(name, "link", "set", "lo", "up")
        for bridge in ("s0", "s1", "top"):
            self.ip("bridges", "link", "add", "name", bridge, "type", "bridge")
            self.ip("bridges", "link", "set", bridge, "up")
        for bridge in ("s0", "s1"):
            self.ip("bridges", "link", "add", "name", f"{bridge}-up", "type", "veth", "peer", "name", f"{bridge}-down")
            for end, master in ((f"{bridge}-up", bridge), (f"{bridge}-down", "top")):
                self.ip("bridges", "link", "set", end, "master", master, "up")
                self.limit("bridges", end, UPLINK)
        for number, (host, bridge) in enumerate(HOSTS.items(), 1):
            peer = ("peer", "name", "eth0", "netns", self.prefix + host)
            self.ip("bridges", "link", "add", "name", host, "type", "veth", *peer)
            self.ip("bridges", "link", "set", host, "master", bridge, "up")
            self.ip(host, "addr", "add", f"10.216.0.{number}/24", "dev", "eth0")
            self.ip(host, "link", "set", "eth0", "up")
            self.limit("bridges", host, HOST)
            self.limit(host, "eth0", HOST)

    def ip(self, name: str, *words: str) -> None:
        """Run `ip` in a namespace."""
        ip("-n", self.prefix + name, *words)

    def limit(self, name: str, device: str, mbit: int) -> None:
        """Let no more leave by a device."""
        bucket = ("tbf", "rate", f"{mbit}mbit", "burst", BURST, "limit", QUEUE)
        ip("netns", "exec", self.prefix + name, "tc", "qdisc", "add", "dev", device, "root", *bucket)

    def distbelief(self, *words: str) -> str:
        """Run a command at home to its end; returns what it says, on both."""
        command = ["ip", "netns", "exec", f"{self.prefix}home", sys.executable, "-m", "distbelief", *words]
        own = jobs.environment(OMP_NUM_THREADS="1")
        made = subprocess.run(
            [*command, "--remote-shell", str(self.shell)], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
            env=own, cwd=self.folder, timeout=SECONDS, check=False,
        )  # fmt: skip
        assert made.returncode == 0, made.stdout
        return made.stdout

    def round_seconds(self, algorithm: str, *words: str, slots: int = 1) -> float:
        """The seconds of a round of a real job, whose hosts are in the worst order: the least of some."""
        hosts = ",".join(f"{host}:{slots}" for host in WORST)
        batch = len(wide.data()) // (ROUNDS * len(WORST) * slots)
        job = ("--epochs", "1", "--batch-size", str(batch), "--checkpoint-every", "0", "--evaluate-every", "0")
        said = self.distbelief(
            "train", "wide:wide", "allreduce", "--algorithm", algorithm, "--hosts", hosts, *words, *job
        )
        begins: dict[str, list[float]] = defaultdict(list)
        for replica, moment in re.findall(r"\[(replica \d+) on \w+\] step at ([0-9.]+)", said):
            begins[replica].append(float(moment))
        rounds = [max(each) for each in zip(*begins.values(), strict=True)]
        assert (len(begins), len(rounds)) == (len(WORST) * slots, ROUNDS), said
        return min(after - before for before, after in pairwise(rounds))

    def clear(self) -> None:
        """Take all away."""
        for name in self.names:
            with contextlib.suppress(OSError):  # it was never made
                ip("netns", "delete", self.prefix + name)


@pytest.fixture(scope="module")
def network(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Network]:
    """The network, where the tests may make it."""
    for tool in ("ip", "tc"):
        if shutil.which(tool) is None:
            pytest.skip(f"needs {tool}, of iproute2")
    if os.geteuid():
        pytest.skip("needs root, to make network namespaces")
    network = Network(tmp_path_factory.mktemp("network"))
    try:
        try:
            network.build()
        except OSError as error:
            pytest.skip(f"no network namespaces with limits here: {error}")
        yield network
    finally:
        network.clear()


def simulated(network: Network, algorithm: str, replicas: int, per_host: int) -> float:
    """The seconds of a round, by the simulator."""
    strategy = db.Allreduce(replicas=replicas, algorithm=algorithm, per_host=per_host)
    job = db.Job("wide:wide", strategy, epochs=1, batch_size=64 // (ROUNDS * replicas), evaluate_every=0)
    place = db.Simulated(
        db.NetworkModel(latency=50e-6, bandwidth=HOST * 125e3), db.ComputeModel(step=20e-3, spread="constant"),
        topology=str(network.tree), phantom=True,
    )  # fmt: skip
    return float(db.run(job, on=place)["seconds"]) / ROUNDS


def near(measure: Callable[[], float], wanted: float, within: float) -> None:
    """What is measured comes near: once, since a machine that does other things makes it longer."""
    seen = []
    while len(seen) < TRIES:
        seen.append(measure())
        if seen[-1] == pytest.approx(wanted, rel=within):
            return
    raise AssertionError(f"{seen} s, and not {wanted} s")


def test_the_worst_order_takes_twice_as_long_as_the_walk(network: Network) -> None:
    """As hosts are written, each uplink is passed twice a step; in the order of the walk once."""
    near(lambda: network.round_seconds("ring", "--topology", str(network.tree)), RING, 0.2)
    near(lambda: network.round_seconds("ring"), 2 * RING, 0.2)


@pytest.mark.parametrize(("algorithm", "slots"), [("ring", 1), ("halving-doubling", 1), ("hierarchical", 2)])
def test_the_simulator_takes_as_long_as_real_hosts(network: Network, algorithm: str, slots: int) -> None:
    per_host = slots if slots > 1 else 0
    words: tuple[str, ...] = ("--per-host", str(per_host)) if per_host else ()
    words += ("--topology", str(network.tree))
    seconds = simulated(network, algorithm, len(WORST) * slots, per_host)
    near(lambda: network.round_seconds(algorithm, *words, slots=slots), seconds, 0.15)


def test_switches_are_found_by_what_is_measured(network: Network) -> None:
    network.distbelief("check", "--hosts", ",".join(WORST), "--topology-out", "measured.conf")
    found = parse_topology((network.folder / "measured.conf").read_text(), "measured.conf")
    assert [found.hosts[host] for host in found.walk] == ["h0", "h1", "h2", "h3"]
    assert len(found.switches) == 3
