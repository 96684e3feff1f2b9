"""Layers divided over partitions: equal to the whole model, and exactly the bytes of the way cross."""

import zlib
from collections import OrderedDict
from itertools import pairwise

import pytest
import torch
import torch.nn.functional as F
from splitting import check_equal, play_split
from torch import nn

import distbelief as db
from distbelief.errors import UsageError
from distbelief.split.graph import SplitGraph
from distbelief.split.layers import Divided, edges, mixed
from distbelief.split.options import Split
from distbelief.split.plan import apply
from distbelief.split.play import Pass, cut_minibatch
from distbelief.split.tracing import trace
from distbelief.zoo.convnets import alexnet
from distbelief.zoo.mnist import LocallyConnected


def named(**layers: nn.Module) -> nn.Module:
    return nn.Sequential(OrderedDict(layers))


def mlp(first: int = 300, second: int = 100) -> nn.Module:
    return named(
        fc1=nn.Linear(784, first), r1=nn.ReLU(), fc2=nn.Linear(first, second), r2=nn.ReLU(), fc3=nn.Linear(second, 10)
    )


def lenet() -> nn.Module:
    convs = {"conv1": nn.Conv2d(1, 20, 5), "p1": nn.MaxPool2d(2), "conv2": nn.Conv2d(20, 50, 5), "p2": nn.MaxPool2d(2)}
    return named(**convs, flat=nn.Flatten(), fc1=nn.Linear(800, 500), r1=nn.ReLU(), fc2=nn.Linear(500, 10))


