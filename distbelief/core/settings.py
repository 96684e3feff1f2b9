"""Settings of a job, which all its roles share. They are the server's: a replica that joins is sent them.

They consist of options common to all jobs, of the data, of the learning rate, and of the strategy. The rooms below
`strategies` know no strategy by name; they read its `Traits`.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import KW_ONLY, dataclass, field
from enum import Enum
from functools import cached_property, partial
from typing import Any, ClassVar, Generic, NamedTuple, Self, TypeVar

import msgspec

from distbelief.core import consistency
from distbelief.core.consistency import Policy
from distbelief.core.optimizer import (
    AVERAGE,
    DELAYED,
    MOMENTUM,
    OUTER,
    SCALINGS,
    SCHEDULES,
    WARMUPS,
    LearningRate,
    Optimizer,
    optim,
)
from distbelief.core.roles import MOST, Mesh
from distbelief.core.values import Checked, Given, hints_of, read_as
from distbelief.errors import LocalProtocolError, UsageError, unknown
from distbelief.schedules.pipeline import check_pipeline, named
from distbelief.sharding.assignments import Assignment
from distbelief.sharding.layout import Layout, Range

PRECISIONS = ("float32", "bf16", "fp16")
ORDERS = (SHUFFLED, SEQUENTIAL) = ("shuffled", "sequential")
WHOSE = (SHARED, OWN_DATA, PRIVATE, SORTED) = ("shared", "own", "private", "sorted")
UNITS = {"ms": 0.001, "s": 1.0, "min": 60.0, "h": 3600.0}
"""Seconds of each unit of time."""
FEWEST_BITS, MOST_BITS = 2, 24
"""Bits of fixed point: at least a sign and a digit, at most those that float32 holds."""

Check = Callable[[], object]
"""Check of a job: raises a UsageError that names an option, the reason and the remedy."""


class FixedPointBits(NamedTuple):
    """Bits of dynamic fixed point, the sign among them."""

    products: int
    """Bits of factors of products."""
    updates: int
    """Bits of parameters after an update."""


def fixed_point_bits(text: str) -> FixedPointBits | None:
    """Parse `--fixed-point`; return None for "".

    Another form is refused, and so are numbers of bits that are not supported.

    >>> fixed_point_bits("dynamic:10,12")
    FixedPointBits(products=10, updates=12)
    """
    if not text:
        return None
    match = re.fullmatch(r"dynamic:(\d{1,3}),(\d{1,3})", text)
    bits = FixedPointBits(*map(int, match.groups())) if match else FixedPointBits(0, 0)
    if not FEWEST_BITS <= bits.products <= bits.updates <= MOST_BITS:
        raise UsageError(
            f"--fixed-point {text}: is dynamic:PRODUCTS,UPDATES, bits of what is multiplied and of what is updated, "
            f"such as dynamic:10,12; {FEWEST_BITS} or more, at most {MOST_BITS}, and no fewer of what is updated"
        )
    return bits


class Rhythm(NamedTuple):
    """Interval between two occasions, in one of these units; the other units are 0."""

    seconds: float = 0.0
    epochs: int = 0
    pushes: int = 0
    minibatches: int = 0


class Holder(Enum):
    """Holder of a job's parameters."""

    SHARDS = "shards"
    """Server shards, each a range."""
    REPLICAS = "replicas"
    """Replicas, each all of them: they add up gradients among themselves."""


class Traits:
    """Traits of a strategy: all that the rooms below `strategies` read about it. Its options are its fields."""

    name: ClassVar[str] = ""
    """Name of the strategy."""
    held_by: ClassVar[Holder] = Holder.SHARDS
    one_moment: ClassVar[bool] = False
    """True where all shards' parameters must be of one moment: if one dies, all go back to a checkpoint."""
    unit: ClassVar[str] = "epoch"
    """Unit of `epochs` and of a checkpoint's position; a run resumes only with a strategy of the same unit."""
    spelled: ClassVar[Mapping[str, str]] = {}
    """Option of each setting, by its name in `job.json`, where these differ."""
    meaningless: ClassVar[Mapping[str, str]] = {}
    """Options of jobs, places or other strategies that mean nothing here, each with the reason or the remedy."""

    @property
    def parts(self) -> int:
        """Number of server shards, or of parts of a checkpoint or locks where there are none."""
        return getattr(self, "shards", 1)

    @property
    def pushing(self) -> Pushing:
        """Options of pushes and fetches: the strategy's, and Downpour's defaults for those that it lacks."""
        # kept, since each step reads it; not a cached_property, which a subclass could not override by a property
        if "pushing" not in vars(self):
            here = {name: getattr(self, name) for name in options_of(Pushing) if hasattr(self, name)}
            vars(self)["pushing"] = Pushing(**here)
        pushing: Pushing = vars(self)["pushing"]
        return pushing

    @property
    def host_replicas(self) -> int:
        """Number of consecutive replicas on one host; 0 for all."""
        return 0

    def check(self, settings: Settings) -> None:
        """Refuse values that are impossible by themselves or with the settings.

        A subclass raises a `UsageError` that names the option, its value and the remedy.
        """

    def global_batch(self, settings: Settings) -> int:
        """Return the samples of an update in which all replicas take part."""
        return settings.batch_size

    def policy(self, settings: Settings, rules: bool) -> Policy:
        """Make a shard's policy, which decides what may be stale.

        `rules` is true for the shard that decides for all shards.
        """
        return Policy()


