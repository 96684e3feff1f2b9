"""The server's optimizer as a user's loop sees it: a `torch.optim.Optimizer`, whose state is on the shards."""

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
from distbelief.tasks.flat import FlatModule

SEEN = "_distbelief_seen"
"""Attribute of a gradient whose samples were counted, or which was pushed or zeroed: its version then."""


ON_SHARDS = (
    "what the optimizer keeps is on the shards, and in the checkpoints of the run folder: go on with --resume (weights "
    "alone: --init-from)"
)


class _OnShards(dict[Any, Any]):
    """A state that says so where it is read or saved."""

    def __missing__(self, key: object) -> NoReturn:
        raise UsageError(f"optimizer.state[...] has nothing: {ON_SHARDS}")

    def __reduce_ex__(self, protocol: object) -> NoReturn:
        raise UsageError(f"optimizer.state_dict() has no state to save: {ON_SHARDS}")


class ServerOptimizer(torch.optim.Optimizer):
    """Optimizer that a user's loop steps in the place of its own.

    The rate of a parameter group (`lr`, as `torch.optim.lr_scheduler` sets it) goes with each push, as a factor of the
    rate that the job began with; so does what else a script sets there that is a number.

    Args:
        vectors: of the model.
        groups: parameter groups, as `torch.optim` takes them; None for one.
        settings: of the job, as it was launched.
        defaults: options of the groups that set none, as `torch.optim` has them.
        step: hands the gradient to the replica.
        first_group: the number of its first group, among those of several models.
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
        self._begun = False
        self._held = 0
        """Samples of minibatches without a step of their own, whose gradient is in that which is here."""
        made = [{"params": vectors.trained}] if groups is None else [dict(group) for group in groups]
        super().__init__(made, dict(defaults))
        self.state = _OnShards()  # type: ignore[assignment]  # torch's makes what is missing
        self._rates = [float(group["lr"]) for group in self.param_groups]
        self._options = [{name: group[name] for name in defaults if name != "lr"} for group in self.param_groups]
        self._begun = True

    def step(self, closure: object = None) -> None:  # type: ignore[override]  # there is no loss to return
        """Push the gradients and fetch parameters, as the job's settings have it.

        Raises:
            UsageError: a closure is given.
        """
        if closure is not None:
            raise UsageError(
                "optimizer.step(closure): a push is one gradient, and is not computed again; L-BFGS is strategy "
                "sandblaster, which trains a task: distbelief train module:task sandblaster"
            )
        self._push()

    def add_param_group(self, param_group: dict[str, object]) -> None:
        """Refused once the parameters are the server's.

        Raises:
            UsageError: as it says.
        """
        if self._begun:
            raise UsageError(
                "add_param_group(): what each shard holds is settled; give all groups at once: "
                "replica.optimizer(model, groups)"
            )
        # unwrapped, as zero_grad is: what torch wraps around either imports torch._dynamo, 1.2 s and 70 MB
        inspect.unwrap(torch.optim.Optimizer.add_param_group)(self, param_group)

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Zero the gradients as any optimizer does; what was not pushed is gone, with its samples."""
        inspect.unwrap(torch.optim.Optimizer.zero_grad)(self, set_to_none)
        self._held = 0
        self._mark_seen()

    def state_dict(self) -> dict[str, object]:
        """The groups, and a state that cannot be saved: it is on the shards."""
        return {**inspect.unwrap(torch.optim.Optimizer.state_dict)(self), "state": _OnShards()}

    def load_state_dict(self, state_dict: Mapping[str, object]) -> None:
        """Take the groups of a state.

        Raises:
            UsageError: there is more in it, which is on the shards.
        """
        if state_dict["state"]:
            raise UsageError(f"optimizer.load_state_dict() of a state that is not empty: {ON_SHARDS}")
        inspect.unwrap(torch.optim.Optimizer.load_state_dict)(self, dict(state_dict))

    def hold(self, vectors: FlatModule, names: Mapping[int, str]) -> None:
        """Step what this process has left of a model that is split.

        Args:
            vectors: of its part.
            names: of the whole model's parameters, by their ids.
        """
        own = dict(vectors.module.named_parameters())
        for group in self.param_groups:
            group["params"] = [own[name] for one in group["params"] if (name := names[id(one)]) in own]
        self.vectors = vectors

    @property
    def first_options(self) -> Sequence[Mapping[str, object]]:
        """The options of each group, but its rate, as the job has them."""
        return self._options

    def changes(self) -> tuple[float, tuple[GroupOption, ...]]:
        """Return the script's changes: of the job's rate, as a factor of it, and of other options of its groups.

        Raises:
            UsageError: the shards cannot have it.
        """
        options = [*self._changed_options()]
        rates = [(float(group["lr"]), first) for group, first in zip(self.param_groups, self._rates, strict=True)]
        one = 1.0
        if any(rate != first for rate, first in rates):
            one = self._factor(rates)
            if one < 0:
                factors = enumerate(rate / first if first else 1.0 for rate, first in rates)
                one, options = 1.0, [*options, *(self._option(number, "lr", (part,)) for number, part in factors)]
        if options and (why := self._why_not):
            names = ", ".join(sorted({option.name for option in options}))
            raise UsageError(
                f"the script sets {names} of its parameter groups, and {why}: leave it as it began "
                "(--optimizer-options; OneCycleLR and CyclicLR: cycle_momentum=False)"
            )
        return one, tuple(options)

    @property
    def _why_not(self) -> str:
        """Why no options but one rate go with a push; "" where they do."""
        own = self._settings.strategy
        if own.held_by is not Holder.SHARDS:
            return f"with strategy {own.name} nobody but the job does"
        policy = self._settings.policy
        if policy.gathers and not policy.rounds:
            return f"strategy {own.name} adds up pushes before a step"
        if any("rows" in group for group in self.vectors.layout.groups):
            return "the model has embeddings with sparse gradients"
        return "a standby does not hear of it (--standby)" if self._settings.standby else ""

    def _option(self, group: int, name: str, values: tuple[float, ...]) -> GroupOption:
        return GroupOption(self._first_group + group, name, values)

    def _changed_options(self) -> Iterator[GroupOption]:
        """Yield the options that the script has changed, but the rate.

        Raises:
            UsageError: it is no number, or begins something that the optimizer does not keep.
        """
        for number, (group, options) in enumerate(zip(self.param_groups, self._options, strict=True)):
            for name, first in options.items():
                now = group[name]
                if now == first:
                    continue
                values = now if isinstance(now, tuple | list) else (now,)
                numbers = all(isinstance(one, int | float) for one in values)
                alike = isinstance(first, tuple) == isinstance(now, tuple | list) and (
                    not isinstance(first, tuple) or len(first) == len(values)
                )
                if (
                    not numbers
                    or isinstance(first, bool)
                    or not alike
                    or not all(0 <= one < math.inf for one in values)
                ):
                    raise UsageError(
                        f"the script sets {name} to {now}: it began with {first}, and numbers go with a push alone; "
                        f"launch with --optimizer-options {name}=..., and leave it as it is"
                    )
                if name in ("momentum", "nesterov") and not first:
                    raise UsageError(
                        f"the script sets {name} to {now}, and it began without: launch with --optimizer momentum"
                    )
                yield self._option(number, name, tuple(float(one) for one in values))

    def _factor(self, rates: Sequence[tuple[float, float]]) -> float:
        """Return the rates as one factor of those that the job began with; -1 where each group has its own.

        Raises:
            UsageError: they are no multiple of those, or the job's to say.
        """
        now = ", ".join(f"{rate:g}" for rate, _ in rates)
        factors = [rate / first for rate, first in rates if first]
        if not all(0.0 <= factor < math.inf for factor in factors) or any(rate for rate, first in rates if not first):
            raise UsageError(
                f"the script sets the learning rate to {now}: it began with "
                f"{', '.join(f'{first:g}' for _, first in rates)}, and a push takes a factor of that, 0 or more; give "
                "each group a rate above 0 to begin with (lr in its group, or --lr)"
            )
        own = self._settings
        if own.lr_schedule != "constant" or own.warmup_epochs:
            raise UsageError(
                f"the script sets the learning rate to {now}, and so does the job (--lr-schedule, --warmup-epochs): "
                "leave one of them off"
            )
        if own.strategy.held_by is not Holder.SHARDS:
            raise UsageError(
                f"the script sets the learning rate to {now}: with strategy {own.strategy.name} nobody but the job "
                "does; use --lr-schedule"
            )
        return factors[0] if all(math.isclose(one, factors[0], rel_tol=1e-9) for one in factors) else -1.0

    def hold_over(self, samples: int) -> None:
        """A minibatch of so many samples has no step: they are those of the next one, if its gradient is in that.

        A gradient that is all zero, or not finite, is in none: it was zeroed, or is to be.
        """
        self._forget_dropped()
        grown = self._grown
        if grown:
            norm = float(torch.nn.utils.get_total_norm(grown))
            # the norm of finite numbers may be more than their dtype can hold
            finite = math.isfinite(norm) or all(bool(gradient.isfinite().all()) for gradient in grown)
            self._held = self._held + samples if norm and finite else 0
        self._mark_seen()

    def push_samples(self, samples: int) -> int:
        """The samples of the gradient that is pushed now, in a minibatch of so many: with those that were held over for
        it, and without its own, where it has added nothing to them.
        """
        if self._held:
            self._forget_dropped()
        held, self._held = self._held, 0
        pushed = held + samples if not held or self._grown else held
        self._mark_seen()
        return pushed

    @property
    def _gradients(self) -> list[Tensor]:
        return [one.grad for one in self.vectors.trained if isinstance(one.grad, Tensor)]

    @property
    def _grown(self) -> list[Tensor]:
        """The gradients that are new, or not as they were seen."""
        return [one for one in self._gradients if getattr(one, SEEN, -1) != one._version]

    def _forget_dropped(self) -> None:
        """Forget what was held over where no gradient is left that was seen (`model.zero_grad()`).

        One that goes back through a graph of its own (`create_graph`) is new whenever it is added to.
        """
        if not any(hasattr(one, SEEN) or one.grad_fn is not None for one in self._gradients):
            self._held = 0

    def _mark_seen(self) -> None:
        for gradient in self._gradients:
            setattr(gradient, SEEN, gradient._version)
