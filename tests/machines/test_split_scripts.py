"""A split model as a script has it, against the whole one: each partition's script in a thread of its own."""

import copy
import threading
from collections import defaultdict
from collections.abc import Callable, Sequence
from queue import SimpleQueue
from typing import Any

import pytest
import torch
from made import made
from splitting import Gave
from torch import nn
from torch.nn.functional import cross_entropy

from distbelief.core.effects import Batch
from distbelief.core.optimizer import Optimizer
from distbelief.core.settings import Settings
from distbelief.errors import UsageError
from distbelief.runtime.loop import Replica
from distbelief.runtime.script_story import ScriptStage
from distbelief.runtime.split_model import SplitCall, SplitModel
from distbelief.schedules.pipeline import Action, SegmentTask
from distbelief.split.options import Split
from distbelief.strategies import Single
from distbelief.tasks.flat import FlatModule, layout_of
from distbelief.tasks.order import key

SIZE = 6
SECONDS = 20
"""How long a partition waits for another, at most."""
TURN = threading.Lock()
"""Held by whoever computes: tracing and chance are the process's."""
Script = Callable[["Partition"], Any]


class Partition:
    """One partition of a replica, and the minibatch that its script is in."""

    def __init__(self, lines: Any, partition: int) -> None:
        self._lines, self.partition = lines, partition
        self.batch: Batch | None = Batch(0, 0)
        self.goes_on = True
        self.gave: list[Gave] = []

    def minibatch(self) -> Batch:
        if self.batch is None:
            raise UsageError("no minibatch")
        return self.batch

    def play(self, actions: Sequence[Action]) -> bool:
        if not self.goes_on:
            return False
        passes = self.part.passes
        for action in actions:
            if isinstance(action, SegmentTask):
                passes.run(action)
            elif passes.sends(action):
                tensor = passes.give(action)
                self.gave.append(Gave(self.part.transfer(action), action.microbatch, action.direction, tensor))
                self._lines[action].put(tensor)
            else:
                TURN.release()
                try:
                    tensor = self._lines[action].get(timeout=SECONDS)
                finally:
                    TURN.acquire()
                passes.take(action, tensor)
        return True

    def split(self, model: nn.Module, split: Split, sample: Any, **options: Any) -> SplitModel:
        """As a replica does it."""
        parts = Single(partitions=split.partitions, microbatches=options.pop("microbatches", 1))
        settings = Settings(batch_size=SIZE, strategy=parts)
        whole = copy.deepcopy(model)
        self.model = SplitModel(
            whole, SplitCall(split, options.get("loss"), options.get("example")), self.minibatch, self.play
        )
        self.flat, self.part = self.model.cut(
            self.partition, lambda: sample, settings, SIZE, lambda one, graph: layout_of(one, None, graph.pieces), None
        )
        return self.model


