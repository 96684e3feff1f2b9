"""Replicas and evaluators whose parameters are the shards', wherever they are played."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from distbelief.core.settings import Plan
from distbelief.runtime.player import HasStory, PlayedRole, Worker
from distbelief.server.slice import copy_bytes
from distbelief.strategies.context import Context
from distbelief.tasks.flat import FlatModule
from distbelief.tasks.worker import measure
from distbelief.transport.base import Arena


def served(context: Context, story: HasStory) -> PlayedRole:
    """Return what a replica plays that shards serve, by its story: it computes gradients on what it fetches.

    A partition of a split replica does not know what to clip its part of a gradient to; its story does.
    """
    clip_norm = context.settings.clip_norm if context.part is None else 0.0
    return PlayedRole(story, Worker(_attach(context), context.computes(clip_norm)))


def served_reader(context: Context) -> Worker:
    """Return who measures for the evaluator, with what the shards answer."""
    flat = context.module
    land = _landing(flat)

    def attach(plan: Plan, arena: Arena) -> None:
        land(plan, arena)
        if flat.device.type == "cpu":  # a device takes frozen parameters with the first swap, when they have landed
            flat.swap(0)  # what the model was built with goes before anything lands

    return Worker(attach, measure=lambda: measure(context.task, flat.module))


def _attach(context: Context) -> Callable[[Plan, Arena], None]:
    """Have the module's parameters lie where answers land, or on the shards' own memory."""
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
    """Have a model that writes to its parameters go on from a copy of the shards' memory; what is frozen, once."""
    begun: set[int] = set()

    def copied(landing: int) -> int:
        size = moving if landing in begun else there.numel()
        begun.add(landing)
        copy_bytes(parameters[landing][:size], there[:size])
        return landing

    return copied


def _landing(flat: FlatModule) -> Callable[[Plan, Arena], None]:
    return lambda _, arena: flat.bind(arena.gradients, arena.parameters)
