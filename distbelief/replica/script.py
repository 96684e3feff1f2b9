"""A user's own loop, as the story of its replica knows it: what it asks of the job, and what its script keeps."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

from distbelief.core import events
from distbelief.core.effects import PAUSE, SCRIPT, Compute, Computed, Payload, Save
from distbelief.core.optimizer import Optimizer
from distbelief.replica.steps import Steps


class KeptScript(Protocol):
    """A script that keeps something."""

    in_step: bool
    """True while it waits in its step, and has not done with its minibatch."""

    def part(self) -> Mapping[str, Payload]:
        """Return all that it keeps now, as a part of a checkpoint."""


@dataclass(frozen=True)
class LoopRequest:
    """Settings that a user's own loop asks for, each left to the job by 0, "" or none."""

    batch_size: int = 0
    epochs: int = 0
    order: str = ""
    optimizers: tuple[Optimizer, ...] = ()
    """One for each of its models."""
    script: KeptScript | None = None
    """The script, where it keeps something."""


def end_minibatch(script: KeptScript | None) -> Steps[bool]:
    """Have a script come to the end of its minibatch; returns whether it has written to its parameters there."""
    # what it does after its step (a scheduler of minibatches, say) is part of what it keeps; its step would otherwise
    # return only with the next minibatch
    if script is None or not script.in_step:
        return False
    computed: Computed | None = yield Compute(PAUSE)
    return computed is not None and computed.written


def save(script: KeptScript, number: int) -> Steps[str]:
    """Save what a script keeps; returns the error that kept it from disk, or ""."""
    saved: events.Saved = yield Save(number, SCRIPT, dict(script.part()), {})
    return saved.error
