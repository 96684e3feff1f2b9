"""A replica of a job without a server, as one process of a machine: it computes, and adds up its gradients with those
of the others.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import socket
import struct
from collections.abc import Callable

from distbelief.core import roles
from distbelief.core.conversations.grouping import Assemble
from distbelief.core.effects import Batch, Computed, Measured
from distbelief.core.settings import Plan
from distbelief.fabric.process_group import ProcessGroup
from distbelief.fabric.shared_memory import SharedMemory
from distbelief.record.restore import Store
from distbelief.strategies.allreduce.replica import Allreduce
from distbelief.strategies.allreduce.torch_whole import TorchWhole
from distbelief.strategies.process import Compute, Context, Part, ProcessSpec, open_memory
from distbelief.tasks import Task
from distbelief.tasks.flat import FlatModule
from distbelief.tasks.worker import Trainer, check_measure, measure, placed
from distbelief.transport.base import Arena

SIOCGIFADDR = 0x8915


class Peer:
    """Who computes and reduces for one replica.

    Args:
        spec: of the job.
        role: of the replica.
        incarnation: of it.
        flat: its model.
        task: what is trained.
        padded: makes what computes as slow as the cluster's compute model has it.
    """

    def __init__(
        self,
        spec: ProcessSpec,
        role: str,
        incarnation: int,
        flat: FlatModule,
        task: Task,
        padded: Callable[[Compute], Compute],
    ) -> None:
        settings = spec.settings
        self._role, self._incarnation, self._task, self._flat = role, incarnation, task, flat
        self._trainer = Trainer(
            task, flat.module, settings.data.batch_size, settings.seed, drop_last=settings.data.drop_last
        )
        self._compute = padded(self._trainer.compute)
        if spec.evaluator and role == roles.replica(0):
            check_measure(task, flat.module)
        self._carrier = carrier(spec, role)
        self.whole = TorchWhole(flat, self._carrier, overlaps=True)
        self.store = Store(spec.run)

    def story(self, address: str) -> Allreduce:
        """What it plays."""
        samples, store = len(self._trainer.data), store_of(self._carrier)
        return Allreduce(
            self._role, self.whole, samples, address=address, incarnation=self._incarnation, reduces=True, store=store
        )

    def attach(self, plan: Plan, arena: Arena) -> None:
        """Have the model live in its flat vector."""
        self.whole.bind(plan)

    def compute(self, batch: Batch, answer: Callable[[Computed], None]) -> Computed | None:
        """The gradient of a minibatch."""
        return self._compute(batch)

    def measure(self) -> Measured:
        """The model on the test set."""
        return measure(self._task, self._flat.module)

    def form(self, group: Assemble, told: Callable[[], bool]) -> bool:
        """Take one's place in a group."""
        return self._carrier.form(group, told)

    def reduce(self) -> bool | None:
        """Go on adding up the gradients of a round."""
        return self._carrier.reduce()


def part(context: Context) -> Part:
    """What a process plays for a replica."""
    peer = Peer(context.spec, context.role, context.incarnation, context.flat, context.task, context.padded)
    return Part(peer.story(context.listen()), peer, peer.store)


class Scripted:
    """The part of a replica whose loop is the user's: a step may be several backward passes, so that nothing is added
    up before it is over.
    """

    def __init__(self, spec: ProcessSpec, role: str, incarnation: int, address: str) -> None:
        self._role, self._incarnation, self._address = role, incarnation, address
        self._carrier = carrier(spec, role)
        self.store = Store(spec.run)

    def story(self, flat: FlatModule, samples: int, batch_size: int) -> Allreduce:
        """What it plays, for a model."""
        self.whole = TorchWhole(flat, self._carrier)
        store = store_of(self._carrier)
        return Allreduce(
            self._role, self.whole, samples, batch_size, self._address, self._incarnation, reduces=True, store=store
        )

    def form(self, group: Assemble, told: Callable[[], bool]) -> bool:
        """Take one's place in a group."""
        return self._carrier.form(group, told)

    def reduce(self) -> bool | None:
        """Go on adding up the gradients of a round."""
        return self._carrier.reduce()


Carrier = SharedMemory | ProcessGroup


def store_of(carrier: Carrier) -> str:
    """Where a group that torch.distributed makes meets."""
    return carrier.store if isinstance(carrier, ProcessGroup) else ""


def carrier(spec: ProcessSpec, role: str) -> Carrier:
    """What adds up the gradients of a replica: shared memory inside a host, torch.distributed over a network."""
    settings, index = spec.settings, roles.index_of(role)
    if spec.transport == "shared":
        descriptor = open_memory(spec)
        return SharedMemory(descriptor, index, settings.replicas, settings.algorithm, settings.per_host)
    if interface := interface_of(spec.advertise):
        os.environ.setdefault("GLOO_SOCKET_IFNAME", interface)
        os.environ.setdefault("NCCL_SOCKET_IFNAME", interface)
    return ProcessGroup(index, placed(spec.device, index), settings.algorithm, settings.per_host, spec.advertise)


def interface_of(host: str) -> str:
    """The network interface of this machine that has a host's IPv4 address; "" where none has.

    >>> interface_of("127.0.0.1")
    'lo'
    """
    try:
        address = socket.gethostbyname(host)
    except OSError:
        return ""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        for _, name in socket.if_nameindex():
            asked = struct.pack("256s", name.encode()[:15])
            with contextlib.suppress(OSError):  # it has no such address
                if socket.inet_ntoa(fcntl.ioctl(probe.fileno(), SIOCGIFADDR, asked)[20:24]) == address:
                    return name
    return ""
