"""A user's own script under `launch`: what it may do, what it may get wrong, and which models it may train."""

from pathlib import Path
from typing import Any

import jobs
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

from distbelief.cli import main
from distbelief.core import records
from distbelief.core.optimizer import Optimizer, optim
from distbelief.errors import DataError, DistbeliefError, LayoutError, TrainingError, UsageError
from distbelief.places.processes.local import Local
from distbelief.places.simulated.simulated import Simulated
from distbelief.runtime.loop import join
from distbelief.strategies import Allreduce, Bounded, Downpour, Strategy, Synchronous

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
        Downpour(push_every=3, fetch_every=2, local_lr=0.1),
        Synchronous(replicas=3, backup_workers=1),
        Bounded(staleness=0, prefetch=1),
    ],
    ids=str,
)
def test_an_epoch_has_as_many_samples_and_steps_as_the_data(tmp_path: Path, strategy: Strategy) -> None:
    result = launch(tmp_path, strategy, epochs=2)
    assert (result["outcome"], result["samples"], result["steps"]) == ("done", 2 * jobs.SAMPLES, 2 * 21)
    jobs.net().load_state_dict(weights(tmp_path), strict=True)


@pytest.mark.parametrize(
    ("optimizer", "path", "groups"),
    [
        (optim("sgd", lr=0.5, weight_decay=0.1, decay_exempt=True), "served", ""),
        (optim("sgd", lr=0.5), "direct", ", optim=db.optim('sgd', lr=0.5)"),
    ],
    ids=["exempt", "named by the script"],
)
def test_one_replica_is_the_plain_loop(tmp_path: Path, optimizer: Optimizer, path: str, groups: str) -> None:
    given = {} if groups else {"optimizer": optimizer}
    launch(tmp_path, Downpour(replicas=1, shards=2, **given), path=path, groups=groups, epochs=2)
    plain: Any = Simulated(keep=True)
    jobs.run(tmp_path / "task", Downpour(replicas=1, shards=1, optimizer=optimizer), plain, epochs=2)
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


def test_an_option_changes_what_a_script_trains(tmp_path: Path) -> None:
    trained = []
    for number, options in enumerate([{}, {"clip_norm": 0.01}, {"seed": 1}]):
        folder = tmp_path / str(number)
        folder.mkdir()
        launch(folder, Downpour(replicas=1, optimizer=optim("sgd", lr=0.1)), before="torch.manual_seed(3)", **options)
        trained.append(torch.cat([value.flatten() for value in weights(folder).values()]))
    assert not torch.equal(trained[0], trained[1])
    assert not torch.equal(trained[0], trained[2])


def test_a_script_begins_with_the_seed_of_its_job(tmp_path: Path) -> None:
    launch(tmp_path, Downpour(replicas=1, optimizer=optim("sgd", lr=0.0)), seed=5, after="sys.exit(0)")
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
NORM = """
model = nn.Sequential(nn.Linear(8, 16, bias=False), nn.BatchNorm1d(16), nn.Linear(16, 4))
model[0].weight.requires_grad_(False)
"""
MODELS: dict[str, dict[str, Any]] = {
    "batch norm, partly frozen": {"before": NORM, "model": "model"},
    "tied": {"before": TIED, "model": "model"},
    "parameters without a gradient": {"before": UNUSED, "model": "Unused()"},
    "groups": {"groups": GROUPS},
    "bfloat16": {"model": "jobs.net().bfloat16()", "inside": "x = x.bfloat16()"},
    "mixed": {
        "before": "model = jobs.net(); model[0].double()",
        "model": "nn.Sequential(model[0], jobs.Cast(), *model[1:])",
        "inside": "x = x.double()",
    },
}

STILL = {
    "batch norm, partly frozen": {"0.weight"},
    "groups": {"0.weight", "0.bias"},
    "parameters without a gradient": {"never.weight", "never.bias"},
}
"""What of them stays as it was."""


