"""The driver: the only loop. It carries the effects of machines and stories to transports, stores and workers, and the
answers back.
"""

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
from distbelief.core.records import Record
from distbelief.core.roles import CARRIER, CLOCK, COORDINATOR, STORE
from distbelief.errors import CheckpointError, JobFailed, LocalProtocolError, RemoteProtocolError
from distbelief.runtime.clock import Clock
from distbelief.runtime.lasting import RETURN_SECONDS, Caller, LastingHost
from distbelief.runtime.player import BecomeRole, Player, Store, Worker, stay
from distbelief.runtime.step_times import ASIDE, COMPUTE, SHARE, UPDATE, WAIT, WORK, StepTimes
from distbelief.sharding.layout import Range
from distbelief.transport.base import Endpoint

GLANCE_SECONDS = 10e-3
"""A story that does not wait has its links looked at when this long has passed since they last were."""
FAREWELL_SECONDS = 1.0
"""Time for which a machine that had ended as it died listens when it has come again."""


# Who goes on when: a machine is handed each arrival as it is delivered, and answers at once. A story may compute for
# long, so that what arrives for it is queued. It goes on after the turn, in `run_while`, since a transport is not
# polled while it delivers.
class Driver:
    """Plays one role or many until they have ended.

    Args:
        clock: the wall's or the simulator's.
        sink: called with the time, the role and the record of everything that is written down.
        lasts: whether roles wait for a coordinator that is gone, since it comes again.
        validate: is called with the role of a machine after each event that it has taken.
    """

    def __init__(
        self,
        clock: Clock,
        sink: Callable[[float, str, Record], None],
        lasts: bool = False,
        validate: Callable[[str], None] | None = None,
    ) -> None:
        self.clock, self._sink, self._lasts, self._validate = clock, sink, lasts, validate
        self.coordinator = ""
        """Address of the coordinator."""
        self._players: dict[str, Player] = {}
        self._reducing: list[Player] = []
        """Stories whose workers reduce: they are asked again and again, and links are carried in between."""
        self._ready: deque[Player | None] = deque()
        """Stories that waited for something which has arrived; they go on after the turn, for a transport is not polled
        while it delivers. None where there is only to be asked whether to go on.
        """

    def add_machine(
        self,
        role: str,
        machine: Machine,
        endpoint: Endpoint,
        store: Store | None = None,
        become: BecomeRole | None = None,
        host: LastingHost | None = None,
    ) -> None:
        """Play a machine: it is handed every arrival at its endpoint. `become` plays another role in its place, with a
        machine that it has made.
        """
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
        """Play a story; it begins when the driver runs or is asked to `begin`. `worked` says how long its thread has
        worked beside steps, where time is simulated.
        """
        player = self._add(role, endpoint)
        player.story, player.worker, player.store = story, worker, store
        player.times = StepTimes(role, self.clock.now, worked)
        endpoint.deliver = player.queue if player.caller is None else functools.partial(self._arrive, player)

    def _add(self, role: str, endpoint: Endpoint) -> Player:
        if role in self._players:
            raise LocalProtocolError(f"{role} is played already")
        player = self._players[role] = Player(role, endpoint, self._ready)
        if self._lasts and role != COORDINATOR:
            hear = self._hear(player)
            player.caller = Caller(endpoint, self.clock, lambda: self.coordinator, hear)
            player.send = player.caller.send
        return player

    def _hear(self, player: Player) -> Callable[[Arrival], None]:
        return lambda arrival: self._take(player, arrival) if player.machine else player.queue(arrival)

    def work_for(self, role: str, worker: Worker) -> None:
        """Have another worker compute for a story from here on."""
        self._players[role].worker = worker

    def link(self, role: str) -> None:
        """Open a role's link to the coordinator: at once; or, where that comes again, as soon as it is there.

        Raises:
            JobFailed: nobody listens there, and nobody will.
        """
        player = self._players[role]
        if player.caller is not None:
            player.caller.open()
        else:
            player.endpoint.connect(COORDINATOR, self.coordinator)

    def send(self, role: str, to: str, message: messages.Message) -> None:
        """Have a role say something that no story or machine of its says."""
        self._players[role].send(to, message)

    def end_wait(self, role: str) -> None:
        """Have a role wait no longer for a coordinator that does not come again."""
        player = self._players.get(role)
        if player is not None and player.caller is not None:
            player.caller.end_wait()

    def away_since(self, role: str) -> float | None:
        """Since when a role waits for the coordinator to come again; None where it does not."""
        player = self._players.get(role)
        return player.caller.away if player is not None and player.caller is not None else None

    def replay(self, role: str, known: int) -> None:
        """Have a machine go through its journal, and become what it was in the life before.

        What it did then that others may have missed is done now: the records after the first `known`, messages when
        those come back whom it told them, and what it last asked the store and the clock for.
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
        """Whoever has not come back by now is gone."""
        assert player.host is not None
        why = f"it did not come back to the coordinator within {RETURN_SECONDS:.0f} s"
        for role, incarnation in player.host.missing():
            self._handle(player, Arrival(role, events.Lost(why, incarnation)))

    def begin(self, role: str) -> None:
        """Run a story up to its first wait."""
        self._advance(self._players[role], None)

    def run(self) -> None:
        """Begin all stories, and take turns until every role has ended."""
        for player in list(self._players.values()):
            if player.story is not None and player.role in self._players:
                self._advance(player, None)
        self.run_while(lambda: True)

    def run_while(self, condition: Callable[[], bool], turn_until: Callable[[Sized], None] | None = None) -> None:
        """Take turns while a condition holds and somebody is played.

        Args:
            condition: is asked before a story goes on, and before each turn.
            turn_until: of a clock that takes turns until something is ready to go on, or this is asked to `look`.
        """
        players, ready, reducing, turn = self._players, self._ready, self._reducing, turn_until or self._turn
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

    def _turn(self, _: Sized) -> None:
        self.clock.turn()

    def look(self) -> None:
        """Ask after what happens now whether to go on."""
        self._ready.append(None)

    def plays(self, role: str) -> bool:
        """Return whether a role is being played: it was added, and has not ended."""
        return role in self._players

    def waiting_since(self, role: str) -> float | None:
        """The time at which a story began to wait; None for one that does not, and for machines."""
        player = self._players.get(role)
        return player.waiting_since if player is not None else None

    def tell(self, role: str, sender: str, event: events.Event) -> None:
        """Tell a role something that came by no transport, such as the supervisor's word."""
        if (player := self._players.get(role)) is not None:
            (self._handle if player.machine else self._arrive)(player, Arrival(sender, event))

    def remove(self, role: str) -> None:
        """Stop playing a role at once, as if its process had been killed; its endpoint is the caller's to close."""
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

    # machines

    def _handle(self, player: Player, arrival: Arrival) -> None:
        if player.ended:
            return
        if player.caller is not None and arrival.sender == COORDINATOR and not player.caller.takes(arrival.event):
            return
        if player.host is not None:
            try:
                for one in player.host.takes(arrival):
                    self._take(player, one)
            except RemoteProtocolError as error:
                player.endpoint.drop(arrival.sender, str(error))
            return
        self._take(player, arrival)

    def _take(self, player: Player, arrival: Arrival) -> None:
        if player.ended:
            return
        # whatever else a machine is told, it may write to what its answers are sent from
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
                return  # it was killed as it said something
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
        else:  # whom it told to stop may come back to hear it
            assert player.host is not None
            player.host.ended = True
            self.clock.call_later(FAREWELL_SECONDS, self._end, player)

    def _perform_write(self, player: Player, effect: Save | Commit | Discard) -> None:
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

    def _wake(self, player: Player, wake: Wake) -> None:
        self.clock.call_later(
            wake.seconds, lambda timer: self._handle(player, Arrival(CLOCK, events.Woke(timer))), wake.timer
        )

    def _write(self, player: Player, effect: Save | Commit | Discard) -> events.Saved:
        """Write to the store; what goes wrong is answered, not raised: the last good checkpoint stays."""
        assert player.store is not None
        where: object = ""
        try:
            if isinstance(effect, Save):
                player.store.save_part(effect.number, effect.part, effect.arrays, effect.facts)
            elif isinstance(effect, Discard):
                player.store.discard(effect.number)
            else:
                where = player.store.commit(effect.number, effect.plan, effect.position, effect.samples, effect.script)
        except CheckpointError as error:
            return events.Saved(effect.number, str(error))
        return events.Saved(effect.number, "", str(where))

    def _load(self, player: Player, effect: Load) -> events.Loaded:
        assert player.store is not None
        return events.Loaded(*player.store.load_part(effect.checkpoint, effect.plan, effect.shard))

    def _connect(self, player: Player, effect: Connect) -> bool:
        """Open a link; where nobody listens any more, that is all there is to say."""
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
        """Run a story, from an answer to its next wait."""
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
            kind = type(effect)
            answer = None
            doing = WORK if kind is Send or kind is Receive else DOING.get(kind, ASIDE)
            if doing != times.doing:
                times.begin(doing)
            if kind is Send:
                if type(effect.message) is membership.Leave:  # type: ignore[union-attr]  # a Send
                    self._tell_times(player)
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
        """Have what has arrived delivered, unless that was just done."""
        if (now := self.clock.now()) >= player.looks:
            player.looks = now + GLANCE_SECONDS
            self.clock.glance()

    def _tell_times(self, player: Player) -> None:
        """Write down what the steps of a replica were made of, which leaves and makes no more."""
        if (timed := player.times.tell()) is not None:
            self._sink(self.clock.now(), player.role, timed)

    def _end_story(self, player: Player) -> None:
        if player.caller is not None and player.caller.waits:  # what it said last is still to be heard
            player.caller.then = lambda: self._end(player)
        else:
            self._end(player)

    def _work(self, player: Player, effect: Effect) -> object:
        """Have the worker do what may take it long; None where the answer comes later."""
        assert player.worker is not None
        if isinstance(effect, Update):
            return player.worker.update(effect.samples, lambda done: self._advance(player, done))
        player.endpoint.flush()
        if isinstance(effect, Compute):
            return player.worker.compute(effect.batch, lambda computed: self._advance(player, computed))
        if isinstance(effect, Work):
            return player.worker.work(effect.share, effect.begins, lambda done: self._advance(player, done))
        self._reducing.append(player)
        self.look()
        return None

    def _reduce(self) -> None:
        for player in tuple(self._reducing):
            done = False if player.ended else player.reduce(self.clock.glance, self.clock.now)
            if done is None:
                player.times.begin(WAIT)
            else:
                player.times.go_on(sender=player.role)
                self._reducing.remove(player)
                self._advance(player, done)

    def _answer(self, player: Player, effect: Effect) -> Any:
        """Perform what a story asks for beside sending, receiving and computing."""
        assert player.worker is not None
        player.endpoint.flush()
        if isinstance(effect, Measure):
            began = self.clock.now()
            return msgspec.structs.replace(player.worker.measure(), seconds=self.clock.now() - began)
        if isinstance(effect, Attach):
            held = effect.plan.layout.held(roles.parse(player.role).partition)
            arena = player.endpoint.allocate(held, effect.gradients, effect.parameters)
            return player.worker.attach(effect.plan, arena)
        if isinstance(effect, Connect):
            return self._connect(player, effect)
        if isinstance(effect, RecordEffect):
            return self._sink(self.clock.now(), player.role, effect.record)
        if isinstance(effect, Form):
            return player.form(effect.group, self.clock.now)
        if isinstance(effect, Save):
            return self._write(player, effect)
        if isinstance(effect, Load):
            return self._load(player, effect)
        if isinstance(effect, Wake):
            return self.clock.call_later(
                effect.seconds, lambda timer: self._arrive(player, Arrival(CLOCK, events.Woke(timer))), effect.timer
            )
        raise LocalProtocolError(f"a story cannot ask for {type(effect).__name__}")

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
"""Use of a replica's time by what it asks for, beside messages; the others are no part of a step."""
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
"""Performance of each effect of a machine, beside sending."""
