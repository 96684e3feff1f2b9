"""A user's own script under `launch`: what it may do, what it may get wrong, and which models it may train."""

from pathlib import Path
from typing import Any

import jobs
import pytest
import torch
from safetensors.torch import save_file

from distbelief.cli import main
from distbelief.core import records
from distbelief.core.optimizer import optim
from distbelief.errors import DistbeliefError, LayoutError, TrainingError, UsageError
from distbelief.places.processes.local import Local
from distbelief.runtime.loop import join
from distbelief.strategies import Allreduce, Downpour, Strategy

LOOP = """
import sys, torch, distbelief as db
from torch import nn
from torch.nn.functional import cross_entropy
import jobs
{before}
replica = db.join()
model = {model}
dataset = jobs.data({samples})
optimizer = replica.optimizer(model)
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
FIELDS = {"before": "", "model": "jobs.net()", "samples": "", "batch": jobs.BATCH, "inside": "", "after": ""}


def launch(folder: Path, strategy: Strategy | None = None, source: str = LOOP, **options: Any) -> dict[str, Any]:
    """Run a script made of `LOOP` with some fields changed."""
    made = source.format(**{**FIELDS, **{key: options.pop(key) for key in FIELDS if key in options}})
    return jobs.launch(folder, made, strategy, "word", "--option", on=Local(path="served"), **options)


def test_a_script_spares_its_biases_the_weight_decay_too(tmp_path: Path) -> None:
    optimizer = optim("sgd", lr=0.5, weight_decay=0.1, decay_exempt=True)
    launch(tmp_path, Downpour(replicas=1, shards=2, optimizer=optimizer), epochs=2)
    jobs.run(tmp_path / "task", Downpour(replicas=1, shards=1, optimizer=optimizer), jobs.PLAIN, epochs=2)
    assert jobs.same(tmp_path / "run", tmp_path / "task")


def test_a_script_has_the_threads_the_batch_size_and_the_weights_of_its_job(tmp_path: Path) -> None:
    given = {name: value + 1 for name, value in jobs.net().state_dict().items()}
    save_file(given, tmp_path / "given")
    options = {"threads": 2, "init_from": str(tmp_path / "given"), "batch": "None"}
    options["inside"] = "assert torch.get_num_threads() == 2"
    assert launch(tmp_path, Downpour(replicas=2, optimizer=optim("sgd", lr=0.0)), **options)["steps"] == 21
    assert all(torch.equal(value, given[name]) for name, value in jobs.weights(tmp_path / "run").items())


def test_a_script_begins_with_the_seed_of_its_job(tmp_path: Path) -> None:
    launch(tmp_path, Downpour(replicas=1, optimizer=optim("sgd", lr=0.0)), seed=5, after="sys.exit(0)")
    torch.manual_seed(5)
    right = jobs.net().state_dict()
    assert all(torch.equal(value, right[name]) for name, value in jobs.weights(tmp_path / "run").items())


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
refused("no parameter of the model", replica.optimizer, model, [{"params": nn.Linear(1, 1).parameters()}])
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
        other["lr"] = -1.0
        refused("the learning rate to 0, -1: it began as 0, 0.3, and must be 0 or more times that", optimizer.step)
        one["lr"], other["lr"] = 0.1, 0.3
        refused("the learning rate to 0.1, 0.3: it began as 0, 0.3, and must be 0 or more times that", optimizer.step)
        one["lr"] = 0.0
    refused("report.samples=-1.: must be a whole number, 0 to", replica.report, samples=-1)
    replica.report(samples=5 + number)
    optimizer.step()
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
    "raises in a worker": (
        {"before": LOADED.format(number="number"), "samples": "); dataset = Loaded(", "batch": "16, num_workers=1"},
        TrainingError,
        r"script.py, line 12, raised KeyError: 'no picture 100'\n",
    ),
    "no python": ({"before": "for"}, TrainingError, r"raised SyntaxError"),
    "ends itself": (
        {"inside": "sys.exit('enough')"},
        TrainingError,
        r"replica \d: .*ended itself with sys.exit\('enough'\)",
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
