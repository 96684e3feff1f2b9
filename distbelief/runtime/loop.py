"""A user's own training loop as a replica: `join()`, `optimizer`, `batches`, `report`.

It runs the same client as every other replica. `batches` runs it to the first `Compute`, and yields the minibatch;
`optimizer.step()` answers, and runs it to the next.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import math
import operator
import os
import time
import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, Protocol, cast

import torch
from torch import nn

from distbelief.core import roles
from distbelief.core.conversations.dealing import StreamStart
from distbelief.core.effects import PAUSE, Batch, Computed
from distbelief.core.ledger import SAMPLES_LIMIT
from distbelief.core.optimizer import Optimizer, ParameterGroup, optim
from distbelief.core.portions import STREAM
from distbelief.core.records import PartBuilt
from distbelief.core.settings import ORDERS, SHUFFLED, Holder, Plan, Settings, among
from distbelief.core.values import shown
from distbelief.errors import DataError, LocalProtocolError, UsageError
from distbelief.replica.served_replica import LoopRequest
from distbelief.replica.split_compute import ScriptedPart
from distbelief.runtime.kept import KeptValues
from distbelief.runtime.loading import Batches, Loader, Source, Wanted, in_order, source_of
from distbelief.runtime.player import Answer, Compute, HasStory, ScriptedLoop, Worker
from distbelief.runtime.script_story import ScriptStage, ScriptStory
from distbelief.runtime.server_optimizer import ServerOptimizer
from distbelief.runtime.split_model import SplitCall, SplitModel
from distbelief.runtime.streams import Stream
from distbelief.schedules.pipeline import Action
from distbelief.server import optimizers
from distbelief.server.optimizers import WHOLE_STEPS
from distbelief.split.layers import LossFunction
from distbelief.split.options import AUTO, Split
from distbelief.split.tracing import examples
from distbelief.tasks.flat import FlatModule, layout_of
from distbelief.tasks.sparse import groups_of
from distbelief.tasks.worker import on_device
from distbelief.transport.base import Arena


class Played(HasStory, Protocol):
    """The client of a replica as its loop sees it."""

    step: int
    stops: bool
    start: StreamStart | None

    def coming(self, most: int) -> list[Batch]:
        """Return the next minibatches, as far as they are dealt."""
        ...

    def report(self, loss: float, batch: Batch | None, step: int, what: str = "loss") -> None:
        """Take the loss of a step, or the norm of its gradient; one that is not finite is refused as the step ends."""


Groups = Sequence[ParameterGroup] | None
AHEAD = 32
"""Most minibatches that a loader's workers get ahead of their step."""


