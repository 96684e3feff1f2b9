"""The plain PyTorch loop of strategy `single`, in one process, with records, checkpoints and result as all others."""

from __future__ import annotations

import inspect
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from distbelief.coordination import admission
from distbelief.coordination.cadence import Target, budget_spent, is_due, snapshot_due
from distbelief.core import records, roles
from distbelief.core.conversations.membership import Join
from distbelief.core.effects import Batch
from distbelief.core.optimizer import Optimizer, ParameterGroup
from distbelief.core.portions import Dealer
from distbelief.core.records import Cause
from distbelief.errors import CheckpointError
from distbelief.record.checkpoints import Checkpoints
from distbelief.record.restore import load_part
from distbelief.replica.work import REPORT_SECONDS, check_loss
from distbelief.runtime.player import ASIDE, COMPUTE, UPDATE, StepTimes
from distbelief.server import optimizers
from distbelief.server.slice import MASTERED
from distbelief.sharding.layout import Layout
from distbelief.strategies.context import LoopContext, LoopSteps
from distbelief.tasks.flat import FlatModule
from distbelief.tasks.sparse import check_dense, check_rows, groups_of
from distbelief.tasks.worker import Trainer, check_measure, measure


class SingleLoop:
    """The loop of a job."""

    def __init__(self, context: LoopContext) -> None:
        task, model, settings, run = context.task, context.model, context.settings, context.run
        self.task, self.model, self.settings = task, model, settings
        self._note, self._stopped, self._now = context.note, context.stopped, context.now or time.monotonic
        self._trainer = Trainer(task, model, settings, settings.clip_norm, settings.arithmetic)
        groups = groups_of(model, settings.optimizer)
        self._flat = FlatModule(model, groups, rows=True)
        check_rows(self._flat.layout, settings)
        layout = self._flat.layout
        self._dense = [
            p
            for entry, p in zip(layout.trained_entries, self._flat.trained, strict=True)
            if not layout.is_sparse(entry)
        ]
        self._optimizers = _build(settings.optimizer, groups or [{"params": list(model.parameters())}], self._dense)
        self._update = [torch.no_grad()(optimizers.stepper(optimizer)) for optimizer in self._optimizers]
        self._post_hooks = optimizers.post_hooks(settings)
        self._plan = admission.plan(settings, Join(0, layout, len(self._trainer.data)))
        self._store = Checkpoints(run) if run else None
        self._start = start = context.start
        self._steps, self._samples, self._number = 0, start.samples, start.number
        self._dealer = Dealer(self._plan.batches, settings.epochs, 1, start.position)
        self._epochs = self._dealer.completed
        self._saved = self._now(), 0
        """Time of the last checkpoint, and the number of steps before it."""
        self._unsaved = ""
        self._target, self._began = Target(), self._now()
        self._reported, self._times = (0, 0), StepTimes(roles.SINGLE, self._now, self._note)
        """Number of steps and samples in reports."""
        self._loss = self._seconds = 0.0
        """Sums since the last report."""
        steps = LoopSteps(self._trainer.compute, self._step_parameters, len(self._trainer.data), layout.trained.size)
        self._timed = context.timed(steps)
        if settings.evaluates and task.test is not None:
            check_measure(task, model)

    def run(self) -> None:
        if self._start.checkpoint:
            self._load(self._start.checkpoint)
        self._began = self._now()
        self._saved, self._reported = (self._began, self._steps), (self._steps, self._samples)
        self._note(admission.started(self._plan, self._start.samples, self._epochs))
        self._note(records.Joined(roles.SINGLE))
        cause, reason = self._train()
        self._times.tell()
        self._note(records.Applied(roles.SINGLE, self._steps, self._samples, {0: self._steps}))
        self._note(records.Finished.of(*records.ended(cause, reason, self._unsaved)))

    def _train(self) -> tuple[Cause, str]:
        """Train on one minibatch after another; return why the job ends."""
        dealer = self._dealer
        while (portion := dealer.deal(roles.SINGLE, 1)) is not None:
            self._step(Batch(portion.epoch, portion.first))
            for _ in dealer.done(roles.SINGLE, 1):
                if ended := self._epoch_done():
                    return ended
            if dealer.finished:
                continue
            every = self.settings.evaluations.minibatches
            reached = self._test() if every and self._steps % every == 0 else ""
            ended = (Cause.TARGET_REACHED, reached) if reached else self._ended_early()
            if ended or self._is_time():
                self._report()
                self._save()
            if ended:
                return ended
        return Cause.EPOCHS_DONE, "all epochs are done"

    def _ended_early(self) -> tuple[Cause, str] | None:
        """Return why the job ends within an epoch: it is stopped, or its budget is spent."""
        if reason := self._stopped():
            return Cause.INTERRUPTED, reason
        if spent := budget_spent(self.settings, self._now() - self._began):
            self._test()
            return Cause.BUDGET_SPENT, spent
        return None

    def _epoch_done(self) -> tuple[Cause, str] | None:
        """Note the end of an epoch; return why the job ends there, if it does."""
        self._report()
        self._epochs += 1
        done, s, last = self._epochs, self.settings, self._dealer.finished
        self._note(records.EpochDone(done))
        reached = self._test() if last or is_due(s.evaluations.epochs, done) else ""
        if last or reached or is_due(s.checkpoint_every, done):
            self._save()
        return (Cause.TARGET_REACHED, reached) if reached else None

    def _step_parameters(self) -> None:
        for parameter in self._dense:
            check_dense(parameter.grad)
        factor = self._plan.factor(self._samples)
        for optimizer in self._optimizers:
            for group in optimizer.param_groups:
                group["lr"] = self.settings.optimizer.lr * factor
        for update in self._update:
            update()
        for hook in self._post_hooks:
            hook(self._flat.trained)

    def _step(self, batch: Batch) -> None:
        times = self._times
        times.begin(COMPUTE)
        computed = self._timed.compute(batch)
        times.go_on(computed)
        if computed.loss is not None:
            check_loss(roles.SINGLE, computed.loss, batch, self._steps, "loss", self.settings)
        times.begin(UPDATE)
        self._timed.update()
        times.begin(ASIDE)
        self._steps += 1
        self._samples += computed.samples
        self._loss += computed.loss or 0.0
        self._seconds += computed.seconds
        if self._seconds >= REPORT_SECONDS:
            self._report()

    def _report(self) -> None:
        steps, samples = self._steps - self._reported[0], self._samples - self._reported[1]
        if steps:
            self._note(records.Stepped(roles.SINGLE, steps, samples, 0, self._loss / steps, 0, steps))
        self._reported, self._loss, self._seconds = (self._steps, self._samples), 0.0, 0.0

    def _test(self) -> str:
        """Evaluate, if the job does that; return a sentence if the target is reached."""
        if not self.settings.evaluates or self.task.test is None:
            return ""
        self._report()
        began = self._now()
        measured = measure(self.task, self.model)
        seconds = self._now() - began
        tested = records.Tested(self._epochs, measured.loss, measured.accuracy, measured.metrics, seconds)
        self._note(tested)
        return self._target.reached(self.settings, tested)

    # checkpoints, in the format of one shard that holds everything

    def _is_time(self) -> bool:
        """Return whether a checkpoint is due within an epoch; a step counts as a push."""
        moment, steps = self._saved
        return snapshot_due(self.settings, self._steps - steps, self._now() - moment, self._steps - steps)

    def _save(self) -> None:
        self._saved = self._now(), self._steps
        if self._store is None:
            return
        error = ""
        began = self._now()
        facts = {"updates": self._steps, "samples": self._samples, "staleness": {"0": self._steps}}
        try:
            self._store.save_part(self._number, "shard-0", _arrays(self._flat, self._optimizers), facts)
            self._store.commit(self._number, self._plan, self._dealer.position(), self._samples)
        except CheckpointError as failed:
            error = str(failed)
        self._unsaved = error
        self._note(records.Checkpointed(self._number, error, self._now() - began))
        self._number += 1

    def _load(self, checkpoint: str) -> None:
        arrays, facts = load_part(Path(checkpoint), self._plan, 0)
        self._steps = facts["updates"]
        self._flat.read(torch.cat([arrays["vector.moving"], arrays["vector.frozen"]]))
        tensors, states = dict(self.model.named_parameters()), dict[torch.Tensor, dict[str, torch.Tensor]]()
        for number, names in _members(self._flat.layout).items():
            for key in {name.split(".", 2)[2] for name in arrays if name.startswith(f"state.{number}.")}:
                members = [tensors[name] for name in names]
                for parameter, part in zip(members, _parts(arrays[f"state.{number}.{key}"], members), strict=True):
                    states.setdefault(parameter, {})[key] = part
        for optimizer in self._optimizers:
            _restore(optimizer, states)


