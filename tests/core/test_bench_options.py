"""Every option of the benchmark `simulator` reaches what it runs; what is given beside `--quick` is taken."""

from typing import Any

import pytest

from benchmarks import BENCHES, QUICK, Bench, simulator
from benchmarks.__main__ import run
from distbelief.cli import main


def simulated(**options: int) -> dict[str, Any]:
    small = {"replicas": 3, "shards": 2, "steps": 2, "repeats": 1, "quiet": True}
    return BENCHES["simulator"].run(simulator.SimulatorOptions(**{**small, **options}))


@pytest.mark.parametrize("name", ["replicas", "shards", "steps"])
def test_a_larger_simulation_has_more_messages(name: str) -> None:
    assert simulated(**{name: 4})["messages"] > simulated()["messages"]


def asked(monkeypatch: pytest.MonkeyPatch, *words: str) -> Any:
    """The options that a benchmark is run with."""
    ran: list[Any] = []
    monkeypatch.setattr(Bench, "run", lambda _, options: ran.append(options))
    assert main.run(words, run) == 0
    return ran[0]


@pytest.mark.parametrize(("name", "option"), [(name, option) for name, shorter in QUICK.items() for option in shorter])
def test_what_is_given_beside_quick_is_taken(name: str, option: str, monkeypatch: pytest.MonkeyPatch) -> None:
    short, usual = BENCHES[name].defaults(quick=True), BENCHES[name].defaults(quick=False)
    assert getattr(asked(monkeypatch, name, "--quick"), option) == getattr(short, option) != getattr(usual, option)
    for words in (["--quick", f"--{option.replace('_', '-')}", "7"], [f"--{option.replace('_', '-')}", "7", "--quick"]):
        given = asked(monkeypatch, name, *words)
        assert getattr(given, option) in (7, "7", (7,), ("7",))
        assert given.quick


def test_the_help_of_a_benchmark_keeps_no_line_break_of_its_source(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", "250")
    assert main.run(["allreduce", "--help"], run) == 0
    assert "encryption, in turns. Needs root and iproute2." in capsys.readouterr().out
