"""Tasks `sparse-svm`, where lock-free updates pay, and `dense-svm`, where they do not, both on synthetic data.

`sparse-svm` is as sparse as RCV1 (Niu et al. 2011, section 5): 47,236 features, about 76 of them in a sample. Their
frequencies follow a law like Zipf's: the most frequent feature is in 44 % of the samples, most are in hardly any. The
weights are an embedding with sparse gradients. A step touches only the features of its samples, since the
regularisation of a feature is spread over the samples that have it (section 2 of the paper):

    loss(w) = mean over samples of  max(0, 1 - y x.w) + LAMBDA * sum over features u of x of  w_u^2 / d_u * samples

where d_u is the number of samples with feature u. Summed over all samples this is the hinge loss plus
LAMBDA * samples * |w|^2.
"""

from __future__ import annotations

from functools import lru_cache, partial
from typing import NamedTuple

import torch
from torch import Tensor, nn

from distbelief.tasks.task import Task, TensorData

SAMPLES, TEST_SAMPLES = 20_000, 4_000
FEATURES, NONZERO = 47_236, 76
"""Sizes of RCV1: features, and features of an average sample; here all have that many, and some count twice."""
SHIFT = 15.5
"""Feature u is drawn in proportion to 1 / (u + SHIFT): the most frequent is in 44 % of the samples, as in RCV1."""
TELLING = 1_000
"""Number of features on which labels depend."""
DENSE_FEATURES = 4_096
LAMBDA = 1e-5
NOISE = 0.05
"""Fraction of wrong labels."""


class _Samples(NamedTuple):
    features: Tensor
    """int64, (samples, NONZERO)."""
    values: Tensor
    """float32, (samples, NONZERO); each sample has norm 1."""
    labels: Tensor
    """float32, (samples,): 1 or -1."""
    degrees: Tensor
    """float32, (FEATURES,): number of samples with each feature, at least 1."""


@lru_cache(maxsize=2)
def _draw(samples: int, test: bool) -> _Samples:
    chance = torch.Generator().manual_seed(1 + test)
    weights = 1 / (torch.arange(1, FEATURES + 1, dtype=torch.float64) + SHIFT)
    features = torch.multinomial(weights, samples * NONZERO, replacement=True, generator=chance).view(samples, NONZERO)
    values = nn.functional.normalize(torch.rand(samples, NONZERO, generator=chance))
    truth = torch.randn(FEATURES, generator=torch.Generator().manual_seed(0))
    truth[TELLING:] = 0.0
    labels = torch.where((truth[features] * values).sum(1) > 0, 1.0, -1.0)
    wrong = torch.rand(samples, generator=chance) < NOISE
    degrees = torch.bincount(features.view(-1), minlength=FEATURES).clamp(min=1).float()
    return _Samples(features, values, torch.where(wrong, -labels, labels), degrees)


class SparseSVM(nn.Module):
    """A linear classifier whose weights are an embedding of one column.

    Input float64 of shape (n, 2, NONZERO), features and values; output float32 of shape (n, 2), margins and the
    regularisation of each sample.
    """

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Embedding(FEATURES, 1, sparse=True)
        nn.init.zeros_(self.weight.weight)

    def forward(self, inputs: Tensor) -> Tensor:
        """Compute margins and regularisation."""
        features, values = inputs[:, 0].long(), inputs[:, 1].float()
        weights = self.weight(features).squeeze(-1)
        share = LAMBDA * SAMPLES * (weights.square() / _draw(SAMPLES, False).degrees[features]).sum(1)
        return torch.stack([(weights * values).sum(1), share], 1)


def _sparse(test: bool) -> TensorData:
    drawn = _draw(TEST_SAMPLES if test else SAMPLES, test)
    return TensorData(torch.stack([drawn.features.double(), drawn.values.double()], 1), drawn.labels)


class DenseSVM(nn.Module):
    """A linear classifier whose samples have all features.

    Input float32 of shape (n, DENSE_FEATURES); output float32 of shape (n, 2), margins and the regularisation.
    """

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(DENSE_FEATURES))

    def forward(self, inputs: Tensor) -> Tensor:
        """Compute margins and regularisation."""
        margins = inputs @ self.weight
        return torch.stack([margins, (LAMBDA * self.weight.square().sum()).expand_as(margins)], 1)


def _dense(test: bool) -> TensorData:
    chance, samples = torch.Generator().manual_seed(1 + test), TEST_SAMPLES if test else SAMPLES
    inputs = nn.functional.normalize(torch.randn(samples, DENSE_FEATURES, generator=chance))
    labels = torch.where(
        inputs @ torch.randn(DENSE_FEATURES, generator=torch.Generator().manual_seed(0)) > 0, 1.0, -1.0
    )
    return TensorData(inputs, torch.where(torch.rand(samples, generator=chance) < NOISE, -labels, labels))


def hinge(output: Tensor, target: Tensor) -> Tensor:
    """Compute the mean over a minibatch of the hinge loss of margins plus their regularisation.

    >>> hinge(torch.tensor([[0.25, 0.0], [-3.0, 0.5]]), torch.tensor([1.0, -1.0]))
    tensor(0.6250)
    """
    return (nn.functional.relu(1 - target * output[:, 0]) + output[:, 1]).mean()


def signs(output: Tensor, target: Tensor) -> Tensor:
    """Count the margins that have the sign of their label.

    >>> signs(torch.tensor([[0.25, 0.0], [-3.0, 0.5]]), torch.tensor([1.0, 1.0]))
    tensor(1)
    """
    return (output[:, 0] * target > 0).sum()


def sparse_svm() -> Task:
    """Make the task of a support vector machine on data as sparse as RCV1; some strategies keep its gradients sparse.

    >>> sum(p.numel() for p in sparse_svm().model().parameters())
    47236
    """
    return Task(
        model=SparseSVM, train=partial(_sparse, test=False), test=partial(_sparse, test=True), loss=hinge, metric=signs
    ).named("sparse-svm")


def dense_svm() -> Task:
    """Make the task of a support vector machine on dense data, where each update collides with every other.

    >>> sum(p.numel() for p in dense_svm().model().parameters())
    4096
    """
    return Task(
        model=DenseSVM, train=partial(_dense, test=False), test=partial(_dense, test=True), loss=hinge, metric=signs
    ).named("dense-svm")
