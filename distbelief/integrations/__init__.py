"""Communication hook for the trainers of frameworks.

A framework makes its DistributedDataParallel model itself; the callbacks here register `comm_hook` with it as training
starts. A framework is imported when its function is called. If a script gets the model itself, as from Accelerate's
`prepare`, it needs only `model.register_comm_hook(db.Reduce(), db.comm_hook)`.
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
"""Models with a hook."""


def lightning_callback(reduce: Reduce | None = None) -> Any:
    """Make a callback for Lightning: `Trainer(strategy="ddp", callbacks=[lightning_callback()])`.

    `DDPStrategy(ddp_comm_state=db.Reduce(), ddp_comm_hook=db.comm_hook)` does the same, but Lightning ignores it on
    CPUs.

    Args:
        reduce: state of the hook; `Reduce()` by default.

    Raises:
        UsageError: Lightning is not installed; or, as training starts, its strategy has no DDP model.
    """
    try:
        from lightning.pytorch import Callback
    except ImportError as error:
        raise _missing("lightning", error) from error
    state = _state(reduce, "lightning_callback")

    class LightningReduceCallback(Callback):  # type: ignore[misc]  # an optional package, whose classes are Any where it is not installed
        """Callback that registers the hook as training starts."""

        def on_train_start(self, trainer: Any, pl_module: object) -> None:
            """Register the hook with the model of the strategy."""
            _register(trainer.strategy.model, state, 'Trainer(strategy="ddp")')

    return LightningReduceCallback()


def transformers_callback(trainer: Any, reduce: Reduce | None = None) -> Any:
    """Make a callback for transformers under torchrun: `trainer.add_callback(transformers_callback(trainer))`.

    Args:
        trainer: the `transformers.Trainer`, whose callbacks do not get the DDP model.
        reduce: state of the hook; `Reduce()` by default.

    Raises:
        UsageError: transformers is not installed; or, as training starts, the trainer has no DDP model.
    """
    try:
        from transformers import TrainerCallback
    except ImportError as error:
        raise _missing("transformers", error) from error
    state = _state(reduce, "transformers_callback")

    class TransformersReduceCallback(TrainerCallback):  # type: ignore[misc]  # as above
        """Callback that registers the hook as training begins."""

        def on_train_begin(self, *_: object, **__: object) -> None:
            """Register the hook with the model of the trainer."""
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
            f"the trainer's model is a {type(model).__name__}, not a DistributedDataParallel: there are no gradients "
            f"of other processes to add; run {instead}, or leave the callback out"
        )
    if model not in _registered:  # a trainer may train twice
        model.register_comm_hook(state, comm_hook)
        _registered.add(model)
