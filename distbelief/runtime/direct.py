"""The direct path on one host: each replica runs the shards' machines itself, on shared memory, under their locks.

The machine is that of the shard's process (`server/shard.py`), and takes the same decisions. Its state lies beside the
parameters in a note, which is published together with them in one store. So an update counts whole or not at all, even
if its process is killed half-way; the kernel frees the lock of a dead process.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager

import msgspec
import torch

from distbelief.core import messages, records, roles
from distbelief.core.conversations import attendance, initialising, pushing
from distbelief.core.effects import Arrival, Effect, Payload, Save, Send
from distbelief.core.events import Event
from distbelief.core.messages import FETCH, PUSH
from distbelief.core.settings import Plan, Settings
from distbelief.errors import LocalProtocolError
from distbelief.fabric.waiting import rest
from distbelief.server.passed import Memory, PassedLayout, PassedSlice
from distbelief.server.shard import Shard, ShardState
from distbelief.server.slice import Slice, slice_of
from distbelief.sharding.layout import Layout
from distbelief.transport.shared import Locks, SharedEndpoint

PATIENCE_SECONDS = 10e-3
"""Longest wait for a lock before a replica listens to others, and tries again."""
LISTEN_SECONDS = 1e-3
"""Longest time that messages lie unread while a replica gets all answers here. To look takes 5 us."""

_encode, _decode = msgspec.msgpack.Encoder().encode, msgspec.msgpack.Decoder(ShardState).decode


# A turn: take the lock; read the note, if another process has published since; let the machine handle what is due;
# publish; free the lock. A change counts from the one store that publishes it: a process that dies or fails before has
# changed nothing, and the next turn begins at the last published change.
class SharedShard:
    """A shard's machine on memory where other processes run it too."""

    def __init__(self, shard: Shard, held: PassedSlice, locks: Locks) -> None:
        self.shard, self.held, self._locks = shard, held, locks
        self.known, self._note = -1, b""
        """Number of the last change that this machine wrote or read, and the note of that change."""

    def take(self, interrupted: Callable[[], bool]) -> bool:
        """Take the lock and read the last published state; return False if `interrupted` is true before that."""
        if not self._locks.take(self.shard.index, interrupted):
            return False
        # other processes name the holder of the lock in their status
        self.held.sign(time.monotonic_ns())
        if self.known != self.held.changes:
            self._note, self.known = self.held.note(), self.held.changes
            self.shard.install(_decode(self._note))
        return True

    def give(self) -> None:
        """Publish changes, and free the lock."""
        self.publish()
        self._locks.give(self.shard.index)

    def publish(self) -> None:
        """Publish changes, so that others go on from them."""
        note = _encode(self.shard.state())
        # without a change there is nothing to publish, and nothing for others to read again
        if self.held.changed or note != self._note:
            self.held.publish(note)
            self._note, self.known = note, self.held.changes

    def leave(self) -> None:
        """Free the lock without publishing, after an error."""
        self.held.abandon()
        self.known = -1
        self._locks.give(self.shard.index)

    def held_by(self) -> str:
        """Return which other process has the lock, and for how long; "" for none."""
        if self._locks.holder(self.shard.index) is None:
            return ""
        place, began = self.held.signed()
        replicas = self.shard.own.plan.settings.replicas
        who = roles.replica(place) if place < replicas else self.shard.role
        seconds = (time.monotonic_ns() - began) / 1e9
        return f"for the lock of {self.shard.role}, which {who} has since {seconds:.1f} s"

    @contextmanager
    def turn(self) -> Iterator[None]:
        """Hold the lock for a while; wait for it as long as it takes."""
        self.take(lambda: False)
        try:
            yield
        except BaseException:
            self.leave()
            raise
        self.give()


