"""Branches, regions and time: equal to the whole model, and only what must cross does."""

from itertools import pairwise

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from splitting import check_equal, play_split
from torch import nn

from distbelief.errors import UsageError
from distbelief.split.options import Split
from distbelief.split.play import Pass
from distbelief.split.ways.time import chunk_edges


class Inception(nn.Module):
    """Two modules of four paths each, one with a fork inside, and a pool between."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(1, 6, 3)
        self.blocks = nn.ModuleList([Block(6), Block(16)])
        self.head = nn.Linear(16, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = F.relu(self.stem(x))
        for block in self.blocks:
            h = F.max_pool2d(block(h), 2)
        return self.head(h.mean((2, 3)))


class Block(nn.Module):
    def __init__(self, channels: int) -> None:
        super().__init__()
        self.one = nn.Conv2d(channels, 4, 1)
        self.three = nn.Sequential(nn.Conv2d(channels, 3, 1), nn.ReLU(inplace=True), nn.Conv2d(3, 4, 3, padding=1))
        self.five = nn.Sequential(nn.Conv2d(channels, 2, 1), nn.ReLU(), nn.Conv2d(2, 4, 5, padding=2))
        self.pooled = nn.Conv2d(channels, 4, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        one = self.one(x)
        aside = torch.sigmoid(one) + one
        return torch.cat([aside, self.three(x), self.five(x), self.pooled(F.max_pool2d(x, 3, 1, 1))], 1)


class Siamese(nn.Module):
    """Two calls of one tower."""

    def __init__(self) -> None:
        super().__init__()
        self.tower = nn.Sequential(nn.Linear(12, 8), nn.Tanh(), nn.Linear(8, 4))

    def forward(self, pair: tuple[torch.Tensor, torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
        one, other = pair
        return self.tower(one), self.tower(other)


class Towers(Siamese):
    """The same with a head of its own on one side, so that both partitions have something to train."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(4, 4)

    def forward(self, pair: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
        one, other = super().forward(pair)
        return (one - self.head(other)).pow(2).sum(1)


@pytest.mark.parametrize("partitions", [2, 3, 4])
def test_branches_are_the_whole_model(partitions):
    torch.manual_seed(0)
    x, y = torch.randn(3, 1, 14, 14, dtype=torch.float64), torch.randint(0, 10, (3,))
    played = check_equal(Inception().double(), (x,), y, Split("branches", partitions))
    assert all(list(program.module.parameters()) for program in played.programs)


def test_towers_share_out_their_weights_each_of_which_has_one_owner_and_a_message_each_way():
    torch.manual_seed(0)
    pair = torch.randn(5, 12, dtype=torch.float64), torch.randn(5, 12, dtype=torch.float64)
    model, targets = Towers().double(), torch.rand(5, dtype=torch.float64)
    played = check_equal(model, (pair,), targets, Split("branches", 2), loss=F.mse_loss)
    tensors = [one for one in played.gave if one.transfer.kind.value == "tensor"]
    assert sorted(one.direction.value for one in tensors) == ["backward"] * 4 + ["forward"] * 4
    holders = [name for program in played.programs for name in program.pieces]
    assert sorted(holders) == sorted(name for name, _ in model.named_parameters())
    assert all(any(name.startswith("tower") for name in program.pieces) for program in played.programs)


def test_more_partitions_than_branches_are_refused():
    x = torch.zeros(2, 1, 14, 14)
    with pytest.raises(UsageError, match="--partitions 5: the widest fork has 4 branches"):
        play_split(Inception(), (x,), torch.zeros(2, dtype=torch.int64), Split("branches", 5))


class Images(nn.Module):
    """Convolutions of many shapes on one another, a skip over cut rows, pooling, and a dense layer."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(1, 4, 5, padding=2)
        self.conv2 = nn.Conv2d(4, 4, 3, padding="same", dilation=2)
        self.pool = nn.MaxPool2d(3, 2, padding=1)
        self.conv3 = nn.Conv2d(4, 6, 7, stride=2, padding=3, groups=2, bias=False)
        self.mean = nn.AvgPool2d(2)
        self.fc = nn.Linear(6 * 5 * 5, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = F.relu(self.conv1(x))
        h = self.pool(torch.tanh(self.conv2(h)) + h)
        return self.fc(torch.flatten(self.mean(self.conv3(h)), 1))


@pytest.mark.parametrize("partitions", [2, 3, 4])
def test_regions_are_the_whole_model(partitions):
    torch.manual_seed(0)
    x, y = torch.randn(3, 1, 40, 33, dtype=torch.float64), torch.randint(0, 10, (3,))
    model = Images().double()
    model.fc = nn.Linear(6 * 5 * 4, 10).double()
    check_equal(model, (x,), y, Split({"conv*": "regions", "fc": partitions - 1}, partitions), traced_with=(x[:1],))


@pytest.mark.parametrize("partitions", [2, 3, 4])
@pytest.mark.parametrize(("kernel", "stride", "rows"), [(3, 1, 2), (5, 1, 4), (7, 2, 5), (11, 4, 7)])
def test_the_halo_of_a_convolution_is_what_was_counted(kernel, stride, rows, partitions):
    """The rows that cross a cut, where the input lies in equal parts and regions follow what is given."""
    size = stride * 12 * partitions
    before = [nn.Conv2d(1 if number == 0 else 2, 2, 1) for number in range(partitions - 1)]
    last = nn.Conv2d(2, 3, kernel, stride, padding=(kernel - stride + 1) // 2)
    model = nn.Sequential(*before, last).double()
    x = torch.randn(2, 1, size, 9, dtype=torch.float64)
    targets = torch.zeros_like(model(x))
    played = check_equal(model, (x,), targets, Split("regions", partitions), loss=F.mse_loss)
    halos = [
        one.tensor.numel() // (2 * 2 * 9)
        for one in played.gave
        if one.transfer.kind.value == "halo" and one.direction is Pass.FORWARD
    ]
    assert sum(halos) == rows * (partitions - 1)


class Recurrent(nn.Module):
    def __init__(self, kind: type[nn.RNNBase], layers: int, batch_first: bool, state: bool = False) -> None:
        super().__init__()
        self.rnn = kind(5, 6, layers, batch_first=batch_first)
        self.head = nn.Linear(6, 10)
        self.batch_first, self.state = batch_first, state

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x if self.batch_first else x.transpose(0, 1)
        if not self.state:
            output, _ = self.rnn(x)
            return self.head(output[:, -1] if self.batch_first else output[-1])
        begin = torch.zeros(self.rnn.num_layers, x.size(0 if self.batch_first else 1), 6, dtype=x.dtype)
        _, last = self.rnn(x, begin)
        return self.head(last.sum(0))


@pytest.mark.parametrize(
    ("kind", "partitions", "batch_first"),
    [(nn.GRU, 2, True), (nn.GRU, 3, False), (nn.LSTM, 2, False), (nn.LSTM, 3, True), (nn.RNN, 2, True)],
)
def test_time_is_the_whole_model(kind, partitions, batch_first):
    torch.manual_seed(0)
    x, y = torch.randn(4, 11, 5, dtype=torch.float64), torch.randint(0, 10, (4,))
    model = Recurrent(kind, 3, batch_first).double()
    played = check_equal(model, (x,), y, Split("time", partitions, chunks=4), traced_with=(x[:2],))
    forward = [one.transfer for one in played.gave if one.direction is Pass.FORWARD]
    assert len(forward) == 4 * (partitions - 1)  # each chunk goes up once, and no state crosses
    assert all(one.target == one.source + 1 for one in forward)


class Two(nn.Module):
    """Two stacks of a layer each, the second on what the first gives."""

    def __init__(self) -> None:
        super().__init__()
        self.gru1, self.gru2 = nn.GRU(5, 6, batch_first=True), nn.GRU(6, 7, batch_first=True)
        self.head = nn.Linear(7, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.gru2(self.gru1(x)[0])[0][:, -1])


def test_stacks_that_follow_each_other_pass_on_their_chunks():
    torch.manual_seed(0)
    x, y = torch.randn(4, 11, 5, dtype=torch.float64), torch.randint(0, 10, (4,))
    played = check_equal(Two().double(), (x,), y, Split("time", 2, chunks=4))
    assert played.floats(0, Pass.FORWARD, 4) == [12, 18, 18, 18]


def test_a_state_that_is_given_and_one_that_is_used():
    torch.manual_seed(0)
    x, y = torch.randn(4, 11, 5, dtype=torch.float64), torch.randint(0, 10, (4,))
    check_equal(Recurrent(nn.GRU, 2, True, state=True).double(), (x,), y, Split("time", 2))


def test_while_one_layer_computes_a_chunk_the_one_below_computes_the_next():
    x, y = torch.zeros(4, 8, 5), torch.zeros(4, dtype=torch.int64)
    played = play_split(Recurrent(nn.GRU, 2, True), (x,), y, Split("time", 2, chunks=4))
    first, second = played.programs
    assert [len(segment.gives[0].transfers) for segment in first.segments] == [1, 1, 1, 1]
    assert len(second.segments) >= 4


@given(st.integers(1, 500), st.integers(1, 500), st.sampled_from([1e-3, 0.3, 0.9, 1.0, 1.1, 2.0, 253.0]))
def test_every_chunk_has_a_step_and_all_steps_are_in_one(chunks: int, more: int, growth: float) -> None:
    steps = chunks + more - 1
    cut = chunk_edges(steps, chunks, growth)
    assert (cut[0], cut[-1], len(cut)) == (0, steps, chunks + 1)
    assert all(start < stop for start, stop in pairwise(cut))


@pytest.mark.parametrize(("takes", "partitions", "rises"), [(5, 2, 1), (500, 2, -1), (6, 3, 0)])
@pytest.mark.long
def test_chunks_grow_where_the_layers_above_work_longer(takes: int, partitions: int, rises: int) -> None:
    torch.manual_seed(0)
    stack = Recurrent(nn.GRU, partitions, True)
    stack.rnn = nn.GRU(takes, 60 if rises else 6, partitions, batch_first=True)
    stack.head = nn.Linear(stack.rnn.hidden_size, 10)
    x, y = torch.randn(2, 28, takes), torch.zeros(2, dtype=torch.int64)
    played = play_split(stack, (x,), y, Split("time", partitions, chunks=7))
    lengths = [size // stack.rnn.hidden_size for size in played.floats(0, Pass.FORWARD, 2)]
    assert sum(lengths) == 28
    assert (lengths[-1] > lengths[0]) - (lengths[-1] < lengths[0]) == rises


REFUSED = [
    (Recurrent(nn.GRU, 2, True), (4, 8, 5), Split("time", 3), "--partitions 3: rnn and later stacks have 2 layers"),
    (Recurrent(nn.GRU, 2, True), (4, 8, 5), Split("time", 2, chunks=9), "a sequence of rnn has 8 steps"),
    (nn.Sequential(nn.Linear(5, 5)), (4, 5), Split("time", 2), "there is no nn.GRU, nn.LSTM or nn.RNN"),
    (Images(), (2, 1, 40, 40), Split({"conv*": "regions", "fc": 1}, 11), "conv3 has 10 rows; split it over at most 10"),
]


@pytest.mark.parametrize(("model", "shape", "split", "told"), REFUSED)
def test_a_split_that_cannot_be_is_refused(model, shape, split, told):
    with pytest.raises(UsageError, match=told):
        play_split(model, (torch.zeros(shape),), torch.zeros(shape[0], dtype=torch.int64), split)


def test_chunks_are_of_a_split_by_time():
    with pytest.raises(UsageError, match="--chunks 3: is for a split by time, and stages is none"):
        Split("stages", 2, chunks=3)


class Dense(nn.Module):
    """Convolutions with dropout, then fully connected layers with dropout."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1, self.conv2 = nn.Conv2d(1, 3, 3), nn.Conv2d(3, 4, 3, stride=2)
        self.dropped, self.forgotten = nn.Dropout(0.3), nn.Dropout(0.5)
        self.fc1, self.fc2, self.fc3 = nn.Linear(36, 12), nn.Linear(12, 10), nn.Linear(10, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = F.relu(self.conv2(self.dropped(F.relu(self.conv1(x)))))
        h = self.forgotten(F.relu(self.fc1(h.view(x.shape[0], -1))))
        return self.fc3(torch.tanh(self.fc2(h)))


def images(samples: int) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.randn(samples, 1, 9, 9, dtype=torch.float64), torch.randint(0, 5, (samples,))


@pytest.mark.parametrize("partitions", [2, 3, 4])
@pytest.mark.parametrize("samples", [1, 2, 5, 8])
def test_samples_are_the_whole_model_also_where_a_partition_has_none(samples, partitions):
    torch.manual_seed(0)
    x, y = images(samples)
    check_equal(Dense().double().eval(), (x,), y, Split("samples", partitions), traced_with=images(2)[:1])


@pytest.mark.parametrize("microbatches", [1, 2])
def test_samples_drop_what_a_model_in_stages_drops(microbatches):
    torch.manual_seed(0)
    model, (x, y) = Dense().double(), images(7)
    one, other = (
        play_split(model, (x,), y, Split(way, 2), microbatches=microbatches, chance=11) for way in ("stages", "samples")
    )
    assert one.loss == pytest.approx(other.loss, abs=1e-12)
    for name, gradient in one.gradients().items():
        assert (other.gradients()[name] - gradient).abs().max() <= 1e-12, name
    again = play_split(model, (x,), y, Split("samples", 2), microbatches=microbatches, chance=12)
    assert again.loss != pytest.approx(other.loss, abs=1e-3)


@pytest.mark.parametrize("partitions", [2, 3])
def test_of_samples_the_convolutions_weights_cross_and_each_part_of_what_they_give(partitions):
    """And then what fully connected layers by neurons need: counted by hand."""
    samples = 4 * partitions + 1
    x, y = images(samples)
    split = Split({"conv*": "samples", "fc1": "columns", "fc2": "rows", "fc3": 0}, partitions)
    played = play_split(Dense().double().eval(), (x,), y, split)
    forward = [one for one in played.gave if one.direction is Pass.FORWARD]
    back = [one for one in played.gave if one.direction is Pass.BACKWARD]
    weights = 3 * 9 + 3 + 4 * 3 * 9 + 4
    given, sums = 36 * samples * (partitions - 1), 10 * samples * (partitions - 1)
    assert sum(one.tensor.numel() for one in forward) == weights * (partitions - 1) + given + sums
    assert sum(one.tensor.numel() for one in back) == sum(one.tensor.numel() for one in forward)
    assert {one.transfer.kind.value for one in forward} == {"tensor", "send", "sum"}
    sent = [one.tensor.numel() for one in forward if one.transfer.kind.value == "send"]
    assert sorted(sent) == sorted([36 * (4 + (partition == 0)) for partition in range(partitions)] * (partitions - 1))


class Means(Dense):
    """One that looks at all samples together."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x - self.conv1(x).mean())


class Alike(Dense):
    """One that compares all samples with each other."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = super().forward(x)
        return (h @ h.t()) @ h


class Normed(Dense):
    """One whose batch norm is a function."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(F.batch_norm(self.conv1(x)[:, :1, :1, :1] + x, None, None, training=self.training))


class Thrown(Dense):
    """One whose dropout is a function."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(F.dropout(self.conv1(x)[:, :1, :1, :1] + x, 0.5, self.training))


class Counted(Dense):
    """One that computes with how many samples there are."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(self.conv1(x)[:, :1, :1, :1] / x.shape[0] + x)


class Judged(nn.Module):
    """One that computes a number of all samples, in a module that nothing traces."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.fc = nn.Conv2d(1, 2, 3), nn.Linear(98, 5)
        self.judge = Judge()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h, factor = self.judge(self.conv(x))
        return self.fc(h.flatten(1) * factor)


class Judge(nn.Module):
    def forward(self, x: torch.Tensor) -> tuple:
        return (x, 2.0) if x.sum() > 0 else (x, float(x.detach().mean()))


@pytest.mark.parametrize(
    ("model", "error"),
    [
        (Counted(), "truediv depends on all samples together"),
        (Judged(), "judge: getitem_1 depends on all samples together"),
        (
            nn.Sequential(nn.Conv2d(1, 2, 3), nn.BatchNorm2d(2), nn.Flatten(), nn.Linear(98, 5)),
            "1: BatchNorm2d depends",
        ),
        (Means(), "mean depends on all samples together"),
        (Alike(), "matmul depends on all samples together"),
        (Normed(), "batch_norm depends on all samples together"),
        (Thrown(), "dropout draws at random for all samples together: to split by samples, use nn.Dropout"),
        (nn.Sequential(nn.Flatten(), nn.Linear(81, 8), nn.Linear(8, 5)), "no layer with weights comes before"),
    ],
)
def test_what_cannot_be_split_by_samples_is_refused(model, error):
    x, y = images(3)
    with pytest.raises(UsageError, match=error):
        play_split(model.double(), (x,), y, Split("samples", 2))


def test_a_batch_norm_that_is_not_trained_splits_by_samples():
    x, y = images(5)
    model = nn.Sequential(nn.Conv2d(1, 2, 3), nn.BatchNorm2d(2), nn.Flatten(), nn.Linear(98, 5)).double().eval()
    check_equal(model, (x,), y, Split("samples", 2))
