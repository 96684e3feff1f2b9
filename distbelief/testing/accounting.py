"""Checker of a job, which derives from messages alone what is dealt, pushed, applied and dropped."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Mapping
from typing import Any

import torch

from distbelief.core import roles
from distbelief.core.conversations import attendance, dealing, initialising, membership, mirroring, pushing
from distbelief.core.messages import Bulk, Message
from distbelief.core.portions import AllotmentPlace, Position
from distbelief.core.records import Forgotten, Json, Note, Rewound, Succeeded, Vacant
from distbelief.core.settings import SEQUENTIAL, Plan
from distbelief.testing.simulations import Observed, attach

Minibatch = tuple[int, int]


def life(role: str, incarnation: int) -> str:
    """Return the name of a life of a role; the first life has the role's name.

    >>> life("replica 0", 0), life("replica 0", 2)
    ('replica 0', 'replica 0 again (2)')
    """
    return f"{role} again ({incarnation})" if incarnation else role


class Accounting:
    """Account of a run's minibatches and updates.

    - At any time only one living replica holds a minibatch. A push contains the next minibatches that were dealt and
      not returned. A dropped push returns its minibatches.
    - A shard applies a push at most once, and applies or drops it, not both; all shards agree.
    - The version of a shard grows by one with each update.
    - A round contains minibatches of one epoch, each once.
    - A restarted shard holds the state of its checkpoint. Pushes that it had acknowledged since are reported once, as
      forgotten. In rounds all roles go back together, and the kept updates contain each minibatch once.
    - A standby that succeeds a shard holds every update that the shard had acknowledged.
    - All partitions of a split replica push the same minibatches in the same push, each to the shards of its partition;
      here they count as one replica, with the name of the leading partition.
    - Each shard's part of a checkpoint contains all minibatches that its position counts as done. It contains no others
      if no role has died and the checkpoint waited for all.
    """

    def __init__(self, run: Observed) -> None:
        self.network = run.simulation.network
        self.plan: Any = None
        self.holder: dict[Minibatch, str] = {}
        self._let_go: set[str] = set()
        self.dealt: set[Minibatch] = set()
        """All dealt minibatches, except those beyond the end of a stream."""
        self.waiting: defaultdict[str, list[Minibatch]] = defaultdict(list)
        self.pushes: dict[tuple[str, int], list[Minibatch]] = {}
        self.sent_pushes: dict[tuple[str, str, int], tuple[pushing.Push, Any]] = {}
        self.arrivals: defaultdict[str, list[tuple[str, pushing.Push]]] = defaultdict(list)
        self.groups: defaultdict[str, dict[int, list[tuple[str, int]]]] = defaultdict(dict)
        self.dropped: set[tuple[str, int]] = set()
        self.applied: defaultdict[str, Counter[Minibatch]] = defaultdict(Counter)
        self.fates: dict[tuple[str, str, int], bool] = {}
        self.initial: dict[str, torch.Tensor] = {}
        self.moments: dict[tuple[str, int], float] = {}
        self.based: dict[tuple[str, str, int], int] = {}
        """Number of updates in the parameters from which a push was computed, by push and shard."""
        self.forgotten: set[tuple[str, str, int]] = set()
        """Pushes that a shard had applied and lost, by shard, replica and clock."""
        self._lost: defaultdict[str, set[tuple[str, int]]] = defaultdict(set)
        self._began: Counter[str] = Counter()
        self._generations: Counter[tuple[str, int]] = Counter()
        self._mirrored: dict[str, tuple[int, list[list[tuple[str, int]]], list[tuple[str, int]]]] = {}
        """For each shard: the updates its standby began with, those copied since, and the pushes of the next."""
        self._lasting: set[str] = set()
        """Shards whose memory survives their processes."""
        self._generation = 0
        self._run = run
        self._clock = run.simulation.clock
        self._lives: Counter[str] = Counter()
        self._members: Counter[str] = Counter()
        self._lent: dict[tuple[str, str, int], torch.Tensor] = {}
        self._ends: dict[str, tuple[str, int]] = {}
        self._parts: dict[tuple[int, str], int] = {}
        self.checkpoints: set[int] = set()
        """Checkpoints that were compared with the updates of the shards."""
        store: Any = run.simulation._store
        self._save, store.save_part = store.save_part, self._saved
        self._commit, store.commit = store.commit, self._committed
        attach(self.network, self)

    def sent(self, sender: str, to: str, message: Message) -> None:
        note = NOTES.get(type(message))
        if note is not None and not (roles.is_replica(sender) and roles.is_replica(to)):
            note(self, sender, to, message)

    def _note_join(self, sender: str, _: str, message: membership.Join) -> None:
        self._lives[sender] = message.incarnation
        self._ends[life(sender, message.incarnation)] = sender, message.incarnation

    def _note_welcome(self, _sender: str, _to: str, message: membership.Welcome) -> None:
        self.plan = message.plan
        if (generation := len(self._run.recorded(Rewound))) > self._generation:
            self._generation = generation
            self.holder.clear()

    def _note_anew(self, sender: str, _to: str, _message: membership.Anew) -> None:
        self._generations[sender, self._lives[sender]] += 1

    def _note_restored(self, sender: str, _: str, message: initialising.Restored) -> None:
        if message.lasts:
            self._lasting.add(sender)
        if message.loaded:
            self._restored(sender)

    def _note_deal(self, _: str, to: str, message: dealing.Deal) -> None:
        portion = message.portion
        for index in portion.numbers:
            holder, who = self.holder.get((portion.epoch, index)), self._name(to, self._members[to])
            assert holder is None or holder in self._let_go or not self._lives_on(holder), (
                f"{(portion.epoch, index)} is dealt to both {who} and {holder}"
            )
            self.holder[portion.epoch, index] = who
            self.dealt.add((portion.epoch, index))
            self.waiting[who].append((portion.epoch, index))

    def _note_farewell(self, _: str, to: str, _message: membership.Farewell) -> None:
        self._let_go.add(self._name(to, self._members[to]))

    def _note_ended(self, sender: str, _: str, message: dealing.StreamEnded) -> None:
        who = self._name(sender, self._lives[sender])
        beyond = {(epoch, n) for epoch, n in self.waiting[who] if epoch == message.epoch and n >= message.number}
        self.waiting[who] = [minibatch for minibatch in self.waiting[who] if minibatch not in beyond]
        self.dealt -= beyond

    def _note_progress(self, sender: str, _: str, message: dealing.Progress) -> None:
        who = self._name(sender, self._lives[sender])
        for portion in message.returned:
            for index in portion.numbers:
                self.waiting[who].remove((portion.epoch, index))
                if self.holder.get((portion.epoch, index)) == who:
                    del self.holder[portion.epoch, index]

    def _note_push(self, role: str, to: str, message: pushing.Push) -> None:
        sender = self._name(role, message.incarnation)
        before = sender, message.clock - 1
        if (sender, message.clock) in self.pushes:
            pass
        elif before in self.dropped and self.sent_pushes[sender, to, before[1]][0].version == message.version:
            self.pushes[sender, message.clock] = self.pushes[before]  # a change that was too late is pushed again
        else:
            mine = self.waiting[sender]
            assert len(mine) >= message.steps
            self.pushes[sender, message.clock] = mine[: message.steps]
            del mine[: message.steps]
        payload = None
        if not self.network.phantom:
            lent = self._lends(role, message)
            payload = lent.clone()
            self._lent[sender, to, message.clock] = lent
        self.sent_pushes[sender, to, message.clock] = message, payload

    def _note_initialise(self, sender: str, to: str, message: initialising.Initialise) -> None:
        if not self.network.phantom:
            self._lent[sender, to, -message.start] = self._lends(sender, message)

    def _lends(self, role: str, message: Bulk) -> torch.Tensor:
        """Return a message's payload if it lies in the memory of its sender."""
        arena = self.network.endpoints[role].arena
        start, stop = message.start - arena.held.start, message.stop - arena.held.start
        return arena.gradients[message.slot][start:stop]

    def _note_pushed(self, sender: str, to: str, message: pushing.Pushed) -> None:
        self._acknowledged(sender, self._name(to, message.incarnation), message)

    def _saved(self, number: int, part: str, arrays: dict[str, torch.Tensor], facts: Json) -> None:
        self._parts[number, part.replace("-", " ")] = facts["updates"]
        self._save(number, part, arrays, facts)

    def _committed(self, number: int, plan: Plan, position: Position, samples: int, script: bool = False) -> object:
        """Compare a sealed checkpoint with the updates in each of its parts."""
        done = self._done(position)
        for shard in () if self._vacated else self.shards:
            groups = [group for version, group in self.groups[shard].items() if version <= self._parts[number, shard]]
            held = {minibatch for group in groups for minibatch in self.batches(group)}
            missing, more = done - held - self._passed_over, held - done
            assert not missing, f"checkpoint {number} counts {missing} as done, but {shard} had not applied them"
            without = f"checkpoint {number} is made without"
            waited = not any(without in note.text for note in self._run.recorded(Note))
            assert not (more and waited and not self._run.simulation.killed), (
                f"checkpoint {number} of {shard} holds {more}, which are not done"
            )
            self.checkpoints.add(number)
        return self._commit(number, plan, position, samples, script)

    @property
    def _vacated(self) -> set[str]:
        """Return the shards and standbys whose successors did not find their state."""
        return {record.role for record in self._run.recorded(Vacant)} - self._lasting

    def _done(self, position: Position) -> set[Minibatch]:
        """Return the dealt minibatches that a position counts as done."""
        whole = AllotmentPlace("", 0, self.plan.batches, position.epoch, position.batch, position.undone)
        places = position.places or (whole,)
        undone = {(portion.epoch, index) for place in places for portion in place.undone for index in portion.numbers}
        return {
            (epoch, index)
            for epoch, index in self.dealt - undone
            for place in places
            if index in range(place.first, place.first + place.count)
            and (epoch, index - place.first) < (place.epoch, place.batch)
        }

    @property
    def _passed_over(self) -> set[Minibatch]:
        """Return the dropped minibatches that are not dealt again: those of data in sequential order."""
        in_order = self.plan.settings.order == SEQUENTIAL or not self.plan.samples
        return {minibatch for key in self.dropped for minibatch in self.pushes[key]} if in_order else set()

    def _name(self, role: str, incarnation: int) -> str:
        """Return the name of a life of a role, in one generation of the job."""
        role = roles.lead_of(role)
        name = life(role, incarnation) + (
            f", generation {generation}" if (generation := self._generations[role, incarnation]) else ""
        )
        self._ends[name] = role, incarnation
        return name

    def _copied(self, shard: str, message: mirroring.StateSent | mirroring.Copied | mirroring.Decided) -> None:
        """Note that an update reaches a standby, in the order of its shard."""
        if isinstance(message, mirroring.StateSent):
            self._mirrored[shard] = message.updates, [], []
            return
        _, updates, gathered = self._mirrored[shard]
        if isinstance(message, mirroring.Copied):
            keys = [(self._name(key.who, key.incarnation), key.clock) for key in message.keys]
            gathered += keys
            if message.what is not mirroring.CopyUse.GATHER:
                updates.append(keys)
                gathered.clear()
        elif message.step is not None:
            updates.append(list(gathered))
            gathered.clear()

    def _inherited(self, shard: str, now: int) -> None:
        """Check that a standby which succeeds its shard holds all acknowledged updates, and perhaps more."""
        began, updates, gathered = self._mirrored[shard]
        assert now >= len(self.groups[shard]), (
            f"{shard} had acknowledged {len(self.groups[shard])} updates, but its standby holds {now}"
        )
        for version, keys in enumerate([*updates, gathered], began + 1):
            known = self.groups[shard].get(version, [])
            assert set(known) <= set(keys) or version > now, (
                f"{shard} had acknowledged {known} as update {version}, but its standby holds {keys}"
            )
            for who, clock in keys if version <= now else ():
                if (who, clock) not in known:
                    self._take(shard, who, self.sent_pushes[who, shard, clock][0], version, incarnation=-1)
            if version <= now:
                self.groups[shard][version] = list(keys)
                self._hold_round(shard, version)

    def _restored(self, shard: str) -> None:
        """Undo the updates of a restarted shard after its checkpoint, unless its standby has succeeded it."""
        incarnation, began = self._run.simulation.shards[roles.index_of(shard)].version
        self._began[shard] = began
        if (shard, incarnation) in [(record.role, record.incarnation) for record in self._run.recorded(Succeeded)]:
            self._inherited(shard, began)
            return
        kept = {version: group for version, group in self.groups[shard].items() if version <= began}
        self._lost[shard] |= {key for version, group in self.groups[shard].items() if version > began for key in group}
        held = {key for group in kept.values() for key in group}
        self.fates = {fate: how for fate, how in self.fates.items() if fate[1] != shard or (fate[0], fate[2]) in held}
        self.groups[shard] = kept
        self.applied[shard] = Counter(minibatch for group in kept.values() for minibatch in self.batches(group))

    def _lives_on(self, who: str) -> bool:
        role, incarnation = self._ends[who]
        partitions = roles.partitions_of(role, self.plan.settings.partitions)
        ends = [self.network.endpoints[partition] for partition in partitions]
        return all(end.incarnation == incarnation and not end.closed for end in ends)

    def _acknowledged(self, shard: str, who: str, message: pushing.Pushed) -> None:
        key = who, message.clock
        push = self.sent_pushes[who, shard, message.clock][0]
        again = self._began[shard] or shard in self._lasting
        if again and any(key in group for group in self.groups[shard].values()):
            return  # the previous life had applied it, but the replica did not know
        assert (who, shard, message.clock) not in self.fates, f"{shard} decides twice on push {message.clock} of {who}"
        self.fates[who, shard, message.clock] = message.dropped
        if message.dropped:
            self.dropped.add(key)
            for minibatch in self.pushes[key]:
                self.holder.pop(minibatch, None)
            return
        groups, version = self.groups[shard], message.version.updates
        assert version in (len(groups), len(groups) + 1), f"{shard} is at update {version} after {len(groups)}"
        self._take(shard, who, push, version, message.version.incarnation)
        groups.setdefault(version, []).append(key)
        self._hold_round(shard, version)

    def _take(self, shard: str, who: str, push: pushing.Push, version: int, incarnation: int) -> None:
        """Count a push in an update by a life of a shard, or with -1 by the life that it was pushed to."""
        here = push.version.incarnation == incarnation or incarnation < 0
        self.based[who, shard, push.clock] = (
            push.version.updates if here else min(push.version.updates, self._began[shard])
        )
        self.fates[who, shard, push.clock] = False
        self._lost[shard].discard((who, push.clock))
        self.moments.setdefault((shard, version), self._clock.now())
        for minibatch in self.pushes[who, push.clock]:
            self.applied[shard][minibatch] += 1

    def _hold_round(self, shard: str, version: int) -> None:
        """Check that a round of a shard contains minibatches of one epoch, each once."""
        held = self.batches(self.groups[shard][version])
        error = f"round {version} of {shard} holds {held} of {self.groups[shard][version]}"
        assert not self.plan.settings.policy.rounds or len({epoch for epoch, _ in held}) < 2, error
        assert not self.plan.settings.policy.rounds or len({*held}) == len(held), error

    def delivered(self, sender: str, to: str, message: Message) -> None:
        """Handle a message that a living role is about to receive."""
        if isinstance(message, membership.Join) and to == roles.COORDINATOR:
            self._members[sender] = message.incarnation
        elif isinstance(message, pushing.Push):
            key = self._name(sender, message.incarnation), to, message.clock
            payload = self.sent_pushes[key][1]
            decided = key in self.fates  # a repeated push is not read
            assert decided or payload is None or torch.equal(self._lent[key], payload), (
                f"push {message.clock} was overwritten"
            )
            self.arrivals[to].append((key[0], message))
        elif isinstance(message, mirroring.StateSent | mirroring.Copied | mirroring.Decided):
            self._copied(sender, message)
        elif isinstance(message, attendance.Return):
            who = self._name(sender, message.incarnation)
            self.forgotten |= {
                (to, pusher, clock) for pusher, clock in self._lost[to] if pusher == who and clock <= message.clock
            }
        elif isinstance(message, initialising.Initialise) and not self.network.phantom:
            moving = self.plan.assignments[roles.index_of(to)].moving
            if (message.start, message.stop) == (moving.start, moving.stop) and to not in self.initial:
                self.initial[to] = self._lent[sender, to, -message.start].clone()

    @property
    def shards(self) -> list[str]:
        """Return the shards with parameters."""
        return [roles.shard(i) for i, a in enumerate(self.plan.assignments if self.plan else ()) if a.moving.size]

    def batches(self, group: list[tuple[str, int]]) -> list[Minibatch]:
        """Return the minibatches of an update."""
        return [minibatch for key in group for minibatch in self.pushes[key]]

    def finish(self, outcome: str, died: list[str]) -> None:
        """Check what must hold at the end of a job."""
        lost = {
            (record.role, self._name(record.replica, record.incarnation), clock)
            for record in self._run.recorded(Forgotten)
            for clock in range(record.first, record.last + 1)
        }
        assert lost == self.forgotten, (
            f"pushes reported as lost with their shard: {lost}; really lost: {self.forgotten}"
        )
        gone = self._vacated | {*(died if outcome == "failed" else ())}
        fallen = any(roles.kind(role) is roles.Kind.SHARD for role in gone)
        rounds = self.plan is not None and self.plan.settings.policy.rounds
        died = [roles.lead_of(role) for role in died]
        mortal = [role for role in died if roles.is_replica(role)]
        # a checkpoint that did not wait for all may contain parts of two rounds
        exact = not any("it is not exact" in note.text for note in self._run.recorded(Note))
        for who, _, clock in self.fates:
            if fallen and (outcome == "failed" or not rounds or not exact):
                break
            fates = {self.fates.get((who, shard, clock)) for shard in self.shards}
            assert len(fates - {None}) == 1 or self._ends[who][0] in died, (
                f"shards disagree about push {clock} of {who}"
            )
            assert None not in fates or self._ends[who][0] in died, f"push {clock} of {who} was left undecided"
        if outcome != "done":
            return
        every = {(e, i) for e in range(self.plan.settings.epochs) for i in range(self.plan.batches)} or self.dealt
        for epoch, index in every - self._passed_over:
            for shard in self.shards:
                times = self.applied[shard][epoch, index]
                lossy = fallen and not rounds and shard in died
                assert times == 1 or (times and (mortal or (fallen and not (rounds and exact)))) or lossy, (
                    f"{shard} applied minibatch {index} of epoch {epoch} {times} times; died: {died}"
                )


NOTES: Mapping[type[Message], Callable[[Accounting, str, str, Any], None]] = {
    membership.Join: Accounting._note_join,
    membership.Welcome: Accounting._note_welcome,
    membership.Anew: Accounting._note_anew,
    membership.Farewell: Accounting._note_farewell,
    initialising.Restored: Accounting._note_restored,
    dealing.Deal: Accounting._note_deal,
    dealing.Progress: Accounting._note_progress,
    dealing.StreamEnded: Accounting._note_ended,
    pushing.Push: Accounting._note_push,
    initialising.Initialise: Accounting._note_initialise,
    pushing.Pushed: Accounting._note_pushed,
}
"""Method that handles each kind of message, with its sender and receiver."""
