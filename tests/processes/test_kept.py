"""What a script keeps, with real processes: it goes on after `--resume` and in a replica that is started anew."""

import json
from pathlib import Path
from typing import Any

import jobs
import pytest

from distbelief.core.optimizer import optim
from distbelief.strategies import Allreduce, Bounded, Downpour, Softsync, Strategy, Synchronous

LOOP = """
import json, os, signal, sys, torch, distbelief as db
from torch.nn.functional import cross_entropy
import jobs
stops = json.loads(sys.argv[1])
replica = db.join()
model = {model}
optimizer = replica.optimizer(model)
{kept}
def tell(*what):
    with open(__file__ + f".{{replica.index}}.{{replica.partition}}", "a") as file:
        print(json.dumps(what), file=file)
{begins}
for epoch in replica.epochs({epochs}):
    for number, (x, y) in enumerate(replica.batches(jobs.data(), batch_size=jobs.BATCH)):
        optimizer.zero_grad()
        cross_entropy(model(x), y).backward()
        optimizer.step()
        {steps}
        kept.minibatches += 1
        tell(epoch, kept.minibatches, kept.epochs, optimizer.param_groups[0]["lr"])
        if [kept.minibatches, 0] in stops:
            replica.stop()
            break
    kept.epochs.append(epoch)
    tell("end of", epoch, kept.minibatches)
    if [epoch, 1] in stops:
        replica.stop()
        break
"""
SCHEDULED = {
    "kept": "scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda number: 0.99**number)\n"
    "kept = replica.keep(minibatches=0, scheduler=scheduler, epochs=[])",
    "steps": "scheduler.step()",
}
FIELDS = {"model": "jobs.net()", "kept": "kept = replica.keep(minibatches=0, epochs=[])", "begins": "", "steps": ""}


def launch(folder: Path, strategy: Strategy, stops: Any = (), epochs: int = 4, **options: Any) -> dict[str, Any]:
    """Run a script that keeps something, up to some minibatches or ends of epochs at which it stops the job."""
    fields = {**FIELDS, **{key: options.pop(key) for key in FIELDS if key in options}}
    return jobs.launch(folder, LOOP.format(epochs=epochs, **fields), strategy, json.dumps(stops), **options)


def said(folder: Path) -> list[list[Any]]:
    """What a replica's script has told, in all attempts."""
    return [json.loads(line) for line in (folder / "script.py.0.0").read_text().splitlines()]


SGD = optim("momentum", lr=0.1)
ONE = {
    "downpour": Downpour(replicas=1, shards=2, optimizer=SGD),
    "prefetch": Downpour(replicas=1, shards=1, optimizer=SGD, push_every=1, prefetch=1),
    "bounded": Bounded(replicas=1, shards=1, optimizer=SGD),
    "softsync": Softsync(replicas=1, shards=1, optimizer=SGD),
    "synchronous": Synchronous(replicas=1, shards=2, optimizer=SGD),
}


def steps(folder: Path) -> list[list[Any]]:
    """What it has told of its minibatches."""
    return [line for line in said(folder) if line[0] != "end of"]


@pytest.mark.parametrize("name", ONE)
def test_a_script_goes_on_as_if_it_had_not_been_stopped(tmp_path: Path, name: str) -> None:
    """In the middle of an epoch, at the end of one, and where all that was asked for was done."""
    launch(tmp_path / "whole", ONE[name], **SCHEDULED)
    parts = tmp_path / "parts"
    launch(parts, ONE[name], [[25, 0]], **SCHEDULED)
    launch(parts, ONE[name], [[1, 1]], **SCHEDULED, resume=True)
    launch(parts, ONE[name], epochs=3, **SCHEDULED, resume=True)
    launch(parts, ONE[name], **SCHEDULED, resume=True)
    assert steps(parts) == steps(tmp_path / "whole")
    if name != "prefetch":  # which fetches its first parameters as often as it begins
        assert jobs.same(tmp_path / "whole" / "run", parts / "run")


def test_a_split_replica_goes_on_as_if_it_had_not_been_stopped(tmp_path: Path) -> None:
    """Each of its partitions with what the first has kept."""
    split = {"model": "replica.split(jobs.net(), db.Split('stages', partitions=2))", **SCHEDULED}
    strategy = Synchronous(replicas=1, shards=2, partitions=2, optimizer=SGD)
    launch(tmp_path / "whole", strategy, epochs=3, **split)
    for epochs in (1, 3):
        launch(tmp_path / "parts", strategy, epochs=epochs, resume=epochs > 1, **split)
    assert steps(tmp_path / "parts") == steps(tmp_path / "whole")
    assert (tmp_path / "parts" / "script.py.0.1").read_text().count("end of") == 4


def test_a_script_of_a_job_without_a_server_goes_on_too(tmp_path: Path) -> None:
    strategy = Allreduce(1, optimizer=SGD)
    launch(tmp_path / "whole", strategy)
    for epochs in (1, 3, 4):
        launch(tmp_path / "parts", strategy, epochs=epochs, resume=epochs > 1)
    assert steps(tmp_path / "parts") == steps(tmp_path / "whole")


BEGINS = """
if kept.minibatches:
    tell("again", kept.minibatches, kept.epochs)
"""
DIES = (
    "if kept.minibatches == 25 and not os.path.exists('died'):\n"
    "            open('died', 'w').close(); os.kill(os.getpid(), signal.SIGKILL)"
)


@pytest.mark.parametrize("strategy", [ONE["downpour"], ONE["synchronous"], Allreduce(1)], ids=lambda one: one.name)
def test_a_replica_that_is_started_anew_has_what_was_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, strategy: Strategy
) -> None:
    """It begins with the epoch in which that was, and counts on."""
    monkeypatch.chdir(tmp_path)
    launch(tmp_path, strategy, begins=BEGINS, steps=DIES, snapshot_every="2minibatches", epochs=6)
    told = said(tmp_path)
    [begun] = [number for number, line in enumerate(told) if line[0] == "again"]
    _, minibatches, epochs = told[begun]
    assert 10 < minibatches <= 25
    assert epochs == list(range(len(epochs)))
    assert told[begun + 1][:2] in ([len(epochs), minibatches + 1], ["end of", len(epochs)])
    assert [line[1] for line in told if line[0] == "end of"][-1] == 5
