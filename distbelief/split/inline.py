"""All homes of a split model in one process, turn by turn: for oracles, and where no time passes."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence

import torch

from distbelief.errors import LocalProtocolError
from distbelief.schedules.pipeline import Pass
from distbelief.split.graph import Transfer
from distbelief.split.play import Give, HomeResult, HomeStory, Take

Carried = tuple[Transfer, int, Pass]


def play(stories: Sequence[HomeStory], seen: Callable[[Give], None] | None = None) -> list[HomeResult]:
    """Play the stories of all homes to their ends.

    Args:
        stories: of each home.
        seen: is told of everything that leaves a home.

    Raises:
        LocalProtocolError: all wait for each other.
    """
    lines: dict[Carried, deque[torch.Tensor]] = {}
    waiting: dict[int, Take | None] = dict.fromkeys(range(len(stories)))
    results: dict[int, HomeResult] = {}
    while len(results) < len(stories):
        moved = False
        for home in list(waiting):
            answer: torch.Tensor | None = None
            if (wanted := waiting[home]) is not None:
                line = lines.get((wanted.transfer, wanted.microbatch, wanted.direction))
                if not line:
                    continue
                answer = line.popleft()
            moved = True
            try:
                effect = stories[home].send(answer)
                while not isinstance(effect, Take):
                    if isinstance(effect, Give):
                        key = effect.transfer, effect.microbatch, effect.direction
                        lines.setdefault(key, deque()).append(effect.tensor)
                        if seen:
                            seen(effect)
                    effect = stories[home].send(None)
                waiting[home] = effect
            except StopIteration as end:
                results[home] = end.value
                del waiting[home]
        if not moved:
            raise LocalProtocolError(f"all homes wait for each other: {waiting}")
    return [results[home] for home in range(len(stories))]