class OwnedShard:
    """Machine of a shard's process on the direct path. It serves all roles but the replicas.

    Where several models are trained, replicas use the served path, and it has a slice of its own. Its first life begins
    as any shard's; later ones go on with the memory, which has outlived the process with all updates. `make` builds the
    machine of a life from the builder of its slice.
    """

    def __init__(self, make: Callable[[Callable[[Plan, int], Slice]], Shard], memory: Memory, locks: Locks) -> None:
        self._shard, self._memory, self._locks = make(self._slice), memory, locks
        self._held: PassedSlice | None = None
        self._shared: SharedShard | None = None

    def _slice(self, plan: Plan, index: int) -> Slice:
        if plan.models > 1:
            return slice_of(plan, index)
        if self._held is None:
            layout = PassedLayout(plan)
            self._held = PassedSlice(layout, index, self._memory(layout.length), layout.places - 1)
        return self._held

    def handle(self, sender: str, event: Event, payload: Payload | None) -> list[Effect]:
        if self._shared is None:
            return self._begin(sender, event, payload)
        with self._shared.turn():
            return [_kept(effect) for effect in self._shard.handle(sender, event, payload)]

    def _begin(self, sender: str, event: Event, payload: Payload | None) -> list[Effect]:
        """Handle an event before the memory has all of the shard's parameters: until then no replica touches it."""
        if isinstance(event, initialising.Restore):
            held = self._slice(event.plan, self._shard.index)
            if isinstance(held, PassedSlice) and held.changes:
                return self._succeed(event.plan, held)
        effects = self._shard.handle(sender, event, payload)
        if self._held is not None and self._held.changed and not self._shard.waits():
            self._held.publish(_encode(self._shard.state()))
            self._shared = SharedShard(self._shard, self._held, self._locks)
        return effects

    def _succeed(self, plan: Plan, held: PassedSlice) -> list[Effect]:
        """Go on where the last life and the replicas have left the memory."""
        incarnation = self._shard.version.incarnation
        self._shard.share(plan)
        self._shared = SharedShard(self._shard, held, self._locks)
        with self._shared.turn():
            return self._shard.begin_life(incarnation)

    def waits(self) -> str:
        return self._shard.waits() or (self._shared.held_by() if self._shared else "")

    def standing(self) -> dict[str, object]:
        """Return the shard's counts; if a replica has the lock, as this process saw them last."""
        self._look()
        return self._shard.standing()

    def account(self) -> records.Applied:
        """Return the account of all that is applied; if a replica has the lock, as this process saw it last."""
        self._look()
        return self._shard.account()

    def _look(self) -> None:
        if self._shared is not None and self._shared.take(_impatient()):
            self._shared.give()


def _impatient() -> Callable[[], bool]:
    """Return a function that tells whether `PATIENCE_SECONDS` have passed since now."""
    until = time.monotonic() + PATIENCE_SECONDS
    return lambda: time.monotonic() >= until


def _kept(effect: Effect) -> Effect:
    """Copy the tensors of an effect that is performed after the turn, when others write to the memory."""
    if isinstance(effect, Send) and isinstance(effect.payload, torch.Tensor):
        return msgspec.structs.replace(effect, payload=effect.payload.clone())
    if isinstance(effect, Save):
        return msgspec.structs.replace(effect, arrays={name: tensor.clone() for name, tensor in effect.arrays.items()})
    return effect


def reads_only(settings: Settings, layout: Layout) -> bool:
    """Return whether a replica only reads its parameters, and fetches them before each step.

    It can then compute on the memory of its last update.
    """
    cadence = settings.strategy.pushing
    fetches = cadence.fetch_every == 1 and not cadence.prefetch and not cadence.local_lr
    # a model with buffers writes to them in its forward passes
    return fetches and not any(section.kind == "buffer" for section in layout.sections)


def pushes_each(settings: Settings) -> bool:
    """Return whether each push is the gradient of one step, and each update is made with one push."""
    return settings.strategy.pushing.push_steps == 1 and not settings.policy.gathers


