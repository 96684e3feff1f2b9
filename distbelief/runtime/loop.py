"""A user's own training loop as a replica: `join()`, `optimizer`, `batches`, `report`. It drives the same story as
every other replica.

`batches` runs the story to its first `Compute`, and hands out the minibatch; `optimizer.step()` answers and runs it to
the next.
"""

from __future__ import annotations

import contextlib
import dataclasses
import math
import operator
import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NoReturn, Protocol, cast

import torch
from torch import nn

from distbelief.core import roles
from distbelief.core.effects import Batch, Computed
from distbelief.core.settings import Plan, Settings
from distbelief.errors import LocalProtocolError, UsageError
from distbelief.runtime.driver import Driver
from distbelief.runtime.loading import Batches, Loader, Source, source_of
from distbelief.runtime.player import Answer, Compute, HasStory, Part, Store, Worker
from distbelief.runtime.pump import Pump
from distbelief.tasks.decay import groups_of
from distbelief.tasks.flat import FlatModule
from distbelief.tasks.worker import on_device
from distbelief.transport.base import Arena, Endpoint


class StepPadding(Protocol):
    """Who knows how long to sleep after a step."""

    def rest(self, elapsed: float) -> float:
        """Seconds to sleep after a step that took `elapsed` seconds."""
        ...


class Played(HasStory, Protocol):
    """What a replica plays, as far as its loop sees it."""

    step: int

    def coming(self, most: int) -> list[Batch]:
        """The minibatches that come next, as far as they are dealt."""
        ...

    def report(self, loss: float, batch: Batch | None, step: int, what: str = "loss") -> None:
        """Take the loss, or the norm of the gradient, of a step; one that is not finite is refused as the step ends."""


AHEAD = 32
"""Minibatches that a loader's workers are told of before their step, at most."""
MakePart = Callable[[FlatModule, int, int, Callable[[float], Compute]], Part]
"""Makes what a replica plays, a `Played`, from its model, the samples of its data, the batch size that the loop names
(0 for that of the job), and what computes, clipped to a norm.
"""


