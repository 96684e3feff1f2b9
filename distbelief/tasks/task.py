"""Tasks: a model, its data, loss and metric; found by a built-in name or `module:function`."""

from __future__ import annotations

import inspect
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor, nn
from torch.utils.data import Dataset, IterableDataset, TensorDataset, default_collate

from distbelief.core.values import Given, admit, check_fields, shown
from distbelief.errors import DataError, UsageError
from distbelief.references import TASKS, check_task, find
from distbelief.tasks.constrained import MARK, constrained


@runtime_checkable
class Data(Protocol):
    """Samples that can be counted and gathered by number."""

    def __len__(self) -> int:
        """Return the number of samples."""
        ...

    def batch(self, indices: Tensor) -> tuple[object, object]:
        """Return inputs and targets of samples (int64 indices, on the CPU), with the samples in the first dimension."""
        ...


class TensorData:
    """Data in two tensors.

    Args:
        inputs: inputs of any dtype, with the samples in the first dimension.
        targets: targets of any dtype, of as many samples.
        prepare: applied to the inputs of each batch, so that they can be stored in a small dtype such as uint8.

    Raises:
        UsageError: inputs and targets are not tensors of equally many samples.

    >>> data = TensorData(torch.tensor([[0], [51], [255]], dtype=torch.uint8), torch.tensor([0, 1, 2]),
    ...     lambda x: x.float() / 255)
    >>> data.batch(torch.tensor([2, 1]))
    (tensor([[1.0000],
            [0.2000]]), tensor([2, 1]))
    """

    def __init__(self, inputs: Tensor, targets: Tensor, prepare: Callable[[Tensor], Tensor] | None = None) -> None:
        admit(prepare, Callable[[Tensor], Tensor] | None, f"TensorData(prepare={shown(prepare)})")
        shapes = [list(t.shape) if isinstance(t, Tensor) else type(t).__name__ for t in (inputs, targets)]
        if not all(isinstance(t, Tensor) and t.ndim for t in (inputs, targets)) or len(inputs) != len(targets):
            raise UsageError(
                f"inputs {shapes[0]} and targets {shapes[1]} do not match: pass two tensors with equally many samples "
                "in dimension 0"
            )
        self.inputs, self.targets, self.prepare = inputs, targets, prepare

    def __len__(self) -> int:
        return len(self.targets)

    def batch(self, indices: Tensor) -> tuple[Tensor, Tensor]:
        """Return copies of the prepared inputs and the targets of the samples `indices`."""
        # index_select costs a fifth of inputs[indices] for 64 rows
        inputs = self.inputs.index_select(0, indices)
        return (self.prepare(inputs) if self.prepare else inputs), self.targets.index_select(0, indices)


class _MappedData:
    """A map-style dataset, fetched item by item and collated as a `DataLoader` does."""

    def __init__(self, dataset: Any) -> None:
        self.dataset = dataset

    def __len__(self) -> int:
        return len(self.dataset)

    def batch(self, indices: Tensor) -> tuple[object, object]:
        numbers = indices.tolist()
        together = getattr(self.dataset, "__getitems__", None)
        items = together(numbers) if together else [self.dataset[i] for i in numbers]
        for item in items:
            if not isinstance(item, tuple | list) or len(item) != 2:
                count = f" of {len(item)} values" if isinstance(item, tuple | list) else ""
                kind = type(self.dataset).__name__
                raise DataError(
                    f"a sample of {kind} is a {type(item).__name__}{count}; make the dataset return a pair (inputs, "
                    "target)"
                )
        inputs, targets = default_collate(items)
        return inputs, targets


