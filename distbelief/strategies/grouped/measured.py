"""The whole model of a split replica, put together where it is measured."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import nn

from distbelief.core import roles
from distbelief.core.effects import Measured
from distbelief.sharding.layout import Layout
from distbelief.strategies.context import Context
from distbelief.tasks import Task
from distbelief.tasks.flat import FlatModule
from distbelief.tasks.worker import check_measure, measure


class WholeModel:
    """A model that is made when it is first needed, and holds what the partitions have last sent of theirs.

    Args:
        task: that it is measured on.
        make: makes the whole model.
        layout: of the model, split.
    """

    def __init__(self, task: Task, make: Callable[[], nn.Module], layout: Layout) -> None:
        self._task, self._make, self._layout = task, make, layout
        self._made: FlatModule | None = None
        self._vector = torch.zeros(0, dtype=torch.uint8)

    def check(self) -> None:
        """Refuse a model that cannot be measured.

        Raises:
            TrainingError: as `check_measure`.
        """
        check_measure(self._task, self._make())

    def collect(self, start: int, data: bytes) -> None:
        """A part of the flat vector, from byte `start` on."""
        if not len(self._vector):
            self._vector = torch.zeros(self._layout.total, dtype=torch.uint8)
        if data:
            self._vector[start : start + len(data)] = torch.frombuffer(bytearray(data), dtype=torch.uint8)

    def measure(self) -> Measured:
        """What was collected, on the test set."""
        made = self._made = self._made or FlatModule(self._make(), layout=self._layout)
        with torch.no_grad():
            made.read(self._vector)
        return measure(self._task, made.module)


def measured_model(context: Context) -> WholeModel | None:
    """The whole model of a split replica, of the partition that leads it; None where that holds the model itself. The
    first replica refuses a model that cannot be measured.
    """
    first = context.measured and roles.index_of(context.role) == 0 and roles.is_lead(context.role)
    if context.part is None:
        if first and context.flat and not (context.virtual and context.incarnation):
            check_measure(context.task, context.flat.module)
        return None
    model = WholeModel(context.task, context.whole, context.layout)
    if first and context.flat and not context.incarnation:
        model.check()
    return model
