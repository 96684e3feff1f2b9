"""Models of many kinds: traced, split in stages and more, and equal to themselves."""

import pytest
import torch
import torch.nn.functional as F
from splitting import check_equal, play_split
from torch import nn

from distbelief.errors import UsageError
from distbelief.schedules.pipeline import PartitionTask, Pass
from distbelief.split.options import Split
from distbelief.split.tracing import trace

WORDS, WIDTH, LENGTH = 11, 8, 6


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH)
        self.out = nn.Linear(WIDTH, WIDTH)
        self.register_buffer("mask", torch.tril(torch.ones(LENGTH, LENGTH)).bool(), persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        n, t, c = x.shape
        q, k, v = self.qkv(x).view(n, t, 3, 2, c // 2).permute(2, 0, 3, 1, 4)
        scores = (q @ k.transpose(-2, -1)) / (c // 2) ** 0.5
        scores = scores.masked_fill(~self.mask[:t, :t], float("-inf")).softmax(-1)
        return self.out((scores @ v).transpose(1, 2).reshape(n, t, c))


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.before, self.after = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.attention = Attention()
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.attention(self.before(x))
        return x + self.down(F.gelu(self.up(self.after(x))))


class Transformer(nn.Module):
    """Skips, positions that are a parameter of the root, and an embedding that is also the last layer."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(WORDS, WIDTH)
        self.places = nn.Parameter(torch.randn(LENGTH, WIDTH))
        self.layers = nn.ModuleList([Layer() for _ in range(3)])
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, WORDS, bias=False)
        self.head.weight = self.words.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.words(x) + self.places[: x.size(1)]
        for layer in self.layers:
            h = layer(h)
        return self.head(self.norm(h)).flatten(0, 1)


def transformer() -> tuple[nn.Module, tuple, torch.Tensor]:
    x = torch.randint(0, WORDS, (4, LENGTH))
    return Transformer(), (x,), torch.randint(0, WORDS, (4 * LENGTH,))


@pytest.mark.parametrize("partitions", [2, 3, 4])
@pytest.mark.parametrize("ways", ["stages", "neurons", {"layers.*.up": "columns", "layers.*.down": "rows", "head": 1}])
def test_a_transformer_with_skips_and_tied_weights(ways, partitions):
    torch.manual_seed(0)
    model, inputs, targets = transformer()
    if ways != "stages" and partitions > 2:
        pytest.skip("one count of partitions for each way within layers")
    played = check_equal(model.double(), inputs, targets, Split(ways, partitions), traced_with=(inputs[0][:2],))
    owned = [name for program in played.programs for name in program.pieces]
    assert "words.weight" in owned
    assert "head.weight" not in owned


def test_tied_weights_cross_once_each_way():
    model, inputs, targets = transformer()
    played = play_split(model, inputs, targets, Split("stages", 3))
    tied = [one for one in played.gave if one.transfer.kind.value == "tensor"]
    assert [(one.direction, one.tensor.shape) for one in tied] == [
        (Pass.FORWARD, (WORDS, WIDTH)),
        (Pass.BACKWARD, (WORDS, WIDTH)),
    ]


class Dependent(nn.Module):
    """Its own submodule looks at values: that becomes a leaf."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.odd, self.last = nn.Linear(6, 6), Odd(), nn.Linear(6, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.first(x)
        return self.last(self.odd(h) + h)


class Odd(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(6, 6)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if x.sum() > 0:
            return self.layer(x)
        return x * self.layer.weight.sum()


class Counting(nn.Module):
    """Loops over steps, which torch.fx does not count."""

    def __init__(self) -> None:
        super().__init__()
        self.gru = nn.GRU(3, 4, batch_first=True)
        self.cell = nn.RNNCell(4, 4)
        self.last = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        steps = self.gru(x)[0]
        h = steps[:, 0]
        for step in range(1, x.size(1)):
            h = self.cell(steps[:, step], h)
        return self.last(F.relu(h))


class Steered(nn.Module):
    """Looks at sizes that are those of any samples, and goes through what a function gives of them."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(3, 3) for _ in range(7)])
        self.last = nn.Linear(3, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = x[:, 0] if x.dim() == 3 and x.shape[1] > 2 else x
        for part, layer in zip(x.unbind(1), self.layers, strict=True):
            h = torch.tanh(layer(part)) + h
        return self.last(h)


class Making(nn.Module):
    """Makes tensors of numbers, of which one is that of the samples."""

    def __init__(self) -> None:
        super().__init__()
        self.places, self.cell, self.last = nn.Embedding(9, 3), nn.RNNCell(3, 4), nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = torch.zeros(x.size(0), 4, dtype=x.dtype)
        steps = x + self.places(torch.arange(x.size(1), device=x.device))
        for step in range(steps.shape[1]):
            h = self.cell(steps[:, step], h)
        return self.last(h)


class Fixed(nn.Module):
    """Traces for one number of samples only."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = nn.Linear(6, 6), nn.Linear(6, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.two(self.one(x) + torch.ones(len(x), 6))


class Looking(nn.Module):
    """The root itself looks at values."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = nn.Linear(6, 6), nn.Linear(6, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.one(x)
        if h.sum() > 0:
            h = h.relu()
        return self.two(h)


@pytest.mark.parametrize(
    ("model", "shape"), [(Dependent, (6,)), (Counting, (7, 3)), (Steered, (7, 3)), (Making, (7, 3))]
)
def test_what_fx_alone_cannot_trace_is_a_leaf_or_steered_by_numbers_of_any_samples(model, shape):
    torch.manual_seed(0)
    made = model().double()
    x, y = torch.randn(5, *shape, dtype=torch.float64), torch.randint(0, 4, (5,))
    check_equal(made, (x,), y, Split("stages", 2), traced_with=(x[:3],))


def test_what_cannot_be_traced_names_the_line_and_the_remedy_and_modules_are_one(capfd):
    x, y = torch.randn(5, 6, dtype=torch.float64), torch.randint(0, 4, (5,))
    with pytest.raises(UsageError, match=r"Looking cannot be traced at .*test_split_models.py:\d+: if h.sum\(\) > 0"):
        trace(Looking(), (x.float(),))
    with pytest.raises(UsageError, match=r"Fixed cannot be traced at .*: return self.two\(self.one\(x\) \+ torch.ones"):
        trace(Fixed(), (x.float(),))
    assert capfd.readouterr() == ("", ""), "torch shows the graphs that it could not make"
    model = nn.Sequential(nn.Linear(6, 6), Looking()).double()
    traced = trace(model, (x,), modules=("0", "1"))
    assert [node.target for node in traced.layers] == ["0", "1"]
    with pytest.raises(UsageError, match="unknown module '2'"):
        trace(model, (x,), modules=("0", "2"))
    assert y is not None


class InPlace(nn.Module):
    """Everything in place that models write, on values that cross and that are used before and after."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(6, 6) for _ in range(4)])
        self.relu = nn.ReLU(inplace=True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.layers[0](x)
        self.relu(h)
        first = self.layers[1](h)
        first += h
        second = self.layers[2](first.mul_(2))
        second[:, 0] = first[:, 1]
        return F.relu(self.layers[3](second).add_(first), inplace=True)


@pytest.mark.parametrize("partitions", [2, 3, 4])
def test_what_is_written_in_place_is_not_written_to_what_was_received(partitions):
    torch.manual_seed(0)
    x, y = torch.randn(5, 6, dtype=torch.float64), torch.randint(0, 6, (5,))
    check_equal(InPlace().double(), (x,), y, Split("stages", partitions))


class Viewed(nn.Module):
    """Writes through a view to what is used after it."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = nn.Linear(6, 6), nn.Linear(6, 6)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.one(x)
        part = h[:, :3]
        part.mul_(2)
        return self.two(h)


def test_a_write_through_a_view_to_what_is_used_after_it_is_refused():
    with pytest.raises(
        UsageError, match=r"writes in place to a tensor whose view .* is used later: write it out of place"
    ):
        trace(Viewed().double(), (torch.randn(5, 6, dtype=torch.float64),))


class Many(nn.Module):
    """Several inputs and outputs, in dicts and tuples, one of them not used, and a state of whole numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two, self.three = nn.Linear(4, 6), nn.Linear(3, 6), nn.Linear(6, 2)

    def forward(self, batch: dict) -> dict:
        h = self.one(batch["x"])
        order = h.argsort(1)
        low, high = torch.tanh(h).gather(1, order).chunk(2, 1)
        k = self.two(batch["y"] + high) + torch.cat([low, high], 1)
        return {"scores": self.three(k), "hidden": (h, k.sum(1))}


@pytest.mark.parametrize("partitions", [2, 3])
def test_several_inputs_and_outputs(partitions):
    def loss(output: dict, targets: tuple) -> torch.Tensor:
        hidden, total = output["hidden"]
        return F.cross_entropy(output["scores"], targets[0]) + hidden.pow(2).mean() + (total - targets[1]).abs().mean()

    torch.manual_seed(0)
    batch = {"x": torch.randn(5, 4), "y": torch.randn(5, 3), "z": torch.zeros(5)}
    batch = {name: one.double() for name, one in batch.items()}
    targets = (torch.randint(0, 2, (5,)), torch.randn(5, dtype=torch.float64))
    for microbatches in (1, 2):
        check_equal(Many().double(), (batch,), targets, Split("stages", partitions), loss, microbatches=microbatches)


def norms() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Linear(6, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 8), nn.BatchNorm1d(8, momentum=None)
    ).double()


def test_batch_norm_in_microbatches_is_a_plain_loop_over_them():
    x, y = torch.randn(7, 6, dtype=torch.float64), torch.randint(0, 8, (7,))
    model, whole = norms(), norms()
    start = {name: one.clone() for name, one in whole.named_buffers()}
    for part, targets in zip(x.tensor_split(3), y.tensor_split(3), strict=True):
        (F.cross_entropy(whole(part), targets) * len(part) / 7).backward()
    played = play_split(model, (x,), y, Split("stages", 2), microbatches=3)
    gradients = played.gradients()
    for name, parameter in whole.named_parameters():
        assert (gradients[name] - parameter.grad).abs().max() < 1e-12
    got, kept = played.buffers(), start["1.running_mean"]
    means = [norms()[0](part).mean(0).detach() for part in x.tensor_split(3)]
    for mean, share in zip(means, (3 / 7, 2 / 7, 2 / 7), strict=True):
        kept = kept * 0.9**share + mean * (1 - 0.9**share)
    torch.testing.assert_close(got["1.running_mean"], kept, atol=1e-12, rtol=0)
    assert int(got["1.num_batches_tracked"]) == int(got["4.num_batches_tracked"]) == 1


def test_one_microbatch_leaves_batch_norm_as_it_is():
    x, y = torch.randn(7, 6, dtype=torch.float64), torch.randint(0, 8, (7,))
    model, whole = norms(), norms()
    F.cross_entropy(whole(x), y).backward()
    got = check_equal(model, (x,), y, Split("stages", 2)).buffers()
    for name, buffer in whole.named_buffers():
        torch.testing.assert_close(got[name], buffer, atol=1e-12, rtol=0)


ONE_F_ONE_B = [(Pass.FORWARD, 0), (Pass.FORWARD, 1), (Pass.BACKWARD, 0), (Pass.FORWARD, 2), (Pass.BACKWARD, 1),
               (Pass.BACKWARD, 2)]  # fmt: skip


def test_any_order_of_tasks_gives_the_same_gradients():
    torch.manual_seed(0)
    model, inputs, targets = transformer()
    x = inputs[0]
    order = [PartitionTask(*one) for one in ONE_F_ONE_B]
    targets = targets.view(4, LENGTH)

    def loss(output: torch.Tensor, wanted: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(output, wanted.flatten())

    check_equal(model.double(), (x,), targets, Split("stages", 3), loss, microbatches=3, order=order)


class Numbers(nn.Module):
    """A submodule that nothing traces gives a number beside its tensor; what is done with it is the caller's."""

    def __init__(self, given, used) -> None:
        super().__init__()
        self.first, self.second = Beside(given), nn.Linear(6, 4)
        self.used = used

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h, number = self.first(x)
        return self.second(h * number) if self.used == "there" else self.second(h) * number


class Beside(nn.Module):
    def __init__(self, given) -> None:
        super().__init__()
        self.layer, self.given = nn.Linear(6, 6), given

    def forward(self, x: torch.Tensor) -> tuple:
        h = self.layer(x)
        if x.sum() > 1e9:
            h = -h
        return h, self.given(h)


class Counts(nn.Module):
    """Computes with a number that is no tensor."""

    def __init__(self, number) -> None:
        super().__init__()
        self.first, self.second, self.number = nn.Linear(6, 6), nn.Linear(6, 4), number

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.first(x)
        return self.second(h) * self.number(h)


@pytest.mark.parametrize(
    "given", [lambda h: float(h.detach().mean()), lambda h: int((h > 0).sum())], ids=["float", "int"]
)
def test_a_number_beside_tensors_is_computed_where_it_is_used_and_never_that_of_the_example(given):
    torch.manual_seed(0)
    x, y = torch.randn(5, 6, dtype=torch.float64), torch.randint(0, 4, (5,))
    for split in (Split("stages", 2), Split({"second": "columns"}, 2)):
        check_equal(Numbers(given, "there").double(), (x,), y, split, traced_with=(x[3:],))
    check_equal(Numbers(given, "elsewhere").double(), (x,), y, Split("columns", 2), traced_with=(x[3:],))


class Item(nn.Module):
    def __init__(self, number) -> None:
        super().__init__()
        self.layer, self.number = nn.Linear(6, 6), number

    def forward(self, x: torch.Tensor) -> tuple:
        h = self.layer(x)
        return h, self.number(h)


@pytest.mark.parametrize(
    ("first", "told"),
    [
        (
            Beside(lambda h: float(h.detach().mean())),
            "first: getitem_1 is no tensor and is needed at partitions 0 and 1, b",
        ),
        (Item(lambda h: h.detach().sum().item()), "first: item is no tensor .*: make it a tensor, compute it where it"),
        (
            Item(lambda h: h.detach()[0].tolist()[1]),
            r"first: getitem_1 is no tensor .* one partition \(--split PATTERN=0\)",
        ),
    ],
)
def test_what_is_no_tensor_does_not_cross_and_is_refused_by_name_with_the_remedy(first, told):
    torch.manual_seed(0)
    x, y = torch.randn(5, 6, dtype=torch.float64), torch.randint(0, 4, (5,))
    model = Numbers(None, "elsewhere")
    model.first = first
    with pytest.raises(UsageError, match=told):
        play_split(model.double(), (x,), y, Split("stages", 2))
    check_equal(model, (x,), y, Split("columns", 2), traced_with=(x[3:],))


@pytest.mark.parametrize(
    "number",
    [
        lambda h: 1.0 / h.shape[0], lambda h: h.shape[0] / 7, lambda h: h.size(0) ** 0.5, lambda h: h.numel(),
        lambda h: h.size(0) // 2, lambda h: h.size(0) ** 2, lambda h: h.size(0) * h.shape[0], lambda h: h.size(0) % 3,
        lambda h: (2 * h.size(0) + 1) * 3 - 2, lambda h: h.size(0) // 2 + 1, lambda h: h.size(0) * 0.5,
    ],
)  # fmt: skip
def test_a_number_of_samples_is_that_of_each_call(number):
    """Traced with two."""
    torch.manual_seed(0)
    x, y = torch.randn(5, 6, dtype=torch.float64), torch.randint(0, 4, (5,))
    for way in ("stages", "columns"):
        check_equal(Counts(number).double(), (x,), y, Split(way, 2), traced_with=(x[:2],))


@pytest.mark.parametrize("number", [len, lambda h: sum(range(h.size(0) // 4)), lambda h: 2 if h.shape[0] > 1 else 3])
def test_a_number_of_samples_that_steers_a_model_is_refused(number):
    """Traced with two: both numbers are those of every example of two and of three samples, and of no other."""
    with pytest.raises(UsageError, match=r"Counts cannot be traced at .*test_split_models.py:\d+: "):
        trace(Counts(number).double(), (torch.randn(2, 6, dtype=torch.float64),))
