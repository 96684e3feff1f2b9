"""What a split model costs: what is where adds up, a step is the price of known segments, and whether it pays."""

import itertools
import json
from collections import OrderedDict
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from asking import Ask
from torch import nn

from distbelief.core.optimizer import optim
from distbelief.errors import UsageError
from distbelief.lab.cost import profile, splitting
from distbelief.lab.cost.options import SplitRequest
from distbelief.lab.cost.splitting import GRADIENTS, KEPT, PARAMETERS, STATE, SplitCost, measure
from distbelief.schedules.pipeline_price import SegmentCost
from distbelief.schedules.price import LinkModel
from distbelief.split.options import Split
from distbelief.split.plan import apply
from distbelief.split.tracing import trace
from distbelief.tasks import Task
from distbelief.tasks.digits import lenet

WAYS = ["stages", "columns", "neurons", "groups", "regions", "conv*=filters,fc*=columns"]


def mlp() -> nn.Module:
    layers = {"fc1": nn.Linear(6, 8), "tanh": nn.Tanh(), "fc2": nn.Linear(8, 4)}
    return nn.Sequential(OrderedDict(layers))


TASK = Task(model=mlp, train=lambda: (torch.randn(40, 6), torch.randint(0, 4, (40,))))


def known(monkeypatch: pytest.MonkeyPatch, segments: list[SegmentCost], whole: float) -> None:
    """Segments, a whole step and updates that take what is said."""
    monkeypatch.setattr(splitting.Turns, "take", lambda *_: None)
    monkeypatch.setattr(splitting.Turns, "costs", lambda _: segments)
    monkeypatch.setattr(splitting.Turns, "whole", lambda _: (1e-3, whole))
    monkeypatch.setattr(splitting, "measure_update", lambda one, n, _: profile.UpdateCost(one.name, n * 1e-6, 8 * n))


def cost_of(optimizer: str = "sgd", link: LinkModel = splitting.LINE, **asked: Any) -> SplitCost:
    request = SplitRequest(**{"batch_size": 10, **asked})
    return measure(TASK, Split.parse("stages", 2), request, optim(optimizer), link).cost


