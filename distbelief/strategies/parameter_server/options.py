"""Strategies on a parameter server.

Those of served replicas differ in what may be stale: downpour, synchronous, softsync, bounded. The replicas of hogwild
(Niu et al. 2011) and locking share the memory of one machine, and update it in place.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, ClassVar

from distbelief.core.consistency import BoundedPolicy, Policy, RoundRobin, SoftsyncPolicy
from distbelief.core.optimizer import Optimizer, optim
from distbelief.core.rounds import Rounds, quorum_of
from distbelief.core.settings import SAMPLES, WEIGHTS, Accruing, Pushing, Settings, among, at_least
from distbelief.core.values import Given
from distbelief.errors import UsageError
from distbelief.strategies.base import (
    LocalMachine,
    Replicated,
    Scaled,
    Served,
    Splittable,
    Strategy,
    Virtual,
    check_local_links,
)

if TYPE_CHECKING:
    from distbelief.strategies.players import Players

SHARING = 240
"""Most replicas that can share a shard's memory."""


@dataclass(frozen=True)
class ServedWithOptimizer(Splittable, Served):
    """A served strategy whose shards have an optimizer."""

    optimizer: Given[Optimizer, str] = Given(Optimizer(), str, optim)
    """Optimizer of the shards."""

    @classmethod
    def players(cls) -> Players:
        from distbelief.strategies.parameter_server.players import PLAYERS

        return PLAYERS


@dataclass(frozen=True)
class Asynchronous(Pushing, ServedWithOptimizer):
    """A strategy whose replicas push and fetch when they like."""

    meaningless: ClassVar[Mapping[str, str]] = {"path": ""}

    def served_because(self, settings: Settings, carrier: str) -> str:
        reasons = {
            f"strategy {self.name} is a user's, and may have its own slices": ":" in self.name,
            f"--transport {carrier} has no memory that replicas and shards share": carrier != "shared",
            "--standby 1 needs pushes, which the standby holds": settings.standby > 0,
            "--local-optimizer steps a copy that each replica keeps": self.local is not None,
            f"--partitions {self.partitions}: a split replica pushes in parts": self.partitions > 1,
            f"--replicas {self.replicas}: at most {SHARING} can share the memory of a shard": self.replicas > SHARING,
        }
        return next((reason for reason, holds in reasons.items() if holds), "")


@dataclass(frozen=True)
class Staggering(Accruing):
    """Options that spread the exchange of local steps over time."""

    stagger: bool = field(default=False, kw_only=True)
    """Send each shard its part of a change after another of the --push-every local steps, evenly spread, instead of all
    at once.
    """
    stagger_delay: int = field(default=0, kw_only=True)
    """Local steps between sending a part with --stagger and taking what comes of it; it travels meanwhile."""
    stagger_mix: float = field(default=0.0, kw_only=True)
    """Weight of a replica's own parameters when it takes those that come with --stagger: 0 takes these, 1 keeps its
    own.
    """

    def check_staggered(self, settings: Settings) -> None:
        """Refuse phases of shards without local steps, or that could not be kept."""
        at_least(self, 0, ("stagger_delay",), {})
        delayed = self.stagger_delay or self.stagger_mix
        steps = self.push_steps
        refused = {
            "--stagger-delay and --stagger-mix say how --stagger takes parts: set it": delayed and not self.stagger,
            "--stagger sends the changes of local steps: set --local-optimizer": self.stagger and not self.local,
            f"--stagger-mix {self.stagger_mix:g} is a weight from 0 to 1": not 0 <= self.stagger_mix <= 1,
            "--stagger-delay and --stagger-mix with --shards 1: there is one part": delayed and settings.shards == 1,
            f"--stagger-delay {self.stagger_delay} with --push-every {steps}: a part is sent again before it is taken":
                self.stagger and self.stagger_delay >= steps,
            "--stagger with --push-every auto: phases are of a fixed number of steps": self.stagger and self.paced,
            "--stagger with --partitions: each partition has its own shards": self.stagger and settings.partitions > 1,
            "--stagger with --quorum or --backup-workers: a part that is late has no round":
                self.stagger and settings.policy.leaves_behind,
        }  # fmt: skip
        for why in (why for why, holds in refused.items() if holds):
            raise UsageError(f"{why}, or leave it off")


@dataclass(frozen=True)
class Downpour(Asynchronous, Staggering):
    """Each replica pushes gradients to server shards and fetches parameters from them, without waiting for the others
    (Dean et al. 2012, section 4.1).
    """

    name: ClassVar[str] = "downpour"

    def check(self, settings: Settings) -> None:
        super().check(settings)
        self.check_staggered(settings)


