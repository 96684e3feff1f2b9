"""The trained models and the samples of a prediction, from run folders, compressed files, tasks and files of inputs."""

from __future__ import annotations

from pathlib import Path

import numpy
import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from distbelief.errors import DataError, UsageError
from distbelief.tasks.task import Data, Task
from distbelief.tasks.worker import load

SUFFIXES = (".safetensors", ".npy")
"""Of files of inputs."""
INPUTS = "inputs"
"""The tensor of a safetensors file that holds them."""


def is_file(source: str) -> bool:
    """Whether that names a file of inputs, and not a task.

    >>> is_file("new.npy"), is_file("mnist")
    (True, False)
    """
    return source.endswith(SUFFIXES)


class InputData:
    """Samples without targets.

    >>> data = InputData(torch.tensor([[1.0], [2.0], [3.0]]))
    >>> len(data), data.batch(torch.tensor([2]))
    (3, (tensor([[3.]]), None))
    """

    def __init__(self, inputs: Tensor) -> None:
        self.inputs = inputs

    def __len__(self) -> int:
        return len(self.inputs)

    def batch(self, indices: Tensor) -> tuple[Tensor, None]:
        """The inputs of the samples `indices`, and None for their targets."""
        return self.inputs.index_select(0, indices), None


def read_inputs(source: str) -> InputData:
    """The inputs in a file, samples in the first dimension: `inputs` of a safetensors file, or an array of numpy.

    Raises:
        DataError: there is no such file, it holds no such tensor or no sample, or it is damaged.
    """
    path = Path(source)
    if not path.is_file():
        raise DataError(f"there is no file {source}: name one of inputs ({' or '.join(SUFFIXES)}), or a task")
    inputs = _of_safetensors(path) if path.suffix == SUFFIXES[0] else _of_numpy(path)
    if not inputs.ndim or not len(inputs):
        raise DataError(f"{source} holds inputs of shape {list(inputs.shape)}: its first dimension counts the samples")
    return InputData(inputs)


def _of_safetensors(path: Path) -> Tensor:
    try:
        with safe_open(path, framework="pt") as file:
            if INPUTS in (names := sorted(file.keys())):
                inputs: Tensor = file.get_tensor(INPUTS)
                return inputs
    except (SafetensorError, OSError) as error:
        raise DataError(f"{path} cannot be read as safetensors: {error}; write it anew") from error
    raise DataError(f"{path} holds {', '.join(names) or 'nothing'}: name the tensor of inputs {INPUTS!r}")


def _of_numpy(path: Path) -> Tensor:
    try:
        return torch.from_numpy(numpy.load(path, allow_pickle=False))
    except (ValueError, TypeError, OSError, EOFError) as error:
        raise DataError(f"{path} cannot be read as an array of numbers: {error}; write it with numpy.save") from error


def samples_of(task: Task) -> Data:
    """The samples of a task that are predicted: its test set.

    Raises:
        UsageError: it has none.
        DistbeliefError: as `load`.
    """
    if task.test is None:
        raise UsageError(f"task {task.reference!r} has no test set: give it one, or name a file of inputs")
    return load(task, "test")
