"""Processes of several hosts as a place: each host's agent starts the lives there, and the supervisor those here."""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial
from multiprocessing.connection import Connection
from typing import Any

import msgspec

from distbelief.core import roles
from distbelief.errors import JobFailed, RemoteProtocolError
from distbelief.places import messages
from distbelief.places.channel import BEAT_SECONDS, SILENCE_SECONDS
from distbelief.places.cluster.network import network_identity
from distbelief.places.cluster.opening import Opened
from distbelief.places.cluster.placement import HOME, Placement
from distbelief.places.cluster.remote_agent import RemoteAgent, RemoteLife
from distbelief.places.place import Ended, Interruption, Unable
from distbelief.places.processes.processes import Child, Hooks, Processes
from distbelief.places.processes.spec import Spec

NO_ROOM = ", and no other has a slot left for it"


class HostProcesses:
    """Place that runs a job's processes on several hosts.

    It passes on their messages, reports how each ended, and leaves none behind.

    Args:
        hooks: as for `Processes`.
        open_hosts: starts the agents.
        place: returns the placement, once the agents have greeted.
        leave_within: the seconds within which a host may leave; 0 if the whole job ends instead.
    """

    def __init__(
        self,
        hooks: Hooks,
        open_hosts: Callable[[Connection], Opened],
        place: Callable[[Opened], Placement],
        leave_within: float = 0.0,
    ) -> None:
        self._hooks, self._open, self._place, self._leave_within = hooks, open_hosts, place, leave_within
        self._local = Processes.of(hooks)
        self._opened: Opened | None = None
        self._placed: Placement | None = None
        self._lives: dict[int, RemoteLife] = {}
        self._numbers = 0
        self._news: list[Ended] = []
        self._beaten = 0.0

    def open(self, woken: Connection) -> None:
        """Start the agents, and place the roles; a signal on `woken` interrupts that."""
        self._opened = self._open(woken)
        self._placed = self._place(self._opened)
        for line in [*self._opened.told, *self._placed.lines()]:
            self._hooks.note(line)

    @property
    def _agents(self) -> list[RemoteAgent]:
        return self._opened.agents if self._opened else []

    @property
    def _placement(self) -> Placement:
        """Hosts of the roles, which are placed once the agents have greeted."""
        assert self._placed
        return self._placed

    def spec_for(self, role: str, spec: Spec) -> Spec:
        """Return the spec of a role's process on its host, where it listens at the host's address."""
        assert self._opened
        at = self._placement.where[role]
        if at == HOME:
            return msgspec.structs.replace(spec, bind=self._opened.home, advertise=self._opened.home)
        bare = msgspec.structs.replace(spec, environment={}, path=[], directory="", forkserver=0, supervisor=0)
        address = self._agents[at].address
        return msgspec.structs.replace(bare, bind=address, advertise=address)

    # methods of `Place`

    def start(self, role: str, incarnation: int) -> None:
        """Start a life of a role on its host; if that is gone, on another with free slots."""
        at = self._placement.again(role)
        if at is None:
            how = f"its host is gone{NO_ROOM}"
            self._news.append(Ended(role, incarnation, how, resumable=False))
        elif at == HOME:
            self._local.start(role, incarnation)
        else:
            agent, self._numbers = self._agents[at], self._numbers + 1
            self._lives[self._numbers] = RemoteLife(role, incarnation, self._numbers, agent)
            agent.line.say(
                messages.StartLife(self._numbers, role, incarnation, self._hooks.spec(role, incarnation, -1))
            )

    def end(self, role: str, incarnation: int) -> None:
        self._local.end(role, incarnation)
        for life in self._lives.values():
            if (life.role, life.incarnation) == (role, incarnation):
                life.agent.line.say(messages.EndLife(life.number))

    def tell(self, role: str, word: messages.ChannelMessage) -> None:
        self._local.tell(role, word)
        lives = [life for life in self._lives.values() if life.role == role]
        if lives:
            max(lives, key=lambda life: life.incarnation).say(word)

    def vacate(self, host: str) -> None:
        """Start no more lives on a host, and let its agent go once none is left."""
        for at, agent in enumerate(self._agents):
            if agent.name == host:
                agent.leaves = True
                self._placement.lose(at)

    # methods for the process of a supervisor

    @property
    def children(self) -> list[Child | RemoteLife]:
        """Processes that have not ended."""
        return [*self._local.children, *self._lives.values()]

    def rename(self, role: str, to: str, incarnation: int) -> bool:
        """Rename a role's process to another role; return whether there is such a process."""
        life = next((life for life in self._lives.values() if life.role == role), None)
        if life is not None:
            life.role, life.incarnation = to, incarnation
        elif not self._local.rename(role, to, incarnation):
            return False
        self._placement.rename(role, to)
        return True

    @property
    def waitables(self) -> list[Any]:
        """Objects that are ready once a process or an agent has sent something or ended."""
        there = (waitable for agent in self._agents if not agent.gone for waitable in agent.waitables)
        return [*self._local.waitables, *there]

    def look(self, ready: set[int]) -> None:
        """Pass on the messages, and report the processes that have ended."""
        self._local.look(ready)
        now = time.monotonic()
        if beats := now > self._beaten + BEAT_SECONDS:
            self._beaten = now
        for at, agent in enumerate(self._agents):
            if agent.gone:
                continue
            if lines := agent.read_printed():
                self._hooks.host_printed(agent.name, lines)
            if id(agent.line.connection) in ready and not self._hears(agent):
                self._lose(at, agent, agent.why())
            elif now > agent.heard + SILENCE_SECONDS:
                self._lose(at, agent, f"nothing was heard from it for {SILENCE_SECONDS:.0f} s")
            elif agent.leaves and not any(life.agent is agent for life in self._lives.values()):
                agent.dismiss(0)
            elif beats:
                agent.line.say(messages.Beat())
        news, self._news = self._news, []
        for event in news:
            self._hooks.happens(event)

    def _hears(self, agent: RemoteAgent) -> bool:
        try:
            return agent.line.hear_all(partial(self._take_word, agent))
        except RemoteProtocolError:
            return False

    def _take_word(self, agent: RemoteAgent, word: messages.ChannelMessage) -> None:
        agent.take(word)
        life = self._lives.get(word.life) if isinstance(word, messages.OfLife) else None
        match word:
            case messages.Failed():
                self._hooks.happens(Unable(JobFailed(f"host {agent.name}: {word.text}")))
            case messages.Interrupt():
                self._hooks.happens(self._interruption(agent, word.reason))
            case messages.StoppedLives():
                agent.stopped = word.lives
            case messages.LifeStarted() if life:
                life.pid = word.pid
            case messages.LifeMessage() if life:
                self._hooks.take(life, _as_heard(agent.name, word))
            case messages.Printed() if life:
                self._hooks.printed(life, [word.text])
            case messages.LifeEnded() if life:
                del self._lives[word.life]
                self._hooks.happens(Ended(life.role, life.incarnation, word.how, word.killed, word.done))

    def _interruption(self, agent: RemoteAgent, why: str) -> Interruption:
        """Return the interruption for a host that is asked to leave.

        It may leave unless it is the supervisor's machine, since the coordinator is there.
        """
        assert agent.attend
        there = tuple((life.role, life.incarnation) for life in self._lives.values() if life.agent is agent)
        within = 0.0 if agent.attend.network == network_identity() else self._leave_within
        replaceable = self._placement.can_replace(self._agents.index(agent))
        return Interruption(f"{why} on host {agent.name}", agent.name, there, within, replaceable)

    def _lose(self, at: int, agent: RemoteAgent, why: str) -> None:
        """Note that a host is gone, with all lives there."""
        agent.gone = why
        agent.hang_up()
        self._placement.lose(at)
        lost = [life for life in self._lives.values() if life.agent is agent]
        replicas = [life.role for life in lost if roles.is_replica(life.role)]
        spent = {roles.lead_of(role) for role in replicas if self._placement.again(role) is None}
        for life in lost:
            del self._lives[life.number]
            last = roles.lead_of(life.role) in spent
            how = f"its host {agent.name} is gone{NO_ROOM * last}: {why}"
            self._news.append(Ended(life.role, life.incarnation, how, killed=True, resumable=not last))

    @property
    def busy(self) -> set[str]:
        """Roles on this host whose processes compute."""
        return self._local.busy

    @property
    def stopped(self) -> dict[str, int]:
        """Roles whose processes are stopped by a signal, with their process ids there."""
        held = {number for agent in self._agents if not agent.gone for number in agent.stopped}
        return {**self._local.stopped, **{life.role: life.pid for life in self._lives.values() if life.number in held}}

    def close(self) -> None:
        self._local.close()
        self._lives.clear()
        if self._opened:
            self._opened.close()
            self._opened = None


def _as_heard(host: str, heard: messages.LifeMessage) -> messages.ChannelMessage:
    """Return another host's message with its moment on this clock, and with the host's name in an error."""
    match heard.word:
        case messages.Noted() as noted:
            return msgspec.structs.replace(noted, moment=time.monotonic() - heard.age)
        case messages.Failed() as failed:
            return msgspec.structs.replace(failed, host=host)
    return heard.word
