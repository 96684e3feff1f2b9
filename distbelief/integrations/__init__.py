"""The communication hook inside frameworks: for their trainers, so that DDP's gradients are added up as it does.

A framework is imported when its function is called. Each makes DistributedDataParallel's model itself, at a moment of
its own; what is made here registers `comm_hook` with it as soon as it is there. Where the script is handed that model,
as Accelerate's `prepare` does, nothing is needed: `model.register_comm_hook(db.Reduce(), db.comm_hook)`.
"""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING, Any

from distbelief.core.values import admit, shown
from distbelief.errors import UsageError
from distbelief.integrations.hook import Reduce, comm_hook

if TYPE_CHECKING:
    from torch.nn.parallel import DistributedDataParallel

_registered: weakref.WeakSet[DistributedDataParallel] = weakref.WeakSet()
"""Models that have their hook."""


def lightning_callback(reduce: Reduce | None = None) -> Any:
    """A callback for Lightning: `Trainer(strategy="ddp", callbacks=[lightning_callback()])`.

    `DDPStrategy(ddp_comm_state=db.Reduce(), ddp_comm_hook=db.comm_hook)` does the same on GPUs; on CPUs Lightning takes
    no heed of what it is given there, and a callback is the way.

    Args:
        reduce: how gradients are added up; `Reduce()` where None.

    Raises:
        UsageError: Lightning is not installed; as training starts, its strategy makes no DDP model.
    """
    try:
        from lightning.pytorch import Callback
    except ImportError as error:
        raise _missing("lightning", error) from error
    state = _state(reduce, "lightning_callback")

    class LightningReduceCallback(Callback):  # type: ignore[misc]  # an optional package, whose classes are Any where it is not
        """Registers the hook as training starts."""

        def on_train_start(self, trainer: Any, pl_module: object) -> None:
            """With the model that the strategy has made."""
            _register(trainer.strategy.model, state, 'Trainer(strategy="ddp")')

    return LightningReduceCallback()


def transformers_callback(trainer: Any, reduce: Reduce | None = None) -> Any:
    """A callback for transformers: `trainer.add_callback(transformers_callback(trainer))`, under torchrun.

    Args:
        trainer: a `transformers.Trainer`, which tells its callbacks of its model without what DDP has made of it.
        reduce: how gradients are added up; `Reduce()` where None.

    Raises:
        UsageError: transformers is not installed; as training starts, the trainer makes no DDP model.
    """
    try:
        from transformers import TrainerCallback
    except ImportError as error:
        raise _missing("transformers", error) from error
    state = _state(reduce, "transformers_callback")

    class TransformersReduceCallback(TrainerCallback):  # type: ignore[misc]  # as above
        """Registers the hook as training begins."""

        def on_train_begin(self, *_: object, **__: object) -> None:
            """With the model that the trainer has made."""
            _register(trainer.model_wrapped, state, "the script under torchrun --nproc-per-node 2")

    return TransformersReduceCallback()


def _state(reduce: Reduce | None, where: str) -> Reduce:
    chosen: Reduce | None = admit(reduce, Reduce | None, f"{where}(reduce={shown(reduce)})")
    return chosen or Reduce()


def _missing(package: str, error: ImportError) -> UsageError:
    return UsageError(f"{package} cannot be imported ({error}): pip install {package}")


def _register(model: Any, state: Reduce, instead: str) -> None:
    """Register the hook with a DDP model, once."""
    from torch.nn.parallel import DistributedDataParallel

    if not isinstance(model, DistributedDataParallel):
        raise UsageError(
            f"the trainer's model is a {type(model).__name__}, no DistributedDataParallel: there are no gradients of "
            f"other processes to add up; run {instead}, or leave the callback out"
        )
    if model not in _registered:  # a trainer that trains twice asks twice
        model.register_comm_hook(state, comm_hook)
        _registered.add(model)