@dataclass(frozen=True)
class StrategyOptions(Traits, Checked):
    """Options of a strategy: the fields of a frozen dataclass."""

    kind: str = field(default="", init=False, repr=False, compare=False)
    """Name of the strategy, written beside its options: another process finds the class by it."""

    def __new__(cls, *_: object, **__: object) -> Self:
        """Make a strategy that has its `kind` set, whatever a subclass's `__init__` does."""
        strategy = super().__new__(cls)
        vars(strategy)["kind"] = cls.name
        return strategy

    def with_options(self, **options: Any) -> Self:
        """Return the same strategy with other values of these options."""
        return dataclasses.replace(self, **options)


@dataclass(frozen=True)
class Accruing(StrategyOptions):
    """Options of a replica that makes several steps per push."""

    push_every: int | str = 1
    """Steps, each of a minibatch, whose gradients are summed into one push (the paper's n_push). With --local-optimizer
    a push is the change that these steps made; auto:50 then gives the fastest replica 50 steps, and each other one as
    many as it makes in that time (auto is auto:50)."""
    _: KW_ONLY
    local_optimizer: Given[Optimizer | None, str] = Given(None, str, optim)
    """Optimizer with which each replica steps its copy of the parameters between two pushes."""
    local_lr: float = 0.0
    """Learning rate of --local-optimizer, 0 for its default. Without one: the rate of the plain SGD that a replica
    takes by itself between fetches, 0 for none."""

    @cached_property
    def push_steps(self) -> int:
        """Most steps of a push.

        >>> Pushing(push_every="auto").push_steps, Pushing(push_every=3).push_steps
        (50, 3)
        """
        match = re.fullmatch(r"(\d{1,18})|auto(?::(\d{1,18}))?", str(self.push_every).strip())
        steps = int(match[1] or match[2] or PACED_STEPS) if match else 0
        if steps < 1:
            raise UsageError(f"--push-every {self.push_every}: must be 1 or more, or auto, or auto:50")
        return steps

    @property
    def paced(self) -> bool:
        """True where the steps of a replica's push follow its speed."""
        return not str(self.push_every).strip().isdecimal()

    @property
    def local(self) -> Optimizer | None:
        """Optimizer of local steps, with its rate; None where replicas push gradients."""
        chosen = self.local_optimizer
        return msgspec.structs.replace(chosen, lr=self.local_lr) if chosen and self.local_lr else chosen

    def check_local(self, settings: Settings) -> None:
        """Refuse optimizers of replicas and shards that do not fit together, and options that local steps ignore."""
        outer, local = settings.optimizer, self.local
        if self.push_steps and self.paced:
            refused = {
                f"strategy {self.name} adds up gradients: set --local-optimizer": local is None,
                f"strategy {self.name} makes rounds of as many steps of each replica": settings.policy.rounds,
                "with --partitions the processes of a replica must push together": settings.partitions > 1,
            }
            for why in (why for why, holds in refused.items() if holds):
                raise UsageError(f"--push-every {self.push_every}: {why}, or name a number")
        if local is None:
            if outer.name in OUTER:
                raise UsageError(
                    f"--optimizer {outer.name}: steps by what the replicas' own steps have changed, and they push "
                    "gradients: set --local-optimizer, or use sgd or nesterov"
                )
            return
        if local.name in OUTER:
            raise UsageError(f"--local-optimizer {local.name}: is an optimizer of the shards; use sgd or adamw")
        local.check(norms=settings.partitions == 1, of="local-")
        if outer.decay_exempt:
            raise UsageError(
                "--decay-exempt of the shards' optimizer: parameters decay in local steps: set it in --local-optimizer"
            )
        default = Settings(strategy=Pushing())
        for name, why in WITHOUT_LOCAL.items():
            shared = hasattr(settings, name)
            here, plain = (settings, default) if shared else (settings.strategy.pushing, default.strategy)
            if (value := getattr(here, name)) != getattr(plain, name):
                raise UsageError(f"{option(name)} {value} with --local-optimizer: {why}; leave it off")
        self._check_outer(settings)

    def _check_outer(self, settings: Settings) -> None:
        outer, together = settings.optimizer, settings.policy.gathers
        if outer.name == DELAYED and together:
            raise UsageError(
                f"--optimizer {DELAYED}: is for changes that come one by one, and strategy {self.name} makes one step "
                "with those of several replicas: use nesterov"
            )
        if together or settings.replicas == 1 or outer.name == DELAYED:
            return
        if outer.name == AVERAGE:
            raise UsageError(
                f"--optimizer {AVERAGE}: strategy {self.name} applies the change of each replica by itself: use "
                f"{DELAYED}, sgd with --lr {1 / settings.replicas:.2g}, or strategy synchronous"
            )
        if outer.name in MOMENTUM or outer.options.get("momentum"):
            raise UsageError(
                f"--optimizer {outer.name} with --local-optimizer: strategy {self.name} applies the change of each "
                f"replica by itself, and momentum repeats changes that are out of date: use {DELAYED}, which steps "
                "once for all replicas, or strategy synchronous"
            )


