"""The task `digits`: scikit-learn's 1797 handwritten digits of 8x8 pixels; real data without a download."""

from __future__ import annotations

import importlib.util
from collections import OrderedDict
from functools import partial
from pathlib import Path

import numpy as np
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
    return Task(model=_mlp, train=partial(_load, test=False), test=partial(_load, test=True)).named("digits")


def _mlp() -> nn.Module:
    return nn.Sequential(OrderedDict(fc1=nn.Linear(64, 64), relu1=nn.ReLU(), fc2=nn.Linear(64, 10)))


def _load(test: bool) -> TensorData:
    table = np.loadtxt(_file(), delimiter=",", dtype=np.float32)
    images, labels = torch.from_numpy(table[:, :-1] / 16), torch.from_numpy(table[:, -1]).long()
    # the file is ordered by writer: without a permutation the test set would be other people's digits
    order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(0))
    part = order[-TEST_SAMPLES:] if test else order[:-TEST_SAMPLES]
    return TensorData(images[part], labels[part])


def _file() -> Path:
    """The file inside scikit-learn; found, not imported, since that takes seconds in each process."""
    package = importlib.util.find_spec("sklearn")
    path = Path(*(package.submodule_search_locations or [""] if package else [""]), "datasets", "data", "digits.csv.gz")
    if not path.is_file():
        raise DataError(
            "task 'digits' needs scikit-learn, which brings its data and is not here: pip install 'distbelief[digits]'"
        )
    return path
