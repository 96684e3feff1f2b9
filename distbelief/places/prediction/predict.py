"""Predicts with trained models: processes compute the outputs of samples, which one file holds in their order."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import BinaryIO

import msgspec

from distbelief import errors
from distbelief.core import roles
from distbelief.core.records import Json
from distbelief.core.values import admit, device_number, shown
from distbelief.errors import DataError, Interrupted, JobFailed, UsageError, limit
from distbelief.fabric.shared_memory import in_order
from distbelief.places.prediction.dealing import IN_HAND, PORTION_BATCHES, SampleDealing
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
    title,
)
from distbelief.places.prediction.models import is_file
from distbelief.places.prediction.worker import main
from distbelief.places.processes import forkserver
from distbelief.places.processes.peers import lend
from distbelief.record.folder import written_whole
from distbelief.record.model_file import header
from distbelief.sharding.layout import Tensor
from distbelief.sharding.mesh import Mesh
from distbelief.split.options import AUTO, Split
from distbelief.tasks import available
from distbelief.tasks.task import ACCURACY

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
    partitions: int = 1,
    split: str = AUTO,
    told: Callable[[str], object] = bool,
) -> Json:
    """What the model of a run, or the mean of several, answers to samples, written to a file in their order.

    A process that is killed costs what its replica was computing, which another computes again.

    Args:
        runs: run folders or compressed files; of several, the mean of their models' outputs is written.
        source: a task, whose test set is predicted; or a file of inputs: `.safetensors` (the tensor `inputs`) or
            `.npy`, samples in the first dimension, as the models take them.
        out: the file; its tensor `outputs` has the samples in its first dimension.
        replicas: computing, each with all models: processes, or as many partitions each.
        batch_size: samples that are computed at once.
        data_dir: folder of the task's data.
        device: where to compute, as a job's.
        threads: of torch, in each process.
        partitions: processes over which each replica is split, each with its own part of every model.
        split: how they are, as a job of split replicas says it: a way, or `PATTERN=WAY,...`; or `auto`.
        told: is handed how far it is, in words.

    Returns:
        runs, data, out, samples, shape (of the output of one sample), replicas, partitions, splits (how each model is,
        where replicas are split), seconds, samples_per_second, and for a task test_accuracy (0 to 1), test_metrics and
        test_loss of what was written, as `evaluate` has them.

    Raises:
        UsageError: a value that cannot be used, no such run or task, models whose outputs have no mean, or one that
            cannot be split so.
        CheckpointError, LayoutError: a run has no model, or another one than its task builds.
        DataError: the samples cannot be had.
        TrainingError: a model raised.
        JobFailed: every process was killed.
    """
    several = [runs] if isinstance(runs, str | os.PathLike) else runs
    paths = [os.fspath(admit(run, str | os.PathLike, f"predict(runs={shown(runs)})")) for run in several]
    file = Path(admit(out, str | os.PathLike, f"predict(out={shown(out)})"))
    counts = {"replicas": replicas, "batch_size": batch_size, "threads": threads, "partitions": partitions}
    _check(paths, source, file, counts)
    _check_split(partitions, split)
    device_number(admit(device, str, f"predict(device={shown(device)})"))
    if not is_file(source) and (why := available(source, data_dir)):
        raise DataError(why)
    forkserver.start(partitions > 1)
    began = time.monotonic()
    with _output(file) as rows:
        spec = PredictionSpec(
            role="", partitions=partitions, split=split, runs=paths, source=source, data_dir=data_dir, device=device,
            batch_size=batch_size, rows=rows.name, threads=threads, supervisor=os.getpid(), forkserver=forkserver.pid(),
            path=[os.getcwd(), *sys.path], directory=os.getcwd(), environment=dict(os.environb),
        )  # fmt: skip
        with contextlib.closing(_Prediction(spec, replicas, told)) as prediction:
            prediction.run()
            prediction.write_header(rows)
    seconds = time.monotonic() - began
    return {
        "runs": paths, "data": source, "out": str(file), "samples": prediction.samples,
        "shape": prediction.first.shape, "replicas": replicas, "partitions": partitions, "splits": prediction.splits,
        "seconds": seconds, "samples_per_second": prediction.samples / seconds, **prediction.figures,
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


def _check_split(partitions: int, split: str) -> None:
    admit(split, str, f"predict(split={shown(split)})")
    if partitions == 1 and split != AUTO:
        raise UsageError(
            f"--split {split}: says how replicas are split, and they are whole: give --partitions 2 or more, or leave "
            "it off"
        )
    if partitions == 1:
        return
    Split(AUTO, partitions)  # refuses too many
    if not in_order():
        raise UsageError(
            f"--partitions {partitions}: what crosses between partitions lies in memory that processors of the x86-64 "
            "kind see written in order, which this machine has none of: leave it off"
        )


@contextlib.contextmanager
def _output(out: Path) -> Iterator[BinaryIO]:
    """The file to write to, which is gone after an error."""
    try:
        with written_whole(out) as rows:
            yield rows
    except OSError as error:
        raise UsageError(f"--out {out}: cannot be written: {limit(error) or error.strerror}") from error


class _Prediction:
    """Processes that compute, and who asks them."""

    def __init__(self, spec: PredictionSpec, replicas: int, told: Callable[[str], object]) -> None:
        self._spec, self._told = spec, told
        self._there: dict[Connection, tuple[str, BaseProcess]] = {}
        """The role and the process behind each."""
        self._lent = contextlib.ExitStack()
        """What they share."""
        self._idle: list[int] = []
        """Replicas for which nothing was left, each as often as it has asked."""
        self._dealing: SampleDealing | None = None
        self._results: list[Predicted] = []
        self.splits: list[str] = []
        """How each model is split, where they are."""
        everybody = roles.replicas(Mesh(replicas, spec.partitions))
        try:
            for role in everybody:
                if roles.is_lead(role) and spec.partitions > 1:
                    spec = self._lend(spec)
                own = msgspec.structs.replace(spec, role=role)
                process, connection = forkserver.fork(title(role), main, encode(own))
                self._there[connection] = role, process
        except (OSError, EOFError) as error:
            self.close()
            raise JobFailed(
                f"process {len(self._there)} of {len(everybody)} cannot be started ({limit(error) or error}); have "
                "fewer --replicas"
            ) from error
        except BaseException:  # Ctrl-C
            self.close()
            raise

    def _lend(self, spec: PredictionSpec) -> PredictionSpec:
        """What the partitions of a replica share: memory, whose size they know, and a pipe to wake each."""
        memory, pipes = self._lent.enter_context(lend()), []
        for _ in range(spec.partitions):
            own, other = os.pipe()
            os.close(other)
            self._lent.callback(os.close, own)
            pipes.append(own)
        return msgspec.structs.replace(spec, memory=memory, pipes=tuple(pipes))

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
    def figures(self) -> Json:
        """The task's metrics and loss of all that was answered; nothing where the targets are not known."""
        losses = [result.loss for result in self._results if result.loss is not None]
        if not losses:
            return {}
        means = {
            name: sum(result.metrics[name] for result in self._results) / self.samples for name in self.first.metrics
        }
        figures = {"test_accuracy": means.pop(ACCURACY, None), "test_metrics": means}
        return {**figures, "test_loss": sum(losses) / self.samples}

    def run(self) -> None:
        """Have all samples computed."""
        try:
            while self._dealing is None or self._dealing.done < self._dealing.samples:
                for connection in wait(list(self._there)):
                    assert isinstance(connection, Connection)
                    if connection in self._there:  # one whose replica has just ended is not
                        self._hear(connection)
        except KeyboardInterrupt:
            raise Interrupted("the prediction was interrupted; nothing of it is left") from None

    def write_header(self, rows: BinaryIO) -> None:
        """Write what the file of the outputs begins with, once these are known."""
        held = Tensor(OUTPUTS, (self.samples, *self.first.shape), self.first.dtype)
        rows.write(header([held], HEADER_ROOM))

    def _hear(self, connection: Connection) -> None:
        replica = roles.index_of(self._there[connection][0])
        try:
            word = answered.decode(connection.recv_bytes(MESSAGE_LIMIT))
        except (EOFError, OSError):
            self._take_end(connection)
            return
        if isinstance(word, Stopped):
            raise getattr(errors, word.kind, JobFailed)(word.text)
        if isinstance(word, Ready):
            self._dealing = self._dealing or SampleDealing(word.samples, PORTION_BATCHES * self._spec.batch_size)
            self.splits = word.splits
            for _ in range(IN_HAND if self._spec.partitions > 1 else 1):
                self._ask(replica)
        else:
            self._take(replica, word)
            self._ask(replica)

    def _take(self, replica: int, word: Predicted) -> None:
        assert self._dealing is not None
        self._results.append(word)
        if (word.dtype, word.shape) != (self.first.dtype, self.first.shape):
            raise UsageError(
                f"outputs of {self.first.dtype} {self.first.shape} for a sample at first, of {word.dtype} {word.shape} "
                f"for samples {word.start} to {word.stop - 1}: one tensor cannot hold them"
            )
        self._told(f"{self._dealing.take_done(replica):,} of {self._dealing.samples:,} samples")

    def _ask(self, replica: int) -> None:
        """Deal to a replica; one for which nothing is left waits: another may be killed before it is done."""
        assert self._dealing is not None
        if (portion := self._dealing.next_for(replica)) is None:
            self._idle.append(replica)
            return
        for connection in self._of(replica):
            with contextlib.suppress(BrokenPipeError):  # its end is heard
                connection.send_bytes(encode(Predict(*portion)))

    def _of(self, replica: int) -> list[Connection]:
        return [connection for connection, (role, _) in self._there.items() if roles.index_of(role) == replica]

    def _take_end(self, connection: Connection) -> None:
        """A process was killed: its replica ends with it, and others compute what it had."""
        role, process = self._there[connection]
        process.join()
        status = process.exitcode
        assert status is not None  # it has ended
        how = f"killed by {signal.Signals(-status).name}" if status < 0 else f"ended with status {status}"
        replica = roles.index_of(role)
        self._end(self._of(replica))
        if not self._there:
            raise JobFailed(
                f"every process of the prediction has ended, the last {how}; have fewer --replicas, or each in more "
                "--partitions"
            )
        self._told(f"{title(role)} was {how}: the others compute what it had")
        if self._dealing is not None:
            self._dealing.take_end(replica)
        idle, self._idle = [one for one in self._idle if one != replica], []
        for one in idle:
            self._ask(one)

    def _end(self, connections: Iterable[Connection]) -> None:
        for connection in connections:
            _, process = self._there.pop(connection)
            process.kill()
            process.join()
            connection.close()

    def close(self) -> None:
        """Leave no process behind."""
        self._end(list(self._there))
        self._lent.close()