WEIGHTS = (SAMPLES, SPEED) = ("samples", "speed")
PACED_STEPS, FEWEST_STEPS = 50, 5
"""Steps of the fastest replica's push, and the fewest of any, where these follow the speed (Liu et al. 2024)."""
WITHOUT_LOCAL = {
    "fetch_every": "each push is followed by a fetch",
    "prefetch": "the steps after a push need what comes of it",
    "warm_start_steps": "all replicas begin with the shards' model",
    "staleness_scaling": f"{DELAYED} weighs what comes late",
    "lr_scaling": "local steps are of one replica's minibatches",
    "fixed_point": "it rounds parameters where the shards step them, and replicas step theirs too",
}
"""Options that mean nothing with local steps, each with the reason."""


@dataclass(frozen=True)
class Pushing(Accruing):
    """Options of pushes and fetches, which `server` and `replica` follow for every strategy on a parameter server."""

    fetch_every: int = 1
    """Steps between fetches of the parameters (the paper's n_fetch)."""
    prefetch: int = 0
    """1: the next fetch is in flight while a step computes and pushes are not waited for, for one more step of
    staleness."""
    warm_start_steps: int = 0
    """Steps that one replica takes alone before the others begin."""
    staleness_scaling: str = "none"
    """Scaling of a push's learning rate by its staleness: none, inverse (divided by it) or exponential."""

    @property
    def pushing(self) -> Pushing:
        return self

    def global_batch(self, settings: Settings) -> int:
        """Return the samples of a push: each is an update."""
        return settings.batch_size * self.push_steps

    def policy(self, settings: Settings, rules: bool) -> Policy:
        if settings.optimizer.name == DELAYED:
            return consistency.Members(self.staleness_scaling, settings.replicas)
        return Policy(self.staleness_scaling)

    def check(self, settings: Settings) -> None:
        at_least(self, 1, ("fetch_every",), {})
        at_least(self, 0, ("warm_start_steps", "local_lr"), {})
        among("staleness scaling", self.staleness_scaling, consistency.SCALINGS)
        if self.prefetch not in (0, 1):
            raise UsageError(f"--prefetch {self.prefetch}: is 0 or 1")
        self.check_local(settings)
        if self.local_lr and not self.local_optimizer and self.fetch_every == 1:
            raise UsageError(
                f"--local-lr {self.local_lr}: the fetch after each step overwrites what it steps; set --fetch-every "
                "to 2 or more"
            )


TraitsT = TypeVar("TraitsT", bound=Traits)
Value = TypeVar("Value")


class OfStrategy(Generic[Value]):
    """Setting that is an option of some strategies, with a value for those that lack it."""

    def __init__(self, otherwise: Value) -> None:
        self._otherwise, self._name = otherwise, ""

    def __set_name__(self, owner: type, name: str) -> None:
        self._name = name

    def __get__(self, settings: Settings, owner: type) -> Value:
        value: Value = getattr(settings.strategy, self._name, self._otherwise)
        return value


