"""A user's own script under `launch`: what it may do, what it may get wrong, and which models it may train."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import jobs
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

from distbelief.core import records
from distbelief.core.optimizer import Optimizer, optim
from distbelief.errors import DataError, DistbeliefError, LayoutError, TrainingError, UsageError
from distbelief.places.processes.local import Local
from distbelief.runtime.loop import join
from distbelief.strategies import Allreduce, Bounded, Downpour, Softsync, Strategy, Synchronous

LOOP = """
import sys, torch, distbelief as db
from torch import nn
from torch.nn.functional import cross_entropy
import jobs
{before}
replica = db.join()
model = {model}
dataset = jobs.data({samples})
optimizer = replica.optimizer(model{groups})
for number, (x, y) in enumerate(replica.batches(dataset, batch_size={batch})):
    {inside}
    optimizer.zero_grad()
    loss = cross_entropy(model(x), y)
    loss.backward()
    optimizer.step()
    replica.report(loss=loss)
{after}
"""
HEAD = "for number, (x, y) in enumerate("
MADE = LOOP.replace(f"{HEAD}replica.batches(dataset, batch_size={{batch}}))", f"{HEAD}batches)")
"""With the minibatches made before a loop over epochs."""
MADE = MADE.replace(HEAD, "batches = replica.batches(dataset, batch_size={batch})\nfor epoch in range(3):\n  " + HEAD)
FIELDS = {
    "before": "",
    "model": "jobs.net()",
    "samples": "",
    "groups": "",
    "batch": jobs.BATCH,
    "inside": "",
    "after": "",
}


def launch(
    folder: Path, strategy: Strategy | None = None, source: str = LOOP, path: str = "served", **options: Any
) -> dict[str, Any]:
    """Run a script made of `LOOP` with some fields changed."""
    (folder / "script.py").write_text(
        source.format(**{**FIELDS, **{key: options.pop(key) for key in FIELDS if key in options}})
    )
    job = jobs.job(folder / "run", strategy or Downpour(replicas=2), task="script", **options)
    return Local(path=path).launch(job, [str(folder / "script.py"), "word", "--option"])


def weights(folder: Path) -> dict[str, torch.Tensor]:
    return load_file(folder / "run" / "model.safetensors")


@pytest.mark.parametrize(
    "strategy",
    [
        Downpour(),
        Downpour(prefetch=1),
        Downpour(read_in_place=True),
        Downpour(push_every=3, fetch_every=2, local_lr=0.1),
        Synchronous(),
        Synchronous(replicas=3, backup_workers=1),
        Softsync(),
        Bounded(staleness=0, prefetch=1),
    ],
    ids=str,
)
def test_an_epoch_has_as_many_samples_and_steps_as_the_data(tmp_path: Path, strategy: Strategy) -> None:
    result = launch(tmp_path, strategy, epochs=3)
    assert result["outcome"] == "done"
    assert result["samples"] == 3 * jobs.SAMPLES
    assert result["steps"] == 3 * 21
    jobs.net().load_state_dict(weights(tmp_path), strict=True)


@pytest.mark.parametrize(
    ("optimizer", "path", "groups"),
    [
        (optim("sgd", lr=0.5), "direct", ""),
        (optim("sgd", lr=0.5, weight_decay=0.1, decay_exempt=True), "served", ""),
        (optim("sgd", lr=0.5), "direct", ", optim=db.optim('sgd', lr=0.5)"),
    ],
    ids=["plain", "exempt", "named by the script"],
)
def test_one_replica_is_the_plain_loop(tmp_path: Path, optimizer: Optimizer, path: str, groups: str) -> None:
    given = {} if groups else {"optimizer": optimizer}
    launch(tmp_path, Downpour(replicas=1, shards=2, **given), path=path, groups=groups, epochs=2)
    jobs.run(tmp_path / "task", Downpour(replicas=1, shards=1, optimizer=optimizer), epochs=2)
    trained = load_file(tmp_path / "task" / "model.safetensors")
    assert all(torch.equal(value, trained[name]) for name, value in weights(tmp_path).items())


def test_a_script_has_the_threads_the_batch_size_and_the_weights_of_its_job(tmp_path: Path) -> None:
    given = {name: value + 1 for name, value in jobs.net().state_dict().items()}
    save_file(given, tmp_path / "given")
    options = {
        "threads": 2,
        "init_from": str(tmp_path / "given"),
        "batch": "None",
        "inside": "assert torch.get_num_threads() == 2",
    }
    assert launch(tmp_path, Downpour(replicas=2, optimizer=optim("sgd", lr=0.0)), **options)["steps"] == 21
    assert all(torch.equal(value, given[name]) for name, value in weights(tmp_path).items())


@pytest.mark.parametrize("change", [{}, {"clip_norm": 0.01}, {"seed": 1}], ids=str)
def test_an_option_changes_what_a_script_trains(tmp_path: Path, change: dict[str, Any]) -> None:
    trained = []
    for number, options in enumerate(({}, change)):
        folder = tmp_path / str(number)
        folder.mkdir()
        launch(folder, Downpour(replicas=1, optimizer=optim("sgd", lr=0.1)), before="torch.manual_seed(3)", **options)
        trained.append(torch.cat([value.flatten() for value in weights(folder).values()]))
    assert torch.equal(*trained) is not bool(change)


def test_a_script_begins_with_the_seed_of_its_job(tmp_path: Path) -> None:
    launch(tmp_path, Downpour(replicas=1, optimizer=optim("sgd", lr=0.0)), seed=5)
    torch.manual_seed(5)
    right = jobs.net().state_dict()
    assert all(torch.equal(value, right[name]) for name, value in weights(tmp_path).items())


TIED = "tied = nn.Linear(8, 8); model = nn.Sequential(tied, nn.Tanh(), tied, nn.Linear(8, 4))"
UNUSED = """
class Unused(nn.Module):
    def __init__(self):
        super().__init__()
        self.used, self.sometimes, self.never = nn.Linear(8, 4), nn.Linear(8, 4), nn.Linear(3, 3)
        self.scale = nn.Parameter(torch.ones(()))
        self.count = 0
    def forward(self, x):
        self.count += 1
        out = self.used(x) * self.scale
        return out + self.sometimes(x) if self.count % 2 else out
