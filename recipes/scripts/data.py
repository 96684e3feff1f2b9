"""Data of the scripts, which need no network."""

import argparse
import collections
import itertools
import re
import sysconfig
from pathlib import Path

import torch
from torch.utils.data import TensorDataset

import distbelief as db


def arguments(**kinds: type) -> list:
    """Read the arguments of a script by name; without them, print its usage."""
    asked = argparse.ArgumentParser()
    for name, kind in kinds.items():
        asked.add_argument(name, type=kind)
    return [*vars(asked.parse_args()).values()]


def digits() -> tuple[TensorDataset, TensorDataset]:
    """Load scikit-learn's digits, (n, 64) in [0, 1], for training and for tests."""
    task = db.tasks.digits()
    train, test = task.train(), task.test()
    return TensorDataset(train.inputs, train.targets), TensorDataset(test.inputs, test.targets)


def mnist(samples: int) -> tuple[TensorDataset, TensorDataset]:
    """Load MNIST, (n, 1, 28, 28) in [0, 1]: some training samples, and the test samples."""
    task = db.tasks.mnist()
    train, test = task.train(), task.test()
    shape = (-1, 1, 28, 28)
    inputs, targets = train.batch(torch.arange(samples))
    tested = test.batch(torch.arange(len(test)))
    return TensorDataset(inputs.reshape(shape), targets), TensorDataset(tested[0].reshape(shape), tested[1])


def words(samples: int, vocabulary: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Read words of Python's library for training, and a tenth as many for tests: (n,), rare ones 0."""
    files = sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py"))
    text = itertools.chain.from_iterable(re.findall(r"\w+|[^\w\s]", one.read_text(errors="ignore")) for one in files)
    told = list(itertools.islice(text, samples + samples // 10))
    known = [word for word, _ in collections.Counter(told[:samples]).most_common(vocabulary - 1)]
    numbers = {word: number for number, word in enumerate(known, start=1)}
    whole = torch.tensor([numbers.get(word, 0) for word in told])
    return whole[:samples], whole[samples:]


def pieces(words: torch.Tensor, columns: int, length: int) -> torch.Tensor:
    """Cut a text into columns, and the columns into pieces of some words and the next one: (n, length + 1, columns)."""
    rows = (len(words) // columns - 1) // length * length + 1
    text = words[: rows * columns].view(columns, rows).T
    return torch.stack([text[first : first + length + 1] for first in range(0, rows - 1, length)])


def communities(nodes: int, classes: int) -> tuple[torch.Tensor, torch.Tensor, TensorDataset, TensorDataset]:
    """Draw a graph with more edges within communities: edges (n, n), features (n, 16), each half of the nodes."""
    chance = torch.Generator().manual_seed(0)
    kinds = torch.randint(classes, (nodes,), generator=chance)
    joined = torch.where(kinds[:, None] == kinds, 0.03, 0.006)
    edges = torch.bernoulli(joined.triu(1), generator=chance)
    edges = edges + edges.T + torch.eye(nodes)
    features = torch.randn(nodes, 16, generator=chance) + torch.randn(classes, 16, generator=chance)[kinds] / 2
    half = nodes // 2
    parts = ((torch.arange(0, half), kinds[:half]), (torch.arange(half, nodes), kinds[half:]))
    train, test = (TensorDataset(*part) for part in parts)
    return edges / edges.sum(1, keepdim=True), features, train, test


def waves(count: int, length: int, seed: int) -> torch.Tensor:
    """Draw sine waves of one period with random phases (count, length)."""
    phases = 80 * torch.rand(count, 1, generator=torch.Generator().manual_seed(seed))
    return torch.sin((torch.arange(length) + phases) / 8)
