"""The command line: options are frozen, a wrong word is one line with the right one, and small languages mean it."""

import copy
import dataclasses
import itertools
import json
import os
import re
import signal
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from asking import Ask

import distbelief as db
from benchmarks import Bench
from benchmarks import __main__ as benchmarks
from distbelief.cli import commands, main, options, words
from distbelief.cli.arguments import documents
from distbelief.core.optimizer import LEARNING_RATES
from distbelief.core.settings import Settings
from distbelief.errors import SYNONYMS, Refusals, UsageError
from distbelief.places.attempt import Attempt
from distbelief.places.messages import Failed
from distbelief.places.processes.options import listen_at
from distbelief.places.processes.running import spec_of
from distbelief.places.processes.spec import Spec
from distbelief.places.simulated.simulated import Simulated
from distbelief.runtime.driver import Driver
from distbelief.split.registry import DIVIDING, PLACING
from distbelief.strategies import STRATEGIES
from distbelief.strategies.sandblaster.settings import METHODS
from distbelief.tasks.worker import Trainer

SHARED = (
    "--optimizer --lr --weight-decay --decay-exempt --optimizer-options --epochs --batch-size --lr-schedule "
    "--clip-norm --precision --fixed-point --seed --budget --checkpoint-every"
    " --drop-last --snapshot-every --lr-steps --lr-gamma --lr-power --warmup --warmup-epochs"
    " --keep-checkpoints --device --threads --init-from --out --resume --config --quiet --json"
)
TASK = "--target-accuracy --target-loss --evaluate-every --data-dir"
SPLIT = "--partitions --split --microbatches --schedule --chunks"
STEPS = "--push-every --local-optimizer --local-optimizer-options --local-lr"
STAGGERED = "--stagger --stagger-delay --stagger-mix"
CADENCE = (
    f"--replicas --shards --restarts --standby {STEPS} --fetch-every --prefetch --warm-start-steps "
    f"--staleness-scaling {SPLIT}"
)
SCALED = "--lr-scaling --base-batch"
OWN = {
    "downpour": f"{CADENCE} {STAGGERED}",
    "synchronous": f"--replicas --shards --restarts --standby {STEPS} {STAGGERED} --push-weight --backup-workers "
    f"--quorum {SCALED} {SPLIT}",
    "allreduce": f"--replicas --accumulate --algorithm --bucket-mb --buffers --on-death --per-host --restarts {SCALED} "
    f"{SPLIT}",
    "softsync": f"{CADENCE} --n",
    "bounded": f"{CADENCE} --staleness",
}
VIRTUAL = "--network --topology --handling --hosts --compute --stragglers --faults --phantom --keep --sweep"
LOCAL = (
    "--transport --bind --advertise --insecure --tls --listen --logs --pad --straggle "
    "--hosts --hostfile --on --remote-shell --topology --interface --tickets --oversubscribe "
    "--leave-within --dry-run --metrics --track --page"
)
DEALT = "--order --data"
"""Of strategies that deal a minibatch to one replica."""
OWN |= {name: f"{own} {DEALT}" for name, own in OWN.items() if name != "allreduce"}
DIRECT = ("downpour", "softsync", "bounded")
OWN |= {name: f"{OWN[name]} --path" for name in DIRECT}
FROZEN = {
    ("train", "single"): f"{SCALED} {SPLIT} {SHARED} {TASK} --order --pad --straggle --metrics --track --page",
    **{("train", name): f"{own} {SHARED} {TASK} {LOCAL}" for name, own in OWN.items()},
    **{("launch", name): f"{own} {SHARED} {LOCAL}" for name, own in OWN.items()},
    **{("simulate", name): f"{own} {SHARED} {TASK} {VIRTUAL}" for name, own in OWN.items()},
}


def known(command: str, strategy: str) -> list[str]:
    return [one.option for one in options.arguments(command, strategy)]


@pytest.mark.parametrize(("command", "strategy"), FROZEN)
def test_help_is_short_and_says_when_a_newcomer_changes_the_first_options(
    command: str, strategy: str, capsys: pytest.CaptureFixture[str], ask: Ask
) -> None:
    words = [command, *(["mnist"] if command != "launch" else []), strategy, "--help"]
    short = ask(words).out
    assert main.run([*words, "all"]) == 0
    frozen = FROZEN[command, strategy].split()
    assert sorted(re.findall(r"^  (--\S+)", capsys.readouterr().out, re.MULTILINE)) == sorted(frozen)
    shown = re.findall(r"^  (--\S+)", short, re.MULTILINE)
    assert len(shown) <= 40
    assert f"{len(frozen) - len(shown)} more: distbelief {' '.join(words)} all" in " ".join(short.split())
    first = short.partition("first:\n")[2].partition("\n\n")[0]
    options_first = [line.split()[0] for line in first.splitlines() if line.startswith("  --")]
    assert 4 <= len(options_first) <= 6
    assert " ".join(first.split()).count("Change it ") == len(options_first)


MEAN_ANOTHER_THING = {
    "batch_size": {"SharedOptions", "Descent"},  # of sandblaster: what a step is made of, summed over portions
    "weight_decay": {"Stepping", "Descent"},  # of sandblaster: a part of the loss, as there is no optimizer
    "shards": {"Served", "Locking"},  # of locking: one has a lock for all, unless more are asked for
    "hosts": {"Cluster", "VirtualOptions"},
    "topology": {"Cluster", "VirtualOptions"},
    "path": {"LocalOptions", "VirtualOptions"},
}
"""Options that are two things: of one strategy, or of hosts that are there and those that are simulated."""


