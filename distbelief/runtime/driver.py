"""The driver: the only loop. It carries the effects of machines and stories to transports, stores and workers, and the answers back."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Any, Protocol, runtime_checkable

from distbelief.core import assembly, events, messages
from distbelief.core.assembly import Assemble
from distbelief.core.effects import (
    Arrival,
    Attach,
    Batch,
    Become,
    Begin,
    Commit,
    Compute,
    Computed,
    Connect,
    Discard,
    Effect,
    End,
    Form,
    Lend,
    Load,
    Machine,
    Measure,
    Measured,
    Receive,
    Reduce,
    Save,
    Send,
    Story,
    Update,
    Wake,
)
from distbelief.core.effects import Record as RecordEffect
from distbelief.core.records import Record
from distbelief.core.roles import CARRIER, CLOCK, STORE
from distbelief.core.settings import Plan
from distbelief.errors import CheckpointError, JobFailed, LocalProtocolError, RemoteProtocolError
from distbelief.runtime.clock import Clock
from distbelief.transport.base import Arena, Endpoint, NetworkEndpoint

INTERRUPTS = (assembly.Halt, messages.Stop, events.Lost)
"""What a story is told in the middle of a reduction that need not go on then."""


class Worker(Protocol):
    """Who computes for a story."""

    def attach(self, plan: Plan, arena: Arena) -> None:
        """Take the vectors that were made for it."""

    def compute(self, batch: Batch, answer: Callable[[Computed], None]) -> Computed | None:
        """The gradient of a minibatch; None where `answer` will be called with it later."""

    def measure(self) -> Measured:
        """The current parameters on the test set."""
        ...


@runtime_checkable
class Reducer(Protocol):
    """A worker that adds up the gradients of a group by itself."""

    def form(self, group: Assemble) -> bool:
        """Take one's place in a group; whether that could be done."""
        ...

    def reduce(self, round: int, told: Callable[[], bool]) -> bool:
        """Add up the gradients of a round; False where that cannot be done, or as soon as `told` says that something has arrived."""
        ...


@runtime_checkable
class Updater(Protocol):
    """A worker that updates parameters which it shares with others by itself."""

    def begin(self, arrays: dict[str, Any] | None, facts: dict[str, Any]) -> None:
        """Fill what is shared."""

    def update(self, samples: int, told: Callable[[], bool], answer: Callable[[bool], None]) -> bool | None:
        """Make an update; False as soon as `told`, which who waits asks again and again, says that something has arrived; None where `answer` will
        be called later.
        """
        ...


class Store(Protocol):
    """Where checkpoints are kept."""

    def save_part(self, number: int, part: str, arrays: dict[str, Any], facts: dict[str, Any]) -> object:
        """Write one shard's part."""

    def commit(self, number: int, plan: Plan, position: Any, samples: int) -> object:
        """Make a checkpoint the newest."""

    def discard(self, number: int) -> None:
        """Clear away what was made of a checkpoint."""

    def load_part(self, checkpoint: str, plan: Plan, shard: int) -> tuple[dict[str, Any], dict[str, Any]]:
        """Read one shard's part, cut to a plan."""
        ...


class _Player:
    """A role that this driver plays: a machine, or a story with what it waits for."""

    def __init__(self, role: str, endpoint: Endpoint) -> None:
        self.role, self.endpoint = role, endpoint
        self.inbox: deque[Arrival] = deque()
        self.waits = False
        self.since: float | None = None
        self.stalled: float | None = None
        self.machine: Machine | None = None
        self.story: Story | None = None
        self.worker: Worker | None = None
        self.store: Store | None = None
        self.become: Callable[[str, int, Any], None] = _stay


