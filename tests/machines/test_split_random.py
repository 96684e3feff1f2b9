"""Random graphs, split at random: equal to the whole model, whatever they are."""

import pytest
import torch
import torch.nn.functional as F
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from splitting import check_equal
from torch import nn

from distbelief.errors import UsageError
from distbelief.split.options import Split
from distbelief.split.play import Pass

WIDTH = 4


class Graph(nn.Module):
    """Each step takes what one or two earlier ones gave: a layer, some layer again, a function, or a sum."""

    def __init__(self, steps: list[tuple[str, int, int]]) -> None:
        super().__init__()
        self.steps = steps
        self.layers = nn.ModuleList([nn.Linear(WIDTH, WIDTH) for _ in range(3)])
        self.own = nn.ModuleDict(
            {f"at{number}": nn.Linear(WIDTH, WIDTH) for number, (kind, *_) in enumerate(steps) if kind == "layer"}
        )
        self.last = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        found = [self.layers[0](x)]
        for number, (kind, one, other) in enumerate(self.steps):
            first, second = found[one % len(found)], found[other % len(found)]
            if kind == "layer":
                found.append(torch.tanh(self.own[f"at{number}"](first)))
            elif kind == "shared":
                found.append(self.layers[other % 3](first))
            elif kind == "sum":
                found.append(first + second * 0.5)
            elif kind == "join":
                found.append(torch.cat([first[:, :2], second[:, 2:]], 1))
            else:
                found.append(F.relu(first.clone(), inplace=True))
        return self.last(found[-1]) + found[len(found) // 2]


KINDS = st.sampled_from(["layer", "layer", "shared", "sum", "join", "relu"])
STEPS = st.lists(st.tuples(KINDS, st.integers(0, 20), st.integers(0, 20)), min_size=1, max_size=8)
PLACES = st.fixed_dictionaries(
    {},
    optional={
        "own.*": st.sampled_from(["columns", "neurons", "rows", "stages", "samples", 0, 1]),
        "layers.0": st.sampled_from(["columns", "rows", 0, 1]),
        "layers.*": st.sampled_from(["columns", "rows", "samples", 0, 1]),
        "last": st.sampled_from(["columns", "rows", "samples", 1]),
    },
)
WAYS = st.one_of(st.sampled_from(["stages", "columns", "rows", "neurons", "branches"]), PLACES)


REASONS = ("no name fits", "no parameter to train", "--partitions")
"""Why a split may be refused."""


COMPARED = 20
"""Fewest of 30 examples that are split, send something and are compared; 25 were, the others are refused."""


@pytest.mark.long
def test_random_graphs_split_at_random_are_the_whole_model():
    compared: list[int] = []
    check_random_graph(compared)
    assert sum(sent > 0 for sent in compared) >= COMPARED


@settings(max_examples=30, phases=[Phase.generate], deadline=None, derandomize=True)
@given(steps=STEPS, ways=WAYS, partitions=st.integers(2, 4), microbatches=st.integers(1, 3))
def check_random_graph(compared, steps, ways, partitions, microbatches):
    """One graph and one split; adds what crossed to those that were compared."""
    torch.manual_seed(0)
    model = Graph(steps).double()
    x, y = torch.randn(5, WIDTH, dtype=torch.float64), torch.randint(0, WIDTH, (5,))
    try:
        played = check_equal(model, (x,), y, Split(ways, partitions), microbatches=microbatches)
    except UsageError as error:
        if not any(word in str(error) for word in REASONS):
            raise
        return
    forward = [one for one in played.gave if one.direction is Pass.FORWARD and one.microbatch == 0]
    assert len({(one.transfer.value, one.transfer.target) for one in forward}) == len(forward)
    compared.append(len(played.gave))
