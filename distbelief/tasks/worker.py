"""Computation for a replica or the evaluator: a task's model and data, a minibatch or a measurement at a time."""

from __future__ import annotations

import dataclasses
import time
from collections import defaultdict
from itertools import chain
from typing import Literal, TypeVar

import torch
from torch import nn
from torch.utils._pytree import tree_map

from distbelief.core.effects import Batch, Computed, Measured
from distbelief.core.settings import Settings
from distbelief.core.values import device_number
from distbelief.errors import DataError, DistbeliefError, TrainingError, UsageError
from distbelief.tasks.arithmetic import arithmetic_of
from distbelief.tasks.order import Order, seed_chance
from distbelief.tasks.task import ACCURACY, Data, Task, as_data

CHECKED = 2
"""Samples measured as a job starts: more than one, which some layers refuse."""
LOSS = "loss"
"""Name of the loss among the sums of metrics, reserved for it."""
MEASURE_BATCH = 1000
"""Samples measured at a time, which bounds the memory of an evaluation."""


def placed(device: str, index: int = 0) -> torch.device:
    """Return the device that `--device` means for the computing process `index` of a machine.

    `cuda` deals the GPUs of a machine to its replicas or partitions in turn. A device that is unknown or missing raises
    a `UsageError`.

    >>> placed("cpu", 3)
    device(type='cpu')
    """
    if device == "cpu":
        return torch.device("cpu")
    named = device_number(device)
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    number = index % max(count, 1) if named is None else named
    if number >= count:
        raise UsageError(f"--device {device}: not available here ({count} CUDA devices); use --device cpu")
    return torch.device("cuda", number)


def build_model(task: Task, seed: int, device: str, index: int = 0) -> nn.Module:
    """Build the model of a task from a seed, on the device of process `index`.

    A function of the user's that fails, or returns no module, raises a `TrainingError`. A missing device raises a
    `UsageError`.
    """
    place = placed(device, index)
    torch.manual_seed(seed)
    try:
        model = task.model()
        if isinstance(model, nn.Module):
            return model.to(place)
    except (Exception, SystemExit) as error:
        raise TrainingError(
            f"the model of task {task.reference!r} cannot be built: {type(error).__name__}: {error}"
        ) from error
    raise TrainingError(
        f"the model of task {task.reference!r} is a {type(model).__name__}; its function must return a torch.nn.Module"
    )


def load(task: Task, which: Literal["training", "test"]) -> Data:
    """Load the training or test set of a task, with at least one sample.

    Raises:
        DataError: the set is empty, or its files are missing.
        UsageError: the set cannot be counted and indexed.
        TrainingError: the user's function raised.
    """
    named = f"the {which} data of task {task.reference!r}"
    make = task.test if which == "test" else task.train
    assert make is not None
    try:
        data = as_data(make())
        samples = len(data)
    except UsageError as error:
        raise UsageError(f"{named}: {error}") from error
    except DistbeliefError:
        raise
    except (Exception, SystemExit) as error:
        raise TrainingError(f"{named} cannot be loaded: {type(error).__name__}: {error}") from error
    if not samples:
        remedy = (
            "give it some, or train with --evaluate-every 0"
            if which == "test"
            else "there is nothing to train on; check the task's data"
        )
        raise DataError(f"{named} hold 0 samples: {remedy}")
    return data


def with_data(task: Task, data: Data) -> Task:
    """Return the task with its training set loaded."""
    return dataclasses.replace(task, train=lambda: data).named(task.reference, task.data_dir)


