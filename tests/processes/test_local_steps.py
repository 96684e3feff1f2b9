"""Local steps in a user's script: `local=` beside plain PyTorch, what it keeps of it, and a death."""

from __future__ import annotations

from pathlib import Path

import jobs
import pytest

from distbelief.core import records
from distbelief.core.optimizer import optim
from distbelief.places.processes.local import Local
from distbelief.strategies import Downpour, Strategy, Synchronous

SCRIPT = """
import copy, sys, torch, distbelief as db
from torch.nn.functional import cross_entropy
import jobs
replica = db.join()
model = jobs.net()

def groups_of(net):
    return {groups}

plain = copy.deepcopy(model)
own = torch.optim.AdamW(groups_of(plain))
optimizer = replica.optimizer(model, groups_of(model), local=torch.optim.AdamW)
kept = replica.keep(minibatches=0, local=optimizer.local)
schedules = [torch.optim.lr_scheduler.ExponentialLR(one, 0.97) for one in ({scheduled})]
for number, (x, y) in enumerate(replica.batches(jobs.data(), jobs.BATCH)):
    for net, stepped in ((model, optimizer), (plain, own)):
        stepped.zero_grad()
        cross_entropy(net(x), y).backward()
        stepped.step()
    for schedule in schedules:
        schedule.step()
    if {equal}:
        for ours, theirs in zip(model.parameters(), plain.parameters()):
            torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-6)
    kept.minibatches += 1
    if kept.minibatches == int(sys.argv[1]):
        replica.stop()
        break
"""
GROUPS = "[{'params': [net[0].weight], 'lr': 0.03}, {'params': [net[0].bias, *net[2].parameters()], 'lr': 0.003}]"
FIELDS = {"groups": "[{'params': [*net.parameters()]}]", "scheduled": "", "equal": "False"}
WHOLE = optim("sgd", 1.0)


def launch(folder: Path, strategy: Strategy, stops: int = 0, path: str = "auto", **options: object) -> object:
    """Launch a script that stops the job after some minibatches."""
    fields = {name: options.pop(name, FIELDS[name]) for name in FIELDS}
    source = SCRIPT
    for name, text in fields.items():
        source = source.replace(f"{{{name}}}", str(text))
    return jobs.launch(folder, source, strategy, str(stops), on=Local(path=path), **{"epochs": 2, **options})


@pytest.mark.parametrize("scheduled", ["", "optimizer, own", "optimizer.local, own"], ids=["constant", "job", "own"])
@pytest.mark.parametrize(
    ("strategy", "path"),
    [(Downpour(1, 2, WHOLE, push_every=4), "direct"), (Downpour(1, 2, WHOLE, push_every=4), "served"),
     (Synchronous(1, 2, WHOLE, push_every=3), "auto")],
    ids=["direct", "served", "rounds"],
)  # fmt: skip
def test_a_script_of_one_replica_steps_as_its_optimizer_does(
    tmp_path: Path, strategy: Strategy, path: str, scheduled: str
) -> None:
    """After each step, with rates of its groups' own, and schedules on either optimizer."""
    launch(tmp_path, strategy, path=path, groups=GROUPS, scheduled=scheduled, equal="True")


def test_the_state_of_local_steps_and_their_rate_go_on(tmp_path: Path) -> None:
    strategy = Downpour(1, 2, WHOLE, push_every=5)
    launch(tmp_path / "whole", strategy, lr_schedule="linear")
    launch(tmp_path / "parts", strategy, 25, lr_schedule="linear")
    launch(tmp_path / "parts", strategy, lr_schedule="linear", resume=True)
    jobs.assert_close(tmp_path / "whole" / "run", tmp_path / "parts" / "run")


def test_a_killed_replica_begins_its_local_optimizer_anew(tmp_path: Path, watch: jobs.Watch) -> None:
    watch.once(records.Stepped, lambda: jobs.kill("replica 1"))
    strategy = Synchronous(2, 2, optim("nesterov", 0.7), push_every=3, local_optimizer=optim("adamw"))
    result = jobs.run(tmp_path, strategy, epochs=jobs.LONG, evaluate_every=0)
    assert result["outcome"] == "done"
    told = "replica 1 is there again; the state of its local optimizer begins anew"
    assert told in {record.text for record in watch.of(records.Note)}
