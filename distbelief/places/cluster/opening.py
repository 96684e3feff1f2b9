"""Opening of a job's hosts: their agents start, greet, and test whether the hosts reach each other."""

from __future__ import annotations

import contextlib
import multiprocessing.connection
import time
from collections.abc import Callable, Sequence
from multiprocessing.connection import Connection
from typing import Any

import msgspec

from distbelief.errors import Interrupted, JobFailed, UsageError
from distbelief.places.channel import BEAT_SECONDS
from distbelief.places.cluster import network
from distbelief.places.cluster.engines import Engine, passed_on
from distbelief.places.cluster.network import HERE
from distbelief.places.cluster.remote_agent import RemoteAgent
from distbelief.places.join.ticket import VERSION
from distbelief.places.messages import OpenJob, ReachHosts
from distbelief.transport.addresses import joined, own_addresses

START_SECONDS = 60.0
"""Limit in seconds for all agents to start, or to try each other."""
ALL_PAIRS = 16
"""Most hosts of which every pair is tried; of more, each tries the next two and this one."""


def open_hosts(engine: Engine, names: Sequence[str], mark: str, interface: str, woken: Connection) -> Opened:
    """Start the agents of hosts, and find addresses by which the others reach each of them, and this one.

    A host that sees the file `mark` sees the run folder. Without an `interface`, any address that others reach is used.
    A signal on `woken` interrupts the start.

    Raises:
        UsageError, JobFailed: an agent does not start, or has another version; or hosts do not reach each other.
    """
    opened = Opened(woken)
    try:
        opened.start(engine, names)
        opened.greet(OpenJob(mark, passed_on(), []))
        opened.find_addresses(interface)
    except BaseException:
        opened.close()
        raise
    return opened


class Opened:
    """The agents of a job's hosts, and the address of this one."""

    def __init__(self, woken: Connection) -> None:
        self._woken = woken
        self.agents: list[RemoteAgent] = []
        self.home = ""
        self.told: list[str] = []
        """Lines for the user about the opening."""

    def close(self, seconds: float = 10.0) -> None:
        """End the agents, and all processes that they have started."""
        for agent in self.agents:
            agent.hang_up()
        until = time.monotonic() + seconds
        for agent in self.agents:
            agent.reap(until)

    def start(self, engine: Engine, names: Sequence[str]) -> None:
        """Start the agents of hosts, and wait until all have come."""
        with contextlib.closing(engine):
            for name in names:
                self.agents.append(engine.start(name))
            self.until(lambda agent: agent.attend, "does not answer")

    def greet(self, job: OpenJob) -> None:
        """Check the versions of the agents, and have them describe their hosts."""
        for agent in self.agents:
            assert agent.attend
            if agent.attend.version != VERSION:
                raise UsageError(
                    f"host {agent.name} runs distbelief {agent.attend.version}, this is {VERSION}: "
                    "install the same on all"
                )
        self.open(job)

    def open(self, job: OpenJob) -> None:
        """Open a job on all hosts, each with its own processors, and wait for their descriptions."""
        for agent in self.agents:
            agent.line.say(msgspec.structs.replace(job, processors=agent.processors))
        self.until(lambda agent: agent.greeting, "does not answer")

    def find_addresses(self, interface: str) -> None:
        """Find the address by which the others reach each host, by trying them."""
        greetings = [agent.greeting for agent in self.agents if agent.greeting]
        here = network.network_identity()
        same = all(agent.attend.network == here for agent in self.agents if agent.attend)
        with contextlib.closing(network.WayServer()) as ways:
            logins = [greeting.login[0] for greeting in greetings if greeting.login]
            tried = {HERE: _candidates(HERE, own_addresses(), logins, same, interface)}
            ports = {HERE: ways.port}
            for agent, greeting in zip(self.agents, greetings, strict=True):
                tried[agent.name] = _candidates(agent.name, greeting.addresses, greeting.login[1:], same, interface)
                ports[agent.name] = greeting.port
            where = {name: [joined(address, ports[name]) for address in several] for name, several in tried.items()}
            for number, agent in enumerate(self.agents):
                others = [agent.name for agent in [*self.agents[number + 1 :], *self.agents[:number]]]
                chosen = others if len(self.agents) <= ALL_PAIRS else others[:2]
                agent.line.say(ReachHosts({name: where[name] for name in (HERE, *chosen)}))
            mine = network.try_all({name: several for name, several in where.items() if name != HERE})
            self.until(lambda agent: agent.reached, "is still trying to reach others")
        heard = {HERE: mine, **{agent.name: agent.reached.others for agent in self.agents if agent.reached}}
        answers = {name: {other: answer[name] for other, answer in heard.items() if name in answer} for name in tried}
        self.home = network.choose(HERE, tried[HERE], answers[HERE])
        for agent in self.agents:
            agent.address = network.choose(agent.name, tried[agent.name], answers[agent.name])

    def until(self, done: Callable[[RemoteAgent], object], late: str) -> None:
        """Receive messages of the agents until each has done something, or is gone.

        Args:
            done: returns a true value once an agent has done it.
            late: the description of an agent that takes too long.

        Raises:
            Interrupted: a signal has come, here or to an agent.
            JobFailed: some are gone.
        """
        end = time.monotonic() + START_SECONDS
        while any(not (agent.gone or done(agent)) for agent in self.agents):
            there = [agent for agent in self.agents if not agent.gone]
            waiting: list[Any] = [self._woken, *(waitable for one in there for waitable in one.waitables)]
            multiprocessing.connection.wait(waiting, BEAT_SECONDS / 4)
            if self._woken.poll():
                raise Interrupted("interrupted before the job began")
            for agent in there:
                agent.hear()
                if not agent.gone and not done(agent) and time.monotonic() > end:
                    agent.gone = f"it {late} after {START_SECONDS:.0f} s"
                if agent.interrupted:
                    raise Interrupted(f"{agent.interrupted} on host {agent.name}, before the job began")
            if gone := [agent for agent in there if agent.gone]:
                self.lose(gone)

    def lose(self, gone: Sequence[RemoteAgent]) -> None:
        """Fail because of agents that are gone."""
        wrong = [f"host {agent.name}: {agent.gone}" for agent in gone]
        more = f"; and {len(wrong) - 3} more hosts" if len(wrong) > 3 else ""
        raise JobFailed("; ".join(wrong[:3]) + more)


def _candidates(
    name: str, by_interface: dict[str, list[str]], logins: Sequence[str], same: bool, interface: str
) -> list[str]:
    """Return the addresses of a host that others may use, the best first."""
    if not interface:
        return network.order([address for several in by_interface.values() for address in several], logins, same)
    if interface not in by_interface:
        raise UsageError(
            f"--interface {interface}: {name if name == HERE else f'host {name}'} has none of that name with an "
            f"address; it has {', '.join(f'{other} ({several[0]})' for other, several in by_interface.items())}"
        )
    return by_interface[interface]
