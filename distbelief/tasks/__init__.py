"""Tasks: model, data, loss and metric, by name or by a user's own function."""

from distbelief.tasks.digits import digits, mnist, mnist_lenet
from distbelief.tasks.task import Data, Task, TensorData, as_data, available, resolve

__all__ = ["Data", "Task", "TensorData", "as_data", "available", "digits", "mnist", "mnist_lenet", "resolve"]
