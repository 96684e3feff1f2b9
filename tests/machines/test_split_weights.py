"""Weights' gradients made once a step: bit for bit those of the whole model, from one product for each weight."""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Callable
from itertools import pairwise
from typing import Any

import pytest
import torch
from splitting import check_equal, play_split, whole_gradients
from torch import nn
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode

from benchmarks.parts.homes import How
from distbelief.core import roles
from distbelief.core.effects import Batch
from distbelief.errors import UsageError
from distbelief.schedules.pipeline import Pass
from distbelief.schedules.pipelines import home_tasks, in_flight
from distbelief.split.inline import play
from distbelief.split.options import Split
from distbelief.split.plan import apply
from distbelief.split.play import HomeStory, RunSegment, cut_minibatch, step
from distbelief.split.program import HomeProgram, build
from distbelief.split.tracing import trace
from distbelief.split.weights import GradientRooms, WeightGradients, check_once
from distbelief.strategies.partition import partition, split_graph
from distbelief.tasks import Task, TensorData


def mlp(*widths: int) -> nn.Module:
    """Fully connected layers with ReLU between them."""
    torch.manual_seed(0)
    layers = [nn.Linear(*sides) for sides in pairwise(widths)]
    return nn.Sequential(*[part for layer in layers for part in (layer, nn.ReLU())][:-1])


MLPS = {"MLP": (784, 300, 100, 10), "wide": (784, 2048, 2048, 10)}


@pytest.mark.parametrize("microbatches", [1, 4, 8])
@pytest.mark.parametrize("schedule", ["gpipe", "1f1b"])
@pytest.mark.parametrize(("name", "homes"), [("MLP", 2), ("MLP", 3), ("wide", 2)])
def test_gradients_of_mlps_in_stages_are_the_whole_ones_bit_for_bit(
    name: str, homes: int, schedule: str, microbatches: int
) -> None:
    model, x, y = mlp(*MLPS[name]), torch.randn(64, 784), torch.randint(0, 10, (64,))
    whole, *_ = whole_gradients(model, (x,), y)
    order = [*home_tasks(microbatches, in_flight(schedule, microbatches, 1), once=True)]
    split = Split("stages", homes)
    gradients = play_split(model, (x,), y, split, microbatches=microbatches, order=order).gradients()
    for parameter, tensor in whole.named_parameters():
        assert torch.equal(gradients[parameter], tensor.grad), parameter  # type: ignore[arg-type]  # it has one


class Made(TorchDispatchMode):
    """Counts the products that are made, by their shapes."""

    def __init__(self) -> None:
        super().__init__()
        self.shapes: Counter[tuple[int, ...]] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = func(*args, **(kwargs or {}))
        if func is torch.ops.aten.mm.default:
            self.shapes[tuple(given.shape)] += 1
        elif func is torch.ops.aten.convolution_backward.default:
            self.shapes.update([tuple(one.shape) for one in given[1:2] if one is not None])
        return given


def programs_of(model: nn.Module, split: Split, x: torch.Tensor, y: torch.Tensor) -> list[HomeProgram]:
    graph = apply(split, trace(copy.deepcopy(model), (x,)), F.cross_entropy, y)
    return [build(graph, home, copy.deepcopy(model)) for home in range(split.partitions)]


def net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(1, 3, 3, 2, 1, bias=False), nn.ReLU(), nn.Flatten(), nn.Linear(48, 7), nn.Tanh(), nn.Linear(7, 5)
    )


SHAPES = [(3, 1, 3, 3), (7, 48), (5, 7)]


@pytest.mark.parametrize("once", [False, True])
def test_a_product_of_each_weight_is_made_once(once: bool) -> None:
    x, y, microbatches = torch.randn(9, 1, 8, 8), torch.randint(0, 5, (9,)), 4
    programs = programs_of(net(), Split("stages", 2), x, y)
    order = [*home_tasks(microbatches, microbatches, once)]
    with Made() as made:
        play([step(program, cut_minibatch((x,), y, microbatches), order) for program in programs])
    assert {shape: made.shapes[shape] for shape in SHAPES} == dict.fromkeys(SHAPES, 1 if once else microbatches)


def watched(story: HomeStory, program: HomeProgram, seen: list[bool]) -> HomeStory:
    """Notes before each task whether any parameter has a gradient."""
    answer = None
    while True:
        try:
            effect = story.send(answer)
        except StopIteration as end:
            return end.value  # type: ignore[no-any-return]  # a result
        if isinstance(effect, RunSegment) and effect.direction is Pass.WEIGHTS:
            seen.append(any(one.grad is not None for one in program.module.parameters()))
        answer = yield effect


