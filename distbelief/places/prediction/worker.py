"""What one process of a prediction does: it loads the models and the samples, and computes those that it is dealt."""

from __future__ import annotations

import os
import sys
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import msgspec
import torch
from torch import Tensor

from distbelief.errors import DistbeliefError, TrainingError, UsageError
from distbelief.places.evaluate import trained
from distbelief.places.prediction.messages import (
    HEADER_ROOM,
    MESSAGE_LIMIT,
    Predict,
    Predicted,
    PredictionSpec,
    Ready,
    Stopped,
    asked,
    encode,
)
from distbelief.places.prediction.models import is_file, read_inputs, samples_of
from distbelief.places.processes.settle import enter
from distbelief.sharding.layout import ITEM_SIZES
from distbelief.tasks import Task, resolve
from distbelief.tasks.worker import metric_sum, on_device, placed


def main(spec: bytes, connection: Connection) -> None:
    """Predict what is asked for until nobody asks any more; an error is told, and ends the process."""
    own = msgspec.msgpack.decode(spec, type=PredictionSpec)
    enter(f"prediction {own.index}", own)
    try:
        predictor = _Predictor(own)
        connection.send_bytes(encode(Ready(len(predictor.data))))
        while True:
            connection.send_bytes(encode(predictor.predict(asked.decode(connection.recv_bytes(MESSAGE_LIMIT)))))
    except EOFError:
        return
    except DistbeliefError as error:
        connection.send_bytes(encode(Stopped(type(error).__name__, str(error))))
        sys.exit(1)


class _Predictor:
    """The models of the runs, and the mean of what they answer."""

    def __init__(self, spec: PredictionSpec) -> None:
        self._spec = spec
        self._task: Task | None = None if is_file(spec.source) else resolve(spec.source, spec.data_dir)
        named = None if self._task is None else self._task.reference
        found = [trained(Path(run), None, spec.device, named, spec.index) for run in spec.runs]
        self._models = [(run, model.eval()) for run, (_, model) in zip(spec.runs, found, strict=True)]
        self.data: Any = read_inputs(spec.source) if self._task is None else samples_of(self._task)
        self._device = placed(spec.device, spec.index)
        self._rows = os.open(spec.rows, os.O_WRONLY)

    def predict(self, portion: Predict) -> Predicted:
        """Compute the outputs of some samples, and write each to its place."""
        whole, loss = range(portion.start, portion.stop), 0.0
        sums = dict.fromkeys(self._task.metrics if self._task else (), 0.0)
        dtype, shape, known = "", [0], True
        for numbers in torch.arange(whole.start, whole.stop).split(self._spec.batch_size):
            inputs, targets = self.data.batch(numbers)
            output = self._mean(on_device(inputs, self._device), numbers)
            if targets is None or self._task is None:
                known = False
            else:
                targets = on_device(targets, self._device)
                for name in sums:
                    sums[name] += metric_sum(self._task, name, output, targets, len(numbers))
                loss += float(self._task.loss(output, targets)) * len(numbers)
            output = output.cpu().contiguous()
            dtype, shape = str(output.dtype).removeprefix("torch."), list(output.shape[1:])
            raw = output.reshape(-1).view(torch.uint8).numpy()
            _write(self._rows, raw.data, HEADER_ROOM + int(numbers[0]) * (len(raw) // len(numbers)))
        return Predicted(portion.start, portion.stop, dtype, shape, sums, loss if known else None)

    def _mean(self, inputs: Any, numbers: Tensor) -> Tensor:
        """The mean of what the models answer; of one model, its answer."""
        total: Tensor | None = None
        for run, model in self._models:
            output = self._answer(run, model, inputs, numbers)
            if total is not None and (total.shape, total.dtype) != (output.shape, output.dtype):
                raise UsageError(
                    f"the model of {run} answers {_described(output)} to {len(numbers)} samples, that of "
                    f"{self._models[0][0]} {_described(total)}: they have no mean; predict with each by itself"
                )
            total = output if total is None else total + output
        assert total is not None
        return total if len(self._models) == 1 else total / len(self._models)

    def _answer(self, run: str, model: torch.nn.Module, inputs: Any, numbers: Tensor) -> Tensor:
        where = f"the model of {run}, of samples {int(numbers[0])} to {int(numbers[-1])},"
        try:
            with torch.no_grad():
                output = model(inputs)
        except (Exception, SystemExit) as error:
            raise TrainingError(f"{where} raised {type(error).__name__}: {error}") from error
        if not isinstance(output, Tensor) or not output.ndim or len(output) != len(numbers):
            told = _described(output) if isinstance(output, Tensor) else f"a {type(output).__name__}"
            raise UsageError(f"{where} answers {told}: it must be one tensor, with the samples in its first dimension")
        if str(output.dtype).removeprefix("torch.") not in ITEM_SIZES:
            raise UsageError(f"{where} answers {_described(output)}, which cannot be written: answer real numbers")
        if len(self._models) > 1 and not output.is_floating_point():
            raise UsageError(f"{where} answers {_described(output)}, which has no mean: predict with one run")
        return output


def _described(tensor: Tensor) -> str:
    return f"{list(tensor.shape)} {str(tensor.dtype).removeprefix('torch.')}"


def _write(descriptor: int, data: memoryview, offset: int) -> None:
    while data:
        written = os.pwrite(descriptor, data, offset)
        data, offset = data[written:], offset + written