def test_an_option_is_a_field_of_one_class() -> None:
    owners: dict[str, set[str]] = {}
    for command, strategy in itertools.product(("train", "launch", "simulate"), STRATEGIES):
        here: list[str] = []
        for kind, without in options.sources(command, strategy):
            names = [field.name for field in dataclasses.fields(kind) if field.init and field.name not in without]
            here += names
            for name in names:
                those = {part.__qualname__ for part in kind.__mro__ if name in vars(part).get("__annotations__", {})}
                owners.setdefault(name, set()).update(those)
        assert len(here) == len(set(here)), f"{command} {strategy} has an option of two classes"
    assert {name: those for name, those in owners.items() if len(those) > 1} == MEAN_ANOTHER_THING


@pytest.mark.parametrize("system", [{}, {"encoding": "utf-8-sig", "newline": "\r\n"}], ids=["unix", "windows"])
def test_options_come_from_a_file_and_the_command_line_goes_before(system: dict[str, str], tmp_path: Path) -> None:
    file = tmp_path / "job.toml"
    file.write_text(
        'replicas = 3\nepochs = 4\nlr = 0.25\noptimizer = "adam"\ndrop_last = true\nresume = false\n'
        'lr-schedule = "step"\n'
        'lr_steps = [2, 3.5]\noptimizer_options = ["betas=0.5,0.75"]\n',
        **system,
    )
    asked = options.parse("train", "mnist", "downpour", ["--config", str(file), "--lr", "0.5", f"--out={tmp_path}"])
    optimizer = db.optim("adam", lr=0.5, betas=(0.5, 0.75))
    more: dict[str, Any] = {"drop_last": True, "lr_schedule": "step", "lr_steps": (2.0, 3.5), "out": str(tmp_path)}
    assert asked.job("mnist") == db.Job("mnist", db.Downpour(3, optimizer=optimizer), epochs=4, **more)
    launched = options.arguments("launch", "downpour")
    words = ["--config", "job.toml"]
    assert options.split_script(launched, [*words, "mine.py"]) == (words, ["mine.py"])


@pytest.mark.parametrize(
    ("words", "page"), [([], False), (["--page"], True), (["--page", "8000"], 8000), (["--page=0"], 0)]
)
def test_a_value_that_may_be_left_off_is_no_other_word(words: list[str], page: int | bool, tmp_path: Path) -> None:
    script = ["train.py", "9"]
    assert options.split_script(options.arguments("launch", "downpour"), [*words, *script]) == (words, script)
    for more in ([], ["--replicas", "3"]):
        found = options.parse("launch", "", "downpour", [*words, *more]).showing.page
        assert (found, type(found)) == (page, type(page))
    file = tmp_path / "job.toml"
    file.write_text(f"page = {json.dumps(page)}")
    assert options.parse("train", "mnist", "downpour", ["--config", str(file)]).showing.page == page
    with pytest.raises(UsageError, match="--page 'x': is not a whole number"):
        options.parse("train", "mnist", "downpour", ["--page", "x"])


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ('lr = "x"\nreplicas = "two"\n', "job.toml, line 1: --lr 'x': is not a number"),
        ("lr = 0.1\n\nreplcias = 3\n", "job.toml, line 3: no option 'replcias' here; did you mean 'replicas'?"),
        ("workers = 4\n", "job.toml, line 1: no option 'workers' here; did you mean 'replicas'?"),
        ("accumulate = 2\n", "job.toml, line 1: no option 'accumulate' here"),
        ('config = "other.toml"\n', "job.toml, line 1: no option 'config' here"),
        ("[replicas]\ncount = 2\n", "job.toml, line 1: replicas is dict {'count': 2}: write one value"),
        ("replicas = true\n", "job.toml, line 1: replicas is bool True: write one value"),
        ('resume = "yes"\n', "job.toml, line 1: resume is 'yes': write true or false"),
        ("batch_size = 8\nbatch-size = 9\n", "job.toml, line 2: batch-size is set twice"),
        ("lr = -1e-3\n", "--lr -0.001: must be 0 or more"),
        ("replicas: 3\n", "--config job.toml: is not TOML"),
        (None, "--config job.toml: No such file or directory; name a TOML file of options"),
    ],
)
def test_a_file_of_options_that_is_wrong_names_file_line_and_nearest_word(
    text: str | None, told: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, ask: Ask
) -> None:
    monkeypatch.chdir(tmp_path)
    if text is not None:
        Path("job.toml").write_text(text)
    assert told in ask("train mnist downpour --config job.toml", 2).err


def spec(*args: str) -> Spec:
    asked = options.parse("train", "digits", "downpour", args)
    job, place = asked.job("digits"), asked.place()
    return spec_of(place, Attempt(job, job.settings(), db.View(), 0.0, kept=False), [], True)


def test_the_options_of_a_process_reach_it() -> None:
    told = spec("--threads", "3", "--data-dir", "there", "--transport", "tcp", "--bind", "10.0.0.1:7000", "--insecure")
    assert (told.threads, told.data_dir, told.transport, told.bind, told.insecure) == (
        3,
        "there",
        "tcp",
        "10.0.0.1:7000",
        True,
    )
    assert told.advertise == "10.0.0.1"
    assert spec("--bind", "0.0.0.0", "--advertise", "node7", "--transport", "tcp").advertise == "node7"
    own = spec("--bind", "0.0.0.0", "--transport", "tcp").advertise
    assert own not in ("", "0.0.0.0")