class Replica:
    """The part of one process in a job."""

    def __init__(self, role: str, stage: ScriptStage) -> None:
        self._stage, self._settings = stage, stage.settings
        self._split: SplitModel | None = None
        self._void = False
        """True if the job went on without the current minibatch: its gradient does not count."""
        self.stepped = stage.settings.optimizer
        """The job's optimizer."""
        self.role, self.clip_norm = role, 0.0
        self.device = stage.device
        """Device that `--device` sets: `model.to(replica.device)`."""
        self._models: list[tuple[nn.Module, Groups, Optimizer | None]] = []
        """Models, with their groups and the optimizers that the script names."""
        self._optimizers: list[ServerOptimizer] = []
        self._local: Optimizer | None = None
        """Optimizer of local steps that the script names."""
        self._vectors: FlatModule | None = None
        """Vectors of all models, from the first minibatch on."""
        self._story: Played | None = None
        self._plan: Plan | None = None
        self._batch: Batch | None = None
        self._handed: tuple[Batch | None, int] = (None, 0)
        self._answer: Answer = _nobody
        self._carried = contextlib.ExitStack()
        self._samples = 0
        self._began = 0.0
        self._reported: Batch | None = None
        self._script = ScriptStory(role, stage, self._moment)
        """How far the job is, and what the script keeps."""
        self._loader: Loader | None = None
        self._compared = False
        """True once the client knows the start of its stream.

        A life compares it once: later its generators may stand elsewhere than those of a replica that has restarted.
        """
        self._batches_of: Batches | None = None
        self._gone_through: int | None = None
        """Epoch of the last loop over minibatches; -1 without a loop over epochs."""
        self._epochs, self._epoch, self._order = 0, -1, ""
        self._left_in = -1
        """Epoch whose loop the script has left, which ends its part."""
        self._between = False
        """True once the script has finished the minibatches of its epoch."""
        self._without = -1
        """The current epoch, while the replica has had no minibatch in it."""
        self._steps, self._stopping = 0, False
        self._inside, self._turns = False, 0
        """True while the script is in a minibatch, and the number of steps that it has made in it."""
        self.over = False
        """True once all its minibatches are done: the script now goes on after the training."""
        self._process = os.getpid()
        self._missing: set[str] = set()
        """Parameters that were reported to have no gradient."""

    @property
    def here(self) -> bool:
        """True in the process that trains, and False in its forks."""
        return self._process == os.getpid()

    @property
    def joined(self) -> bool:
        """True once this process has asked for minibatches."""
        return self._story is not None

    @property
    def index(self) -> int:
        """Number of this replica: 0, 1, ..."""
        return roles.index_of(self.role)

    @property
    def partition(self) -> int:
        """Number of this process's part of a split replica: 0, 1, ...; 0 if it is whole."""
        return roles.partition_of(self.role)

    @property
    def replicas(self) -> int:
        """Number of replicas at the start of the job."""
        return self._settings.replicas

    @property
    def hint(self) -> str:
        """Reason why a script may fail that would not fail alone; "" for none."""
        if self._without < 0:
            return ""
        return (
            f"; it had no minibatch in epoch {self._without}, which the others had finished: code after the loop over "
            "batches() must do without one"
        )

    def split(
        self, model: nn.Module, split: Split | None = None, *, loss: LossFunction | None = None, example: object = None
    ) -> SplitModel:
        """Return a model to use instead of this one, which is split over the partitions of this replica.

        Each partition runs the script, computes its part, and gets the result of the whole model. The model is traced
        at the first minibatch. Each minibatch has one call, and one backward pass.

        Args:
            model: the same in every partition, before it has an optimizer. If it is on the host, each partition moves
                its part to its device at the first minibatch.
            split: how to split it; None for the job's way (`--split`).
            loss: of the model's output and the targets, the mean over the minibatch. The model then takes the targets
                after its own arguments, and returns the loss. Several microbatches (`--microbatches`) need it, since
                one goes backward while another goes forward.
            example: arguments of a call, of two samples or more: a tensor, or a tuple of all arguments. None for the
                first part of a sample (with `loss`, the first two).

        Raises:
            UsageError: the job's replicas are whole, or split otherwise; another model was split; the model has an
                optimizer; there are microbatches and no loss.
        """
        settings = self._settings
        by_job = settings.split, settings.partitions, settings.chunks
        choice = split or (Split.parse(*by_job) if settings.partitions > 1 else None)
        self._check_split(choice)
        if example is not None and not isinstance(example, tuple):
            example = (example,)
        assert choice is not None
        whole = getattr(model, "_orig_mod", model)
        call = SplitCall(choice, loss, example)
        self._split = SplitModel(whole, call, self._minibatch, self._play_for_model, self.device)
        if settings.microbatches > 1 and loss is None:
            raise UsageError(
                f"--microbatches {settings.microbatches}: one goes backward while another goes forward, so the loss "
                "must be known: replica.split(model, ..., loss=...), and call it with the targets; or leave it off"
            )
        return self._split

    def _check_split(self, choice: Split | None) -> None:
        """Refuse a split that is not the job's, or a second one."""
        settings = self._settings
        if choice is None or choice.partitions != settings.partitions:
            wanted = f"over {choice.partitions} partitions" if choice is not None else ""
            raise UsageError(
                f"split() {wanted}".rstrip() + f": each replica of the job has {settings.partitions} processes; launch "
                f"it with --partitions {choice.partitions if choice is not None else 2}"
            )
        if settings.split not in (AUTO, choice.text):
            raise UsageError(f"split() by {choice.text}, and --split {settings.split}: leave one of them off")
        if settings.chunks not in (0, choice.chunks):
            raise UsageError(f"split() in {choice.chunks} chunks, and --chunks {settings.chunks}: leave one off")
        if self._split is not None:
            raise UsageError("split() of a second model: a replica can split only one; put both into one module")
        if self._models:
            raise UsageError("split() after optimizer(): split the model first, and pass the split one to optimizer()")

    def optimizer(
        self,
        model: nn.Module,
        groups: Groups = None,
        *,
        optim: Optimizer | None = None,
        local: Optimizer | type[torch.optim.Optimizer] | None = None,
    ) -> ServerOptimizer:
        """Return the shards' optimizer for a model, whose parameters belong to the shards from the first minibatch on.

        Its learning rate is the job's, which falls with the samples of all replicas as `--lr-schedule` says, unless the
        script sets it (`torch.optim.lr_scheduler`, `param_groups`): then each push carries it, as a factor of the
        job's. `step()` pushes the gradient of all minibatches since the last one; a minibatch without a gradient
        (`continue`) is skipped.

        Several models (a generator and a discriminator) each have an optimizer of their own, whose step pushes and
        fetches that model. They share each minibatch, which ends when the loop takes the next.

        Args:
            model: on its device, the same in every replica.
            groups: parameter groups as in `torch.optim`; each may set its own `lr` and `weight_decay`. None for those
                that the job's `--decay-exempt` makes.
            optim: optimizer of this model (`distbelief.optim("adam", lr=2e-4, betas=(0.5, 0.999))`), instead of
                `--optimizer` and `--lr`; with several models, for all or none.
            local: optimizer with which each replica steps its copy between two pushes, instead of `--local-optimizer`:
                `torch.optim.AdamW`, or `distbelief.optim("adamw", lr=3e-4)`. The shards then step by the changes.

        Raises:
            UsageError: the model cannot be trained, or has an optimizer; the training has begun; the strategy trains
                one model, or has no optimizer that a script can name.
        """
        _check_given(model, groups, optim)
        if local is not None:
            self._local = local if isinstance(local, Optimizer) else _named(local)
            self._settings = self._settings.with_optimizers(local_optimizer=self._local)
        # take the plain model of a compiled one: its parameters have the names under which they are saved and loaded
        model = getattr(model, "_orig_mod", model)
        self._check_model(model, optim)
        stepped, kept = self._settings.local or optim or self.stepped, model
        model = model.whole if isinstance(model, SplitModel) else model
        groups = groups_of(model, stepped) if groups is None else groups
        # torch.optim goes through the parameters as well, and a generator can be read only once
        groups = groups and [{**group, "params": tensors_of(group["params"])} for group in groups]
        vectors, step = FlatModule(model, groups, owned=kept is model), functools.partial(self.step, len(self._models))
        self._models.append((kept, groups, optim))
        number = sum(len(optimizer.param_groups) for optimizer in self._optimizers)
        options = optimizers.defaults(stepped)
        self._optimizers.append(ServerOptimizer(vectors, groups, self._settings, options, step, number))
        return self._optimizers[-1]

    def _check_model(self, model: nn.Module, optim: Optimizer | None) -> None:
        """Refuse a model that the job cannot train as its next."""
        strategy = self._settings.strategy
        if self.joined:
            raise UsageError("optimizer() after the training has begun: make the optimizers of all models before it")
        if self._settings.partitions > 1:
            if model is not self._split or self._models or optim is not None:
                raise UsageError(
                    f"--partitions {self._settings.partitions}: a replica trains one split model, with the job's "
                    "optimizer: model = replica.split(model), then replica.optimizer(model)"
                )
            return
        mine = {id(tensor): name for name, tensor in model.state_dict(keep_vars=True).items()}
        for number, (known, _, _) in enumerate(self._models):
            for name, tensor in known.state_dict(keep_vars=True).items():
                if id(tensor) in mine:
                    raise UsageError(
                        f"optimizer() of a model whose {mine[id(tensor)]!r} is {name!r} of model {number}, which has "
                        "an optimizer: give it to one of them, or both to one optimizer in a torch.nn.ModuleList"
                    )
        if self._models and strategy.held_by is not Holder.SHARDS:
            raise UsageError(
                f"optimizer() of a second model: strategy {strategy.name} trains one; use downpour, bounded or "
                "synchronous, or give all models to one optimizer in a torch.nn.ModuleList"
            )
        if optim is not None:
            if strategy.held_by is not Holder.SHARDS:
                raise UsageError(f"optimizer(optim=...): strategy {strategy.name} steps with --optimizer; set it there")
            optimizers.check(optim)
        if self._models and (optim is None) != (self._models[0][2] is None):
            raise UsageError("optimizer(optim=...) for one model and not for another: name one for each, or for none")

    @property
    def _several(self) -> bool:
        return len(self._models) > 1

    def _flat(self) -> FlatModule:
        """Return the vectors of all models together."""
        if not self._several:
            return self._optimizers[0].vectors
        devices = {str(optimizer.vectors.device) for optimizer in self._optimizers}
        if len(devices) > 1:
            raise UsageError(f"the models are on {' and '.join(sorted(devices))}: a replica computes on one device")
        groups = [
            group for model, groups, _ in self._models for group in (groups or [{"params": list(model.parameters())}])
        ]
        models = nn.ModuleList([model for model, _, _ in self._models])
        return FlatModule(models, layout=layout_of(models, groups, several=True), owned=True)

    def keep(self, **objects: object) -> KeptValues:
        """Keep objects and values in checkpoints, for `--resume` and for a replica that restarts.

        A checkpoint has those of the replica with the lowest number, and the rates of its parameter groups. Call it
        before the loop.

        Args:
            objects: by name. An object with `state_dict()` and `load_state_dict()` (a scheduler) loads its saved state
                here. Plain values and tensors are saved themselves.

        Returns:
            The values by name: the saved ones, or those passed here if none were saved. Assign to them what is to be
            kept next (`kept.best = loss`).

        Raises:
            UsageError: a name is kept already; other names were saved; a value has another type; the loop has begun.
        """
        if self._epoch >= 0 or self._gone_through is not None:
            raise UsageError("keep() after the loop has begun: call it before, and assign to its values")
        models = {id(model): name for name, model in objects.items()}
        for model, _, _ in self._models:
            if (name := models.get(id(model))) is not None:
                raise UsageError(f"keep({name}=...) of the model that is trained: checkpoints contain it anyway")
        return self._script.keep(objects, self._optimizers)

    def epochs(self, number: int) -> Iterator[int]:
        """Yield the epochs of the job up to `number` - 1, for a loop with `batches()` in each.

        They begin with 0, or where the job goes on. An epoch ends for a replica once it is dealt no more of it, even if
        others still compute.

        Args:
            number: of epochs, the same in every replica.

        Raises:
            UsageError: `number` is no whole number of 1 or more; minibatches were taken before; or a loop over an
                epoch's minibatches was left.
        """
        whole = _whole(number, 1, f"epochs({number!r})")
        if self._epochs or self._gone_through is not None:
            raise UsageError(f"epochs({number}) after the training has begun: go through the epochs of a job once")
        self._epochs = whole
        return self._go_through(self._epochs)

    def _go_through(self, number: int) -> Iterator[int]:
        begin = self._script.epoch(number)
        for self._epoch in range(begin, number):
            if self._left_in >= 0:
                raise UsageError(
                    f"the loop over the minibatches of epoch {self._left_in} was left, which has ended this replica's "
                    "part: skip minibatches with continue, or end the job for all with replica.stop(); break"
                )
            if self.joined and self._batch is None:
                return
            self._between = False
            yield self._epoch
        self._between = True

    def stop(self) -> None:
        """End the job for all replicas after this minibatch, or at once between minibatches.

        Accrued gradients are pushed; the others stop as well. After the end of the job it does nothing.

        Raises:
            UsageError: it is called before the first minibatch of `batches()`, or after the loop was left.
        """
        if self._batch is None and not self._script.paused and (self._inside or self.over):
            return  # the job has ended: another replica has stopped it, or this was the last minibatch
        if self._story is None or (self._batch is None and not self._script.paused):
            raise UsageError(
                "stop() outside of a minibatch of replica.batches(): there is no job to end; call it in the loop, "
                "instead of break"
            )
        self._check_leaving("stop()")
        self._story.stops = self._stopping = True
        if not self._inside or (self._handed[0] is not self._batch and not self._several):
            self.leave()

    def batches(
        self, data: object, batch_size: int | None = None, *, num_workers: int = 0, order: str | None = None
    ) -> Batches:
        """Return the minibatches that the coordinator deals to this replica, over all epochs of the job.

        Args:
            data: the same in every replica, except with `--data own`. Their order is the job's. A map-style data set,
                whose samples may have any structure that `default_collate` stacks; tensors or arrays in a tuple or a
                dictionary; an `IterableDataset` or another iterable of samples, of which replica r of n reads samples
                r, r + n, r + 2n, ... in order (all, with `--data own`) to the end of its part; or a `DataLoader`, for
                its workers, `collate_fn`, `pin_memory`, `prefetch_factor` and batch size. Its workers load ahead of the
                step, and start anew in each epoch without `persistent_workers`.
            batch_size: samples in a minibatch; None for the loader's, or the job's (`--batch-size`).
            num_workers: processes that load a data set ahead of the step; with 0 this process loads between steps. Data
                in memory (tensors, lists) need none, and a `DataLoader` has its own.
            order: shuffled, or sequential: then each replica gets a contiguous part of every epoch in order, so that
                hidden state can be carried over minibatches. None for the job's (`--order`).

        Returns:
            The minibatches, on the model's device, to iterate over once, or once in each epoch of `epochs()`. `len()`
            is their number in an epoch, over all replicas; `dataset` and `epoch` are the data set and the current
            epoch; `last` is true for the last minibatch of this replica's epoch, where that can be known.

        Raises:
            UsageError: there is no optimizer; it was called before (in this epoch of `epochs()`); the batch size is no
                whole number of 1 or more; the data cannot be dealt, or not by this strategy; or no minibatch had an
                `optimizer.step()`.
        """
        if not self._models:
            raise UsageError("batches() needs the model first: call replica.optimizer(model) before it")
        before = self._batches_of
        again = before is not None and (not self._epochs or before.within == self._epoch)
        self._check_once(again)
        remedy, size = "; leave it out for --batch-size", 0
        if batch_size is not None:
            size = _whole(batch_size, 1, f"batches(batch_size={batch_size!r})", remedy)
        workers = _whole(num_workers, 0, f"batches(num_workers={num_workers!r})")
        source = before.source if before is not None and before.data is data else source_of(data, size, workers)
        if before is not None and (order or "") != self._order:
            raise UsageError(
                f"batches(order={order!r}) in epoch {self._epoch}, and {self._order or None!r} before: all epochs of a "
                "job have the same order"
            )
        self._order = order or ""
        settings = dataclasses.replace(self._settings, order=order) if order else self._settings
        among("order", settings.order, ORDERS)
        if settings.order == SHUFFLED and in_order(data):
            raise UsageError(
                "a DataLoader with shuffle=False, but the job shuffles: set shuffle=True, or keep its order with "
                'batches(..., order="sequential")'
            )
        settings.check_allotted(source.samples == STREAM)
        if before is not None and source.samples != before.source.samples:
            raise UsageError(
                f"batches() of {source.samples} samples in epoch {self._epoch}, and of {before.source.samples} before: "
                "all epochs of a job have the same data"
            )
        if before is not None and before.source is not source:
            before.source.close()
            self._loader = None
        self._batches_of = Batches(data, source, settings, self.index, self._epoch, self._go_through_batches)
        return self._batches_of

    def _check_once(self, again: bool) -> None:
        """Refuse to go through the same epoch twice."""
        if again and self._gone_through == self._epoch and not (self._steps or self._inside):
            raise UsageError(
                "batches() a second time: the first was ended, by next(iter(...)) or by a loop that was left; to "
                "look at a minibatch before the training, take dataset[0], or one from a DataLoader of your own"
            )
        if again:
            raise UsageError(
                "batches() a second time: the first yields the minibatches of all epochs of the job (--epochs); "
                "drop the outer loop, or make it: for epoch in replica.epochs(n) (to look at a minibatch first, take "
                "it from a DataLoader of your own)"
                if not self._epochs
                else f"batches() a second time in epoch {self._epoch}: iterate over it once; read data to evaluate on "
                "without it"
            )

    def _go_through_batches(self, batches: Batches) -> Iterator[Any]:
        self._check_once(self._gone_through == self._epoch)
        self._gone_through = self._epoch
        return self._batches(batches)

    def _batches(self, batches: Batches) -> Iterator[Any]:
        source = batches.source
        if not self.joined:
            self._begin(source)
        device = self._optimizers[0].vectors.device
        assert self._plan is not None or self._batch is None
        if self._plan is not None and self._epochs not in (0, planned := self._plan.settings.epochs):
            raise UsageError(
                f"epochs({self._epochs}): the job has {planned}, and strategy {self._plan.settings.strategy.name} "
                f"does not take them from a script; launch it with --epochs {self._epochs}"
            )
        last = self._epoch if self._epochs else math.inf
        self._without = self._epoch
        self._between = False
        while self._batch is not None and self._plan is not None and self._batch.epoch <= last:
            assert self._story is not None
            batch, read = self._batch, self._load(source, self._batch, self._plan.settings)
            if read is None:  # the coordinator deals no more of this epoch
                self._go_on(Computed(None, 0, 0.0, ended=True))
                continue
            loaded, self._samples = read
            batches.at, self._began = batch, time.perf_counter()
            self._handed = batch, self._story.step
            self._inside, self._void, self._turns = True, False, 0
            self._without = -1
            try:
                yield on_device(loaded, device)
            except GeneratorExit:
                self._left_in = -1 if self._stopping else self._epoch
                source.close()
                if self._may_leave:  # else the script's end reports it: Python drops an error raised here
                    self.leave()
                self._inside = False
                self.over &= self._stopping  # a loop that was left looks the same as one that an error has ended
                raise
            self._inside = False
            self._end_pause()
            if self._stopping:
                self.leave()
            elif self._batch is batch:
                self._pass_over()
        self._between = True
        if self._batch is None:
            source.close()
            self._check_end()

    def _check_end(self) -> None:
        """Refuse a loop without a step; warn of parameters that the script has changed since its last one."""
        if not self._steps and not self._stopping and self._handed[0] is not None:
            raise UsageError("the loop over the minibatches had no optimizer.step(): it has trained nothing")
        if self._steps and self._vectors is not None and (names := self._vectors.written()):
            warnings.warn(
                f"the script has written to {names[0]!r} after its last step: the run's model.safetensors does not "
                "contain that; save the model yourself (torch.save)",
                stacklevel=3,
            )

    def _load(self, source: Source | Stream, batch: Batch, settings: Settings) -> tuple[object, int] | None:
        """Return a minibatch and its number of samples; None if a stream has ended before it."""
        assert self._story is not None
        if self._loader is None:
            self._loader = Loader(source, settings, self.index)
        read = self._loader.load(batch, self._story.coming(AHEAD))
        if isinstance(source, Stream) and source.start is not None and not self._compared:
            self._story.start, self._compared = source.start, True
        return read

    def _load_seconds(self) -> float:
        return self._loader.take_seconds() if self._loader else 0.0

    def _pass_over(self) -> None:
        """Go on from a minibatch without a step: its gradient, if any, is part of a later one's.

        With several models, go on from a minibatch whose steps are made.
        """
        assert self._plan is not None
        assert self._vectors is not None
        strategy, on_shards = self._plan.settings.strategy, self._plan.settings.strategy.held_by is Holder.SHARDS
        if self._several:
            self._rest()
        elif not on_shards or (self._plan.settings.policy.attended and strategy.pushing.prefetch):
            why = "--prefetch 1" if on_shards else f"strategy {strategy.name}"
            raise UsageError(
                f"the loop took the next minibatch without optimizer.step() for the last: with {why} each minibatch "
                "needs a step; leave it off, or step for each"
            )
        else:
            self._optimizers[0].hold_over(self._samples)
            self._vectors.hold_buffers()
        samples, seconds = self._samples if self._several and self._turns else 0, time.perf_counter() - self._began
        self._go_on(Computed(None, samples, seconds, held=True, written=self._written(), load=self._load_seconds()))

    def report(self, loss: float | torch.Tensor | None = None, *, samples: int | None = None) -> None:
        """Report the loss of the last step, or, before the step, the number of samples in the minibatch.

        Args:
            loss: a number, or a tensor of one; for the run's curve.
            samples: weight of the gradient in a round, instead of the samples counted after `collate_fn`.

        Raises:
            UsageError: `float` does not accept the loss; the samples are no whole number of 0 or more, or come after
                the step.
            LossNotFinite: the loss is not finite.
        """
        if samples is not None:
            self._count(samples)
        try:
            value = None if loss is None else float(loss.detach() if isinstance(loss, torch.Tensor) else loss)
        except (TypeError, ValueError):
            raise UsageError(f"report({shown(loss)}): must be a number, or a tensor of one") from None
        if value is not None and self._story is not None and not self._void:
            batch, step = self._handed
            self._reported = batch
            if self.partition:
                return  # the first partition reports for all
            self._story.report(value, batch, step)

    def _count(self, samples: int) -> None:
        """Set the number of samples in the current minibatch."""
        if not hasattr(samples, "__index__") or not 0 <= operator.index(samples) <= SAMPLES_LIMIT:
            raise UsageError(f"report(samples={shown(samples)}): must be a whole number, 0 to {SAMPLES_LIMIT:,}")
        if not self._inside or (not self._void and (self._batch is not self._handed[0] or self._turns)):
            raise UsageError(
                f"report(samples={samples}) after optimizer.step(), or outside of a minibatch: its gradient is already "
                "pushed; call it before the step"
            )
        self._samples = operator.index(samples)

    def step(self, model: int = 0) -> None:
        """Answer the client with a model's gradient, and run it to the next minibatch; `optimizer.step()` calls this.

        `model` is the number of the model, where there are several.
        """
        if self._void or (self._several and self._inside and self._handed[0] is not self._batch):
            return  # the job went back to a checkpoint, or has ended: the minibatch does not count any more
        if self._batch is None:
            raise UsageError(
                "optimizer.step() outside of a minibatch of replica.batches(): there is no gradient to push"
            )
        if self._handed[0] is not self._batch or (self._several and not self._inside):
            raise UsageError("optimizer.step() twice in one minibatch of replica.batches(): each minibatch is one step")
        module, optimizer = self._models[model][0], self._optimizers[model]
        written = self._written()
        self._clip_and_check(module, *self._handed)
        prefix, frozen = f"{model}." if self._several else "", optimizer.vectors.frozen
        self._check_missing(model, module, frozen, prefix)
        rate, options = optimizer.changes()
        samples = optimizer.push_samples(self._samples)
        self._steps, self._turns = self._steps + 1, self._turns + 1
        if not self._several:
            self._rest()
        seconds = time.perf_counter() - self._began
        self._script.in_step = not self.partition
        self._go_on(Computed(None, samples, seconds, rate, options, model, written=written, load=self._load_seconds()))
        self._script.in_step = False
        self._began = time.perf_counter()

    def _rest(self) -> None:
        """Sleep, if the replica is to be slow."""
        if self._stage.rest:
            time.sleep(self._stage.rest(time.perf_counter() - self._began))

    def _clip_and_check(self, module: nn.Module, batch: Batch | None, step: int) -> None:
        """Clip the gradient. If the step's loss was not reported, refuse a gradient that is not finite."""
        assert self._story is not None
        known = batch is not None and self._reported is batch and not self._several
        gradients = [p.grad for p in module.parameters() if p.grad is not None]
        # gradients that are not dense are refused when they are accrued
        dense = [gradient for gradient in gradients if gradient.layout is torch.strided]
        if self.clip_norm:
            norm = float(nn.utils.clip_grad_norm_(module.parameters(), self.clip_norm))
        else:
            norm = 0.0 if known else float(nn.utils.get_total_norm(dense))
        # the norm of finite gradients may overflow their dtype
        if not (known or math.isfinite(norm)) and not all(bool(gradient.isfinite().all()) for gradient in dense):
            self._story.report(norm, batch, step, "norm of the gradient")

    def _check_missing(self, model: int, module: nn.Module, frozen: frozenset[str], prefix: str) -> None:
        """Refuse parameters without a gradient that are stepped all the same, though plain PyTorch would not step them.

        Frozen parameters that have a gradient are refused too: it would not be applied.
        """
        for key, parameter in module.named_parameters():
            name = prefix + key
            if parameter.grad is not None and key in frozen:
                raise UsageError(
                    f"{name} has a gradient in step {self._steps}, and was frozen when replica.optimizer() was "
                    "called, so that it is not stepped: call replica.optimizer() first and freeze it afterwards"
                )
            if parameter.grad is None and key not in frozen and (why := self._why_stepped(model)):
                self._name_missing(name, why)

    def _name_missing(self, name: str, why: str) -> None:
        text = f"{name} has no gradient in step {self._steps}, which counts as zero: {why}"
        if self._settings.replicas == 1:
            raise UsageError(f"{text}; freeze it before replica.optimizer(), or take another optimizer")
        if name not in self._missing:
            self._missing.add(name)
            warnings.warn(f"{text}, and momentum or weight decay step it all the same", stacklevel=6)

    def _why_stepped(self, model: int) -> str:
        """Return why a parameter without a gradient is stepped; "" if it is left alone."""
        settings, stepped = self._settings, self._models[model][2] or self.stepped
        if settings.strategy.held_by is not Holder.SHARDS:
            return "" if settings.replicas == 1 else f"{settings.strategy.name} adds up whole gradients"
        if stepped.name in WHOLE_STEPS or stepped.options.get("dampening"):
            return f"{stepped.name} steps all parameters of a shard together"
        return "a standby steps all together (--standby)" if settings.standby else ""

    def _written(self) -> bool:
        """Return whether the script has changed its parameters since they were fetched.

        A change that the job cannot follow is refused.
        """
        vectors = self._vectors
        assert vectors is not None
        vectors.follow()
        if not (names := vectors.written()):
            return False
        why = self._why_alone
        if why:
            remedy = (
                "it was frozen when replica.optimizer() was called; make it a buffer (register_buffer), or keep it in "
                "another module"
                if names[0] in vectors.frozen
                else "have the model compute it (torch.nn.utils.parametrize), or restore its values before the step"
            )
            raise UsageError(
                f"the script has written to {names[0]!r} since it was fetched, and {why}: {remedy}; only a single "
                "replica that pushes and fetches in each step may write"
            )
        return True

    @property
    def _why_alone(self) -> str:
        """Reason why a change of the parameters by the script cannot be followed; "" if it can."""
        strategy = self._settings.strategy
        pushing = strategy.pushing
        if self._settings.replicas > 1 or self.index:
            return "the other replicas do not see it"
        if strategy.held_by is Holder.SHARDS and (
            pushing.push_steps > 1 or pushing.fetch_every > 1 or pushing.prefetch or pushing.local_lr or pushing.local
        ):
            return "its parameters are not those of the shards (--push-every, --fetch-every, --prefetch, local steps)"
        return "a standby does not see it (--standby)" if self._settings.standby else ""

    def _begin(self, source: Source | Stream) -> None:
        named = tuple(optim for _, _, optim in self._models if optim is not None)
        if self._split is not None:
            computed, flat = self._cut(self._split, source), self._flat()
        else:
            computed, flat = None, self._flat()
            flat.follow()
            self._stage.fill(flat.module)
        self._vectors = flat
        self._script.check(self._optimizers)
        kept = self._script if self._script.saves else None
        request = LoopRequest(source.batch_size, self._epochs, self._order, named, self._local, kept)
        part = self._stage.make(ScriptedLoop(flat, computed, source.samples, self._computes, request))
        self._story = cast(Played, part.player)
        if kept is not None and getattr(part.player, "script", None) is None:
            raise UsageError(
                f"keep(): strategy {self._settings.strategy.name} saves nothing of a script: it does not take "
                "context.loop; leave keep() off, or use downpour, bounded, softsync, synchronous or allreduce"
            )
        worker = dataclasses.replace(part.worker, attach=lambda plan, arena: self._attach(part.worker, plan, arena))
        self._script.go_on(part.player.story(), worker)
        self._play_on()

    def _moment(self) -> tuple[int, Sequence[ServerOptimizer]]:
        """Return the script's epoch (between two epochs the next, without epochs -1), and its optimizers."""
        return self._epoch + self._between if self._epochs else -1, self._optimizers

    # split models

    def _cut(self, model: SplitModel, source: Source | Stream) -> ScriptedPart:
        """Cut the model to this process's part, and have the optimizer step that."""
        optimizer, [(_, groups, _)] = self._optimizers[0], self._models
        self._stage.fill(model.whole)
        names = {id(parameter): name for name, parameter in model.whole.named_parameters()}

        def sample() -> object:
            if not source.samples:
                raise DataError("the training set is empty: there is nothing to train with")
            assert not isinstance(source, Stream)  # settings refuse streams for split models
            loaded, _ = source.load(Wanted(Batch(0, 0), examples(source.samples)), (), self._settings.seed)
            return on_device(loaded, optimizer.vectors.device)

        flat, part = model.cut(
            self.partition,
            sample,
            self._settings,
            source.batch_size or self._settings.batch_size,
            lambda whole, graph: layout_of(whole, groups, graph.pieces),
            self._stage.tell if roles.is_lead(self.role) and self.index == 0 else None,
        )
        # the whole model is gone: the optimizer keeps only parameters that this partition has
        optimizer.hold(flat, names)
        self._stage.tell(PartBuilt(self.role, len(roles.replicas(self._settings.mesh))))
        self._models = [(model, None, None)]
        return part

    def _minibatch(self) -> Batch:
        """Return the current minibatch, or raise a `UsageError`."""
        batch = self._handed[0]
        if batch is None or not self._inside or not (self._void or batch is self._batch):
            raise UsageError(
                "a split model is called, and goes backward, only in a minibatch of replica.batches(), before its "
                "optimizer.step()"
            )
        return batch

    def _play_for_model(self, actions: Sequence[Action]) -> bool:
        """Have the client play actions of a split model; return False if the job went on without this minibatch."""
        begun, batch, self._batch = time.perf_counter(), self._batch, None
        self._answer(actions)
        self._play_on()
        # the client's time is no part of the script's step
        self._began += time.perf_counter() - begun
        self._void = self._batch is not batch
        return not self._void

    def _go_on(self, answer: Computed | None) -> None:
        self._batch = None
        # stop the pump before the client goes on: only one thread may use the endpoint
        self._carried.close()
        self._answer(answer)
        self._play_on()

    def _play_on(self) -> None:
        """Run the client until a minibatch is to be computed, or to its end."""
        self._stage.driver.run_while(lambda: self._batch is None and not self._script.paused)
        if self._script.paused:
            return
        self.over = self._batch is None and (self._steps > 0 or self._handed[0] is None)

    def _end_pause(self) -> None:
        """Let the client go on after the script, which may have kept state since this minibatch."""
        if self._script.paused:
            # a fetch would undo what the script has written since its step
            self._script.end_pause(written=self._steps > 0 and self._written())
            self._play_on()

    def leave(self) -> None:
        """Leave the job: push accrued gradients, and let the others do the rest. A loop that ends early calls this.

        A split replica whose strategy cannot go on without it raises a `UsageError`.
        """
        self._end_pause()
        if self._batch is not None:
            self._check_leaving("a loop that is left before its end")
            self._go_on(None)

    @property
    def _may_leave(self) -> bool:
        return self._split is None or self._settings.strategy.held_by is Holder.SHARDS

    def _check_leaving(self, what: str) -> None:
        if not self._may_leave:
            raise UsageError(
                f"{what}, of a split replica: with strategy {self._settings.strategy.name} its partitions leave when "
                "the job ends; set its length with --epochs"
            )

    # the worker's functions

    def _attach(self, worker: Worker, plan: Plan, arena: Arena) -> None:
        self._plan = plan
        worker.attach(plan, arena)

    def _computes(self, clip_norm: float) -> Compute:
        self.clip_norm = clip_norm
        return self._compute

    def _compute(self, batch: Batch, answer: Answer) -> Computed | None:
        """Hand a minibatch to the script, which answers in `step`."""
        if batch is PAUSE:
            return self._script.pause(batch, answer)
        self._batch, self._answer = batch, answer
        pump, plan = self._stage.pump, self._plan
        if pump is not None and plan is not None and plan.settings.strategy.pushing.prefetch:
            self._carried.enter_context(pump.running())
        return None