class Small(nn.Module):
    """Two groups, batch norm, skips over cut values, functions instead of modules, and sizes that are computed."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(3, 8, 3, padding=1)
        self.norm = nn.BatchNorm2d(8)
        self.conv2 = nn.Conv2d(8, 12, 3, padding="same", groups=2)
        self.conv3 = nn.Conv2d(12, 8, 1, bias=False)
        self.fc1 = nn.Linear(8 * 4 * 4, 20)
        self.fc2 = nn.Linear(20, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = first = F.relu(self.norm(self.conv1(x)))
        h = torch.relu_(self.conv2(h))
        h = self.conv3(h) + first * 0.5
        h += 1
        h = F.avg_pool2d(h, 2)
        return self.fc2(torch.tanh(self.fc1(h.view(h.size(0), -1))))


WAYS = {
    "neurons": "neurons", "columns": "columns", "groups": "groups", "filters": {"conv*": "filters"},
    "both": {"conv*": "filters", "fc*": "neurons"}, "placed": {"conv*": "groups", "fc*": 1},
    "rows": {"fc*": "rows"},
}  # fmt: skip


@pytest.mark.parametrize("partitions", [2, 3, 4])
@pytest.mark.parametrize("way", WAYS)
def test_a_divided_model_is_the_whole_one(way, partitions):
    if way in ("groups", "filters", "both", "placed") and partitions == 3:
        pytest.skip("two groups are not shared out among three")
    torch.manual_seed(0)
    x, y = torch.randn(5, 3, 8, 8, dtype=torch.float64), torch.randint(0, 10, (5,))
    played = check_equal(Small().double(), (x,), y, Split(WAYS[way], partitions), traced_with=(x[:2],))
    whole = Small().double()
    assert set(whole.state_dict()) == {name for p in played.programs for name in p.module.state_dict()}


@pytest.mark.parametrize("partitions", [2, 3, 4])
@pytest.mark.parametrize("ways", ["columns", "neurons", {"conv*": "filters", "fc*": "columns"}])
def test_lenet_divided_is_the_whole_one(ways, partitions):
    torch.manual_seed(0)
    x, y = torch.randn(3, 1, 28, 28, dtype=torch.float64), torch.randint(0, 10, (3,))
    check_equal(lenet().double(), (x,), y, Split(ways, partitions))


COUNTS = [
    (mlp, (784,), "columns", 5, 103_680),
    (mlp, (784,), "neurons", 1, 25_600),
    (lambda: mlp(2048, 2048), (784,), "columns", 5, 1_049_856),
    (lambda: mlp(2048, 2048), (784,), "neurons", 1, 524_288),
    (lenet, (1, 28, 28), {"conv*": "filters", "fc*": "columns"}, 7, 1_071_360),
]


@pytest.mark.parametrize(("model", "shape", "ways", "messages", "size"), COUNTS)
def test_what_crosses_is_what_was_counted_by_hand(model, shape, ways, messages, size):
    played = play_split(model(), (torch.randn(64, *shape),), torch.zeros(64, dtype=torch.int64), Split(ways, 2))
    assert [len(played.messages(partition)) for partition in (0, 1)] == [messages, messages]
    assert [played.bytes(partition) for partition in (0, 1)] == [size, size]


def test_dropout_on_parts_and_on_the_whole_draws_the_same():
    torch.manual_seed(0)
    model = named(fc1=nn.Linear(6, 8), drop=nn.Dropout(0.5), fc2=nn.Linear(8, 4), last=nn.Dropout(0.2)).double()
    x, y = torch.randn(5, 6, dtype=torch.float64), torch.randint(0, 4, (5,))
    found = [
        play_split(model, (x,), y, Split(ways, 2), chance=chance)
        for chance in (3, 4)
        for ways in ("stages", "columns", "neurons", {"fc1": "columns", "fc2": 1})
    ]
    for some in (found[:4], found[4:]):
        for one in some[1:]:
            torch.testing.assert_close(one.outputs, some[0].outputs, rtol=0, atol=1e-12)
            assert one.loss == pytest.approx(some[0].loss, abs=1e-12)
    assert abs(found[0].loss - found[4].loss) > 1e-6


def test_dropout_is_that_of_a_model_seeded_by_hand_before_each():
    torch.manual_seed(0)
    model = named(fc1=nn.Linear(6, 8), drop=nn.Dropout(0.5), fc2=nn.Linear(8, 4)).double()
    x, y = torch.randn(5, 6, dtype=torch.float64), torch.randint(0, 4, (5,))
    key = cut_minibatch((x,), y, 1, chance=7)[0].supplied["chance"]
    model.drop.register_forward_pre_hook(lambda *_: torch.manual_seed(mixed(key, zlib.crc32(b"drop"))) and None)
    expected = model(x)
    model.drop._forward_pre_hooks.clear()
    played = play_split(model, (x,), y, Split("neurons", 2), chance=7)
    torch.testing.assert_close(played.outputs[0], expected.detach(), rtol=0, atol=1e-12)


REFUSED = [
    ("columns", 11, "--partitions 11: fc3 has 10 neurons; split it over at most 10"),
    ("filters", 2, "nothing of fc1, fc2, fc3 can be split by filters .* can be split by columns, groups, rows, stages"),
    ({"conv*": "filters"}, 2, "no name fits 'conv.*fc1, fc2, fc3"),
    ({"fd1": "rows"}, 2, "did you mean 'fc1'"),
    ({"fc*": 0}, 2, "partition 1 of 2 has no parameter to train"),
]


@pytest.mark.parametrize(("ways", "partitions", "told"), REFUSED)
def test_a_split_that_cannot_be_is_refused_with_what_can(ways, partitions, told):
    with pytest.raises(UsageError, match=told):
        play_split(mlp(), (torch.zeros(2, 784),), torch.zeros(2, dtype=torch.int64), Split(ways, partitions))


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("conv*=filtrs", "did you mean 'filters'"),
        ("conv*=", "is not PATTERN=WAY"),
        ("a=1,a=0", "a is listed twice"),
        ("a=2", "partition 2: with 2 partitions, partitions are 0 to 1"),
        ("neuron", "did you mean 'neurons'"),
    ],
)
def test_a_text_that_is_no_split_is_refused(text, told):
    with pytest.raises(UsageError, match=told):
        Split.parse(text, 2)


def test_groups_send_whole_inputs_only_where_a_layer_sees_all():
    torch.manual_seed(0)
    model = Small()
    played = play_split(model, (torch.randn(4, 3, 8, 8),), torch.zeros(4, dtype=torch.int64), Split("groups", 2))
    # all of conv2 before conv3, of conv3 before fc1, of fc1 before fc2; then logits
    assert played.floats(1, Pass.FORWARD, 4) == [6 * 64, 4 * 16, 10, 5]


def test_every_process_makes_the_same_plan_also_without_values():
    model, meta = Small(), Small().to("meta")
    x, y = torch.zeros(3, 3, 8, 8), torch.zeros(3, dtype=torch.int64)
    one = apply(Split("groups", 2), trace(model, (x,)), F.cross_entropy, y)
    other = apply(Split("groups", 2), trace(meta, (x.to("meta"),)), F.cross_entropy, y)
    assert list(one.transfers.values()) == list(other.transfers.values())
    assert one.pieces == other.pieces
    assert [str(node) for node in one.nodes] == [str(node) for node in other.nodes]


class Scaled(nn.Module):
    """A user's layer: each feature times a number of its own."""

    def __init__(self, features: int) -> None:
        super().__init__()
        self.factor = nn.Parameter(torch.randn(features))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.factor