@dataclass(frozen=True)
class Synchronous(Staggering, ServedWithOptimizer, Scaled):
    """Rounds: each replica computes one minibatch, and the shards make one update with the gradient of all (Chen et al.
    2016).
    """

    name: ClassVar[str] = "synchronous"
    one_moment: ClassVar[bool] = True

    backup_workers: int = 0
    """Replicas that a round does not wait for: the last gradients are dropped, and their minibatches dealt again."""
    quorum: float = field(default=0.0, kw_only=True)
    """Gradients that a round waits for, instead of --backup-workers. Below 1 it is a fraction of the members (0.75),
    and follows deaths; else a number; 0 waits for all."""
    push_weight: str = field(default=SAMPLES, kw_only=True)
    """Weight of a replica's change by --local-optimizer in a round: samples, or speed (samples times samples a second).
    """

    def needs_memory(self, settings: Settings, carrier: str) -> bool:
        # where a round waits for all, nobody updates the shards' memory while replicas read it; a user's strategy may
        # have other players: it gets copies
        waits = not (self.backup_workers or self.quorum or self.standby or self.local)
        return waits and carrier == "shared" and self.partitions == 1 and ":" not in self.name

    def check(self, settings: Settings) -> None:
        at_least(self, 0, ("backup_workers", "quorum", "local_lr"), {})
        self.check_local(settings)
        self.check_staggered(settings)
        among("push weight", self.push_weight, WEIGHTS)
        if self.push_weight != SAMPLES and not self.local:
            raise UsageError(f"--push-weight {self.push_weight}: weighs local steps: set --local-optimizer")
        if self.local_lr and not self.local_optimizer:
            raise UsageError(f"--local-lr {self.local_lr}: is the rate of --local-optimizer: set that, or leave it off")
        if self.backup_workers >= settings.replicas:
            raise UsageError(
                f"--backup-workers {self.backup_workers} of {settings.replicas} replicas: a round must wait for at "
                "least one of them"
            )
        if self.quorum and self.backup_workers:
            raise UsageError(
                f"--quorum {self.quorum:g} and --backup-workers {self.backup_workers} both set how many replicas a "
                "round waits for: leave one of them off"
            )
        if self.quorum > settings.replicas or (self.quorum > 1 and self.quorum % 1):
            raise UsageError(
                f"--quorum {self.quorum:g} of {settings.replicas} replicas: must be a fraction below 1, or a whole "
                "number of replicas"
            )

    def global_batch(self, settings: Settings) -> int:
        waited = quorum_of(self.quorum, settings.replicas) if self.quorum else settings.replicas - self.backup_workers
        return waited * self.pushing.global_batch(settings)

    def policy(self, settings: Settings, rules: bool) -> Policy:
        return Rounds(settings, rules, self.backup_workers, self.quorum)


@dataclass(frozen=True)
class Softsync(Asynchronous):
    """The shards make one update with the mean of floor(replicas / n) pushes; the staleness is about n (Zhang et al.
    2016).
    """

    name: ClassVar[str] = "softsync"

    n: int = 1
    """One update for every floor(replicas / n) pushes; 1 is nearest to synchronous, as many as replicas is downpour."""

    def served_because(self, settings: Settings, carrier: str) -> str:
        several = f"--n {self.n} of {self.replicas} replicas: the shards' processes make one update of several pushes"
        return several if self.replicas // self.n > 1 else super().served_because(settings, carrier)

    def check(self, settings: Settings) -> None:
        super().check(settings)
        at_least(self, 1, ("n",), {})
        if self.n > settings.replicas:
            raise UsageError(
                f"--n {self.n}: must be at most --replicas, which is {settings.replicas}; then each push is an update"
            )

    def global_batch(self, settings: Settings) -> int:
        return settings.replicas // self.n * super().global_batch(settings)

    def policy(self, settings: Settings, rules: bool) -> Policy:
        return SoftsyncPolicy(self.n, self.staleness_scaling)


@dataclass(frozen=True)
class Bounded(Asynchronous):
    """Pushes are applied at once; no replica begins a step more than `staleness` clocks ahead of the slowest (Ho et al.
    2013).
    """

    name: ClassVar[str] = "bounded"

    staleness: int = 3
    """Clocks (pushes) by which a replica may be ahead of the slowest as it begins a step; 0 waits for all each time."""

    def check(self, settings: Settings) -> None:
        super().check(settings)
        at_least(self, 0, ("staleness",), {})

    def policy(self, settings: Settings, rules: bool) -> Policy:
        return BoundedPolicy(self.staleness, self.staleness_scaling, settings.replicas)


LOCKS = ("shard", "round-robin")
GONE = {
    "none": "updates without locks are strategy hogwild: use that",
    "global": "one lock for all parameters is --locks shard --shards 1, the default: leave it off",
}
"""Values of earlier versions, and their replacement."""
STEPPED = ("sgd", "momentum", "nesterov", "adagrad")
"""Optimizers with at most one number of state for each element: several could be of different updates."""


