"""Settings: what every role of a job must agree on. They are the server's; a replica that joins is told them."""

from __future__ import annotations

import msgspec

from distbelief.core.layout import Layout
from distbelief.core.sharding import Assignment


class Optimizer(msgspec.Struct, frozen=True):
    """An optimizer by name, its learning rate and its other options."""

    name: str = "sgd"
    lr: float = 0.1
    options: dict[str, float | bool | tuple[float, ...]] = {}


class Settings(msgspec.Struct, frozen=True):
    """The settings of one Downpour job, as DESIGN's words name them."""

    replicas: int = 2
    shards: int = 2
    epochs: int = 1
    batch_size: int = 64
    seed: int = 0
    optimizer: Optimizer = Optimizer()
    lr_schedule: str = "constant"
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
    evaluate: bool = True
    target_accuracy: float = 0.0
    """Test accuracy (0 to 1) at which the job ends; 0 sets no target."""
    keep_checkpoints: int = 2

    @property
    def slots(self) -> int:
        """Gradient vectors a replica holds: one, or two where pushes are not waited for."""
        return 2 if self.prefetch else 1

    @property
    def landings(self) -> int:
        """Parameter vectors a replica holds: one, or two where a fetch is in flight during compute."""
        return 2 if self.prefetch else 1


class Plan(msgspec.Struct, frozen=True):
    """What is settled once the first replica has told its layout: who holds what, and how much there is to do."""

    settings: Settings
    layout: Layout
    assignments: tuple[Assignment, ...]
    samples: int
    """Samples in one epoch."""

    @property
    def total_samples(self) -> int:
        """Samples of the whole job."""
        return self.samples * self.settings.epochs