"""
FROZEN = "model = jobs.net(); model[0].weight.requires_grad_(False)"
GROUPS = (
    ', [{"params": model[0].parameters(), "lr": 0.0}, {"params": model[2].parameters(), "lr": 0.3, "weight_decay": '
    "0.1}]"
)
MODELS: dict[str, dict[str, Any]] = {
    "batch norm": {"model": "nn.Sequential(nn.Linear(8, 16, bias=False), nn.BatchNorm1d(16), nn.Linear(16, 4))"},
    "tied": {"before": TIED, "model": "model"},
    "frozen": {"before": FROZEN, "model": "model"},
    "parameters without a gradient": {"before": UNUSED, "model": "Unused()"},
    "groups": {"groups": GROUPS},
    "float64": {"model": "jobs.net().double()", "inside": "x = x.double()"},
    "bfloat16": {"model": "jobs.net().bfloat16()", "inside": "x = x.bfloat16()"},
    "mixed": {
        "before": "model = jobs.net(); model[0].double()",
        "model": "nn.Sequential(model[0], jobs.Cast(), *model[1:])",
        "inside": "x = x.double()",
    },
}

STILL = {
    "frozen": {"0.weight"},
    "groups": {"0.weight", "0.bias"},
    "parameters without a gradient": {"never.weight", "never.bias"},
}
"""What of them stays as it was."""


@pytest.mark.parametrize("options", [{}, {"prefetch": 1}], ids=str)
@pytest.mark.parametrize("optimizer", ["sgd", "adam"])
@pytest.mark.parametrize("name", MODELS)
def test_the_trained_model_loads_into_the_plain_one(
    tmp_path: Path, name: str, optimizer: str, options: dict[str, Any]
) -> None:
    result = launch(
        tmp_path,
        Downpour(replicas=2, shards=3, optimizer=optim(optimizer, lr=0.05), **options),
        epochs=2,
        **MODELS[name],
    )
    assert result["outcome"] == "done"
    space: dict[str, Any] = {"torch": torch, "nn": nn, "jobs": jobs}
    torch.manual_seed(0)
    exec(MODELS[name].get("before", ""), space)
    model: nn.Module = eval(MODELS[name].get("model", "jobs.net()"), space)
    before = {key: value.clone() for key, value in model.state_dict().items()}
    model.load_state_dict(weights(tmp_path), strict=True)
    after = model.state_dict()
    assert {key for key in after if torch.equal(after[key], before[key])} == STILL.get(name, set())
    assert {key: value.dtype for key, value in after.items()} == {key: value.dtype for key, value in before.items()}


def test_a_resumed_script_goes_on_where_it_was(tmp_path: Path) -> None:
    strategy = Downpour(replicas=1, optimizer=optim("momentum", lr=0.1))
    launch(tmp_path, strategy, epochs=2, batch=32)
    folder = tmp_path / "whole"
    folder.mkdir()
    launch(folder, strategy, epochs=1, batch=32)
    assert launch(folder, strategy, epochs=2, batch=32, resume=True)["samples"] == 2 * jobs.SAMPLES
    assert all(torch.equal(value, weights(tmp_path)[name]) for name, value in weights(folder).items())


BREAK = "if number == 5 and {who}: break"


def test_the_others_do_the_work_of_a_script_that_breaks_out(tmp_path: Path, watch: jobs.Watch) -> None:
    result = launch(tmp_path, epochs=4, inside=BREAK.format(who="replica.index == 1"))
    assert result["outcome"] == "done"
    assert result["samples"] == 4 * jobs.SAMPLES
    assert not any(record.died for record in watch.of(records.Gone))


def test_the_job_ends_in_peace_where_every_script_breaks_out(tmp_path: Path) -> None:
    result = launch(tmp_path, epochs=jobs.MANY, inside=BREAK.format(who="True"))
    assert result["outcome"] == "left"
    assert 0 < result["samples"] <= 12 * jobs.BATCH
    jobs.net().load_state_dict(weights(tmp_path), strict=True)


@pytest.mark.parametrize("code", ["", "0"])
def test_a_script_may_end_itself(tmp_path: Path, code: str) -> None:
    assert launch(tmp_path, after=f"sys.exit({code})")["outcome"] == "done"


def test_minibatches_may_be_made_before_the_loop_over_epochs_and_a_stop_after_it_is_nothing(tmp_path: Path) -> None:
    inside = "assert batches.epoch == epoch\n    gone[epoch] += 1"
    source = MADE.format(**{**FIELDS, "inside": inside, "after": "  replica.stop()\nassert gone == [21] * 3, gone"})
    source = source.replace("for epoch in range(3)", "gone = [0] * 3\nfor epoch in replica.epochs(3)")
    source = source.replace("  replica.stop()", "  epoch == 2 and replica.stop()")
    result = launch(tmp_path, Downpour(replicas=1), source.replace("{", "{{").replace("}", "}}"))
    assert (result["outcome"], result["epochs"], result["samples"]) == ("done", 3, 3 * jobs.SAMPLES)


LOADED = """
class Loaded(torch.utils.data.Dataset):
    def __len__(self):
        return 330
    def __getitem__(self, number):
        if number == {number}:
            raise KeyError("no picture 100")
        return torch.randn(number % 3 + 1, 8), 0
