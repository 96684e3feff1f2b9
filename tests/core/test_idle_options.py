"""What would do nothing is refused, with the reason."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
from asking import Ask

import distbelief as db
from distbelief.cli import options, words
from distbelief.core.optimizer import optim
from distbelief.errors import UsageError
from distbelief.places.attempt import evaluates
from distbelief.places.join.guest import Guest
from distbelief.tasks import resolve

BESIDE = {
    "train digits sandblaster --overlap 0.4": "--overlap 0.4: each batch is the whole training set: set "
        "--batch-size",
    "train digits sandblaster --method cg --history "
    "5": "--history 5: is for --method lbfgs, and --method cg has no curvature pairs: leave it off",
    "train digits allreduce --per-host 2": "-per-host 2: sets the ranks of a host, which --algorithm auto does not use",
    "train digits allreduce --algorithm ring": "--algorithm ring: shared memory needs no algorithm, as nothing is "
        "sent: leave it off, or use --transport tcp",
    "train digits allreduce --algorithm native --transport tcp "
    "--tls": "--algorithm native is torch's process group, which encrypts nothing: choose another, or auto",
    "simulate digits allreduce --network "
    "local-latency=1us": "--network local-latency and local-bandwidth are of links inside a host: set --hosts or",
    "simulate digits downpour --network local-bandwidth=1GB": "put roles on one host with --hosts, or leave it off",
    "simulate digits downpour --network "
    "reduce=10GB": "--network reduce: sets how fast replicas add up gradients",
    "simulate digits downpour --network "
    "latency=0,jitter=0.5": "--network jitter 0.5: is a fraction of the latency, which is 0",
    "simulate digits downpour --faults "
    "restart=2s": "--faults restart: sets when crashed roles come back, but none crashes: add crash=1@500",
    "simulate digits downpour --keep-checkpoints "
    "5": "--keep-checkpoints 5: a simulation without a run folder leaves no checkpoints",
    "simulate digits downpour --phantom --evaluate-every "
    "5": "--evaluate-every 5: --phantom computes nothing that could be measured",
    "simulate digits downpour --phantom --init-from "
    ".": "--init-from .: --phantom computes nothing that could begin there",
    "simulate digits downpour --phantom --precision "
    "bf16": "--precision bf16: --phantom computes nothing in any precision",
    "simulate digits sandblaster --phantom --tolerance "
    "1": "--tolerance 1.0: --phantom computes no gradient to compare it with",
    "train digits downpour --lr-schedule "
    "backoff": "--lr-schedule backoff first makes the rate smaller after 1 epoch, and --epochs is 1",
    "draw ring --per-host 2": "--per-host 2: sets the ranks of a host, which --algorithm ring does not use",
    "draw hierarchical --network jitter=1": "--network jitter: the price of hierarchical",
}  # fmt: skip


@pytest.mark.parametrize("line", BESIDE)
def test_what_would_do_nothing_is_refused_with_the_reason(line: str, ask: Ask) -> None:
    said = ask(line, 2).err
    assert BESIDE[line] in said
    assert said.count("\n") == 1


TAKEN = [
    (db.Sandblaster(batch_size=40, overlap=0.4, portion_size=4), db.Simulated()),
    (db.Sandblaster(overlap=0.25, method="cg", history=10), db.Simulated()),
    (db.Allreduce(4, algorithm="hierarchical", per_host=2), db.Local(transport="tcp")),
    (db.Allreduce(4, algorithm="hierarchical:tree", per_host=2), db.Simulated()),
    (db.Allreduce(4, per_host=2), db.Local(transport="tcp", tls=True)),
    (db.Allreduce(4, algorithm="ring", per_host=2), db.Simulated(db.NetworkModel(local_latency=1e-6))),
    (db.Hogwild(), db.Simulated(db.NetworkModel(reduction=1e-9))),
    (db.Allreduce(), db.Simulated(db.NetworkModel(reduction=1e-9))),
    (db.Sandblaster(line_search="none"), db.Simulated(phantom=True)),
]


@pytest.mark.parametrize(("strategy", "place"), TAKEN, ids=str)
def test_what_does_something_is_taken(strategy: Any, place: db.Local | db.Simulated) -> None:
    place.settings(db.Job("digits", strategy))


def test_the_usual_value_is_taken_where_it_changes_nothing() -> None:
    """Who types what holds anyway has asked for nothing else."""
    job = db.Job(
        "digits", db.Downpour(), evaluate_every=0, checkpoint_every=0, keep_checkpoints=2, snapshot_every="60s"
    )
    db.Simulated(phantom=True).settings(job)
    assert words.network("latency=0,jitter=0") == {"latency": 0.0, "jitter": 0.0}


def test_one_process_has_no_links() -> None:
    with pytest.raises(UsageError, match="--transport tcp: strategy single is one process and sends nothing"):
        db.Local(transport="tcp").settings(db.Job("digits", db.Single()))


@pytest.mark.parametrize("more", [{"evaluate_every": 2}, {"target_accuracy": 0.5}, {"data_dir": "there"}], ids=str)
def test_a_script_measures_and_reads_by_itself(more: dict[str, Any]) -> None:
    with pytest.raises(UsageError, match="is for a task; a script loads and measures its own data"):
        db.Local().launch(db.Job("script", db.Downpour(), **more), [__file__])


def test_a_guests_script_reads_its_data_by_itself() -> None:
    with pytest.raises(UsageError, match="--data-dir there: names the data of a task, but a script reads its own"):
        Guest("ticket", ["script.py"], data_dir="there").run()


def test_a_rhythm_of_evaluations_needs_a_test_set() -> None:
    bare = dataclasses.replace(resolve("digits"), test=None)
    assert not evaluates(db.Job("digits").settings(), bare)
    with pytest.raises(UsageError, match=r"--evaluate-every 3: task .* has no test set to measure on"):
        evaluates(db.Job("digits", evaluate_every=3).settings(), bare)


def test_no_weight_decay_is_none_also_where_the_optimizer_has_one_of_its_own() -> None:
    asked = [
        options.parse("train", "digits", "downpour", ["--optimizer", "adamw", *more]).optimizer()
        for more in ([], ["--weight-decay", "0"])
    ]
    assert asked == [optim("adamw"), optim("adamw", weight_decay=0.0)]
