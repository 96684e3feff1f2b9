"""The support vector machines: as sparse as they say, with a loss that is what it says, and gradients of rows only."""

import pytest
import torch

from distbelief.tasks import as_data, resolve
from distbelief.zoo.svm import FEATURES, LAMBDA, NONZERO, SAMPLES, SparseSVM, _draw, hinge


def test_the_sparsity_is_that_of_rcv1() -> None:
    """Of 47,236 features the most frequent is in 44 % of the samples, and most are in hardly any."""
    degrees = _draw(SAMPLES, False).degrees
    drawn = _draw(SAMPLES, False).features
    has_first = (drawn == 0).any(1).float().mean().item()
    assert abs(has_first - 0.44) < 0.02
    assert degrees.median() < 0.002 * SAMPLES
    assert drawn.shape == (SAMPLES, NONZERO)
    assert len(degrees) == FEATURES
    # some sample meets all others
    often = drawn[(drawn < 40).sum(1).argmax()]
    assert torch.isin(drawn, often).any(1).float().mean() > 0.99


def test_shares_of_the_regularisation_add_up_to_it() -> None:
    model, data = SparseSVM(), as_data(resolve("sparse-svm").train())
    with torch.no_grad():
        model.weight.weight.normal_(generator=torch.Generator().manual_seed(0))
        shares = sum(model(data.batch(part)[0])[:, 1].double().sum() for part in torch.arange(SAMPLES).split(5000))
        seen = torch.zeros(FEATURES, dtype=torch.bool)
        seen[_draw(SAMPLES, False).features.view(-1)] = True
        whole = LAMBDA * SAMPLES * model.weight.weight[seen].double().square().sum()
    torch.testing.assert_close(shares, whole, rtol=1e-4, atol=0)


def test_a_gradient_is_of_the_rows_of_its_samples() -> None:
    model, data = SparseSVM(), as_data(resolve("sparse-svm").train())
    inputs, targets = data.batch(torch.tensor([3, 5]))
    hinge(model(inputs), targets).backward()
    gradient = model.weight.weight.grad
    assert gradient.is_sparse
    assert set(gradient.coalesce().indices()[0].tolist()) == set(inputs[:, 0].long().view(-1).tolist())


@pytest.mark.long
def test_the_dense_one_has_every_feature_in_every_sample() -> None:
    inputs, targets = as_data(resolve("dense-svm").train()).batch(torch.arange(100))
    assert (inputs != 0).all()
    assert targets.unique().tolist() == [-1.0, 1.0]
