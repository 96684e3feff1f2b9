"""The driver: the only loop. It carries effects to transports, stores and workers, and their answers back."""

from __future__ import annotations

import functools
from collections import deque
from collections.abc import Callable, Mapping, Sized
from typing import Any

import msgspec

from distbelief.core import events, messages, roles
from distbelief.core.conversations import membership, pushing
from distbelief.core.effects import (
    Arrival,
    Attach,
    Become,
    Commit,
    Compute,
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
    ReduceGradients,
    Save,
    Send,
    Story,
    Update,
    Wake,
    Work,
)
from distbelief.core.effects import WriteRecord as RecordEffect
from distbelief.core.records import Record, StepsTimed
from distbelief.core.roles import CARRIER, CLOCK, COORDINATOR, STORE
from distbelief.errors import CheckpointError, JobFailed, LocalProtocolError, RemoteProtocolError
from distbelief.runtime.clock import Clock
from distbelief.runtime.lasting import RETURN_SECONDS, Caller, LastingHost
from distbelief.runtime.player import (
    ACCOUNT_SECONDS,
    ASIDE,
    COMPUTE,
    SHARE,
    UPDATE,
    WAIT,
    WORK,
    BecomeRole,
    Player,
    StepTimes,
    Store,
    Worker,
    stay,
)
from distbelief.sharding.layout import Range
from distbelief.transport.base import Endpoint

GLANCE_SECONDS = 10e-3
"""Interval at which the links of a busy client are polled."""
FAREWELL_SECONDS = 1.0
"""Time for which a machine listens that had ended when it died, after its restart."""


