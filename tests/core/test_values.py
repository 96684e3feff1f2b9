"""The door of the Python API: a wrong type or name is a UsageError, and what stands for a value is taken."""

import dataclasses
from collections.abc import Callable
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import distbelief as db
from distbelief.errors import UsageError

NAN, INF = float("nan"), float("inf")


def tiny(**fields: Any) -> db.Task:
    return db.Task(
        **{
            "model": lambda: nn.Linear(1, 2),
            "train": lambda: (torch.zeros(8, 1), torch.zeros(8, dtype=torch.int64)),
            **fields,
        }
    )


def run(job: Any = None, **how: Any) -> Any:
    return db.run(job or db.Job(tiny(), db.Downpour(1, 1), batch_size=4), **{"on": "simulated", **how})


CLASS = "not a class; write"
WRONG: dict[str, tuple[Callable[[], object], str]] = {
    "no such strategy": (lambda: db.Job("digits", "dwonpour"), "unknown strategy 'dwonpour'; did you mean 'downpour'?"),
    "a strategy of None": (lambda: db.Job("digits", None), "Job(strategy=None): must be a Strategy or a string, "),
    "a strategy's class": (lambda: db.Job("digits", db.Downpour), f"{CLASS} Downpour()"),
    "no such optimizer": (lambda: db.Downpour(optimizer="adagard"),
        "unknown optimizer 'adagard'; did you mean 'adagrad'?"),
    "torch's optimizer": (lambda: db.Downpour(optimizer=torch.optim.Adam),
        "Downpour(optimizer=Adam): must be an Optimizer or a string, not a class"),
    "replicas as a string": (lambda: db.Downpour("2"), "Downpour(replicas='2'): must be a whole number, not a str"),
    "a number for a flag": (lambda: db.Sandblaster(deterministic=1),
        "Sandblaster(deterministic=1): must be True or False, not an int"),
    "locks as bytes": (lambda: db.Locking(locks=b"shard"), "Locking(locks=b'shard'): must be a string, not a bytes"),
    "a task's function": (lambda: db.Job(db.tasks.digits), "must be a string or a Task, not a function"),
    "epochs as a string": (lambda: db.Job("digits", epochs="3"), "Job(epochs='3'): must be a whole number, not a str"),
    "a bool of epochs": (lambda: db.Job("digits", epochs=np.True_), "must be a whole number, not a bool"),
    "a folder of data as a list": (lambda: db.Job("digits", data_dir=["x"]), "Job(data_dir=['x']): must be a string"),
    "steps as a string": (lambda: db.Job("digits", lr_steps="30"), "must be a tuple, each of it a number, not a str"),
    "a rate that is too large": (lambda: db.Job("digits", clip_norm=10**400), "is too large a number to compute with"),
    "a rate as a string": (lambda: db.optim("sgd", lr="x"), "Optimizer(lr='x'): must be a number or None, not a str"),
    "an option as a string": (lambda: db.optim("sgd", momentum="0.9"),
        "must be a number, True or False or a tuple, each of it a number, not a str"),
    "an optimizer's name as a class": (lambda: db.optim(torch.optim.SGD), "optim(SGD): must be a string, not a class"),
    "the network as a dict": (lambda: db.Simulated({"latency": 1}),
        "Simulated(network={'latency': 1}): must be a NetworkModel, not a dict"),
    "one crash": (lambda: db.Simulated(crashes=db.Crash("shard 0", 3)),
        "must be a tuple, each of it a Crash, not a Crash"),
    "a crash as a pair": (lambda: db.Simulated(crashes=[("shard 0", 3)]), "must be a Crash, not a tuple"),
    "a latency with its unit": (lambda: db.NetworkModel(latency="1ms"),
        "NetworkModel(latency='1ms'): must be a number, not a str"),
    "an outage's side as a string": (lambda: db.Outage(0, 1, "shard 0"),
        "must be a tuple, each of it a string, not a str"),
    "an outage as a tuple": (lambda: db.NetworkModel(outages=((0, 1, ("shard 0",)),)),
        "must be an Outage, not a tuple"),
    "slow ones as a list": (lambda: db.ComputeModel(slow=[1]),
        "must be a dict from a whole number to a number, not a list"),
    "a slow one by name": (lambda: db.ComputeModel(slow={"replica 1": 4}), "must be a whole number, not a str"),
    "a view of a word": (lambda: db.View(quiet="no"), "View(quiet='no'): must be True or False"),
    "no job": (lambda: db.run("digits"), "job='digits': must be a Job, not a str"),
    "a job's class": (lambda: run(db.Job), "job=Job: must be a Job, " + CLASS + " Job()"),
    "no such place": (lambda: run(on="lokal"), "unknown place 'lokal'; did you mean 'local'?"),
    "a place as a class": (lambda: run(on=db.Simulated),
        "run(on=Simulated): must be a Local, a Simulated or a string, " + CLASS + " Simulated()"),
    "a view as a bool": (lambda: run(view=False), "view=False: must be a View, not a bool"),
    "a task's folder": (lambda: db.tasks.mnist(data_dir=3),
        "Task(data_dir=3): must be a string, None or a PathLike, not an int"),
    "data that are no function": (lambda: tiny(train=(torch.zeros(2, 1), torch.zeros(2))),
        "train is a function, not a tuple: write train=lambda:"),
    "no function to prepare": (lambda: db.TensorData(torch.zeros(2), torch.zeros(2), "float"),
        "prepare='float'): must be a function or None"),
    "inputs alone": (lambda: db.tasks.as_data(torch.zeros(2, 1)), "Tensor cannot be dealt out in portions"),
}  # fmt: skip


