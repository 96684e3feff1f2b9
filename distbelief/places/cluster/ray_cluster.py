"""Ray as an engine: every node of a running cluster that has processors is a host.

A task of Ray runs the agent there. The agent comes to the meeting by a ticket that Ray hands to the task.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import msgspec

from distbelief.errors import JobFailed, UsageError
from distbelief.places.cluster.engines import agent_command
from distbelief.places.cluster.launched import Launched
from distbelief.places.join.ticket import Ticket


class RayInvitation:
    """Invitation that lets Ray start an agent on each of its nodes, and hands it the ticket.

    Args:
        address: the address of the cluster, as for `ray.init`; "" for the one of this machine.

    Raises:
        UsageError: Ray is not installed, or no cluster runs there, or it has no processors.
    """

    here: Launched | None = None

    def __init__(self, address: str) -> None:
        try:
            import ray
        except ImportError as error:
            raise UsageError("--on ray: Ray is not installed for this Python; pip install 'distbelief[ray]'") from error
        try:
            ray.init(
                address=address or "auto",
                log_to_driver=False,
                logging_level="error",
                configure_logging=False,
                include_dashboard=False,
            )
        except (ConnectionError, RuntimeError, ValueError) as error:
            raise UsageError(
                f"--on ray{':' if address else ''}{address}: no cluster answers there: {str(error).strip()[:200]}; "
                "start one (ray start --head), or name its address: --on ray:HOST:6379"
            ) from error
        self._ray: Any = ray
        self._nodes = [
            (str(node["NodeID"]), str(node["NodeManagerHostname"]), cores)
            for node in sorted(ray.nodes(), key=lambda node: str(node["NodeManagerHostname"]))
            if node["Alive"] and (cores := int(node["Resources"].get("CPU", 0)))
        ]
        if not self._nodes:
            raise UsageError("--on ray: none of the cluster's nodes has processors (ray start --num-cpus N)")
        self.ranks = range(1, len(self._nodes) + 1)
        self._tasks: dict[int, object] = {}

    def send(self, ticket: Ticket) -> None:
        """Start a task on each node, which takes the node's processors, and ends with its agent."""
        from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

        for rank, (node, _, cores) in zip(self.ranks, self._nodes, strict=True):
            words = msgspec.structs.replace(ticket, holder=Launched("ray", rank=rank, cores=cores)).text
            affinity = NodeAffinitySchedulingStrategy(node, soft=False)
            task = self._ray.remote(num_cpus=cores, max_retries=0, scheduling_strategy=affinity)(_task())
            # unlike `-`, this does not end the agent with its standard input, so that it outlives Ray
            self._tasks[rank] = task.remote(agent_command("/dev/stdin"), self._ray.put(words))

    def check(self) -> None:
        """Raise a `JobFailed` if a task has ended, since its agent will not come.

        The error names the host, and the last line of its output.
        """
        ended, _ = self._ray.wait(list(self._tasks.values()), num_returns=1, timeout=0)
        for rank, task in self._tasks.items():
            if task in ended:
                ending = ""
                with contextlib.suppress(Exception):  # Ray raises errors of many kinds for a failed task
                    ending = str(self._ray.get(task))
                raise JobFailed(
                    f"host {self._nodes[rank - 1][1]}: its agent has ended, {ending or 'and Ray does not say how'}; "
                    "distbelief and Python must be at the same path on every node"
                )

    def withdraw(self) -> None:
        """Do nothing: all tasks have their ticket."""

    def close(self) -> None:
        self._ray.shutdown()

    def late(self, missing: list[int]) -> str:
        names = ", ".join(self._nodes[rank - 1][1] for rank in missing[:8])
        return (
            f"{len(missing)} of the {len(self._nodes)} nodes of Ray have not come ({names}): are their processors "
            "taken by other work (ray status), and can they reach this host?"
        )


def _task() -> Callable[[str, bytes], str]:
    """Return the function of a task, which needs no module of this package where it runs."""

    def hold(command: str, ticket: bytes) -> str:
        import subprocess

        process = subprocess.Popen(
            ["sh", "-c", command], stdin=subprocess.PIPE, stderr=subprocess.PIPE, start_new_session=True
        )
        assert process.stdin
        assert process.stderr
        process.stdin.write(ticket)
        process.stdin.close()
        last = b""
        for line in process.stderr:
            last = line
        return f"with status {process.wait()}: {last.decode(errors='replace').strip()}"

    return hold


def address_of(on: str) -> str | None:
    """Return the address in `--on ray:ADDRESS`; None if it is not `ray`.

    >>> address_of("ray"), address_of("ray:10.0.0.1:6379"), address_of("slurm")
    ('', '10.0.0.1:6379', None)
    """
    name, _, address = on.partition(":")
    return address if name == "ray" else None
