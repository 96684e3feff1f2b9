"""What a user's script finds under `launch`: its own main module, its arguments, and workers as it would have them."""

import contextlib
import json
import multiprocessing
import os
from pathlib import Path
from typing import Any

import jobs
import pytest
import torch

from distbelief.core import records
from distbelief.core.optimizer import optim
from distbelief.errors import DistbeliefError, UsageError
from distbelief.places.processes.local import Local
from distbelief.strategies import Allreduce, Downpour, Synchronous

SCRIPT = """
import multiprocessing, os, sys, time
import torch
from torch.utils.data import DataLoader, Dataset
import distbelief as db
import jobs

class Pairs(Dataset):
    def __len__(self):
        return jobs.SAMPLES
    def __getitem__(self, number):
        {item}
        return torch.randn(8), number % 4

def main():
    replica = db.join()
    {before}
    model = jobs.net()
    optimizer = replica.optimizer(model)
    for x, y in replica.batches(jobs.data(), jobs.BATCH):
        optimizer.zero_grad()
        torch.nn.functional.cross_entropy(model(x), y).backward()
        optimizer.step()

{main}
"""
FIELDS = {"before": "", "item": "", "main": "main()"}
GUARDED = 'if __name__ == "__main__": main()'
LOADS = "assert len(list(DataLoader(Pairs(), jobs.BATCH, num_workers=1{}))) == 21"


def launch(folder: Path, *arguments: str, replicas: int = 2, epochs: int = 1, **fields: str) -> object:
    source = SCRIPT.format(**{**FIELDS, **fields})
    return jobs.launch(folder, source, Downpour(replicas=replicas), *arguments, epochs=epochs)["outcome"]


def test_a_script_is_the_main_program_with_workers_as_its_platform_has_them(tmp_path: Path) -> None:
    default = multiprocessing.get_all_start_methods()[0]
    found = f"assert (multiprocessing.get_start_method(), sys.argv) == ({default!r}, [__file__, '--rate', '3'])"
    own = "assert multiprocessing.current_process().name == 'MainProcess' and sys.modules['__main__'].main is main"
    assert launch(tmp_path, "--rate", "3", before=f"{found}; {own}; {LOADS.format('')}") == "done"


def test_workers_that_import_the_main_module_find_it(tmp_path: Path) -> None:
    before = LOADS.format(", multiprocessing_context='spawn'")
    assert launch(tmp_path, replicas=1, before=before, main=GUARDED) == "done"


def test_a_module_of_a_package_is_the_main_program_as_python_has_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With relative imports, the working folder to import from, and workers that import it by its name."""
    monkeypatch.chdir(tmp_path)
    found = "(__package__, __spec__.name, sys.argv, sys.path[0], WORD)"
    own = "('package', 'package.train', [__file__, '--rate', '3'], os.getcwd(), 3)"
    loads = LOADS.format(", multiprocessing_context='spawn'")
    before = f"assert {found} == {own}; {loads}"
    source = "from .words import WORD\n" + SCRIPT
    (tmp_path / "package").mkdir()
    (tmp_path / "package" / "__init__.py").write_text("")
    (tmp_path / "package" / "words.py").write_text("WORD = 3")
    (tmp_path / "package" / "train.py").write_text(source.format(**{**FIELDS, "before": before, "main": GUARDED}))
    job = jobs.job(tmp_path / "run", Downpour(replicas=1), task="script")
    assert Local().launch(job, ["-m", "package.train", "--rate", "3"])["outcome"] == "done"


def test_a_worker_that_joins_is_told_what_it_is(tmp_path: Path) -> None:
    before = LOADS.format(", multiprocessing_context='fork'")
    with pytest.raises(UsageError, match=r"replica \d has joined already, .* started by its script .*__main__"):
        launch(tmp_path, replicas=1, item="db.join()", before=before, main=GUARDED)


STARTED = {
    "forked, in a session of its own": "os.fork() or (os.setsid(), time.sleep(1000))",
    "another program": "import subprocess; subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(1000)'])",
}


@pytest.mark.parametrize("how", STARTED)
def test_what_a_script_has_started_ends_with_its_replica(tmp_path: Path, watch: jobs.Watch, how: str) -> None:
    """Also a worker that still begins, and knows of nobody yet: to us it is any program."""
    children: list[int] = []

    def die() -> None:
        victim = next(pid for pid, name in jobs.descendants(os.getpid()).items() if name == "distbelief: replica 1")
        children.extend(jobs.descendants(victim))
        jobs.kill("replica 1")

    watch.once(records.Stepped, die, role="replica 1")
    # that nothing is left, the fixture looks
    assert launch(tmp_path, before=STARTED[how], epochs=jobs.LONG) == "done"
    assert children


def test_the_workers_of_a_loader_load_what_is_dealt(tmp_path: Path) -> None:
    """Each sample once an epoch, in minibatches of the loader's size; a worker's chance is that of the minibatch."""
    script = f"""
