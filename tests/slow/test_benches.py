"""Every benchmark, in its quickest form, yields the JSON that it promises and leaves nothing behind."""

import dataclasses
import json
import math
import multiprocessing
import os
from functools import partial

import pytest
import torch

import distbelief as db
from benchmarks import BENCHES, train
from benchmarks.parts import lines, loops, timing, workloads

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
    "allreduce": {"one_host", "namespaces", "encrypted"},
    "hogwild": {"mlp", "svm"},
    "sandblaster": {"parts", "portion_size"},
}


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


def test_train_measures_every_contender_on_the_same_samples(tmp_path):
    one = run("train", tmp_path, models=("mlp",), replicas=(1, 2))["models"]["mlp"]
    assert min(one["samples_per_second"].values()) > 0
    assert {*train.REFERENCES.values(), *train.PLAIN, *train.PLAIN.values()} <= {*one["of"]["single"]}
    assert one["of"]["single"]["single, 1 thread"] == 1
    assert set(one["of"]["plain"]) == {*train.PLAIN}


def test_the_shares_of_train_fall_with_what_makes_ours_or_a_plain_loop_slow():
    """Several times, so that whoever else uses the machine hides neither."""
    workload = loops.Workload("benchmarks.parts.workloads:mlp_quick", 300, 64, 0.01)
    turns = {how: partial(loops.beside, workload, how) for how in ("two buffers", "independent")}
    ours, direct = db.Downpour(replicas=2, shards=1), db.Local(path="direct")
    turns["ours"] = partial(workloads.rate, workload.task, ours, direct, epochs=30)
    taken = timing.interleave(turns, 3)
    assert max(ours / plain for ours, plain in zip(taken["ours"], taken["two buffers"], strict=True)) > 0.35
    assert max(one / two for one, two in zip(taken["two buffers"], taken["independent"], strict=True)) > 0.35


def test_stages_are_measured_beside_each_schedule_that_torch_has_for_so_many_microbatches(tmp_path):
    result = run("split", tmp_path, models=("alexnet",), parts=("pipelines",), microbatches=(1, 2))
    rates = {name: one["samples_per_second"] for name, one in result["pipelines"].items()}
    assert {name: {*one} - {"stages"} for name, one in rates.items()} == {
        "alexnet, M = 1": {"torch, GPipe"}, "alexnet, M = 2": {"torch, GPipe", "torch, 1F1B"}
    }  # fmt: skip
    assert all(min(one.values()) > 0 for one in rates.values())
    for name, one in result["pipelines"].items():
        assert one["of_torch"] == rates[name]["stages"] / rates[name][one["torch"]]
        assert rates[name][one["torch"]] == max(rate for who, rate in rates[name].items() if who != "stages")
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
def test_our_ring_over_tls_is_measured_beside_gloo_in_the_clear(tmp_path):
    result = run("allreduce", tmp_path, encrypted=(3,), rate=500)
    measured = result["encrypted"]["3"]["100000"]
    assert set(measured["seconds"]) == {"gloo", "our ring over TLS"}
    # what every rank must send at least, by its line: nobody adds up less than all
    assert min(measured["seconds"].values()) > 2 * 100_000 * 2 / 3 * 8 / 500e6 / 2
    assert [one["measured"] for one in result["figures"] if "TLS" in one["what"]] == [
        measured["faster_than_gloo"]["our ring over TLS"]
    ]
