"""Settings: what every role of a job must agree on. They are the server's; a replica that joins is told them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import msgspec

from distbelief.core import mapping
from distbelief.core.descent import Descent
from distbelief.core.learning_rate import LearningRate
from distbelief.core.optimizer import Optimizer
from distbelief.errors import LocalProtocolError, UsageError, unknown
from distbelief.sharding.assignments import Assignment
from distbelief.sharding.layout import Layout
from distbelief.sharding.mesh import MOST, Mesh

CHOICES = {"buffers": ("broadcast", "local"), "on_death": ("regroup", "stop")}

STALENESS_SCALINGS = ("none", "inverse", "exponential")


class Data(msgspec.Struct, frozen=True):
    """How often the data are gone through, and in which minibatches."""

    epochs: int = 1
    """Passes over the training set."""
    batch_size: int = 64
    """Samples in a minibatch of one replica."""
    drop_last: bool = False
    """A last minibatch that is smaller than the others is not dealt."""

    def check(self, spelled: Mapping[str, str]) -> None:
        """Refuse what no job can go through.

        Args:
            spelled: the options that go by another name in this job.

        Raises:
            UsageError: naming the option, its value and what it may be.
        """
        at_least(self, 1, ("epochs", "batch_size"), spelled)
        fit(self, spelled)


class Settings(msgspec.Struct, frozen=True):
    """The settings of one job: what is common to all, and a part each for the data and the learning rate."""

    data: Data = Data()
    rate: LearningRate = LearningRate()
    consistency: str = "downpour"
    """What may be stale: the name of the strategy (`core/consistency`)."""
    replicas: int = 2
    shards: int = 2
    seed: int = 0
    optimizer: Optimizer = Optimizer()
    clip_norm: float = 0.0
    """Global norm to which a replica clips each step's gradient; 0 leaves it alone."""
    push_every: int = 1
    fetch_every: int = 1
    local_lr: float = 0.0
    """Step of the plain SGD a replica takes between fetches; 0 takes none."""
    prefetch: int = 0
    read_in_place: bool = False
    """Replicas read the shards' memory itself, torn, and fetch nothing."""
    warm_start_steps: int = 0
    backup_workers: int = 0
    """Replicas whose gradients a synchronous round does not wait for."""
    n: int = 1
    """Softsync: one update for every floor(members / n) pushes."""
    staleness: int = 3
    """Bounded: how many clocks a step may begin ahead of the slowest."""
    staleness_scaling: str = "none"
    """How the learning rate of a push falls with its staleness."""
    algorithm: str = "auto"
    """How gradients are reduced: one of `schedules/allreduce`, native or auto."""
    bucket_mb: float = 25.0
    """Most megabytes of gradients that are reduced at once."""
    buffers: str = "broadcast"
    """Whose buffers a replica computes with: those of the first (broadcast), or its own (local)."""
    on_death: str = "regroup"
    """What a job without a server does when a replica dies: regroup or stop."""
    per_host: int = 0
    """Replicas that are on one host, in their order; 0 for all."""
    locks: str = "none"
    """What an update of memory that replicas share locks: none, shard or global."""
    evaluate_every: int = 1
    """Epochs between evaluations; 0 evaluates never."""
    checkpoint_every: int = 1
    """Epochs between checkpoints; 0 writes one at the end only."""
    snapshot_seconds: float = 60.0
    """Seconds of training between checkpoints, beside those of epochs; 0 for none."""
    snapshot_pushes: int = 0
    """Pushes between checkpoints, beside those of epochs; 0 for none."""
    target_accuracy: float = 0.0
    """Test accuracy (0 to 1) at which the job ends; 0 sets no target."""
    keep_checkpoints: int = 2
    standby: int = 0
    """1: every shard has a standby, which holds all that it has acknowledged."""
    restarts: int = 3
    """Times that a process which died is started anew."""
    descent: Descent | None = None
    """Of a job that trains in large batches: then an epoch is an iteration, and a minibatch a portion."""

    def check(self) -> None:
        """Refuse settings that no job can have.

        Raises:
            UsageError: naming the option, its value and what it may be.
        """
        self._check_numbers()
        self._check_together()
        if self.staleness_scaling not in STALENESS_SCALINGS:
            raise unknown("staleness scaling", self.staleness_scaling, STALENESS_SCALINGS)
        for name, known in CHOICES.items():
            if getattr(self, name) not in known:
                raise unknown(option(name), getattr(self, name), known)
        if not 0 < self.bucket_mb < float("inf"):
            raise UsageError(f"--bucket-mb {self.bucket_mb}: must be more than 0")
        self.rate.check(self.data.epochs)
        if self.mapped:
            mapping.check(self.consistency, self.optimizer, self.locks, self.shards)
        self.optimizer.check(norms=self.shards == 1 or self.in_rounds)
        if self.descent:
            self.descent.check()

    def _check_numbers(self) -> None:
        """Refuse numbers that are out of bounds for their option."""
        spelled = {"push_every": "accumulate"} if self.among_themselves else {}
        at_least(self, 1, ("shards", "push_every", "fetch_every", "keep_checkpoints", "n"), spelled)
        frequencies = ("evaluate_every", "checkpoint_every", "snapshot_seconds", "snapshot_pushes")
        at_least(self, 0, ("warm_start_steps", *frequencies, "restarts"), spelled)
        at_least(
            self, 0, ("backup_workers", "staleness", "clip_norm", "local_lr", "target_accuracy", "per_host"), spelled
        )
        fit(self, spelled)
        self.data.check({"epochs": "iterations", "batch_size": "portion_size"} if self.descent else {})
        if self.shards > MOST:
            raise UsageError(f"--shards {self.shards}: must be at most {MOST}")
        self.mesh.check()

    def _check_together(self) -> None:
        """Refuse options that contradict each other, or are none of the few values that they may be."""
        if self.target_accuracy > 1:
            raise UsageError(f"--target-accuracy {self.target_accuracy}: is a fraction, from 0 to 1")
        if self.prefetch not in (0, 1):
            raise UsageError(f"--prefetch {self.prefetch}: is 0 or 1")
        if self.read_in_place and (self.local_lr or self.fetch_every > 1 or self.prefetch):
            raise UsageError(
                "--read-in-place reads the shards' own memory: --local-lr, --fetch-every and --prefetch have no "
                "meaning with it"
            )
        if self.standby not in (0, 1):
            raise UsageError(f"--standby {self.standby}: is 0 or 1")
        if self.read_in_place and self.standby:
            raise UsageError(
                "--read-in-place reads one shard's own memory, and --standby 1 has another take its place: leave one "
                "of them off"
            )
        if self.local_lr and self.fetch_every == 1:
            raise UsageError(
                f"--local-lr {self.local_lr}: the fetch after each step overwrites what it steps; set --fetch-every "
                "to 2 or more"
            )
        if self.target_accuracy and not self.evaluate_every:
            raise UsageError("--target-accuracy needs evaluations: set --evaluate-every to 1 or more")
        if self.backup_workers >= self.replicas:
            raise UsageError(
                f"--backup-workers {self.backup_workers} of {self.replicas} replicas: at least one must be left that "
                "a round waits for"
            )
        if self.n > self.replicas:
            raise UsageError(
                f"--n {self.n}: must be at most --replicas, which is {self.replicas}; with as many, every push is an "
                "update"
            )

    @property
    def mesh(self) -> Mesh:
        """Who computes gradients: no replica is split yet."""
        return Mesh(self.replicas)

    @property
    def global_batch(self) -> int:
        """Samples in an update, when all take part."""
        together = self.replicas - self.backup_workers if self.in_rounds or self.among_themselves else 1
        return (
            (self.replicas // self.n if self.consistency == "softsync" else together)
            * self.data.batch_size
            * self.push_every
        )

    def with_batch_size(self, batch_size: int) -> Settings:
        """The same, with minibatches of another size."""
        return msgspec.structs.replace(self, data=msgspec.structs.replace(self.data, batch_size=batch_size))

    @property
    def attends(self) -> bool:
        """Whether shards must know which replicas take part."""
        return self.consistency in ("synchronous", "softsync", "bounded")

    @property
    def in_rounds(self) -> bool:
        """Whether all replicas make one update together."""
        return self.consistency == "synchronous"

    @property
    def among_themselves(self) -> bool:
        """Whether replicas reduce their gradients among themselves, and there is no server."""
        return self.consistency == "allreduce"

    @property
    def mapped(self) -> bool:
        """Whether replicas update one mapping by themselves, and there is no server."""
        return self.consistency in ("hogwild", "locking")

    @property
    def together(self) -> bool:
        """Whether the parameters of all shards are of one moment, so that all go back to one checkpoint when one of
        them dies.
        """
        return self.in_rounds or self.descent is not None

    @property
    def snapshots(self) -> bool:
        """Whether there are checkpoints while an epoch is made: then there is one at the beginning too."""
        return bool(self.snapshot_seconds or self.snapshot_pushes)

    @property
    def slots(self) -> int:
        """Gradient vectors a replica holds: one, or two where pushes are not waited for."""
        return 2 if self.prefetch or self.descent else 1

    @property
    def landings(self) -> int:
        """Parameter vectors a replica holds: one, or two where a fetch is in flight during compute."""
        return 2 if self.prefetch else 1


PARTS: Mapping[str, type[msgspec.Struct]] = {"data": Data, "rate": LearningRate}
"""The parts of the settings that are structs of their own."""
DECLARED = {*Settings.__struct_fields__, *(name for kind in PARTS.values() for name in kind.__struct_fields__)} - {
    *PARTS
}
"""The names of all settings, whichever part has them."""


def from_options(options: Mapping[str, object]) -> Settings:
    """Settings from options by name: each stands in the part that declares it.

    Raises:
        LocalProtocolError: no part declares it.

    >>> made = from_options({"replicas": 3, "epochs": 2, "lr_schedule": "cosine"})
    >>> made.replicas, made.data.epochs, made.rate.lr_schedule
    (3, 2, 'cosine')
    """
    if strange := sorted(options.keys() - DECLARED):
        raise LocalProtocolError(f"no part of the settings declares {strange[0]!r}")
    parts = {part: msgspec.convert(options, kind) for part, kind in PARTS.items()}
    return msgspec.convert({**options, **parts}, Settings)


def flat(settings: Settings) -> dict[str, object]:
    """Settings as one table of names and plain values, as `job.json` and `result.json` have them.

    >>> flat(Settings(replicas=3))["replicas"], flat(Settings())["batch_size"]
    (3, 64)
    """
    told: dict[str, object] = {}
    for name in settings.__struct_fields__:
        value = msgspec.to_builtins(getattr(settings, name))
        told |= value if name in PARTS else {name: value}
    return told


def at_least(part: msgspec.Struct, bound: int, names: Iterable[str], spelled: Mapping[str, str]) -> None:
    """Refuse settings that are less, or no finite number.

    Args:
        part: what has them.
        bound: the least that they may be.
        names: of the settings.
        spelled: those that go by another name as options.

    Raises:
        UsageError: naming the option, its value and its bound.
    """
    for name in names:
        if not bound <= (value := getattr(part, name)) < float("inf"):
            raise UsageError(f"{option(spelled.get(name, name))} {value}: must be {bound} or more")


def fit(part: msgspec.Struct, spelled: Mapping[str, str]) -> None:
    """Refuse whole numbers that no message can hold.

    Raises:
        UsageError: naming the option, and its value.
    """
    for name in part.__struct_fields__:
        if isinstance(value := getattr(part, name), int) and not -(2**63) <= value < 2**63:
            raise UsageError(f"{option(spelled.get(name, name))} {value}: does not fit into 64 bits")


def option(name: str) -> str:
    """How a setting is spelled on the command line.

    >>> option("push_every")
    '--push-every'
    """
    return "--" + name.replace("_", "-")


class Plan(msgspec.Struct, frozen=True):
    """What is settled once the first replica has told its layout: who holds what, and how much there is to do."""

    settings: Settings
    layout: Layout
    assignments: tuple[Assignment, ...]
    samples: int
    """Samples in one epoch: what is dealt, and counted."""
    left_out: int = 0
    """Samples of the training set that an epoch is without: those of a smaller last minibatch, with `drop_last`."""

    def factor(self, samples: int) -> float:
        """The factor on the learning rate after so many samples have been applied."""
        return self.settings.rate.factor(samples, self.samples, self.settings.data.epochs, self.settings.global_batch)

    @property
    def batches(self) -> int:
        """Minibatches in one epoch."""
        return -(-self.samples // self.settings.data.batch_size)

    @property
    def total_samples(self) -> int:
        """Samples of the whole job."""
        return self.samples * self.settings.data.epochs

    @property
    def ruler(self) -> int:
        """The shard that rules the rounds: the first that holds anything."""
        return next(i for i, own in enumerate(self.assignments) if own.moving.size)