class Driver:
    """Plays one role or many until they have ended.

    Args:
        clock: the wall's or the simulator's.
        sink: called with the time, the role and the record of everything that is written down.
    """

    def __init__(self, clock: Clock, sink: Callable[[float, str, Record], None]) -> None:
        self.clock, self._sink = clock, sink
        self._players: dict[str, _Player] = {}
        self._ready: deque[_Player] = deque()
        """Stories that waited for something which has arrived; they go on after the turn, for a transport is not polled while it delivers."""

    def add_machine(
        self, role: str, machine: Machine, endpoint: Endpoint, store: Store | None = None, become: Callable[[str, int, Any], None] | None = None
    ) -> None:
        """Play a machine: it is handed every arrival at its endpoint. `become` plays another role in its place, with a machine that it has made."""
        player = self._add(role, endpoint)
        player.machine, player.store, player.become = machine, store, become or _stay
        endpoint.deliver = lambda arrival: self._handle(player, arrival)

    def add_story(self, role: str, story: Story, endpoint: Endpoint, worker: Worker, store: Store | None = None) -> None:
        """Play a story; it begins when the driver runs or is asked to `begin`."""
        player = self._add(role, endpoint)
        player.story, player.worker, player.store = story, worker, store
        endpoint.deliver = lambda arrival: self._arrive(player, arrival)

    def _add(self, role: str, endpoint: Endpoint) -> _Player:
        if role in self._players:
            raise LocalProtocolError(f"{role} is played already")
        player = self._players[role] = _Player(role, endpoint)
        return player

    def begin(self, role: str) -> None:
        """Run a story up to its first wait."""
        self._advance(self._players[role], None)

    def run(self) -> None:
        """Begin all stories, and take turns until every role has ended."""
        for player in list(self._players.values()):
            if player.story is not None and player.role in self._players:
                self._advance(player, None)
        self.run_while(lambda: True)

    def run_while(self, condition: Callable[[], bool]) -> None:
        """Take turns while a condition holds and somebody is played."""
        ready = self._ready
        while self._players and condition():
            if ready:
                player = ready.popleft()
                self._advance(player, player.inbox.popleft())
            else:
                self.clock.turn()

    def plays(self, role: str) -> bool:
        """Whether a role is being played: it was added, and has not ended."""
        return role in self._players

    def waiting_since(self, role: str) -> float | None:
        """The time at which a story began to wait; None for one that does not, and for machines."""
        player = self._players.get(role)
        if player is not None and player.stalled is not None:
            return player.stalled
        return player.since if player is not None and player.waits else None

    def tell(self, role: str, sender: str, event: events.Event) -> None:
        """Tell a role something that came by no transport, such as the supervisor's word."""
        if (player := self._players.get(role)) is not None:
            (self._handle if player.machine else self._arrive)(player, Arrival(sender, event))

    def remove(self, role: str) -> None:
        """Stop playing a role at once, as if its process had been killed; its endpoint is the caller's to close."""
        player = self._players.pop(role, None)
        if player is not None and player.story is not None:
            player.story.close()

    # machines

    def _handle(self, player: _Player, arrival: Arrival) -> None:
        if self._players.get(player.role) is not player:
            return
        if type(arrival.event) is not messages.Fetch:  # whatever else a machine is told, it may write to what its answers are sent from
            player.endpoint.settle()
        assert player.machine is not None
        try:
            effects = player.machine.handle(arrival.sender, arrival.event, arrival.payload)
        except RemoteProtocolError as error:
            player.endpoint.drop(arrival.sender, str(error))
            return
        for effect in effects:
            if type(effect) is Send:
                player.endpoint.send(effect.to, effect.message, effect.payload)
            else:
                self._perform(player, effect)

    def _perform(self, player: _Player, effect: Effect) -> None:
        """Everything a machine asks for beside sending."""
        if isinstance(effect, RecordEffect):
            self._sink(self.clock.now(), player.role, effect.record)
        elif isinstance(effect, End):
            self._end(player)
        elif isinstance(effect, Save | Commit | Discard):
            player.endpoint.flush()
            self._handle(player, Arrival(STORE, self._write(player, effect)))
        elif isinstance(effect, Load):
            self._handle(player, Arrival(STORE, self._load(player, effect)))
        elif isinstance(effect, Connect):
            if not self._connect(player, effect):
                self._handle(player, Arrival(effect.to, events.Lost("it cannot be reached", effect.place.incarnation)))
        elif isinstance(effect, Lend):
            arena = player.endpoint.allocate(effect.size, effect.vectors, 0)
            self._handle(player, Arrival(CARRIER, events.Lent(arena.gradients)))
        elif isinstance(effect, Become):
            self._end(player)
            player.become(effect.role, effect.incarnation, effect.machine)
        elif isinstance(effect, Wake):
            self.clock.call_later(effect.seconds, lambda what: self._handle(player, Arrival(CLOCK, events.Woke(what))), effect.what)
        else:
            raise LocalProtocolError(f"a machine cannot ask for {type(effect).__name__}")

    def _write(self, player: _Player, effect: Save | Commit | Discard) -> events.Saved:
        """Write to the store; what goes wrong is answered, not raised: the last good checkpoint stays."""
        assert player.store is not None
        where: object = ""
        try:
            if isinstance(effect, Save):
                player.store.save_part(effect.number, effect.part, effect.arrays, effect.facts)
            elif isinstance(effect, Discard):
                player.store.discard(effect.number)
            else:
                where = player.store.commit(effect.number, effect.plan, effect.position, effect.samples)
        except CheckpointError as error:
            return events.Saved(effect.number, str(error))
        return events.Saved(effect.number, "", str(where))

    def _load(self, player: _Player, effect: Load) -> events.Loaded:
        assert player.store is not None
        return events.Loaded(*player.store.load_part(effect.checkpoint, effect.plan, effect.shard))

    def _connect(self, player: _Player, effect: Connect) -> bool:
        """Open a link; where nobody listens any more, that is all there is to say."""
        try:
            player.endpoint.connect(effect.to, *effect.place)
        except JobFailed:
            return False
        return True

    # stories

    def _arrive(self, player: _Player, arrival: Arrival) -> None:
        player.inbox.append(arrival)
        if player.waits:
            player.waits = False
            self._ready.append(player)

    def _advance(self, player: _Player, answer: Any) -> None:
        """Run a story, from an answer to its next wait."""
        story, endpoint = player.story, player.endpoint
        assert story is not None
        if self._players.get(player.role) is not player:
            return
        send = story.send
        while True:
            try:
                effect = send(answer)
            except StopIteration:
                self._end(player)
                return
            kind = type(effect)
            answer = None
            if kind is Send:
                endpoint.send(effect.to, effect.message, effect.payload)  # type: ignore[union-attr]
            elif kind is Receive:
                if not effect.wait:  # type: ignore[union-attr]
                    self.clock.glance()
                    answer = player.inbox.popleft() if player.inbox else None
                    continue
                if not player.inbox:
                    player.waits, player.since = True, self.clock.now()
                    return
                answer = player.inbox.popleft()
            elif kind is Compute:
                assert player.worker is not None
                endpoint.flush()
                answer = player.worker.compute(effect.batch, lambda computed: self._advance(player, computed))  # type: ignore[union-attr]
                if answer is None:
                    return
            elif kind is Update:
                answer = self._update(player, effect)  # type: ignore[arg-type]
                if answer is None:
                    return
            else:
                answer = self._answer(player, effect)

    def _update(self, player: _Player, effect: Update) -> bool | None:
        """Have the worker update what it shares; a wait in it is one of the story's, for whoever asks."""

        def told() -> bool:
            if player.stalled is None:
                player.stalled = self.clock.now()
            return _told(player)

        worker: Any = player.worker  # an `Updater`, which takes longer to see than a small update to make
        answer: bool | None = worker.update(effect.samples, told, lambda done: self._advance(player, done))
        player.stalled = None
        return answer

    def _answer(self, player: _Player, effect: Effect) -> Any:
        """What a story asks for beside sending, receiving and computing."""
        assert player.worker is not None
        player.endpoint.flush()
        if isinstance(effect, Measure):
            return player.worker.measure()
        if isinstance(effect, Attach):
            arena = player.endpoint.allocate(effect.plan.layout.total, effect.gradients, effect.parameters)
            return player.worker.attach(effect.plan, arena)
        if isinstance(effect, Connect):
            return self._connect(player, effect)
        if isinstance(effect, RecordEffect):
            return self._sink(self.clock.now(), player.role, effect.record)
        if isinstance(effect, Form | Reduce):
            assert isinstance(player.worker, Reducer)
            return player.worker.form(effect.group) if isinstance(effect, Form) else player.worker.reduce(effect.round, lambda: _told(player))
        if isinstance(effect, Begin):
            assert isinstance(player.worker, Updater)
            return player.worker.begin(effect.arrays, effect.facts)
        if isinstance(effect, Save):
            return self._write(player, effect)
        if isinstance(effect, Load):
            return self._load(player, effect)
        if isinstance(effect, Wake):
            return self.clock.call_later(effect.seconds, lambda what: self._arrive(player, Arrival(CLOCK, events.Woke(what))), effect.what)
        raise LocalProtocolError(f"a story cannot ask for {type(effect).__name__}")

    def _end(self, player: _Player) -> None:
        if self._players.get(player.role) is player:
            del self._players[player.role]
        player.endpoint.close()


def _stay(role: str, _incarnation: int, _machine: Any) -> None:
    raise LocalProtocolError(f"nobody here knows how to become {role}")


def _told(player: _Player) -> bool:
    """Whether a story that is busy has been told something that it must know now."""
    if isinstance(player.endpoint, NetworkEndpoint):
        player.endpoint.poll(0)
    return any(isinstance(arrival.event, INTERRUPTS) for arrival in player.inbox)
