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
from safetensors.torch import load_file
from torch.nn.functional import cross_entropy

from distbelief.core import records
from distbelief.core.optimizer import optim
from distbelief.errors import JobFailed, TrainingError, UsageError
from distbelief.strategies import Allreduce, Downpour, Hogwild, Single, Synchronous
from distbelief.tasks.order import Order

EPOCHS = 4


def weights(folder: Path) -> dict[str, torch.Tensor]:
    return load_file(folder / "model.safetensors")


def plain(optimizer: str, in_order: bool = False, **options: Any) -> dict[str, torch.Tensor]:
    """The loop as anybody would write it."""
    torch.manual_seed(0)
    model, data, order = jobs.net(), jobs.data(), Order(jobs.SAMPLES, jobs.BATCH, 0)
    numbers = torch.arange(jobs.SAMPLES).split(jobs.BATCH)
    kind = {"sgd": torch.optim.SGD, "adam": torch.optim.Adam}[optimizer]
    steps = kind(model.parameters(), **options)
    for epoch in range(EPOCHS):
        for index in range(order.batches):
            x, y = data.batch(numbers[index] if in_order else order.indices(epoch, index))
            steps.zero_grad()
            cross_entropy(model(x), y).backward()
            steps.step()
    return dict(model.state_dict())


@pytest.mark.parametrize(
    ("optimizer", "options"), [("sgd", {"lr": 0.5}), ("sgd", {"lr": 0.1, "momentum": 0.9}), ("adam", {"lr": 0.01})]
)
def test_single_and_one_replica_are_the_plain_loop(tmp_path: Path, optimizer: str, options: dict[str, float]) -> None:
    chosen = optim(optimizer, **options)
    alone = jobs.run(tmp_path / "single", Single(optimizer=chosen), epochs=EPOCHS)
    served = jobs.run(tmp_path / "downpour", Downpour(replicas=1, shards=1, optimizer=chosen), epochs=EPOCHS)
    right = plain(optimizer, **options)
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


