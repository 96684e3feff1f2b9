"""Sandblaster on any number of replicas and shards is single-machine L-BFGS: torch's own, and one written plainly."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
from itertools import product
from typing import Any

import pytest
import torch
from drawn import some
from oracles import classes
from split_jobs import state_of
from torch import Tensor, nn
from watching.observed import Observed

from distbelief.core import roles, wire
from distbelief.core.conversations import initialising, operations, pushing
from distbelief.core.effects import Payload
from distbelief.core.messages import Message
from distbelief.job import Job
from distbelief.places.compute_model import ComputeModel
from distbelief.places.simulated.simulated import Simulated
from distbelief.strategies import Sandblaster
from distbelief.strategies.sandblaster.methods import SearchStart, wolfe
from distbelief.tasks import Task
from distbelief.tasks.order import Order
from distbelief.tasks.task import TensorData, as_data
from distbelief.transport.cluster_model import NetworkModel
from distbelief.transport.virtual import VirtualEndpoint

SHAKY = Simulated(
    network=NetworkModel(jitter=5.0, delay_chance=0.1, delay=3e-3),
    compute=ComputeModel(spread="exponential", slow={1: 7.0}),
)


class Point(nn.Module):
    def __init__(self, start: Tensor) -> None:
        super().__init__()
        self.x = nn.Parameter(start.clone())

    def forward(self, _: Tensor) -> Tensor:
        return self.x


def rosenbrock(x: Tensor, which: Tensor) -> Tensor:
    """The mean of the terms `which` of the chained Rosenbrock function: each term is a sample."""
    a, b = x[which], x[which + 1]
    return (100 * (b - a**2) ** 2 + (1 - a) ** 2).mean()


def valley(size: int = 40) -> Task:
    start = torch.tensor([-1.2, 1.0], dtype=torch.float64).repeat(size // 2)
    data = TensorData(torch.zeros(size - 1, 1), torch.arange(size - 1))
    return Task(model=lambda: Point(start), train=lambda: data, loss=rosenbrock)


CASES = {
    "rosenbrock": valley,
    "logistic": lambda: classes(lambda: nn.Linear(6, 3).double(), 203, dtype=torch.float64),
    "mlp": lambda: classes(
        lambda: nn.Sequential(nn.Linear(6, 20), nn.Tanh(), nn.Linear(20, 3)).double(), 203, dtype=torch.float64
    ),
}


def job(task: Task, iterations: int, **options: Any) -> Job:
    shared = {"portion_size": 5, "send_every": 3, "tolerance": 0.0, "replicas": 3, "shards": 2}
    strategy = Sandblaster(iterations=iterations, **{**shared, **options})
    return Job(task, strategy, evaluate_every=0, checkpoint_every=0)


def train(task: Task, iterations: int, cluster: Simulated | None = None, **options: Any) -> Tensor:
    run = Observed(job(task, iterations, **options), cluster).run()
    assert run.outcome == "done"
    return torch.frombuffer(bytearray(run.vector()), dtype=torch.float64)


@functools.cache
def of_whole(method: str, batch_size: int) -> dict[str, Tensor]:
    return of_split(method, batch_size)


def of_split(method: str, batch_size: int, **split: Any) -> dict[str, Tensor]:
    asked = job(CASES["mlp"](), 4, method=method, shards=4, deterministic=True, batch_size=batch_size, **split)
    return state_of(Observed(asked).run())


SPLITS: list[dict[str, Any]] = [
    {"split": "stages", "partitions": 2}, {"split": "neurons", "partitions": 2}, {"split": "neurons", "partitions": 3},
    {"split": "stages", "partitions": 2, "microbatches": 3, "schedule": "gpipe"},
]  # fmt: skip


@pytest.mark.parametrize(("split", "method", "batch_size"), some(product(SPLITS, ["lbfgs", "cg"], [0, 60])))
def test_split_replicas_make_the_iterates_of_whole_ones(split: dict[str, Any], method: str, batch_size: int) -> None:
    """Those that are held against torch's L-BFGS below; on every batch, or on some that overlap."""
    other = of_split(method, batch_size, **split)
    for name, value in of_whole(method, batch_size).items():
        torch.testing.assert_close(other[name], value, rtol=1e-9, atol=1e-9)


def flat(model: nn.Module) -> Tensor:
    return torch.cat([p.detach().view(-1) for p in model.parameters()])


