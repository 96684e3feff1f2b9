"""Sandblaster on any number of replicas and shards is single-machine L-BFGS: torch's own, and one written plainly."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from distbelief.cluster.pace import Pace
from distbelief.cluster.simulated import Simulated
from distbelief.core import records
from distbelief.job import Job
from distbelief.strategy import Sandblaster
from distbelief.tasks import Task
from distbelief.tasks.task import TensorData, as_data
from distbelief.testing.simulations import Observed
from distbelief.transport.virtual import Weather

SHAKY = Simulated(weather=Weather(jitter=5.0, delay_chance=0.1, delay=3e-3), pace=Pace(spread="exponential", slow={1: 7.0}))


class Point(nn.Module):
    """Parameters that are the output."""

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


def classes(model: Callable[[], nn.Module], samples: int = 203) -> Task:
    chance = torch.Generator().manual_seed(7)
    data = TensorData(torch.randn(samples, 6, generator=chance).double(), torch.randint(0, 3, (samples,), generator=chance))
    return Task(model=model, train=lambda: data)


CASES = {
    "rosenbrock": valley,
    "logistic": lambda: classes(lambda: nn.Linear(6, 3).double()),
    "mlp": lambda: classes(lambda: nn.Sequential(nn.Linear(6, 20), nn.Tanh(), nn.Linear(20, 3)).double()),
}


def job(task: Task, iterations: int, **options: Any) -> Job:
    shared = {"portion_size": 5, "send_every": 3, "tolerance": 0.0, "replicas": 3, "shards": 2}
    return Job(task=task, strategy=Sandblaster(iterations=iterations, **{**shared, **options}), evaluate_every=0, checkpoint_every=0)


def train(task: Task, iterations: int, cluster: Simulated | None = None, **options: Any) -> Tensor:
    run = Observed(job(task, iterations, **options), cluster).run()
    assert run.outcome == "done"
    return torch.frombuffer(bytearray(run.vector()), dtype=torch.float64)


def flat(model: nn.Module) -> Tensor:
    return torch.cat([p.detach().view(-1) for p in model.parameters()])


def torchs(task: Task, iterations: int, history: int = 10) -> Tensor:
    """The iterates of `torch.optim.LBFGS`."""
    torch.manual_seed(0)
    model, data = task.model(), as_data(task.train())
    inputs, targets = data.batch(torch.arange(len(data)))
    optimizer = torch.optim.LBFGS(
        model.parameters(), 1.0, iterations, 10**6, tolerance_grad=0.0, tolerance_change=0.0, history_size=history, line_search_fn="strong_wolfe"
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


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize(("iterations", "tolerance"), [(1, 1e-12), (2, 1e-12), (5, 1e-10), (15, 1e-7)])
def test_the_iterates_are_those_of_torchs_lbfgs(case: str, iterations: int, tolerance: float) -> None:
    """Also in a network that shakes, with a slow replica; the rounding of sums grows with the iterations."""
    task = CASES[case]()
    theirs = torchs(task, iterations)
    assert distance(train(task, iterations), theirs) < tolerance
    assert distance(train(task, iterations, SHAKY, portion_size=7, send_every=1, replicas=4, shards=3), theirs) < tolerance


def test_a_convex_problem_ends_where_scipys_does() -> None:
    task = CASES["logistic"]()
    data = as_data(task.train())
    inputs, targets = data.batch(torch.arange(len(data)))

    def value(point: Any) -> tuple[float, Any]:
        x = torch.tensor(point, requires_grad=True)
        loss = nn.functional.cross_entropy(inputs @ x[:18].view(3, 6).T + x[18:], targets) + 0.005 * (x @ x)
        loss.backward()
        return loss.item(), x.grad.numpy()

    optimize = pytest.importorskip("scipy.optimize")
    theirs = optimize.minimize(value, [0.0] * 21, jac=True, method="L-BFGS-B", options={"ftol": 0.0, "gtol": 1e-10, "maxiter": 1000})
    run = Observed(job(task, 200, weight_decay=0.01, tolerance=1e-10)).run()
    assert distance(torch.frombuffer(bytearray(run.vector()), dtype=torch.float64), torch.tensor(theirs.x)) < 1e-8
    assert sum(isinstance(record, records.Iterated) for record in run.records) < 100, "it ends when the gradient is small enough"


class Plain:
    """A batch method in a few lines on whole vectors, on one machine."""

    def __init__(self, task: Task, decay: float = 0.0) -> None:
        torch.manual_seed(0)
        self.task, self.model, self.decay, self.data = task, task.model(), decay, as_data(task.train())
        self.x = flat(self.model)

    def at(self, x: Tensor, numbers: Tensor | None = None) -> tuple[float, Tensor]:
        inputs, targets = self.data.batch(torch.arange(len(self.data)) if numbers is None else numbers)
        nn.utils.vector_to_parameters(x, self.model.parameters())
        self.model.zero_grad()
        loss = self.task.loss(self.model(inputs), targets)
        loss.backward()
        gradient = torch.cat([p.grad.view(-1) for p in self.model.parameters()])
        return loss.item() + 0.5 * self.decay * float(x @ x), gradient + self.decay * x

    def backtrack(self, loss: float, slope: float, direction: Tensor, step: float) -> float:
        while (there := self.at(self.x + step * direction)[0]) > loss + 1e-4 * step * slope:
            parabola = -slope * step**2 / (2 * (there - loss - slope * step))
            step = min(max(parabola, step / 10), step / 2)
        return step

    def lbfgs(self, iterations: int, history: int, search: bool, first: float, skip: float = 1e-8) -> Tensor:
        pairs: list[tuple[Tensor, Tensor]] = []
        loss, g = self.at(self.x)
        for _ in range(iterations):
            d, alphas = g.clone(), []
            for s, y in reversed(pairs):
                alphas.append((s @ d) / (s @ y))
                d -= alphas[-1] * y
            if pairs:
                d *= (pairs[-1][0] @ pairs[-1][1]) / (pairs[-1][1] @ pairs[-1][1])
            for (s, y), alpha in zip(pairs, reversed(alphas), strict=True):
                d += (alpha - (y @ d) / (s @ y)) * s
            d = -d
            step = first * (1.0 if pairs or not search else min(1.0, 1.0 / float(g.abs().sum())))
            step = self.backtrack(loss, float(g @ d), d, step) if search else step
            self.x = self.x + step * d
            loss, new = self.at(self.x)
            s, y = step * d, new - g
            if s @ y > skip * (s @ s):
                pairs = [*pairs, (s, y)][-history:]
            g = new
        return self.x

    def conjugate(self, iterations: int) -> Tensor:
        loss, g = self.at(self.x)
        d, last = -g, 0.0
        for _ in range(iterations):
            slope = float(g @ d)
            step = self.backtrack(loss, slope, d, last / slope if last else min(1.0, 1.0 / float(g.abs().sum())))
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


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("history", [1, 3])
@pytest.mark.parametrize("decay", [0.0, 0.3])
def test_a_short_history_backtracking_and_weight_decay_are_those_of_the_plain_method(case: str, history: int, decay: float) -> None:
    task = CASES[case]()
    theirs = Plain(task, decay).lbfgs(7, history, search=True, first=1.0)
    assert distance(train(task, 7, history=history, weight_decay=decay, line_search="backtracking"), theirs) < 1e-8


@pytest.mark.parametrize("step", [0.5, 0.05])
def test_steps_without_a_search_are_those_of_the_plain_method(step: float) -> None:
    task = CASES["mlp"]()
    theirs = Plain(task).lbfgs(8, 10, search=False, first=step)
    assert distance(train(task, 8, line_search="none", step=step), theirs) < 1e-9


@pytest.mark.parametrize("case", CASES)
def test_nonlinear_conjugate_gradient_is_the_plain_method(case: str) -> None:
    task = CASES[case]()
    theirs = Plain(task).conjugate(7)
    assert distance(train(task, 7, method="cg", line_search="backtracking"), theirs) < 1e-8


def test_gradient_descent_is_the_plain_method() -> None:
    task = CASES["mlp"]()
    assert distance(train(task, 9, method="gradient", line_search="none", step=0.3), Plain(task).steepest(9, 0.3)) < 1e-12


@pytest.mark.parametrize("method", ["lbfgs", "cg", "gradient"])
def test_every_method_lowers_rosenbrocks_function(method: str) -> None:
    task = valley(10)
    losses = [Plain(task).at(train(task, iterations, method=method))[0] for iterations in (1, 20, 60)]
    assert losses[0] > losses[1] > losses[2]


def test_the_result_is_independent_of_the_shards() -> None:
    task = classes(lambda: nn.Sequential(nn.Linear(6, 20), nn.Tanh(), nn.Linear(20, 3)).double())
    one = train(task, 6, shards=1, deterministic=True)
    for shards in (2, 3, 5):
        assert distance(train(task, 6, shards=shards, deterministic=True), one) < 1e-12


def test_in_order_the_result_has_the_same_bits_whoever_computes_what_and_when() -> None:
    task = CASES["mlp"]()
    runs = [
        train(task, 6, cluster, deterministic=True, **options)
        for cluster, options in ((None, {"replicas": 1}), (None, {"replicas": 5}), (SHAKY, {}), (SHAKY, {"backup_portions": 0, "replicas": 2}))
    ]
    assert all(torch.equal(run, runs[0]) for run in runs)
    loose = [train(task, 6, cluster) for cluster in (None, SHAKY)]
    assert not torch.equal(*loose), "the order of the sum changes nothing: the test does not try it"
    assert distance(loose[1], loose[0]) < 1e-9