"""
AGAIN = "\ndef again(batches):\n    while True:\n        yield from batches\n"
EPOCHS = "epoch = next(db.join().epochs(2))"
WRONG: dict[str, tuple[dict[str, Any], type[DistbeliefError], str]] = {
    "never asks for minibatches": (
        {"source": "import distbelief as db\ndb.join()\n"},
        UsageError,
        r"script.py ended without taking part.*batches",
    ),
    "never joins": ({"source": "print(1)\n"}, UsageError, "ended without taking part"),
    "batches before the optimizer": (
        {"source": "import distbelief as db\nnext(db.join().batches([]))\n"},
        UsageError,
        "replica.optimizer",
    ),
    "a second time": (
        {"after": "for x, y in replica.batches(dataset): pass"},
        UsageError,
        r"batches\(\) a second time: .* all epochs .*drop the outer loop",
    ),
    "half a sample": ({"batch": "16.0"}, UsageError, r"batches\(batch_size=16.0\): must be a whole number"),
    "a batch size in words": ({"batch": "'16'"}, UsageError, r"batches\(batch_size='16'\): must be a whole number"),
    "no sample": ({"batch": "0"}, UsageError, r"batches\(batch_size=0\): must be a whole number, 1 or more"),
    "a scheduler": (
        {"inside": "optimizer.param_groups[0]['lr'] = 0.2", "lr_schedule": "linear"},
        UsageError,
        "sets the learning rate to 0.2, and so does the job .--lr-schedule",
    ),
    "a rate of no job": (
        {"inside": "optimizer.param_groups[0]['lr'] = 0.2", "strategy": Allreduce()},
        UsageError,
        "sets the learning rate to 0.2: with strategy allreduce nobody but the job does; use --lr-schedule",
    ),
    "a rate that is none": (
        {"inside": "optimizer.param_groups[0]['lr'] = -1.0"},
        UsageError,
        "sets the learning rate to -1: it began with 0.1, of which it must be a multiple",
    ),
    "a rate of one group": (
        {"groups": GROUPS.replace("0.0", "0.1"), "inside": "optimizer.param_groups[1]['lr'] = 0.1"},
        UsageError,
        "sets the learning rates of its groups to 0.1, 0.1, which is not one factor",
    ),
    "a rate where there was none": (
        {"groups": GROUPS, "inside": "optimizer.param_groups[0]['lr'] = 0.1"},
        UsageError,
        "sets the learning rate to 0.1, 0.3: it began with 0, 0.3, of which it must be a multiple",
    ),
    "a closure": (
        {"inside": "optimizer.step(lambda: 0.0)"},
        UsageError,
        "a push is one gradient, .*L-BFGS is strategy sandblaster",
    ),
    "one more group": (
        {"inside": "optimizer.add_param_group({'params': [nn.Parameter(torch.ones(1))]})"},
        UsageError,
        r"add_param_group\(\): .*give all groups at once",
    ),
    "a loop around it": (
        {
            "source": LOOP.format(**FIELDS)
            .replace("for number, (x", "for epoch in range(3):\n  for number, (x")
            .replace("\n    ", "\n      ")
        },
        UsageError,
        r"batches\(\) within the loop of line \d+: .*for epoch in replica.epochs\(n\)",
    ),
    "a loop around what was made before it": (
        {"source": MADE.format(**FIELDS)},
        UsageError,
        r"batches\(\) within the loop of line 12: .*for epoch in replica.epochs\(n\)",
    ),
    "what was made before, a second time": (
        {
            "source": MADE.format(**{**FIELDS, "after": "for x, y in batches: pass"}).replace(
                "for epoch in range(3)", "if 1"
            )
        },
        UsageError,
        r"batches\(\) a second time: .* all epochs .*drop the outer loop",
    ),
    "a generator that never ends": (
        {
            "source": LOOP.format(**{**FIELDS, "before": AGAIN, "batch": "16)"}).replace(
                "(replica.b", "(again(replica.b"
            )
        },
        UsageError,
        r"batches\(\) within the loop of line 8: .*for epoch in replica.epochs\(n\)",
    ),
    "an epoch twice": (
        {"before": EPOCHS, "after": "for x, y in replica.batches(dataset, 16): pass"},
        UsageError,
        r"batches\(\) a second time in epoch \d: each is gone through once",
    ),
    "epochs twice": ({"after": "replica.epochs(2)"}, UsageError, r"epochs\(2\) after the training has begun"),
    "half an epoch": ({"before": EPOCHS.replace("2", "1.5")}, UsageError, r"epochs\(1.5\): must be a whole number"),
    "two numbers of epochs": (
        {"before": EPOCHS, "epochs": 7},
        UsageError,
        r"--epochs 7: the script goes through replica.epochs\(2\); leave one of them off",
    ),
    "other epochs": (
        {"before": EPOCHS.replace("2", "100_000 + db.join().index"), "epochs": 1},
        DistbeliefError,
        r"goes through replica.epochs\(10000\d\), the job through 10000\d: it is one number for all",
    ),
    "an end after the loop was left": (
        {"inside": "if number == 1: break", "after": "replica.stop()", "epochs": jobs.MANY},
        UsageError,
        r"stop\(\) outside of a minibatch .* call it in the loop, in the place of break",
    ),
    "an end before the beginning": ({"before": "db.join().stop()"}, UsageError, r"stop\(\) outside of a minibatch"),
    "a minibatch without a step": (
        {"inside": "if number == 1: continue", "strategy": Allreduce()},
        UsageError,
        r"without optimizer.step\(\) for the last: with strategy allreduce each minibatch is one step",
    ),
    "a minibatch without a step, ahead": (
        {"inside": "if number == 1: continue", "strategy": Bounded(prefetch=1)},
        UsageError,
        r"without optimizer.step\(\) for the last: with --prefetch 1 each minibatch is one step",
    ),
    "an empty dataset": ({"samples": "0"}, DistbeliefError, "the training set is empty"),
    "no step": ({"inside": "continue"}, UsageError, r"without optimizer.step\(\): nothing was trained"),
    "a step too many": (
        {"inside": "model(x).sum().backward(); optimizer.step()"},
        UsageError,
        r"optimizer.step\(\) twice",
    ),
    "raises": (
        {"inside": "assert number < 3, 'three is enough'"},
        TrainingError,
        r"^replica \d: .*script.py, line 12, raised AssertionError: three",
    ),
    "raises in the model": (
        {"inside": "model(x[:, :3])"},
        TrainingError,
        r"line 12, raised RuntimeError: mat1 and mat2",
    ),
    "a batch norm's one": (
        {"inside": "nn.BatchNorm1d(8)(x[:1])"},
        TrainingError,
        r"raised ValueError: Expected more than 1 value.*with --drop-last",
    ),
    "raises in a worker": (
        {"before": LOADED.format(number="number"), "samples": "); dataset = Loaded("},
        TrainingError,
        r"script.py, line 12, raised KeyError: 'no picture 100'\n",
    ),
    "samples that do not stack, in a worker": (
        {"before": LOADED.format(number=-1), "samples": "); dataset = Loaded("},
        DataError,
        r"^replica \d: [^\n]*script.py, line \d+: the samples of Loaded do not stack .*: pass DataLoader",
    ),
    "raises after the loop": ({"after": "1 / 0"}, TrainingError, r"script.py, line 18, raised ZeroDivisionError"),
    "raises before it joins": ({"before": "import nowhere"}, TrainingError, r"line 6, raised ModuleNotFoundError"),
    "no python": ({"before": "for"}, TrainingError, r"raised SyntaxError"),
    "ends itself": (
        {"inside": "sys.exit('enough')"},
        TrainingError,
        r"replica \d: .*ended itself with sys.exit\('enough'\)",
    ),
    "not a number": (
        {"inside": "x = x / 0 if number == 3 else x"},
        TrainingError,
        r"replica \d: .*script.py, line 16: the norm of the gradient is nan at step 3 .*lower --lr",
    ),
    "not a number, clipped": (
        {"inside": "x = x / 0 if number == 3 else x", "clip_norm": 1.0},
        TrainingError,
        r"replica \d: .*, line 16: the norm of the gradient is nan at step 3 ",
    ),
    "a loss that is not a number, told first": (
        {"inside": "replica.report(loss=float('nan') if number == 3 else 1.0)"},
        TrainingError,
        r"replica \d: .*, line 12: the loss is nan at step 3 .*lower --lr",
    ),
    "another model": (
        {"model": "nn.Linear(8, 4 + replica.index)"},
        LayoutError,
        r"replica \d does not fit .*'weight' is parameter \[\d, 8\]",
    ),
    "other data": ({"samples": "100 + replica.index"}, DistbeliefError, r"has 10\d training samples, the job has 10\d"),
    "another batch size": (
        {"batch": "16 + replica.index"},
        DistbeliefError,
        r"asks for batches of 1\d, the job has 1\d",
    ),
    "no batch size": ({"batch": "0"}, UsageError, r"batches\(batch_size=0\): must be a whole number, 1 or more"),
    "a broken batch size": (
        {"batch": "2.5"},
        UsageError,
        r"batches\(batch_size=2.5\): must be a whole number, 1 or more",
    ),
    "a dtype nobody trains": ({"model": "nn.Linear(8, 4, dtype=torch.complex64)"}, UsageError, "complex64"),
    "a device that is not there": ({"device": "cuda:77"}, UsageError, "--device cuda:77"),
    "parameters in the place of a model": (
        {"model": "jobs.net().parameters()"},
        UsageError,
        r"optimizer\(<generator .*it takes the model itself, replica.optimizer\(model\); .*--optimizer, --lr",
    ),
    "an optimizer in the place of a model": (
        {"model": "torch.optim.Adam(jobs.net().parameters())"},
        UsageError,
        r"optimizer\(Adam .*it takes the model itself, replica.optimizer\(model\)",
    ),
    "a rate in the place of groups": (
        {"groups": ", 0.1"},
        UsageError,
        r"optimizer\(groups=0.1\): parameter groups are a list of dictionaries",
    ),
    "an optimizer of torch's": (
        {"groups": ", optim=torch.optim.Adam"},
        UsageError,
        r"optimizer\(optim=Adam\): it is made by distbelief.optim",
    ),
    "what was frozen": (
        {"before": FROZEN, "model": "model", "inside": "model[0].weight.requires_grad_(True)"},
        UsageError,
        r"script.py, line 16: 0.weight has a gradient in step 0, and was frozen when .*freeze it then",
    ),
    "nothing to train": ({"model": "nn.Flatten()"}, UsageError, "nothing to train"),
    "a foreign group": (
        {"groups": ", [{'params': nn.Linear(1, 1).parameters()}]"},
        UsageError,
        "no parameter of the model",
    ),
}


@pytest.mark.parametrize("name", WRONG)
def test_what_is_wrong_is_one_clear_error(tmp_path: Path, watch: jobs.Watch, name: str) -> None:
    options, kind, words = WRONG[name]
    source = {"source": options["source"].replace("{", "{{")} if "source" in options else {}
    with pytest.raises(kind, match=f"(?s){words}") as caught:
        # long enough that the second replica joins before the first has done it all: the error ends it
        launch(tmp_path, **{"epochs": 100_000 if "other" in name else 2, **options, **source})
    assert "\n" not in str(caught.value)
    if "raises" in name:
        (trace,) = caught.value.__notes__
        assert trace.startswith("Traceback")
        assert "runpy" not in trace
        assert trace.count("script.py") >= 1
    if name in ("raises", "raises in the model"):
        assert not [record for record in watch.of(records.Gone) if record.reason == "it was done"]


def test_a_script_that_no_job_has_started_is_told_what_to_run() -> None:
    with pytest.raises(UsageError, match="no job has started this process; run the script with: distbelief launch"):
        join()


@pytest.mark.parametrize("inside", ["", "assert number < 3"])
def test_a_script_is_shown_as_it_speaks_and_its_traceback_once(tmp_path: Path, inside: str) -> None:
    fields = {"before": "print('words:', sys.argv[1:])", "inside": inside}
    (tmp_path / "script.py").write_text(LOOP.format(**{**FIELDS, **fields}))
    command = [sys.executable, "-m", "distbelief", "launch", "downpour", "--epochs", "60", "--quiet"]
    command += ["--out", str(tmp_path / "run"), "script.py", "a", "-b"]
    environment = {**os.environ, "PYTHONPATH": str(Path(jobs.__file__).parent)}
    done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, env=environment, timeout=60)
    spoken = done.stdout.count("words: ['a', '-b']")
    if not inside:
        assert (done.returncode, done.stderr) == (0, "")
        took_part = sum(
            one["steps"] > 0 for one in json.loads((tmp_path / "run" / "result.json").read_text())["per_replica"]
        )
        assert took_part <= spoken <= 2  # on a busy machine the job may be done before the second has come
    else:
        assert (done.returncode, done.stderr.count("Traceback")) == (1, 1)
        assert spoken >= 1  # the other may not have come so far
        assert re.fullmatch(
            r"distbelief: replica \d: script.py, line 12, raised AssertionError", done.stderr.splitlines()[-1]
        )