@pytest.mark.parametrize(("number", "name"), [*enumerate(MODELS)], ids=[*MODELS])
def test_the_trained_model_loads_into_the_plain_one(tmp_path: Path, number: int, name: str) -> None:
    """By sgd and adam in turn, with minibatches ahead and without."""
    optimizer = optim(("sgd", "adam")[number % 2], lr=0.05)
    strategy = Downpour(replicas=1, shards=2, optimizer=optimizer, prefetch=number // 2 % 2)
    assert launch(tmp_path, strategy, **MODELS[name])["outcome"] == "done"
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
    strategy = Downpour(replicas=1, shards=1, optimizer=optim("momentum", lr=0.1))
    launch(tmp_path, strategy, epochs=2, batch=32)
    folder = tmp_path / "whole"
    folder.mkdir()
    launch(folder, strategy, epochs=1, batch=32)
    assert launch(folder, strategy, epochs=2, batch=32, resume=True)["samples"] == 2 * jobs.SAMPLES
    assert all(torch.equal(value, weights(tmp_path)[name]) for name, value in weights(folder).items())


SAVES = """
import copy, io, sys, torch, distbelief as db
from torch import nn
import jobs

class Centred(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer, self.head = nn.Linear(8, 8), nn.Linear(8, 4)
        self.register_buffer("mean", torch.zeros(8))
    def forward(self, x):
        self.mean = 0.9 * self.mean + 0.1 * x.mean(0)
        return self.head(self.layer(x - self.mean).tanh())

replica, model = db.join(), Centred()
optimizer, held, begun = replica.optimizer(model), model.layer.weight.data_ptr(), model.layer.weight.detach().clone()
for x, y in replica.batches(jobs.data(), jobs.BATCH):
    optimizer.zero_grad()
    nn.functional.cross_entropy(model(x), y).backward()
    optimizer.step()
    file = io.BytesIO()
    torch.save(model.state_dict(), file)
    assert file.tell() < 5_000, file.tell()
    assert copy.deepcopy(model).layer.weight.equal(model.layer.weight)
assert model.layer.weight.data_ptr() == held and not model.layer.weight.equal(begun)
torch.save(model.state_dict(), __file__ + ".saved")
"""


@pytest.mark.parametrize("strategy", [Downpour(1, 2), Synchronous(1, 1), Allreduce(1)], ids=lambda one: one.name)
def test_the_model_of_a_script_is_its_own_to_save_and_to_copy_and_its_buffers_may_be_assigned_anew(
    tmp_path: Path, strategy: Strategy
) -> None:
    launch(tmp_path, strategy, SAVES.replace("{", "{{").replace("}", "}}"), epochs=2)
    saved = torch.load(tmp_path / "script.py.saved")
    assert saved["mean"].abs().sum() > 0.1
    assert torch.equal(weights(tmp_path)["mean"], saved["mean"])


def test_paths_of_a_job_are_of_the_folder_of_its_command_wherever_a_script_goes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    save_file(jobs.net().state_dict(), "given")
    moves = "import os; os.makedirs('elsewhere', exist_ok=True); os.chdir('elsewhere')"
    Path("script.py").write_text(LOOP.format(**{**FIELDS, "before": moves}))
    job = jobs.job("run", Allreduce(2), task="script", init_from="given", snapshot_every="5")
    assert Local().launch(job, ["script.py"])["outcome"] == "done"
    assert (tmp_path / "run" / "model.safetensors").exists()
    assert not list((tmp_path / "elsewhere").iterdir())


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


def test_minibatches_may_be_made_before_the_loop_over_epochs_and_a_stop_after_it_is_nothing(tmp_path: Path) -> None:
    inside = "assert batches.epoch == epoch\n    gone[epoch] += 1"
    source = MADE.format(**{**FIELDS, "inside": inside, "after": "  replica.stop()\nassert gone == [21] * 3, gone"})
    source = source.replace("for epoch in range(3)", "gone = [0] * 3\nfor epoch in replica.epochs(3)")
    source = source.replace("  replica.stop()", "  epoch == 2 and replica.stop()")
    result = launch(tmp_path, Downpour(replicas=1), source.replace("{", "{{").replace("}", "}}"))
    assert (result["outcome"], result["epochs"], result["samples"]) == ("done", 3, 3 * jobs.SAMPLES)


REFUSED = """
import re, torch, distbelief as db
from torch import nn
import jobs

def refused(says, call, *given, **named):
    try:
        call(*given, **named)
    except db.UsageError as error:
        assert re.search(says, str(error)), error
    else:
        raise AssertionError(f"nothing was refused: {says}")

replica, data, words = db.join(), jobs.data(), "it takes the model, replica.optimizer.model."
outside = "outside of a minibatch .* call it in the loop, instead of break"
whole = "must be a whole number, 1 or more"
refused("replica.optimizer", replica.batches, [])
refused(outside, replica.stop)
refused("epochs.1.5.: must be a whole number", replica.epochs, 1.5)
model = jobs.net()
refused(f"optimizer.<generator .*{words}; .*--optimizer, --lr", replica.optimizer, model.parameters())
refused(f"optimizer.Adam .*{words}", replica.optimizer, torch.optim.Adam(model.parameters()))
refused("optimizer.groups=0.1.: parameter groups are a list of dictionaries", replica.optimizer, model, 0.1)
refused("optimizer.optim=Adam.: make it with distbelief.optim", replica.optimizer, model, optim=torch.optim.Adam)
refused("complex64", replica.optimizer, nn.Linear(8, 4, dtype=torch.complex64))
refused("no parameter of the model", replica.optimizer, model, [{"params": nn.Linear(1, 1).parameters()}])
model[0].bias.requires_grad_(False)
rates = [{"params": model[0].parameters(), "lr": 0.1}, {"params": model[2].parameters(), "lr": 0.3}]
rates[0]["lr"] = 0.0
optimizer = replica.optimizer(model, rates)
refused(f"batches.batch_size=16.0.: {whole}", replica.batches, data, 16.0)
refused(f"batches.batch_size='16'.: {whole}", replica.batches, data, "16")
refused(f"batches.batch_size=0.: {whole}", replica.batches, data, 0)

def backward(x, y):
    optimizer.zero_grad()
    nn.functional.cross_entropy(model(x), y).backward()

for number, (x, y) in enumerate(replica.batches(data, jobs.BATCH)):
    backward(x, y)
    one, other = optimizer.param_groups
    if number == 0:
        refused("a push is one gradient, .*for L-BFGS use strategy sandblaster", optimizer.step, lambda: 0.0)
        refused("add_param_group.*pass all groups at once", optimizer.add_param_group, {"params": [torch.ones(1)]})
        refused("batches.. a second time: .* all epochs .*drop the outer loop", replica.batches, data)
        other["lr"] = -1.0
        refused("the learning rate to 0, -1: it began as 0, 0.3, and must be 0 or more times that", optimizer.step)
        one["lr"], other["lr"] = 0.1, 0.3
        refused("the learning rate to 0.1, 0.3: it began as 0, 0.3, and must be 0 or more times that", optimizer.step)
        one["lr"] = 0.0
        model[0].bias.requires_grad_(True)
        backward(x, y)
        refused("^0.bias has a gradient in step 0, and was frozen when .*freeze it afterwards", optimizer.step)
        model[0].bias.requires_grad_(False).grad = None
    refused("report.samples=-1.: must be a whole number, 0 to", replica.report, samples=-1)
    replica.report(samples=5 + number)
    optimizer.step()
    refused("optimizer.step.. twice", optimizer.step)
    refused("report.samples=3. after optimizer.step", replica.report, samples=3)
    if number == 2:
        break
refused("epochs.2. after the training has begun", replica.epochs, 2)
refused(outside, replica.stop)
"""


def test_what_a_script_may_not_is_refused_by_what_it_calls_and_it_may_go_on(tmp_path: Path) -> None:
    result = launch(tmp_path, Downpour(replicas=1, shards=1), REFUSED.replace("{", "{{").replace("}", "}}"))
    assert (result["outcome"], result["steps"], result["samples"]) == ("left", 3, 5 + 6 + 7)


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
LOOK = "\ndef look(batches):\n    next(iter(batches))\n    return batches\n"
WRONG: dict[str, tuple[dict[str, Any], type[DistbeliefError], str]] = {
    "never asks for minibatches": (
        {"source": "import distbelief as db\ndb.join()\n"},
        UsageError,
        r"script.py ended without taking part.*batches",
    ),
    "a rate of no job": (
        {"inside": "optimizer.param_groups[0]['lr'] = 0.2", "strategy": Allreduce()},
        UsageError,
        "sets the learning rate to 0.2: with strategy allreduce only the job may change it; use --lr-schedule",
    ),
    "a loop around what was made before it": (
        {"source": MADE.format(**FIELDS)},
        UsageError,
        r"batches\(\) a second time: .*for epoch in replica.epochs\(n\)",
    ),
    "a generator that never ends": (
        {
            "source": LOOP.format(**{**FIELDS, "before": AGAIN, "batch": "16)"}).replace(
                "(replica.b", "(again(replica.b"
            )
        },
        UsageError,
        r"batches\(\) a second time: .*for epoch in replica.epochs\(n\)",
    ),
    "two numbers of epochs": (
        {"before": "epoch = next(db.join().epochs(2))", "epochs": 7},
        UsageError,
        r"--epochs 7: the script calls replica.epochs\(2\); leave one of them off",
    ),
    "a minibatch without a step": (
        {"inside": "if number == 1: continue", "strategy": Allreduce()},
        UsageError,
        r"without optimizer.step\(\) for the last: with strategy allreduce each minibatch needs a step",
    ),
    "a first minibatch to look at": (
        {"source": LOOP.format(**{**FIELDS, "before": LOOK, "batch": "16)"}).replace("(replica.b", "(look(replica.b")},
        UsageError,
        r"batches\(\) a second time: the first was ended, by next\(iter\(...\)\).* dataset\[0\]",
    ),
    "no step": ({"inside": "continue"}, UsageError, r"had no optimizer.step\(\): it has trained nothing"),
    "raises": (
        {"inside": "assert number < 3, 'three is enough'"},
        TrainingError,
        r"^replica \d: .*script.py, line 12, raised AssertionError: three",
    ),
    "a batch norm's one": (
        {"inside": "nn.BatchNorm1d(8)(x[:1])"},
        TrainingError,
        r"raised ValueError: Expected more than 1 value.*with --drop-last",
    ),
    "raises in a worker": (
        {"before": LOADED.format(number="number"), "samples": "); dataset = Loaded(", "batch": "16, num_workers=1"},
        TrainingError,
        r"script.py, line 12, raised KeyError: 'no picture 100'\n",
    ),
    "samples that do not stack, in a worker": (
        {"before": LOADED.format(number=-1), "samples": "); dataset = Loaded(", "batch": "16, num_workers=1"},
        DataError,
        r"^replica \d: [^\n]*script.py, line \d+: the samples of Loaded do not stack .*: pass DataLoader",
    ),
    "no python": ({"before": "for"}, TrainingError, r"raised SyntaxError"),
    "ends itself": (
        {"inside": "sys.exit('enough')"},
        TrainingError,
        r"replica \d: .*ended itself with sys.exit\('enough'\)",
    ),
    "not a number": (
        {"inside": "x = x / 0 if number == 3 else x", "clip_norm": 1.0},
        TrainingError,
        r"replica \d: .*script.py, line 16: the norm of the gradient is nan at step 3 .*lower --lr",
    ),
    "a loss that is not a number, told first": (
        {"inside": "replica.report(loss=float('nan') if number == 3 else 1.0)"},
        TrainingError,
        r"replica \d: .*, line 12: the loss is nan at step 3 .*lower --lr",
    ),
    "another model": (
        {"model": "nn.Linear(8, 4 + replica.index)", "epochs": jobs.MANY, "strategy": Downpour(replicas=2)},
        LayoutError,
        r"replica \d does not fit .*'weight' is parameter \[\d, 8\]",
    ),
}


@pytest.mark.parametrize("name", WRONG)
def test_what_is_wrong_is_one_clear_error(tmp_path: Path, watch: jobs.Watch, name: str) -> None:
    options, kind, words = WRONG[name]
    source = {"source": options["source"].replace("{", "{{")} if "source" in options else {}
    with pytest.raises(kind, match=f"(?s){words}") as caught:
        launch(tmp_path, **{"strategy": Downpour(replicas=1, shards=1), "epochs": 2, **options, **source})
    assert "\n" not in str(caught.value)
    if "raises" in name:
        (trace,) = caught.value.__notes__
        assert trace.startswith("Traceback")
        assert "runpy" not in trace
        assert trace.count("script.py") >= 1
    if name == "raises":
        assert not [record for record in watch.of(records.Gone) if record.reason == "it was done"]


def test_a_script_that_no_job_has_started_is_told_what_to_run() -> None:
    with pytest.raises(UsageError, match="no job has started this process; run the script with: distbelief launch"):
        join()


@pytest.mark.parametrize("inside", ["", "assert number < 3"])
def test_a_script_is_shown_as_it_speaks_and_its_traceback_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], inside: str
) -> None:
    monkeypatch.chdir(tmp_path)
    fields = {"before": "print('words:', sys.argv[1:])", "inside": inside}
    Path("script.py").write_text(LOOP.format(**{**FIELDS, **fields}))
    words = ["launch", "downpour", "--replicas", "1", "--epochs", "1", "--quiet", "--out", "run"]
    status = main.run([*words, "script.py", "a", "-b"])
    shown = capfd.readouterr()
    assert shown.out.count("words: ['a', '-b']") == 1
    if not inside:
        assert (status, shown.err) == (0, "")
    else:
        assert (status, shown.err.count("Traceback")) == (1, 1)
        assert shown.err.splitlines()[-1] == "distbelief: replica 0: script.py, line 12, raised AssertionError"
