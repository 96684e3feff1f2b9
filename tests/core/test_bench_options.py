"""Every option of the benchmarks `simulator`, `large` and `accuracy` reaches what they run; what is given beside
`--quick` is taken.
"""

from typing import Any

import pytest

import distbelief as db
from benchmarks import BENCHES, Bench, accuracy, large, simulator
from distbelief.cli import main


def simulated(**options: int) -> dict[str, Any]:
    return simulator.run(
        simulator.SimulatorOptions(**{"replicas": 3, "shards": 2, "steps": 2, "repeats": 1, "quiet": True, **options})
    )


@pytest.mark.parametrize("name", ["replicas", "shards", "steps"])
def test_a_larger_simulation_has_more_messages(name: str) -> None:
    assert simulated(**{name: 4})["messages"] > simulated()["messages"]


def test_a_simulation_is_run_so_many_times() -> None:
    assert [len(simulated(repeats=repeats)["runs"]) for repeats in (1, 3)] == [1, 3]


def test_accuracy_is_of_the_jobs_that_are_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []
    monkeypatch.setattr(
        accuracy, "_accuracies", lambda *job: [asked.append(job), {accuracy.EARLY: 0.5, accuracy.LATE: 0.5}][1]
    )
    accuracy.run(
        accuracy.AccuracyOptions(
            "digits", replicas=3, shards=4, prefetch=1, optimizer="adam", lr=0.5, seeds=2, quiet=True
        )
    )
    optimizer = db.optim("adam", lr=0.5)
    strategies = (db.Single(optimizer=optimizer), db.Downpour(replicas=3, shards=4, prefetch=1, optimizer=optimizer))
    assert asked == [("digits", strategy, seed) for seed in (0, 1) for strategy in strategies]


def test_large_tries_every_rate_once_and_takes_the_best_to_every_seed(monkeypatch: pytest.MonkeyPatch) -> None:
    def trained(_: large.LargeOptions, name: str, rate: float, seed: int) -> float:
        asked.append((name, rate, seed))
        return 0.99 if rate in (10.0, 0.025) else 0.98

    asked: list[tuple[str, float, int]] = []
    monkeypatch.setattr(large, "_accuracy", trained)
    result = large.run(large.LargeOptions(seeds=2, quiet=True))
    tries = [(name, rate, 0) for name, rates in large.RATES.items() for rate in rates]
    assert sorted(asked) == sorted([*tries, ("lars", 10.0, 1), ("momentum", 0.025, 1)])
    assert result["mean"] == {"lars": 0.99, "momentum": 0.99}


def test_large_trains_with_all_its_options(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []
    monkeypatch.setattr(db.Local, "run", lambda _, job: [asked.append(job), {"test_accuracy": 0.5}][1])
    options = large.LargeOptions(
        batch=96, batch_size=8, replicas=3, epochs=7, warmup_epochs=1.5, weight_decay=0.25, seeds=1, quiet=True
    )
    large.run(options)
    optimizer = db.optim("lars", lr=5.0, weight_decay=0.25)
    assert asked[0].strategy == db.Allreduce(3, optimizer, accumulate=4)
    assert (asked[0].epochs, asked[0].batch_size, asked[0].warmup_epochs, asked[0].lr_schedule) == (
        7,
        8,
        1.5,
        "polynomial",
    )
    with pytest.raises(
        db.DistbeliefError, match="--batch 100: must be a multiple of --replicas times --batch-size, which is 24"
    ):
        large.run(large.LargeOptions(batch=100, batch_size=8, replicas=3))


def asked(monkeypatch: pytest.MonkeyPatch, *words: str) -> Any:
    """The options that a benchmark is run with."""
    ran: list[Any] = []
    monkeypatch.setattr(Bench, "run", lambda _, options: ran.append(options))
    assert main.run(["bench", *words]) == 0
    return ran[0]


@pytest.mark.parametrize(
    ("name", "option"), [(name, option) for name, bench in BENCHES.items() for option in bench.options.QUICK]
)
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
    assert main.run(["bench", "allreduce", "--help"]) == 0
    assert "--delay-ms --rate-mbit --loss; it prints up." in capsys.readouterr().out
