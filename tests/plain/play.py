"""Two players of one script: a plain loop, written with torch alone but for the order of its minibatches and their
chance, and the job of one replica, all of whose roles are in this process.
"""

from __future__ import annotations

import contextlib
import functools
import io
import itertools
import random
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import nn
from torch.utils._pytree import tree_leaves, tree_map
from torch.utils.data import DataLoader, IterableDataset, SequentialSampler, default_collate

from distbelief.core import roles
from distbelief.core.conversations.membership import Here
from distbelief.core.messages import Traffic
from distbelief.core.optimizer import Optimizer
from distbelief.core.portions import ANEW
from distbelief.job import Job
from distbelief.places.processes.options import LocalOptions
from distbelief.places.processes.process import RoleProcess
from distbelief.places.processes.running import spec_of
from distbelief.runtime import loop
from distbelief.runtime.direct import DirectEndpoint
from distbelief.runtime.driver import Driver
from distbelief.runtime.script_story import ScriptStage
from distbelief.sharding.layout import Range
from distbelief.strategies import Allreduce, Downpour, Strategy, Synchronous
from distbelief.tasks.order import Order, key
from distbelief.transport.base import EMPTY, Arena, Endpoint, in_memory
from distbelief.transport.inline import Inline, InlineEndpoint
from distbelief.transport.shared import SharedEndpoint

SEED, BATCH = 3, 8


class Way(NamedTuple):
    """How a job of one replica trains."""

    strategy: Callable[..., Strategy]
    path: str = "served"
    shards: int = 2

    def job(self, optimizer: Optimizer, epochs: int) -> Job:
        """That trains a script with an optimizer."""
        shards = {"shards": self.shards} if self.shards else {}
        strategy = self.strategy(replicas=1, optimizer=optimizer, **shards)
        quiet = {"checkpoint_every": 0, "snapshot_every": "0", "evaluate_every": 0}
        return Job(task="script", strategy=strategy, epochs=epochs, batch_size=BATCH, seed=SEED, **quiet)


WAYS = {
    "served": Way(Downpour),
    "direct": Way(Downpour, "direct", 1),
    "synchronous": Way(Synchronous),
    "allreduce": Way(Allreduce, shards=0),
}


class Seen(list[object]):
    """What a script has seen, in order, as bits.

    Args:
        folder: its own, where it may save files.
    """

    def __init__(self, folder: Path) -> None:
        super().__init__()
        self.folder = folder

    def see(self, *values: object) -> None:
        """Note values, of any structure."""
        self.extend(bits(leaf) for value in values for leaf in tree_leaves(value))


def bits(value: object) -> object:
    """A value as what can be compared: of a tensor its dtype, shape and bytes."""
    if not isinstance(value, torch.Tensor):
        return value if isinstance(value, str | bytes | int | float | None) else repr(value)
    plain = value.detach()
    own = plain.to_dense() if plain.layout is not torch.strided else plain
    held = own.contiguous().reshape(-1).view(torch.uint8) if own.numel() else own.reshape(-1)
    return str(own.dtype), tuple(own.shape), bytes(held.tolist())


class Outcome(NamedTuple):
    """All that is compared of a script's end."""

    state: Mapping[str, torch.Tensor]
    """Of its model: parameters and buffers."""
    seen: Sequence[object]
    """What it has noted: samples, losses, rates."""
    files: Mapping[str, bytes]
    """That it has saved, by name."""
    messages: str
    """That it has printed, and warnings."""
    error: str = ""
    """That has ended it."""


Script = Callable[[Any, Seen], nn.Module | None]


