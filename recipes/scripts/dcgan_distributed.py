"""A DCGAN of digits: a generator and a discriminator, each with its Adam."""

import time

import data
import torch
from torch import nn
from torch.nn.functional import softplus

import distbelief as db


def generator():
    """Build the generator, from 16 random numbers to a digit of (1, 8, 8)."""
    return nn.Sequential(
        nn.ConvTranspose2d(16, 32, 2, bias=False), nn.BatchNorm2d(32), nn.ReLU(),
        nn.ConvTranspose2d(32, 16, 4, 2, 1, bias=False), nn.BatchNorm2d(16), nn.ReLU(),
        nn.ConvTranspose2d(16, 1, 4, 2, 1), nn.Sigmoid(),
    )  # fmt: skip


def discriminator():
    """Build the discriminator, from a digit to a score of how real it looks."""
    return nn.Sequential(
        nn.Conv2d(1, 16, 4, 2, 1), nn.LeakyReLU(0.2),
        nn.Conv2d(16, 32, 4, 2, 1, bias=False), nn.BatchNorm2d(32), nn.LeakyReLU(0.2),
        nn.Conv2d(32, 1, 2), nn.Flatten(0),
    )  # fmt: skip


def root(matrix):
    """Return the root of a symmetric matrix that is positive up to rounding."""
    values, vectors = torch.linalg.eigh(matrix)
    return vectors * values.clamp(min=0).sqrt() @ vectors.T


def distance(made, real):
    """The Fréchet distance of two samples of digits, as if their pixels were normally distributed."""
    (mean, spread), (other, wanted) = ((one.mean(0), one.T.cov()) for one in (made.double(), real.double()))
    half = root(wanted)
    return ((mean - other) ** 2).sum() + (spread + wanted - 2 * root(half @ spread @ half)).trace()


[seed] = data.arguments(seed=int)
torch.manual_seed(seed)
train, test = data.digits()
make, judge = generator(), discriminator()
replica = db.join()
of_make = replica.optimizer(make, optim=db.optim("adam", lr=2e-3, betas=(0.5, 0.999)))
of_judge = replica.optimizer(judge, optim=db.optim("adam", lr=1e-3, betas=(0.5, 0.999)))
seen, began = 0, time.perf_counter()
for _ in replica.epochs(10):
    for images, _classes in replica.batches(train, 16):
        real, made = images.reshape(-1, 1, 8, 8), make(torch.randn(len(images), 16, 1, 1))
        of_judge.zero_grad()
        (softplus(-judge(real)) + softplus(judge(made.detach()))).mean().backward()
        of_judge.step()
        of_make.zero_grad()
        softplus(-judge(made)).mean().backward()
        of_make.step()
        seen += len(images)
rate = seen / (time.perf_counter() - began)
make.eval()
with torch.no_grad():
    found = distance(make(torch.randn(2000, 16, 1, 1)).reshape(-1, 64), test.tensors[0])
print(f"metric {found:.4f} rate {rate:.0f}")
