"""The local cluster: every role a process of this machine."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import msgspec

from distbelief.cluster import requirements, signals
from distbelief.cluster.addresses import host_and_port, is_loopback, told_host
from distbelief.cluster.pace import Pace
from distbelief.core.settings import Settings
from distbelief.core.values import Checked
from distbelief.job import Job

if TYPE_CHECKING:
    from distbelief.cluster.sitting import View


@dataclass(frozen=True)
class Local(Checked):
    """Processes of this machine."""

    transport: str = "shared"
    """How bytes travel: shared (memory) or tcp."""
    bind: str = "127.0.0.1"
    """With tcp, HOST or HOST:PORT: the coordinator listens at that port and the shards at the next ones; standbys, and all where there is no
    PORT, at any that are free."""
    advertise: str = ""
    """With tcp, the host that others are told to reach them at; else that of --bind, or this machine's own address where that is 0.0.0.0."""
    insecure: bool = False
    """Plain TCP on any network, to be read and forged by whoever is there; else links beyond loopback are encrypted, and closed to others."""
    tls: bool = False
    """With tcp, encrypt links on loopback too."""
    listen: str = ""
    """HOST or HOST:PORT where other machines may join: writes a ticket into the run folder, for `distbelief join`. The coordinator and the shards
    listen at the ports after it. It implies --transport tcp."""
    pace: Pace | None = None
    """Sleep after each step, so that replicas are as slow as this has them; a step that is slower is its own least."""

    @property
    def carrier(self) -> str:
        """The transport, with what --listen implies."""
        return "tcp" if self.listen else self.transport

    @property
    def bound(self) -> str:
        """Where the roles listen: as `bind`, or after the gate of --listen."""
        if not self.listen:
            return self.bind
        host, port = host_and_port(self.listen, "--listen")
        shown = f"[{host}]" if ":" in host else host
        return f"{shown}:{port + 1}" if port else shown

    @property
    def advertised(self) -> str:
        """The host that others are told."""
        return told_host(self.bound, self.advertise)

    @property
    def encrypted(self) -> bool:
        """Whether the links are TLS: where that was asked for, and on any network but loopback, unless `insecure`."""
        if self.carrier != "tcp" or self.insecure:
            return False
        return self.tls or not (is_loopback(host_and_port(self.bound)[0]) and is_loopback(self.advertised))

    def settings(self, job: Job) -> Settings:
        """What every role of a job is told here.

        Raises:
            UsageError: a strategy or option that has no meaning here, or more processes than a machine may have.
        """
        return requirements.settings_of(self, job)

    def run(self, job: Job, view: View | None = None) -> dict[str, Any]:
        """Run a job to its end; returns what `result.json` holds, and the run folder as `run`.

        Raises:
            DistbeliefError: the job could not begin, or failed; its processes are ended in any case.
        """
        began = time.monotonic()
        settings = self.settings(job)
        requirements.allow_files(settings)
        requirements.check_task(job)
        from distbelief.cluster.sitting import evaluates
        from distbelief.tasks import resolve

        task = resolve(job.reference, job.data_dir)
        evaluated = evaluates(settings, task)
        requirements.check_cut(task, settings)
        return self._run(job, settings, view, began, evaluated)

    def launch(self, job: Job, script: list[str], view: View | None = None) -> dict[str, Any]:
        """Run a user's own script in every replica of a job; `job.task` is only a name there. Returns as `run` does.

        Args:
            job: how the shards train.
            script: the path of the script, and its arguments.
            view: how the job is shown.

        Raises:
            UsageError: there is no such script, or the strategy has no replicas.
            DistbeliefError: as `run`.
        """
        began = time.monotonic()
        settings = msgspec.structs.replace(self.settings(job), evaluate_every=0)
        requirements.allow_files(settings)
        requirements.check_script(job, settings, script)
        return self._run(job, settings, view, began, evaluated=False, script=script)

    def _run(self, job: Job, settings: Settings, view: View | None, began: float, evaluated: bool, script: list[str] | None = None) -> dict[str, Any]:
        from distbelief.cluster.running import Running
        from distbelief.cluster.sitting import Sitting

        with signals.waitable() as woken:
            return Running(self, job, settings, Sitting(job, settings, view, began), evaluated, script).run(woken)