# Order of work: a machine handles each arrival as it is delivered, and answers at once. A client may compute for long,
# so its arrivals are queued. It goes on after the turn, in `run_while`, because a transport is not polled while it
# delivers.
class Driver:
    """Plays one role or many until they have ended.

    Args:
        clock: of real or of simulated time.
        sink: takes the time, role and record of all that is recorded.
        lasts: whether roles wait for a coordinator that is gone, because it will restart.
        validate: is called with the role of a machine after each event that it has handled.
    """

    def __init__(
        self,
        clock: Clock,
        sink: Callable[[float, str, Record], None],
        lasts: bool = False,
        validate: Callable[[str], None] | None = None,
    ) -> None:
        self.clock, self._sink, self._lasts, self._validate = clock, sink, lasts, validate
        self.account_seconds = ACCOUNT_SECONDS
        """Least seconds between two accounts of a client's times."""
        self.coordinator = ""
        """The coordinator's address."""
        self._players: dict[str, Player] = {}
        self._reducing: list[Player] = []
        """Clients whose workers reduce; between their moments of work the links are carried."""
        self._ready: deque[Player | None] = deque()
        """Clients with an arrival to go on with. None only makes `run_while` check its condition."""

    def add_machine(
        self,
        role: str,
        machine: Machine,
        endpoint: Endpoint,
        store: Store | None = None,
        become: BecomeRole | None = None,
        host: LastingHost | None = None,
    ) -> None:
        """Play a machine, which handles every arrival at its endpoint. `become` plays its successor in another role."""
        player = self._add(role, endpoint)
        player.machine, player.store, player.become = machine, store, become or stay
        if host is not None:
            player.host, player.send = host, host.send
        handle = self._take if player.host is None and player.caller is None else self._handle
        endpoint.deliver = lambda arrival: handle(player, arrival)

    def add_story(
        self,
        role: str,
        story: Story,
        endpoint: Endpoint,
        worker: Worker,
        store: Store | None = None,
        worked: Callable[[], float] | None = None,
    ) -> None:
        """Play a client, from when the driver runs or `begin` is called.

        `worked` returns the seconds of simulated work that its thread has done besides steps.
        """
        player = self._add(role, endpoint)
        player.story, player.worker, player.store = story, worker, store

        def note(timed: StepsTimed) -> None:
            self._sink(self.clock.now(), role, timed)

        player.times = StepTimes(role, self.clock.now, note, worked, self.account_seconds)
        endpoint.deliver = player.queue if player.caller is None else functools.partial(self._arrive, player)

    def _add(self, role: str, endpoint: Endpoint) -> Player:
        if role in self._players:
            raise LocalProtocolError(f"{role} is played already")
        player = self._players[role] = Player(role, endpoint, self._ready)
        if self._lasts and role != COORDINATOR:

            def hear(arrival: Arrival) -> None:
                self._take(player, arrival) if player.machine else player.queue(arrival)

            player.caller = Caller(endpoint, self.clock, lambda: self.coordinator, hear)
            player.send = player.caller.send
        return player

    def work_for(self, role: str, worker: Worker) -> None:
        """Replace a client's worker."""
        self._players[role].worker = worker

    def link(self, role: str) -> None:
        """Open a role's link to the coordinator.

        If the coordinator restarts, the link opens as soon as it is there. Else a coordinator that does not listen
        raises a `JobFailed`.
        """
        player = self._players[role]
        if player.caller is not None:
            player.caller.open()
        else:
            player.endpoint.connect(COORDINATOR, self.coordinator)

    def send(self, role: str, to: str, message: messages.Message) -> None:
        """Send a message in the name of a role."""
        self._players[role].send(to, message)

    def end_wait(self, role: str) -> None:
        """Stop a role's wait for a coordinator that will not restart."""
        player = self._players.get(role)
        if player is not None and player.caller is not None:
            player.caller.end_wait()

    def away_since(self, role: str) -> float | None:
        """Return the time since which a role waits for a restarted coordinator; None if it does not."""
        player = self._players.get(role)
        return player.caller.away if player is not None and player.caller is not None else None

    def replay(self, role: str, known: int) -> None:
        """Have a machine handle the events in its journal, which brings it to the state of its last life.

        Effects that others may have missed are performed now: records after the first `known`, messages when their
        receivers come back, and the last requests to store and clock.
        """
        player = self._players[role]
        host = player.host
        assert host is not None
        player.past, player.known = host.replay(), known
        for sender, _, event in player.past:
            self._take(player, Arrival(sender, event))
        player.past = None
        for wake in host.wakes:
            self._wake(player, wake)
        self.clock.call_later(RETURN_SECONDS, self._miss, player)

    def _miss(self, player: Player) -> None:
        """Count roles that have not come back as lost."""
        assert player.host is not None
        why = f"it did not come back to the coordinator within {RETURN_SECONDS:.0f} s"
        for role, incarnation in player.host.missing():
            self._handle(player, Arrival(role, events.Lost(why, incarnation)))

    def begin(self, role: str) -> None:
        """Run a client to its first wait."""
        self._advance(self._players[role], None)

    def run(self) -> None:
        """Begin all clients, and take turns until every role has ended."""
        for player in list(self._players.values()):
            if player.story is not None and player.role in self._players:
                self._advance(player, None)
        self.run_while(lambda: True)

    def run_while(self, condition: Callable[[], bool], turn_until: Callable[[Sized], None] | None = None) -> None:
        """Take turns while any role is left and a condition holds, which is checked before each turn and each client.

        `turn_until` takes turns until a client is ready or `look` was called; a clock's, for speed.
        """
        players, ready, reducing, turn = self._players, self._ready, self._reducing, turn_until
        turn = turn or (lambda _: self.clock.turn())
        while True:  # CPython 3.11 specialises no body of a loop that is entered once and ends with its condition
            if not players or not condition():
                return
            if ready:
                if (player := ready.popleft()) is not None:
                    self._advance(player, player.inbox.popleft())
            elif reducing:
                self._reduce()
            else:
                turn(ready)

    def look(self) -> None:
        """Check the condition of `run_while` after the present event."""
        self._ready.append(None)

    def plays(self, role: str) -> bool:
        """Return whether a role is played: it was added and has not ended."""
        return role in self._players

    def waiting_since(self, role: str) -> float | None:
        """Return the time at which a client began to wait; None if it does not wait, and for machines."""
        player = self._players.get(role)
        return player.waiting_since if player is not None else None

    def tell(self, role: str, sender: str, event: events.Event) -> None:
        """Deliver an event that no transport carries, such as the supervisor's."""
        if (player := self._players.get(role)) is not None:
            self._hear(player, Arrival(sender, event))

    def remove(self, role: str) -> None:
        """Stop a role at once, as if its process was killed; the caller closes its endpoint."""
        player = self._players.get(role)
        if player is None:
            return
        self._forget(player)
        if player.story is not None:
            player.story.close()

    def _forget(self, player: Player) -> None:
        player.ended = True
        del self._players[player.role]
        self.look()
        if player.caller is not None:
            player.caller.ended = True

    def _hear(self, player: Player, arrival: Arrival) -> None:
        """Deliver an event that no transport carries."""
        (self._handle if player.machine else self._arrive)(player, arrival)

    def _wake(self, player: Player, wake: Wake) -> None:
        self.clock.call_later(
            wake.seconds, lambda timer: self._hear(player, Arrival(CLOCK, events.Woke(timer))), wake.timer
        )

    # machines

    def _handle(self, player: Player, arrival: Arrival) -> None:
        if player.ended:
            return
        if player.caller is not None and arrival.sender == COORDINATOR and not player.caller.takes(arrival.event):
            return
        if player.host is not None:
            try:
                for taken_arrival in player.host.takes(arrival):
                    self._take(player, taken_arrival)
            except RemoteProtocolError as error:
                player.endpoint.drop(arrival.sender, str(error))
            return
        self._take(player, arrival)

    def _take(self, player: Player, arrival: Arrival) -> None:
        if player.ended:
            return
        # other events than a fetch may change memory from which earlier answers are still being sent
        if type(arrival.event) is not pushing.Fetch:
            player.endpoint.settle()
        assert player.machine is not None
        try:
            effects = player.machine.handle(arrival.sender, arrival.event, arrival.payload)
        except RemoteProtocolError as error:
            player.endpoint.drop(arrival.sender, str(error))
            return
        if self._validate is not None:
            self._validate(player.role)
        for effect in effects:
            if player.host is not None and player.ended:
                return  # in simulation, a role may die as it sends a message
            if type(effect) is Send:
                player.send(effect.to, effect.message, effect.payload)
            elif (perform := PERFORMS.get(type(effect))) is not None:
                perform(self, player, effect)
            else:
                raise LocalProtocolError(f"a machine cannot ask for {type(effect).__name__}")

    def _perform_record(self, player: Player, effect: RecordEffect) -> None:
        if player.host is not None:
            player.host.records += 1
        if player.host is None or player.host.records > player.known:
            self._sink(self.clock.now(), player.role, effect.record)

    def _perform_end(self, player: Player, _: End) -> None:
        if player.past is None:
            self._end(player)
        else:  # roles that should have stopped may come back to receive `Stop`
            assert player.host is not None
            player.host.ended = True
            self.clock.call_later(FAREWELL_SECONDS, self._end, player)

    def _perform_write(self, player: Player, effect: Save | Commit | Discard) -> None:
        # messages that are ready must not wait for the write to the disk
        player.endpoint.flush()
        done = next(player.past, None) if player.past is not None else None
        if done is not None:
            self._take(player, Arrival(STORE, done.event))
        else:
            self._handle(player, Arrival(STORE, self._write(player, effect)))

    def _perform_load(self, player: Player, effect: Load) -> None:
        self._handle(player, Arrival(STORE, self._load(player, effect)))

    def _perform_connect(self, player: Player, effect: Connect) -> None:
        if not self._connect(player, effect):
            self._handle(player, Arrival(effect.to, events.Lost("it cannot be reached", effect.place.incarnation)))

    def _perform_lend(self, player: Player, effect: Lend) -> None:
        arena = player.endpoint.allocate(Range(0, effect.size), effect.vectors, 0)
        self._handle(player, Arrival(CARRIER, events.Lent(arena.gradients)))

    def _perform_become(self, player: Player, effect: Become) -> None:
        self._end(player)
        player.become(effect.role, effect.incarnation, effect.machine)

    def _perform_wake(self, player: Player, effect: Wake) -> None:
        if player.host is not None:
            player.host.wakes.append(effect)
        if player.past is None:
            self._wake(player, effect)

    def _write(self, player: Player, effect: Save | Commit | Discard) -> events.Saved:
        """Write to the store; answer errors, as a checkpoint that fails is no reason to end: the last one stays."""
        assert player.store is not None
        where: object = ""
        began = self.clock.now()
        try:
            if isinstance(effect, Save):
                player.store.save_part(effect.number, effect.part, effect.arrays, effect.facts)
            elif isinstance(effect, Discard):
                player.store.discard(effect.number)
            else:
                where = player.store.commit(effect.number, effect.plan, effect.position, effect.samples, effect.script)
        except CheckpointError as error:
            return events.Saved(effect.number, str(error))
        return events.Saved(effect.number, "", str(where), self.clock.now() - began)

    def _load(self, player: Player, effect: Load) -> events.Loaded:
        assert player.store is not None
        return events.Loaded(*player.store.load_part(effect.checkpoint, effect.plan, effect.shard))

    def _connect(self, player: Player, effect: Connect) -> bool:
        """Open a link; return whether anyone listens there."""
        try:
            player.endpoint.connect(effect.to, *effect.place)
        except JobFailed:
            return False
        return True

    # stories

    def _arrive(self, player: Player, arrival: Arrival) -> None:
        if player.caller is None or arrival.sender != COORDINATOR or player.caller.takes(arrival.event):
            player.queue(arrival)

    def _advance(self, player: Player, answer: object) -> None:
        """Run a client from an answer to its next wait."""
        story, say = player.story, player.send
        assert story is not None
        if player.ended:
            return
        times = player.times
        times.go_on(answer)
        while True:
            try:
                effect = story.send(answer)
            except StopIteration:
                self._end_story(player)
                return
            # most effects are messages and waits: compare classes, which is faster than isinstance
            kind = type(effect)
            answer = None
            doing = WORK if kind is Send or kind is Receive else DOING.get(kind, ASIDE)
            if doing != times.doing:
                times.begin(doing)
            if kind is Send:
                if type(effect.message) is membership.Leave:  # type: ignore[union-attr]  # a Send
                    times.tell()
                say(effect.to, effect.message, effect.payload)  # type: ignore[union-attr]  # a Send
            elif kind is Receive:
                if not effect.wait:  # type: ignore[union-attr]  # a Receive
                    self._glance(player)
                    answer = player.inbox.popleft() if player.inbox else None
                    continue
                if not player.inbox:
                    player.waits, player.since = True, self.clock.now()
                    times.begin(WAIT)
                    return
                answer = player.inbox.popleft()
            elif kind is Compute or kind is Work or kind is Update or kind is ReduceGradients:
                answer = self._work(player, effect)
                if answer is None:
                    return
                times.go_on(answer)
            else:
                answer = self._answer(player, effect)

    def _glance(self, player: Player) -> None:
        """Deliver arrivals, unless that was done just now."""
        if (now := self.clock.now()) >= player.looks:
            player.looks = now + GLANCE_SECONDS
            self.clock.glance()

    def _end_story(self, player: Player) -> None:
        if player.caller is not None and player.caller.waits:  # the coordinator may still lack its last messages
            player.caller.then = lambda: self._end(player)
        else:
            self._end(player)

    def _work(self, player: Player, effect: Effect) -> object:
        """Have the worker do what may take long; return None if the answer comes later."""
        assert player.worker is not None
        if isinstance(effect, Update):
            return player.worker.update(effect.samples, lambda done: self._advance(player, done))
        player.endpoint.flush()
        if isinstance(effect, Compute):
            return player.worker.compute(effect.batch, lambda computed: self._advance(player, computed))
        if isinstance(effect, Work):
            player.times.share(effect.begins)
            return player.worker.work(effect.share, effect.begins, lambda done: self._advance(player, done))
        self._reducing.append(player)
        self.look()
        return None

    def _reduce(self) -> None:
        # a copy, because a client that goes on may begin another reduction
        for player in tuple(self._reducing):
            done = False if player.ended else player.reduce(self.clock.glance, self.clock.now)
            if done is None:
                player.times.begin(WAIT)
            else:
                player.times.go_on(sender=player.role)
                self._reducing.remove(player)
                self._advance(player, done)

    def _answer(self, player: Player, effect: Effect) -> Any:
        """Perform an effect of a client other than messages and computations."""
        player.endpoint.flush()
        if (answer := ANSWERS.get(type(effect))) is None:
            raise LocalProtocolError(f"a story cannot ask for {type(effect).__name__}")
        return answer(self, player, effect)

    def _measure(self, player: Player, _: Measure) -> Measured:
        assert player.worker is not None
        began = self.clock.now()
        return msgspec.structs.replace(player.worker.measure(), seconds=self.clock.now() - began)

    def _attach(self, player: Player, effect: Attach) -> None:
        assert player.worker is not None
        held = effect.plan.layout.held(roles.parse(player.role).partition)
        player.worker.attach(effect.plan, player.endpoint.allocate(held, effect.gradients, effect.parameters))

    def _end(self, player: Player) -> None:
        if not player.ended:
            self._forget(player)
        player.endpoint.close()


