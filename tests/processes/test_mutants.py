"""The runner of mutants, on a small project: what is noticed, and where, what is not, and what says nothing."""

import os
import signal
import subprocess
import sys
from pathlib import Path
from time import monotonic

import pytest
from mutants import Mutant
from mutants.__main__ import try_all, within
from mutants.runs import Verdict
from patience import SECONDS

PACKAGE = {
    "distbelief/__init__.py": "",
    "distbelief/sums.py": "def add(a, b):\n    return a + b\n\n\ndef late():\n    return False\n",
    "distbelief/__main__.py": "from distbelief.sums import add\n\nprint(add(2, 3))\n",
    "distbelief/child.py": "from distbelief.sums import add\n\n\ndef tell(pipe):\n    pipe.send(add(2, 3))\n",
    "pyproject.toml": "[tool.pytest.ini_options]\naddopts = '--import-mode=importlib'\n",
    "tests/core/test_here.py": """
import os
import pytest
from distbelief.sums import add, late

@pytest.mark.parametrize("a", [0, 2])
def test_add(a):
    assert add(a, 3) == a + 3

def test_nothing():
    assert add

def test_fails_anyhow():
    assert add(1, 1) == 3

@pytest.mark.skipif(True, reason="no luck")
def test_skipped():
    assert add(1, 1) == 2

@pytest.fixture
def made():
    return 1 / (add(2, 3) == 5)

def test_of_what_is_made(made):
    assert made

@pytest.fixture
def looked():
    yield
    assert add(2, 3) == 5

def test_that_is_looked_at_afterwards(looked):
    pass

def test_ends():
    while late():
        pass
""",
    "tests/test_children.py": """
import multiprocessing
import subprocess
import sys

def test_command(tmp_path):
    # in an environment and a folder of its own
    command = [sys.executable, "-m", "distbelief"]
    assert subprocess.run(command, capture_output=True, text=True, env={}, cwd=tmp_path).stdout == "5\\n"

def test_forkserver():
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["distbelief.child"])
    ours, theirs = context.Pipe()
    from distbelief.child import tell
    process = context.Process(target=tell, args=(theirs,))
    process.start()
    assert ours.recv() == 5
    process.join()
""",
}
HERE, CHILDREN = "tests/core/test_here.py::", "tests/test_children.py::"


@pytest.fixture
def project(tmp_path: Path) -> Path:
    for name, text in PACKAGE.items():
        path = tmp_path / "small" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return tmp_path / "small"


def mutant(*tests: str, text: str = "a + b", replacement: str = "a - b", hangs: bool = False) -> Mutant:
    name = f"{'-'.join(test.partition('::')[2] for test in tests)}-{len(replacement)}"
    return Mutant(name, "", "sums.py", text, replacement, tests, seconds=1.0, hangs=hangs)


def test_a_process_that_a_test_starts_has_the_mutant(project: Path) -> None:
    both = mutant(CHILDREN + "test_command", CHILDREN + "test_forkserver")
    assert [outcome.verdict for outcome in try_all(project, [both], passed=False)] == [Verdict.KILLED]


def test_every_test_named_must_fail_and_of_its_cases_one(project: Path) -> None:
    verdicts = {
        mutant(HERE + "test_add"): Verdict.KILLED,
        mutant(HERE + "test_add[0]"): Verdict.KILLED,
        mutant(HERE + "test_add", text="return a + b", replacement="return a + b if a else b"): Verdict.SURVIVED,
        mutant(HERE + "test_add", HERE + "test_nothing"): Verdict.SURVIVED,
        mutant(HERE + "test_that_is_looked_at_afterwards"): Verdict.KILLED,
        mutant(HERE + "test_of_what_is_made"): Verdict.BROKEN,
        mutant(HERE + "test_fails_anyhow"): Verdict.BROKEN,
        mutant(HERE + "test_skipped"): Verdict.SKIPPED,
        mutant(HERE + "test_nothing", text="def add", replacement="import nothing\n\n\ndef add"): Verdict.BROKEN,
    }
    outcomes = {outcome.mutant: outcome for outcome in try_all(project, list(verdicts), passed=False)}
    for one, verdict in verdicts.items():
        assert outcomes[one].verdict is verdict, outcomes[one]
        assert outcomes[one].good is (verdict in (Verdict.KILLED, Verdict.SKIPPED))
    assert (project / "distbelief/sums.py").read_text() == PACKAGE["distbelief/sums.py"]


@pytest.mark.long
def test_what_never_ends_is_told_as_hung_and_is_noticed_only_where_its_row_says_so(
    project: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("mutants.__main__.LEAST_SECONDS", -5.0)  # with ten times the second of its row: 5 s
    for hangs in (False, True):
        endless = mutant(HERE + "test_ends", text="return False", replacement="return True", hangs=hangs)
        (outcome,) = try_all(project, [endless], passed=True)
        assert (outcome.verdict, outcome.good) == (Verdict.HUNG, hangs)


def test_a_text_that_stands_twice_or_not_at_all_is_an_error_before_anything_runs(project: Path) -> None:
    for text, count in (("return", 2), ("nowhere", 0)):
        with pytest.raises(ValueError, match=f"test_add-5: its text stands {count} times in sums.py, once is needed"):
            try_all(project, [mutant(HERE + "test_nothing"), mutant(HERE + "test_add", text=text)], passed=False)


def test_when_it_is_ended_nothing_is_left_of_it(tmp_path: Path) -> None:
    """The folders go, and the tests that run in them."""
    environment = {**os.environ, "TMPDIR": str(tmp_path), "PYTHONPATH": str(Path(__file__).parents[1])}
    words = [sys.executable, "-m", "mutants", "a-push-that-comes-again-is-applied-again"]
    with subprocess.Popen(words, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        end = monotonic() + 60
        while not (begun := list(tmp_path.glob("*/*/output"))):
            assert monotonic() < end
            assert process.poll() is None
        process.send_signal(signal.SIGTERM)
        _, said = process.communicate(timeout=SECONDS)
    assert begun
    assert process.returncode == 1
    assert said.decode() == "ended by SIGTERM\n"
    assert not list(tmp_path.iterdir())


def test_a_part_is_chosen_by_the_sources_and_fits_its_time() -> None:
    mutants = [Mutant(str(number), "", "", "", "", ("tests/core/test_x.py",), seconds=4.0) for number in range(100)]
    parts = {chance: [one.name for one in within(mutants, 100.0, chance)] for chance in ("one tree", "another")}
    assert all(25 <= len(part) <= 50 for part in parts.values())
    assert parts["one tree"] != parts["another"]
    assert parts["one tree"] == [one.name for one in within(mutants[::-1], 100.0, "one tree")]
