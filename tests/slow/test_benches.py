"""Every benchmark, in its quickest form, yields the JSON that it promises and leaves nothing behind."""

import dataclasses
import json
import math
import multiprocessing
import os
import subprocess

import pytest
import torch

from distbelief.bench import BENCHES
from distbelief.bench.parts import lines
from distbelief.errors import UsageError
from distbelief.schedules.allreduce import ALGORITHMS

pytestmark = pytest.mark.timeout(600)

KEYS = {
    "wire": {"sizes"},
    "train": {"models", "batch_size", "transport"},
    "straggle": {"scenarios", "pad", "replicas"},
    "standby": {"with_of_without", "take_overs"},
    "start": {"seconds", "runs"},
    "loading": {"milliseconds", "of_none"},
    "memory": {"vectors", "vector_bytes"},
    "cost": {"steps", "memory"},
    "plan": {"models", "repeats"},
    "split": {"models", "crossing_seconds", "memory", "pipelines", "tensors"},
    "simulator": {"messages", "seconds", "messages_per_second"},
    "accuracy": {"mean", "seeds"},
    "allreduce": {"one_host", "namespaces", "encrypted"},
    "hogwild": {"mlp", "svm"},
    "large": {"rates", "seeds", "mean"},
    "sandblaster": {"parts", "portion_size"},
}


CABLE = """
import subprocess, sys, pathlib, time
a, b, _, delay, _, rate, _, loss = sys.argv[1:]
subprocess.run(["ip", "-n", a, "link", "add", "un0", "type", "veth", "peer", "name", "un0", "netns", b], check=True)
for number, name in enumerate((a, b), 1):
    subprocess.run(["ip", "-n", name, "addr", "add", f"10.215.0.{number}/24", "dev", "un0"], check=True)
    subprocess.run(["ip", "-n", name, "link", "set", "un0", "up"], check=True)
with open(pathlib.Path(__file__).parent / "told", "a") as told:
    told.write(f"{delay} {rate} {loss} ")
print("up", flush=True)
time.sleep(1000)
"""
"""Joins two namespaces, and writes down what it is told the cable is to be like."""


def run(name, tmp_path, **options):
    path = tmp_path / "made" / f"{name}.json"
    bench = BENCHES[name]
    result = bench.run(
        dataclasses.replace(bench.defaults(quick=True), quick=True, quiet=True, json=str(path), **options)
    )
    assert json.loads(path.read_text()) == result
    assert multiprocessing.active_children() == []
    return result


def numbers(value):
    if isinstance(value, dict):
        return [n for one in value.values() for n in numbers(one)]
    if isinstance(value, list):
        return [n for one in value for n in numbers(one)]
    return [value] if isinstance(value, float) else []


@pytest.mark.parametrize("name", sorted(BENCHES))
def test_a_benchmark_writes_what_it_measured_and_on_what_machine(name, tmp_path, capfd):
    options = {"models": ("mlp",), "replicas": (2,)} if name == "train" else {}
    result = run(name, tmp_path, **options)
    assert result["bench"] == name
    assert {"machine", "figures", *KEYS[name]} <= set(result)
    assert result["machine"]["cores"] >= 1
    assert result["machine"]["torch"] == torch.__version__
    assert all(math.isfinite(n) for n in numbers(result))
    assert capfd.readouterr().out == ""


def test_the_simulator_is_held_against_real_processes(tmp_path):
    found = run("simulator", tmp_path, validate=True)["rows"]
    kinds = {
        "single",
        "downpour, 1 replica",
        "downpour, 2 replicas",
        "synchronous, 2 replicas",
        "allreduce, 2 replicas",
    }
    padded = {"downpour", "synchronous", "synchronous, 1 backup worker", "allreduce"}
    assert set(found) == {f"{model}, {kind}" for model in ("mlp", "lenet") for kind in kinds} | {
        f"4 padded{slow}, {kind}" for slow in ("", ", one 4 times slower") for kind in padded
    }
    assert all(row["simulated"] > 0 and row["real"] > 0 for row in found.values())


def test_train_measures_every_contender_on_the_same_samples(tmp_path):
    one = run("train", tmp_path, models=("mlp",), replicas=(1,))["models"]["mlp"]
    assert min(one["samples_per_second"].values()) > 0
    assert {name.partition(",")[0] for name in one["of_single"]} == {
        "single", "two independent singles", "two singles in lockstep", "downpour",
        "downpour on the direct path", "downpour on the direct path with adagrad", "single with adagrad",
        "bounded by 3 on the direct path", "synchronous", "allreduce", "ddp on gloo",
        "ddp with our hook", "hogwild",
    }  # fmt: skip
    assert one["of_single"]["single, 1 thread"] == 1


def test_stages_are_measured_beside_each_schedule_that_torch_has_for_so_many_microbatches(tmp_path):
    result = run("split", tmp_path, models=("alexnet",), parts=("pipelines",), microbatches=(1, 2))
    ours = {"stages"}
    rates = {name: one["samples_per_second"] for name, one in result["pipelines"].items()}
    assert {name: {*one} - ours for name, one in rates.items()} == {
        "alexnet, M = 1": {"torch, GPipe"}, "alexnet, M = 2": {"torch, GPipe", "torch, 1F1B"}
    }  # fmt: skip
    assert all(min(one.values()) > 0 for one in rates.values())
    for name, one in result["pipelines"].items():
        assert one["of_torch"] == rates[name][one["best"]] / rates[name][one["torch"]]
        assert rates[name][one["torch"]] == max(rate for who, rate in rates[name].items() if who not in ours)
    assert [one["promised"] for one in result["figures"]] == [0.97, 0.97]


@pytest.fixture
def namespaces():
    """Where a bench may make some."""
    try:
        lines.ip("netns", "add", f"dbt{os.getpid()}")
    except OSError as error:
        pytest.skip(f"no network namespaces here: {error}")
    lines.ip("netns", "delete", f"dbt{os.getpid()}")


@pytest.mark.usefixtures("namespaces")
def test_a_cable_joins_two_namespaces(tmp_path):
    cable = tmp_path / "cable.py"
    cable.write_text(CABLE)
    measured = run("allreduce", tmp_path, cable=str(cable), delay=20.0, rate=50, loss=0.01)["namespaces"][
        "2, by a cable"
    ]["4000"]
    assert set(measured) == set(ALGORITHMS)
    assert (tmp_path / "told").read_text().split() == ["20.0", "50", "0.01"]


@pytest.mark.usefixtures("namespaces")
def test_our_ring_over_tls_is_measured_beside_gloo_in_the_clear(tmp_path):
    result = run("allreduce", tmp_path, encrypted=(3,), rate=500)
    measured = result["encrypted"]["3"]["100000"]
    assert set(measured["seconds"]) == {"gloo", "our ring over TLS"}
    # what every rank must send at least, by its line: nobody adds up less than all
    assert min(measured["seconds"].values()) > 2 * 100_000 * 2 / 3 * 8 / 500e6 / 2
    assert [one["measured"] for one in result["figures"] if "TLS" in one["what"]] == [measured["of_gloo"]]


@pytest.mark.usefixtures("namespaces")
@pytest.mark.parametrize("text", ["", "print('down')"])
def test_a_cable_that_is_not_laid_is_refused_and_nothing_is_left(tmp_path, text):
    (tmp_path / "cable.py").write_text(text)
    with pytest.raises(UsageError, match="it cannot be laid here"):
        run("allreduce", tmp_path, cable=str(tmp_path / "cable.py"))
    assert f"dbb{os.getpid()}" not in subprocess.check_output(["ip", "netns", "list"], text=True)
