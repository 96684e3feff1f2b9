"""Optimizers by name, and the learning rate as a function of the samples applied at the server.

The algorithms are torch's, or in `server/layerwise`. The rate has a warm-up, then a schedule, one line of `SCHEDULES`
each. The rate that a user gives is for the base batch; a global batch k times as large scales it (Goyal et al. 2017,
section 2).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import msgspec

from distbelief.core.values import admit, check_fields, shown
from distbelief.errors import UsageError, unknown

ParameterGroup = Mapping[str, Any]
"""Parameters, under `params`, and their options, as `torch.optim` takes them."""


class GroupOption(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """Option of a parameter group, as a script sets it: the rate as a factor, a pair as several numbers."""

    group: int
    name: str
    values: tuple[float, ...]


class Optimizer(msgspec.Struct, frozen=True):
    """Optimizer by name, with its learning rate and other options."""

    name: str = "sgd"
    lr: float = 0.1
    options: dict[str, float | bool | tuple[float, ...]] = {}
    decay_exempt: bool = False
    """True where weight decay leaves biases and normalisations alone."""

    def check(self, norms: bool, of: str = "") -> None:
        """Refuse impossible options, with a `UsageError`.

        Without `norms`, an optimizer that needs the norms of whole layers is refused too. `of` is the beginning of the
        options' names in the message.
        """
        if not 0 <= self.lr < float("inf"):
            raise UsageError(f"--{of}lr {self.lr}: must be 0 or more, and finite")
        for name, value in self.options.items():
            if not all(-math.inf < number < math.inf for number in (value if isinstance(value, tuple) else (value,))):
                raise UsageError(f"--{of}optimizer-options {name}={value}: must be finite")
        if self.decay_exempt and not self.options.get("weight_decay", self.name == "adamw"):
            raise UsageError(
                "--decay-exempt leaves biases and normalisations out of the weight decay, and there is none: set "
                "--weight-decay"
            )
        if self.name in LAYERWISE and not norms:
            whole = "needs the norms of whole layers, which shards tell each other in rounds only"
            raise UsageError(
                f"--{of}optimizer {self.name} {whole}: use strategy synchronous or allreduce, or --shards 1"
            )


LEARNING_RATES = {
    "sgd": 0.1, "momentum": 0.02, "nesterov": 0.02, "adagrad": 0.02, "adadelta": 1.0, "rmsprop": 0.001,
    "adam": 0.001, "adamw": 0.001, "nadam": 0.001, "radam": 0.001, "adamax": 0.002, "lars": 2.0, "lamb": 0.002,
    "asgd": 0.01, "average": 1.0, "delayed-nesterov": 0.7,
}  # fmt: skip
"""Default learning rate of each optimizer."""

LAYERWISE = ("lars", "lamb")
"""Optimizers that need the norms of whole layers."""
OUTER = (AVERAGE, DELAYED) = ("average", "delayed-nesterov")
"""Optimizers of the changes that local steps make, and not of gradients."""
MOMENTUM = ("momentum", "nesterov", "adam", "adamw", "nadam", "radam", "adamax", "lars", "lamb")
"""Optimizers whose step keeps some of the steps before it."""
UNFIT = {
    "lbfgs": "it computes the loss several times in a step, and a push is computed once: use strategy sandblaster",
    "sparseadam": "it needs sparse gradients, and pushes are dense: use adam",
    "rprop": "it follows the signs of whole batches' gradients: use rmsprop, which does so for minibatches",
    "adafactor": "it factors the moments of matrices, and a shard steps a flat vector: use adam",
    "muon": "it needs matrices, and a shard steps a flat vector: use adamw",
}
"""Optimizers of torch that cannot step parameters here, each with the reason and the remedy."""


def optim(
    name: str, lr: float | None = None, *, decay_exempt: bool = False, **options: float | bool | tuple[float, ...]
) -> Optimizer:
    """Make an optimizer by name; further options are those of its class in torch.

    Raises:
        UsageError: the name is unknown; the nearest known one is named.

    >>> optim("adagrad", lr=0.05, eps=1e-8)
    Optimizer(name='adagrad', lr=0.05, options={'eps': 1e-08}, decay_exempt=False)
    """
    if admit(name, str, f"optim({shown(name)})") not in LEARNING_RATES:
        if why := UNFIT.get(name.lower()):
            raise UsageError(f"optimizer {name}: {why}")
        raise unknown("optimizer", name, LEARNING_RATES)
    admit(lr, float | None, f"Optimizer(lr={shown(lr)})")
    optimizer = Optimizer(name, LEARNING_RATES[name] if lr is None else lr, options, decay_exempt)
    check_fields(optimizer)
    return optimizer


SCALINGS: Mapping[str, Callable[[float], float]] = {"none": lambda _: 1.0, "linear": lambda k: k, "sqrt": math.sqrt}
"""Factor on the rate for a global batch of k base batches."""
WARMUPS = ("gradual", "constant")


class Moment(NamedTuple):
    """Moment of a job: epochs applied, progress (0 to 1) since the warm-up, and the job's number of epochs."""

    epoch: float
    since: float
    epochs: int


