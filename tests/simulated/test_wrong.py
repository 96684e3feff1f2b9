"""Tasks with which something is wrong: one clear error each, before the first step wherever that can be known then."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import distbelief as db
from distbelief.errors import DistbeliefError

STRATEGIES: list[Any] = [
    db.Downpour(),
    db.Synchronous(),
    db.Sandblaster(iterations=2),
    db.Allreduce(),
    db.Hogwild(),
    db.Single(),
]


def data(samples: int = 20, classes: int = 4) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.zeros(samples, 8), torch.arange(samples) % classes


def fail() -> Any:
    raise RuntimeError("not today")


class Altered(nn.Linear):
    def __init__(self, change: Callable[[torch.Tensor], Any]) -> None:
        super().__init__(8, 4)
        self.change = change

    def forward(self, inputs: torch.Tensor) -> Any:
        return self.change(super().forward(inputs))


class Counting(nn.Linear):
    """A layer that counts the minibatches it is trained with."""

    trained = 0

    def __init__(self) -> None:
        super().__init__(8, 4)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        Counting.trained += self.training
        return super().forward(inputs)


def altered(change: Callable[[torch.Tensor], Any]) -> dict[str, Any]:
    return {"model": lambda: Altered(change)}


ENTROPY = nn.functional.cross_entropy
BEFORE: dict[str, tuple[dict[str, Any], str]] = {
    "no test samples": ({"test": list},
        "the test data of task '' hold 0 samples: give it some, or train with --evaluate-every 0"),
    "empty test tensors": ({"test": lambda: data(0)}, "the test data of task '' hold 0 samples"),
    "test data that raise": ({"test": fail}, "the test data of task '' cannot be loaded: RuntimeError: not today"),
    "no test data": ({"test": lambda: None}, "the test data of task '': NoneType cannot be dealt out in portions"),
    "test targets that lack": ({"test": lambda: (data()[0], data(19)[1])},
        r"the test data of task '': inputs \[20, 8\] and targets \[19\]"),
    "test samples of three": ({"test": lambda: [(torch.zeros(8), 0, 1)] * 9},
        "a sample of list is a tuple of 3 values"),
    "a test class too many": ({"test": lambda: (data()[0], data()[1] + 4)},
        "raised in evaluation: IndexError: Target 4 is out of bounds"),
    "a metric in words": ({"metric": lambda *_: "good"},
        r"^metric 'accuracy' .* raised ValueError: could not convert string to float: 'good'; .* metric=None"),
    "a metric of each": ({"metric": lambda *both: both[1] == 0}, "^metric 'accuracy' .* raised "),
    "a metric by name": ({"metric": {"mine": lambda *_: fail()}}, "^metric 'mine' .* raised RuntimeError: not today"),
    "a metric of another task": ({"loss": nn.functional.mse_loss, "test": lambda: (data()[0], data()[0][:, :4])},
        "^metric 'accuracy' .* raised ValueError: counts correct classes"),
    "no samples": ({"train": list}, "the training data of task '' hold 0 samples: there is nothing to train on"),
    "data that raise": ({"train": fail}, "the training data of task '' cannot be loaded: RuntimeError: not today"),
    "no data": ({"train": lambda: None}, "the training data of task '': NoneType cannot be dealt out in portions"),
    "targets that lack": ({"train": lambda: (data()[0], data(19)[1])},
        r"the training data of task '': inputs \[20, 8\] and targets \[19\]"),
    "no parameters": ({"model": nn.Tanh},
        "the model has no parameter with requires_grad=True: there is nothing to train"),
    "frozen parameters": ({"model": lambda: nn.Linear(8, 4).requires_grad_(False)},
        "no parameter with requires_grad=True"),
    "a model that raises": ({"model": fail}, "the model of task '' cannot be built: RuntimeError: not today"),
    "a model's class": ({"model": lambda: nn.Linear},
        "the model of task '' is a type; its function must return a torch.nn.Module"),
    "two models": ({"model": lambda: (nn.Linear(8, 4), 1)}, "the model of task '' is a tuple"),
    "complex numbers": ({"model": lambda: nn.Linear(8, 4, dtype=torch.complex64)},
        "complex64 on cpu: it must be a dense real tensor"),
}  # fmt: skip


@pytest.mark.parametrize("what", BEFORE)
@pytest.mark.parametrize("strategy", STRATEGIES, ids=lambda strategy: strategy.name)
def test_what_can_be_known_is_told_before_the_first_step(strategy: Any, what: str) -> None:
    changed, said = BEFORE[what]
    Counting.trained = 0
    with pytest.raises(DistbeliefError, match=said):
        run(strategy, changed)
    assert Counting.trained == 0


AT_ONCE: dict[str, tuple[dict[str, Any], str]] = {
    "an output of two": (altered(lambda output: (output, None)), "TypeError: cross_entropy_loss.*, not tuple"),
    "an output of nothing": (altered(lambda _: None), "TypeError: cross_entropy_loss.*, not NoneType"),
    "an output without a gradient": (altered(torch.Tensor.detach), "does not require grad"),
    "a class too many": ({"train": lambda: data(20, 9), "test": None},
        r"at epoch 1, minibatch \d: IndexError: Target \d is out of bounds"),
    "targets of another dtype": ({"train": lambda: (data()[0], data()[0][:, 0]), "test": None},
        "expected target dtype to be Long"),
    "inputs of another shape": ({"model": lambda: nn.Linear(7, 4)},
        r"mat1 and mat2 shapes cannot be multiplied \(\d+x8 and 7x4\)"),
    "uneven samples": ({"train": lambda: [(torch.zeros(8 + i % 2), 0) for i in range(20)]},
        "stack expects each tensor to be equal size"),
    "samples of three": ({"train": lambda: [(torch.zeros(8), 0, 1)] * 9}, "a sample of list is a tuple of 3 values"),
    "a loss of each": ({"loss": lambda output, target: ENTROPY(output, target, reduction="none"), "test": None},
                       r"the loss of task '' is a tensor of shape \[\d+\]: it must be a scalar tensor, the mean over "
                       r"the minibatch"),
    "a loss that is a number": ({"loss": lambda *_: 3.0}, "the loss of task '' is a float: it must be a scalar tensor"),
    "a loss that is none": (altered(lambda output: output * float("nan")), "the loss is (nan|inf) at"),
}  # fmt: skip


@pytest.mark.parametrize("what", AT_ONCE)
@pytest.mark.parametrize("strategy", STRATEGIES, ids=lambda strategy: strategy.name)
@pytest.mark.long
def test_what_a_step_shows_is_one_clear_error(strategy: Any, what: str) -> None:
    changed, said = AT_ONCE[what]
    with pytest.raises(DistbeliefError, match=said) as caught:
        run(strategy, changed)
    assert "\n" not in str(caught.value)


def run(strategy: Any, changed: dict[str, Any]) -> None:
    task = db.Task(**{"model": Counting, "train": data, "test": data, **changed})
    db.run(db.Job(task, strategy, **({} if strategy.name == "sandblaster" else {"batch_size": 4})), on="simulated")
