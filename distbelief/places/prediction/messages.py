"""What the processes of a prediction and the one that asks them say to each other."""

from __future__ import annotations

import msgspec

from distbelief.places.processes.spec import Surroundings


class PredictionSpec(Surroundings, frozen=True, kw_only=True):
    """Everything that a process of a prediction must know."""

    index: int
    """Which of the processes this is: 0, 1, ..."""
    runs: list[str]
    """Run folders and compressed files."""
    source: str
    """A task by its name, or a file of inputs."""
    data_dir: str | None
    device: str
    batch_size: int
    """Samples that are computed at once."""
    rows: str
    """The file that the outputs are written to, each sample's at its place."""


class Ready(msgspec.Struct, frozen=True, tag=True):
    """The models are loaded, and the data, of so many samples."""

    samples: int


class Predict(msgspec.Struct, frozen=True, tag=True):
    """Compute the outputs of the samples from `start` up to `stop`, and write them."""

    start: int
    stop: int


class Predicted(msgspec.Struct, frozen=True, tag=True):
    """They are written."""

    start: int
    stop: int
    dtype: str
    shape: list[int]
    """Of the output of one sample."""
    metrics: dict[str, float]
    """The sum of each metric of the task over them; none where the targets are not known."""
    loss: float | None = None
    """The sum of the task's loss, where they are."""


class Stopped(msgspec.Struct, frozen=True, tag=True):
    """The process has ended with an error of `distbelief.errors`."""

    kind: str
    text: str


asked = msgspec.msgpack.Decoder(Predict)
answered = msgspec.msgpack.Decoder(Ready | Predicted | Stopped)
encode = msgspec.msgpack.Encoder().encode
MESSAGE_LIMIT = 1 << 20
"""Longest message in bytes."""
HEADER_ROOM = 1024
"""Bytes before the first output in the file: its header is known when the first is."""
