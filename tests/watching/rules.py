"""Rules of a job in which nobody waits for anybody, as far as messages alone can show them."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Iterable

from distbelief.core import roles
from distbelief.core.conversations import dealing, membership, pushing
from distbelief.core.messages import Message, Version
from distbelief.core.settings import Plan
from distbelief.sharding.layout import Range

Minibatch = tuple[int, int]
"""Epoch and number of a minibatch."""
Life = tuple[str, int]
"""A role, and which incarnation of it."""


class _Push:
    """One push, at all shards: what it holds, and how many shards have not acknowledged it."""

    def __init__(self, steps: int, samples: int, parts: int, holds: list[Minibatch]) -> None:
        self.steps, self.samples, self.holds = steps, samples, holds
        self.unacknowledged = parts


class _Replica:
    """What a replica was dealt, has pushed and has reported."""

    def __init__(self) -> None:
        self.dealt: list[Minibatch] = []
        self.pushes: list[_Push] = []
        self.pushed = 0
        self.reported = Counter[str]()


class Rules:
    """The guarantees of Downpour that messages alone show.

    - Every push is applied at a shard at most once, in the order of the replica's clock, and is acknowledged only then.
    - Versions never go back on a link, and no two pushes are acknowledged with one version.
    - A push names a version that its replica had fetched from that shard, and holds the next minibatches it was dealt;
      of several models, the first of a minibatch does, and those after it hold the same.
    - A replica reports steps and samples only when all shards have acknowledged their push, and all of them before it
      leaves.
    - A minibatch is dealt to one living replica at a time, which has not been let go.
    - `finish`: every minibatch is applied at every shard to every model, exactly once where nobody died.

    Args:
        alive: whether an incarnation of a role still takes part.
    """

    def __init__(self, alive: Callable[[str, int], bool]) -> None:
        self.plan: Plan | None = None
        self.applied: Counter[str] = Counter()
        """Updates of each shard."""
        self.samples: Counter[str] = Counter()
        """Samples applied at each shard."""
        self.replicas: defaultdict[Life, _Replica] = defaultdict(_Replica)
        self.counted = 0
        """Samples that the coordinator was told of."""
        self._alive = alive
        self._lives: Counter[str] = Counter()
        self._members: Counter[str] = Counter()
        self._clocks: Counter[tuple[str, Life]] = Counter()
        self._told: dict[tuple[str, Life], Version] = {}
        self._fetched: defaultdict[tuple[Life, str], set[Version]] = defaultdict(set)
        self._versions: set[tuple[str, int]] = set()
        self._holder: dict[Minibatch, Life] = {}
        self._let_go: set[Life] = set()
        self._times: Counter[tuple[str, Minibatch, Range]] = Counter()

    def sent(self, sender: str, to: str, message: Message) -> None:
        """A living role has sent a message."""
        match message:
            case membership.Join():
                assert message.incarnation >= self._lives[sender], (
                    f"{sender} joins as {message.incarnation} after {self._lives[sender]}"
                )
                self._lives[sender] = message.incarnation
            case membership.Welcome():
                assert self.plan in (None, message.plan), "two replicas were told different plans"
                self.plan = message.plan
            case membership.Farewell():
                self._let_go.add(self._life(to))
            case dealing.Deal():
                self._deal(to, message)
            case pushing.Push():
                self._push(sender, to, message)
            case pushing.Pushed():
                # the last word of a former life may come late
                clocks = max(self._clocks[sender, (to, life)] for life in range(self._lives[to] + 1))
                assert message.clock <= clocks, f"{sender} acknowledges push {message.clock} of {to}, which it has not"
                assert message.version.updates == self.applied[sender], (
                    f"{sender} tells {message.version} after {self.applied[sender]} updates"
                )
            case pushing.Fetched():
                assert message.version.updates == self.applied[sender], (
                    f"{sender} tells {message.version} after {self.applied[sender]} updates"
                )
            case dealing.Progress():
                self._progress(sender, message)
            case membership.Leave():
                one = self.replicas[self._life(sender)]
                assert one.reported["steps"] == one.pushed, (
                    f"{sender} leaves after {one.pushed} steps and has reported {one.reported['steps']}"
                )

    def delivered(self, sender: str, to: str, message: Message) -> None:
        """A message is about to be handled by a living role."""
        match message:
            case membership.Join():
                self._members[sender] = message.incarnation
            case pushing.Push():
                life = sender, message.incarnation
                self._clocks[to, life] += 1
                assert message.clock == self._clocks[to, life], (
                    f"{to} has push {self._clocks[to, life] - 1} of {life}, then {message.clock}"
                )
                self.applied[to] += 1
                self.samples[to] += message.samples
                for minibatch in self.replicas[life].pushes[message.clock - 1].holds:
                    self._times[to, minibatch, Range(message.start, message.stop)] += 1
            case pushing.Pushed():
                self._grows(sender, to, message.version)
                key = (sender, message.version.updates)
                assert key not in self._versions, (
                    f"two pushes were acknowledged as update {message.version.updates} of {sender}"
                )
                self._versions.add(key)
                self.replicas[self._life(to)].pushes[message.clock - 1].unacknowledged -= 1
            case pushing.Fetched():
                self._grows(sender, to, message.version)
                self._fetched[self._life(to), sender].add(message.version)
            case dealing.Progress():
                self.counted += message.samples

    def finish(self, outcome: str, died: Iterable[str]) -> None:
        """The job has ended: everything was applied, if it was done."""
        if outcome != "done":
            return
        assert self.plan is not None, "a job was done without a plan"
        settings, died = self.plan.settings, list(died)
        for epoch in range(settings.epochs):
            for index in range(self.plan.batches):
                for shard in self._parts(self.plan):
                    for part in self.plan.parts(roles.index_of(shard)):
                        times = self._times[shard, (epoch, index), part]
                        assert times == 1 or (times and died), (
                            f"{shard} applied minibatch {index} of epoch {epoch} {times} times to {part}; died: {died}"
                        )
        if not died and self.plan.samples:
            due = self.plan.samples * self.plan.settings.epochs
            assert self.counted == due, f"{self.counted} samples were counted of {due}"

    def _parts(self, plan: Plan) -> list[str]:
        return [roles.shard(i) for i, assignment in enumerate(plan.assignments) if assignment.moving.size]

    def _life(self, role: str) -> Life:
        return role, self._lives[role]

    def _grows(self, shard: str, to: str, version: Version) -> None:
        before = self._told.get((shard, self._life(to)), version)
        assert version >= before, f"{shard} told {to} {before} and then {version}"
        self._told[shard, self._life(to)] = version

    def _deal(self, to: str, message: dealing.Deal) -> None:
        portion = message.portion
        for index in portion.numbers:
            minibatch = (portion.epoch, index)
            holder = self._holder.get(minibatch)
            assert holder is None or holder in self._let_go or not self._alive(*holder), (
                f"minibatch {minibatch} is dealt to {to} and to {holder}, which lives"
            )
            life = to, self._members[to]  # a later one may have been born, of which the coordinator has not heard
            self._holder[minibatch] = life
            self.replicas[life].dealt.append(minibatch)

    def _push(self, sender: str, to: str, message: pushing.Push) -> None:
        assert message.incarnation == self._lives[sender], (
            f"{sender} pushes as {message.incarnation} and is {self._lives[sender]}"
        )
        one, plan = self.replicas[self._life(sender)], self.plan
        assert plan is not None, f"{sender} pushes before anybody was welcomed"
        assert message.version in self._fetched[self._life(sender), to], (
            f"{sender} pushes from {message.version} of {to}, which it never fetched"
        )
        if message.clock == len(one.pushes) + 1:
            later = plan.models > 1 and not message.steps
            holds = one.pushes[-1].holds if later else one.dealt[one.pushed : one.pushed + message.steps]
            size, most = plan.settings.batch_size, plan.samples
            samples = sum(min(size, most - index * size) for _, index in holds)
            known = samples if most else message.samples  # of data of its own only the replica knows
            told = f"{sender} pushes {message}, and was dealt {holds} for it"
            assert message.samples == known, told
            assert message.steps in (len(holds), 0), told
            one.pushes.append(_Push(message.steps, message.samples, len(self._parts(plan)), holds))
            one.pushed += message.steps
        push = one.pushes[-1]
        same = (message.clock, message.steps, message.samples) == (len(one.pushes), push.steps, push.samples)
        assert same, f"{sender} sends {to} {message}, and other shards push {len(one.pushes)} of {push.steps} steps"

    def _progress(self, sender: str, message: dealing.Progress) -> None:
        one = self.replicas[self._life(sender)]
        one.reported.update(steps=message.steps, samples=message.samples, pushes=message.pushes)
        done = [push for push in one.pushes if not push.unacknowledged]
        for name, most in (
            ("steps", sum(p.steps for p in done)),
            ("samples", sum(p.samples for p in done if p.steps)),
            ("pushes", len(done)),
        ):
            assert one.reported[name] <= most, (
                f"{sender} has reported {one.reported[name]} {name}, and all shards have acknowledged {most}"
            )
