"""The command `distbelief` as a person uses it: real processes, from the words typed to the exit status."""

import json
import os
import re
import shlex
import signal
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

PATIENCE = 120.0
LIGHT = (
    "import sys; from distbelief.cli.main import run; status = run(sys.argv[1:]); sys.exit(99 if 'torch' in "
    "sys.modules else status)"
)


def distbelief(*args: str, **more: Any) -> "subprocess.CompletedProcess[str]":
    return subprocess.run(
        [sys.executable, "-m", "distbelief", *args], capture_output=True, text=True, timeout=PATIENCE, **more
    )


@pytest.mark.parametrize(
    ("line", "status"),
    [
        ("--help", 0),
        ("--version", 0),
        ("train mnist downpour --help", 0),
        ("simulate mnist downpour --help", 0),
        ("", 2),
        ("trian", 2),
        ("train mnsit downpour", 2),
        ("train mnist downpour --replica 3", 2),
        ("train mnist single --push-every 3", 2),
        ("train mnist downpour --epochs 0", 2),
        ("simulate mnist downpour --network speed=3", 2),
    ],
)
def test_help_and_wrong_words_answer_before_torch_is_imported(line: str, status: int) -> None:
    ended = subprocess.run([sys.executable, "-c", LIGHT, *line.split()], capture_output=True, timeout=PATIENCE)
    assert ended.returncode == status, ended.stderr


@pytest.mark.parametrize(
    "words", ["downpour --replicas 2 --shards 2", "downpour --replicas 2 --transport tcp", "single"]
)
def test_train_then_evaluate(words: str, tmp_path: Path) -> None:
    run = tmp_path / "run"
    trained = distbelief(
        "train", "digits", *words.split(), "--optimizer", "adagrad", "--epochs", "2", "--out", str(run)
    )
    assert (trained.returncode, trained.stderr) == (0, "")
    result = json.loads((run / "result.json").read_text())
    assert (result["outcome"], result["samples"], result["epochs"]) == ("done", 2 * 1437, 2)
    assert result["test_accuracy"] > 0.5
    assert f"{100 * result['test_accuracy']:.2f} %" in trained.stdout
    assert trained.stdout.splitlines()[-1].split() == ["run", "folder", str(run)]

    evaluated = distbelief("evaluate", str(run), "--json")
    assert evaluated.returncode == 0, evaluated.stderr
    figures = json.loads(evaluated.stdout)
    assert (figures["test_accuracy"], figures["samples"]) == (result["test_accuracy"], 360)
    assert figures["test_loss"] == pytest.approx(result["test_loss"])
    assert f"test accuracy {100 * result['test_accuracy']:.2f} %" in distbelief("evaluate", str(run)).stdout


def test_json_is_one_record_a_line_and_the_result_last(tmp_path: Path) -> None:
    trained = distbelief("train", "digits", "downpour", "--json", "--out", str(tmp_path / "run"))
    lines = [json.loads(line) for line in trained.stdout.splitlines()]
    assert [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()] == lines[:-1]
    assert lines[-1] == {**json.loads((tmp_path / "run" / "result.json").read_text()), "run": str(tmp_path / "run")}


