"""The whole model of a split replica, put together where it is measured."""

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
    """A model that is made when it is first needed, and computes on what the partitions have last sent of theirs, in a
    vector that lies in a file: who measures need not have room for the whole.

    Args:
        task: that it is measured on.
        make: makes the whole model, with its large tensors in files.
        layout: of the model, split.
    """

    def __init__(self, task: Task, make: Callable[[], nn.Module], layout: Layout) -> None:
        self._task, self._make, self._layout = task, make, layout

    @functools.cached_property
    def _flat(self) -> FlatModule:
        return FlatModule(self._make(), layout=self._layout)

    @functools.cached_property
    def _vector(self) -> torch.Tensor:
        """Return the vector of the parameters; what the model was built with is gone."""
        vector = zeros_on_disk(self._layout.total)
        self._flat.bind([], [vector])
        self._flat.swap(0)
        return vector

    def check(self) -> None:
        """Refuse a model that cannot be measured.

        Raises:
            TrainingError: as `check_measure`.
        """
        check_measure(self._task, self._flat.module)

    def collect(self, start: int, data: bytes) -> None:
        """A part of the flat vector, from byte `start` on."""
        vector = self._vector
        if data:
            vector[start : start + len(data)] = torch.frombuffer(bytearray(data), dtype=torch.uint8)

    def measure(self) -> Measured:
        """Measure what was collected, on the test set."""
        with torch.no_grad():
            self._flat.swap(0)  # pieces of tensors that are cut are copied
        return measure(self._task, self._flat.module)


def measured_model(context: Context) -> WholeModel | None:
    """The whole model of a split replica, of the partition that leads it; None where that holds the model itself. The
    first replica refuses a model that cannot be measured.
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
