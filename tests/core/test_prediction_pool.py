"""The pool of a prediction, without its processes."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

from distbelief.core import roles
from distbelief.core.roles import Mesh
from distbelief.errors import JobFailed, UsageError
from distbelief.places.messages import Predicted, PredictionReady, PredictPortion
from distbelief.places.prediction import predict
from distbelief.places.prediction.predict import Pool
from distbelief.places.prediction.worker import PredictionSpec


class Line:
    """The connection to a process that does what a test says."""

    def __init__(self) -> None:
        self.dealt: list[tuple[int, int]] = []
        self.answers: deque[bytes] = deque()

    def send_bytes(self, data: bytes) -> None:
        portion = msgspec.msgpack.decode(data, type=PredictPortion)
        self.dealt.append((portion.start, portion.stop))

    def recv_bytes(self, _: int) -> bytes:
        if not self.answers:
            raise EOFError
        return self.answers.popleft()

    closed = False

    def close(self) -> None:
        pass


ANSWER = Predicted("float32", [3], {"loss": 1.0})
Started = Callable[..., tuple[Pool, dict[str, Line]]]


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> Started:
    """A pool and the lines to its processes."""
    lines: dict[str, Line] = {}

    def fork(name: str, *_: object) -> tuple[Any, Line]:
        lines[name.removeprefix("prediction ")] = line = Line()
        return SimpleNamespace(name=name, join=lambda *_: None, kill=lambda: None, exitcode=-9), line

    def start(replicas: int, partitions: int, batch_size: int) -> tuple[Pool, dict[str, Line]]:
        monkeypatch.setattr(predict.forkserver, "fork", fork)
        spec = PredictionSpec(
            partitions=partitions, split="stages", runs=["run"], source="digits", data_dir=None, device="cpu",
            batch_size=batch_size, out="o", rows="o", threads=1, supervisor=0, forkserver=0, path=[], directory="",
            environment={},
        )  # fmt: skip
        pool = Pool(spec, bool)
        pool.start(replicas)
        return pool, lines

    return start


def hear(pool: Pool, line: Any, *answers: PredictionReady | Predicted) -> None:
    """The process at a line answers; it ends where it has no answer."""
    line.answers.extend(map(msgspec.msgpack.encode, answers))
    [channel] = [one for one in pool._processes if one.connection is line]
    for _ in answers or [None]:
        pool.hear(channel)


def test_all_that_a_replica_had_is_dealt_again_in_order(started: Started) -> None:
    pool, lines = started(replicas=2, partitions=2, batch_size=5)
    assert sorted(lines) == [role.removeprefix("replica ") for role in roles.replicas(Mesh(2, 2))]
    for first in ("0.1", "1.1"):  # where the outputs are
        hear(pool, lines[first], PredictionReady(190, []))
    assert [lines[one].dealt for one in ("0.0", "1.1")] == [
        [(0, 20), (20, 40), (40, 60)],
        [(60, 80), (80, 100), (100, 120)],
    ]
    hear(pool, lines["0.1"], ANSWER)
    hear(pool, lines["0.0"])  # it is killed, and its replica with it
    hear(pool, lines["1.1"], *[ANSWER] * 9)
    again = [(20, 40), (40, 60), (120, 140), (140, 160), (160, 180), (180, 190)]
    assert lines["1.0"].dealt == lines["1.1"].dealt == [(60, 80), (80, 100), (100, 120), *again]
    assert lines["0.0"].dealt == lines["0.1"].dealt == [(0, 20), (20, 40), (40, 60), (120, 140)]
    assert pool.figures == {"test_accuracy": None, "test_metrics": {}, "test_loss": 10 / 190}


def test_a_replica_that_waits_computes_what_another_had(started: Started) -> None:
    pool, lines = started(replicas=2, partitions=1, batch_size=4)
    hear(pool, lines["0"], PredictionReady(33, []))
    hear(pool, lines["1"], PredictionReady(33, []), ANSWER)
    assert (lines["0"].dealt, lines["1"].dealt) == ([(0, 16), (16, 32)], [(32, 33)])
    hear(pool, lines["0"])
    assert lines["1"].dealt == [(32, 33), (0, 16), (16, 32)]
    with pytest.raises(JobFailed, match="every process of the prediction has ended, the last killed by SIGKILL"):
        hear(pool, lines["1"])


def test_outputs_that_no_tensor_holds_are_refused(started: Started) -> None:
    pool, lines = started(replicas=1, partitions=1, batch_size=5)
    hear(pool, lines["0"], PredictionReady(50, []), ANSWER)
    with pytest.raises(UsageError, match=r"of float32 \[4\] for samples 20 to 39: one tensor cannot hold them"):
        hear(pool, lines["0"], msgspec.structs.replace(ANSWER, shape=[4]))
