"""Local steps beside a gradient in each step: loss and bytes at equal samples, time by slow lines, speeds and storms.

Losses are of jobs on the virtual cluster, which compute in full. Times by slow lines are of real jobs on four hosts
that are network namespaces, beside the same jobs on the virtual cluster. Steps of real jobs are padded, so that four
replicas need no more than two cores.
"""

from __future__ import annotations

import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from benchmarks.parts import lines
from benchmarks.parts.timing import BenchOptions, Figure, Measured, Table, check_names, figure
from distbelief.core.optimizer import optim
from distbelief.core.records import Json
from distbelief.errors import DistbeliefError, UsageError
from distbelief.job import Job
from distbelief.lab import number
from distbelief.places.compute_model import ComputeModel
from distbelief.places.simulated.simulated import Simulated
from distbelief.places.simulated.virtual_cluster import Crash
from distbelief.strategies import Downpour, Strategy, Synchronous
from distbelief.transport.cluster_model import Hosts, NetworkModel

TASK, REPLICAS = "gpt-tiny", 4
PARTS = ("loss", "lines", "utilisation", "speeds", "storm")
MEGABIT = 1e6 / 8
"""Bytes a second."""
LINE = 0.96
"""Share of a line's rate that is left for TLS records, without the headers of packets."""


@dataclass(frozen=True)
class LocalStepsOptions(BenchOptions):
    """Options of the benchmark local."""

    parts: tuple[str, ...] = PARTS
    """Parts to measure: loss, lines (needs root), utilisation (needs root), speeds, storm."""
    steps: int = 50
    """Local steps of a push (H)."""
    epochs: int = 8
    """Passes over the data, for losses."""
    seeds: int = 3
    """Seeds of each loss."""
    batch_size: int = 8
    """Samples in a minibatch."""
    pad: float = 0.04
    """Seconds of a step of real jobs."""


def run(options: LocalStepsOptions) -> Measured:
    """Measure."""
    check_names("part of the benchmark local", options.parts, PARTS)
    fields: Json = {}
    figures: list[Figure] = []
    tables: list[Table] = []
    for part in options.parts:
        measured = MEASURES[part](options)
        fields |= measured.fields
        figures += measured.figures
        tables += measured.tables
    return Measured(fields, figures, tables)


def gradients(**more: Any) -> Strategy:
    """Rounds of one gradient of each replica."""
    return Synchronous(REPLICAS, 4, optim("adamw", lr=2e-3), **more)


def diloco(steps: int, **more: Any) -> Strategy:
    """Rounds of the changes of local steps."""
    return Synchronous(REPLICAS, 4, optim("average"), push_every=steps, local_optimizer=optim("adamw", 2e-3), **more)


def simulated(strategy: Strategy, cluster: Simulated, options: LocalStepsOptions, seed: int = 0, **more: Any) -> Json:
    """Run a job of the task on the virtual cluster; return its result."""
    rare: dict[str, Any] = {"evaluate_every": 1, "checkpoint_every": 0, "snapshot_every": "0", "seed": seed}
    given = {"epochs": options.epochs, "batch_size": options.batch_size, **rare, **more}
    return play(Job(TASK, strategy, **given), cluster)


def play(job: Job, cluster: Simulated) -> Json:
    """Run a job on a virtual cluster; return its result."""
    return cluster.run(job)


def _losses(options: LocalStepsOptions) -> Measured:
    cluster = Simulated(compute=ComputeModel(spread="constant"))
    made: dict[str, list[Json]] = {"gradients": [], "local steps": []}
    for seed in range(options.seeds):
        made["gradients"].append(simulated(gradients(), cluster, options, seed))
        made["local steps"].append(simulated(diloco(options.steps), cluster, options, seed))
    losses = {name: [one["test_loss"] for one in results] for name, results in made.items()}
    moved = {name: _moved(results[0]) for name, results in made.items()}
    worse = statistics.median(b / a - 1 for a, b in zip(losses["gradients"], losses["local steps"], strict=True))
    rows = [
        [name, *(f"{loss:.4f}" for loss in losses[name]), f"{moved[name] / 1e6:,.1f}", str(made[name][0]["samples"])]
        for name in made
    ]
    columns = ("", *(f"loss, seed {seed}" for seed in range(options.seeds)), "MB pushed and fetched", "samples")
    figures = [
        figure(f"{TASK}: loss with H = {options.steps} above that with gradients", worse, 0.03, lower=True),
        figure("bytes of gradients, of those of local steps", moved["gradients"] / moved["local steps"], 50.0),
    ]
    return Measured({"losses": losses, "moved": moved}, figures, [Table("equal samples", columns, rows)])


def _moved(result: Json) -> float:
    return float(result["bytes"]["pushed"] + result["bytes"]["fetched"])


