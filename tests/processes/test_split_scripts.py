"""Scripts whose model is split over the partitions of a replica: what they train, and what they are told that they may
not.
"""

import functools
from pathlib import Path
from typing import Any

import jobs
import pytest
import torch
from safetensors.torch import load_file
from torch import nn

from distbelief.core.optimizer import optim
from distbelief.places.processes.local import Local
from distbelief.strategies import Allreduce, Bounded, Downpour, Softsync, Synchronous

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
    folder.mkdir(exist_ok=True)
    own = {**FIELDS, **{name: fields.pop(name) for name in FIELDS if name in fields}}
    own["inside"] = own["inside"].replace("{more}", own.pop("more"))
    (folder / "script.py").write_text(SCRIPT.format(**own))
    job = jobs.job(folder / "run", strategy, task="script", **fields)
    return (on or Local()).launch(job, [str(folder / "script.py")])


def weights(folder: Path) -> dict[str, torch.Tensor]:
    return load_file(folder / "run" / "model.safetensors")


def differ(folder: Path, other: Path) -> float:
    """By how much the models of two runs differ at most."""
    some, others = weights(folder), weights(other)
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


@pytest.mark.parametrize("way", BY)
def test_ten_steps_of_a_split_replica_are_those_of_the_whole_script(tmp_path: Path, way: str) -> None:
    """Downpour in float64; what it tells of its loss too."""
    shared: dict[str, Any] = {"replicas": 1, "shards": 3, "optimizer": optim("momentum", lr=0.1)}
    more = {"microbatches": 3, "schedule": "1f1b", "split": "stages"} if way == "microbatches" else {}
    results = [
        launch(tmp_path / "whole", Downpour(**shared), split="whole"),
        launch(tmp_path / "split", Downpour(partitions=2, **shared, **more), **BY[way]),  # type: ignore[arg-type]  # its options
    ]
    assert differ(tmp_path / "whole", tmp_path / "split") < 1e-11
    assert differ(tmp_path / "whole", tmp_path / "split") == 0.0 or way != "stages"
    for key in ("outcome", "steps", "samples", "pushes", "updates"):
        assert results[0][key] == results[1][key], key
    assert results[0]["steps"] == 10
    told = [result["history"][-1]["train_loss"] for result in results]
    assert told[0] == pytest.approx(told[1], rel=1e-12)


@pytest.mark.parametrize(("strategy", "transport"), [("synchronous", "tcp"), ("allreduce", "shared")])
def test_rounds_of_split_replicas_are_those_of_whole_ones(tmp_path: Path, strategy: str, transport: str) -> None:
    """Of one replica of two minibatches each, as who is dealt which is chance where there is another; of two in a
    group, which begins with all.
    """
    shared: dict[str, Any] = {"optimizer": optim("momentum", lr=0.1)}
    kinds: dict[str, Any] = {
        "synchronous": functools.partial(Synchronous, replicas=1, shards=2, push_every=2, **shared),
        "allreduce": functools.partial(Allreduce, replicas=2, **shared),
    }
    launch(tmp_path / "whole", kinds[strategy](), split="whole", epochs=2)
    launch(tmp_path / "split", kinds[strategy](partitions=2), on=Local(transport=transport), epochs=2)
    assert differ(tmp_path / "whole", tmp_path / "split") < 1e-11


@pytest.mark.parametrize(
    "strategy", [Bounded(partitions=2), Softsync(partitions=2, prefetch=1), Synchronous(partitions=2)], ids=str
)
def test_an_epoch_has_as_many_samples_and_steps_as_the_data(tmp_path: Path, strategy: Any) -> None:
    result = launch(tmp_path, strategy, epochs=2, more="assert replica.partition in (0, 1)")
    assert (result["outcome"], result["samples"], result["steps"]) == ("done", 320, 20)
    assert weights(tmp_path).keys() == net().state_dict().keys()