def played(script: Script, replica: Any, folder: Path, after: Callable[[], None] = lambda: None) -> Outcome:
    """Run a script with whoever it takes for its replica; `after` ends that one's part."""
    folder.mkdir(parents=True, exist_ok=True)
    seen, model, error, printed = Seen(folder), None, "", io.StringIO()
    torch.manual_seed(SEED)
    random.seed(SEED)
    np.random.seed(SEED)
    torch.set_warn_always(True)  # what it says once in a process, it says to both players
    with warnings.catch_warnings(record=True) as warned, contextlib.redirect_stdout(printed):
        warnings.simplefilter("always")
        try:
            model = script(replica, seen)
            after()
        except Exception as raised:
            error = f"{type(raised).__name__}: {raised}"
    torch.set_warn_always(False)
    state = {name: value.detach().clone() for name, value in model.state_dict().items()} if model is not None else {}
    files = {str(path.relative_to(folder)): path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()}
    return Outcome(state, seen, files, printed.getvalue() + "".join(f"{one.message}\n" for one in warned), error)


# the plain loop

OPTIMIZERS: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "sgd": torch.optim.SGD,
    "momentum": lambda *given, **o: torch.optim.SGD(*given, **{"momentum": 0.9, **o}),
    "nesterov": lambda *given, **o: torch.optim.SGD(*given, **{"momentum": 0.9, "nesterov": True, **o}),
    "adagrad": torch.optim.Adagrad,
    "adadelta": torch.optim.Adadelta,
    "rmsprop": torch.optim.RMSprop,
    "adam": torch.optim.Adam,
    "adamw": torch.optim.AdamW,
    "nadam": torch.optim.NAdam,
    "radam": torch.optim.RAdam,
    "adamax": torch.optim.Adamax,
    "asgd": torch.optim.ASGD,
}


def seed_all(value: int) -> None:
    """Seed all that a transform may draw from."""
    torch.manual_seed(value)
    random.seed(value)
    np.random.seed(value % 2**32)


class Plain:
    """What a plain script has in the place of a replica: an optimizer of torch's, and minibatches in the job's order.

    Args:
        optimizer: of the job.
        epochs: of the job.
        factor: what each rate is multiplied with, to see that a wrong one is noticed.
        left_out: the minibatch that is left out, for the same reason.
    """

    index, replicas, device = 0, 1, torch.device("cpu")

    def __init__(self, optimizer: Optimizer, epochs: int, factor: float = 1.0, left_out: int = -1) -> None:
        self._named, self._all, self._epoch = optimizer, range(epochs), -1
        self._factor, self._left_out, self._stopped, self._count = factor, left_out, False, 0

    def optimizer(self, model: nn.Module, groups: Any = None, *, optim: Optimizer | None = None) -> Any:
        """One of torch's own, as a script makes it."""
        named = optim or self._named
        given = [*model.parameters()] if groups is None else groups
        options = {"lr": named.lr * self._factor, **named.options}
        if any(one.dtype is torch.bfloat16 for one in model.parameters()):
            return _Mastered(OPTIMIZERS[named.name], given, options)
        return OPTIMIZERS[named.name](given, **options)

    def epochs(self, number: int) -> Iterator[int]:
        """So many."""
        for self._epoch in range(number):
            if self._stopped:
                return
            yield self._epoch

    def stop(self) -> None:
        """No more minibatches after this one."""
        self._stopped = True

    def report(self, loss: object = None) -> None:
        """A plain script has nobody to tell."""

    def batches(self, data: Any, batch_size: int | None = None, *, order: str = "shuffled") -> _Minibatches:
        """Minibatches of all epochs, or of the one at hand; a loader that does not shuffle has them in order."""
        if isinstance(data, DataLoader) and type(data.sampler) is SequentialSampler:
            order = "sequential"
        return _Minibatches(self._deal, data, batch_size or BATCH, order)

    def _deal(self, data: Any, size: int, order: str) -> Iterator[Any]:
        for epoch in self._all if self._epoch < 0 else [self._epoch]:
            for made in minibatches(data, size, order, epoch):
                if self._stopped:
                    return
                self._count += 1
                if self._count - 1 != self._left_out:
                    yield made