def test_no_weight_has_a_gradient_before_all_microbatches_are_back() -> None:
    x, y = torch.randn(9, 1, 8, 8), torch.randint(0, 5, (9,))
    programs = programs_of(net(), Split("stages", 2), x, y)
    seen: list[list[bool]] = [[], []]
    batches, order = cut_minibatch((x,), y, 3), [*home_tasks(3, 1, once=True)]
    results = play([watched(step(one, batches, order), one, own) for one, own in zip(programs, seen, strict=True)])
    assert seen == [[False], [False]]
    assert all(parameter.grad is not None for one in programs for parameter in one.module.parameters())
    gives = {"0.weight": 48, "3.weight": 7, "5.weight": 5}  # floats of a sample
    assert [result.kept for result in results] == [
        9 * 4 * sum(gives.get(name, 0) for name, _ in one.module.named_parameters()) for one in programs
    ]


class Tied(nn.Module):
    """A layer that is called twice, one that shares an embedding's weight, and one with norms around it."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.twice, self.norm = nn.Embedding(9, 6), nn.Linear(6, 6), nn.LayerNorm(6)
        self.frozen, self.head = nn.Linear(6, 6), nn.Linear(6, 9, bias=False)
        self.frozen.weight.requires_grad_(False)
        self.head.weight = self.embedding.weight

    def forward(self, words: torch.Tensor) -> torch.Tensor:
        h = self.twice(torch.tanh(self.twice(self.embedding(words))))
        return self.head(self.norm(self.frozen(h))).mean(1)  # type: ignore[no-any-return]  # of torch


class Convolved(nn.Module):
    """Convolutions of one to three dimensions, with steps, holes, groups, words for padding, and one that goes back."""

    def __init__(self) -> None:
        super().__init__()
        self.volume = nn.Conv3d(1, 2, (1, 3, 3), padding=(0, 1, 1))
        self.plane = nn.Conv2d(4, 6, 3, stride=2, padding=1, dilation=2, groups=2)
        self.same = nn.Conv2d(6, 6, 3, padding="same", bias=False)
        self.up = nn.ConvTranspose2d(6, 4, 2)
        self.line = nn.Conv1d(4, 3, 2, padding_mode="circular", padding=1)
        self.last = nn.Linear(3, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = torch.relu(self.volume(x.unsqueeze(1))).flatten(1, 2)
        h = self.up(torch.relu(self.same(self.plane(h)))).flatten(2)
        return self.last(self.line(h).mean(2))  # type: ignore[no-any-return]  # of torch


class Exported(nn.Module):
    """torch.fx cannot loop over rows that it does not count: exported, with parameters that are values."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.last = nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.first(x[:, 0])
        for row in range(1, x.size(1)):
            h = torch.tanh(self.second(x[:, row]) + h)
        return self.last(h)  # type: ignore[no-any-return]  # of torch


MODELS: dict[str, tuple[Callable[[], nn.Module], Callable[[], torch.Tensor]]] = {
    "tied": (Tied, lambda: torch.randint(0, 9, (7, 3))),
    "convolved": (Convolved, lambda: torch.randn(7, 2, 9, 9, dtype=torch.float64)),
    "exported": (Exported, lambda: torch.randn(7, 3, 4, dtype=torch.float64)),
}


@pytest.mark.parametrize("homes", [2, 3])
@pytest.mark.parametrize("name", MODELS)
def test_whatever_uses_weights_has_the_whole_ones_gradients(name: str, homes: int) -> None:
    torch.manual_seed(0)
    make, inputs = MODELS[name]
    x, y = inputs(), torch.randint(0, 5, (7,))
    order = [*home_tasks(3, 2, once=True)]
    check_equal(make().double(), (x,), y, Split("stages", homes), microbatches=3, order=order)


