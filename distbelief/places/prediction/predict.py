"""Predictions of trained models: processes compute outputs, and write them to one file in the order of the samples."""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections import defaultdict, deque
from collections.abc import Callable, Iterator, Sequence
from multiprocessing.connection import wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import BinaryIO

import msgspec

from distbelief.core import roles
from distbelief.core.records import Json
from distbelief.core.roles import Mesh
from distbelief.core.values import admit, device_number, shown
from distbelief.errors import DataError, Interrupted, JobFailed, UsageError, limit
from distbelief.fabric.order import check_order
from distbelief.places.channel import OF_PREDICTION, Channel
from distbelief.places.evaluate import figures_of
from distbelief.places.messages import Failed, Predicted, PredictionReady, PredictPortion
from distbelief.places.prediction.worker import HEADER_ROOM, PredictionSpec, is_file, main
from distbelief.places.processes import forkserver
from distbelief.places.processes.lending import lend
from distbelief.places.processes.processes import GRACE, here
from distbelief.record.folder import check_output, written_whole
from distbelief.record.model_file import header
from distbelief.sharding.layout import Tensor
from distbelief.split.options import AUTO, Split
from distbelief.tasks import available
from distbelief.tasks.worker import mean_of

OUTPUTS = "outputs"
"""Name of the tensor in the file."""
SMALL, PORTION_BATCHES = 64, 4
"""Batches of fewer than `SMALL` samples are dealt `PORTION_BATCHES` at a time, since each message has a cost; others
one by one.
"""


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
    """Write the outputs of a run's model, or the mean of those of several models, in the order of the samples.

    If a process is killed, the other replicas compute again the samples that its replica had.

    Args:
        runs: run folders or compressed files; with several, the mean of their models' outputs is written.
        source: a task, to predict its test set; or a file of inputs: `.safetensors` (the tensor `inputs`) or
            `.npy`, with samples in the first dimension, as the models take them.
        out: the file; its tensor `outputs` has the samples in its first dimension.
        replicas: number of replicas, each with all models; each is one process, or `partitions` processes.
        batch_size: samples that are computed at once.
        data_dir: folder of the task's data.
        device: device that computes, as in a job.
        threads: torch's threads in each process.
        partitions: processes over which each replica is split, each with its own part of every model.
        split: way to split them, as in a job: a way, or `PATTERN=WAY,...`; or `auto`.
        told: called with each text about the progress.

    Returns:
        runs, data, out, samples, shape (of the output of one sample), replicas, partitions, splits (of each model,
        if replicas are split), seconds, samples_per_second, and for a task test_accuracy, test_metrics and test_loss
        of the written outputs, as from `evaluate`.

    Raises:
        UsageError: a value that cannot be used, no such run or task, outputs without a mean, an impossible split.
        CheckpointError, LayoutError: a run has no model, or a different one from that of its task.
        DataError: the samples are missing or damaged.
        TrainingError: a model raised an error.
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
            partitions=partitions, split=split, runs=paths, source=source, data_dir=data_dir, device=device,
            batch_size=batch_size, out=str(file), rows=rows.name, threads=threads,
            forkserver=forkserver.pid(), **here(),
        )  # fmt: skip
        with contextlib.closing(Pool(spec, told)) as pool:
            first = pool.run(replicas)
        rows.write(header([Tensor(OUTPUTS, (pool.samples, *first.shape), first.dtype)], HEADER_ROOM))
    seconds = time.monotonic() - began
    return {
        "runs": paths, "data": source, "out": str(file), "samples": pool.samples, "shape": first.shape,
        "replicas": replicas, "partitions": partitions, "splits": pool.splits, "seconds": seconds,
        "samples_per_second": pool.samples / seconds, **pool.figures,
    }  # fmt: skip


def _check(runs: Sequence[str], source: str, out: Path, counts: dict[str, int]) -> None:
    for name, count in counts.items():
        if admit(count, int, f"predict({name}={shown(count)})") < 1:
            raise UsageError(f"--{name.replace('_', '-')} {count}: must be 1 or more")
    if not runs:
        raise UsageError("no run to predict with: name its folder, or a compressed file")
    check_output(out)
    if out.suffix != ".safetensors":
        raise UsageError(f"--out {out}: outputs are written as safetensors: name it {out.with_suffix('.safetensors')}")
    admit(source, str, f"predict(source={shown(source)})")


def _check_split(partitions: int, split: str) -> None:
    admit(split, str, f"predict(split={shown(split)})")
    if partitions == 1:
        if split != AUTO:
            raise UsageError(
                f"--split {split}: says how replicas are split, and they are whole: give --partitions 2 or more, or "
                "leave it off"
            )
        return
    Split(AUTO, partitions)  # refuses too many
    check_order(f"--partitions {partitions}: what crosses between partitions", "leave it off")


@contextlib.contextmanager
def _output(out: Path) -> Iterator[BinaryIO]:
    """Yield the file to write to; an error removes it."""
    try:
        with written_whole(out) as rows:
            yield rows
    except OSError as error:
        raise UsageError(f"--out {out}: cannot be written: {limit(error) or error.strerror}") from error


class Pool:
    """Processes of the replicas, and the portions of samples that each replica has; a portion is whole batches.

    A replica has one portion for each of its processes and one more, so that no process waits for its next portion.
    Portions of a replica that has ended are dealt again before all others.
    """

    def __init__(self, spec: PredictionSpec, progress: Callable[[str], object]) -> None:
        self._spec, self._progress = spec, progress
        self._processes: dict[Channel, tuple[int, BaseProcess]] = {}
        """Replica and process at the other end of each channel."""
        self._lent = contextlib.ExitStack()
        """Descriptors that partitions share."""
        self._left: deque[tuple[int, int]] = deque()
        """Portions that no replica has."""
        self._dealt: dict[int, deque[tuple[int, int]]] = {}
        """Portions of each replica that is ready."""
        self._done = self.samples = 0
        self._first: Predicted | None = None
        self._sums: dict[str, float] = defaultdict(float)
        self.splits: list[str] = []
        """Split of each model; empty if replicas are whole."""

    def run(self, replicas: int) -> Predicted:
        """Compute all samples with so many replicas; return the first answer, whose dtype and shape all others have.

        Raises:
            DistbeliefError: an error of a process.
            JobFailed: a process could not be started, or all have ended.
            Interrupted: Ctrl-C came.
        """
        try:
            self.start(replicas)
            while self._first is None or self._done < self.samples:
                by_connection: dict[object, Channel] = {one.connection: one for one in self._processes}
                for channel in map(by_connection.__getitem__, wait([one.connection for one in self._processes])):
                    if channel in self._processes:  # the replica of this portion may have ended in this loop
                        self.hear(channel)
        except KeyboardInterrupt:
            raise Interrupted("the prediction was interrupted; nothing of it is left") from None
        return self._first

    @property
    def figures(self) -> Json:
        """Return the task's loss and metrics over all samples; none for a file of inputs, which has no targets."""
        return figures_of(mean_of(self._sums, self.samples)) if self._sums else {}

    def start(self, replicas: int) -> None:
        spec, everybody = self._spec, roles.replicas(Mesh(replicas, self._spec.partitions))
        try:
            for number, role in enumerate(everybody):
                if spec.partitions > 1 and roles.is_lead(role):
                    spec = self._lend(spec)
                packed = msgspec.msgpack.encode(msgspec.structs.replace(spec, role=role, number=number))
                process, connection = forkserver.fork(role.replace("replica", "prediction"), main, packed)
                self._processes[Channel(connection, decode=OF_PREDICTION)] = roles.index_of(role), process
        except (OSError, EOFError) as error:
            raise JobFailed(
                f"process {len(self._processes)} of {len(everybody)} cannot be started ({limit(error) or error}); have "
                "fewer --replicas"
            ) from error

    def _lend(self, spec: PredictionSpec) -> PredictionSpec:
        """Lend the partitions of a replica shared memory, and each a pipe to sleep at; they size the memory."""
        memory, bells = self._lent.enter_context(lend()), []
        for _ in range(spec.partitions):
            bell, other = os.pipe()
            os.close(other)
            self._lent.callback(os.close, bell)
            bells.append(bell)
        return msgspec.structs.replace(spec, memory=memory, bells=tuple(bells))

    def hear(self, channel: Channel) -> None:
        """Handle a message of a process, or its end, and deal portions to replicas with room."""
        replica, process = self._processes[channel]
        match message := channel.hear():
            case Failed():
                raise message.error
            case Predicted():
                self._take(message, *self._dealt[replica].popleft())
            case PredictionReady():
                self._dealt[replica] = deque()
                if not self.samples:
                    self.samples, self.splits = message.samples, message.splits
                    size = self._spec.batch_size * (PORTION_BATCHES if self._spec.batch_size < SMALL else 1)
                    self._left.extend((at, min(at + size, self.samples)) for at in range(0, self.samples, size))
            case _:
                self._take_end(replica, process)
        self._deal()

    def _take(self, word: Predicted, start: int, stop: int) -> None:
        first = self._first = self._first or word
        if (word.dtype, word.shape) != (first.dtype, first.shape):
            raise UsageError(
                f"outputs of {first.dtype} {first.shape} for a sample at first, of {word.dtype} {word.shape} "
                f"for samples {start} to {stop - 1}: one tensor cannot hold them"
            )
        for name, value in word.sums.items():
            self._sums[name] += value
        self._done += stop - start
        self._progress(f"{self._done:,} of {self.samples:,} samples")

    def _deal(self) -> None:
        for replica, dealt in self._dealt.items():
            while self._left and len(dealt) <= self._spec.partitions:
                dealt.append(self._left.popleft())
                for channel in self._of(replica):
                    channel.say(PredictPortion(*dealt[-1]))

    def _of(self, replica: int) -> list[Channel]:
        return [channel for channel, (of, _) in self._processes.items() if of == replica]

    def _take_end(self, replica: int, process: BaseProcess) -> None:
        """End the replica of a process that has ended; the others compute its portions."""
        process.join(GRACE)
        self._end(self._of(replica))
        status = process.exitcode or 0
        how = f"killed by {signal.Signals(-status).name}" if status < 0 else f"ended with status {status}"
        if not self._processes:
            raise JobFailed(
                f"every process of the prediction has ended, the last {how}; have fewer --replicas, or each in more "
                "--partitions"
            )
        self._progress(f"{process.name} was {how}: the others compute what it had")
        self._left.extendleft(reversed(self._dealt.pop(replica, deque())))

    def _end(self, channels: list[Channel]) -> None:
        ended = [self._processes.pop(channel)[1] for channel in channels]
        for process in ended:  # kill all before any wait: after a second Ctrl-C, the exit waits for those left
            process.kill()
        for process, channel in zip(ended, channels, strict=True):
            process.join()
            channel.close()

    def close(self) -> None:
        """Kill all processes, and close the descriptors that they share."""
        self._end(list(self._processes))
        self._lent.close()