class DirectEndpoint(SharedEndpoint):
    """Endpoint of a replica on the direct path: messages to a shard are handled here, by that shard's machine."""

    def __init__(self, role: str, job: str, incarnation: int = 0) -> None:
        super().__init__(role, job, incarnation)
        self._shards: Mapping[str, SharedShard] = {}
        self._due: dict[str, deque[tuple[messages.Message, Payload | None]]] = {}
        self._seen: dict[str, int] = {}
        """Number of changes at shards that could not answer yet; they are asked again once there are more."""
        self._answers: deque[Arrival] = deque()
        self._listened = 0.0
        self._buffers: list[torch.Tensor] = []
        """The replica's flat vectors in the memory."""
        self._in_place = False
        self._lands_in: int | None = None
        """Number of the vector that a fetch lands in, where the model computes in it; None without a fetch."""

    def share(
        self, plan: Plan, memory: Memory, locks: Locks, make: Callable[[int, Callable[[Plan, int], PassedSlice]], Shard]
    ) -> None:
        """Reach a plan's shards in shared memory from now on."""
        layout = PassedLayout(plan)
        room, place = memory(layout.length), roles.index_of(self.role)

        def opened(index: int) -> SharedShard:
            held = PassedSlice(layout, index, room, place)
            shard = make(index, lambda *_: held)
            shard.share(plan)
            return SharedShard(shard, held, locks)

        self._shards = {roles.shard(index): opened(index) for index in range(len(plan.assignments))}
        self._buffers = [layout.vector(room, 2 * place + half) for half in (0, 1)]

    def compute_there(
        self, lying: Callable[[int], Sequence[torch.Tensor]] | None = None
    ) -> tuple[list[torch.Tensor], Callable[[int], int]]:
        """Let the model compute in this replica's buffers, so that what lies there is not copied.

        Returns:
            The flat vectors to compute with (1-D uint8), and a function that names the one with the last fetch.
        """
        self._in_place = True
        if lying is not None:
            for shared in self._shards.values():
                shared.held.lying = lying
        return self._buffers, self._landed

    @property
    def adds(self) -> bool:
        """True if an update only adds, at every shard: then it can read a gradient wherever that lies."""
        return all(shared.held.adds for shared in self._shards.values())

    def _landed(self, _: int) -> int:
        landing, self._lands_in = self._lands_in or 0, None
        return landing

    def _land(self, shared: SharedShard, answer: pushing.Fetched, payload: torch.Tensor) -> None:
        """Bring a shard's answer to where the fetch lands."""
        held, size = shared.held, answer.stop - answer.start
        if not self._in_place:
            self.arena.part(answer).copy_(payload)
        elif held.holds(answer.start, answer.stop):
            if self._lands_in is None:
                self._lands_in = held.own.index(held.now) if held.now in held.own else 0
            if held.now != held.own[self._lands_in]:
                shared.publish()  # the buffer may be the newest until the change is published
                held.bring(held.own[self._lands_in])
            else:
                size = 0
        else:
            self._buffers[0][answer.start : answer.stop].copy_(payload)
        self.traffic.shared_memory[FETCH] += size

    def send(self, to: str, message: messages.Message, payload: Payload | None = None) -> None:
        """Send a message; those that a shard can answer here wait for the next `poll` or `flush`."""
        if to in self._shards and type(message) in DIRECT:
            self._due.setdefault(to, deque()).append((message, payload))
            self._seen.pop(to, None)
        else:
            super().send(to, message, payload)

    def flush(self) -> None:
        self._act()
        super().flush()

    def poll(self, timeout: float | None) -> None:
        """Do what is due, and deliver the answers; without any, wait for an arrival."""
        began = time.monotonic()
        end = None if timeout is None else began + timeout
        while True:
            self._act()
            if self._answers:
                while self._answers:
                    self.deliver(self._answers.popleft())
                if began - self._listened > LISTEN_SECONDS:
                    self._listened = began
                    super().poll(0)
                return
            if not self._due:
                super().poll(None if end is None else max(0.0, end - time.monotonic()))
                return
            rest(time.monotonic() - began)  # an epoll would sleep for a millisecond or more
            super().poll(0)
            if self._delivered or (end is not None and time.monotonic() >= end):
                return

    def _act(self) -> None:
        """Take a turn at each shard with something due, unless it has not changed since it could not answer."""
        for to in tuple(self._due):
            due, shared = self._due[to], self._shards[to]
            if self._seen.get(to) == shared.held.changes:
                continue
            if not shared.take(_impatient()):
                continue
            try:
                while due and self._do(to, shared, *due[0]):
                    due.popleft()
            except BaseException:
                shared.leave()
                raise
            shared.give()
            if due:
                self._seen[to] = shared.known  # not the newest: others may have made changes since
            else:
                del self._due[to]

    def _do(self, to: str, shared: SharedShard, message: messages.Message, payload: Payload | None) -> bool:
        """Have a shard answer, if it may; return whether it did."""
        shard = shared.shard
        if not shard.may_take(self.role, message):
            return False
        if type(message) is pushing.Push:
            self.traffic.shared_memory[PUSH] += message.stop - message.start
        for effect in shard.handle(self.role, message, payload):
            if not isinstance(effect, Send) or effect.to != self.role:
                raise LocalProtocolError(f"{to} asks {self.role} for {type(effect).__name__}, which its process does")
            answer = effect.message
            if isinstance(answer, pushing.Fetched):
                assert isinstance(effect.payload, torch.Tensor)
                self._land(shared, answer, effect.payload)
            self._answers.append(Arrival(to, answer))
        return True

    def waits(self) -> str:
        """Return the lock or turn that this replica waits for, and the process that has it; "" for none."""
        for shared in (self._shards[to] for to in self._due):
            policy = shared.shard.policy
            if holder := shared.held_by():
                return holder
            if not policy.may_push(self.role):
                return f"for its turn, which {roles.named(policy.slowest())} has"
        return ""

    def close(self) -> None:
        self._act()
        super().close()


DIRECT: Sequence[type] = (pushing.Push, pushing.Fetch, attendance.Attend, attendance.SitOut)
"""Messages to a shard that a replica handles itself."""
ANSWERS: Sequence[type] = (pushing.Pushed, pushing.Fetched, attendance.Admitted, attendance.Excused)
"""Their answers."""