@pytest.mark.parametrize(
    ("options", "encrypted"),
    [
        ({"transport": "shared"}, False),
        ({}, False),
        ({"bind": "localhost:7000"}, False),
        ({"bind": "::1"}, False),
        ({"tls": True}, True),
        ({"bind": "10.0.0.1"}, True),
        ({"bind": "0.0.0.0"}, True),
        ({"bind": "::"}, True),
        ({"bind": "a host that nobody.knows"}, True),
        ({"advertise": "192.0.2.1"}, True),
        ({"bind": "10.0.0.1", "insecure": True}, False),
        ({"bind": "0.0.0.0", "tls": True}, True),
    ],
    ids=str,
)
def test_links_are_encrypted_wherever_others_could_read_them(options: dict[str, Any], encrypted: bool) -> None:
    assert db.Local(**{"transport": "tcp", **options}).encrypted is encrypted


@pytest.mark.parametrize(
    ("bind", "addresses"),
    [
        ("127.0.0.1", ["tcp:127.0.0.1:0"] * 3),
        ("node7:0", ["tcp:node7:0"] * 3),
        ("node7:7000", ["tcp:node7:7000", "tcp:node7:7001", "tcp:node7:7002"]),
        ("[::1]:7000", ["tcp:[::1]:7000", "tcp:[::1]:7001", "tcp:[::1]:7002"]),
        ("[::1]", ["tcp:[::1]:0"] * 3),
        ("::", ["tcp:[::]:0"] * 3),
    ],
)
def test_the_coordinator_and_the_shards_listen_at_ports_in_a_row(bind: str, addresses: list[str]) -> None:
    assert [listen_at(bind, role) for role in ("coordinator", "shard 0", "shard 1")] == addresses


@pytest.mark.long
def test_the_defaults_are_those_of_the_python_api() -> None:
    for name, rate in LEARNING_RATES.items():
        job = options.parse("train", "mnist", "synchronous", ["--optimizer", name]).job("mnist")
        assert job == db.Job("mnist", db.Synchronous(optimizer=db.optim(name)))
        assert job.strategy.optimizer.lr == rate
    assert options.parse("train", "mnist", "single", []).job("mnist") == db.Job("mnist", db.Single())
    asked = options.parse("simulate", "mnist", "downpour", [])
    assert db.NetworkModel(**words.network(asked.virtual.network)) == db.NetworkModel()
    assert db.ComputeModel(**words.compute(asked.virtual.compute)) == db.ComputeModel()


def test_what_the_command_line_repeats_of_the_python_api_is_the_same() -> None:
    known = documents(options.Stepping)["optimizer"] + documents(options.LocalStepping)["local_optimizer"]
    assert all(name in known for name in LEARNING_RATES)
    for name in ("phantom", "keep"):
        assert documents(options.VirtualOptions)[name] == documents(Simulated)[name]
        [default] = [field.default for field in dataclasses.fields(Simulated) if field.name == name]
        assert getattr(options.VirtualOptions(), name) == default


