"""The task `gpt-tiny`: a small transformer that says which character comes next, on the documents of Python itself."""

from __future__ import annotations

from collections import OrderedDict
from functools import lru_cache, partial

import torch
from torch import Tensor, nn

from distbelief.errors import DataError
from distbelief.tasks.task import Task, TensorData

ALPHABET = "\n" + "".join(map(chr, range(32, 127)))
"""Characters of a text; any other is a question mark."""
CONTEXT = 64
"""Characters of a sample."""
WIDTH, HEADS, BLOCKS = 64, 4, 2
TENTH = 10
"""One sample in so many is for the test."""


class Attention(nn.Module):
    """Each character looks at those before it, with several heads; float32 of shape (n, context, width) in and out."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.query = nn.Linear(width, width)
        self.key = nn.Linear(width, width)
        self.value = nn.Linear(width, width)
        self.project = nn.Linear(width, width)

    def forward(self, states: Tensor) -> Tensor:
        """Return what attention gathers for each character."""
        query, key, value = (
            part(states).unflatten(-1, (self.heads, -1)).transpose(1, 2) for part in (self.query, self.key, self.value)
        )
        found = nn.functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        projected: Tensor = self.project(found.transpose(1, 2).flatten(2))
        return projected


class Block(nn.Module):
    """Attention and two layers, each beside a connection that skips it, behind a normalisation."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(width)
        self.attention = Attention(width, heads)
        self.norm2 = nn.LayerNorm(width)
        self.mlp = nn.Sequential(
            OrderedDict(fc1=nn.Linear(width, 4 * width), gelu=nn.GELU(), fc2=nn.Linear(4 * width, width))
        )

    def forward(self, states: Tensor) -> Tensor:
        """The states after the block, of the same shape."""
        states = states + self.attention(self.norm1(states))
        out: Tensor = states + self.mlp(self.norm2(states))
        return out


class TinyGPT(nn.Module):
    """A transformer whose last layer is its embedding (Press and Wolf 2017): `head.weight` is `token.weight`.

    Input int64 of shape (n, CONTEXT), numbers of characters; output float32 of shape (n, CONTEXT, len(ALPHABET)).
    """

    def __init__(self) -> None:
        super().__init__()
        self.token = nn.Embedding(len(ALPHABET), WIDTH)
        self.position = nn.Parameter(torch.empty(CONTEXT, WIDTH))
        self.blocks = nn.Sequential(*(Block(WIDTH, HEADS) for _ in range(BLOCKS)))
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, len(ALPHABET), bias=False)
        self.head.weight = self.token.weight
        for parameter in (self.token.weight, self.position):
            nn.init.normal_(parameter, std=0.02)

    def forward(self, characters: Tensor) -> Tensor:
        """The scores of each character to come next, after each one."""
        scores: Tensor = self.head(self.norm(self.blocks(self.token(characters) + self.position)))
        return scores


def python_help() -> str:
    """Read the text of Python's `help()` on its topics.

    Raises:
        DataError: it is not here.
    """
    try:
        from pydoc_data.topics import topics  # half a megabyte, for this task only
    except ImportError as error:
        raise DataError(
            f"task 'gpt-tiny' reads the documents that Python brings for help(), which are not here ({error}): install "
            "all of Python's standard library"
        ) from error
    return "\n".join(topics[name] for name in sorted(topics))


@lru_cache(maxsize=1)
def _text() -> Tensor:
    known = {character: number for number, character in enumerate(ALPHABET)}
    return torch.tensor([known.get(character, known["?"]) for character in python_help()])


def _load(test: bool) -> TensorData:
    text = _text()
    windows = text[: (len(text) - 1) // CONTEXT * CONTEXT + 1].unfold(0, CONTEXT + 1, CONTEXT)
    mine = (torch.arange(len(windows)) % TENTH == 0) == test
    return TensorData(windows[mine, :-1], windows[mine, 1:])


def next_character(output: Tensor, target: Tensor) -> Tensor:
    """The cross-entropy of all characters of a minibatch: the mean, in nats.

    >>> next_character(torch.zeros(2, 3, 4), torch.zeros(2, 3, dtype=torch.int64))
    tensor(1.3863)
    """
    return nn.functional.cross_entropy(output.flatten(0, 1), target.flatten())


def foreseen(output: Tensor, target: Tensor) -> Tensor:
    """Count the samples' worth of characters that have the greatest score.

    >>> foreseen(torch.eye(4)[None], torch.tensor([[0, 1, 0, 0]]))
    tensor(0.5000)
    """
    return (output.argmax(-1) == target).float().mean(1).sum()


def gpt_tiny() -> Task:
    """A transformer of two blocks with skips and tied weights (110,336 parameters) that foresees the next character.

    It reads what Python's own `help()` says of its topics, half a million characters: inputs and targets are int64 of
    shape (n, 64), the latter a character on; one sample in ten is for the test. The accuracy is that of single
    characters.

    >>> sum(p.numel() for p in gpt_tiny().model().parameters())
    110336
    """
    return Task(
        model=TinyGPT,
        train=partial(_load, test=False),
        test=partial(_load, test=True),
        loss=next_character,
        metric=foreseen,
    ).named("gpt-tiny")
