"""Every pipeline of a split model gives the whole model's gradients."""

import copy

import pytest
import torch
from pipeline_proofs import prove
from splitting import Played, Skipping, whole_gradients
from torch import nn

from distbelief.schedules.pipeline import pipeline
from distbelief.split.options import Split
from distbelief.split.plan import apply
from distbelief.split.play import Passes, cut_minibatch, play
from distbelief.split.program import PartitionProgram, build
from distbelief.split.tracing import trace


def mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(16, 12), nn.ReLU(), nn.Linear(12, 8), nn.ReLU(), nn.Linear(8, 10))


CASES = {
    "stages": (mlp, Split("stages", 3)),
    "skips": (Skipping, Split("stages", 4)),
    "neurons": (mlp, Split("neurons", 2)),
}
ORDERS = [("gpipe", 1), ("gpipe", 4), ("1f1b", 4), ("1f1b", 7)]


def programs_of(model: nn.Module, split: Split, inputs: torch.Tensor, targets: torch.Tensor) -> list[PartitionProgram]:
    graph = apply(split, trace(copy.deepcopy(model), (inputs,)), nn.functional.cross_entropy, targets)
    return [build(graph, partition, copy.deepcopy(model)) for partition in range(split.partitions)]


@pytest.mark.parametrize("how", ORDERS, ids=str)
@pytest.mark.parametrize("case", CASES)
def test_whatever_its_pipeline_gradients_are_the_whole_ones(case, how):
    torch.manual_seed(0)
    make, split = CASES[case]
    model, inputs = make().double(), torch.randn(9, 16, dtype=torch.float64)
    targets = torch.randint(8, (9,))
    programs = programs_of(model, split, inputs, targets)
    made = pipeline(how[0], programs[0].split.graph, how[1])
    prove(made)
    batches = cut_minibatch((inputs,), targets, made.microbatches)
    partitions = [Passes(program, batches) for program in programs]
    play(partitions, made.actions)
    whole, _, value = whole_gradients(model, (inputs,), targets)
    assert abs(sum(one.loss for one in partitions if one.loss is not None) - value.item()) < 1e-12
    gradients = Played(programs, 0.0, []).gradients()
    for name, parameter in whole.named_parameters():
        assert (gradients[name] - parameter.grad).abs().max() < 1e-12


def test_a_boundary_has_as_many_bytes_as_a_sample_has_more():
    inputs, targets = torch.randn(4, 16), torch.randint(8, (4,))
    graph = programs_of(mlp(), Split("stages", 3), inputs, targets)[0].split.graph
    assert [(one.source, one.target, one.size) for one in graph.boundaries] == [(0, 1, 12 * 4), (1, 2, 8 * 4)]
    assert graph.depths == (3, 2, 1)
    assert [segment.name for segment in graph.segments] == ["0, 1", "2, 3", "4, loss"]