import collections, torch, distbelief as db, jobs
from torch.utils.data import DataLoader, Dataset, default_collate, get_worker_info

class Noisy(Dataset):
    def __len__(self):
        return jobs.SAMPLES
    def __getitem__(self, number):
        return {{"x": torch.rand(8), "number": number, "worker": get_worker_info().id}}

replica = db.join()
model = jobs.net()
optimizer = replica.optimizer(model)
batches = replica.batches(DataLoader(Noisy(), 20, shuffle=True, num_workers=2, prefetch_factor=3))
assert (len(batches), type(batches.dataset), replica.replicas) == (17, Noisy, 1)
seen, workers, drawn = collections.Counter(), set(), []
for batch in batches:
    assert len(batch["number"]) in (20, 10)
    seen.update((batches.epoch, int(number)) for number in batch["number"])
    workers |= set(batch["worker"].tolist())
    drawn.append(batch["x"][0, 0].item())
    optimizer.zero_grad()
    model(batch["x"]).sum().backward()
    optimizer.step()
assert seen == {{(epoch, number): 1 for epoch in range(2) for number in range(jobs.SAMPLES)}}, seen
assert workers == {{0, 1}}
print(drawn, file=open({str(tmp_path / "drawn")!r}, "a"))
"""
    for name in "ab":
        assert jobs.launch(tmp_path / name, script, Downpour(replicas=1), epochs=2)["outcome"] == "done"
    one, other = (tmp_path / "drawn").read_text().splitlines()
    assert one == other


LOOP = """
import sys, torch, distbelief as db, jobs

def train(model, optimizer, epochs):
    {before}
    for epoch in epochs:
        for number, (x, y) in enumerate(replica.batches(jobs.data(), jobs.BATCH)):
            {inside}
        {after}