class _Mastered:
    """An optimizer that steps float32 copies of parameters, as mixed precision does."""

    def __init__(
        self, kind: Callable[..., torch.optim.Optimizer], given: list[Any], options: Mapping[str, Any]
    ) -> None:
        self._given, self._copies = given, [one.detach().float() for one in given]
        self._own = kind(self._copies, **options)

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Of the model."""
        for one in self._given:
            one.grad = None if set_to_none or one.grad is None else one.grad.zero_()

    def step(self) -> None:
        """Of the copies, and what it has made of them."""
        for copy, one in zip(self._copies, self._given, strict=True):
            copy.grad = one.grad.float()
        self._own.step()
        with torch.no_grad():
            for copy, one in zip(self._copies, self._given, strict=True):
                one.copy_(copy)


class _Minibatches:
    """What a loop goes through; it has a length where the data have one."""

    def __init__(self, deal: Callable[..., Iterator[Any]], data: Any, size: int, order: str) -> None:
        loader = isinstance(data, DataLoader)
        self._deal, self._data, self._order = deal, data, order
        self._size = (data.batch_size or 1) if loader else size
        self.dataset = data.dataset if loader else data

    def __len__(self) -> int:
        return -(-samples_of(self.dataset) // self._size)

    def __iter__(self) -> Iterator[Any]:
        return self._deal(self._data, self._size, self._order)


def samples_of(dataset: Any) -> int:
    """How many there are."""
    return len(tree_leaves(dataset)[0]) if isinstance(dataset, tuple | Mapping) else len(dataset)


def minibatches(data: Any, size: int, order: str, epoch: int) -> Iterator[Any]:
    """The minibatches of an epoch, each made and gone through with the chance that is its own."""
    for index, make in enumerate(reads(data, size, order, epoch)):
        seed_all(key(SEED, epoch, index))
        yield make()


def reads(data: Any, size: int, order: str, epoch: int) -> Iterator[Callable[[], Any]]:
    """What makes each minibatch of an epoch; what others read, or is a stream, is read before."""
    loader = data if isinstance(data, DataLoader) else None
    dataset = data if loader is None else loader.dataset
    collate = default_collate if loader is None else loader.collate_fn
    if isinstance(dataset, IterableDataset) or not hasattr(dataset, "__len__"):
        items = iter(dataset)
        made = map(collate, iter(lambda: [*itertools.islice(items, size)], []))
        return map(constant, made if loader is None else loader)
    dealt = Order(samples_of(dataset), size, SEED, order)
    numbers = [dealt.indices(epoch, index) for index in range(dealt.batches)]
    if loader is not None and loader.num_workers:
        own = {name: getattr(loader, name) for name in ("num_workers", "worker_init_fn", "collate_fn")}
        return map(constant, DataLoader(dataset, batch_sampler=[one.tolist() for one in numbers], **own))
    if isinstance(dataset, tuple | Mapping):
        whole = tree_map(torch.as_tensor, dataset)
        return (partial(tree_map, partial(torch.index_select, dim=0, index=one), whole) for one in numbers)
    together = getattr(dataset, "__getitems__", lambda some: [dataset[number] for number in some])
    return (partial(lambda one: collate(together(one.tolist())), one) for one in numbers)


def constant(value: Any) -> Callable[[], Any]:
    return lambda: value


def play_plain(script: Script, optimizer: Optimizer, epochs: int, folder: Path, **wrong: Any) -> Outcome:
    """Run a script plainly."""
    return played(script, Plain(optimizer, epochs, **wrong), folder)


# the job of one replica


class Room:
    """Where all roles of a job of one replica are: a network, and the memory that they share."""

    def __init__(self) -> None:
        self.network, self._memory = Inline(), torch.zeros(0, dtype=torch.uint8)

    def memory(self, length: int) -> torch.Tensor:
        """So many bytes, the same for all."""
        if not self._memory.numel():
            self._memory = torch.zeros(length, dtype=torch.uint8)
        return self._memory[:length]

    # as a clock

    def now(self) -> float:
        """No time passes here."""
        return 0.0

    def call_later(self, *_: Any) -> None:
        """No time passes here."""

    def turn(self) -> None:
        """Deliver one message, or do what is due in memory."""
        own = self.network.endpoints[roles.replica(0)]
        if isinstance(own, _Direct):
            own.poll(None)
        else:
            assert self.network.step(), "every role waits for another"

    def glance(self) -> None:
        """All that has come is delivered by turns."""


class _Beneath(InlineEndpoint):
    """What is beneath an endpoint whose class wants one between processes."""

    def __init__(self, role: str, network: Inline, _: int = 0) -> None:
        self.role, self.zeros, self.arena, self._delivered = role, in_memory, EMPTY, False
        self.network, self.links, self.cut, self.traffic = network, set(), set(), Traffic()
        network.endpoints[role] = self

    def allocate(self, held: Range, gradients: int, parameters: int) -> Arena:
        return Endpoint.allocate(self, held, gradients, parameters)

    def flush(self) -> None: ...

    def settle(self) -> None: ...

    def poll(self, timeout: float | None) -> None:
        self._delivered = self.network.step()
        assert self._delivered or timeout == 0, "every role waits for another"


class _Direct(DirectEndpoint, _Beneath, InlineEndpoint, SharedEndpoint):  # type: ignore[misc]  # its links are inline
    """An endpoint of a replica that updates the shards' memory itself."""


