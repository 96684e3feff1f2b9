"""The server's optimizer as a user's loop sees it: a `torch.optim.Optimizer`, whose state is on the shards."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Mapping, Sequence
from typing import NoReturn

import torch
from torch import Tensor

from distbelief.core.optimizer import ParameterGroup
from distbelief.core.settings import Holder, Settings
from distbelief.errors import UsageError
from distbelief.tasks.flat import FlatModule

SEEN = "_distbelief_seen"
"""Of a gradient whose samples were counted, or which was pushed or zeroed: its version then."""


ON_SHARDS = (
    "what the optimizer keeps is on the shards, and in the checkpoints of the run folder: go on with --resume (weights "
    "alone: --init-from)"
)


class _OnShards(dict[str, object]):
    """A state that says so where it is saved."""

    def __reduce_ex__(self, protocol: object) -> NoReturn:
        raise UsageError(f"optimizer.state_dict() has no state to save: {ON_SHARDS}")


class ServerOptimizer(torch.optim.Optimizer):
    """What a user's loop steps instead of an optimizer of its own.

    The rate of a parameter group (`lr`, as `torch.optim.lr_scheduler` sets it) goes with each push, as a factor of the
    rate that the job began with. What else a script changes in its groups is refused.

    Args:
        vectors: of the model.
        groups: parameter groups, as `torch.optim` takes them; None for one.
        settings: of the job, as it was launched.
        defaults: options of the groups that set none, as `torch.optim` has them.
        step: hands the gradient to the replica.
    """

    def __init__(
        self,
        vectors: FlatModule,
        groups: Sequence[ParameterGroup] | None,
        settings: Settings,
        defaults: Mapping[str, object],
        step: Callable[[], None],
    ) -> None:
        self.vectors, self._settings, self._push = vectors, settings, step
        self._begun = False
        self._held = 0
        """Samples of minibatches without a step of their own, whose gradient is in that which is here."""
        made = [{"params": vectors.trained}] if groups is None else [dict(group) for group in groups]
        super().__init__(made, dict(defaults))
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
        """As of any optimizer of torch; what was not pushed is gone, with its samples."""
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
    def factor(self) -> float:
        """What the script has made of the job's rate, as a factor of it.

        Raises:
            UsageError: it differs between groups, is no number, or is the job's to say; or another option was changed.
        """
        for group, options in zip(self.param_groups, self._options, strict=True):
            for name, first in options.items():
                if group[name] != first:
                    raise UsageError(
                        f"the script sets {name} to {group[name]}: it began with {first}, and of a group's options the "
                        f"rate alone goes with a push; launch with --optimizer-options {name}=..., and leave it as it "
                        "is (OneCycleLR and CyclicLR: cycle_momentum=False)"
                    )
        rates = [(float(group["lr"]), first) for group, first in zip(self.param_groups, self._rates, strict=True)]
        if all(rate == first for rate, first in rates):
            return 1.0
        told = ", ".join(f"{rate:g}" for rate, _ in rates)
        factors = [rate / first for rate, first in rates if first]
        one = factors[0] if factors else -1.0
        if not 0.0 <= one < math.inf or any(rate for rate, first in rates if not first):
            raise UsageError(
                f"the script sets the learning rate to {told}: it began with "
                f"{', '.join(f'{first:g}' for _, first in rates)}, of which it must be a multiple"
            )
        if not all(math.isclose(factor, one, rel_tol=1e-9) for factor in factors):
            raise UsageError(
                f"the script sets the learning rates of its groups to {told}, which is not one factor of what they "
                "were: a push takes one with it; set lr in replica.optimizer(model, groups), and multiply all alike"
            )
        rate = self._settings.rate
        if rate.lr_schedule != "constant" or rate.warmup_epochs:
            raise UsageError(
                f"the script sets the learning rate to {told}, and so does the job (--lr-schedule, --warmup-epochs): "
                "leave one of them off"
            )
        if self._settings.strategy.held_by is not Holder.SHARDS:
            raise UsageError(
                f"the script sets the learning rate to {told}: with strategy {self._settings.strategy.name} nobody but "
                "the job does; use --lr-schedule"
            )
        return one

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
        self._forget_dropped()
        held, self._held = self._held, 0
        pushed = held + samples if self._grown or not held else held
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
        """Where no gradient is left that was seen (`model.zero_grad()`), what was held over is gone.

        One that goes back through a graph of its own (`create_graph`) is new whenever it is added to.
        """
        if not any(hasattr(one, SEEN) or one.grad_fn is not None for one in self._gradients):
            self._held = 0

    def _mark_seen(self) -> None:
        for gradient in self._gradients:
            setattr(gradient, SEEN, gradient._version)