def as_data(dataset: Data | Dataset[object] | Sequence[object]) -> Data:
    """Wrap a map-style dataset as `Data`.

    Args:
        dataset: `Data`, a tuple of two tensors (inputs, targets), a `torch.utils.data.Dataset` (a `TensorDataset` of
            two tensors is gathered at once), or anything with `len` and items that are pairs (inputs, target).

    Raises:
        UsageError: it cannot be counted or indexed.

    >>> as_data([(0.0, 3), (1.0, 4)]).batch(torch.tensor([1]))
    (tensor([1.], dtype=torch.float64), tensor([4]))
    """
    if isinstance(dataset, Data):
        return dataset
    tensors = dataset.tensors if type(dataset) is TensorDataset else dataset if isinstance(dataset, tuple) else ()
    if len(tensors) == 2 and all(isinstance(tensor, Tensor) for tensor in tensors):
        return TensorData(*tensors)
    counted = (
        hasattr(dataset, "__len__")
        and hasattr(dataset, "__getitem__")
        and not isinstance(dataset, str | bytes | Mapping | Tensor)
    )
    if isinstance(dataset, IterableDataset) or not counted:
        kind = type(dataset).__name__
        raise UsageError(
            f"{kind} cannot be dealt out in portions: pass a map-style dataset (with __len__ and __getitem__) of "
            "pairs (inputs, target), two tensors (inputs, targets), or an object with __len__ and batch"
        )
    return _MappedData(dataset)


def correct(output: Tensor, target: Tensor) -> Tensor:
    """Count the samples whose largest output is the target's class: the metric of a classification.

    `output` has scores of shape (n, classes), and `target` classes of shape (n,), as whole numbers. Other shapes or
    dtypes raise a `ValueError`.

    >>> correct(torch.tensor([[0.1, 0.9], [0.8, 0.2]]), torch.tensor([1, 1]))
    tensor(1)
    """
    if output.ndim != 2 or target.shape != output.shape[:1] or target.is_floating_point():
        raise ValueError(
            f"counts correct classes: needs an output of shape (n, classes) and whole numbers of shape (n,), not "
            f"{list(output.shape)} and {target.dtype} of {list(target.shape)}"
        )
    return (output.argmax(1) == target).sum()


ACCURACY = "accuracy"
"""Metric that is shown in percent, and that a target may name."""
Metric = Callable[[Any, Any], Tensor | float]


@dataclass(frozen=True, kw_only=True)
class Task:
    """A model, its data, loss and metric, as functions: each process builds only what it needs.

    `resolve(task.reference, task.data_dir)` makes the same task in another process.

    Raises:
        UsageError: a field is not a function.

    >>> task = Task(model=lambda: nn.Linear(1, 2), train=lambda: [(0.0, 0), (1.0, 1)])
    >>> len(as_data(task.train()))
    2
    """

    model: Callable[[], nn.Module]
    """Function that builds the model."""
    train: Callable[[], Data | Dataset[object] | Sequence[object]]
    """Function that loads the training data, in a form that `as_data` takes."""
    test: Callable[[], Data | Dataset[object] | Sequence[object]] | None = None
    """Function that loads the test data, or None."""
    loss: Callable[[Any, Any], Tensor] = torch.nn.functional.cross_entropy
    """Function of the model's output and the targets: the mean over the minibatch, a scalar."""
    metric: Metric | dict[str, Metric] | None = correct
    """Function of the model's output and the targets: the number of correct samples. Or several functions by name, each
    a sum over samples whose mean is shown; the one named accuracy counts correct samples. None shows the loss alone.
    """
    split: str | None = None
    """Default of `--split` for its model, such as `stages` or `conv*=filters,fc*=neurons`; None lets the price choose.
    """
    reference: str = field(default="", init=False)
    """Built-in name or `module:function`, which `named` sets; a changed copy has none."""
    data_dir: Given[str | None, os.PathLike[str]] = Given(None, os.PathLike, os.fspath)
    """Folder that was named for its data."""

    def named(self, reference: str, data_dir: str | None = None) -> Task:
        """Return the same task with the name that makes it in another process.

        >>> Task(model=lambda: nn.Linear(1, 2), train=lambda: [(0.0, 0)]).named("mine:task").reference
        'mine:task'
        """
        task = replace(self, data_dir=data_dir or self.data_dir)
        object.__setattr__(task, "reference", reference)
        return task

    @property
    def metrics(self) -> Mapping[str, Metric]:
        """Return its metrics by name.

        >>> list(Task(model=lambda: nn.Linear(1, 2), train=list).metrics)
        ['accuracy']
        """
        if isinstance(self.metric, Mapping):
            return self.metric
        return {} if self.metric is None else {ACCURACY: self.metric}

    def __post_init__(self) -> None:
        if isinstance(self.metric, Mapping) and (
            wrong := [name for name in self.metric if not isinstance(name, str) or not name or name == "loss"]
        ):
            raise UsageError(f"a task's metric has the name {wrong[0]!r}: use a word other than loss")
        functions = {name: getattr(self, name) for name in ("model", "train", "test", "loss", "metric")}
        if isinstance(self.metric, Mapping):
            del functions["metric"]
            functions |= {f"metric {name!r}": metric for name, metric in self.metric.items()}
        for name, value in functions.items():
            if (name in ("test", "metric") and value is None) or (
                callable(value) and not (name == "model" and isinstance(value, nn.Module))
            ):
                continue
            raise UsageError(
                f"a task's {name} is a function, not a {type(value).__name__}: write {name}=lambda: ... or name the "
                "function that makes it"
            )
        check_fields(self)