@dataclass(frozen=True, kw_only=True)
class SharedOptions(LearningRate):
    """Options that all roles of a job share, whatever its strategy."""

    epochs: int = 1
    """Passes over the training set."""
    batch_size: int = 64
    """Samples in a minibatch of one replica."""
    drop_last: bool = False
    """Leave out the last minibatch of an epoch if it is smaller than the others; its samples differ from epoch to
    epoch."""
    order: str = "shuffled"
    """Order of the samples: shuffled anew in each epoch, or sequential, which gives each replica a contiguous part."""
    data: str = "shared"
    """Data of the replicas: shared (all have the same, and the next free replica is dealt the next minibatch), private
    (the same, shuffled and cut once: each replica keeps its part in all epochs), sorted (as private, but cut in the
    order of the labels), or own (each loads data of its own, and trains on all of them)."""
    seed: int = 0
    """Seed of the initial parameters, the order of the data and all other chance."""
    clip_norm: float = 0.0
    """Global norm to which each step's gradient is clipped; 0 clips nothing."""
    precision: str = "float32"
    """Number format of gradient computations: float32, bf16, or fp16 with a scaled loss; parameters and updates are in
    float32."""
    fixed_point: str = ""
    """dynamic:10,12 computes gradients with products in dynamic fixed point of 10 bits, and keeps parameters in 12 bits
    after each update; the scale of a layer follows its values."""
    target_accuracy: float = 0.0
    """Test accuracy (0 to 1) that ends the job once two evaluations in a row reach it; 0 for none."""
    target_loss: float = 0.0
    """Loss on the test set that ends the job once two evaluations in a row reach it; 0 for none."""
    budget: str = "0"
    """Training time (45s, 5min) after which the job ends; 0 for none."""
    evaluate_every: int | str = 1
    """Epochs (2) or applied minibatches (500minibatches) between evaluations of the server's model; 0 for never."""
    checkpoint_every: int = 1
    """Epochs between checkpoints; the job's end always writes one."""
    snapshot_every: str = "60s"
    """Training time (30s, 5min), pushes (500) or applied minibatches (500minibatches) between further checkpoints, from
    which a dead shard is restored; 0 for none."""
    keep_checkpoints: int = 2
    """Number of checkpoints kept."""

    @property
    def own_data(self) -> bool:
        """True where each replica has data of its own."""
        return self.data == OWN_DATA

    @property
    def keeps_parts(self) -> bool:
        """True where each replica keeps one part of the samples in all epochs."""
        return self.data in (PRIVATE, SORTED)

    @cached_property
    def budget_seconds(self) -> float:
        """Seconds of training after which the job ends; 0 for no limit.

        >>> SharedOptions(budget="45s").budget_seconds
        45.0
        """
        seconds = 0.0 if self.budget.strip() == "0" else _seconds(self.budget)
        if seconds is None:
            raise UsageError(f"--budget {self.budget!r}: is a time such as 45s, 5min or 2h, or 0 for none")
        return seconds

    @cached_property
    def evaluations(self) -> Rhythm:
        """Epochs or minibatches between evaluations.

        >>> SharedOptions(evaluate_every="500minibatches").evaluations
        Rhythm(seconds=0.0, epochs=0, pushes=0, minibatches=500)
        """
        match = re.fullmatch(r"(\d{1,18})\s*(minibatches)?", str(self.evaluate_every).strip())
        if not match or (match[2] and int(match[1]) < 1):
            raise UsageError(
                f"--evaluate-every {self.evaluate_every!r}: is a number of epochs such as 2, one of minibatches such "
                "as 500minibatches, or 0 for never"
            )
        every = int(match[1])
        return Rhythm(minibatches=every) if match[2] else Rhythm(epochs=every)

    @cached_property
    def snapshots(self) -> Rhythm:
        """Seconds, pushes or minibatches between further checkpoints than those at epochs' ends.

        >>> SharedOptions(snapshot_every="5min").snapshots
        Rhythm(seconds=300.0, epochs=0, pushes=0, minibatches=0)
        """
        match = re.fullmatch(r"(\d{1,18})\s*(minibatches)?", self.snapshot_every.strip())
        if match:
            every = int(match[1])
            return Rhythm(minibatches=every) if match[2] else Rhythm(pushes=every)
        seconds = _seconds(self.snapshot_every)
        if seconds is None:
            raise UsageError(
                f"--snapshot-every {self.snapshot_every!r}: is a time such as 30s or 5min, a number of pushes such as "
                "500, of minibatches such as 500minibatches, or 0 for none"
            )
        return Rhythm(seconds=seconds)

    @property
    def evaluates(self) -> bool:
        """True where the model is evaluated at all."""
        return any(self.evaluations)


def _seconds(time: str) -> float | None:
    """Parse a time with its unit into seconds; None for any other text.

    >>> _seconds("5min"), _seconds("500ms"), _seconds("5")
    (300.0, 0.5, None)
    """
    match = re.fullmatch(rf"(\d{{1,18}}(?:\.\d+)?)\s*({'|'.join(UNITS)})", time.strip())
    return float(match[1]) * UNITS[match[2]] if match else None