replica = db.join()
model = {model}
train(model, replica.optimizer(model), replica.epochs({epochs}))
{last}
"""
STEP = "optimizer.zero_grad(); torch.nn.functional.cross_entropy(model(x), y).backward(); optimizer.step()"
MEET = "epoch == 0 == number and open(sys.argv[1] + '.met', 'w' if replica.index else 'r').close()"
"""Both replicas have a minibatch before either goes on."""
LEAVES = f"{STEP}\n            if replica.index: return"
PARTS = {"before": "", "inside": STEP, "after": "", "model": "jobs.net()", "epochs": "3", "last": ""}


def loop(folder: Path, strategy: Any = None, on: Local | None = None, resume: bool = False, **parts: str) -> Any:
    """Launch the loop with some parts changed; its replicas have a pipe to meet at."""
    if not resume:
        os.mkfifo(folder / "seen.met")
    source = LOOP.format(**{**PARTS, **parts})
    return jobs.launch(folder, source, strategy, str(folder / "seen"), on=on, resume=resume)


@pytest.mark.parametrize("strategy", [Synchronous(), Allreduce()], ids=lambda one: one.name)
def test_a_script_stops_the_job_for_all(tmp_path: Path, strategy: Any) -> None:
    stops = f"{STEP}; number == 3 and replica.index == 0 and replica.stop()"
    result = loop(tmp_path, strategy, inside=stops, epochs="100_000")
    assert (result["outcome"], result["cause"]) == ("done", "a script has stopped the job")
    assert 4 <= result["steps"] < 100_000


def test_no_replica_waits_for_the_others_epoch(tmp_path: Path) -> None:
    """One is in its second before the other has done its first minibatch."""
    os.mkfifo(tmp_path / "seen.second")
    first = "(epoch == 1 and number == 0) if replica.index == 0 else (epoch == 0 == number)"
    waits = f"({first}) and open(sys.argv[1] + '.second', 'r' if replica.index else 'w').close()"
    result = loop(tmp_path, inside=f"{MEET}; {waits}; {STEP}")
    assert (result["outcome"], result["samples"], result["epochs"]) == ("done", 3 * jobs.SAMPLES, 3)


@pytest.mark.parametrize("strategy", [Downpour(push_every=2, fetch_every=3), Allreduce()], ids=str)
def test_after_the_last_epoch_each_replica_has_the_servers_model(tmp_path: Path, strategy: Any) -> None:
    last = "torch.save(model.state_dict(), sys.argv[1] + str(replica.index))"
    assert loop(tmp_path, strategy, inside=f"{MEET}; {STEP}", last=last)["outcome"] == "done"
    kept = jobs.weights(tmp_path / "run")
    for index in range(2):
        held = torch.load(tmp_path / f"seen{index}")
        assert all(torch.equal(value, kept[name]) for name, value in held.items())


def test_a_stop_is_told_at_once_and_what_a_script_does_then_comes_after_the_training(tmp_path: Path) -> None:
    """Between epochs: the other has to be done before who has stopped the job goes on."""
    stops = "if epoch and replica.index == 0: replica.stop(); break"
    last = "open(sys.argv[1] + '.met', 'w' if replica.index else 'r').close(); replica.index or 1 / 0"
    with pytest.raises(DistbeliefError, match=r"raised ZeroDivisionError.*that came after its part of the training"):
        loop(tmp_path, inside=f"{MEET}; {STEP}", after=stops, epochs="100_000", last=last)
    result = json.loads((tmp_path / "run" / "result.json").read_text())
    assert (result["outcome"], result["cause"]) == ("done", "a script has stopped the job")


def test_a_script_that_leaves_its_loop_is_said_to(tmp_path: Path, watch: jobs.Watch) -> None:
    result = loop(tmp_path, inside=LEAVES, epochs="10")
    assert (result["outcome"], result["samples"]) == ("done", 10 * jobs.SAMPLES)
    assert not any(record.died for record in watch.of(records.Gone))
    assert "replica 1 ends its part here: its script has left the loop" in {one.text for one in watch.of(records.Note)}


def test_a_model_whose_script_has_left_its_loop_is_changed_by_nobody_who_goes_on(tmp_path: Path) -> None:
    """Also in rounds, where a job's own replicas compute on what the shards step."""
    last = """kept = [parameter.clone() for parameter in model.parameters()]
open(sys.argv[1] + '.met', 'r' if replica.index else 'w').close()
assert all(map(torch.equal, kept, model.parameters()))"""
    result = loop(tmp_path, Synchronous(2, 1), inside=LEAVES, last=last)
    assert (result["outcome"], result["samples"]) == ("done", 3 * jobs.SAMPLES)


AFTER = {
    "raises": (
        "1 / 0",
        r"^replica 1: .*script.py, line 14, raised ZeroDivisionError.* after its part of the training.* kept in .*run",
    ),
    "ends itself": ("sys.exit(3)", r"ended itself with sys.exit\(3\); that came after its part of the training"),
    "is killed": ("import os; os.kill(os.getpid(), 9)", ""),
}


@pytest.mark.parametrize("name", AFTER)
def test_what_a_script_does_after_its_loop_costs_nobody_the_training(tmp_path: Path, name: str) -> None:
    """Of one replica."""
    after, says = AFTER[name]
    with pytest.raises(DistbeliefError, match=f"(?s){says}") if says else contextlib.nullcontext():
        loop(tmp_path, inside=f"{MEET}; {STEP}", last=f"if replica.index == 1: {after}")
    result = json.loads((tmp_path / "run" / "result.json").read_text())
    assert (result["outcome"], result["samples"]) == ("done", 3 * jobs.SAMPLES)
    jobs.net().load_state_dict(jobs.weights(tmp_path / "run"))


def test_a_script_that_stumbles_over_an_epoch_that_is_done_is_told_of_it(tmp_path: Path) -> None:
    """A run that was done goes through its last epoch once more, without a minibatch."""
    told = r"UnboundLocalError: .*'last'.*; it had no minibatch in epoch 2, which the others had finished"
    for resume in (False, True):
        with pytest.raises(DistbeliefError, match=told) if resume else contextlib.nullcontext():
            loop(tmp_path, Downpour(replicas=1), inside=f"{STEP}; last = y", after="len(last)", resume=resume)