def _check_given(model: object, groups: object, optim: object) -> None:
    """Refuse arguments that belong to an optimizer of torch, with those that belong here."""
    job = "the job sets the optimizer and its rate (--optimizer, --lr)"
    if not isinstance(model, nn.Module):
        raise UsageError(f"optimizer({shown(model)}): it takes the model, replica.optimizer(model); {job}")
    if not isinstance(groups, Sequence | None) or not all(
        isinstance(group, Mapping) and "params" in group for group in groups or ()
    ):
        raise UsageError(
            f"optimizer(groups={shown(groups)}): parameter groups are a list of dictionaries, each with params; {job}"
        )
    if not isinstance(optim, Optimizer | None):
        raise UsageError(
            f"optimizer(optim={shown(optim)}): make it with distbelief.optim(name, lr=..., ...), such as "
            'distbelief.optim("adam", lr=1e-3)'
        )


def _whole(number: int, least: int, what: str, remedy: str = "") -> int:
    """Return a whole number of any class; refuse what is none, or too low."""
    if not hasattr(number, "__index__") or operator.index(number) < least:
        raise UsageError(f"{what}: must be a whole number, {least} or more{remedy}")
    return operator.index(number)


def _named(kind: type[torch.optim.Optimizer]) -> Optimizer:
    """Return the optimizer of a class of `torch.optim`, with its default rate."""
    if getattr(torch.optim, getattr(kind, "__name__", ""), None) is not kind:
        raise UsageError(
            f"optimizer(local={shown(kind)}): is a class of torch.optim, such as torch.optim.AdamW, or "
            'distbelief.optim("adamw", lr=3e-4)'
        )
    return optim(kind.__name__.lower())