@pytest.mark.parametrize("split", [{}, {"partitions": 2, "split": "stages"}], ids=["whole", "split"])
def test_data_in_order_are_read_in_order(tmp_path: Path, split: dict[str, Any]) -> None:
    jobs.run(tmp_path, Single(optimizer=optim("sgd", lr=0.5), **split), epochs=EPOCHS, order="sequential")
    for name, value in plain("sgd", in_order=True, lr=0.5).items():
        torch.testing.assert_close(weights(tmp_path)[name], value, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("order", ["shuffled", "sequential"])
def test_data_of_its_own_are_refused(tmp_path: Path, order: str) -> None:
    with pytest.raises(UsageError, match="--data own: strategy single has one replica, which has all the data"):
        jobs.run(tmp_path, Single(), data="own", order=order)


def test_the_target_ends_the_loop(tmp_path: Path) -> None:
    result = jobs.run(tmp_path, Single(optimizer=optim("adam", lr=0.02)), epochs=jobs.MANY, target_accuracy=0.9)
    assert result["outcome"] == "target"
    assert result["target"]["reached"]
    assert result["test_accuracy"] >= 0.9
    assert (tmp_path / "model.safetensors").exists()


def test_the_run_begins_where_it_is_told_to(tmp_path: Path) -> None:
    jobs.run(tmp_path / "first", Single(), epochs=1)
    jobs.run(tmp_path / "second", Single(optimizer=optim("sgd", lr=0.0)), epochs=1, init_from=str(tmp_path / "first"))
    first = weights(tmp_path / "first")
    assert all(torch.equal(value, first[name]) for name, value in weights(tmp_path / "second").items())


@pytest.mark.parametrize(
    "strategy",
    [Single(optimizer=optim("sgd", lr=1e38)), Downpour(optimizer=optim("sgd", lr=1e38))],
    ids=lambda s: s.name,
)
def test_a_loss_that_is_no_number_is_one_clear_error(tmp_path: Path, strategy: Any) -> None:
    with pytest.raises(
        TrainingError,
        match=r"(single|replica \d): the loss is (nan|inf) at step \d+ \(epoch \d+, minibatch \d+\); lower --lr \(it "
        r"is "
        r"1e\+38\)",
    ):
        jobs.run(tmp_path, strategy, epochs=EPOCHS)


WRONG = {
    "raising": r"task 'jobs_wrong:raising' raised at epoch 1, minibatch \d+: ValueError: three is enough",
    "data_raising": r"minibatch \d+: KeyError: 'a sample is missing'",
    "training_data_raise": "the training data of task 'jobs_wrong:training_data_raise' cannot be loaded: "
    "FileNotFoundError: no such file",
    "loading_raises": "the data of task 'jobs_wrong:loading_raises' cannot be loaded: FileNotFoundError: no such file",
    "model_raises": "the model of task 'jobs_wrong:model_raises' cannot be built: RuntimeError: no model today",
    "lazy": "parameter '0.weight' has no shape yet: it is of a lazy module; run a minibatch through the model first",
    "no_model": "must return a torch.nn.Module",
    "dies": "single: killed|every replica is gone|is gone: its process ended with status 3|ended with status 3",
    "dies_well": "ended with status 0",
    "exits": r"minibatch \d+: SystemExit: 0",
    "nothing_to_test": "the test data of task 'jobs_wrong:nothing_to_test' hold 0 samples",
    "nothing_to_train": "the model has no parameter with requires_grad=True",
}


@pytest.mark.parametrize("name", WRONG)
@pytest.mark.parametrize("strategy", [Single(), Downpour(replicas=2)], ids=lambda s: s.name)
def test_what_a_users_task_raises_is_one_clear_error(tmp_path: Path, strategy: Any, name: str) -> None:
    with pytest.raises((TrainingError, JobFailed, UsageError, jobs.DataError), match=WRONG[name]) as caught:
        jobs.run(tmp_path, strategy, task=f"jobs_wrong:{name}", epochs=2)
    assert "\n" not in str(caught.value)
    if name == "raising":
        assert "jobs_wrong.py" in caught.value.__notes__[0]
        assert str(caught.value).startswith(("single: ", "replica "))


@pytest.mark.parametrize(
    "strategy", [Single(), Downpour(), Synchronous(), Allreduce(), Hogwild()], ids=lambda s: s.name
)
def test_without_the_last_minibatch_where_it_is_smaller(tmp_path: Path, strategy: Any) -> None:
    """20 whole minibatches of 16, and one of 10."""
    result = jobs.run(tmp_path, strategy, epochs=2, drop_last=True)
    assert (result["samples"], result["steps"]) == (2 * 320, 2 * 20)


SCRIPT = """
import sys
import distbelief as db
result = db.run(db.Job("jobs:tiny", {strategy}, epochs=1, out="{out}"))
print(result["outcome"], result["samples"], __name__)
"""


@pytest.mark.parametrize("how", ["file", "-c", "stdin"])
@pytest.mark.parametrize("strategy", ["db.Single()", "db.Downpour()"])
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
        timeout=60,
    )
    assert done.stdout.split() == ["done", str(jobs.SAMPLES), "__main__"], done.stderr
    assert done.stderr == ""


def test_jobs_run_side_by_side_in_threads(tmp_path: Path) -> None:
    main, results = sys.modules["__main__"], {}

    def run(index: int) -> None:
        results[index] = jobs.run(tmp_path / str(index), Single() if index else Downpour(), epochs=2)

    threads = [threading.Thread(target=run, args=(index,)) for index in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert [results[index]["samples"] for index in range(3)] == [2 * jobs.SAMPLES] * 3
    assert sys.modules["__main__"] is main


def test_it_records_what_downpour_records(tmp_path: Path, watch: jobs.Watch) -> None:
    jobs.run(tmp_path, Single(), epochs=2)
    kinds = [type(record) for record in watch.records if not isinstance(record, records.Stepped)]
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
