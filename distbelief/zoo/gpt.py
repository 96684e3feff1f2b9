"""The task `gpt-tiny`: a small transformer that predicts the next character in the documents of Python itself."""

from __future__ import annotations

from functools import lru_cache, partial

import torch
from torch import Tensor, nn

from distbelief.errors import DataError
from distbelief.tasks.digits import sequential
from distbelief.tasks.task import Task, TensorData

ALPHABET = "\n" + "".join(map(chr, range(32, 127)))
"""Characters of a text; others become question marks."""
CONTEXT = 64
"""Characters in a sample."""
WIDTH, HEADS, BLOCKS = 64, 4, 2
TENTH = 10
"""One sample in ten is for the test."""


class Attention(nn.Module):
    """Causal attention with several heads; input and output float32 of shape (n, context, width)."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.query = nn.Linear(width, width)
        self.key = nn.Linear(width, width)
        self.value = nn.Linear(width, width)
        self.project = nn.Linear(width, width)

    def forward(self, states: Tensor) -> Tensor:
        """Attend from each character to those before it."""
        query, key, value = (
            part(states).unflatten(-1, (self.heads, -1)).transpose(1, 2) for part in (self.query, self.key, self.value)
        )
        attended = nn.functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        projected: Tensor = self.project(attended.transpose(1, 2).flatten(2))
        return projected


class Block(nn.Module):
    """A transformer block: attention and two layers, each after a normalisation and beside a skip connection."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(width)
        self.attention = Attention(width, heads)
        self.norm2 = nn.LayerNorm(width)
        self.mlp = sequential(fc1=nn.Linear(width, 4 * width), gelu=nn.GELU(), fc2=nn.Linear(4 * width, width))

    def forward(self, states: Tensor) -> Tensor:
        """Compute the states after the block, of the same shape."""
        states = states + self.attention(self.norm1(states))
        out: Tensor = states + self.mlp(self.norm2(states))
        return out


class TinyGPT(nn.Module):
    """A transformer whose last layer is its embedding (Press and Wolf 2017): `head.weight` is `token.weight`.

    Input int64 of shape (n, CONTEXT), indices of characters; output float32 of shape (n, CONTEXT, len(ALPHABET)).
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
        """Compute the scores of the next character, at each position."""
        scores: Tensor = self.head(self.norm(self.blocks(self.token(characters) + self.position)))
        return scores


def python_help() -> str:
    """Read the text of Python's `help()` on its topics, or raise a `DataError`."""
    try:
        from pydoc_data.topics import topics  # half a megabyte
    except ImportError as error:
        raise DataError(
            f"task 'gpt-tiny' reads Python's documents for help(), which are missing ({error}): install all of "
            "Python's standard library"
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
    """Compute the mean cross-entropy of all characters of a minibatch, in nats.

    >>> next_character(torch.zeros(2, 3, 4), torch.zeros(2, 3, dtype=torch.int64))
    tensor(1.3863)
    """
    return nn.functional.cross_entropy(output.flatten(0, 1), target.flatten())


def foreseen(output: Tensor, target: Tensor) -> Tensor:
    """Count the correctly predicted characters, in samples.

    >>> foreseen(torch.eye(4)[None], torch.tensor([[0, 1, 0, 0]]))
    tensor(0.5000)
    """
    return (output.argmax(-1) == target).float().mean(1).sum()


def gpt_tiny() -> Task:
    """Make the task of a transformer of two blocks with tied weights (110,336 parameters) that predicts characters.

    The data are the topics of Python's `help()`, half a million characters. Inputs and targets are int64 of shape
    (n, 64), the targets one character ahead. The accuracy is that of single characters.

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
