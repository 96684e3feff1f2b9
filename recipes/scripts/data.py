"""What the scripts train on: data that need no network."""

import torch
from torch.utils.data import TensorDataset

import distbelief as db


def digits() -> tuple[TensorDataset, TensorDataset]:
    """Scikit-learn's digits, (n, 64) in [0, 1]: to train on, and to test with."""
    task = db.tasks.digits()
    train, test = task.train(), task.test()
    return TensorDataset(train.inputs, train.targets), TensorDataset(test.inputs, test.targets)


def mnist(samples: int) -> tuple[TensorDataset, TensorDataset]:
    """MNIST, (n, 1, 28, 28) in [0, 1]: so many samples to train on, and those to test with."""
    task = db.tasks.mnist()
    train, test = task.train(), task.test()
    shape = (-1, 1, 28, 28)
    inputs, targets = train.batch(torch.arange(samples))
    tested = test.batch(torch.arange(len(test)))
    return TensorDataset(inputs.reshape(shape), targets), TensorDataset(tested[0].reshape(shape), tested[1])
