"""What an engine costs: MNIST by Downpour on four hosts, started by it and, interleaved, by agents that are started in
the hosts' namespaces without one: seconds to the first step of all replicas, and samples a second.

    python tests/clusters/measure.py [ENGINE] [TURNS]
"""

from __future__ import annotations

import stat
import sys
import tempfile
from pathlib import Path
from time import monotonic

from commands import Command, environment
from engines import ENGINES, Engine
from hosts import HOME, Hosts

TRAINING = (
    "mnist",
    "downpour",
    "--replicas",
    "4",
    "--shards",
    "2",
    "--epochs",
    "1",
    "--optimizer",
    "adagrad",
    "--lr",
    "0.02",
)


class Own(Engine):
    """Starts agents in the namespaces of the hosts."""

    def start(self, hosts: Hosts, folder: Path, *words: str) -> Command:
        """Start a job on all hosts, from outside of them."""
        shell = folder / "shell"
        inits = " ".join(f"{name}) init={hosts[name].init};;" for name in hosts.names)
        enter = "nsenter --target $init --net --uts --mount --pid"
        shell.write_text(f'#!/bin/sh\ncase $1 in {inits} esac\nshift\nexec {enter} sh -c "$*"\n')
        shell.chmod(shell.stat().st_mode | stat.S_IXUSR)
        named = ",".join(f"{name}:1" for name in hosts.names)
        command = ["distbelief", "train", *words, "--hosts", named, "--remote-shell", str(shell), "--json"]
        return Command(hosts, {HOME: command}, folder, seen=True)


def measure(engine: Engine) -> tuple[float, float]:
    """Seconds to the first step of all replicas, and samples a second."""
    hosts = Hosts(environment=environment())
    try:
        engine.prepare(hosts)
        with tempfile.TemporaryDirectory() as folder:
            began = monotonic()
            job = engine.start(hosts, Path(folder), *TRAINING)
            try:
                job.until_all_work(standbys=0)
                seconds = monotonic() - began
                rate = job.result()["samples_per_second"]
                job.wait()
            finally:
                job.close()
        return seconds, rate
    finally:
        hosts.close()


def main() -> None:
    """Measure in turns, and show each."""
    name, turns = [*sys.argv[1:], *("ssh", "3")[len(sys.argv) - 1 :]]
    for turn in range(int(turns)):
        for who, engine in ((name, ENGINES[name]), ("own", Own())):
            seconds, rate = measure(engine)
            print(f"turn {turn + 1}, {who}: {seconds:.2f} s to the first step of all, {rate:.0f} samples/s", flush=True)


if __name__ == "__main__":
    main()