def test_a_script_ends_as_a_main_program_does(tmp_path: Path) -> None:
    """With what it has registered for its end, and all that it has written; also one that raises."""
    log = "import atexit; log = open(sys.argv[1] + str(replica.index), 'w'); log.write('one')"
    log += "; atexit.register(log.write, 'two'); replica.index and 1 / 0"
    with pytest.raises(DistbeliefError, match=r"replica 1: .*after its part of the training"):
        loop(tmp_path, inside=f"{MEET}; {STEP}", last=log)
    assert [(tmp_path / f"seen{index}").read_text() for index in range(2)] == ["onetwo"] * 2


def test_a_compiled_model_is_saved_under_the_names_of_the_plain_one(tmp_path: Path) -> None:
    compiled = "torch.compile(jobs.net(), backend='eager')"
    strategy = Downpour(replicas=1, optimizer=optim("sgd", lr=0.1))
    assert loop(tmp_path, strategy, model=compiled)["outcome"] == "done"
    plain, data = jobs.net(), jobs.data()
    plain.load_state_dict(jobs.weights(tmp_path / "run"))
    assert (plain(data.inputs).argmax(1) == data.targets).float().mean() > 0.5


SPEAKS = "import os; print('out', replica.index, flush=True); os.write(2, b'10 %\\r20 %\\nerr')"


@pytest.mark.parametrize("logs", [False, True])
def test_what_replicas_print_is_labelled_or_kept(tmp_path: Path, capfd: pytest.CaptureFixture[str], logs: bool) -> None:
    """In whole lines, the last one too; of a line that is written over, its end."""
    assert loop(tmp_path, on=Local(logs=logs), before=SPEAKS, inside=f"{MEET}; {STEP}")["outcome"] == "done"
    shown, kept = capfd.readouterr().out, tmp_path / "run" / "logs"
    for index in range(2):
        said = [f"out {index}", "20 %", "err"]
        if logs:
            assert (kept / f"replica-{index}.log").read_text().splitlines() == said
        else:
            own = f"[replica {index}] "
            assert [line.removeprefix(own) for line in shown.splitlines() if line.startswith(own)] == said
    assert ("out" in shown, kept.exists()) == (not logs, logs)


@pytest.mark.parametrize("part", ["before", "inside"])
def test_the_last_words_of_a_replica_are_not_lost(tmp_path: Path, capfd: pytest.CaptureFixture[str], part: str) -> None:
    """Of one that is killed in the midst of a line; a job that never begins keeps nothing, and shows what it has."""
    dies = {part: f"{STEP if part == 'inside' else 'import os'}; import os; os.write(1, b'last'); os.abort()"}
    with pytest.raises(DistbeliefError, match="SIGABRT"):
        loop(tmp_path, Downpour(replicas=1, restarts=0), on=Local(logs=True), **dies)
    if part == "before":
        assert "[replica-0] last" in capfd.readouterr().out
    else:
        assert "last" in (tmp_path / "run" / "logs" / "replica-0.log").read_text()


@pytest.mark.parametrize("replicas", [1, 2])
def test_a_parameter_without_a_gradient_is_named_where_it_is_stepped(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], replicas: int
) -> None:
    inside = STEP.replace("optimizer.step()", "number > 4 and setattr(model[0].weight, 'grad', None); optimizer.step()")
    strategy = Downpour(replicas=replicas, optimizer=optim("nadam", lr=0.01))
    says = "0.weight has no gradient in step 5, which counts as zero: nadam steps all parameters of a shard together"
    with pytest.raises(UsageError, match=says) if replicas == 1 else contextlib.nullcontext():
        loop(tmp_path, strategy, inside=inside)
    warned = [line for line in capfd.readouterr().out.splitlines() if "has no gradient" in line]
    assert len(warned) == len({line.partition("]")[0] for line in warned}) <= 2


@pytest.mark.parametrize("replicas", [1, 2])
def test_what_a_script_writes_to_a_parameter_ends_the_job_where_it_cannot_be_followed(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], replicas: int
) -> None:
    says = r"written to '0.weight' .*the other replicas do not see it: have the"
    with pytest.raises(UsageError, match=says) if replicas > 1 else contextlib.nullcontext():
        loop(tmp_path, Downpour(replicas=replicas), inside=f"{STEP}; model[0].weight.data.clamp_(-0.01, 0.01)")
    if replicas == 1:
        assert "written to '0.weight' after its last step: the run's model.safetensors" in capfd.readouterr().out
