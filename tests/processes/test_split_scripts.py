"""Scripts whose model is split over the partitions of a replica: what they train, and what they may not."""

import dataclasses
import functools
from pathlib import Path
from typing import Any

import jobs
import pytest
import torch
from torch import nn

from distbelief.core import records
from distbelief.core.optimizer import optim
from distbelief.errors import UsageError
from distbelief.places.processes.local import Local
from distbelief.strategies import Allreduce, Downpour, Synchronous

SCRIPT = """
import sys, torch, distbelief as db, jobs
from torch import nn
from torch.nn.functional import cross_entropy
import test_split_scripts as here

replica = db.join()
whole = here.net()
model = {split}
optimizer = {optimizer}
for number, (x, y) in enumerate(replica.batches(here.data())):
    {inside}
{after}
"""
STEP = """optimizer.zero_grad()
    loss = cross_entropy(model(x), y)
    loss.backward()
    optimizer.step()
    replica.report(loss=loss)
    {more}"""
FIELDS = {
    "split": "replica.split(whole, db.Split('stages', partitions=2))", "optimizer": "replica.optimizer(model)",
    "inside": STEP, "more": "", "after": "",
}  # fmt: skip


def net() -> nn.Module:
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 6), nn.Tanh(), nn.Linear(6, 4)).double()


def data(samples: int = 10 * jobs.BATCH) -> tuple[torch.Tensor, torch.Tensor]:
    made = jobs.data(samples)
    return made.inputs.double(), made.targets


def launch(folder: Path, strategy: Any, on: Local | None = None, **fields: Any) -> Any:
    own = {**FIELDS, **{name: fields.pop(name) for name in FIELDS if name in fields}}
    own["inside"] = own["inside"].replace("{more}", own.pop("more"))
    return jobs.launch(folder, SCRIPT.format(**own), strategy, on=on, **fields)


def differ(folder: Path, other: Path) -> float:
    """By how much the models of two runs differ at most."""
    some, others = jobs.weights(folder / "run"), jobs.weights(other / "run")
    assert some.keys() == others.keys() == net().state_dict().keys()
    return max(float((some[name] - others[name]).abs().max()) for name in some)


BY = {
    "stages": {},
    "neurons": {"split": "replica.split(whole, db.Split('neurons', partitions=2))"},
    "microbatches": {
        "split": "replica.split(whole, loss=cross_entropy)",
        "inside": STEP.replace("cross_entropy(model(x), y)", "model(x, y)"),
    },
}


SHARED: dict[str, Any] = {"replicas": 1, "shards": 3, "optimizer": optim("momentum", lr=0.1)}


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any]:
    """The script with the whole model: its folder, and the result."""
    folder = tmp_path_factory.mktemp("whole")
    return folder, launch(folder, Downpour(**SHARED), split="whole")


@pytest.mark.parametrize("way", BY)
def test_ten_steps_of_a_split_replica_are_those_of_the_whole_script(
    tmp_path: Path, whole: tuple[Path, Any], way: str
) -> None:
    """Downpour in float64; what it tells of its loss too."""
    folder, result = whole
    more = {"microbatches": 3, "schedule": "1f1b", "split": "stages"} if way == "microbatches" else {}
    results = [result, launch(tmp_path / "split", Downpour(partitions=2, **SHARED, **more), **BY[way])]  # type: ignore[arg-type]  # its options
    assert differ(folder, tmp_path / "split") < 1e-11
    assert differ(folder, tmp_path / "split") == 0.0 or way != "stages"
    for key in ("outcome", "steps", "samples", "pushes", "updates"):
        assert results[0][key] == results[1][key], key
    assert results[0]["steps"] == 10
    told = [result["history"][-1]["train_loss"] for result in results]
    assert told[0] == pytest.approx(told[1], rel=1e-12)


def test_a_script_is_clipped_by_the_norm_of_all_partitions(tmp_path: Path, whole: tuple[Path, Any]) -> None:
    launch(tmp_path / "whole", Downpour(**SHARED), split="whole", clip_norm=0.5)
    launch(tmp_path / "split", Downpour(partitions=2, **SHARED), clip_norm=0.5)
    assert differ(tmp_path / "whole", tmp_path / "split") < 1e-11
    assert differ(whole[0], tmp_path / "split") > 1e-3


