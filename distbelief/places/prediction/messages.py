"""What the processes of a prediction and the one that asks them say to each other."""

from __future__ import annotations

import msgspec

from distbelief.core import roles
from distbelief.places.processes.spec import Surroundings
from distbelief.sharding.mesh import Mesh


def title(role: str) -> str:
    """What the process of a role is called.

    >>> title("replica 1"), title("replica 1.0")
    ('prediction 1', 'prediction 1.0')
    """
    return role.replace("replica", "prediction")


class PredictionSpec(Surroundings, frozen=True, kw_only=True):
    """Everything that a process of a prediction must know."""

    role: str
    """`replica 1`, or `replica 1.0` where that is a partition of it."""
    partitions: int
    """Processes of each replica."""
    split: str
    """How its models are, where these are several."""
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
    memory: int = -1
    """The descriptor, there, of the memory through which partitions of a replica give each other what crosses."""
    pipes: tuple[int, ...] = ()
    """Those of pipes that wake them, in their order."""

    @property
    def number(self) -> int:
        """Of this process among all: which of several devices it has."""
        return Mesh(1, self.partitions).number(roles.index_of(self.role), roles.partition_of(self.role))


class Ready(msgspec.Struct, frozen=True, tag=True):
    """The models are loaded, and the data, of so many samples: by the process of a replica that has the outputs."""

    samples: int
    splits: list[str] = []
    """How each model is split, where they are."""


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
