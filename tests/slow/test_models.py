"""The built-in models learn: each to the accuracy that is stated, by a plain loop of a few hundred minibatches."""

from __future__ import annotations

import pytest
import torch

from distbelief.tasks import as_data, resolve
from distbelief.tasks.order import Order
from distbelief.tasks.worker import measure

BATCHES, BATCH = 300, 64
REACHED = {
    "mnist-alexnet": 0.95,
    "mnist-inception": 0.945,
    "mnist-siamese": 0.93,
    "mnist-gru": 0.91,
    "mnist-local": 0.94,
    "gpt-tiny": 0.40,
}
"""The accuracy on 2,000 samples of the test set, or on all where there are fewer."""


@pytest.mark.timeout(300)
@pytest.mark.parametrize("name", REACHED)
def test_a_built_in_model_reaches_the_accuracy_that_is_stated(name: str) -> None:
    task = resolve(name)
    data = as_data(task.train())
    torch.manual_seed(0)
    model, order = task.model(), Order(len(data), BATCH, seed=0)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.002)
    for number in range(BATCHES):
        inputs, targets = data.batch(order.indices(number // order.batches, number % order.batches))
        optimizer.zero_grad()
        task.loss(model(inputs), targets).backward()
        optimizer.step()
    assert measure(task, model, 2_000).accuracy >= REACHED[name]


@pytest.mark.timeout(300)
def test_alexnet_learns_a_minibatch_by_heart() -> None:
    task = resolve("alexnet")
    inputs, targets = as_data(task.train()).batch(torch.arange(16))
    torch.manual_seed(0)
    model = task.model()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-4)
    losses = []
    for _ in range(15):
        optimizer.zero_grad()
        loss = task.loss(model(inputs), targets)
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
    assert losses[0] > 6.5
    assert losses[-1] < 4.0