class Replica:
    """The part that this process takes in a job.

    Args:
        role: of this replica.
        driver: plays its story.
        endpoint: its end of the transport.
        make: makes what it plays.
        pump: carries the links during a step, where that needs a thread.
        device: where the job would have this replica compute.
        settings: of the job, as it was launched.
        incarnation: of this replica; one that was started anew has a higher.
        padding: how long to sleep after each step, where the replica is to be slower than it is.
        store: where its checkpoints are kept.
    """

    def __init__(
        self,
        role: str,
        driver: Driver,
        endpoint: Endpoint,
        make: MakePart,
        pump: Pump | None = None,
        device: torch.device = torch.device("cpu"),  # noqa: B008
        settings: Settings = Settings(),  # noqa: B008  # frozen
        incarnation: int = 0,
        padding: StepPadding | None = None,
        store: Store | None = None,
    ) -> None:
        self._make, self._store, self._settings = make, store, settings
        self.stepped = settings.optimizer
        """What the job steps with."""
        self._padding = padding
        self.role, self.clip_norm, self._incarnation = role, 0.0, incarnation
        self.device = device
        """Where `--device` would have this replica compute: `model.to(replica.device)`."""
        self._driver, self._endpoint = driver, endpoint
        self._vectors: FlatModule | None = None
        self._story: Played | None = None
        self._plan: Plan | None = None
        self._batch: Batch | None = None
        self._handed: tuple[Batch | None, int] = (None, 0)
        self._answer: Callable[[Any], None] = _nobody
        self._pump, self._carried = pump, contextlib.ExitStack()
        self._samples = 0
        self._began = 0.0
        self._reported: Batch | None = None
        self._loader: Loader | None = None
        self._asked = False
        self._process = os.getpid()

    @property
    def here(self) -> bool:
        """Whether this is the process that trains, and not one that was forked from it."""
        return self._process == os.getpid()

    @property
    def joined(self) -> bool:
        """Whether this process has asked for minibatches."""
        return self._story is not None

    @property
    def index(self) -> int:
        """Which replica this is: 0, 1, ..."""
        return roles.index_of(self.role)

    @property
    def replicas(self) -> int:
        """How many the job began with."""
        return self._settings.replicas

    def optimizer(self, model: nn.Module, groups: Sequence[Mapping[str, Any]] | None = None) -> ServerOptimizer:
        """The server's optimizer, as a loop sees it; the model's parameters are the server's from the first minibatch
        on.

        Its learning rate is that of the job, and falls with the samples applied by all replicas as `--lr-schedule`
        says: a `torch.optim.lr_scheduler`, which counts the steps of one, cannot be used with it.

        Args:
            model: on its device, the same in every replica.
            groups: parameter groups as `torch.optim` takes them; each may set its own `lr` and `weight_decay`. Where
                None, those that the job's `--decay-exempt` makes.

        Raises:
            UsageError: the model cannot be trained, or a second one is given.
        """
        if self._vectors is not None:
            raise UsageError("this replica has a model already: one job trains one model")
        self._vectors = FlatModule(model, groups_of(model, self.stepped) if groups is None else groups)
        return ServerOptimizer(self, self._vectors)

    def batches(self, data: Any, batch_size: int | None = None) -> Batches:
        """The minibatches that the coordinator deals to this replica, over all epochs of the job.

        Args:
            data: the same in every replica; its order is the job's. A map-style data set, whose samples may be of any
                structure that `default_collate` stacks; tensors in a tuple or a dictionary; or a `DataLoader`, whose
                workers, `collate_fn`, `pin_memory`, `prefetch_factor` and batch size are used: its workers load ahead
                of the step.
            batch_size: samples in a minibatch; that of the loader, or the job's (`--batch-size`), where None.

        Returns:
            What the minibatches are had from, once: as the data are stacked, on the device of the model. Its `len()` is
            the number of minibatches of an epoch, of all replicas together; `dataset` and `epoch` are what they say.

        Raises:
            UsageError: no optimizer was made, it was called before, the batch size is no whole number of 1 or more,
                the data cannot be dealt, or a minibatch was left without `optimizer.step()`.
        """
        if self._vectors is None:
            raise UsageError("batches() needs the model first: call replica.optimizer(model) before it")
        if self._asked:
            raise UsageError(
                "batches() a second time: the first hands out the minibatches of all epochs of the job (--epochs); "
                "drop the outer loop"
            )
        self._asked = True
        if batch_size is not None and (not hasattr(batch_size, "__index__") or operator.index(batch_size) < 1):
            raise UsageError(
                f"batches(batch_size={batch_size!r}): must be a whole number, 1 or more; leave it out to take that of "
                "--batch-size"
            )
        return Batches(source_of(data, operator.index(batch_size or 0)), self._settings.data.batch_size, self._batches)

    def _batches(self, batches: Batches) -> Iterator[Any]:
        assert self._vectors is not None
        device, source = self._vectors.device, batches.source
        self._begin(source)
        assert self._plan is not None or self._batch is None
        while self._batch is not None and self._plan is not None:
            assert self._story is not None
            batch, settings = self._batch, self._plan.settings
            if self._loader is None:
                self._loader = Loader(source, settings.data.batch_size, settings.seed)
            loaded, self._samples = self._loader.load(batch, self._story.coming(AHEAD))
            batches.epoch, self._began = batch.epoch, time.perf_counter()
            self._handed = batch, self._story.step
            try:
                yield on_device(loaded, device)
            except GeneratorExit:
                source.close()
                self.leave()
                raise
            if self._batch is batch:
                raise UsageError(
                    "the loop took the next minibatch without optimizer.step() for the last: each minibatch is one step"
                )
        source.close()

    def report(self, loss: float | torch.Tensor | None = None) -> None:
        """Tell the loss of the step just made, for the run's curve.

        Raises:
            LossNotFinite: it is not a number.
        """
        if loss is not None and self._story is not None:
            batch, step = self._handed
            self._reported = batch
            self._story.report(float(loss.detach()) if isinstance(loss, torch.Tensor) else loss, batch, step)

    def step(self) -> None:
        """Hand the gradient of the current minibatch to the story, and run it up to the next. `optimizer.step()` calls
        this.
        """
        if self._batch is None:
            raise UsageError(
                "optimizer.step() outside of a minibatch of replica.batches(): there is no gradient to push"
            )
        if self._handed[0] is not self._batch:
            raise UsageError(
                "optimizer.step() twice for one minibatch of replica.batches(): each minibatch is one step"
            )
        self._clip_and_check(*self._handed)
        if self._padding:
            time.sleep(self._padding.rest(time.perf_counter() - self._began))
        self._go_on(Computed(None, self._samples, time.perf_counter() - self._began))

    def _clip_and_check(self, batch: Batch | None, step: int) -> None:
        """Clip the gradient; where the loss of its step was not reported before, refuse one that is not finite, which
        would be pushed unseen.
        """
        assert self._vectors is not None
        assert self._story is not None
        known = batch is not None and self._reported is batch
        gradients = [p.grad for p in self._vectors.module.parameters() if p.grad is not None]
        dense = [
            gradient for gradient in gradients if gradient.layout is torch.strided
        ]  # what is not is refused as it is accrued
        if self.clip_norm:
            norm = float(nn.utils.clip_grad_norm_(self._vectors.module.parameters(), self.clip_norm))
        else:
            norm = 0.0 if known else float(nn.utils.get_total_norm(dense))
        # the norm of finite numbers may be more than their dtype can hold
        if not (known or math.isfinite(norm)) and not all(bool(gradient.isfinite().all()) for gradient in dense):
            self._story.report(norm, batch, step, "norm of the gradient")

    def _begin(self, source: Source) -> None:
        assert self._vectors is not None
        part = self._make(self._vectors, source.samples, source.batch_size, self._computes)
        self._story = cast(Played, part.player)
        worker = dataclasses.replace(part.worker, attach=lambda plan, arena: self._attach(part.worker, plan, arena))
        self._driver.add_story(self.role, part.player.story(), self._endpoint, worker, self._store)
        self._driver.link(self.role)
        self._driver.begin(self.role)
        self._driver.run_while(lambda: self._batch is None)

    def _go_on(self, answer: Computed | None) -> None:
        self._batch = None
        self._carried.close()
        self._answer(answer)
        self._driver.run_while(lambda: self._batch is None)

    def leave(self) -> None:
        """Leave the job: push what has accrued, and let the others do the rest. A loop that ends before the job does so
        by itself.
        """
        if self._batch is not None:
            self._go_on(None)

    # what the driver asks of its worker

    def _attach(self, worker: Worker, plan: Plan, arena: Arena) -> None:
        """Take the vectors that were made."""
        self._plan = plan
        worker.attach(plan, arena)

    def _computes(self, clip_norm: float) -> Compute:
        self.clip_norm = clip_norm
        return self._compute

    def _compute(self, batch: Batch, answer: Answer) -> Computed | None:
        """The user's loop computes: it answers in `step`."""
        self._batch, self._answer = batch, answer
        if self._pump is not None and self._plan is not None and self._plan.settings.strategy.pushing.prefetch:
            self._carried.enter_context(self._pump.running())
        return None