def run(partitions: int, script: Script) -> list[Any]:
    """Runs the scripts of all partitions; returns what each returns, or raises what the first of them raised."""
    lines: Any = defaultdict(SimpleQueue)
    found: dict[int, Any] = {}

    def one(partition: int) -> None:
        with TURN:
            try:
                found[partition] = script(Partition(lines, partition))
            except BaseException as error:
                found[partition] = error

    threads = [threading.Thread(target=one, args=(partition,), daemon=True) for partition in range(partitions)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(2 * SECONDS)
    for result in found.values():
        if isinstance(result, BaseException):
            raise result
    return [found[partition] for partition in range(partitions)]


class Two(nn.Module):
    """Gives two things, of which one is made early, from an input that it gives too."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.third = nn.Linear(5, 8), nn.Linear(8, 8), nn.Linear(8, 3)

    def forward(self, x: torch.Tensor) -> dict[str, Any]:
        early = torch.tanh(self.first(x))
        late = self.third(torch.relu(self.second(early)) + early)
        return {"scores": late, "early": (early, x)}


def data() -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(3)
    return torch.randn(SIZE, 5, generator=generator, dtype=torch.float64), torch.arange(SIZE) % 3


def of(output: Any, target: torch.Tensor) -> torch.Tensor:
    """A loss of all that a model gives."""
    if isinstance(output, torch.Tensor):
        return cross_entropy(output, target)
    early, x = output["early"]
    return cross_entropy(output["scores"], target) + (early * x.sum(1, keepdim=True)).pow(2).mean()


def mlp() -> nn.Module:
    return nn.Sequential(
        nn.Linear(5, 8), nn.ReLU(inplace=True), nn.BatchNorm1d(8), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 3)
    )


def gathered(partitions: list[Partition]) -> dict[str, torch.Tensor]:
    """Whole gradients, of the pieces that partitions have."""
    found: dict[str, Any] = {}
    for one in partitions:
        pieces = one.part.program.pieces
        for name, parameter in one.model.named_parameters():
            assert parameter.grad is not None, name
            found.setdefault(name, []).append((pieces[name].start, pieces[name].dimension, parameter.grad))
    ordered = {name: sorted(parts, key=lambda part: part[0]) for name, parts in found.items()}
    return {
        name: parts[0][2] if len(parts) == 1 else torch.cat([part for *_, part in parts], parts[0][1])
        for name, parts in ordered.items()
    }


MODELS: dict[str, Callable[[], nn.Module]] = {"mlp": mlp, "two": Two}


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize(
    "split", [Split("stages", 2), Split("stages", 3), Split("neurons", 2), Split("columns", 3)], ids=str
)
def test_every_partition_is_given_what_the_whole_model_gives_and_its_gradient_goes_back(
    name: str, split: Split
) -> None:
    torch.manual_seed(1)
    model, (x, y) = MODELS[name]().double(), data()

    def script(own: Partition) -> Any:
        split_model = own.split(model, split, (x, y))
        output = split_model(x)
        loss = of(output, y)
        loss.backward()
        return own, loss.detach(), output

    done = run(split.partitions, script)
    whole = copy.deepcopy(model)
    output = whole(x)
    loss = of(output, y)
    loss.backward()
    for _, told, given in done:
        torch.testing.assert_close(given, output, rtol=0, atol=1e-12)
        assert abs(told - loss) < 1e-12
    got = gathered([own for own, *_ in done])
    for parameter, tensor in whole.named_parameters():
        assert (got[parameter] - tensor.grad).abs().max() < 1e-12, parameter
    stays = {one.transfer for own, *_ in done for one in own.gave if not one.transfer.shape.differentiable}
    back = [one for own, *_ in done for one in own.gave if one.direction.value == "B" and one.transfer in stays]
    assert stays
    assert not back, "the gradients of copies are nobody's"


@pytest.mark.parametrize("microbatches", [1, 4])
def test_with_its_loss_a_model_goes_through_its_partitions_in_microbatches(microbatches: int) -> None:
    """Gradients are added to what there is as autograd adds them, times what goes back to the loss."""
    torch.manual_seed(1)
    model, (x, y) = nn.Sequential(nn.Linear(5, 8), nn.Tanh(), nn.Linear(8, 3)).double(), data()

    def script(own: Partition) -> Any:
        options = {"loss": cross_entropy, "microbatches": microbatches}
        split = own.split(model, Split("stages", 2), (x, y), **options)
        for number in range(2):
            own.batch = Batch(0, number)
            loss = split(x, y)
            assert all(one.grad is None for one in split.parameters()) or number
            (loss * (1 + number)).backward()
        return own, loss.detach()

    done = run(2, script)
    whole = copy.deepcopy(model)
    loss = cross_entropy(whole(x), y)
    (3 * loss).backward()
    got = gathered([own for own, _ in done])
    for parameter, tensor in whole.named_parameters():
        assert (got[parameter] - tensor.grad).abs().max() < 1e-12, parameter
    assert all(abs(told - loss) < 1e-12 for _, told in done)


def test_dropout_is_keyed_by_the_minibatch_however_the_model_is_split() -> None:
    torch.manual_seed(1)
    model, (x, y) = nn.Sequential(nn.Linear(5, 64), nn.Dropout(0.5), nn.Linear(64, 3)).double(), data()
    found = []
    for split in (Split("stages", 2), Split("neurons", 2), Split({"0": 1, "1": 1, "2": 0}, 2)):

        def script(own: Partition, split: Split = split) -> Any:
            made = own.split(model, split, (x, y))
            outputs = []
            for number in (0, 1, 0):
                own.batch = Batch(0, number)
                outputs.append(made(x))
                outputs[-1].sum().backward()
            return outputs

        found += run(2, script)
    for first, second, again in found:
        torch.testing.assert_close(first, found[0][0], rtol=0, atol=1e-12)
        assert not torch.allclose(first, second)
        assert torch.equal(first, again)
    assert key(0, 0, 0) != key(0, 0, 1)


def test_a_minibatch_that_the_job_goes_on_without_is_gone_through_for_nothing() -> None:
    model, (x, y) = mlp().double(), data()

    def script(own: Partition) -> Any:
        split = own.split(model, Split("stages", 2), (x, y))
        own.goes_on = False
        output = split(x)
        assert torch.equal(output, torch.zeros(SIZE, 3, dtype=torch.float64))
        cross_entropy(output, y).backward()
        return own

    assert all(one.grad is None for own in run(2, script) for one in own.model.parameters())


def test_a_model_of_which_a_part_is_here_holds_no_more_of_it() -> None:
    def script(own: Partition) -> Any:
        split = own.split(mlp(), Split("stages", 2), data())
        return {name for name, _ in split.named_parameters()}, sum(one.numel() for one in split.parameters())

    first, second = run(2, script)
    assert not first[0] & second[0]
    assert first[1] + second[1] == sum(one.numel() for one in mlp().parameters())


class Depends(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(5, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(x) if x.sum() > 0 else self.linear(-x)


class Keeps(nn.Module):
    """Keeps in a buffer what it has seen, in one of several ways of writing that."""

    def __init__(self, way: str) -> None:
        super().__init__()
        self.linear, self.way = nn.Linear(5, 5), way
        self.register_buffer("seen", torch.ones(5))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.way == "copied":
            self.seen.copy_(self.seen * 0.9 + x.detach().mean(0))
        elif self.way == "in two steps":
            self.seen.mul_(0.9).add_(x.detach().mean(0))
        elif self.way == "of itself":
            self.seen.mul_(0.5)
        elif self.way == "added":
            self.seen += x.detach().mean(0)
        elif self.way == "assigned anew":
            self.seen = self.seen * 0.9 + x.detach().mean(0)
        return self.linear(x) * (self.seen + 2)


@pytest.mark.parametrize("way", ["copied", "in two steps", "of itself", "added", "read only"])
def test_a_buffer_that_is_written_in_place_is_that_of_the_whole_model(way: str) -> None:
    torch.manual_seed(1)
    model, (x, y) = nn.Sequential(nn.Linear(5, 5), Keeps(way), nn.Linear(5, 3)).double(), data()

    def steps(called: nn.Module, begin: Callable[[int], None]) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        for number in range(3):
            begin(number)
            loss = cross_entropy(called(x + number), y)
            loss.backward()
        return loss.detach(), dict(called.named_buffers())

    def script(own: Partition) -> Any:
        def begin(number: int) -> None:
            own.batch = Batch(0, number)

        return steps(own.split(model, Split("stages", 2), (x, y)), begin)

    (loss, first), (_, second) = run(2, script)
    whole = steps(copy.deepcopy(model), lambda _: None)
    torch.testing.assert_close((loss, first | second), whole, rtol=0, atol=1e-12)


class Optional(nn.Module):
    """Has arguments that are left out, one of which has no place."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(5, 8), nn.Linear(8, 3)

    def forward(self, x: torch.Tensor, mask: torch.Tensor | None = None, *, factor: float = 1.0) -> torch.Tensor:
        made = torch.tanh(self.first(x))
        return self.second(made if mask is None else made * mask) * factor


ROW = torch.linspace(-1, 1, 8, dtype=torch.float64).expand(SIZE, 8)
NAMED: dict[str, tuple[Any, dict[str, Any]]] = {
    "a place": (None, {}),
    "a default": (None, {"mask": None, "factor": 1.0}),
    "a tensor": ((data()[0], ROW), {"mask": ROW}),
    "a number": ((data()[0], None, 0.5), {"factor": 0.5}),
    "both": ((data()[0], ROW, 0.5), {"factor": 0.5, "mask": ROW}),
}


@pytest.mark.parametrize("loss", [None, cross_entropy])
@pytest.mark.parametrize("name", NAMED)
def test_arguments_by_name_are_those_of_the_whole_model(name: str, loss: Any) -> None:
    torch.manual_seed(1)
    (example, named), model, (x, y) = NAMED[name], Optional().double(), data()
    if example and loss:
        example = *example, y

    def script(own: Partition) -> torch.Tensor:
        split = own.split(model, Split("stages", 2), (x, y), loss=loss, example=example)
        made = split(x, y, **named) if loss else cross_entropy(split(x=x, **named), y)
        made.backward()
        return made.detach()

    whole = cross_entropy(model(x, **named), y).detach()
    assert all(abs(one - whole) < 1e-12 for one in run(2, script))


def twice(split: SplitModel, x: torch.Tensor) -> None:
    split(x).sum().backward()
    split(x)


def back_twice(split: SplitModel, x: torch.Tensor) -> None:
    loss = split(x).sum()
    loss.backward(retain_graph=True)
    loss.backward()


def measured(split: SplitModel, x: torch.Tensor) -> None:
    with torch.no_grad():
        split(x)


REFUSED: dict[str, tuple[Any, str]] = {
    "a second call": (twice, "called once in each minibatch, with a backward pass: evaluate the whole model"),
    "going back twice": (back_twice, "each minibatch has one backward pass"),
    "measuring": (measured, "evaluate the whole model, with the job's model.safetensors"),
    "eval": (lambda split, _: split.eval(), r"eval\(\) of a split model: .* model.safetensors"),
    "saving": (lambda split, _: split.state_dict(), r"state_dict\(\) of a split model: .* only a part of it"),
    "loading": (lambda split, _: split.load_state_dict({}), "Load weights before replica.split"),
    "a dtype": (lambda split, x: split(x.float()), r"traced with float64 \['n', 5\], and is called with float32"),
    "more arguments": (lambda split, x: split(x, x), r"split\(..., example=\(...\)\)"),
    "an argument by name": (lambda split, x: split(x, input=x), r"is called as forward\(input.*\): multiple values"),
    "too many samples": (lambda split, x: split(torch.cat([x, x])), "with 12 samples, .* of a minibatch, 6"),
    "a gradient": (lambda split, x: split(x.clone().requires_grad_()), "requires a gradient: detach it"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_a_split_model_cannot_do_is_refused(name: str) -> None:
    act, says = REFUSED[name]

    def script(own: Partition) -> None:
        act(own.split(mlp().double(), Split("stages", 2), data()), data()[0])

    with pytest.raises(UsageError, match=says):
        run(2, script)


def test_nothing_goes_back_in_another_minibatch() -> None:
    def script(own: Partition) -> None:
        loss = own.split(mlp().double(), Split("stages", 2), data())(data()[0]).sum()
        own.batch = Batch(0, 1)
        loss.backward()

    with pytest.raises(UsageError, match=r"each minibatch has one backward pass, before its optimizer.step\(\)"):
        run(2, script)


def test_a_model_that_cannot_be_traced_is_refused_with_its_line() -> None:
    with pytest.raises(UsageError, match=r"Depends cannot be traced at .*test_split_scripts.py:\d+: return"):
        run(2, lambda own: own.split(Depends().double(), Split("stages", 2), data()))
    says = r"test_split_scripts.py:\d+: self.seen = .* 'seen' is replaced by assignment: write it in place, self.seen"
    for model in (Keeps("assigned anew"), nn.Sequential(Keeps("assigned anew"))):
        with pytest.raises(UsageError, match=says):
            run(2, lambda own, model=model: own.split(model.double(), Split("stages", 2), data()))
        assert all(isinstance(one, torch.Tensor) for one in model.buffers())


def test_an_argument_that_a_model_was_not_traced_with_is_refused_with_the_example_to_give() -> None:
    x, _ = data()
    with pytest.raises(UsageError, match=r"is called with .*, None, 0.5: .* split\(..., example=\(x, mask, factor\)\)"):
        run(2, lambda own: own.split(Optional().double(), Split("stages", 2), data())(x, factor=0.5))


def test_what_a_model_is_called_with_may_be_named() -> None:
    x, y = data()

    def script(own: Partition) -> Any:
        split = own.split(mlp().double(), Split("stages", 2), {"x": x}, example=(x[:2],))
        cross_entropy(split(x[:3]), y[:3]).backward()

    run(2, script)
    with pytest.raises(
        UsageError, match=r"show the arguments of a call: pass those, of two samples, as split\(..., example="
    ):
        run(2, lambda own: own.split(mlp().double(), Split("stages", 2), x, loss=cross_entropy))


def test_the_part_is_a_part_of_the_whole_layout() -> None:
    def script(own: Partition) -> FlatModule:
        own.split(mlp().double(), Split("stages", 2), data())
        return own.flat

    first, second = run(2, script)
    assert first.layout == second.layout
    assert {tensor.data_ptr() for tensor in first.trained}.isdisjoint(tensor.data_ptr() for tensor in second.trained)


def replica(**settings: Any) -> Replica:
    """Of a job that was launched so, before its script has done anything."""
    nobody: Any = None
    own = {"replicas": 1, "shards": 2, "partitions": 2, **settings}
    return Replica("replica 0.0", ScriptStage(nobody, nobody, nobody, made(**own)))


def of_another(one: Replica) -> None:
    one.split(mlp())
    one.optimizer(mlp())


AT_THE_DOOR: dict[str, tuple[dict[str, Any], Callable[[Replica], Any], str]] = {
    "whole replicas": (
        {"partitions": 1}, lambda one: one.split(mlp(), Split("stages", 2)),
        r"split\(\) over 2 partitions: each replica of the job has 1 processes; launch it with --partitions 2",
    ),
    "whole replicas, by the job": ({"partitions": 1}, lambda one: one.split(mlp()), "launch it with --partitions 2"),
    "more partitions": ({}, lambda one: one.split(mlp(), Split("stages", 3)), "launch it with --partitions 3"),
    "another way": ({"split": "neurons"}, lambda one: one.split(mlp(), Split("stages", 2)), "--split neurons: leave"),
    "a second split": ({}, lambda one: (one.split(mlp()), one.split(mlp())), r"split\(\) of a second model"),
    "microbatches": ({"microbatches": 2}, lambda one: one.split(mlp()), r"--microbatches 2: .*, loss=...\)"),
    "other chunks": (
        {"split": "time", "chunks": 3}, lambda one: one.split(mlp(), Split("time", 2, chunks=4)),
        r"split\(\) in 4 chunks, and --chunks 3: leave",
    ),
    "no split": ({}, lambda one: one.optimizer(mlp()), r"--partitions 2: .* model = replica.split\(model\)"),
    "another model": ({}, of_another, "a replica trains one split model"),
    "an optimizer of its own": (
        {}, lambda one: one.optimizer(one.split(mlp()), optim=Optimizer()), "with the job's optimizer",
    ),
    "an optimizer before": (
        {"partitions": 1}, lambda one: (one.optimizer(mlp()), one.split(mlp())), "launch it with --partitions",
    ),
    "a call too early": ({}, lambda one: one.split(mlp())(data()[0]), "in a minibatch of replica.batches"),
    "a stream": (
        {}, lambda one: (one.optimizer(one.split(mlp())), one.batches(iter([1]))), "a stream and --partitions 2"
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", AT_THE_DOOR)
def test_what_cannot_be_split_is_refused_when_it_is_asked_for(name: str) -> None:
    settings, act, says = AT_THE_DOOR[name]
    with pytest.raises(UsageError, match=says):
        act(replica(**settings))


def test_until_the_first_minibatch_a_split_model_has_the_whole() -> None:
    """So that it can be moved, counted, and given groups; its optimizer has the whole's too."""
    one = replica()
    whole = mlp()
    model = one.split(whole, Split("stages", 2)).double()
    assert [name for name, _ in model.named_parameters()] == [name for name, _ in whole.named_parameters()]
    assert all(tensor.dtype is torch.float64 for tensor in whole.parameters())
    groups = [
        {"params": [p for p in model.parameters() if p.ndim > 1]},
        {"params": [p for p in model.parameters() if p.ndim < 2], "weight_decay": 0.0},
    ]
    assert [len(group["params"]) for group in one.optimizer(model, groups).param_groups] == [3, 5]
