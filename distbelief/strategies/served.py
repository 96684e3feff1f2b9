"""Replicas and evaluators that fetch their parameters from shards."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from distbelief.core.settings import Plan
from distbelief.fabric.copying import copy_bytes
from distbelief.runtime.player import HasStory, PlayedRole, Worker
from distbelief.strategies.context import Context
from distbelief.tasks.flat import FlatModule
from distbelief.tasks.worker import measure
from distbelief.transport.base import Arena


def served(context: Context, story: HasStory) -> PlayedRole:
    """Return a replica that computes gradients on parameters of the shards, given its story.

    The worker of a partition does not clip: the norm of the whole gradient is known only to its story.
    """
    clip_norm = context.settings.clip_norm if context.part is None else 0.0
    return PlayedRole(story, Worker(_attach(context), context.computes(clip_norm)))


def served_reader(context: Context) -> Worker:
    """Return the evaluator's worker, which measures the parameters that the shards answer with."""
    flat = context.module
    land = _landing(flat)

    def attach(plan: Plan, arena: Arena) -> None:
        land(plan, arena)
        # On a CPU, free the memory that the model was built in before the parameters land. A device takes the frozen
        # parameters with its first swap, which can only be after they have landed.
        if flat.device.type == "cpu":
            flat.swap(0)

    return Worker(attach, measure=lambda: measure(context.task, flat.module))


def _attach(context: Context) -> Callable[[Plan, Arena], None]:
    """Return how the module's parameters are bound: where answers land, or to the shards' own memory."""
    if context.flat is None:
        return Worker().attach
    flat, memory = context.flat, context.stage.memory
    if memory is None:
        return _landing(flat)

    def attach(plan: Plan, arena: Arena) -> None:
        there = memory(plan.layout.total)[flat.held.start : flat.held.stop]
        if flat.owned or (flat.only_reads and all(section.kind == "parameter" for section in plan.layout.sections)):
            flat.bind(arena.gradients, [there], remedy="" if flat.owned else "--transport tcp")
        else:
            flat.bind(arena.gradients, arena.parameters, _copying(arena.parameters, there, plan.layout.moving))

    return attach


def _copying(parameters: Sequence[torch.Tensor], there: torch.Tensor, moving: int) -> Callable[[int], int]:
    """Return a function that copies the shards' memory for a model that writes to it; the frozen part only once."""
    begun: set[int] = set()

    def copied(landing: int) -> int:
        size = moving if landing in begun else there.numel()
        begun.add(landing)
        copy_bytes(parameters[landing][:size], there[:size])
        return landing

    return copied


def _landing(flat: FlatModule) -> Callable[[Plan, Arena], None]:
    return lambda _, arena: flat.bind(arena.gradients, arena.parameters)
