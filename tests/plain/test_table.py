"""A script with one replica is the plain script: every feature in every way, equal or refused with a sentence. `pytest`
alone draws one way of each feature.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from plain import scripts, table
from plain.play import WAYS, Outcome, Plain, play_plain, played
from plain.scripts import FEATURES, MOMENTUM
from plain.table import Cell, cells, difference, wrong

from distbelief.core.optimizer import LAYERWISE, LEARNING_RATES, OUTER
from distbelief.transport.inline import InlineEndpoint

SECTIONS = ("tensors", "optimizer", "gradients", "data", "saving", "control")


def _tested(name: str) -> Callable[..., None]:
    """The test of a feature: its own, so that one way of each is drawn."""

    def test(way: str, tmp_path: Path) -> None:
        assert not (found := wrong(Cell(name, way), tmp_path)), found

    def marked(way: str) -> Any:
        return pytest.param(way, marks=[pytest.mark.long] if FEATURES[name].long else [])

    return pytest.mark.parametrize("way", [marked(way) for way in FEATURES[name].ways])(test)


for name in FEATURES:
    globals()[f"test_{name}"] = _tested(name)


def test_the_table_is_large_and_nothing_is_open_that_is_not_in_it() -> None:
    assert len([*cells()]) >= 150
    assert {one.section for one in FEATURES.values()} == set(SECTIONS)


def test_the_document_has_the_table(tmp_path: Path) -> None:
    page = Path(__file__).parents[2] / "docs" / "plain.md"
    if os.environ.get("DISTBELIEF_RENEW"):
        page.write_text(table.document(tmp_path))
    assert page.read_text() == table.document(tmp_path), "renew it: DISTBELIEF_RENEW=1 pytest tests/plain -k document"


def test_every_scheduler_and_optimizer_is_in_it() -> None:
    known = {name: getattr(torch.optim.lr_scheduler, name) for name in torch.optim.lr_scheduler.__all__}
    schedulers = {name for name, one in known.items() if issubclass(one, torch.optim.lr_scheduler.LRScheduler)}
    assert schedulers - {"LRScheduler"} <= {name.partition(" ")[0] for name in scripts.SCHEDULERS}
    assert {*scripts.RATES, *LAYERWISE, *OUTER} == {*LEARNING_RATES}


@pytest.mark.parametrize(("way", "says"), [("served", "Push"), ("synchronous", "Push"), ("direct", "Here")])
def test_each_way_goes_its_own_way(way: str, says: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sent: list[str] = []
    send = InlineEndpoint.send

    def noted(self: InlineEndpoint, to: str, message: object, payload: Any = None) -> None:
        sent.append(type(message).__name__)
        send(self, to, message, payload)  # type: ignore[arg-type]  # a message

    monkeypatch.setattr(InlineEndpoint, "send", noted)
    assert not wrong(Cell("a_plain_model", way), tmp_path)
    assert says in sent
    assert ("Push" in sent) == (says == "Push")


BROKEN: dict[str, dict[str, Any]] = {"a rate times 1.001": {"factor": 1.001}, "a minibatch left out": {"left_out": 4}}


@pytest.mark.parametrize("broken", BROKEN)
@pytest.mark.parametrize("name", ["a_plain_model", "optimizer_adam"])
def test_a_player_that_does_otherwise_is_noticed(name: str, broken: str, tmp_path: Path) -> None:
    one = FEATURES[name]
    right, other = (
        play_plain(one.script, one.optimizer, one.epochs, tmp_path / str(number), **wrong)
        for number, wrong in enumerate(({}, BROKEN[broken]))
    )
    assert difference(right, other, one.within)
    assert not difference(right, right, one.within)


CHANGED: dict[str, Callable[[Outcome], Outcome]] = {
    "a bit of a parameter": lambda one: one._replace(
        state={**one.state, "0.bias": torch.nextafter(one.state["0.bias"], torch.ones(16))}
    ),
    "a bit of a loss": lambda one: one._replace(seen=[*one.seen[:-1], ("torch.float32", (), b"\0\0\0\0")]),
    "samples in another order": lambda one: one._replace(seen=[*one.seen[3:6], *one.seen[:3], *one.seen[6:]]),
    "a tensor less": lambda one: one._replace(state={"0.bias": one.state["0.bias"]}),
    "another file": lambda one: one._replace(files={"model.safetensors": b""}),
    "a file less": lambda one: one._replace(files={}),
    "another message": lambda one: one._replace(messages="a warning\n"),
    "an error": lambda one: one._replace(error="ValueError: no"),
}


@pytest.mark.parametrize("change", CHANGED)
def test_whatever_differs_is_noticed(change: str, tmp_path: Path) -> None:
    plain = played(FEATURES["saved_as_safetensors"].script, Plain(MOMENTUM, 1), tmp_path)
    assert not difference(plain, plain)
    assert difference(plain, CHANGED[change](plain))


def test_a_refusal_with_another_sentence_is_noticed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    one = FEATURES["closure"]
    monkeypatch.setitem(FEATURES, "closure", scripts.Feature("optimizer", "it", one.script, {"served": "another"}))
    assert wrong(Cell("closure", "served"), tmp_path).startswith("it should be refused with 'another'")
    assert set(one.ways) == {*WAYS}