class Trainer:
    """Computer of the gradient of one minibatch after another.

    `clip_norm` is the global norm to which each gradient is clipped; 0 for none. `arithmetic` is the name of the
    arithmetic of losses and gradients. A last minibatch of one sample is refused if the model's batch norm refuses it.
    """

    def __init__(
        self,
        task: Task,
        model: nn.Module,
        settings: Settings,
        clip_norm: float = 0.0,
        arithmetic: str = "float32",
    ) -> None:
        self.task, self.model, self.clip_norm = task, model.train(), clip_norm
        self.data = load(task, "training")
        self.order = Order.of(settings, len(self.data), self.data)
        self._seed = settings.seed
        self._arithmetic = arithmetic_of(arithmetic, model)
        self._load = 0.0
        """Seconds in which the present minibatch was loaded; twice if its gradient overflowed."""
        self._parameters = [p for p in model.parameters() if p.requires_grad]
        self._device = next((p.device for p in self._parameters), torch.device("cpu"))
        if (
            not settings.drop_last
            and len(self.data) % settings.batch_size == 1
            and any(isinstance(part, nn.modules.batchnorm._BatchNorm) for part in model.modules())
        ):
            self._check_one()

    def _check_one(self) -> None:
        """Refuse a model that cannot compute a minibatch of one sample, with which every epoch ends."""
        samples, size = self.order.samples, self.order.batch_size
        kept = {name: buffer.clone() for name, buffer in self.model.named_buffers()}
        try:
            inputs, _ = self.data.batch(torch.zeros(1, dtype=torch.int64))
            with torch.no_grad():
                torch.func.functional_call(self.model, kept, (on_device(inputs, self._device),))
        except Exception as error:  # other errors are reported by the step in which they occur
            if hint(error):
                raise UsageError(
                    f"the last minibatch of an epoch has one sample ({samples} samples in minibatches of {size}), "
                    "which the model's batch norm cannot normalise: leave it out with --drop-last, or choose another "
                    "--batch-size"
                ) from error

    def compute(self, batch: Batch) -> Computed:
        """Compute the mean loss of a minibatch, and leave its gradient in the parameters' `.grad`.

        An error in the user's model or loss raises a `TrainingError`.
        """
        start, arithmetic = time.perf_counter(), self._arithmetic
        before, self._load = (arithmetic.overflows, arithmetic.counted), 0.0
        for parameter in self._parameters:
            parameter.grad = None
        try:
            numbers = self.order.indices(batch.epoch, batch.index)
            loss = arithmetic.backward(lambda: self._loss(batch, numbers))
        except DistbeliefError:
            raise
        except (Exception, SystemExit) as error:
            raise raised_at(self.task, batch, error) from error
        if self.clip_norm:
            nn.utils.clip_grad_norm_(self._parameters, self.clip_norm)
        overflows, counted = arithmetic.overflows - before[0], arithmetic.counted - before[1]
        seconds = time.perf_counter() - start - self._load
        return Computed(
            float(loss.detach()), len(numbers), seconds, overflows=overflows, counted=counted, load=self._load
        )

    def _loss(self, batch: Batch, numbers: torch.Tensor) -> torch.Tensor:
        """Compute the mean loss of a minibatch, the same on each call, since its seed covers the model and the data."""
        seed_chance(self._seed, batch.epoch, batch.index)
        begun = time.perf_counter()
        inputs, targets = self.data.batch(numbers)
        self._load += time.perf_counter() - begun
        inputs, targets = on_device(inputs, self._device), on_device(targets, self._device)
        loss = self.task.loss(self.model(inputs), targets)
        if isinstance(loss, torch.Tensor) and loss.numel() == 1:
            return loss
        got = f"a tensor of shape {list(loss.shape)}" if isinstance(loss, torch.Tensor) else f"a {type(loss).__name__}"
        raise TrainingError(
            f"the loss of task {self.task.reference!r} is {got}: it must be a scalar tensor, the mean over the "
            "minibatch"
        )


def raised_at(task: Task, batch: Batch, error: BaseException, where: str = "") -> TrainingError:
    """Make the error for an exception of a task's functions at a minibatch.

    >>> print(raised_at(Task(model=lambda: None, train=list).named("mine:task"), Batch(0, 7), ValueError("no")))
    task 'mine:task' raised at epoch 1, minibatch 7: ValueError: no
    """
    place = f"epoch {batch.epoch + 1}, minibatch {batch.index}{where}"
    return TrainingError(f"task {task.reference!r} raised at {place}: {type(error).__name__}: {error}{hint(error)}")


