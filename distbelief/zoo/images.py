"""Synthetic images of ImageNet's shape, in 1000 classes, that follow from a seed without a file."""

from __future__ import annotations

import torch
from torch import Tensor

from distbelief.tasks.task import TensorData

CLASSES, SIDE = 1_000, 224
SAMPLES, TEST_SAMPLES = 1_024, 256
COARSE, FINE = 7, 28
"""Blocks on a side of what a class looks like, and of what an image is kept as."""
NOISE = 32.0
"""Deviation of an image's blocks from its class's, of 255."""


def draw(test: bool) -> TensorData:
    """1,024 images to train on, or 256 to test: inputs float32 (n, 3, 224, 224), targets int64 (n,).

    A class is a pattern of 7x7 colours, and each sample has noise of its own.

    >>> draw(test=True).batch(torch.tensor([3]))[0].shape
    torch.Size([1, 3, 224, 224])
    """
    patterns = torch.randint(256, (CLASSES, 3, COARSE, COARSE), generator=torch.Generator().manual_seed(0))
    chance, samples = torch.Generator().manual_seed(1 + test), TEST_SAMPLES if test else SAMPLES
    labels = torch.randint(CLASSES, (samples,), generator=chance)
    noise = NOISE * torch.randn(samples, 3, FINE, FINE, generator=chance)
    images = (_enlarge(patterns[labels], FINE) + noise).clamp(0, 255).byte()
    return TensorData(images, labels, _prepare)


def _prepare(images: Tensor) -> Tensor:
    """Blocks as bytes to pixels as float32 of about mean 0 and deviation 1."""
    return _enlarge(images.float().sub_(127.5).div_(74.0), SIDE)


def _enlarge(images: Tensor, side: int) -> Tensor:
    times = side // images.shape[-1]
    return images.repeat_interleave(times, -1).repeat_interleave(times, -2)