def _build(
    settings: Optimizer, groups: Sequence[ParameterGroup], dense: Sequence[torch.Tensor]
) -> list[torch.optim.Optimizer]:
    """Build the optimizer of parameters with dense gradients, and that of those with sparse ones: one, or both."""
    # two optimizers, since torch's fused kernels do not take sparse gradients
    whole = set(map(id, dense))
    both = [
        [
            {**group, "params": [p for p in group["params"] if p.requires_grad and (id(p) not in whole) == sparse]}
            for group in groups
        ]
        for sparse in (False, True)
    ]
    return [
        optimizers.build(settings, groups, sparse)
        for groups, sparse in zip(both, (False, True), strict=True)
        if any(g["params"] for g in groups)
    ]


def _members(layout: Layout) -> dict[int, list[str]]:
    """Return the names of each section's parameters, in the order of the flat vector."""
    sections = [(i, s) for i, s in enumerate(layout.sections) if s.kind == "parameter"]
    return {i: [e.tensor.name for e in layout.trained_entries if s.start <= e.start < s.stop] for i, s in sections}


def _arrays(flat: FlatModule, stepping: Sequence[torch.optim.Optimizer]) -> dict[str, torch.Tensor]:
    """Return the model and the optimizers' state as the arrays of one shard.

    As a shard does, convert parameters of low precision and their states to float32.
    """
    layout, tensors = flat.layout, dict(flat.module.named_parameters())
    state_of = {parameter: state for optimizer in stepping for parameter, state in optimizer.state.items()}
    vector = torch.zeros(layout.total, dtype=torch.uint8)
    flat.write(vector)
    arrays = {"vector.moving": vector[: layout.moving], "vector.frozen": vector[layout.moving :]}
    for number, names in _members(layout).items():
        section = layout.sections[number]
        dtype = getattr(torch, section.dtype)
        if dtype in MASTERED:
            arrays[f"master.{number}"] = vector[section.start : section.stop].view(dtype).float()
        states: list[dict[str, Any]] = [state_of.get(tensors[name], {}) for name in names]
        for key in dict.fromkeys(key for state in states for key in state):
            known = {name: state[key] for name, state in zip(names, states, strict=True) if state.get(key) is not None}
            if known and all(
                isinstance(v, torch.Tensor) and v.shape == tensors[name].shape for name, v in known.items()
            ):
                # torch makes a parameter's state at its first gradient: until then it is zero
                parts = [known[name] if name in known else torch.zeros_like(tensors[name]) for name in names]
                values = torch.cat([part.detach().flatten() for part in parts])
                arrays[f"state.{number}.{key}"] = values.float() if dtype in MASTERED else values
            elif known:
                arrays[f"state.{number}.{key}"] = torch.as_tensor(max(float(value) for value in known.values()))
    return arrays


def _parts(values: torch.Tensor, parameters: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Cut a state of a section for its parameters: elements for each, or one value for all."""
    if values.ndim and values.numel() == sum(p.numel() for p in parameters):
        return [
            part.view(p.shape)
            for part, p in zip(values.split([p.numel() for p in parameters]), parameters, strict=True)
        ]
    return [values.clone() for _ in parameters]


def _restore(optimizer: torch.optim.Optimizer, states: dict[torch.Tensor, dict[str, torch.Tensor]]) -> None:
    """Give an optimizer its states; torch moves each to its device and dtype."""
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    # unwrapped, as in `optimizers.stepper`: the wrapper would import torch._dynamo
    saved = inspect.unwrap(type(optimizer).state_dict)(optimizer)
    saved["state"] = {i: states[p] for i, p in enumerate(parameters) if p in states}
    inspect.unwrap(type(optimizer).load_state_dict)(optimizer, saved)