@dataclass(frozen=True, kw_only=True)
class Settings(SharedOptions):
    """Settings of a job: options common to all, and those of its strategy."""

    strategy: Traits = Pushing()  # frozen

    replicas = OfStrategy(1)
    """Copies of the model."""
    partitions = OfStrategy(1)
    """Processes over which each replica is split."""
    split = OfStrategy("auto")
    """Way in which replicas are split, or several by patterns of module names."""
    microbatches = OfStrategy(1)
    """Parts of a minibatch that go through the partitions one after another."""
    schedule = OfStrategy("auto")
    """Order in which the partitions work on microbatches."""
    chunks = OfStrategy(0)
    """Chunks of time steps of a sequence that is split by time; 0 lets the way choose."""
    optimizer = OfStrategy(Optimizer())
    """Optimizer of the parameters."""
    push_weight = OfStrategy("samples")
    """Weight of a replica's change in a round."""
    stagger = OfStrategy(False)
    """True where each shard gets its part of a change at a moment of its own."""
    stagger_delay = OfStrategy(0)
    """Steps between sending a part and taking what comes of it."""
    stagger_mix = OfStrategy(0.0)
    """Weight of the replica's own parameters then."""
    standby = OfStrategy(0)
    """1: every shard has a standby, which holds all that the shard has acknowledged."""
    restarts = OfStrategy(3)
    """Number of times that a dead process is started again."""
    lr_scaling = OfStrategy("none")
    """Rule by which the learning rate grows with the global batch."""
    base_batch = OfStrategy(0)
    """Global batch that the learning rate is given for."""

    @property
    def shards(self) -> int:
        """Number of server shards, or of parts of a checkpoint or locks where there are none."""
        return self.strategy.parts

    def sizes(self) -> Iterator[Check]:
        """Yield checks that whole numbers fit into a message."""
        parts: tuple[tuple[object, Mapping[str, str]], ...] = ((self, self.strategy.spelled), (self.strategy, {}))
        for part, names in parts:
            kind: type = type(part)
            for name in hints_of(kind):
                yield partial(fit, part, name, names)

    def checks(self) -> Iterator[Check]:
        """Yield the checks of each option by itself."""
        spelled = self.strategy.spelled
        for name in ("shards", "keep_checkpoints", "epochs", "batch_size"):
            yield partial(at_least, self, 1, (name,), spelled)
        for name in ("checkpoint_every", "restarts", "clip_norm", "target_accuracy", "target_loss"):
            yield partial(at_least, self, 0, (name,), spelled)
        yield self._check_servers
        yield self._check_arithmetic
        yield partial(getattr, self, "budget_seconds")
        for name, rhythm in (("evaluate_every", "evaluations"), ("snapshot_every", "snapshots")):
            yield partial(self._check_rhythm, name, rhythm)
        for what, word, known in (
            ("order", self.order, ORDERS),
            ("--data", self.data, WHOSE),
            ("learning-rate scaling", self.lr_scaling, SCALINGS),
            ("learning-rate schedule", self.lr_schedule, SCHEDULES),
            ("warm-up", self.warmup, WARMUPS),
        ):
            yield partial(among, what, word, known)
        yield partial(self.optimizer.check, norms=True)

    def checks_together(self) -> Iterator[Check]:
        """Yield the checks of options against each other; each option must have passed its own check."""
        yield self._check_split
        yield self._check_targets
        yield self._check_scaling
        yield from self.rate_checks(self.epochs)
        yield partial(self.strategy.check, self)
        yield self.check_allotted

    def _check_servers(self) -> None:
        self.mesh.check()
        if self.shards > MOST:
            raise UsageError(f"--shards {self.shards}: must be at most {MOST}")
        if self.standby not in (0, 1):
            raise UsageError(f"--standby {self.standby}: is 0 or 1")

    def _check_arithmetic(self) -> None:
        if self.precision not in PRECISIONS:
            raise unknown("precision", self.precision, PRECISIONS)
        if fixed_point_bits(self.fixed_point) and self.precision != PRECISIONS[0]:
            raise UsageError(
                f"--fixed-point {self.fixed_point} rounds values of float32: leave --precision {self.precision} off"
            )

    def _check_targets(self) -> None:
        if self.target_accuracy > 1:
            raise UsageError(f"--target-accuracy {self.target_accuracy}: is a fraction, from 0 to 1")
        for name in ("target_accuracy", "target_loss"):
            if getattr(self, name) and not self.evaluates:
                raise UsageError(f"{option(name)} needs evaluations: set --evaluate-every to 1 or more")

    def _check_rhythm(self, name: str, rhythm: str) -> None:
        """Refuse texts that are no interval, and minibatches where the strategy counts none."""
        unit = self.strategy.unit
        if getattr(self, rhythm).minibatches and unit != Traits.unit:
            raise UsageError(
                f"{option(name)} {getattr(self, name)}: strategy {self.strategy.name} counts {unit}s: give a number of "
                "them"
            )

    def _check_scaling(self) -> None:
        if self.base_batch < 0 or (self.base_batch > 0) != (self.lr_scaling != "none"):
            raise UsageError(
                f"--base-batch {self.base_batch} with --lr-scaling {self.lr_scaling}: the global batch that --lr is "
                "for is what --lr-scaling linear or sqrt scales from: give both or neither"
            )
        if self.warmup == "constant" and not (self.warmup_epochs and self.base_batch):
            needs = "set these, --base-batch and --lr-scaling (allreduce, synchronous and single have them)"
            raise UsageError(f"--warmup constant keeps the rate of the base batch for --warmup-epochs: {needs}")

    def check_policy(self) -> None:
        """Refuse an optimizer that the strategy's policy cannot serve."""
        whole = self.shards == 1 or self.strategy.held_by is not Holder.SHARDS
        self.optimizer.check(norms=self.policy.rounds or whole)

    def check_allotted(self, stream: bool = False) -> None:
        """Refuse allotments, minibatches that belong to one replica, where these mean nothing.

        `stream` is true for data without a length.
        """
        own_data, order = self.own_data, self.order
        if self.keeps_parts and (stream or order != SHUFFLED):
            beside = "a stream has no length to cut" if stream else f"order {order} shuffles nothing"
            raise UsageError(f"--data {self.data} cuts shuffled data, and {beside}: leave one of them off")
        if stream and order != SHUFFLED:
            raise UsageError(f"order {order} of a stream: it has one order, which is kept; leave it off")
        kept = order != SHUFFLED and self.data == SHARED
        demand = f"order {order}" if kept else f"--data {self.data}" if self.data != SHARED else "a stream"
        if not (kept or self.data != SHARED or stream):
            return
        if why := self.strategy.meaningless.get("order" if kept else "data"):
            raise UsageError(f"{demand} means nothing to strategy {self.strategy.name}; {why}")
        if self.strategy.pushing.warm_start_steps:
            raise UsageError(
                f"--warm-start-steps {self.strategy.pushing.warm_start_steps} has one replica take the first "
                f"minibatches, and with {demand} each has its own: leave one of them off"
            )
        if (own_data or stream) and self.rate_follows:
            raise UsageError(
                f"{demand}: the number of samples, which --lr-schedule and --warmup-epochs follow, is unknown; leave "
                "them off, and set the rate in a script (torch.optim.lr_scheduler)"
            )
        if stream and self.partitions > 1:
            raise UsageError(
                f"a stream and --partitions {self.partitions}: each partition would read it by itself; leave one of "
                "them off"
            )

    def _check_split(self) -> None:
        """Refuse options that mean nothing to split replicas, or to whole ones."""
        if self.partitions == 1:
            if self.split != type(self)().split:
                raise UsageError(
                    f"--split {self.split}: says how replicas are split, and they are whole: give --partitions 2 or "
                    "more, or leave it off"
                )
            for name in ("microbatches", "schedule", "chunks"):
                if (value := getattr(self, name)) != getattr(type(self)(), name):
                    raise UsageError(
                        f"{option(name)} {value}: says how minibatches go through the partitions of a replica, and "
                        "replicas are whole: give --partitions 2 or more, or leave it off"
                    )
            return
        check_pipeline(self.pipeline, self.microbatches)
        if self.microbatches > self.batch_size:
            raise UsageError(
                f"--microbatches {self.microbatches} of a minibatch of {self.batch_size} samples: each needs one; "
                f"use at most {self.batch_size}"
            )
        if self.strategy.held_by is Holder.SHARDS and self.shards < self.partitions:
            raise UsageError(
                f"--shards {self.shards} of replicas in {self.partitions} partitions: each partition has shards of its "
                f"own; use at least {self.partitions}"
            )
        for name in ("precision", "fixed_point"):
            if (value := getattr(self, name)) != getattr(Settings(), name):
                why = (
                    "what crosses between partitions is laid out for float32"
                    if value == "bf16"
                    else "no partition sees alone what overflows"
                )
                raise UsageError(f"{option(name)} {value} of split replicas: {why}; leave it off")

    @property
    def arithmetic(self) -> str:
        """Name of the arithmetic of gradients: a precision, or the value of `fixed_point`."""
        return self.fixed_point or self.precision

    @property
    def pipeline(self) -> str:
        """Name of the pipeline schedule."""
        return named(self.schedule, self.microbatches)

    def own(self, kind: type[TraitsT]) -> TraitsT:
        """Return the strategy as its class; refuse one of another class."""
        if not isinstance(self.strategy, kind):
            raise LocalProtocolError(f"settings of strategy {self.strategy.name} are no {kind.__name__}")
        return self.strategy

    @property
    def mesh(self) -> Mesh:
        """Mesh of the replicas and partitions that compute gradients."""
        return Mesh(self.replicas, self.partitions)

    @property
    def global_batch(self) -> int:
        """Samples of an update in which all replicas take part."""
        return self.strategy.global_batch(self)

    @cached_property
    def policy(self) -> Policy:
        """Policy of the job's shards, without state, for reading its traits."""
        return self.strategy.policy(self, rules=False)

    def with_optimizers(self, **named: Optimizer) -> Settings:
        """Return the same settings with a script's `optimizer` or `local_optimizer`.

        A strategy without such an optimizer refuses it.
        """
        assert isinstance(self.strategy, StrategyOptions)
        for name in named.keys() - options_of(type(self.strategy)).keys():
            what = name.replace("_", " ")
            raise UsageError(f"strategy {self.strategy.name} steps with no {what} of the script's: leave it off there")
        return dataclasses.replace(self, strategy=self.strategy.with_options(**named))

    def unmeasured(self) -> Settings:
        """Return the same settings without evaluations."""
        return dataclasses.replace(self, evaluate_every=0)

    @property
    def local(self) -> Optimizer | None:
        """Optimizer of the replicas' own steps; None where they push gradients."""
        return self.strategy.pushing.local

    @property
    def gradient_optimizer(self) -> Optimizer:
        """Optimizer that steps by gradients: the replicas', or else the shards'."""
        return self.local or self.optimizer

    @property
    def slots(self) -> int:
        """Number of a replica's gradient vectors of each model: the strategy's, or two where no push is waited for."""
        slots: int = getattr(self.strategy, "slots", 1 + self.strategy.pushing.prefetch)
        return slots

    @property
    def rate_varies(self) -> bool:
        """True where the factor on the shards' rate may differ from 1: not where local steps follow the schedule."""
        return not self.local and (self.rate_follows or self.lr_scaling != "none")


