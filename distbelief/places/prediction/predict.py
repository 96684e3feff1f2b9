"""Predicts with trained models: processes compute the outputs of samples, which one file holds in their order."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

import msgspec

from distbelief import errors
from distbelief.core.values import admit, device_number, shown
from distbelief.errors import DataError, Interrupted, JobFailed, UsageError, limit
from distbelief.places.prediction.dealing import SampleDealing
from distbelief.places.prediction.messages import (
    HEADER_ROOM,
    MESSAGE_LIMIT,
    Predict,
    Predicted,
    PredictionSpec,
    Ready,
    Stopped,
    answered,
    encode,
)
from distbelief.places.prediction.models import is_file
from distbelief.places.prediction.worker import main
from distbelief.places.processes import forkserver
from distbelief.record.model_file import header
from distbelief.sharding.layout import Tensor
from distbelief.tasks import available
from distbelief.tasks.task import ACCURACY

PORTION_BATCHES = 4
"""Batches that a process is dealt at a time."""
OUTPUTS = "outputs"
"""The tensor of the file."""


def predict(
    runs: str | os.PathLike[str] | Sequence[str | os.PathLike[str]],
    source: str,
    out: str | os.PathLike[str],
    replicas: int = 2,
    batch_size: int = 1000,
    data_dir: str | None = None,
    device: str = "cpu",
    threads: int = 1,
    told: Callable[[str], object] = bool,
) -> dict[str, Any]:
    """What the model of a run, or the mean of several, answers to samples, written to a file in their order.

    A process that is killed costs what it was computing, which another computes again.

    Args:
        runs: run folders or compressed files; of several, the mean of their models' outputs is written.
        source: a task, whose test set is predicted; or a file of inputs: `.safetensors` (the tensor `inputs`) or
            `.npy`, samples in the first dimension, as the models take them.
        out: the file; its tensor `outputs` has the samples in its first dimension.
        replicas: processes that compute, each with all models.
        batch_size: samples that are computed at once.
        data_dir: folder of the task's data.
        device: where to compute, as a job's.
        threads: of torch, in each process.
        told: is handed how far it is, in words.

    Returns:
        runs, data, out, samples, shape (of the output of one sample), replicas, seconds, samples_per_second, and for a
        task test_accuracy (0 to 1), test_metrics and test_loss of what was written, as `evaluate` has them.

    Raises:
        UsageError: a value that cannot be used, no such run or task, or models whose outputs have no mean.
        CheckpointError, LayoutError: a run has no model, or another one than its task builds.
        DataError: the samples cannot be had.
        TrainingError: a model raised.
        JobFailed: every process was killed.
    """
    several = [runs] if isinstance(runs, str | os.PathLike) else runs
    paths = [os.fspath(admit(run, str | os.PathLike, f"predict(runs={shown(runs)})")) for run in several]
    file = Path(admit(out, str | os.PathLike, f"predict(out={shown(out)})"))
    _check(paths, source, file, {"replicas": replicas, "batch_size": batch_size, "threads": threads})
    device_number(admit(device, str, f"predict(device={shown(device)})"))
    if not is_file(source) and (why := available(source, data_dir)):
        raise DataError(why)
    forkserver.start()
    began = time.monotonic()
    with _written_whole(file) as rows:
        spec = PredictionSpec(
            index=0, runs=paths, source=source, data_dir=data_dir, device=device, batch_size=batch_size, rows=str(rows),
            threads=threads, supervisor=os.getpid(), forkserver=forkserver.pid(), path=[os.getcwd(), *sys.path],
            directory=os.getcwd(), environment=dict(os.environb),
        )  # fmt: skip
        with contextlib.closing(_Prediction(spec, replicas, told)) as prediction:
            prediction.run()
        samples, first = prediction.samples, prediction.first
        held = Tensor(OUTPUTS, (samples, *first.shape), first.dtype)
        with rows.open("r+b") as begun:
            begun.write(header([held], HEADER_ROOM))
    seconds = time.monotonic() - began
    return {
        "runs": paths, "data": source, "out": str(file), "samples": samples, "shape": first.shape,
        "replicas": replicas, "seconds": seconds, "samples_per_second": samples / seconds, **prediction.figures,
    }  # fmt: skip


def _check(runs: Sequence[str], source: str, out: Path, counts: dict[str, int]) -> None:
    for name, count in counts.items():
        if admit(count, int, f"predict({name}={shown(count)})") < 1:
            raise UsageError(f"--{name.replace('_', '-')} {count}: must be 1 or more")
    if not runs:
        raise UsageError("no run to predict with: name its folder, or a compressed file")
    if not out.parent.is_dir() or out.is_dir():
        raise UsageError(f"--out {out}: {'is a folder' if out.is_dir() else f'there is no folder {out.parent}'}")
    if out.suffix != ".safetensors":
        raise UsageError(f"--out {out}: outputs are written as safetensors: name it {out.with_suffix('.safetensors')}")
    admit(source, str, f"predict(source={shown(source)})")


@contextlib.contextmanager
def _written_whole(out: Path) -> Iterator[Path]:
    """A file beside `out` to write to, which takes its place at the end, and is gone after an error."""
    try:
        descriptor, name = tempfile.mkstemp(dir=out.parent, prefix=f".{out.name}.")
    except OSError as error:
        raise UsageError(f"--out {out}: cannot be written: {limit(error) or error.strerror}") from error
    os.close(descriptor)
    try:
        yield Path(name)
        os.chmod(name, 0o644)
        os.replace(name, out)
    finally:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(name)


class _Prediction:
    """Processes that compute, and who asks them."""

    def __init__(self, spec: PredictionSpec, replicas: int, told: Callable[[str], object]) -> None:
        self._spec, self._told = spec, told
        self._there: dict[Connection, tuple[int, Any]] = {}
        self._idle: list[Connection] = []
        self._dealing: SampleDealing | None = None
        self._results: list[Predicted] = []
        try:
            for index in range(replicas):
                own = msgspec.structs.replace(spec, index=index)
                process, connection = forkserver.fork(f"prediction {index}", main, encode(own))
                self._there[connection] = index, process
        except (OSError, EOFError) as error:
            self.close()
            raise JobFailed(
                f"process {index} of {replicas} cannot be started ({limit(error) or error}); have fewer --replicas"
            ) from error

    @property
    def samples(self) -> int:
        """How many there are."""
        assert self._dealing is not None
        return self._dealing.samples

    @property
    def first(self) -> Predicted:
        """What was answered first: all are of its dtype and shape."""
        return self._results[0]

    @property
    def figures(self) -> dict[str, Any]:
        """The task's metrics and loss of all that was answered; nothing where the targets are not known."""
        losses = [one.loss for one in self._results if one.loss is not None]
        if not losses:
            return {}
        means = {name: sum(one.metrics[name] for one in self._results) / self.samples for name in self.first.metrics}
        figures = {"test_accuracy": means.pop(ACCURACY, None), "test_metrics": means}
        return {**figures, "test_loss": sum(losses) / self.samples}

    def run(self) -> None:
        """Have all samples computed."""
        try:
            while self._dealing is None or self._dealing.done < self._dealing.samples:
                for connection in wait(list(self._there)):
                    assert isinstance(connection, Connection)
                    self._hear(connection)
        except KeyboardInterrupt:
            raise Interrupted("the prediction was interrupted; nothing of it is left") from None

    def _hear(self, connection: Connection) -> None:
        index, process = self._there[connection]
        try:
            word = answered.decode(connection.recv_bytes(MESSAGE_LIMIT))
        except (EOFError, OSError):
            self._take_end(connection, index, process)
            return
        if isinstance(word, Stopped):
            raise getattr(errors, word.kind, JobFailed)(word.text)
        if isinstance(word, Ready):
            self._dealing = self._dealing or SampleDealing(word.samples, PORTION_BATCHES * self._spec.batch_size)
        else:
            self._take(index, word)
        self._ask(connection)

    def _take(self, index: int, word: Predicted) -> None:
        assert self._dealing is not None
        self._results.append(word)
        if (word.dtype, word.shape) != (self.first.dtype, self.first.shape):
            raise UsageError(
                f"outputs of {self.first.dtype} {self.first.shape} for a sample at first, of {word.dtype} {word.shape} "
                f"for samples {word.start} to {word.stop - 1}: one tensor cannot hold them"
            )
        self._told(f"{self._dealing.take_done(index):,} of {self._dealing.samples:,} samples")

    def _ask(self, connection: Connection) -> None:
        """Deal to a process; one for which nothing is left waits: another may be killed before it is done."""
        assert self._dealing is not None
        if (portion := self._dealing.next_for(self._there[connection][0])) is None:
            self._idle.append(connection)
        else:
            with contextlib.suppress(BrokenPipeError):  # its end is heard
                connection.send_bytes(encode(Predict(*portion)))

    def _take_end(self, connection: Connection, index: int, process: Any) -> None:
        """A process was killed: others compute what it had."""
        process.join()
        del self._there[connection]
        connection.close()
        status = process.exitcode
        how = f"killed by {signal.Signals(-status).name}" if status < 0 else f"ended with status {status}"
        if not self._there:
            raise JobFailed(f"every process of the prediction has ended, the last {how}; have fewer --replicas")
        self._told(f"process {index} was {how}: the others compute what it had")
        if self._dealing is not None:
            self._dealing.take_end(index)
        idle, self._idle = [one for one in self._idle if one in self._there], []
        for one in idle:
            self._ask(one)

    def close(self) -> None:
        """Leave no process behind."""
        for connection, (_, process) in self._there.items():
            process.kill()
            process.join()
            connection.close()
        self._there.clear()
