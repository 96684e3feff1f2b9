"""Problems of the study `observation`: gradients differ much in size between parameters in some, little in others."""

from __future__ import annotations

import itertools
import re
from collections import Counter
from collections.abc import Callable
from functools import lru_cache, partial
from typing import Literal

import torch
from torch import Tensor, nn

from distbelief.tasks.digits import CLASSES, IMAGE, load_mnist
from distbelief.tasks.task import Task, TensorData
from distbelief.zoo.gpt import TENTH, python_help

WORDS, CONTEXT, WIDTH = 500, 2, 16
"""Known words, words of context before the predicted one, and numbers per word."""
IMAGES, SIDE, HIDDEN, LAYERS = 40_000, 7, 64, 4
"""Images, pixels of a side, units of a layer, and layers (as many as in the speech model of Dean et al. 2012)."""
FEATURES, PRESENT = 1_000, 20
"""Features, and how many of them a sample has."""
SAMPLES, TEST_SAMPLES = 20_000, 4_000


def words() -> Task:
    """Predict the next word of Python's `help()` from the two before.

    The frequencies of words are those of natural language.
    """
    return Task(
        model=lambda: nn.Sequential(
            nn.Embedding(WORDS, WIDTH),
            nn.Flatten(),
            nn.Linear(CONTEXT * WIDTH, HIDDEN),
            nn.Tanh(),
            nn.Linear(HIDDEN, WORDS),
        ),
        train=partial(_windows, False),
        test=partial(_windows, True),
    )


def uneven_features() -> Task:
    """Return logistic regression on features with the frequencies of words (Zipf 1949)."""
    return _features(1.0)


def even_features() -> Task:
    """Return logistic regression on equally frequent features."""
    return _features(0.0)


def deep_sigmoids(data_dir: str | None = None) -> Task:
    """Return MNIST in 7x7 pixels with four layers of sigmoids, each with smaller gradients than the one above."""
    return _images(partial(_sigmoids, 1.0), data_dir)


def even_sigmoids(data_dir: str | None = None) -> Task:
    """Return `deep_sigmoids` with initial weights four times as large.

    They keep gradients equal from layer to layer.
    """
    return _images(partial(_sigmoids, 4.0), data_dir)


def rectifiers(data_dir: str | None = None) -> Task:
    """Return MNIST in 7x7 pixels with one layer of rectifiers."""
    return _images(lambda: nn.Sequential(nn.Linear(SIDE**2, HIDDEN), nn.ReLU(), nn.Linear(HIDDEN, CLASSES)), data_dir)


def _features(exponent: float) -> Task:
    return Task(
        model=lambda: nn.EmbeddingBag.from_pretrained(torch.zeros(FEATURES, 2), freeze=False, mode="sum"),
        train=partial(_draw, exponent, False),
        test=partial(_draw, exponent, True),
    )


def _draw(exponent: float, test: bool) -> TensorData:
    chance, samples = torch.Generator().manual_seed(1 + test), TEST_SAMPLES if test else SAMPLES
    frequency = torch.arange(1, FEATURES + 1, dtype=torch.float64) ** -exponent
    features = torch.multinomial(frequency, samples * PRESENT, True, generator=chance).view(samples, PRESENT)
    truth = torch.randn(FEATURES, generator=torch.Generator().manual_seed(0))
    chances = torch.sigmoid(truth[features].sum(1))
    return TensorData(features, (torch.rand(samples, generator=chance) < chances).long())


@lru_cache(maxsize=1)
def _numbers() -> Tensor:
    text = re.findall(r"[a-z]+|[^a-z\s]", python_help().lower())
    known = {word: number for number, (word, _) in enumerate(Counter(text).most_common(WORDS - 1), 1)}
    return torch.tensor([known.get(word, 0) for word in text])


def _windows(test: bool) -> TensorData:
    windows = _numbers().unfold(0, CONTEXT + 1, 1)
    # neighbouring windows share words, so each hundred is either for training or for testing
    mine = (torch.arange(len(windows)) // 100 % TENTH == 0) == test
    return TensorData(windows[mine, :-1], windows[mine, -1])


def _images(model: Callable[[], nn.Module], data_dir: str | None) -> Task:
    load = partial(_small, data_dir)
    return Task(model=model, train=partial(load, "train"), test=partial(load, "t10k"), data_dir=data_dir)


@lru_cache(maxsize=2)
def _small(data_dir: str | None, part: Literal["train", "t10k"]) -> TensorData:
    whole = load_mnist(data_dir, IMAGE, part)
    images, digits = whole.batch(torch.arange(min(len(whole), IMAGES)))
    return TensorData(nn.functional.avg_pool2d(images, IMAGE[1] // SIDE).flatten(1), digits)


def _sigmoids(gain: float) -> nn.Module:
    linears = [nn.Linear(*sizes) for sizes in itertools.pairwise([SIDE**2, *[HIDDEN] * LAYERS, CLASSES])]
    for linear in linears:
        nn.init.xavier_uniform_(linear.weight, gain)
        nn.init.zeros_(linear.bias)
    return nn.Sequential(*(layer for linear in linears for layer in (linear, nn.Sigmoid())))[:-1]