class ServerOptimizer:
    """What a user's loop calls instead of a `torch.optim` optimizer; the learning rate is set with `--lr` and
    `--lr-schedule`.
    """

    def __init__(self, replica: Replica, vectors: FlatModule) -> None:
        self._replica, self._vectors = replica, vectors

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Forget the gradients of the last step."""
        self._vectors.module.zero_grad(set_to_none)

    def step(self) -> None:
        """Push the gradients and fetch parameters, as the job's settings have it."""
        self._replica.step()

    def __getattr__(self, name: str) -> NoReturn:
        raise AttributeError(
            f"the server's optimizer has no {name!r} here: its state is on the shards; set the learning rate with "
            "--lr, how it falls with"
            " --lr-schedule instead of torch.optim.lr_scheduler, and what a parameter group has of its own in "
            "replica.optimizer(model, groups)"
        )


current: Replica | None = None
"""The replica that this process is; set by whoever started it."""
PLAYED = "DISTBELIEF_ROLE"
"""In the environment of a script that a job runs, and of what that starts: the role that it plays."""


def join() -> Replica:
    """The part that this process takes in the job that started it.

    Raises:
        UsageError: it was not started by a job, or by what a replica's script has started.
    """
    role = os.environ.get(PLAYED, "")
    if role and (current is None or not current.here):
        raise UsageError(
            f"{role} has joined already, and this process was started by its script (a loader's worker, a process of "
            'its own): only the script itself joins, so write what trains below if __name__ == "__main__":'
        )
    if current is None:
        raise UsageError(
            "no job has started this process; run the script with: distbelief launch downpour --replicas 2 SCRIPT.py"
        )
    return current


def _nobody(_: Any) -> None:
    raise LocalProtocolError("nobody waits for a gradient")