@dataclass(frozen=True, kw_only=True)
class LearningRate:
    """Options of the learning rate.

    >>> rate = LearningRate(warmup_epochs=5.0)
    >>> [rate.rate_factor(samples, of_epoch=100, epochs=10, batch=256, scale=4.0) for samples in (0, 250, 500, 900)]
    [1.0, 2.5, 4.0, 4.0]
    """

    lr_schedule: str = "constant"
    """Schedule of the learning rate after the warm-up: constant, linear, polynomial, cosine, step, or backoff (lower
    after phases that get longer)."""
    lr_steps: tuple[float, ...] = ()
    """Epochs after which the rate falls: for --lr-schedule step all of them (default: after half and three quarters of
    the job), for backoff the first (default: 1)."""
    lr_gamma: float = 0.0
    """Factor on the rate: for --lr-schedule step at each of its epochs (default 0.1), for backoff after each phase
    (default 0.37); each next phase is longer by its inverse."""
    lr_power: float = 2.0
    """Power of --lr-schedule polynomial."""
    warmup_epochs: float = 0.0
    """Epochs in which the rate rises to its full value, from the base batch's rate where it is scaled, else from 0."""
    warmup: str = "gradual"
    """Kind of warm-up: gradual (the rate rises with every update), or constant (the base batch's rate, then a jump)."""

    def rate_checks(self, epochs: int) -> Iterator[Callable[[], object]]:
        """Yield checks of these options for a job of so many epochs."""
        yield partial(self._check_warmup, epochs)
        yield partial(self._check_schedule, epochs)

    def _check_warmup(self, epochs: int) -> None:
        if not 0 <= self.warmup_epochs <= epochs:
            raise UsageError(f"--warmup-epochs {self.warmup_epochs:g}: must be from 0 to --epochs, which is {epochs}")

    def _check_schedule(self, epochs: int) -> None:
        for name, words in OWN.items():
            value, otherwise = getattr(self, name), getattr(LearningRate(), name)
            if value != otherwise and self.lr_schedule not in words:
                whose = " or ".join(words)
                raise UsageError(
                    f"--{name.replace('_', '-')} {value}: belongs to --lr-schedule {whose}, and this one is "
                    f"{self.lr_schedule}"
                )
        if list(self.lr_steps) != sorted(set(self.lr_steps)) or not all(0 < epoch < epochs for epoch in self.lr_steps):
            raise UsageError(
                f"--lr-steps {self.lr_steps}: are epochs in rising order, after 0 and before --epochs, which is "
                f"{epochs}"
            )
        if self.lr_schedule == "backoff" and len(self.lr_steps) > 1:
            raise UsageError(
                f"--lr-steps {self.lr_steps}: --lr-schedule backoff needs the first only, the others follow from "
                "--lr-gamma"
            )
        if self.lr_schedule == "backoff" and not self.lr_steps and epochs == 1:
            raise UsageError(
                "--lr-schedule backoff first makes the rate smaller after 1 epoch, and --epochs is 1: set more, "
                "or --lr-steps 0.5"
            )
        if not 0 < self.lr_power < math.inf:
            raise UsageError(f"--lr-power {self.lr_power}: must be more than 0, and finite")
        if not 0 <= self.lr_gamma <= 1:
            raise UsageError(
                f"--lr-gamma {self.lr_gamma}: multiplies the rate, to make it smaller: must be from 0 (for the "
                "schedule's own factor) to 1"
            )

    @property
    def rate_follows(self) -> bool:
        """True where the rate depends on the samples applied."""
        return self.lr_schedule != "constant" or bool(self.warmup_epochs)

    def rate_factor(self, samples: int, of_epoch: int, epochs: int, batch: int, scale: float | None = None) -> float:
        """Return the factor on the base rate for an update of `batch` samples, after `samples` were applied.

        `scale` is the factor for the size of the global batch; None where no base batch is set.
        """
        scaled = 1.0 if scale is None else scale
        if not self.rate_follows:
            return scaled
        if of_epoch < 1:
            raise UsageError(f"a schedule needs the samples of an epoch, got {of_epoch}")
        total, warming = of_epoch * epochs, self.warmup_epochs * of_epoch
        # a function of the samples applied, not of steps: replicas of any number and speed see the same schedule
        if samples < warming:
            if self.warmup == "constant":
                return 1.0
            # the first update has the base batch's rate or, as in torch's LinearLR, one step above 0: a rate of 0 would
            # waste it
            unscaled = min(1.0, (samples + batch) / warming)
            return unscaled if scale is None else 1.0 + (scale - 1.0) * samples / warming
        since = (samples - warming) / (total - warming) if total > warming else 1.0
        return scaled * SCHEDULES[self.lr_schedule](self, Moment(samples / of_epoch, min(1.0, since), epochs))