def resolve(reference: str, data_dir: str | None = None) -> Task:
    """Find a built-in task by its name, or make the task of a user's function.

    Args:
        reference: a built-in name, or `module:function`: a module that can be imported, also from the current folder,
            and a function without required arguments that returns a `Task`. `@FILE` may follow: the model begins as
            that compressed file has it, and stays pruned and shared.
        data_dir: folder of the data, for a function with a parameter `data_dir`.

    Raises:
        UsageError: there is no such task, or the function fails.

    >>> resolve("digits").reference
    'digits'
    """
    if MARK in admit(reference, str, f"task={shown(reference)}"):
        whole, _, path = reference.partition(MARK)
        task = resolve(whole, data_dir)
        return replace(task, model=constrained(task.model, whole, path)).named(reference, task.data_dir)
    check_task(reference)
    module = TASKS.get(reference)
    named = f"distbelief.{module}:{reference.replace('-', '_')}" if module else reference
    function = _find(named)
    options = {}
    if data_dir:
        if not _takes_data_dir(function):
            raise UsageError(
                f"--data-dir {data_dir}: task {reference!r} reads no folder: leave it off, or give its function a "
                "parameter data_dir"
            )
        options = {"data_dir": data_dir}
    try:
        task = function(**options)
    # SystemExit too: a user's script may parse its arguments or end itself
    except (Exception, SystemExit) as error:
        raise UsageError(
            f"task {reference!r}: its function raised {type(error).__name__}: {error}; called without arguments, it "
            "must return a Task"
        ) from error
    if not isinstance(task, Task):
        raise UsageError(
            f"task {reference!r}: its function returned {type(task).__name__}; it must return a distbelief.tasks.Task"
        )
    return task.named(reference, data_dir)


def available(reference: str, data_dir: str | None = None) -> str | None:
    """Return in one line why a task's data cannot be had here, or None.

    The test data, or else the training data, are loaded once and downloaded if need be, before many processes do.

    >>> available("digits")
    """
    task = resolve(reference, data_dir)
    try:
        (task.test or task.train)()
    except DataError as error:
        return " ".join(str(error).split())
    except (Exception, SystemExit) as error:
        return f"the data of task {reference!r} cannot be loaded: {type(error).__name__}: {error}"
    return None


def _find(reference: str) -> Callable[..., Task]:
    module, function, error = find("task", reference, "function")
    if not callable(function):
        others = [n for n, value in vars(module).items() if inspect.isfunction(value) and not n.startswith("_")]
        raise UsageError(f"{error}; name a function of it that returns a Task: {', '.join(others) or 'it has none'}")
    return function


def _takes_data_dir(function: Callable[..., Task]) -> bool:
    try:
        return "data_dir" in inspect.signature(function).parameters
    except (TypeError, ValueError):
        return False
