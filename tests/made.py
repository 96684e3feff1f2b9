"""Settings and numbers of a job for tests that need no job, and what its machines say."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import fields
from hashlib import blake2b
from pathlib import Path
from typing import Any

import torch

from distbelief.core.effects import Effect, Send
from distbelief.core.messages import Message
from distbelief.core.settings import Settings, SharedOptions
from distbelief.sharding.layout import Layout, Range, Tensor, lay_out
from distbelief.strategies import STRATEGIES

TENSORS = (
    Tensor("weight", (5, 7), "float32"), Tensor("other", (3,), "float32", group=1), Tensor("half", (9,), "bfloat16"),
    Tensor("mean", (4,), "float32", "buffer"), Tensor("frozen", (2,), "float32", "frozen"),
)  # fmt: skip
"""Of every kind, in two dtypes and two groups."""


def made(strategy: str = "downpour", **options: Any) -> Settings:
    """Settings of a strategy by name, from options by name; the others have their defaults."""
    shared = {one.name: options.pop(one.name) for one in fields(SharedOptions) if one.name in options}
    return Settings(strategy=STRATEGIES[strategy](**options), **shared)


def mixed(**group: Any) -> Layout:
    """The layout of these tensors, with options of the second group."""
    return lay_out(TENSORS, groups=({}, group))


def numbers(layout: Layout, part: Range, seed: int) -> torch.Tensor:
    """Bytes of a range that are finite numbers in every dtype of the layout."""
    values = torch.zeros(layout.total, dtype=torch.uint8)
    chance = torch.Generator().manual_seed(seed)
    for section in layout.sections_in(Range(0, layout.total)):
        view = values[section.start : section.stop].view(getattr(torch, section.dtype))
        view.copy_(torch.randn(view.shape, generator=chance))
    return values[part.start : part.stop].clone()


def sends(effects: Iterable[Effect], kind: type[Message] = Message) -> list[Any]:
    """What of effects sends a message of a kind."""
    return [one for one in effects if isinstance(one, Send) and isinstance(one.message, kind)]


def processor() -> str:
    """What decides how this machine rounds: torch, its instruction set, and the processor's model and flags."""
    # instruction sets that torch does not name (AMX) change its matrix products too
    lines = dict.fromkeys(Path("/proc/cpuinfo").read_text().splitlines())
    facts = [line for line in lines if line.startswith(("model\t", "flags"))]
    digest = blake2b("\n".join(facts).encode(), digest_size=4).hexdigest()
    return f"torch {torch.__version__}, {torch.backends.cpu.get_cpu_capability()}, {digest}"
