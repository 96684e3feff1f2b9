"""The plain loop, against an oracle and against Downpour; and the places from which a job can be started."""

import os
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import jobs
import pytest
import torch
from patience import SECONDS
from safetensors.torch import load_file
from torch.nn.functional import cross_entropy

from distbelief.core import records
from distbelief.core.optimizer import optim
from distbelief.errors import JobFailed, TrainingError, UsageError
from distbelief.strategies import Downpour, Single, Strategy
from distbelief.tasks.order import Order

EPOCHS = 2


def weights(folder: Path) -> dict[str, torch.Tensor]:
    return load_file(folder / "model.safetensors")


def plain(**options: Any) -> dict[str, torch.Tensor]:
    """The loop as anybody would write it."""
    torch.manual_seed(0)
    model, data, order = jobs.net(), jobs.data(), Order(jobs.SAMPLES, jobs.BATCH, 0)
    steps = torch.optim.SGD(model.parameters(), **options)
    for epoch in range(EPOCHS):
        for index in range(order.batches):
            x, y = data.batch(order.indices(epoch, index))
            steps.zero_grad()
            cross_entropy(model(x), y).backward()
            steps.step()
    return dict(model.state_dict())


def test_single_and_one_replica_are_the_plain_loop(tmp_path: Path, watch: jobs.Watch) -> None:
    """And record the same."""
    chosen = optim("sgd", lr=0.1, momentum=0.9)
    served = jobs.run(tmp_path / "downpour", Downpour(replicas=1, shards=1, optimizer=chosen), epochs=EPOCHS)
    watch.records.clear()
    alone = jobs.run(tmp_path / "single", Single(optimizer=chosen), epochs=EPOCHS)
    right = plain(lr=0.1, momentum=0.9)
    for folder in ("single", "downpour"):
        trained = weights(tmp_path / folder)
        for name, value in right.items():
            torch.testing.assert_close(trained[name], value, rtol=1e-4, atol=1e-5)
    assert alone["test_accuracy"] == pytest.approx(served["test_accuracy"], abs=0.02)
    assert {key: alone[key] for key in ("steps", "samples", "updates", "epochs", "outcome")} == {
        key: served[key] for key in ("steps", "samples", "updates", "epochs", "outcome")
    }
    # there are no shards whose updates somebody makes, and no links
    assert set(alone) == set(served) - {"path", "carrier"}
    kinds = [type(record) for record in watch.records if not isinstance(record, (records.Stepped, records.Note))]
    once = [records.EpochDone, records.Tested, records.Checkpointed]
    assert kinds == [
        records.Started,
        records.Joined,
        *once,
        *once,
        records.StepsTimed,
        records.Applied,
        records.Finished,
    ]


@pytest.mark.parametrize("order", ["shuffled", "sequential"])
def test_data_of_its_own_are_refused(tmp_path: Path, order: str) -> None:
    with pytest.raises(
        UsageError, match="--data own means nothing to strategy single; its one replica has all the data"
    ):
        jobs.run(tmp_path, Single(), data="own", order=order)


def test_a_loss_that_is_no_number_is_one_clear_error(tmp_path: Path) -> None:
    with pytest.raises(
        TrainingError,
        match=r"replica \d: the loss is (nan|inf) at step \d+ \(epoch \d+, minibatch \d+\); lower --lr \(it is "
        r"1e\+38\)",
    ):
        jobs.run(tmp_path, Downpour(optimizer=optim("sgd", lr=1e38)), epochs=EPOCHS, evaluate_every=0)


SINGLE, SERVED = Single(), Downpour(replicas=2)
WRONG: dict[str, tuple[Strategy, str]] = {
    "raising": (SERVED, r"task 'jobs_wrong:raising' raised at epoch 1, minibatch \d+: ValueError: three is enough"),
    "data_raising": (SINGLE, r"minibatch \d+: KeyError: 'a sample is missing'"),
    "training_data_raise": (
        SERVED,
        "the training data of task 'jobs_wrong:training_data_raise' cannot be loaded: FileNotFoundError: no such file",
    ),
    "loading_raises": (
        SINGLE, "the data of task 'jobs_wrong:loading_raises' cannot be loaded: FileNotFoundError: no such file",
    ),
    "model_raises": (
        SERVED, "the model of task 'jobs_wrong:model_raises' cannot be built: RuntimeError: no model today"
    ),
    "lazy": (
        SERVED,
        "parameter '0.weight' of a lazy module has no shape yet: run a minibatch through the model first",
    ),
    "no_model": (SINGLE, "must return a torch.nn.Module"),
    "dies": (SERVED, "every replica is gone|is gone: its process ended with status 3|ended with status 3"),
    "dies_well": (SINGLE, "ended with status 0"),
    "exits": (SINGLE, r"minibatch \d+: SystemExit: 0"),
    "nothing_to_test": (SERVED, "the test data of task 'jobs_wrong:nothing_to_test' hold 0 samples"),
    "nothing_to_train": (SINGLE, "the model has no parameter with requires_grad=True"),
}  # fmt: skip


@pytest.mark.parametrize("name", WRONG)
def test_what_a_users_task_raises_is_one_clear_error(tmp_path: Path, name: str) -> None:
    strategy, told = WRONG[name]
    with pytest.raises((TrainingError, JobFailed, UsageError, jobs.DataError), match=told) as caught:
        jobs.run(tmp_path, strategy, task=f"jobs_wrong:{name}")
    assert "\n" not in str(caught.value)
    if name == "raising":
        assert "jobs_wrong.py" in caught.value.__notes__[0]
        assert str(caught.value).startswith("replica ")


SCRIPT = """
import sys
import distbelief as db
result = db.run(db.Job("jobs:tiny", {strategy}, epochs=1, out="{out}"))
print(result["outcome"], result["samples"], __name__)
"""


@pytest.mark.parametrize(
    ("how", "strategy"),
    [("file", "db.Downpour()"), *(pytest.param(how, "db.Single()", marks=pytest.mark.long) for how in ("-c", "stdin"))],
)
def test_a_job_starts_from_anywhere_and_needs_no_guard(tmp_path: Path, strategy: str, how: str) -> None:
    source, environment = (
        SCRIPT.format(strategy=strategy, out="run"),
        {**os.environ, "PYTHONPATH": str(Path(jobs.__file__).parent)},
    )
    (tmp_path / "script.py").write_text(source)
    words = {"file": ["script.py"], "-c": ["-c", source], "stdin": ["-"]}[how]
    done = subprocess.run(
        [sys.executable, *words],
        input=source if how == "stdin" else "",
        capture_output=True,
        text=True,
        cwd=tmp_path,
        env=environment,
        timeout=SECONDS,
    )
    assert done.stdout.split() == ["done", str(jobs.SAMPLES), "__main__"], done.stderr
    assert done.stderr == ""


def test_jobs_run_side_by_side_in_threads(tmp_path: Path) -> None:
    main, results = sys.modules["__main__"], {}

    def run(index: int) -> None:
        results[index] = jobs.run(tmp_path / str(index), Single() if index else Downpour())

    threads = [threading.Thread(target=run, args=(index,)) for index in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(SECONDS)
    assert [results[index]["samples"] for index in range(2)] == [jobs.SAMPLES] * 2
    assert sys.modules["__main__"] is main