REFUSED = {
    "trian": "unknown command 'trian'; did you mean 'train'?",
    "--versoin": "did you mean '--version'?",
    "train mnsit downpour": "unknown task 'mnsit'; did you mean 'mnist'?",
    "train ./mine/file.py:task downpour": "task './mine/file.py:task' is a path: write the module as Python imports "
    "it here, mine.file:task",
    "train file.py downpour": "task 'file.py' is a path: write the module as Python imports it here, file:function",
    "train digits downpour --listen "
    "0.0.0.0:99999": "--listen 0.0.0.0:99999: port 99999 is too high; choose one up to 65535",
    "train digits downpour --listen 0.0.0.0:65534": "--listen 0.0.0.0:65534: shard 1 would listen at port 65537",
    "simulate digits downpour --data-dir x": "--data-dir x: task 'digits' reads no folder",
    "simulate digits downpour --optimizer adam --optimizer-options "
    "betas=0.9": "betas=0.9: optimizer adam takes 2 numbers, such as 0.9,0.999",
    "simulate digits downpour --sweep 0": "--sweep 0: must be 1 or more seeds",
    "train mnist": "which strategy? Write it after the task: downpour, synchronous, softsync, bounded, sandblaster, "
    "allreduce, "
    "hogwild, locking",
    "train mnist downpuor": "unknown strategy 'downpuor'; did you mean 'downpour'?",
    "train mnist synchronous --accumulate 2": "has no option --accumulate: it belongs to strategy allreduce, and here "
    "it is --push-every;",
    "train mnist allreduce --push-every 2": "and here it is --accumulate;",
    "train mnist downpour --lr-scaling "
    "linear": "has no option --lr-scaling: it belongs to strategy synchronous or allreduce or single;",
    "train mnist allreduce --accumulate 0": "--accumulate 0: must be 1 or more",
    "train --epochs 3 mnist downpour": "--epochs: write the task and the strategy first",
    "train mnist --epochs 3 downpour": "--epochs: write the strategy before the options",
    "train mnist single --push-every 3": "has no option --push-every: it belongs to strategy downpour or synchronous "
    "or softsync or bounded;",
    "train mnist synchronous --staleness-scaling inverse": "it belongs to strategy downpour or softsync or bounded;",
    "launch synchronous --n 2 script.py": "has no option --n: it belongs to strategy softsync;",
    "train mnist downpour --network latency=1ms": "has no option --network: it belongs to distbelief simulate",
    "train mnist downpour --shard 2": "has no option --shard; did you mean --shards?",
    "train mnist hogwild --partitions 2": "update one memory that holds the whole model, which cannot be split; it "
    "belongs to strategy downpour",
    "train mnist synchronous --backup-workers "
    "2": "--backup-workers 2 of 2 replicas: a round must wait for at least one of them",
    "train mnist softsync --n 3": "--n 3: must be at most --replicas, which is 2",
    "train mnist softsync --n 0": "--n 0: must be 1 or more",
    "train mnist bounded --staleness -1": "--staleness -1: must be 0 or more",
    "train mnist bounded --staleness-scaling invers": "unknown staleness scaling 'invers'; did you mean 'inverse'?",
    "train mnist downpour --replicas two": "--replicas 'two': is not a whole number",
    "train mnist downpour --lr fast": "--lr 'fast': is not a number",
    "train mnist downpour --lr": "--lr: its value is missing",
    "train mnist downpour again": "'again' is one word too many",
    "train mnist downpour --optimizer adagard": "unknown optimizer 'adagard'; did you mean 'adagrad'?",
    "train mnist downpour --optimizer-options eps": "--optimizer-options 'eps': write it as eps=1e-8",
    "train mnist downpour --resume": "--resume needs the run folder: name it with --out",
    "train digits downpour --init-from nowhere": "--init-from nowhere: there is no such file; name a run folder",
    "simulate digits single --init-from nowhere": "--init-from nowhere: there is no such file",
    "train digits downpour --optimizer-options lr=0.1": "--optimizer-options lr: is an option of its own, --lr",
    "train digits downpour --bind 10.0.0.1": "--bind needs --transport tcp: shared memory has no addresses",
    "train digits downpour --transport tcp --tls --insecure": "--tls and --insecure exclude each other",
    "train digits downpour --transport tcp --bind :7000": "--bind ':7000': write HOST or HOST:PORT",
    "train digits downpour --transport tcp --bind 7000": "--bind '7000': write HOST or HOST:PORT",
    "train digits downpour --listen 7000": "--listen '7000': write HOST or HOST:PORT",
    "train digits downpour --transport tcp --bind node7:65534": "shard 1 would listen at port 65536",
    "simulate digits downpour --faults crash=0@0": "replica 0 cannot crash at message 0",
    "simulate digits downpour --target-accuracy 0.9 --phantom": "--phantom computes nothing",
    "train digits downpour --epochs -1": "--epochs -1: must be 1 or more",
    "train digits downpour --partitions 0 --precision bf16": "--partitions 0: must be 1 or more",
    "train digits downpour --standby 2": "--standby 2: is 0 or 1",
    "compress": "which run? Write it first: distbelief compress RUN",
    "compress --bits 4": "--bits: write the run first",
    "compress nowhere --bits 4": "nowhere",
    "expand": "which file?",
    "train digits@./nowhere.dbz single": "there is no file ./nowhere.dbz",
    "train digit@nowhere.dbz single": "unknown task 'digit'; did you mean 'digits'",
    "train digits hogwild --hosts a:2": "share one memory",
    "train digits downpour --on slurm --dry-run": "get one with salloc",
    "train digits downpour --tickets /tmp": "--tickets /tmp: needs several hosts",
    "train digits downpour --hosts a:2 --replicas 3": "the hosts have 2 slots",
    "train digits downpour --hosts a:2,a:2": "is named twice",
    "train digits downpour --hosts a": "how many replicas?",
    "train digits downpour --hosts a --replicas 2 --dry-run": "how many slots has host a?",
    "train digits downpour --hosts a:2 --hostfile nowhere": "leave one off",
    "train digits downpour --hostfile nowhere": "--hostfile nowhere cannot be read",
    "train digits downpour --dry-run": "--dry-run True: needs several hosts",
    "train digits downpour --hosts a:2 --leave-within nan": "--leave-within nan: is a number of seconds, 0 or more",
    "train digits downpour --hosts a:2 --listen 0.0.0.0": "--listen 0.0.0.0: is for one host, but there are several",
    "train digits downpour --on ray --hosts a:2": "--hosts a:2: with --on ray the hosts are the nodes of the cluster",
    "train digits downpour --hosts a:2 --tickets /tmp": "--tickets /tmp: is for a command that srun, torchrun or",
    "train digits downpour --on rya": "unknown engine 'rya'; did you mean 'ray'?",
    "split digits --split stages --chunks 2": "--chunks 2: is for a split by time, and stages is none",
    "split digits --seconds 0": "--seconds 0: must be more than 0",
    "split digits --partitions 1": "partitions=1: a model is split over 2",
    "study": "which study?",
    "study smal": "unknown study 'smal'; did you mean 'small'",
    "study nowhere.toml": "study nowhere.toml: there is no such file",
    "study small --seeds -3": "--seeds -3: must be 0 or more",
    "study --out": "write the study first",
    "simulate digits downpour --replicas 5 --topology tree:2x2": "tree:2x2: has 4 hosts, and a job of 5 replicas, 1 a",
    "simulate digits downpour --topology slim-fly:6": "slim-fly:6: q must be the power of a prime, and more than 2",
    "simulate digits downpour --topology nowhere.conf": "nowhere.conf: cannot be read",
    "simulate digits downpour --topology topology.yaml": "topology.yaml: YAML is not read",
    "simulate digits downpour --topology tree:2 --hosts cores=2": "all roles are on one host",
    "plan digits --machines 8x2 --topology tree:2x2": "tree:2x2: has 4 hosts, and --machines 8x2 needs 8",
    "plan digits --topology tree:2x2": "connects hosts, and there is one; name several, as --machines 4x8",
    "draw ring --topology tree:2x2 --ranks 5": "has 4 hosts, and --ranks 5 needs 5",
    "draw ring --topology slim-fly:19": "--ranks 10830: must be from 1 to 512",
    "draw ring --topology tree:2x2 --network reduce=1GB": "--network reduce: the price of ring on a topology",
    "check --hosts a --data-dir d": "--data-dir d: for which task?",
    "launch downpour": "which script?",
    "join ticket.json --threads 0": "--threads 0: must be 1 or more, and at most 1024",
    "join ticket.json --device tpu": "--device tpu: is cpu, cuda or cuda:N",
    "train digits sandblaster --epochs 3": "has no option --epochs: it counts --iterations; it belongs to strategy",
    "train digits sandblaster --lr 0.1": "has no option --lr: it belongs to strategy",
    "train digits downpour --history 3": "has no option --history: it belongs to strategy sandblaster",
    "train digits sandblaster --method lbfg": "unknown method 'lbfg'; did you mean 'lbfgs'?",
    "train digits sandblaster --line-search wolf": "unknown line search 'wolf'; did you mean 'wolfe'?",
    "train digits sandblaster --history 0": "--history 0: must be 1 or more",
    "train digits sandblaster --history 101": "--history 101: must be at most 100",
    "train digits sandblaster --step 0": "--step 0.0: must be more than 0",
    "train digits sandblaster --overlap 0.6": "--overlap 0.6: is the fraction of a batch",
    "launch sandblaster x.py": "a script means nothing to strategy sandblaster; it evaluates a batch as often as its",
    "launch downpour --data-dir x script.py": "has no option --data-dir: it belongs to distbelief train",
    "evaluate": "which run folder?",
    "evaluate --json": "write the run folder first",
    "evaluate nowhere": "nowhere is not a run folder",
    "evaluate nowhere --jsn": "has no option --jsn; did you mean --json?",
    "simulate digits downpour --network latncy=1ms": "unknown word in --network 'latncy'; did you mean 'latency'?",
    "simulate digits downpour --faults crush=1@2": "unknown fault in --faults 'crush'; did you mean 'crash'?",
    "simulate digits downpour --faults crash=9@2": "replica 9 cannot crash",
    "simulate digits downpour --faults "
    "outage=1s+1s@shard7": "shard 7 cannot be cut off: there are the coordinator, the evaluator",
    "simulate digits downpour --faults outage=1s+1s@evaluator --evaluate-every 0": "evaluator cannot be cut off",
    "simulate digits downpour --sweep 2 "
    "--keep": "--keep: --sweep 2 leaves no run folder; leave --keep off, or run one seed with it",
    "simulate digits single --network latency=1ms": "--network, --topology and delays mean nothing to strategy single",
    "simulate digits single --handling message=1ms": "--handling message means nothing to strategy single",
    "simulate digits single --hosts cores=2": "--hosts means nothing to strategy single",
    "simulate digits single --faults crash=0@5": "--faults crash and restart mean nothing to strategy single",
    "simulate digits downpour --handling mesage=1us": "unknown word in --handling 'mesage'; did you mean 'message'?",
    "simulate digits downpour --handling memory=0": "handling reads and writes 0.0 bytes a second: must be more than 0",
    "simulate digits downpour --hosts cores=0": "hosts with 0 cores: must be 1 or more",
    "simulate digits downpour --hosts cores=2,together=0": "together have 0.0 of their speed",
    "simulate digits downpour --hosts replicas=5": "hosts with 5 replicas: there are 2",
    "simulate digits allreduce --replicas 4 --per-host 2 --hosts replicas=4": "--per-host 2: the hosts have 4 replicas",
    "simulate digits hogwild --replicas 4 --hosts replicas=2": "all 4 replicas share memory, and must be on one host",
}

