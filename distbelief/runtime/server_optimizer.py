"""The shards' optimizer in a script: a `torch.optim.Optimizer` whose state is on the shards."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NoReturn

import torch
from torch import Tensor

from distbelief.core.optimizer import GroupOption, ParameterGroup
from distbelief.core.settings import Holder, Settings
from distbelief.errors import UsageError
from distbelief.server import optimizers
from distbelief.tasks.flat import FlatModule

SEEN = "_distbelief_seen"
"""Attribute of a gradient: its version when its samples were counted, or when it was pushed or zeroed."""


ON_SHARDS = (
    "the optimizer's state is on the shards and in the checkpoints of the run folder: go on with --resume (for the "
    "weights alone, with --init-from)"
)


class _OnShards(dict[Any, Any]):
    """A state that raises an error where it is read or saved."""

    def __missing__(self, key: object) -> NoReturn:
        raise UsageError(f"optimizer.state[...] has nothing: {ON_SHARDS}")

    def __reduce_ex__(self, protocol: object) -> NoReturn:
        raise UsageError(f"optimizer.state_dict() has no state to save: {ON_SHARDS}")


class ServerOptimizer(torch.optim.Optimizer):
    """Optimizer that a script steps instead of its own.

    With local steps it sets the rate of the local optimizer: the replica's own optimizer is `vectors.local`.

    Each push carries the rate of a parameter group (`lr`, as `torch.optim.lr_scheduler` sets it), as a factor of the
    rate with which the job began, and every other number that the script changes in a group.

    `groups` and `defaults` are as in `torch.optim`; without `groups` there is one. `step` pushes the gradient.
    `first_group` is the number of its first group, among those of several models.
    """

    def __init__(
        self,
        vectors: FlatModule,
        groups: Sequence[ParameterGroup] | None,
        settings: Settings,
        defaults: Mapping[str, object],
        step: Callable[[], None],
        first_group: int = 0,
    ) -> None:
        self.vectors, self._settings, self._push, self._first_group = vectors, settings, step, first_group
        listed = [{"params": vectors.trained}] if groups is None else [dict(group) for group in groups]
        if settings.local and settings.partitions == 1:
            vectors.local = optimizers.build(settings.local, [dict(group) for group in listed])
        self._begun = False
        self._held = 0
        """Samples of earlier minibatches without a step, whose gradient is part of the present one."""
        super().__init__(listed, dict(defaults))
        self.state = _OnShards()  # type: ignore[assignment]  # torch's own would make missing entries
        self._rates = [float(group["lr"]) for group in self.param_groups]
        self._options = [{name: group[name] for name in defaults if name != "lr"} for group in self.param_groups]
        self._begun = True

    def step(self, closure: object = None) -> None:  # type: ignore[override]  # there is no loss to return
        """Push the gradients and fetch parameters, as the job's settings say; refuse a closure."""
        if closure is not None:
            raise UsageError(
                "optimizer.step(closure): a push is one gradient, which is not computed again; for L-BFGS use strategy "
                "sandblaster, with a task: distbelief train module:task sandblaster"
            )
        self._push()

    def add_param_group(self, param_group: dict[str, object]) -> None:
        """Refuse groups that come later."""
        if self._begun:
            raise UsageError(
                "add_param_group(): the shards' slices are fixed; pass all groups at once: replica.optimizer(model, "
                "groups)"
            )
        # unwrapped, as in zero_grad: torch's wrapper imports torch._dynamo, which takes 1.2 s and 70 MB
        inspect.unwrap(torch.optim.Optimizer.add_param_group)(self, param_group)

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Zero the gradients; a gradient that was not pushed is lost, with its samples."""
        inspect.unwrap(torch.optim.Optimizer.zero_grad)(self, set_to_none)
        self._held = 0
        self._mark_seen()

    def state_dict(self) -> dict[str, object]:
        """Return the groups, and a state that raises an error when it is saved."""
        return {**inspect.unwrap(torch.optim.Optimizer.state_dict)(self), "state": _OnShards()}

    def load_state_dict(self, state_dict: Mapping[str, object]) -> None:
        """Load the groups of a state; refuse one that contains more, which is on the shards."""
        if state_dict["state"]:
            raise UsageError(f"optimizer.load_state_dict() of a state that is not empty: {ON_SHARDS}")
        inspect.unwrap(torch.optim.Optimizer.load_state_dict)(self, dict(state_dict))

    def hold(self, vectors: FlatModule, names: Mapping[int, str]) -> None:
        """Step the part of a split model that is left in this process.

        `names` has the names of the whole model's parameters, by their ids.
        """
        parameters = dict(vectors.module.named_parameters())
        for group in self.param_groups:
            group["params"] = [parameters[name] for p in group["params"] if (name := names[id(p)]) in parameters]
        self.vectors = vectors

    @property
    def local(self) -> torch.optim.Optimizer:
        """Optimizer of this replica's local steps, to keep its state: `replica.keep(local=optimizer.local)`.

        Reading it raises a `UsageError` where there are no local steps, or where each partition of a split replica
        steps its part.
        """
        if self.vectors.local is None:
            raise UsageError("optimizer.local: the job has no local optimizer, or its replicas are split")
        return self.vectors.local

    @property
    def first_options(self) -> Sequence[Mapping[str, object]]:
        """Options of each group at the start of the job, without the rate."""
        return self._options

    def changes(self) -> tuple[float, tuple[GroupOption, ...]]:
        """Return the script's rate as a factor of the job's, and the other options that it has changed.

        A change that the shards cannot follow is refused.
        """
        options = [*self._changed_options()]
        rates = [(float(group["lr"]), first) for group, first in zip(self.param_groups, self._rates, strict=True)]
        factor = 1.0
        if any(rate != first for rate, first in rates):
            factor = self._factor(rates)
            if factor < 0:
                factors = enumerate(rate / first if first else 1.0 for rate, first in rates)
                factor, options = 1.0, [*options, *(self._option(number, "lr", (part,)) for number, part in factors)]
        if options and (why := self._why_not):
            names = ", ".join(sorted({option.name for option in options}))
            raise UsageError(
                f"the script sets {names} of its parameter groups, and {why}: leave it at its first value "
                "(--optimizer-options; OneCycleLR and CyclicLR: cycle_momentum=False)"
            )
        return factor, tuple(options)

    @property
    def _why_not(self) -> str:
        """Reason why pushes carry no change except that of one rate; "" where they carry others."""
        strategy = self._settings.strategy
        if strategy.held_by is not Holder.SHARDS:
            return f"with strategy {strategy.name} only the job may change it"
        policy = self._settings.policy
        if self._settings.local:
            return "local steps follow one rate of the job"
        if policy.gathers and not policy.rounds:
            return f"strategy {strategy.name} adds up pushes before a step"
        if any("rows" in group for group in self.vectors.layout.groups):
            return "the model has embeddings with sparse gradients"
        return "a standby does not see the change (--standby)" if self._settings.standby else ""

    def _option(self, group: int, name: str, values: tuple[float, ...]) -> GroupOption:
        return GroupOption(self._first_group + group, name, values)

    def _changed_options(self) -> Iterator[GroupOption]:
        """Yield the options that the script has changed, except the rate.

        A value is refused if it is not a number, or needs state that the optimizer lacks.
        """
        for number, (group, options) in enumerate(zip(self.param_groups, self._options, strict=True)):
            for name, first in options.items():
                now = group[name]
                if now == first:
                    continue
                several = isinstance(now, tuple | list)
                values, before = (now if several else (now,)), (first if isinstance(first, tuple) else (first,))
                alike = isinstance(first, tuple) == several and len(before) == len(values)
                numbers = all(isinstance(value, int | float) and 0 <= value < math.inf for value in values)
                if isinstance(first, bool) or not (alike and numbers):
                    raise UsageError(
                        f"the script sets {name} to {now}: it began as {first}, and only numbers can change; launch "
                        f"with --optimizer-options {name}=..., and leave it as it is"
                    )
                if name in ("momentum", "nesterov") and not first:
                    raise UsageError(
                        f"the script sets {name} to {now}, but the job began without: launch with --optimizer momentum"
                    )
                yield self._option(number, name, tuple(float(value) for value in values))

    def _factor(self, rates: Sequence[tuple[float, float]]) -> float:
        """Return the rates as one factor of those at the start; -1 if the groups have different factors.

        Rates without such a factor are refused, and so are changes that only the job may make.
        """
        now = ", ".join(f"{rate:g}" for rate, _ in rates)
        factors = [rate / first for rate, first in rates if first]
        if not all(0.0 <= factor < math.inf for factor in factors) or any(rate for rate, first in rates if not first):
            raise UsageError(
                f"the script sets the learning rate to {now}: it began as "
                f"{', '.join(f'{first:g}' for _, first in rates)}, and must be 0 or more times that; start each group "
                "with a rate above 0 (lr in its group, or --lr)"
            )
        settings = self._settings
        if settings.lr_schedule != "constant" or settings.warmup_epochs:
            raise UsageError(
                f"the script sets the learning rate to {now}, and so does the job (--lr-schedule, --warmup-epochs): "
                "leave one of them off"
            )
        if settings.strategy.held_by is not Holder.SHARDS:
            raise UsageError(
                f"the script sets the learning rate to {now}: with strategy {settings.strategy.name} only the job may "
                "change it; use --lr-schedule"
            )
        return factors[0] if all(math.isclose(factor, factors[0], rel_tol=1e-9) for factor in factors) else -1.0

    def hold_over(self, samples: int) -> None:
        """Note that a minibatch of so many samples has no step: they count for the next, if its gradient is kept."""
        # a gradient that is all zero was zeroed; one that is not finite will be
        self._forget_dropped()
        grown = self._grown
        if grown:
            norm = float(torch.nn.utils.get_total_norm(grown))
            # the norm of finite gradients may overflow their dtype
            finite = math.isfinite(norm) or all(bool(gradient.isfinite().all()) for gradient in grown)
            self._held = self._held + samples if norm and finite else 0
        self._mark_seen()

    def push_samples(self, samples: int) -> int:
        """Return the samples of the gradient to push, in a minibatch of so many.

        Those held over for it count too; the minibatch's own do not if it has added nothing.
        """
        # the script may have zeroed the gradient without this optimizer's knowledge
        if self._held:
            self._forget_dropped()
        held, self._held = self._held, 0
        pushed = held + samples if not held or self._grown else held
        self._mark_seen()
        return pushed

    @property
    def _gradients(self) -> list[Tensor]:
        return [p.grad for p in self.vectors.trained if isinstance(p.grad, Tensor)]

    @property
    def _grown(self) -> list[Tensor]:
        """Gradients that are new, or have changed since they were marked as seen."""
        return [gradient for gradient in self._gradients if getattr(gradient, SEEN, -1) != gradient._version]

    def _forget_dropped(self) -> None:
        """Forget samples held over if their gradient is gone, as after `model.zero_grad()`."""
        # a gradient with its own graph (`create_graph`) is a new tensor after each addition
        if not any(hasattr(gradient, SEEN) or gradient.grad_fn is not None for gradient in self._gradients):
            self._held = 0

    def _mark_seen(self) -> None:
        for gradient in self._gradients:
            setattr(gradient, SEEN, gradient._version)
