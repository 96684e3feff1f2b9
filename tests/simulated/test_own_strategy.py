"""A strategy from outside the package: on the command line, in a job, in simulation."""

from __future__ import annotations

from pathlib import Path

import damped_downpour
import pytest
from safetensors.torch import load_file

import distbelief as db
from distbelief.cli.commands import simulate
from distbelief.errors import UsageError
from distbelief.strategies import check_findable

NAME = "damped_downpour:DampedDownpour"


def learned(folder: Path, strategy: db.Strategy | str, **options: object) -> bytes:
    job = db.Job("digits", strategy, out=folder, evaluate_every=0, **options)  # type: ignore[arg-type]  # of any option
    db.run(job, on=db.Simulated(keep=True))
    return b"".join(bytes(value.numpy().data) for _, value in sorted(load_file(folder / "model.safetensors").items()))


def test_its_option_does_what_it_says(tmp_path: Path) -> None:
    """Half of a learning rate is the half learning rate, to the bit."""
    steps = {"replicas": 1, "shards": 2}
    damped = damped_downpour.DampedDownpour(**steps, optimizer=db.optim("sgd", lr=0.1), damping=0.5)  # type: ignore[arg-type]  # numbers
    half = db.Downpour(**steps, optimizer=db.optim("sgd", lr=0.05))  # type: ignore[arg-type]  # numbers
    whole = db.Downpour(**steps, optimizer=db.optim("sgd", lr=0.1))  # type: ignore[arg-type]  # numbers
    assert (
        learned(tmp_path / "damped", damped) == learned(tmp_path / "half", half) != learned(tmp_path / "whole", whole)
    )


def test_the_command_line_has_its_options_and_its_help(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    command = ["digits", NAME]
    with pytest.raises(SystemExit):
        simulate([*command, "--help"])
    told = " ".join(capsys.readouterr().out.split())
    assert "--damping" in told
    assert "The part of the learning rate at which a push is applied" in told
    assert "Downpour whose updates are made at a part of the learning rate" in told
    assert simulate([*command, "--damping", "0.25", "--quiet", "--keep", "--out", str(tmp_path / "run")]) == 0
    assert '"damping": 0.25' in (tmp_path / "run" / "result.json").read_text()
    assert f'"strategy": "{NAME}"' in (tmp_path / "run" / "result.json").read_text()


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["damped_downpour:DampedDownpour", "--damping", "2"], "--damping 2.0: is a part of the learning rate"),
        (["downpour", "--damping", "0.5"], "has no option --damping"),
        (["own_strategi:DampedDownpour"], "importing 'own_strategi' raised ModuleNotFoundError"),
        (["damped_downpour:Damp"], "module 'damped_downpour' has no 'Damp'; name a class of it"),
        (["damped_downpour:NO_CLASS"], "module 'damped_downpour' has a int by the name 'NO_CLASS'; name a class"),
        (["damped_downpour:Damped"], "name a class of it that is a distbelief.strategies.Strategy"),
        (["damped_downpour:Bare"], "its field 'depth' has no default; give it one"),
        (["damped_downpour:Taken"], "its field 'host_replicas' has the name of a trait; rename it"),
        (["tests/damped_downpour.py:DampedDownpour"], "is a path: write the module as Python imports it here, "
            "tests.damped_downpour:DampedDownpour"),
        (["dampoor"], "unknown strategy 'dampoor'; did you mean 'downpour'. Known: .*module:Class"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)  # fmt: skip
def test_what_is_no_strategy_is_refused_at_the_door(words: list[str], says: str) -> None:
    with pytest.raises(UsageError, match=says):
        simulate(["digits", *words])


def test_one_that_other_processes_could_not_find_is_refused() -> None:
    class Inside(db.Downpour):
        """Inside of a function."""

    with pytest.raises(UsageError, match="cannot be imported by other processes: put the class Inside at the top"):
        check_findable(Inside())
    with pytest.raises(UsageError, match="put the class Inside at the top"):
        db.Local().settings(db.Job("digits", Inside()))
