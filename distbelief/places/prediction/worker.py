"""What one process of a prediction does: it loads the models, or its parts of them, and the samples, and computes those
that it is dealt.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path

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
    title,
)
from distbelief.places.prediction.models import is_file, read_inputs, samples_of
from distbelief.places.prediction.split_model import split_models
from distbelief.places.processes.settle import enter
from distbelief.sharding.layout import ITEM_SIZES
from distbelief.split.tracing import examples
from distbelief.tasks import Task, resolve
from distbelief.tasks.task import Data
from distbelief.tasks.worker import metric_sum, on_device, placed


def main(spec: bytes, connection: Connection) -> None:
    """Predict what is asked for until nobody asks any more; an error is told, and ends the process."""
    own = msgspec.msgpack.decode(spec, type=PredictionSpec)
    enter(title(own.role), own)
    try:
        predictor = _Predictor(own)
        if predictor.outputs:
            connection.send_bytes(encode(Ready(len(predictor.data), predictor.splits)))
        while True:
            word = asked.decode(connection.recv_bytes(MESSAGE_LIMIT))
            if (answer := predictor.predict(word)) is not None:
                connection.send_bytes(encode(answer))
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
        self.data: Data = read_inputs(spec.source) if self._task is None else samples_of(self._task)
        self.splits: list[str] = []
        self.outputs = True
        """Whether the outputs of the models are here."""
        models: list[Callable[[object], object]]
        if spec.partitions == 1:
            models = [trained(Path(run), None, spec.device, named, spec.number)[1].eval() for run in spec.runs]
        else:
            inputs, _ = self.data.batch(examples(len(self.data)))
            models, self.splits, self.outputs = split_models(spec, named, inputs)
        self._models = [*zip(spec.runs, models, strict=True)]
        self._device = placed(spec.device, spec.number)
        self._rows = os.open(spec.rows, os.O_WRONLY)

    def predict(self, portion: Predict) -> Predicted | None:
        """Compute the outputs of some samples, and write each to its place; None where another partition does."""
        whole, loss = range(portion.start, portion.stop), 0.0
        sums = dict.fromkeys(self._task.metrics if self._task else (), 0.0)
        dtype, shape, known = "", [0], True
        for numbers in torch.arange(whole.start, whole.stop).split(self._spec.batch_size):
            inputs, targets = self.data.batch(numbers)
            output = self._mean(on_device(inputs, self._device), numbers)
            if output is None:
                continue
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
        if not self.outputs:
            return None
        return Predicted(portion.start, portion.stop, dtype, shape, sums, loss if known else None)

    def _mean(self, inputs: object, numbers: Tensor) -> Tensor | None:
        """The mean of what the models answer; of one model, its answer; None where another partition has them."""
        total: Tensor | None = None
        for run, model in self._models:
            where = f"the model of {run}, of samples {int(numbers[0])} to {int(numbers[-1])},"
            answer = _answer(where, model, inputs)
            if not self.outputs:
                continue
            output = self._checked(where, answer, len(numbers))
            if total is not None and (total.shape, total.dtype) != (output.shape, output.dtype):
                raise UsageError(
                    f"the model of {run} answers {_described(output)} to {len(numbers)} samples, that of "
                    f"{self._models[0][0]} {_described(total)}: they have no mean; predict with each by itself"
                )
            total = output if total is None else total + output
        return total if total is None or len(self._models) == 1 else total / len(self._models)

    def _checked(self, where: str, output: object, samples: int) -> Tensor:
        """An output, refused where it cannot be written, or has no mean with others."""
        if not isinstance(output, Tensor) or not output.ndim or len(output) != samples:
            told = _described(output) if isinstance(output, Tensor) else f"a {type(output).__name__}"
            raise UsageError(f"{where} answers {told}: it must be one tensor, with the samples in its first dimension")
        if str(output.dtype).removeprefix("torch.") not in ITEM_SIZES:
            raise UsageError(f"{where} answers {_described(output)}, which cannot be written: answer real numbers")
        if len(self._models) > 1 and not output.is_floating_point():
            raise UsageError(f"{where} answers {_described(output)}, which has no mean: predict with one run")
        return output


def _answer(where: str, model: Callable[[object], object], inputs: object) -> object:
    try:
        with torch.no_grad():
            return model(inputs)
    except (Exception, SystemExit) as error:
        raise TrainingError(f"{where} raised {type(error).__name__}: {error}") from error


def _described(tensor: Tensor) -> str:
    return f"{list(tensor.shape)} {str(tensor.dtype).removeprefix('torch.')}"


def _write(descriptor: int, data: memoryview, offset: int) -> None:
    while data:
        written = os.pwrite(descriptor, data, offset)
        data, offset = data[written:], offset + written