GAMMAS = {"step": 0.1, "backoff": 0.37}
"""Default factor of each schedule that lowers the rate at times (backoff: the best of Niu et al. 2011)."""


def _gamma(rate: LearningRate) -> float:
    return rate.lr_gamma or GAMMAS[rate.lr_schedule]


def _step(rate: LearningRate, at: Moment) -> float:
    steps = rate.lr_steps or (at.epochs / 2, at.epochs * 3 / 4)
    return math.prod(_gamma(rate) for epoch in steps if at.epoch >= epoch)


def _backoff(rate: LearningRate, at: Moment) -> float:
    """Return the factor: 1 for K epochs, gamma for the next K / gamma, and so on (Niu et al. 2011, section 4)."""
    gamma, first = _gamma(rate), rate.lr_steps[0] if rate.lr_steps else 1.0
    if gamma == 1.0:
        return 1.0
    # phase j begins after first * (1 + 1/gamma + ... + 1/gamma^(j-1)) epochs; 1e-9 is for the logarithm's rounding
    phase = math.log1p(min(at.epoch, at.epochs) / first * (1.0 / gamma - 1.0)) / -math.log(gamma)
    return gamma ** int(phase + 1e-9)


SCHEDULES: Mapping[str, Callable[[LearningRate, Moment], float]] = {
    "constant": lambda _, _at: 1.0,
    "linear": lambda _, at: 1.0 - at.since,
    "polynomial": lambda rate, at: (1.0 - at.since) ** rate.lr_power,
    "cosine": lambda _, at: 0.5 * (1.0 + math.cos(math.pi * at.since)),
    "step": _step,
    "backoff": _backoff,
}
"""Factor on the rate: `step` and `backoff` depend on the epoch, the others on the progress since the warm-up."""

OWN = {"lr_steps": tuple(GAMMAS), "lr_gamma": tuple(GAMMAS), "lr_power": ("polynomial",)}
"""Options that belong to some schedules only, with these."""