def real(strategy: str, rate: int, options: LocalStepsOptions, *more: str) -> Json:
    """Run a job on four hosts with a line of so many Mbit/s each; return its result with the roles that died."""
    words = f"train {TASK} {strategy} --replicas {REPLICAS} --shards 4 --batch-size {options.batch_size} --json "
    return command(f"{words} --pad {options.pad}s --checkpoint-every 0 --snapshot-every 0 {' '.join(more)}", rate)


def command(words: str, rate: int) -> Json:
    """Run a command on the first of four hosts; return its result with the roles that died."""
    with lines.hosts(REPLICAS, rate) as names, tempfile.TemporaryDirectory(prefix="distbelief-local-") as folder:
        shell = Path(folder, "shell")
        own = """'hostname "$0" && exec sh -c "$1"'"""
        shell.write_text(f'#!/bin/sh\nhost=$1; shift\nexec ip netns exec $host unshare --uts sh -c {own} $host "$*"\n')
        shell.chmod(0o700)
        hosts = (
            f"--hosts {','.join(f'{name}:1' for name in names)} --remote-shell {shell} --out {folder}/run --threads 1"
        )
        whole = ["ip", "netns", "exec", names[0], sys.executable, "-m", "distbelief", *words.split(), *hosts.split()]
        done = subprocess.run(whole, capture_output=True, text=True, check=False, env={**os.environ})
        events = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    if done.returncode or not events:
        raise UsageError(f"{' '.join(whole)}: ended with {done.returncode}: {done.stderr[-2000:]}")
    dead = [one["role"] for one in events if one.get("event") == "Gone" and one["died"]]
    return {**events[-1], "dead": dead}


GRADIENTS = "synchronous --optimizer adamw --lr 2e-3"
LOCAL = "synchronous --optimizer average --local-optimizer adamw --local-lr 2e-3 --push-every"


def cluster_of(rate: int, options: LocalStepsOptions) -> Simulated:
    """Four hosts with such lines, as the virtual cluster has them."""
    line = NetworkModel(latency=1e-4, bandwidth=LINE * rate * MEGABIT, local_latency=1e-5, local_bandwidth=2e9)
    compute = ComputeModel(step=options.pad, spread="constant")
    return Simulated(network=line, compute=compute, hosts=Hosts(cores=2, replicas=1))


def _lines(options: LocalStepsOptions) -> Measured:
    rate, every = 10, "--evaluate-every 50minibatches"
    goal = f"{every} --budget 2h"
    by_gradients = real(GRADIENTS, rate, options, f"{goal} --epochs 1")
    target = next(
        row["test_loss"] for row in by_gradients["history"] if row["samples"] >= 200 * REPLICAS * options.batch_size
    )
    seconds = _reached(by_gradients, target)
    by_steps = real(
        f"{LOCAL} {options.steps}", rate, options, f"{goal} --epochs {options.epochs} --target-loss {target}"
    )
    faster = seconds / _reached(by_steps, target)
    off, predicted = [], []
    for seed in range(options.seeds):
        times = []
        for strategy in (gradients(), diloco(options.steps)):
            cluster = cluster_of(rate, options)
            guess = simulated(strategy, cluster, options, seed, evaluate_every="50minibatches")
            times.append(_reached(guess, target))
        predicted.append(times[0] / times[1])
        off.append(max(abs(times[0] / seconds - 1), abs(times[1] / (seconds / faster) - 1)))
    dead = by_gradients["dead"] + by_steps["dead"]
    figures = [
        figure(f"10 Mbit/s: faster to the loss of 200 rounds of gradients ({target:.3f})", faster, 20.0),
        figure("the same on the virtual cluster, median", statistics.median(predicted), 20.0),
        figure("virtual cluster, of namespaces: off by", statistics.median(off), 0.15, lower=True),
        figure("roles taken for dead", len(dead), 0, lower=True),
    ]
    return Measured({"lines": {"seconds": seconds, "faster": faster, "predicted": predicted, "off": off}}, figures, [])


def _reached(result: Json, target: float) -> float:
    """Return the seconds until a loss was first measured, or raise a `UsageError`."""
    for row in result["history"]:
        if row["test_loss"] is not None and row["test_loss"] <= target:
            return float(row["seconds"])
    raise UsageError(f"a loss of {target:.3f} was not reached in {result['seconds']:.0f} s: more --epochs")