FIELD = {
    "split mnist --split layers": "did you mean 'stages'?",
    "split mnist-siamese --split streams": "did you mean 'branches'?",
    "train mnist-siamese single --partitions 2 --split towers": "did you mean 'branches'?",
    "simulate mnist-inception downpour --partitions 2 --split paths": "did you mean 'branches'?",
    "train mnist downpour --gamma 0.1": "has no option --gamma; did you mean --lr?",
    "train mnist downpour --alpha 0.1": "has no option --alpha; did you mean --local-lr?",
    "train mnist downpour --n_push 4": "has no option --n-push; did you mean --push-every?",
    "train mnist downpour --n-fetch=4": "has no option --n-fetch; did you mean --fetch-every?",
    "train mnist allreduce --n-push 4": "has no option --n-push; did you mean --accumulate?",
    "train mnist allreduce --push-every 4": "it belongs to strategy downpour or synchronous or softsync or bounded, "
    "and here it is --accumulate;",
    "train mnist hogwild --n-push 4": "has no option --n-push: --push-every belongs to strategy downpour or",
    "train mnist single --full-gradient": "did you mean --batch-size of all samples?",
    "train mnist sandblaster --full-gradient": "did you mean --method gradient?",
    "train mnist sandblaster --method full_gradient": "did you mean 'gradient'?",
    "train mnist SSP": "unknown strategy 'SSP'; did you mean 'bounded'?",
    "train mnist downpour --workers 4": "did you mean --replicas?",
    "train mnist downpour --towers 4": "did you mean --split branches?",
}
"""Words of the paper and of the field, and what answers them."""
REFUSED |= FIELD