@pytest.mark.parametrize("what", WRONG)
def test_a_value_of_a_wrong_type_is_refused_at_the_door(what: str) -> None:
    make, said = WRONG[what]
    with pytest.raises(UsageError) as caught:
        make()
    assert said in str(caught.value)
    assert "\n" not in str(caught.value)


UNFIT: dict[str, tuple[Callable[[], object], str]] = {
    "no rate": (lambda: run(db.Job(tiny(), db.Downpour(optimizer=db.optim("sgd", lr=NAN)))),
        "--lr nan: must be 0 or more, and finite"),
    "an infinite option": (lambda: run(db.Job(tiny(), db.Downpour(optimizer=db.optim("momentum", momentum=INF)))),
        "momentum=inf: must be finite"),
    "an empty option": (lambda: run(db.Job(tiny(), db.Downpour(optimizer=db.optim("adam", betas=())))),
        "betas=(): optimizer adam takes 2 numbers"),
    "too large a seed": (lambda: run(db.Job(tiny(), db.Downpour(), seed=10**30)), "does not fit into 64 bits"),
    "too large a work unit": (lambda: run(db.Job(tiny(), db.Sandblaster(send_every=10**30))),
        "does not fit into 64 bits"),
    "an endless latency": (lambda: run(on=db.Simulated(db.NetworkModel(latency=INF))),
        "network latency inf must be 0 or more, and finite"),
    "a message far away": (lambda: run(on=db.Simulated(crashes=(db.Crash("shard 0", 10**30),))),
        "its messages are counted from 1, in 64 bits"),
}  # fmt: skip


@pytest.mark.parametrize("what", UNFIT)
def test_a_number_that_no_job_can_have_is_refused_before_it_begins(what: str) -> None:
    make, said = UNFIT[what]
    with pytest.raises(UsageError) as caught:
        make()
    assert said in str(caught.value)


def test_names_are_taken_as_on_the_command_line() -> None:
    job = db.Job("digits", "synchronous")
    assert job.strategy == db.Synchronous()
    assert db.Downpour(optimizer="adagrad") == db.Downpour(optimizer=db.optim("adagrad"))
    assert dataclasses.replace(job, strategy="single").strategy == db.Single()
    assert run(db.Job(tiny(), "downpour", batch_size=4), on="simulated") == run(
        db.Job(tiny(), db.Downpour(), batch_size=4), on=db.Simulated()
    )


def test_what_stands_for_a_value_becomes_it() -> None:
    job = db.Job(
        "digits",
        epochs=np.int32(3),
        clip_norm=np.float32(0.5),
        target_accuracy=Fraction(1, 2),
        lr_steps=[1, 2],
        out=Path("here"),
    )
    assert (job.epochs, job.clip_norm, job.target_accuracy, job.lr_steps, job.out) == (3, 0.5, 0.5, (1.0, 2.0), "here")
    assert [type(value) for value in (job.epochs, job.clip_norm, job.lr_steps[0], job.out)] == [int, float, float, str]
    assert type(db.Downpour(np.int64(3)).replicas) is int
    assert type(db.optim("sgd", lr=1).lr) is float
    assert type(db.ComputeModel(slow={np.int64(1): np.float64(2)}).slow[1]) is float


def test_what_stands_behind_the_optimizer_of_a_strategy_is_how_often_it_pushes() -> None:
    for kind in (db.Downpour, db.Bounded, db.Softsync, db.Synchronous):
        assert kind(2, 2, "sgd", 5) == kind(2, 2, "sgd", push_every=5)


def test_two_tensors_are_data() -> None:
    inputs, targets = torch.arange(6.0).view(3, 2), torch.arange(3)
    got = db.tasks.as_data((inputs, targets)).batch(torch.tensor([2, 0]))
    assert torch.equal(got[0], inputs[[2, 0]])
    assert torch.equal(got[1], targets[[2, 0]])
    with pytest.raises(UsageError, match=r"inputs \[3, 2\] and targets \[2\] do not match"):
        db.tasks.as_data((inputs, targets[:2]))