@dataclass(frozen=True)
class InMemory(Replicated):
    """A strategy whose replicas update the parameters in place."""

    meaningless: ClassVar[Mapping[str, str]] = {
        "path": "its replicas always make the updates",
        "device": "its replicas share the host's memory: use cpu",
        "listen": "its replicas update the memory of one machine",
        "script": "between two lines of a script, other replicas could change its parameters: give it a task",
        **dict.fromkeys(
            ("data", "order"), "its replicas are processes of one machine, with the same data: use downpour"
        ),
        **dict.fromkeys(
            ("partitions", "split", "schedule", "microbatches", "chunks"),
            "replicas update one memory that holds the whole model, which cannot be split",
        ),
    }

    def needs_memory(self, settings: Settings, carrier: str) -> bool:
        return True

    def check(self, settings: Settings) -> None:
        if self.replicas > SHARING:
            raise UsageError(f"--replicas {self.replicas}: at most {SHARING} can share the memory of a shard")

    def check_machine(self, settings: Settings, machine: LocalMachine) -> None:
        if machine.carrier != "shared":
            option = f"--listen {machine.listen}" if machine.listen else f"--transport {machine.transport}"
            raise UsageError(f"{option}: the replicas of {self.name} update the memory of one machine: leave it off")

    def check_virtual(self, settings: Settings, cluster: Virtual) -> None:
        check_local_links(cluster)
        if cluster.host_replicas and cluster.host_replicas < settings.replicas:
            raise UsageError(
                f"hosts with {cluster.host_replicas} replicas: all {settings.replicas} replicas share memory, and must "
                "be on one host; leave it off"
            )


@dataclass(frozen=True)
class Hogwild(InMemory):
    """No locks: updates may overwrite parts of each other, and parameters may change while a gradient is computed."""

    name: ClassVar[str] = "hogwild"
    meaningless: ClassVar[Mapping[str, str]] = {
        "fixed_point": "rounding a parameter would undo what other replicas add at the same time: use downpour",
    }

    optimizer: Given[Optimizer, str] = Given(Optimizer(), str, optim)
    """Optimizer of every replica: sgd, momentum, nesterov or adagrad."""

    @classmethod
    def players(cls) -> Players:
        from distbelief.strategies.parameter_server.players import HOGWILD_PLAYERS

        return HOGWILD_PLAYERS

    def check(self, settings: Settings) -> None:
        super().check(settings)
        if self.optimizer.name not in STEPPED:
            raise UsageError(
                f"--optimizer {self.optimizer.name}: needs several numbers of the same moment, which shared memory "
                f"does not have; use {', '.join(STEPPED)}, or strategy downpour, which steps with any"
            )
        if self.optimizer.options.get("dampening"):
            raise UsageError(
                "--optimizer-options dampening: torch leaves it out of the first step, and no replica knows which step "
                "is the first: leave it off"
            )


@dataclass(frozen=True)
class Locking(InMemory):
    """Updates under the shards' locks: none is lost, each is whole at every shard, and parameters do not change while a
    gradient is computed.
    """

    name: ClassVar[str] = "locking"

    optimizer: Given[Optimizer, str] = Given(Optimizer(), str, optim)
    """Optimizer with which a replica updates the parameters, under a shard's lock."""
    locks: str = "shard"
    """Locks of an update: shard (each shard's for its part), or round-robin (the lock of the one shard, which replicas
    take in a fixed order)."""
    shards: int = 1
    """Shards of the parameters, each with its lock; 1 is one lock for everything."""

    @classmethod
    def players(cls) -> Players:
        from distbelief.strategies.parameter_server.players import PLAYERS

        return PLAYERS

    def served_because(self, settings: Settings, carrier: str) -> str:
        """Return "": a replica makes its update with the shard's machine, under the shard's lock."""
        return ""

    def check_virtual(self, settings: Settings, cluster: Virtual) -> None:
        super().check_virtual(settings, cluster)
        Strategy.check_virtual(self, settings, cluster)

    def policy(self, settings: Settings, rules: bool) -> Policy:
        return RoundRobin(self.replicas) if self.locks == "round-robin" else Policy()

    def check(self, settings: Settings) -> None:
        super().check(settings)
        at_least(self, 1, ("shards",), {})
        if why := GONE.get(self.locks):
            raise UsageError(f"--locks {self.locks}: {why}")
        among("--locks", self.locks, LOCKS)
        if self.locks == "round-robin" and self.shards != 1:
            raise UsageError(f"--shards {self.shards}: --locks round-robin orders a single lock: leave it off")