_known: dict[str, type[Traits]] = {"": Pushing}


def know(name: str, kind: type[Traits]) -> None:
    """Register a strategy's class by its name, for decoding."""
    _known[name] = kind


def options_of(kind: type) -> dict[str, object]:
    """Return the options of a strategy and their types."""
    fields = [option_field.name for option_field in dataclasses.fields(kind) if option_field.init]
    return {name: read_as(hints_of(kind)[name]) for name in fields}


def read_strategy(kind: type, decoded: object) -> object:
    """Decode a strategy into the class that is registered by its name; no message causes an import.

    >>> encoded = msgspec.msgpack.encode(Settings(strategy=Pushing(push_every=3)))
    >>> msgspec.msgpack.decode(encoded, type=Settings, dec_hook=read_strategy).strategy
    Pushing(push_every=3, ...)
    """
    if kind is not Traits:
        # msgspec's way to say that a decoder does not know a class
        raise NotImplementedError(f"{kind.__name__} cannot be decoded")
    if isinstance(decoded, Traits):
        return decoded
    name = decoded.get("kind") if isinstance(decoded, dict) else None
    if not isinstance(decoded, dict) or not isinstance(name, str) or name not in _known:
        raise ValueError(f"settings of strategy {name!r}, which is not known here")
    strategy_class: type = _known[name]
    try:
        options = {
            key: msgspec.convert(decoded[key], hint)
            for key, hint in options_of(strategy_class).items()
            if key in decoded
        }
        strategy: Traits = strategy_class(**options)
    except UsageError as error:
        raise ValueError(str(error)) from None
    return strategy