def tensors_of(parameters: torch.Tensor | Iterable[torch.Tensor | tuple[str, torch.Tensor]]) -> list[torch.Tensor]:
    """Return the parameters of a group: one or several, which may have names."""
    some = [parameters] if isinstance(parameters, torch.Tensor) else parameters
    return [item[1] if isinstance(item, tuple) else item for item in some]


current: Replica | None = None
"""The replica that this process is; set when the job starts it."""
PLAYED = "DISTBELIEF_ROLE"
"""Environment variable with the role of a script that a job runs; processes that it starts inherit it."""


def join() -> Replica:
    """Return this process's part in the job that started it.

    Raises:
        UsageError: no job started this process, or a replica's script did.
    """
    role = os.environ.get(PLAYED, "")
    if role and (current is None or not current.here):
        raise UsageError(
            f"{role} has joined already, and this process was started by its script (as a loader's worker, for "
            'example): only the script itself joins, so put the training below if __name__ == "__main__":'
        )
    if current is None:
        raise UsageError(
            "no job has started this process; run the script with: distbelief launch downpour --replicas 2 SCRIPT.py, "
            "or name the ticket of a job that was started with --listen: join(ticket=...)"
        )
    return current


def _nobody(_: object) -> None:
    raise LocalProtocolError("nobody waits for a gradient")
