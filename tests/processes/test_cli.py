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

import pytest
from patience import SECONDS

from distbelief.cli import main

LIGHT = """
import sys
from distbelief.cli.main import run
for line in sys.stdin.read().splitlines():
    print("status", run(line.split()), "torch" in sys.modules, flush=True)
"""


def test_help_and_wrong_words_answer_before_torch_is_imported() -> None:
    lines = {
        "--help": 0, "--version": 0, "train mnist downpour --help": 0, "simulate mnist downpour --help": 0, "": 2,
        "trian": 2, "train mnsit downpour": 2, "train mnist downpour --replica 3": 2,
        "train mnist single --push-every 3": 2, "train mnist downpour --epochs 0": 2,
        "simulate mnist downpour --network speed=3": 2,
    }  # fmt: skip
    ended = subprocess.run(
        [sys.executable, "-c", LIGHT], input="".join(f"{line}\n" for line in lines), capture_output=True, text=True,
        timeout=SECONDS,
    )  # fmt: skip
    told = [line for line in ended.stdout.splitlines() if line.startswith("status ")]
    assert told == [f"status {status} False" for status in lines.values()], ended.stderr


def test_train_then_evaluate(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = tmp_path / "run"
    words = ["train", "digits", "downpour", "--transport", "tcp", "--optimizer", "adagrad", "--out"]
    assert main.run([*words, str(run)]) == 0
    shown = capsys.readouterr()
    assert shown.err == ""
    result = json.loads((run / "result.json").read_text())
    assert (result["outcome"], result["samples"], result["epochs"]) == ("done", 1437, 1)
    assert result["test_accuracy"] > 0.5
    assert f"{100 * result['test_accuracy']:.2f} %" in shown.out
    assert shown.out.splitlines()[-1].split() == ["run", "folder", str(run)]

    assert main.run(["evaluate", str(run), "--json"]) == 0
    figures = json.loads(capsys.readouterr().out)
    assert (figures["test_accuracy"], figures["samples"]) == (result["test_accuracy"], 360)
    assert figures["test_loss"] == pytest.approx(result["test_loss"])
    assert main.run(["evaluate", str(run)]) == 0
    assert f"test accuracy {100 * result['test_accuracy']:.2f} %" in capsys.readouterr().out


def test_json_is_one_record_a_line_and_the_result_last(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main.run(["train", "digits", "single", "--json", "--out", str(tmp_path / "run")]) == 0
    lines = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()] == lines[:-1]
    assert lines[-1] == {**json.loads((tmp_path / "run" / "result.json").read_text()), "run": str(tmp_path / "run")}


@pytest.mark.parametrize(
    ("strategy", "how"),
    [
        pytest.param("downpour", signal.SIGTERM, id="downpour-SIGTERM"),
        pytest.param("allreduce", signal.SIGINT, id="allreduce-SIGINT", marks=pytest.mark.long),
        pytest.param("hogwild", signal.SIGHUP, id="hogwild-SIGHUP", marks=pytest.mark.long),
    ],
)
def test_a_signal_to_all_processes_keeps_a_checkpoint_and_the_printed_command_goes_on(
    strategy: str, how: signal.Signals, tmp_path: Path, capsys: pytest.CaptureFixture[str]
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
    shown, said = process.communicate(timeout=SECONDS)
    assert process.returncode == 130, said
    before = json.loads(shown.splitlines()[-1])
    assert (before["outcome"], before["run"]) == ("interrupted", str(run))
    assert "was killed by" not in shown  # a job may survive that, and go on
    [line] = said.splitlines()
    assert line.startswith("distbelief: interrupted; go on with: distbelief train ")

    command = shlex.split(line.partition("go on with: ")[2])[1:]
    command[command.index("--epochs") + 1] = str(before["epochs"] + 2)
    assert main.run(command) == 0
    after = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert (after["outcome"], after["samples"]) == ("done", 1437 * (before["epochs"] + 2))


def test_the_second_signal_ends_a_job_at_once_and_prints_the_command_that_goes_on_too(tmp_path: Path) -> None:
    run = tmp_path / "run"
    words = ["train", "digits", "single", "--json", "--epochs", "100000", "--out", str(run)]
    process = subprocess.Popen(
        [sys.executable, "-m", "distbelief", *words], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    assert process.stdout
    for line in process.stdout:
        if json.loads(line)["event"] == "Checkpointed":
            break
    for one in (signal.SIGINT, signal.SIGTERM):  # two of one kind may come as one
        process.send_signal(one)
    _, said = process.communicate(timeout=SECONDS)
    assert process.returncode == 130
    [line] = said.splitlines()
    command = r"distbelief train digits single --json --epochs 100000 --out \S+/run --resume"
    assert re.fullmatch(
        r"distbelief: interrupted twice: ended at once, without a checkpoint; go on from checkpoint \d+ with "
        rf"--resume: {command}",
        line,
    )
    assert json.loads((run / "result.json").read_text())["cause"] == "interrupted, and ended at once"


def test_what_is_wrong_is_told_before_anything_is_made(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "notes").write_text("mine")
    out = tmp_path / "run"
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        wrong = {
            f"digits downpour --quiet --out {tmp_path}/mine": "is not empty",
            f"mnist downpour --quiet --data-dir {tmp_path} --out {out}": f"no MNIST in {tmp_path}",
            f"digits downpour --transport tcp --bind 127.0.0.1:{port} --quiet --out {out}": (
                f"coordinator cannot listen at tcp:127.0.0.1:{port}"
            ),
        }
        for words, told in wrong.items():
            assert main.run(["train", *words.split()]) == 2
            shown = capsys.readouterr()
            assert (shown.out, shown.err.count("\n")) == ("", 1), shown
            assert told in shown.err
            assert not out.exists(), "a run that never began leaves no folder: the same command can be tried again"
    assert "choose another port" in shown.err
    assert [path.name for path in (tmp_path / "mine").iterdir()] == ["notes"]


def test_a_task_of_ones_own_is_found_in_the_current_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "its_own.py").write_text(
        "import torch\nfrom distbelief import Task, TensorData\n"
        "def task():\n"
        "    data = lambda: TensorData(torch.randn(100, 4, generator=torch.Generator().manual_seed(0)), "
        "torch.arange(100) % 2)\n"
        "    return Task(model=lambda: torch.nn.Linear(4, 2), train=data)\n"
    )
    command = [sys.executable, "-m", "distbelief", "train", "its_own:task", "single", "--batch-size", "10", "--quiet"]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=SECONDS, cwd=tmp_path)
    assert (ended.returncode, ended.stderr) == (0, "")
    result = json.loads((tmp_path / ended.stdout.strip() / "result.json").read_text())
    assert (result["samples"], result["test_accuracy"]) == (100, None)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    assert main.run(["evaluate", ended.stdout.strip()]) == 2
    assert "no test set" in capsys.readouterr().err
    assert main.run(["train", "its_own:task", "downpour", "--target-accuracy", "0.9", "--out", "aimed"]) == 2
    told = " ".join(capsys.readouterr().err.split())
    assert "--target-accuracy 0.9: task 'its_own:task' has no test set to reach it on" in told
    assert not (tmp_path / "aimed").exists()


def test_a_reader_that_leaves_ends_nothing_but_the_showing(tmp_path: Path) -> None:
    process = subprocess.Popen(
        [sys.executable, "-m", "distbelief", "train", "digits", "single", "--json", "--out", str(tmp_path / "run")],
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
    process.wait(SECONDS)
    assert "Traceback" not in said
    assert json.loads((tmp_path / "run" / "result.json").read_text())["outcome"] == "done"


@pytest.mark.long
def test_a_job_runs_without_standard_streams(tmp_path: Path) -> None:
    out, python = shlex.quote(str(tmp_path / "run")), shlex.quote(sys.executable)
    line = f"exec {python} -m distbelief train digits downpour --out {out} 0<&- 1>&- 2>&-"
    ended = subprocess.run(["sh", "-c", line], capture_output=True, text=True, timeout=SECONDS)
    assert (ended.returncode, ended.stderr) == (0, "")
    assert json.loads((tmp_path / "run" / "result.json").read_text())["outcome"] == "done"


def test_a_full_disk_behind_the_output_is_one_line() -> None:
    with Path("/dev/full").open("w") as full:
        ended = subprocess.run(
            [sys.executable, "-u", "-m", "distbelief", "--help"],
            stdout=full,
            stderr=subprocess.PIPE,
            text=True,
            timeout=SECONDS,
        )
    assert (ended.returncode, ended.stderr) == (1, "distbelief: [Errno 28] No space left on device\n")


PRINTS = """
import os, torch, distbelief as db
replica = db.join()
optimizer = replica.optimizer(model := torch.nn.Linear(1, 1))
for x, _ in replica.batches(torch.utils.data.TensorDataset(torch.ones(8, 1), torch.ones(8)), 4):
    optimizer.zero_grad(), model(x).sum().backward(), optimizer.step()
print("r\u00e9sum\u00e9", flush=True)
os.system(r"printf 'r\\303\\251sum\\351\\n'")
"""
ASCII = {"LC_ALL": "POSIX", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}


@pytest.mark.parametrize("logs", [(), pytest.param(("--logs",), marks=pytest.mark.long)])
def test_text_that_an_output_lacks_is_escaped_there_and_whole_in_files(tmp_path: Path, logs: tuple[str, ...]) -> None:
    """It ended the job, or its showing; what a program of the script prints may be no text at all."""
    (tmp_path / "script.py").write_text(PRINTS, encoding="utf-8")
    words = ["launch", "downpour", "--replicas", "1", *logs, "--out", "run", "script.py"]
    ended = subprocess.run(
        [sys.executable, "-m", "distbelief", *words],
        cwd=tmp_path, env={**os.environ, **ASCII}, capture_output=True, text=True, timeout=SECONDS, check=False,
    )  # fmt: skip
    assert (ended.returncode, ended.stderr) == (0, "")
    assert re.search(r"^run folder +run$", ended.stdout, re.MULTILINE)
    if logs:
        kept = (tmp_path / "run" / "logs" / "replica-0.log").read_text(encoding="utf-8")
        assert kept.splitlines() == ["r\u00e9sum\u00e9", "r\u00e9sum\ufffd"]
    else:
        printed = [line for line in ended.stdout.splitlines() if line.startswith("[replica 0] ")]
        assert printed == [r"[replica 0] r\xe9sum\xe9", r"[replica 0] r\xe9sum\ufffd"]