def read_strategy_or_name(kind: type, decoded: object) -> object:
    """Decode like `read_strategy`; of a strategy that is not registered, keep only the name."""
    if kind is Traits and isinstance(decoded, dict) and decoded.get("kind") not in _known:
        stranger = StrategyOptions()
        name = str(decoded.get("kind"))
        vars(stranger).update(name=name, kind=name)
        return stranger
    return read_strategy(kind, decoded)


SPELLED = ("budget", "evaluate_every", "snapshot_every")
"""Options whose parsed values `job.json` and `result.json` hold instead."""


def flat(settings: Settings) -> dict[str, object]:
    """Return settings as a table of names and plain values, for `job.json` and `result.json`.

    >>> flat(Settings())["replicas"], flat(Settings())["batch_size"]
    (1, 64)
    """
    strategy = settings.strategy
    keys = {name: key for key, name in strategy.spelled.items()}
    table: dict[str, object] = {keys.get(name, name): getattr(strategy, name) for name in options_of(type(strategy))}
    of_strategy = [name for name, value in vars(Settings).items() if isinstance(value, OfStrategy)]
    shared = [field.name for field in dataclasses.fields(SharedOptions) if field.name not in SPELLED]
    table |= {name: getattr(settings, name) for name in (*of_strategy, "shards", *shared, "own_data", "budget_seconds")}
    evaluations, snapshots = settings.evaluations, settings.snapshots
    table |= {"evaluate_every": evaluations.epochs, "evaluate_minibatches": evaluations.minibatches}
    table |= {f"snapshot_{unit}": getattr(snapshots, unit) for unit in ("seconds", "pushes", "minibatches")}
    plain: dict[str, object] = msgspec.to_builtins(table)
    return plain


