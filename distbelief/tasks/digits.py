"""The task `digits`: scikit-learn's 1797 handwritten digits of 8x8 pixels; real data without a download."""

from __future__ import annotations

from functools import partial

import torch
from torch import nn

from distbelief.errors import DataError
from distbelief.tasks.task import Task, TensorData

TEST_SAMPLES = 360


def digits() -> Task:
    """An MLP 64-64-10 on scikit-learn's digits: 1437 to train on, 360 to test, split once and for all.

    Inputs are float32 of shape (n, 64) in [0, 1], targets int64 of shape (n,).

    >>> [len(part()) for part in (digits().train, digits().test)]
    [1437, 360]
    """
    return Task(reference="digits", model=_mlp, train=partial(_load, test=False), test=partial(_load, test=True))


def _mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))


def _load(test: bool) -> TensorData:
    try:
        from sklearn.datasets import load_digits
    except ImportError as error:
        raise DataError(f"task 'digits' needs scikit-learn, which cannot be imported here ({error}): pip install 'distbelief[digits]'") from error
    bunch = load_digits()
    # the file is ordered by writer: without a permutation the test set would be other people's digits
    order = torch.randperm(len(bunch.target), generator=torch.Generator().manual_seed(0))
    part = order[-TEST_SAMPLES:] if test else order[:-TEST_SAMPLES]
    return TensorData((torch.from_numpy(bunch.data)[part] / 16).float(), torch.from_numpy(bunch.target)[part].long())
