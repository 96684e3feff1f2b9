"""Replicas and evaluators whose parameters are the shards', wherever they are played; and the memory that is read in
place.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from distbelief.core.settings import Plan, Settings
from distbelief.errors import UsageError
from distbelief.runtime.player import HasStory, Part, Worker
from distbelief.sharding.layout import Layout
from distbelief.strategies.context import Context, Memory
from distbelief.tasks.flat import FlatModule
from distbelief.tasks.worker import measure
from distbelief.transport.base import Arena

LOW = ("bfloat16", "float16")
"""Dtypes whose parameters have masters."""


def served(context: Context, story: HasStory) -> Part:
    """What a replica plays that shards serve, by its story: it computes gradients on what it fetches.

    A partition of a split replica does not know what to clip its part of a gradient to; its story does.
    """
    clip_norm = context.settings.clip_norm if context.part is None else 0.0
    return Part(story, Worker(_attach(context), context.computes(clip_norm)))


def served_reader(context: Context) -> Worker:
    """Who measures for the evaluator, with what the shards answer."""
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
    landing = _landing(context.flat)
    if context.memory is None:
        return landing
    flat, memory = context.flat, context.memory

    def attach(plan: Plan, arena: Arena) -> None:
        if not computes_there(plan.settings, plan.layout):
            landing(plan, arena)
            return
        if flat.device.type != "cpu":
            raise UsageError(
                f"--read-in-place: the model is on {flat.device}, which cannot compute on the shards' memory; leave "
                "it off"
            )
        flat.bind(arena.gradients, [common_memory(memory, plan)[flat.held.start : flat.held.stop]])

    return attach


def _landing(flat: FlatModule) -> Callable[[Plan, Arena], None]:
    return lambda _, arena: flat.bind(arena.gradients, arena.parameters)


def computes_there(settings: Settings, layout: Layout) -> bool:
    """Whether replicas that share memory with the shards compute where these hold the parameters: where that was asked
    for, torn; and in rounds of all, since no shard makes an update while one of them computes. A model's buffers are
    written by its forward passes, low-precision parameters have masters elsewhere, several models are fetched in turn.
    """
    strategy = settings.strategy
    if strategy.pushing.read_in_place:
        return True
    whole = all(one.kind != "buffer" and one.dtype not in LOW for one in layout.sections)
    return whole and not layout.models and strategy.rounds and not strategy.leaves_behind


def common_memory(memory: Memory, plan: Plan) -> torch.Tensor:
    """The whole vector in the memory that shards and replicas share for reading in place: 1-D uint8, `layout.total`
    bytes.
    """
    low = [s.dtype for s in plan.layout.sections if s.kind == "parameter" and s.dtype in LOW]
    if low:
        raise UsageError(
            f"--read-in-place: {low[0]} parameters have float32 masters on the shards, which cannot be read in place; "
            "leave it off"
        )
    return memory(plan.layout.total)