def torchs(task: Task, iterations: int, history: int = 10) -> Tensor:
    torch.manual_seed(0)
    model, data = task.model(), as_data(task.train())
    inputs, targets = data.batch(torch.arange(len(data)))
    optimizer = torch.optim.LBFGS(
        model.parameters(),
        1.0,
        iterations,
        10**6,
        tolerance_grad=0.0,
        tolerance_change=0.0,
        history_size=history,
        line_search_fn="strong_wolfe",
    )

    def closure() -> Tensor:
        optimizer.zero_grad()
        loss = task.loss(model(inputs), targets)
        loss.backward()
        return loss

    optimizer.step(closure)
    return flat(model)


def distance(one: Tensor, other: Tensor) -> float:
    return float((one[: len(other)] - other).norm() / other.norm())


@pytest.mark.parametrize(("iterations", "tolerance", "case"), [
    (1, 1e-12, "mlp"), (2, 1e-12, "rosenbrock"), (2, 1e-12, "mlp"), (5, 1e-10, "logistic"), (15, 1e-7, "rosenbrock"),
    (15, 1e-7, "logistic"), (15, 1e-7, "mlp"),
])  # fmt: skip
def test_the_iterates_are_those_of_torchs_lbfgs(case: str, iterations: int, tolerance: float) -> None:
    """Also in a network that shakes, with a slow replica; the rounding of sums grows with the iterations."""
    task = CASES[case]()
    theirs = torchs(task, iterations)
    assert distance(train(task, iterations), theirs) < tolerance
    assert (
        distance(train(task, iterations, SHAKY, portion_size=7, send_every=1, replicas=4, shards=3), theirs) < tolerance
    )


def two_loop(pairs: list[tuple[Tensor, Tensor]], g: Tensor) -> Tensor:
    """H g, by the two-loop recursion of the books."""
    d, alphas = g.clone(), []
    for s, y in reversed(pairs):
        alphas.append((s @ d) / (s @ y))
        d -= alphas[-1] * y
    if pairs:
        d *= (pairs[-1][0] @ pairs[-1][1]) / (pairs[-1][1] @ pairs[-1][1])
    for (s, y), alpha in zip(pairs, reversed(alphas), strict=True):
        d += (alpha - (y @ d) / (s @ y)) * s
    return d


class Plain:
    """A batch method in a few lines on whole vectors, on one machine."""

    def __init__(self, task: Task, decay: float = 0.0) -> None:
        torch.manual_seed(0)
        self.task, self.model, self.decay, self.data = task, task.model(), decay, as_data(task.train())
        self.x = flat(self.model)
        self.skipped = 0

    def at(self, x: Tensor, numbers: Tensor | None = None) -> tuple[float, Tensor]:
        inputs, targets = self.data.batch(torch.arange(len(self.data)) if numbers is None else numbers)
        nn.utils.vector_to_parameters(x, self.model.parameters())
        self.model.zero_grad()
        loss = self.task.loss(self.model(inputs), targets)
        loss.backward()
        gradient = torch.cat([p.grad.view(-1) for p in self.model.parameters()])
        return loss.item() + 0.5 * self.decay * float(x @ x), gradient + self.decay * x

    def search(self, start: SearchStart, direction: Tensor) -> float:
        search, step = wolfe(start), start.first
        with contextlib.suppress(StopIteration):
            next(search)
            while True:
                loss, gradient = self.at(self.x + step * direction)
                step = search.send((loss, float(gradient @ direction)))
        return step

    def lbfgs(self, iterations: int, history: int, search: bool, first: float) -> Tensor:
        pairs: list[tuple[Tensor, Tensor]] = []
        loss, g = self.at(self.x)
        for _ in range(iterations):
            d = -two_loop(pairs, g)
            step = first * (1.0 if pairs or not search else min(1.0, 1.0 / float(g.abs().sum())))
            step = self.search(SearchStart(loss, float(g @ d), step), d) if search else step
            self.x = self.x + step * d
            loss, new = self.at(self.x)
            s, y = step * d, new - g
            if s @ y > 1e-8 * (s @ s):
                pairs = [*pairs, (s, y)][-history:]
            else:
                self.skipped += 1
            g = new
        return self.x

    def windows(self, iterations: int, size: int, shared: int, portion: int, step: float) -> Tensor:
        """Multi-batch L-BFGS: only what two batches share shows the curvature."""
        order = Order(len(self.data), portion, 0)

        def numbers(first: int, count: int) -> Tensor:
            return torch.cat([order.indices(*divmod(at, order.batches)) for at in range(first, first + count)])

        pairs: list[tuple[Tensor, Tensor]] = []
        for k in range(iterations):
            first, last = k * (size - shared), (k + 1) * (size - shared)
            before = self.at(self.x, numbers(last, shared))[1]
            s = -step * two_loop(pairs, self.at(self.x, numbers(first, size))[1])
            self.x = self.x + s
            y = self.at(self.x, numbers(last, shared))[1] - before
            if s @ y > 1e-8 * (s @ s):
                pairs = [*pairs, (s, y)][-10:]
        return self.x

    def conjugate(self, iterations: int) -> Tensor:
        loss, g = self.at(self.x)
        d, last = -g, 0.0
        for _ in range(iterations):
            slope = float(g @ d)
            first = last / slope if last else min(1.0, 1.0 / float(g.abs().sum()))
            step = self.search(SearchStart(loss, slope, first, float(g.abs().max()), curvature=0.1), d)
            last, self.x = step * slope, self.x + step * d
            loss, new = self.at(self.x)
            d = -new + max(0.0, float(new @ (new - g) / (g @ g))) * d
            g = new
            if g @ d >= 0:
                d = -g
        return self.x

    def steepest(self, iterations: int, step: float) -> Tensor:
        for _ in range(iterations):
            self.x = self.x - step * self.at(self.x)[1]
        return self.x