def at_least(part: object, bound: int, names: Iterable[str], spelled: Mapping[str, str]) -> None:
    """Refuse settings of these names that are below a bound, or not finite.

    `spelled` has the names of options that differ from those of their settings.
    """
    for name in names:
        if not bound <= (value := getattr(part, name)) < float("inf"):
            raise UsageError(f"{option(spelled.get(name, name))} {value}: must be {bound} or more")


def among(what: str, name: str, known: Iterable[str]) -> None:
    """Refuse an unknown name, with the nearest known one."""
    if name not in known:
        raise unknown(what, name, known)


def fit(part: object, name: str, spelled: Mapping[str, str]) -> None:
    """Refuse a whole number that does not fit into a message."""
    if isinstance(value := getattr(part, name), int) and not -(2**63) <= value < 2**63:
        raise UsageError(f"{option(spelled.get(name, name))} {value}: does not fit into 64 bits")


def option(name: str) -> str:
    """Spell a setting as an option of the command line.

    >>> option("push_every")
    '--push-every'
    """
    return "--" + name.replace("_", "-")


def _within(model: Range, held: Range) -> Range:
    start, stop = max(model.start, held.start), min(model.stop, held.stop)
    return Range(start, stop) if start < stop else Range(model.start, model.start)


class Plan(msgspec.Struct, frozen=True):
    """Plan of a job, made once its first replica has sent its layout: the holders of each range, and the data."""

    settings: Settings
    layout: Layout
    assignments: tuple[Assignment, ...]
    samples: int
    """Samples in an epoch; 0 where unknown: of streams, or where each replica has data of its own."""
    left_out: int = 0
    """Samples of the training set that `drop_last` leaves out of an epoch."""
    optimizers: tuple[Optimizer, ...] = ()
    """Optimizer of each model, where a script names them; else empty."""

    @property
    def models(self) -> int:
        """Number of models, each with an optimizer of its own."""
        return max(1, len(self.layout.models))

    def optimizer(self, model: int) -> Optimizer:
        """Return the optimizer of a model."""
        return self.optimizers[model] if self.optimizers else self.settings.optimizer

    def stepped(self, group: int) -> dict[str, float]:
        """Return a parameter group's options for the shards' optimizer; local steps follow them instead."""
        return {} if self.settings.local else self.layout.stepped(group)

    def parts(self, shard: int) -> tuple[Range, ...]:
        """Return the range of each model that moves between a shard and replicas; an empty one where it has none."""
        held = self.assignments[shard].moving
        return tuple(_within(model, held) for model in self.layout.models) or (held,)

    def factor(self, samples: int) -> float:
        """Return the factor on the learning rate after so many applied samples."""
        s = self.settings
        scale = SCALINGS[s.lr_scaling](s.global_batch / s.base_batch) if s.base_batch else None
        return s.rate_factor(samples, self.samples, s.epochs, s.global_batch, scale)

    def local_factor(self, samples: int) -> float:
        """Return the factor on the rate of local steps after so many samples of the whole job."""
        s = self.settings
        return s.rate_factor(samples, self.samples, s.epochs, s.batch_size * s.replicas) if s.rate_follows else 1.0

    @property
    def allotted(self) -> bool:
        """True where each replica has an allotment."""
        return not self.samples or self.settings.order == SEQUENTIAL or self.settings.keeps_parts

    @property
    def batches(self) -> int:
        """Number of minibatches in an epoch."""
        return -(-self.samples // self.settings.batch_size)

    @property
    def ruler(self) -> int:
        """Index of the shard that rules the rounds: the first that holds anything."""
        return next(i for i, assignment in enumerate(self.assignments) if assignment.moving.size)