def test_a_step_is_the_price_of_its_segments_with_what_each_partition_does_besides(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    known(monkeypatch, [SegmentCost(2e-3, 4e-3), SegmentCost(1e-3, 3e-3)], 5e-3)
    found = cost_of(link=LinkModel(1e-4, 32e6))
    # gathering, both segments there and back, 8 floats of 10 samples each way, and the update of 56 parameters
    assert found.step == pytest.approx(1e-3 + 10e-3 + 2 * (1e-4 + 320 / 32e6) + 56e-6)
    assert found.whole.step == pytest.approx(1e-3 + 5e-3 + 92e-6)
    assert [partition.computes for partition in found.partition_costs] == pytest.approx([6e-3, 4e-3])
    assert [(partition.messages, partition.sent) for partition in found.partition_costs] == [(1, 320), (1, 320)]
    assert "does not pay in time" in found.verdict
    assert f"{found.whole.step / found.step:.2f} times as fast" in found.verdict
    known(monkeypatch, [SegmentCost(2e-3, 4e-3), SegmentCost(1e-3, 3e-3)], 20e-3)
    assert cost_of().verdict.startswith("splitting pays: ")


def test_microbatches_are_priced_by_their_schedule(monkeypatch: pytest.MonkeyPatch) -> None:
    known(monkeypatch, [SegmentCost(1e-3, 2e-3), SegmentCost(1e-3, 2e-3)], 5e-3)
    for schedule in ("gpipe", "1f1b"):
        found = cost_of(schedule=schedule, microbatches=5, link=LinkModel(0.0, float("inf")))
        assert found.step == pytest.approx(1e-3 + (2 + 4) * 3e-3 + 56e-6)
        assert found.partition_costs[0].messages == 5
    with pytest.raises(UsageError, match="11 microbatches need a sample each"):
        cost_of(microbatches=11)


class Ticks:
    """A device's clock, on which whatever is timed takes a second."""

    of_thread = False

    def __init__(self) -> None:
        self.now = 0

    def mark(self) -> int:
        self.now += 1
        return self.now

    def between(self, moments: Sequence[int]) -> list[float]:
        return [float(after - before) for before, after in itertools.pairwise(moments)]


def test_segments_are_timed_by_the_clock_of_their_device(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[object] = []
    monkeypatch.setattr(splitting, "clock_of", lambda device: {"cuda": Ticks()}[device])
    monkeypatch.setattr(splitting, "placed", lambda device: asked.append(device) or torch.device("cpu"))
    monkeypatch.setattr(splitting, "build_model", lambda task, _, device: asked.append(device) or task.model())
    monkeypatch.setattr(
        splitting, "measure_update", lambda *given: profile.UpdateCost(asked.append(given[2]) or "", 0.0, 0)
    )
    found = cost_of(seconds=0.01, device="cuda")
    assert {*asked} == {"cuda"}
    assert (found.whole.gathers, found.whole.computes) == (1.0, 1.0)
    # of the first forward, up to what it gives, up to what it takes, and up to its way back; that; and of the second
    # forward, its way back up to what it gives, and the end
    assert [partition.computes for partition in found.partition_costs] == [2.0, 2.0]
    assert not any("busy" in note for note in found.notes)


@pytest.mark.parametrize(("ways", "partitions"), [(ways, 2) for ways in WAYS] + [("groups", 3), ("stages", 4)])
def test_what_is_where_adds_up_to_the_whole(ways: str, partitions: int) -> None:
    model = lenet()
    traced = trace(model, (torch.zeros(2, 1, 28, 28),))
    graph = apply(Split.parse(ways, partitions), traced, nn.functional.cross_entropy, torch.zeros(2, dtype=torch.int64))
    rows = splitting.placements(graph)
    assert sum(row.parameters for row in rows) == sum(one.numel() for one in model.parameters())
    # 2 operations for each multiply-add of 5x5 filters at 28x28 and 10x10 places and of the dense layers, by hand
    by_hand = 2 * sum(one.weight.numel() * places for one, places in zip(
        (one for one in model.modules() if isinstance(one, nn.Conv2d | nn.Linear)), (576, 64, 1, 1), strict=True
    ))  # fmt: skip
    assert sum(row.operations for row in rows) == pytest.approx(by_hand, rel=1e-3)
    assert {row.partition for row in rows} == set(range(partitions))


def test_memory_is_what_is_held_for_a_step() -> None:
    found = cost_of("adam", seconds=0.01)
    # inputs, what tanh gives (kept once by tanh and the layer behind it), log of softmax, targets, and their count
    assert found.whole.memory == {
        PARAMETERS: 368,
        GRADIENTS: 368,
        STATE: pytest.approx(736, abs=8),
        KEPT: 240 + 320 + 160 + 80 + 4,
    }
    first, second = found.partition_costs
    assert (first.memory[PARAMETERS], second.memory[PARAMETERS]) == (56 * 4, 36 * 4)
    # each beside slots for what crosses: the value at the second, its gradient at the first
    assert (first.memory[KEPT], second.memory[KEPT]) == (240 + 320 + 320, 160 + 80 + 4 + 320)
    assert found.step > 0 < found.whole.step


@pytest.mark.long
def test_the_command_shows_what_goes_where(ask: Ask, tmp_path: Path) -> None:
    words = ["split", "digits", "--seconds", "0.01", "--batch-size", "8", "--split", "neurons"]
    picture = tmp_path / "split.svg"
    shown = ask([*words, "--draw", str(picture)]).out
    assert all(word in shown for word in ("partition 1", "computes", "optimizer state", "times as fast"))
    assert picture.read_text().startswith("<svg")
    when = tmp_path / "step.svg"
    more = ["--microbatches", "2", "--draw-step", str(when)]
    assert (
        "1f1b with 2 microbatches"
        in ask(["split", "digits", "--seconds", "0.01", "--batch-size", "8", "--split", "stages", *more]).out
    )
    # forward and back of two microbatches at two partitions, and what is behind them
    assert when.read_text().count("<rect") == 2 * 2 * 2 + 1
    words = ["split", "mnist-gru", "--split", "time", "--chunks", "3", "--seconds", "0.01", "--batch-size", "4"]
    cut = json.loads(ask([*words, "--json"]).out)
    assert (cut["chunks"], sum(one["source"] == 0 for one in cut["crossings"])) == (3, 3)
    words = ["split", "digits", "--seconds", "0.01", "--batch-size", "8", "--split", "neurons"]
    made = json.loads(ask([*words, "--json"]).out)
    assert made["speedup"] == pytest.approx(made["whole"]["gathers"] and _whole(made) / made["step"])
    assert made["crossings"][0]["kind"] in ("sum", "gather")
    assert "name a file in a folder of yours" in ask([*words, "--draw", str(tmp_path / "no" / "x.svg")], 2).err


def _whole(made: dict[str, dict[str, float]]) -> float:
    return sum(made["whole"][name] for name in ("gathers", "computes", "update"))
