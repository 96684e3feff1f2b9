"""The whole model of a split replica, assembled where it is measured."""

from __future__ import annotations

import functools
from collections.abc import Callable

import torch
from torch import nn

from distbelief.core import roles
from distbelief.core.effects import Measured
from distbelief.sharding.layout import Layout
from distbelief.strategies.context import Context
from distbelief.tasks import Task
from distbelief.tasks.flat import FlatModule
from distbelief.tasks.on_disk import zeros_on_disk
from distbelief.tasks.worker import check_measure, measure


class WholeModel:
    """A whole model, built when first needed, that computes on the values last sent by the partitions.

    These lie in a file, so that the process that measures need not have memory for the whole.

    Args:
        task: has the test set.
        make: builds the whole model, with its large tensors in files.
        layout: the split model's.
    """

    def __init__(self, task: Task, make: Callable[[], nn.Module], layout: Layout) -> None:
        self._task, self._make, self._layout = task, make, layout

    @functools.cached_property
    def _flat(self) -> FlatModule:
        return FlatModule(self._make(), layout=self._layout)

    @functools.cached_property
    def _vector(self) -> torch.Tensor:
        """The vector of the parameters, in a file; what the model was built in is freed."""
        vector = zeros_on_disk(self._layout.total)
        self._flat.bind([], [vector])
        self._flat.swap(0)
        return vector

    def check(self) -> None:
        """Refuse a model that cannot be measured.

        Raises:
            TrainingError: see `check_measure`.
        """
        check_measure(self._task, self._flat.module)

    def collect(self, start: int, data: bytes) -> None:
        """Take a part of the flat vector, from byte `start` on."""
        vector = self._vector
        if data:
            vector[start : start + len(data)] = torch.frombuffer(bytearray(data), dtype=torch.uint8)

    def measure(self) -> Measured:
        """Measure the collected model on the test set."""
        with torch.no_grad():
            self._flat.swap(0)  # tensors that are cut over partitions are copied together
        return measure(self._task, self._flat.module)


def measured_model(context: Context) -> WholeModel | None:
    """Return the whole model of a split replica, for the partition that leads it; None where it is not split.

    The job's first replica, before it joins, refuses a model that cannot be measured.
    """
    first = context.measured and roles.index_of(context.role) == 0 and roles.is_lead(context.role)
    checks = first and context.flat is not None and not context.incarnation
    if context.part is None:
        if checks:
            check_measure(context.task, context.module.module)
        return None
    model = WholeModel(context.task, context.whole, context.vectors.layout)
    if checks:
        model.check()
    return model
