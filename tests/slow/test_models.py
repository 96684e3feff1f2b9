"""The built-in models learn: each on MNIST to the accuracy that is stated, by the plain loop, in an epoch or two."""

from __future__ import annotations

import pytest
import torch

import distbelief as db
from distbelief.tasks import as_data, resolve

REACHED = {
    "mnist-alexnet": (0.005, 1, 0.985),
    "mnist-inception": (0.005, 1, 0.98),
    "mnist-siamese": (0.001, 1, 0.97),
    "mnist-gru": (0.003, 2, 0.97),
    "mnist-local": (0.002, 2, 0.96),
    "gpt-tiny": (0.003, 5, 0.40),
}
"""Learning rate of adam, epochs, and the accuracy after them."""


@pytest.mark.timeout(600)
@pytest.mark.parametrize("name", REACHED)
def test_a_built_in_model_reaches_the_accuracy_that_is_stated(name: str) -> None:
    rate, epochs, accuracy = REACHED[name]
    strategy = db.Single(optimizer=db.optim("adam", lr=rate))
    result = db.run(db.Job(task=name, strategy=strategy, epochs=epochs, evaluate_every=epochs))
    assert result["test_accuracy"] >= accuracy


@pytest.mark.timeout(600)
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
    assert losses[-1] < 3.0