def hint(error: BaseException) -> str:
    """Return the remedy if a batch norm refused a minibatch of one sample, else "".

    >>> hint(ValueError("Expected more than 1 value per channel when training, got input size torch.Size([1, 8])"))
    '; a minibatch of one sample is too small for batch norm: choose another --batch-size, or leave out the last of an
    epoch with --drop-last'
    >>> hint(ValueError("no"))
    ''
    """
    if "Expected more than 1 value per channel" not in str(error):
        return ""
    return (
        "; a minibatch of one sample is too small for batch norm: choose another --batch-size, or leave out the last "
        "of an epoch with --drop-last"
    )


Tree = TypeVar("Tree")


def on_device(value: Tree, device: torch.device) -> Tree:
    """Move a tensor, or a structure of tensors from a data set, to a device.

    >>> on_device({"a": torch.zeros(2), "b": 3}, torch.device("cpu"))
    {'a': tensor([0., 0.]), 'b': 3}
    """
    if device.type == "cpu":
        return value
    moved: Tree = tree_map(lambda leaf: leaf.to(device) if isinstance(leaf, torch.Tensor) else leaf, value)
    return moved


def check_measure(task: Task, model: nn.Module) -> None:
    """Measure a model on a few test samples, so that a job that cannot be evaluated ends before it trains."""
    measure(task, model, CHECKED)


def measure(task: Task, model: nn.Module, most: int | None = None) -> Measured:
    """Measure the mean loss and metrics of a model on the task's test set, or on its first `most` samples.

    Raises:
        UsageError: the task has no test set, or one that cannot be counted and indexed.
        DataError: the test set is empty, or does not hold pairs.
        TrainingError: the user's model, loss or metric raised.
    """
    if task.test is None:
        raise UsageError(f"task {task.reference!r} has no test set: give it one, or train with --evaluate-every 0")
    data, device = load(task, "test"), next(chain(model.parameters(), model.buffers())).device
    samples = min(len(data), most or len(data))
    training = model.training
    model.eval()
    sums: dict[str, float] = defaultdict(float)
    try:
        with torch.no_grad():
            for numbers in torch.arange(samples).split(MEASURE_BATCH):
                inputs, targets = data.batch(numbers)
                inputs, targets = on_device(inputs, device), on_device(targets, device)
                add_sums(sums, task, model(inputs), targets, len(numbers))
    except DistbeliefError:
        raise
    except (Exception, SystemExit) as error:
        raise TrainingError(
            f"the model of task {task.reference!r} raised in evaluation: {type(error).__name__}: {error}"
        ) from error
    finally:
        model.train(training)
    return mean_of(sums, samples)


def add_sums(sums: dict[str, float], task: Task, output: object, targets: object, samples: int) -> None:
    """Add the loss and the metrics of a minibatch to their sums over samples."""
    sums[LOSS] += float(task.loss(output, targets)) * samples
    for name in task.metrics:
        sums[name] += _metric_sum(task, name, output, targets, samples)


def mean_of(sums: dict[str, float], samples: int) -> Measured:
    """Return the means of the sums of `add_sums`.

    >>> mean_of({"loss": 3.0, "accuracy": 4.0, "error": 1.0}, 4)
    Measured(loss=0.75, accuracy=1.0, metrics={'error': 0.25}, seconds=0.0)
    """
    means = {name: value / samples for name, value in sums.items()}
    return Measured(means.pop(LOSS), means.pop(ACCURACY, None), means)


def _metric_sum(task: Task, name: str, output: object, targets: object, samples: int) -> float:
    """Compute the sum of one metric over a minibatch, or raise a `TrainingError`."""
    metric = task.metrics[name]
    subject = f"metric {name!r} ({getattr(metric, '__qualname__', type(metric).__name__)}) of task {task.reference!r}"
    remedy = "give the task a metric that fits its output and targets, or metric=None where the loss says it all"
    try:
        value = float(metric(output, targets))
    except (Exception, SystemExit) as error:
        raise TrainingError(f"{subject} raised {type(error).__name__}: {error}; {remedy}") from error
    if name == ACCURACY and not 0 <= value <= samples * (1 + 1e-6):
        raise TrainingError(f"{subject} is {value:g} for {samples} samples, but must count the right ones; {remedy}")
    return value