@pytest.mark.parametrize("how", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP], ids=lambda how: how.name)
@pytest.mark.parametrize("strategy", ["downpour", "single", "allreduce", "hogwild"])
def test_a_signal_to_all_processes_keeps_a_checkpoint_and_the_printed_command_goes_on(
    strategy: str, how: signal.Signals, tmp_path: Path
) -> None:
    run = tmp_path / "a run"
    words = ["train", "digits", strategy, "--json", "--epochs", "100000", "--checkpoint-every", "0", "--out", str(run)]
    process = subprocess.Popen(
        [sys.executable, "-m", "distbelief", *words],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    assert process.stdout
    for line in process.stdout:
        if json.loads(line)["event"] == "EpochDone":
            break
    # a terminal sends it to every process of the job, and so does `timeout`
    os.killpg(process.pid, how)
    shown, said = process.communicate(timeout=PATIENCE)
    assert process.returncode == 130, said
    before = json.loads(shown.splitlines()[-1])
    assert (before["outcome"], before["run"]) == ("interrupted", str(run))
    assert "was killed by" not in shown  # a job may survive that, and go on
    [line] = said.splitlines()
    assert line.startswith("distbelief: interrupted; go on with: distbelief train ")

    command = shlex.split(line.partition("go on with: ")[2])[1:]
    command[command.index("--epochs") + 1] = str(before["epochs"] + 2)
    resumed = distbelief(*command)
    assert resumed.returncode == 0, resumed.stderr
    after = json.loads(resumed.stdout.splitlines()[-1])
    assert (after["outcome"], after["samples"]) == ("done", 1437 * (before["epochs"] + 2))


def test_the_second_signal_ends_a_job_at_once_and_prints_the_command_that_goes_on_too(tmp_path: Path) -> None:
    run = tmp_path / "run"
    words = ["train", "digits", "downpour", "--json", "--epochs", "100000", "--out", str(run)]
    process = subprocess.Popen(
        [sys.executable, "-m", "distbelief", *words], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    assert process.stdout
    for line in process.stdout:
        if json.loads(line)["event"] == "Checkpointed":
            break
    for one in (signal.SIGINT, signal.SIGTERM):  # two of one kind may come as one
        process.send_signal(one)
    _, said = process.communicate(timeout=PATIENCE)
    assert process.returncode == 130
    [line] = said.splitlines()
    command = r"distbelief train digits downpour --json --epochs 100000 --out \S+/run --resume"
    assert re.fullmatch(
        r"distbelief: interrupted twice: ended at once, without a checkpoint; go on from checkpoint \d+ with "
        rf"--resume: {command}",
        line,
    )
    assert json.loads((run / "result.json").read_text())["cause"] == "interrupted, and ended at once"


def test_a_run_folder_that_is_not_empty_is_refused(tmp_path: Path) -> None:
    (tmp_path / "notes").write_text("mine")
    ended = distbelief("train", "digits", "downpour", "--out", str(tmp_path))
    assert (ended.returncode, ended.stdout) == (2, "starting downpour on digits\n")
    assert "is not empty" in ended.stderr
    assert [path.name for path in tmp_path.iterdir()] == ["notes"]


def test_data_that_are_nowhere_are_told_before_anything_is_made(tmp_path: Path) -> None:
    out = tmp_path / "run"
    ended = distbelief("train", "mnist", "downpour", "--data-dir", str(tmp_path), "--out", str(out))
    assert ended.returncode == 2
    assert f"no MNIST in {tmp_path}" in ended.stderr
    assert ended.stderr.count("\n") == 1
    assert not out.exists()


def test_ports_are_those_of_bind_and_one_in_use_is_told(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        line = ["train", "digits", "downpour", "--transport", "tcp", "--bind", f"127.0.0.1:{port}", "--quiet"]
        ended = distbelief(*line, "--out", str(tmp_path / "run"))
    assert (ended.returncode, ended.stdout) == (2, "")
    assert f"coordinator cannot listen at tcp:127.0.0.1:{port}" in ended.stderr
    assert "choose another port" in ended.stderr
    assert ended.stderr.count("\n") == 1
    assert not (tmp_path / "run").exists(), (
        "a run that never began leaves no folder: the same command can be tried again"
    )


def test_a_task_of_ones_own_is_found_in_the_current_folder(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(
        "import torch\nfrom distbelief import Task, TensorData\n"
        "def task():\n"
        "    data = lambda: TensorData(torch.randn(100, 4, generator=torch.Generator().manual_seed(0)), "
        "torch.arange(100) % 2)\n"
        "    return Task(model=lambda: torch.nn.Linear(4, 2), train=data)\n"
    )
    ended = distbelief("train", "mine:task", "downpour", "--batch-size", "10", "--quiet", cwd=tmp_path)
    assert (ended.returncode, ended.stderr) == (0, "")
    result = json.loads((tmp_path / ended.stdout.strip() / "result.json").read_text())
    assert (result["samples"], result["test_accuracy"]) == (100, None)
    evaluated = distbelief("evaluate", ended.stdout.strip(), cwd=tmp_path)
    assert evaluated.returncode == 2
    assert "no test set" in evaluated.stderr
    aimed = distbelief("train", "mine:task", "downpour", "--target-accuracy", "0.9", "--out", "aimed", cwd=tmp_path)
    assert aimed.returncode == 2
    assert "--target-accuracy 0.9: task 'mine:task' has no test set to reach it on" in aimed.stderr
    assert not (tmp_path / "aimed").exists()


def test_a_reader_that_leaves_ends_nothing_but_the_showing(tmp_path: Path) -> None:
    process = subprocess.Popen(
        [sys.executable, "-m", "distbelief", "train", "digits", "downpour", "--json", "--out", str(tmp_path / "run")],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stdout
    assert process.stderr
    process.stdout.readline()
    process.stdout.close()
    said = process.stderr.read()
    process.stderr.close()
    process.wait(PATIENCE)
    assert "Traceback" not in said
    assert json.loads((tmp_path / "run" / "result.json").read_text())["outcome"] == "done"


@pytest.mark.parametrize("closed", ["0<&-", "1>&-", "2>&-", "0<&- 1>&- 2>&-"])
def test_a_job_runs_without_standard_streams(tmp_path: Path, closed: str) -> None:
    line = (
        f"exec {shlex.quote(sys.executable)} -m distbelief train digits downpour --out "
        f"{shlex.quote(str(tmp_path / 'run'))} {closed}"
    )
    ended = subprocess.run(["sh", "-c", line], capture_output=True, text=True, timeout=PATIENCE)
    assert (ended.returncode, ended.stderr) == (0, "")
    assert json.loads((tmp_path / "run" / "result.json").read_text())["outcome"] == "done"


def test_a_full_disk_behind_the_output_is_one_line() -> None:
    with Path("/dev/full").open("w") as full:
        ended = subprocess.run(
            [sys.executable, "-u", "-m", "distbelief", "--help"],
            stdout=full,
            stderr=subprocess.PIPE,
            text=True,
            timeout=PATIENCE,
        )
    assert (ended.returncode, ended.stderr) == (1, "distbelief: [Errno 28] No space left on device\n")