def test_a_model_without_such_layers_is_refused() -> None:
    class Scaling(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.one, self.two = nn.LayerNorm(4), nn.LayerNorm(4)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.two(torch.tanh(self.one(x)))  # type: ignore[no-any-return]  # of torch

    def graph(model: nn.Module) -> Any:
        return apply(Split("stages", 2), trace(model, (torch.zeros(2, 4),)), None, None)

    with pytest.raises(UsageError, match="--weight-gradients once: that is for fully connected layers"):
        check_once(graph(Scaling()))
    check_once(graph(mlp(4, 4, 4)))
    check_once(apply(Split("stages", 2), trace(Exported().double(), (torch.randn(3, 3, 4).double(),)), None, None))


def test_layers_of_others_and_what_is_not_to_go_back_are_computed_as_ever() -> None:
    own, other = nn.Linear(3, 3), nn.Linear(3, 3)
    gradients = WeightGradients(own.parameters())
    with gradients:
        other(own(torch.ones(2, 3))).sum().backward()
        with torch.no_grad():
            own(torch.ones(2, 3))
        with torch.autocast("cpu"):
            own(torch.ones(2, 3)).sum().backward()
        own(torch.ones(3)).sum().backward()
    assert all(one.grad is not None for one in other.parameters())
    before = [one.grad.clone() for one in own.parameters()]  # type: ignore[union-attr]  # of autocast, and of one sample
    assert gradients.make() == 2 * 3 * 4
    added = [one.grad - old for one, old in zip(own.parameters(), before, strict=True)]  # type: ignore[operator]
    expected = copy.deepcopy(own)
    expected.zero_grad()
    other(expected(torch.ones(2, 3))).sum().backward()
    for got, wanted in zip(added, expected.parameters(), strict=True):
        torch.testing.assert_close(got, wanted.grad)


@pytest.mark.parametrize("products", [1, 2, 3])
def test_gradients_are_made_where_those_of_the_last_step_were(products: int) -> None:
    """A weight that several products share has the sum of all, of this step alone; what it has from elsewhere, of a
    product that autograd makes, or from before, counts too, and lies where it was.
    """

    def loss(layer: nn.Linear, x: torch.Tensor) -> torch.Tensor:
        found = layer(x).square().sum()
        for bias in (None, layer.bias.detach())[: products - 1]:
            found = found + F.linear(x, layer.weight, bias).sum()
        return found

    layer, rooms = nn.Linear(3, 2), GradientRooms()
    homes = set()
    for begin in (0.0, 0.0, 5.0, 0.0):
        x = torch.randn(4, 3)
        layer.zero_grad()
        expected = copy.deepcopy(layer)
        loss(expected, x).backward()
        assert expected.weight.grad is not None
        if begin:
            layer.weight.grad = torch.full((2, 3), begin)
        gradients = WeightGradients(layer.parameters(), rooms)
        with gradients:
            given = loss(layer, x)
        given.backward()
        gradients.make()
        assert layer.weight.grad is not None
        torch.testing.assert_close(layer.weight.grad, expected.weight.grad + begin)
        torch.testing.assert_close(layer.bias.grad, expected.bias.grad)
        if not begin:
            homes.add(layer.weight.grad.data_ptr())
    assert (homes == {rooms[layer.weight].data_ptr()}) == (products < 3)


def test_a_minibatch_that_is_whole_may_have_them_at_its_end_too() -> None:
    """So that the home before goes back while they are made."""
    x, y = torch.randn(8, 784, dtype=torch.float64), torch.randint(0, 10, (8,))
    check_equal(mlp(784, 30, 10).double(), (x,), y, Split("stages", 2), order=[*home_tasks(1, 1, once=True)])


class Product(nn.Module):
    """A product whose bias, or weight, is of another form than a layer's."""

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None = None) -> None:
        super().__init__()
        self.weight, self.bias = nn.Parameter(weight), None if bias is None else nn.Parameter(bias)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.linear(x, self.weight, self.bias)


class Sparse(nn.Module):
    """A layer with the weight of an embedding, whose own gradients have the rows that were looked up."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.embedding = torch.arange(3), nn.Embedding(5, 4, sparse=True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.linear(x + self.embedding(self.words), self.embedding.weight)


@pytest.mark.parametrize(
    ("make", "dtype"),
    [
        pytest.param(lambda: Product(torch.randn(4)), torch.float32, id="a weight of one dimension"),
        pytest.param(lambda: Product(torch.randn(5, 4), torch.randn(1)), torch.float32, id="one bias for all"),
        pytest.param(lambda: nn.Linear(4, 5, dtype=torch.complex64), torch.complex64, id="complex"),
        pytest.param(
            lambda: nn.Sequential(nn.Linear(4, 5), nn.ReLU(inplace=True)), torch.float32, id="written into behind it"
        ),
        pytest.param(Sparse, torch.float32, id="sparse"),
    ],
)
@pytest.mark.parametrize("shape", [(3, 4), (2, 3, 4)])
def test_products_of_any_form_have_their_gradients(
    shape: tuple[int, ...], make: Callable[[], nn.Module], dtype: torch.dtype
) -> None:
    torch.manual_seed(0)
    model, x = make(), torch.randn(shape, dtype=dtype)
    whole, gradients = copy.deepcopy(model), WeightGradients(model.parameters())
    whole(x).abs().square().sum().backward()
    with gradients:
        given = model(x).abs().square().sum()
    given.backward()
    gradients.make()
    for own, wanted in zip(model.parameters(), whole.parameters(), strict=True):
        assert own.grad is not None
        assert wanted.grad is not None
        torch.testing.assert_close(own.grad.to_dense(), wanted.grad.to_dense())


def test_the_steps_of_a_partition_make_gradients_where_those_of_the_last_were() -> None:
    settings = How("stages", microbatches=2, weight_gradients="once").settings(8)
    data = TensorData(torch.randn(16, 6), torch.randint(0, 3, (16,)))
    task, model = Task(model=lambda: mlp(6, 5, 3), train=lambda: data), mlp(6, 5, 3)
    graph = split_graph(task, model, settings)
    homes = [partition(task, model, settings, role, False, graph)[1] for role in roles.replicas(settings.mesh)]

    def gradients(step: int) -> list[torch.Tensor]:
        play([home.play(Batch(0, step)) for home in homes])
        weights = [one for home in homes for one in home.parameters if one.dim() == 2]
        return [one.grad for one in weights if one.grad is not None]

    first = [(one.data_ptr(), one.clone()) for one in gradients(0)]
    second = gradients(1)
    assert [where for where, _ in first] == [one.data_ptr() for one in second]
    assert len(first) == 2
    assert not any(torch.equal(before, one) for (_, before), one in zip(first, second, strict=True))