def _utilisation(options: LocalStepsOptions) -> Measured:
    rows, figures = [], []
    staggered = "--stagger --stagger-delay 5 --stagger-mix 0.5"
    for rate, way in ((100, staggered), (100, ""), (30, staggered)):
        result = real(f"{LOCAL} {options.steps} {way}", rate, options, "--epochs 1 --evaluate-every 0")
        kind = {"stagger": True, "stagger_delay": 5, "stagger_mix": 0.5} if way else {}
        guess = simulated(
            diloco(options.steps, **kind),
            replace(cluster_of(rate, options), phantom=True),
            options,
            epochs=1,
            evaluate_every=0,
        )
        shares = [one["steps"] / REPLICAS * options.pad / one["seconds"] for one in (result, guess)]
        rows.append([f"{rate} Mbit/s{' staggered' * bool(way)}", *(f"{share:.3f}" for share in shares)])
        figures.append(figure(f"{rows[-1][0]}: predicted, off by", abs(shares[1] - shares[0]), 0.05, lower=True))
        if rate == 100 and way:
            figures.append(figure("100 Mbit/s, staggered: computing, of the time", shares[0], 0.95))
    return Measured({"utilisation": rows}, figures, [Table("computing, of the time", ("", "real", "virtual"), rows)])


def _speeds(options: LocalStepsOptions) -> Measured:
    slow = ComputeModel(step=options.pad, spread="constant", slow={0: 4.0, 1: 4.0, 2: 2.0})
    cluster = Simulated(compute=slow, network=NetworkModel(latency=1e-4, bandwidth=1e9))
    auto: dict[str, Any] = {"push_every": f"auto:{options.steps}", "local_optimizer": optim("adamw", 2e-3)}
    ways: Mapping[str, Strategy] = {
        "synchronous": diloco(options.steps),
        "delayed Nesterov, auto": Downpour(REPLICAS, 4, optim("delayed-nesterov"), **auto),
        "sgd, auto": Downpour(REPLICAS, 4, optim("sgd", lr=0.25), **auto),
        "Nesterov on each change": Momentum(REPLICAS, 4, optim("nesterov", lr=0.7), **auto),
    }
    losses: dict[str, list[float]] = {name: [] for name in ways}
    for seed in range(options.seeds + 2):
        budget = 0.0
        for name, strategy in ways.items():
            limit = {"budget": f"{budget * 1000:.0f}ms"} if budget else {}
            try:
                result = simulated(strategy, cluster, options, seed, **limit)
            except DistbeliefError:
                losses[name].append(float("inf"))
                continue
            budget = budget or result["seconds"]
            losses[name].append(result["test_loss"])
    better = statistics.median(
        b / a for a, b in zip(losses["delayed Nesterov, auto"], losses["synchronous"], strict=True)
    )
    rows = [
        [name, f"{statistics.median(ones):.4f}", number(min(ones)), number(max(ones))] for name, ones in losses.items()
    ]
    figures = [figure("speeds 1, 1, 2, 4: loss of synchronous, of delayed Nesterov's at equal time", better, 1.0)]
    return Measured({"speeds": losses}, figures, [Table("equal time", ("", "median loss", "least", "most"), rows)])


class Momentum(Downpour):
    """Downpour that takes momentum on each change, which the package refuses."""

    name = "benchmarks.local:Momentum"

    def check_local(self, settings: Any) -> None:
        """Refuse nothing."""


def _storm(options: LocalStepsOptions) -> Measured:
    replicas, hours, kills = 32, 2, 125
    chance, steps = random.Random(0), options.steps
    compute = ComputeModel(step=1.0, spread="lognormal")
    # a life sends some 1.4 messages a second, and lasts 32 / 125 of an hour on average
    life = 1.4 * 3600 * replicas / kills
    crashes = tuple(
        Crash(f"replica {index}", 1 + int(chance.expovariate(1 / life)))
        for index in range(replicas)
        for _ in range(2 * kills * hours // replicas)
    )
    strategy = Downpour(
        replicas, 4, optim("delayed-nesterov"), push_every=steps, local_optimizer=optim("adamw", 2e-3), restarts=99
    )
    cluster = Simulated(compute=compute, crashes=crashes, restart_seconds=57.0, phantom=True)
    result = simulated(strategy, cluster, options, budget=f"{hours}h", epochs=1000, evaluate_every=0, batch_size=2)
    done = result["samples"] / 2 * compute.step / (replicas * result["seconds"])
    forgotten, lost = result["forgotten"], sum(one["lost"] for one in result["per_replica"])
    figures = [
        figure("storm: share of the replicas' time that trains", done, 0.9),
        figure("storm: forgotten pushes", forgotten, 0, lower=True),
    ]
    return Measured({"storm": {"participation": done, "forgotten": forgotten, "lost": lost}}, figures, [])


MEASURES: Mapping[str, Callable[[LocalStepsOptions], Measured]] = {
    "loss": _losses,
    "lines": _lines,
    "utilisation": _utilisation,
    "speeds": _speeds,
    "storm": _storm,
}