@pytest.mark.parametrize(("strategy", "transport"), [("synchronous", "tcp"), ("allreduce", "tls")])
def test_rounds_of_split_replicas_are_those_of_whole_ones(tmp_path: Path, strategy: str, transport: str) -> None:
    """Of one replica of two minibatches each, or of two in a group, which begins with all."""
    shared: dict[str, Any] = {"optimizer": optim("momentum", lr=0.1)}
    kinds: dict[str, Any] = {
        "synchronous": functools.partial(Synchronous, replicas=1, shards=2, push_every=2, **shared),
        "allreduce": functools.partial(Allreduce, replicas=2, **shared),
    }
    launch(tmp_path / "whole", kinds[strategy](), split="whole", epochs=2)
    on = Local(transport="tcp", tls=True) if transport == "tls" else Local(transport=transport)
    launch(tmp_path / "split", kinds[strategy](partitions=2), on=on, epochs=2)
    assert differ(tmp_path / "whole", tmp_path / "split") < 1e-11


def test_a_script_keeps_its_own_chance_and_each_partition_draws_the_same(tmp_path: Path) -> None:
    """Dropout of the model draws by keys of its own, and what the script draws after it is as if it had not."""
    drawn = """before = torch.get_rng_state()
    output = model(x)
    assert torch.equal(torch.get_rng_state(), before)
    cross_entropy(output * torch.rand(4), y).backward()
    optimizer.step(); optimizer.zero_grad()"""
    dropping = "db.Split('stages', partitions=2)); model.whole.insert(1, nn.Dropout(0.5)"
    launch(tmp_path, Downpour(replicas=1, partitions=2), split=f"replica.split(whole, {dropping})", inside=drawn)


def test_a_partition_that_is_killed_has_its_minibatch_dealt_again(tmp_path: Path, watch: jobs.Watch) -> None:
    """Its replica comes again, or the others go on; each minibatch counts."""
    killed: list[int] = []
    watch.once(records.EpochDone, lambda: killed.append(jobs.kill("replica 1.1")))
    result = launch(tmp_path, Downpour(replicas=2, partitions=2, restarts=1), epochs=jobs.LONG)
    assert killed
    assert killed[0]
    assert (result["outcome"], result["samples"]) == ("done", jobs.LONG * 160)
    assert [one.role for one in watch.of(records.Gone) if one.died] == ["replica 1.0"]


@pytest.mark.parametrize(
    ("strategy", "act"), [(Downpour(replicas=1), "break"), (Synchronous(replicas=1), "replica.stop()")], ids=str
)
def test_the_job_ends_in_peace_where_the_scripts_leave_their_loops(tmp_path: Path, strategy: Any, act: str) -> None:
    inside = f"if number == 5: {act}\n    {STEP}"
    result = launch(tmp_path, dataclasses.replace(strategy, partitions=2), epochs=jobs.MANY, inside=inside)
    assert result["samples"] > 0
    assert (result["outcome"] == "left") is (act == "break")
    assert jobs.weights(tmp_path / "run").keys() == net().state_dict().keys()


LEFT: dict[str, tuple[Any, str, str]] = {
    "one partition alone": (
        Downpour(replicas=1), "if number == 5 and replica.partition == 1: break",
        "the script of replica 0.1 has ended a minibatch, or has left the loop, while that of replica 0.0",
    ),
    "a group": (Allreduce(replicas=1), "if number == 5: break", "left before its end, of a split replica: with"),
}  # fmt: skip


@pytest.mark.parametrize("name", LEFT)
def test_a_loop_that_split_replicas_cannot_leave_so_ends_the_job(tmp_path: Path, name: str) -> None:
    strategy, act, says = LEFT[name]
    with pytest.raises(UsageError, match=says):
        launch(tmp_path, dataclasses.replace(strategy, partitions=2), epochs=jobs.MANY, inside=f"{act}\n    {STEP}")


def test_who_waits_for_the_norm_of_another_that_has_left_is_told_so(tmp_path: Path) -> None:
    act = "loss.backward()\n    if number == 5 and replica.partition == 1: break"
    strategy = Downpour(replicas=1, partitions=2)
    with pytest.raises(UsageError, match=r"the script of replica 0\.1 has ended a minibatch, or has"):
        launch(tmp_path, strategy, epochs=jobs.MANY, clip_norm=0.5, inside=STEP.replace("loss.backward()", act))