DOING: Mapping[type[Effect], str] = {
    Compute: COMPUTE,
    Work: SHARE,
    Update: UPDATE,
    ReduceGradients: WORK,
    Connect: WORK,
    RecordEffect: WORK,
}
"""Use of a replica's time by effect, besides messages; other effects are no part of a step."""
PERFORMS: Mapping[type[Effect], Callable[[Driver, Player, Any], None]] = {
    RecordEffect: Driver._perform_record,
    End: Driver._perform_end,
    Save: Driver._perform_write,
    Commit: Driver._perform_write,
    Discard: Driver._perform_write,
    Load: Driver._perform_load,
    Connect: Driver._perform_connect,
    Lend: Driver._perform_lend,
    Become: Driver._perform_become,
    Wake: Driver._perform_wake,
}
"""Function that performs each effect of a machine, besides messages."""
ANSWERS: Mapping[type[Effect], Callable[[Driver, Player, Any], Any]] = {
    RecordEffect: Driver._perform_record,
    Measure: Driver._measure,
    Attach: Driver._attach,
    Connect: Driver._connect,
    Form: lambda driver, player, effect: player.form(effect.group, driver.clock.now),
    Save: Driver._write,
    Load: Driver._load,
    Wake: Driver._wake,
}
"""Function that returns the answer to each effect of a client, besides messages and computations."""