@pytest.mark.parametrize(("case", "history", "decay"), some(product(CASES, [1, 3], [0.0, 0.3])))
def test_a_short_history_and_weight_decay_are_those_of_the_plain_method(case: str, history: int, decay: float) -> None:
    task = CASES[case]()
    theirs = Plain(task, decay).lbfgs(7, history, search=True, first=1.0)
    assert distance(train(task, 7, history=history, weight_decay=decay), theirs) < 1e-8


def test_pairs_that_tell_no_curvature_are_left_out_as_in_the_plain_method() -> None:
    start = torch.linspace(0.1, 0.6, 40, dtype=torch.float64)  # on top of a hill: the curvature is negative
    hill = dataclasses.replace(valley(), model=lambda: Point(start), loss=lambda x, which: torch.cos(x[which]).mean())
    for task, step in ((hill, 0.5), (CASES["mlp"](), 8.0)):
        plain = Plain(task)
        theirs = plain.lbfgs(5, 2, search=False, first=step)
        assert plain.skipped or task is not hill, "it is not tried"
        assert distance(train(task, 5, history=2, line_search="none", step=step), theirs) < 1e-9


@pytest.mark.parametrize("decay", [0.0, 0.1])
def test_windows_that_overlap_are_the_plain_multi_batch_method(decay: float) -> None:
    """203 samples make 41 portions of 5: the windows move over more than two passes."""
    task = CASES["mlp"]()
    theirs = Plain(task, decay).windows(12, 8, 2, 5, 0.5)
    ours = train(task, 12, SHAKY, batch_size=40, overlap=0.25, line_search="none", step=0.5, weight_decay=decay)
    assert distance(ours, theirs) < 1e-9


@pytest.mark.parametrize("case", CASES)
def test_nonlinear_conjugate_gradient_is_the_plain_method(case: str) -> None:
    task = CASES[case]()
    theirs = Plain(task).conjugate(7)
    assert distance(train(task, 7, method="cg"), theirs) < 1e-8


def test_gradient_descent_is_the_plain_method() -> None:
    task = CASES["mlp"]()
    assert (
        distance(train(task, 9, method="gradient", line_search="none", step=0.3), Plain(task).steepest(9, 0.3)) < 1e-12
    )


def test_no_vector_leaves_its_shard_but_parameters_to_replicas_and_gradients_from_them(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """And a hundred times the parameters are no more for the coordinator to say and hear, payloads counted."""
    send, carried, said = VirtualEndpoint.send, set[tuple[str, type, str]](), {10: 0, 1000: 0}

    def sees(own: VirtualEndpoint, to: str, message: Message, payload: Payload | None = None) -> None:
        if payload is not None:
            carried.add((own.role.split()[0], type(message), to.split()[0]))
        if roles.COORDINATOR in (own.role, to):
            said[size] += len(wire.encode(message)) + (payload.nbytes if payload is not None else 0)
        send(own, to, message, payload)

    monkeypatch.setattr(VirtualEndpoint, "send", sees)
    for size in said:
        Simulated(phantom=True).run(
            Job(valley(size), Sandblaster(2, 2, iterations=6, portion_size=1000), snapshot_every="0")
        )
    assert carried == {
        ("replica", initialising.Initialise, "shard"),
        ("replica", operations.Contribute, "shard"),
        ("shard", pushing.Fetched, "replica"),
    }
    assert said[1000] < 1.02 * said[10]