def test_what_the_field_calls_otherwise_is_a_name_here() -> None:
    known = {one.option for name in STRATEGIES for one in options.arguments("train", name)}
    known |= {*STRATEGIES, *PLACING, *DIVIDING, *METHODS}
    assert {name.split()[0] for names in SYNONYMS.values() for name in names} <= known
    assert {"layers", "streams", "towers", "paths", "full-gradient", "--gamma", "--n-push", "--n-fetch"} <= {*SYNONYMS}


@pytest.mark.parametrize("line", REFUSED)
def test_a_wrong_word_is_one_line_with_the_right_one(line: str, ask: Ask) -> None:
    said = ask(line, 2)
    assert REFUSED[line] in said.err
    assert said.err.startswith("distbelief: ")
    assert said.err.count("\n") == 1
    assert said.out.startswith("starting ") or not said.out
    assert said.out.count("\n") <= 1


@pytest.mark.parametrize(
    ("line", "first"),
    [
        ("train digits single", "starting single on digits\n"),
        ("launch allreduce mine.py --its own", "starting mine.py in the replicas of allreduce\n"),
        ("simulate digits downpour", "starting downpour on digits, simulated\n"),
        ("join x.ticket", "joining by x.ticket\n"),
        *(
            (f"{line} {how}", "")
            for line in ("train digits single", "simulate digits downpour")
            for how in ("--json", "--quiet")
        ),
        ("launch allreduce --json mine.py", ""),
        ("join x.ticket --quiet", ""),
    ],
)
def test_a_first_line_says_at_once_what_is_begun_and_a_job_is_checked_once(
    line: str, first: str, tmp_path: Path, ask: Ask, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("mine.py").touch()

    def stop(*_: object, **__: object) -> None:
        raise UsageError("stopped here")

    def counted(self: Settings, check: Any = Settings.checks) -> Any:
        checked.append(self)
        return check(self)

    checked: list[Settings] = []
    monkeypatch.setattr(Settings, "checks", counted)
    for name in ("processes.local.Local._begin", "simulated.running.run", "join.guest.Guest.__init__"):
        monkeypatch.setattr(f"distbelief.places.{name}", stop)
    assert ask(line, 2).out == first
    assert len(checked) == (not line.startswith("join"))


def test_refusals_are_the_same_in_another_process() -> None:
    refusals = Refusals.of([UsageError("--threads 0: must be 1 or more"), UsageError("--epochs 0: must be 1 or more")])
    assert str(refusals) == "--threads 0: must be 1 or more\n--epochs 0: must be 1 or more"
    for error in (Failed(type(refusals).__name__, str(refusals)).error, copy.copy(refusals)):
        assert (type(error), str(error)) == (Refusals, str(refusals))


def test_all_that_a_job_cannot_have_is_said_at_once(ask: Ask) -> None:
    line = "train digits downpour --threads 0 --epochs 0 --order random --lr-schedule cosin --transport shared"
    assert ask(line, 2).err.splitlines() == [
        "distbelief: --threads 0: must be 1 or more, and at most 1024",
        "distbelief: --epochs 0: must be 1 or more",
        "distbelief: unknown order 'random'; Known: sequential, shuffled",
        "distbelief: unknown learning-rate schedule 'cosin'; did you mean 'cosine'? Known: "
        "backoff, constant, cosine, linear, polynomial, step",
    ]


def test_the_help_of_a_table_of_benchmarks_is_that_of_all(capsys: pytest.CaptureFixture[str]) -> None:
    assert main.run(["--help"], benchmarks.run) == 0
    shown = capsys.readouterr().out
    assert "python -m benchmarks table FILE..." in shown
    for asked in ("--help", "-h"):
        assert main.run(["table", asked], benchmarks.run) == 0
        assert capsys.readouterr().out == shown
    assert main.run(["wier"], benchmarks.run) == 2
    assert "unknown benchmark 'wier'; did you mean 'wire'?" in capsys.readouterr().err


def test_the_help_of_launch_lists_no_task(ask: Ask) -> None:
    said = ask("launch --help").out
    assert "strategies: downpour" in said
    assert "digits" not in said


SWEPT = "simulate digits downpour --replicas 2 --restarts 0 --faults crash=0@69 crash=1@69 delay=10%x20ms --seed 3"
"""Under some seeds the epoch is over before both replicas have died."""


@pytest.mark.long
def test_a_sweep_tells_which_seeds_fail_how_to_replay_them_and_how_the_others_spread(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], ask: Ask, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    alone = {}
    for seed in range(3, 6):
        status = main.run([*SWEPT.split()[:-1], str(seed), "--json"])
        said = capsys.readouterr().out.splitlines()
        alone[seed] = json.loads(said[-1]) if status == 0 else {}
    fine = [one for one in alone.values() if one]
    assert 0 < len(fine) < 3
    starting, *failing, counts, _, seconds, accuracy, staleness, rate = ask(
        [*SWEPT.split(), "--sweep", "3"], 1
    ).out.splitlines()
    assert starting.startswith("starting ")
    assert [int(line.split()[1]) for line in failing] == [seed for seed, one in alone.items() if not one]
    for line in failing:
        seed, replay = line.split()[1], line.partition("; replay it: ")[2]
        assert f"seed {seed} failed: every replica is gone; the last was replica" in line
        assert main.run(replay.split()[1:]) == 1
        assert replay.endswith(f" --seed {seed}")
    capsys.readouterr()
    assert counts == f"3 seeds: {len(fine)} done, {len(failing)} failed"
    assert seconds.split()[2::2] == [f"{how(one['seconds'] for one in fine):.3f}" for how in (min, max)]
    assert accuracy.split()[2::2] == [f"{how(one['test_accuracy'] for one in fine):.2%}" for how in (min, max)]
    assert staleness.split()[1::2] == [f"{how(one['staleness']['mean'] for one in fine):.2f}" for how in (min, max)]
    assert rate.split()[4::2] == [f"{how(one['samples_per_second'] for one in fine):,.0f}" for how in (min, max)]
    assert not list(tmp_path.iterdir())


def test_a_sweep_as_json_is_a_line_for_each_seed_and_one_for_all(capsys: pytest.CaptureFixture[str]) -> None:
    assert main.run([*SWEPT.split(), "--sweep=2", "--json"]) in (0, 1)
    first, second, last = map(json.loads, capsys.readouterr().out.splitlines())
    assert (first["seed"], second["seed"], last["seeds"], sum(last["outcomes"].values())) == (3, 4, 2, 2)
    assert main.run([*first["replay"].split()[1:], "--json"]) == (first["outcome"] == "failed")


def test_a_sweep_that_does_not_fail_has_status_0_and_says_nothing_where_it_is_quiet(ask: Ask) -> None:
    assert not ask("simulate digits downpour --phantom --sweep 3 --quiet").out
    assert "test accuracy" not in ask("simulate digits downpour --phantom --sweep 3").out


def test_whatever_a_seed_fails_with_the_others_are_run(ask: Ask, monkeypatch: pytest.MonkeyPatch) -> None:
    run = Simulated.run

    def spoilt(self: Simulated, job: db.Job, view: Any = None) -> dict[str, Any]:
        if job.seed == 1:
            raise ZeroDivisionError("in the\nmodel")
        return run(self, job, view)

    monkeypatch.setattr(Simulated, "run", spoilt)
    said = ask("simulate digits downpour --phantom --sweep 3", 1).out
    assert (
        "seed 1 failed: ZeroDivisionError: in the model; replay it: distbelief simulate digits downpour --phantom "
        "--seed 1\n" in said
    )
    assert "3 seeds: 2 done, 1 failed" in said


def test_an_interrupted_sweep_ends_with_what_it_has(ask: Ask, monkeypatch: pytest.MonkeyPatch) -> None:
    compute, pressed = Trainer.compute, iter([None] * 30 + [signal.SIGINT])
    monkeypatch.setattr(
        Trainer,
        "compute",
        lambda *args: [[signal.raise_signal(n) for n in [next(pressed, None)] if n], compute(*args)][1],
    )
    assert "2 seeds: 1 done, 1 interrupted" in ask("simulate digits downpour --sweep 9", 130).out


def test_an_interrupted_simulation_says_how_to_go_on(tmp_path: Path, ask: Ask, monkeypatch: pytest.MonkeyPatch) -> None:
    compute, pressed = Trainer.compute, iter([signal.SIGINT])
    monkeypatch.setattr(
        Trainer, "compute", lambda *args: [[signal.raise_signal(number) for number in pressed], compute(*args)][1]
    )
    line = ["simulate", "digits", "downpour", "--out", str(tmp_path / "run")]
    assert f"interrupted; go on with: distbelief {' '.join(line)} --resume" in ask(line, 130).err


@pytest.mark.parametrize("kept", [False, True])
@pytest.mark.long
def test_a_simulation_that_is_interrupted_twice_says_how_to_go_on_where_it_has_a_folder(
    kept: bool, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    compute, pressed = Trainer.compute, iter([None] * 10 + [signal.SIGINT])

    def press_twice(*args: Any) -> Any:
        for number in filter(None, [next(pressed, None)]):
            signal.raise_signal(number)
            signal.raise_signal(number)
        return compute(*args)

    monkeypatch.setattr(Trainer, "compute", press_twice)
    line = ["simulate", "digits", "downpour", *(["--out", str(tmp_path / "run")] if kept else [])]
    assert main.run(line) == 130
    go_on = f"; go on from checkpoint 1 with --resume: distbelief {' '.join(line)} --resume" if kept else ""
    assert capsys.readouterr().err == f"distbelief: interrupted twice: ended at once, without a checkpoint{go_on}\n"


def test_the_replicas_of_one_memory_update_it_directly() -> None:
    for strategy, path in ((db.Hogwild(), "direct"), (db.Locking(), "direct"), (db.Sandblaster(), "served")):
        job = db.Job("digits", strategy)
        assert db.Local()._kept(job, db.Local().settings(job))["path"] == path


def test_a_simulation_that_is_interrupted_before_it_begins_leaves_no_folder(
    tmp_path: Path, ask: Ask, monkeypatch: pytest.MonkeyPatch
) -> None:
    begin = Driver.begin
    monkeypatch.setattr(
        Driver,
        "begin",
        lambda *args: [signal.raise_signal(signal.SIGINT), begin(*args)] if args[1] == "replica 0" else begin(*args),
    )
    assert (
        "interrupted before the job began"
        in ask(["simulate", "digits", "downpour", "--out", str(tmp_path / "run")], 130).err
    )
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(("args", "kept"), [([], False), (["--keep"], True), (["--out", "there"], True)])
def test_a_simulation_leaves_a_folder_where_it_is_asked_to(
    args: list[str], kept: bool, tmp_path: Path, ask: Ask, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    said = ask(["simulate", "digits", "downpour", "--quiet", *args]).out.split()
    assert [str(path.parent) for path in Path().rglob("result.json")] == said
    assert any(tmp_path.iterdir()) is kept


@pytest.mark.parametrize(
    ("function", "text", "value"),
    [
        (words.duration, "50us", 50e-6),
        (words.duration, "2 min", 120.0),
        (words.duration, "0", 0.0),
        (words.duration, "1e3ns", 1e-6),
        (words.rate, "100mbit", 12.5e6),
        (words.rate, "1GB/s", 1e9),
        (words.network, "", {}),
        (words.network, "jitter=0.5", {"jitter": 0.5}),
        (words.compute, "exponential:1ms", {"spread": "exponential", "step": 1e-3}),
        (words.compute, "constant:2s", {"spread": "constant", "step": 2.0}),
    ],
)
def test_a_small_language_means(function: Any, text: str, value: Any) -> None:
    assert function(text) == value


@pytest.mark.parametrize(
    ("function", "text", "said"),
    [
        (words.duration, "fast", "write a number and its unit"),
        (words.duration, "5", "its unit is missing"),
        (words.duration, "5sm", "unknown unit in duration 'sm'"),
        (words.duration, "1.2.3ms", "write a number and its unit"),
        (words.rate, "10Gbti", "did you mean 'Gbit'?"),
        (words.network, "latency", "write it as latency=50us"),
        (words.compute, "lognormla:1ms", "did you mean 'lognormal'?"),
        (words.compute, "constant:1ms:2", "write 1ms, constant:1ms"),
        (words.stragglers, ["1"], "write it as 1:4"),
        (words.stragglers, ["one:4"], "'one': is not a whole number"),
        (words.stragglers, ["150%x3"], "write a chance"),
        (words.faults, ["crash=1"], "replica 1 dies as it sends its 500th message"),
        (
            words.faults,
            ["outage=1s@1"],
            "'1s': write it as outage=2s+500ms@1/shard0: from 2 s on, for 500 ms, replica 1 and shard 0 cannot reach",
        ),
        (words.faults, ["outage=1s+2s"], "write it as outage=2s"),
        (words.faults, ["outage=1+2s@1"], "--faults outage start '1': its unit is missing"),
        (words.faults, ["outage=1s+0s@1"], "its length is 0; write it as"),
        (
            words.faults,
            ["outage=1s+1s@1/"],
            "'': is not a role; write 1 or replica1, shard0, standby0, coordinator or evaluator",
        ),
        (words.faults, ["outage=1s+1s@coordinator/shard"], "'shard': is not a role"),
        (words.faults, ["delay=1%"], "1 % of the messages take 50 ms longer"),
        (words.optimizer_options, ["eps=small"], "'small': is not a number"),
    ],
)
def test_a_small_language_refuses(function: Any, text: Any, said: str) -> None:
    with pytest.raises(UsageError, match=re.escape(said)):
        function(text)


def test_the_front_door_holds_what_it_lists() -> None:
    assert all(getattr(db, name) is not None for name in db.__all__)
    with pytest.raises(AttributeError, match=r"it has .*Downpour"):
        db.Upour  # noqa: B018


def test_a_benchmark_in_the_background_is_not_ended_by_a_ctrl_c_that_it_was_to_ignore(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    seen = []
    monkeypatch.setattr(Bench, "run", lambda *_: seen.append(signal.getsignal(signal.SIGINT)))
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        assert main.run(["wire", "--quick"], benchmarks.run) == 0
    finally:
        signal.signal(signal.SIGINT, before)
    assert seen == [signal.SIG_IGN]


NO_TEXT = os.fsdecode(b"r\xe9sultat")
"""A name that the system may have, and that no file or message of ours can hold."""


@pytest.mark.parametrize("words", [("train", "digits", "single", "--out"), ("status",), ("launch", "downpour", "x.py")])
def test_words_that_are_no_text_are_refused_by_name(words: Sequence[str], ask: Ask) -> None:
    said = ask([*words, NO_TEXT], 2).err
    assert said.startswith(f"distbelief: {NO_TEXT!r}: is not UTF-8, or the locale has another encoding; ")
    assert said.count("\n") == 1


def test_options_that_are_no_text_are_refused_by_name() -> None:
    with pytest.raises(UsageError, match=r"^Job\(out='r.udce9sultat'\): is not UTF-8"):
        db.Job("digits", "downpour", out=NO_TEXT)


def test_an_error_that_nobody_has_expected_is_one_line_that_says_where(
    ask: Ask, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(commands, "COMMANDS", {"train": lambda _: int("no number")})
    said = ask("train", 1).err
    assert re.fullmatch(r"distbelief: ValueError: invalid literal .*: 'no number' \(.*main.py, line \d+\)\n", said)
