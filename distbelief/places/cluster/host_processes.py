"""Processes of several hosts as a place: a host's agent starts each life placed there; the supervisor those here."""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial
from multiprocessing.connection import Connection
from typing import Any

import msgspec

from distbelief.core import roles
from distbelief.errors import JobFailed, RemoteProtocolError
from distbelief.places.channel import BEAT_SECONDS, SILENCE_SECONDS
from distbelief.places.cluster.network import network_identity
from distbelief.places.cluster.opening import Opened
from distbelief.places.cluster.placement import HOME, Placement
from distbelief.places.cluster.remote_agent import RemoteAgent, RemoteLife
from distbelief.places.messages import (
    AgentFailed,
    Beat,
    ChannelMessage,
    EndLife,
    Failed,
    LifeEnded,
    LifeSaid,
    LifeStarted,
    Noted,
    OfLife,
    Printed,
    StartLife,
    StoppedLives,
    ToldToEnd,
)
from distbelief.places.place import Ended, Interruption, Unable
from distbelief.places.processes.processes import Child, Hooks, Processes
from distbelief.places.processes.spec import Spec

NO_ROOM = ", and no other has a slot left for it"


class HostProcesses:
    """Starts a job's processes on several hosts, hands on what they say, tells how each ended, leaves none behind.

    Args:
        hooks: as of `Processes`.
        open_hosts: starts the agents.
        place: says who is where, once these have greeted.
        leave_within: seconds that a host which is told to go has; 0 where the whole job ends then.
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
        self._placement: Placement | None = None
        self._lives: dict[int, RemoteLife] = {}
        self._numbers = 0
        self._news: list[Ended] = []
        self._beaten = 0.0

    def open(self, woken: Connection) -> None:
        """Start the agents, and decide who is where; a signal on `woken` ends that.

        Raises:
            DistbeliefError: hosts cannot be used, or there are too few slots.
        """
        self._opened = self._open(woken)
        self._placement = self._place(self._opened)
        for line in [*self._opened.told, *self._placement.lines()]:
            self._hooks.note(line)

    @property
    def _agents(self) -> list[RemoteAgent]:
        return self._opened.agents if self._opened else []

    def spec_for(self, role: str, spec: Spec) -> Spec:
        """Return what the process of a role must know, where it is: it listens at its host's address."""
        assert self._placement
        assert self._opened
        at = self._placement.where[role]
        if at == HOME:
            return msgspec.structs.replace(spec, bind=self._opened.home, advertise=self._opened.home)
        bare = msgspec.structs.replace(spec, environment={}, path=[], directory="", forkserver=0, supervisor=0)
        address = self._agents[at].address
        return msgspec.structs.replace(bare, bind=address, advertise=address)

    # a place

    def start(self, role: str, incarnation: int) -> None:
        """Begin a life of a role, on its host, or on another with slots left where that is gone."""
        assert self._placement
        at = self._placement.again(role)
        if at is None:
            how = f"its host is gone{NO_ROOM}"
            self._news.append(Ended(role, incarnation, how, resumable=False))
        elif at == HOME:
            self._local.start(role, incarnation)
        else:
            agent, self._numbers = self._agents[at], self._numbers + 1
            self._lives[self._numbers] = RemoteLife(role, incarnation, self._numbers, agent)
            agent.line.say(StartLife(self._numbers, role, incarnation, self._hooks.spec(role, incarnation, -1)))

    def end(self, role: str, incarnation: int) -> None:
        """End a life of a role at once; nothing, where it has ended already."""
        self._local.end(role, incarnation)
        for life in self._lives.values():
            if (life.role, life.incarnation) == (role, incarnation):
                life.agent.line.say(EndLife(life.number))

    def tell(self, role: str, word: ChannelMessage) -> None:
        """Say a word to the latest life of a role; nothing, where that has ended."""
        self._local.tell(role, word)
        lives = [life for life in self._lives.values() if life.role == role]
        if lives:
            max(lives, key=lambda life: life.incarnation).say(word)

    def vacate(self, host: str) -> None:
        """Begin no more lives on a host, and let its agent go as soon as none is there."""
        assert self._placement
        for at, agent in enumerate(self._agents):
            if agent.name == host:
                agent.leaves = True
                self._placement.lose(at)

    # what a supervisor's process does with it

    @property
    def children(self) -> list[Child | RemoteLife]:
        """Those that are there."""
        return [*self._local.children, *self._lives.values()]

    def rename(self, role: str, to: str, incarnation: int) -> bool:
        """Have whoever plays a role play another from now on; whether anybody does."""
        life = next((life for life in self._lives.values() if life.role == role), None)
        if life is None and not self._local.rename(role, to, incarnation):
            return False
        if life is not None:
            life.role, life.incarnation = to, incarnation
        assert self._placement
        self._placement.rename(role, to)
        return True

    @property
    def waitables(self) -> list[Any]:
        """Return what is ready as soon as a process has said something or ended, or an agent has."""
        there = [agent for agent in self._agents if not agent.gone]
        return [
            *self._local.waitables,
            *(agent.line.connection for agent in there),
            *(agent.printed for agent in there),
        ]

    def look(self, ready: set[int]) -> None:
        """Hand on what is said, and tell who has ended."""
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
                agent.let_go()
            elif beats:
                agent.line.say(Beat())
        news, self._news = self._news, []
        for event in news:
            self._hooks.happens(event)

    def _hears(self, agent: RemoteAgent) -> bool:
        try:
            return agent.line.hear_all(partial(self._take_word, agent))
        except RemoteProtocolError:
            return False

    def _take_word(self, agent: RemoteAgent, word: ChannelMessage) -> None:
        agent.take(word)
        life = self._lives.get(word.life) if isinstance(word, OfLife) else None
        match word:
            case AgentFailed():
                self._hooks.happens(Unable(JobFailed(f"host {agent.name}: {word.why}")))
            case ToldToEnd():
                self._hooks.happens(self._interruption(agent, word.why))
            case StoppedLives():
                agent.stopped = word.lives
            case LifeStarted() if life:
                life.pid = word.pid
            case LifeSaid() if life:
                self._hooks.take(life, _as_heard(agent.name, word))
            case Printed() if life:
                self._hooks.printed(life, [word.text])
            case LifeEnded() if life:
                del self._lives[word.life]
                self._hooks.happens(Ended(life.role, life.incarnation, word.how, word.killed, word.done))

    def _interruption(self, agent: RemoteAgent, why: str) -> Interruption:
        """A host is told to go: it may leave, unless it is the supervisor's, where the coordinator is."""
        assert agent.greeting
        assert self._placement
        there = tuple((life.role, life.incarnation) for life in self._lives.values() if life.agent is agent)
        within = 0.0 if agent.greeting.network == network_identity() else self._leave_within
        replaceable = self._placement.can_replace(self._agents.index(agent))
        return Interruption(f"{why} on host {agent.name}", agent.name, there, within, replaceable)

    def _lose(self, at: int, agent: RemoteAgent, why: str) -> None:
        """A host is gone, and all that was there."""
        agent.gone = why
        agent.hang_up()
        assert self._placement
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
        """The roles whose processes compute, of those of this host."""
        return self._local.busy

    @property
    def stopped(self) -> dict[str, int]:
        """The roles whose processes are stopped by a signal, with their process ids there."""
        held = {number for agent in self._agents if not agent.gone for number in agent.stopped}
        return {**self._local.stopped, **{life.role: life.pid for life in self._lives.values() if life.number in held}}

    def close(self) -> None:
        """Leave no process behind, on any host."""
        self._local.close()
        self._lives.clear()
        if self._opened:
            self._opened.close()
            self._opened = None


def _as_heard(host: str, heard: LifeSaid) -> ChannelMessage:
    """Return another host's word as one of this host: with a moment of this clock, and an error that names the host."""
    match heard.word:
        case Noted() as noted:
            return msgspec.structs.replace(noted, moment=time.monotonic() - heard.age)
        case Failed() as failed:
            return msgspec.structs.replace(failed, host=host)
    return heard.word