Scaled.__module__ = "torch.nn.mine"  # a leaf of the tracer, as a layer that is a custom operation is


def test_a_users_layer_is_divided_as_it_is_registered():
    def features(call: db.split.LayerCall) -> Divided:
        return call.sections(1, lambda start, stop: (1, start, stop), {"factor": 0}, lambda *_: {})

    model = named(fc1=nn.Linear(6, 8), scaled=Scaled(8), fc2=nn.Linear(8, 4)).double()
    x, y = torch.randn(5, 6, dtype=torch.float64), torch.randint(0, 4, (5,))
    with pytest.raises(UsageError, match="unknown way to split 'features'"):
        Split({"scaled": "features"}, 2)
    db.split.register(Scaled, "features", features)
    played = check_equal(model, (x,), y, Split({"fc1": "columns", "scaled": "features", "fc2": "rows"}, 2))
    assert played.floats(1, Pass.FORWARD, 5) == [4]
    with pytest.raises(UsageError, match="stages places whole layers"):
        db.split.register(Scaled, "stages", features)
    with pytest.raises(UsageError, match="--partitions 9: scaled has 8 indices in dimension 1 of its output"):
        check_equal(model, (x,), y, Split({"scaled": "features"}, 9))


@pytest.mark.parametrize("partitions", [2, 3, 4])
def test_a_locally_connected_layer_is_divided_by_the_rule_that_its_class_brings(partitions):
    torch.manual_seed(0)
    model = named(local=LocallyConnected(2, 3, (16, 14), 5, 2), relu=nn.ReLU(), pool=nn.MaxPool2d(2, 1),
        flatten=nn.Flatten(), fc=nn.Linear(3 * 5 * 4, 7)).double()  # fmt: skip
    x, y = torch.randn(4, 2, 16, 14, dtype=torch.float64), torch.randint(0, 7, (4,))
    played = check_equal(model, (x,), y, Split({"local": "regions", "fc": "neurons"}, partitions))
    # every partition has the filters of its rows, and none of the others
    rows = [program.pieces["local.weight"] for program in played.programs]
    assert [(one.start, one.stop) for one in rows] == list(pairwise(edges(6, partitions)))


def alexnet_split(ways, partitions) -> tuple[nn.Module, SplitGraph]:
    with torch.device("meta"):
        model, x, y = alexnet().model(), torch.empty(2, 3, 224, 224), torch.zeros(2, dtype=torch.int64)
    return model, apply(Split(ways, partitions), trace(model, (x,)), F.cross_entropy, y)


def test_alexnet_in_its_two_columns_sends_what_the_two_gpus_sent():
    _, graph = alexnet_split("groups", 2)
    sent = [
        [one.shape.elements(1) for one in graph.transfers.values() if one.source == partition] for partition in (0, 1)
    ]
    assert sent == [[21_632, 4_608, 2_048, 2_048], [21_632, 4_608, 2_048, 2_048, 500]]


@pytest.mark.parametrize(
    ("ways", "partitions", "most"), [("groups", 2, 0.52), ({"conv*": "groups", "fc*": "neurons"}, 4, 0.28)]
)
def test_the_largest_partition_of_alexnet_has_its_share_of_the_parameters(ways, partitions, most):
    model, graph = alexnet_split(ways, partitions)
    whole, held = dict(model.named_parameters()), [0] * partitions
    for name, pieces in graph.pieces.items():
        for piece in pieces:
            held[piece.partition] += (
                whole[name].numel() // whole[name].shape[piece.dimension] * (piece.stop - piece.start)
            )
    assert sum(held) == sum(one.numel() for one in whole.values())
    assert max(held) / sum(held) <= most