def nothing(*_: Any) -> None:
    """Of what nobody asks for here: a store, a clock, a lock that others might have."""


NO_LOCKS: Any = SimpleNamespace(take=lambda *_: True, give=nothing, is_held=lambda _: False)
NO_STORE: Any = SimpleNamespace(save_part=nothing, commit=nothing, discard=nothing)


class _Role(RoleProcess):
    """A process of a job, as far as it is not one of its own."""

    def __init__(self, role: str, room: Room, spec: Any) -> None:
        self.role, self.incarnation, self.spec, self.room = role, 0, spec, room
        direct = spec.direct and roles.is_replica(role)
        self.endpoint: Any = _Direct(role, room.network) if direct else room.network.endpoint(role)  # type: ignore[arg-type]
        self.traffic, self.closing = [self.endpoint.traffic], contextlib.ExitStack()
        self.clock: Any = room
        self.driver = Driver(self.clock, lambda *_: None)

    _memory: Any = None

    @property
    def _common(self) -> Any:
        return self.room.memory if self.spec.direct else None

    def _listen(self) -> str:
        return ""

    def _locks(self) -> Any:
        return NO_LOCKS

    def begin(self) -> None:
        """Take part."""
        if self.role == roles.COORDINATOR:
            machine: Any = self._cast.coordinator(self.spec.start)
        else:
            machine = self._shard(roles.index_of(self.role))
        self.driver.add_machine(self.role, machine, self.endpoint, NO_STORE)  # type: ignore[arg-type]
        if self.role != roles.COORDINATOR:
            self.endpoint.send(roles.COORDINATOR, Here())

    def replica(self) -> loop.Replica:
        """What its script joins."""
        settings, part = self.spec.settings, functools.partial(self._cast.scripted, self.role, 0, self._stage())
        return loop.Replica(self.role, ScriptStage(self.driver, self.endpoint, part, settings, store=NO_STORE))  # type: ignore[arg-type]  # our driver


def play_ours(script: Script, way: Way, optimizer: Optimizer, epochs: int, folder: Path) -> Outcome:
    """Run a script as the one replica of a job."""
    job, room = way.job(optimizer, epochs), Room()
    settings = job.settings()
    attempt = SimpleNamespace(job=job, settings=settings, folder=None, start=ANEW)
    spec = spec_of(LocalOptions(path=way.path), attempt, ["script.py"], False)
    served = job.strategy.players().servers is not None
    for role in (roles.COORDINATOR, *(roles.shard(index) for index in range(settings.shards) if served)):
        _Role(role, room, spec).begin()
    replica = _Role(roles.replica(0), room, spec).replica()

    def end() -> None:
        replica.leave()
        while room.network.step():
            pass

    return played(script, replica, folder, end)
