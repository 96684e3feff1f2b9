"""What a user's task raises in the processes of a job, and the places from which a job can be started."""

import subprocess
import sys
import threading
from pathlib import Path

import jobs
import pytest
from patience import SECONDS

from distbelief.errors import JobFailed, TrainingError, UsageError
from distbelief.strategies import Downpour, Single, Strategy

SINGLE, SERVED = Single(), Downpour(replicas=2)
WRONG: dict[str, tuple[Strategy, str]] = {
    "raising": (SERVED, r"task 'jobs_wrong:raising' raised at epoch 1, minibatch \d+: ValueError: three is enough"),
    "data_raising": (SINGLE, r"minibatch \d+: KeyError: 'a sample is missing'"),
    "loading_raises": (
        SINGLE, "the data of task 'jobs_wrong:loading_raises' cannot be loaded: FileNotFoundError: no such file",
    ),
    "dies": (SERVED, "every replica is gone|is gone: its process ended with status 3|ended with status 3"),
    "dies_well": (SINGLE, "ended with status 0"),
    "exits": (SINGLE, r"minibatch \d+: SystemExit: 0"),
}  # fmt: skip


@pytest.mark.parametrize("name", WRONG)
def test_what_a_users_task_raises_is_one_clear_error(tmp_path: Path, name: str) -> None:
    strategy, told = WRONG[name]
    with pytest.raises((TrainingError, JobFailed, UsageError, jobs.DataError), match=told) as caught:
        jobs.run(tmp_path, strategy, task=f"jobs_wrong:{name}")
    assert "\n" not in str(caught.value)
    if name == "raising":
        assert "jobs_wrong.py" in caught.value.__notes__[0]
        assert str(caught.value).startswith("replica ")


SCRIPT = """
import sys
import distbelief as db
result = db.run(db.Job("jobs:tiny", {strategy}, epochs=1, out="{out}"))
print(result["outcome"], result["samples"], __name__)
"""


@pytest.mark.parametrize(
    ("how", "strategy"),
    [("file", "db.Downpour()"), *(pytest.param(how, "db.Single()", marks=pytest.mark.long) for how in ("-c", "stdin"))],
)
def test_a_job_starts_from_anywhere_and_needs_no_guard(tmp_path: Path, strategy: str, how: str) -> None:
    source = SCRIPT.format(strategy=strategy, out="run")
    (tmp_path / "script.py").write_text(source)
    words = {"file": ["script.py"], "-c": ["-c", source], "stdin": ["-"]}[how]
    done = subprocess.run(
        [sys.executable, *words],
        input=source if how == "stdin" else "",
        capture_output=True,
        text=True,
        cwd=tmp_path,
        env=jobs.environment(),
        timeout=SECONDS,
    )
    assert done.stdout.split() == ["done", str(jobs.SAMPLES), "__main__"], done.stderr
    assert done.stderr == ""


def test_jobs_run_side_by_side_in_threads(tmp_path: Path) -> None:
    main, results = sys.modules["__main__"], {}

    def run(index: int) -> None:
        results[index] = jobs.run(tmp_path / str(index), Single() if index else Downpour())

    threads = [threading.Thread(target=run, args=(index,)) for index in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(SECONDS)
    assert [results[index]["samples"] for index in range(2)] == [jobs.SAMPLES] * 2
    assert sys.modules["__main__"] is main
