"""A ResNet-18, a quarter as wide, on MNIST's digits, which two workers of the loader shift at random."""

import time
from itertools import pairwise

import data
import torch
from torch import nn
from torch.nn.functional import cross_entropy, relu
from torch.utils.data import DataLoader, Dataset

import distbelief as db


class Block(nn.Module):
    """Two convolutions with a shortcut past them."""

    def __init__(self, before, width, stride):
        super().__init__()
        self.one = nn.Conv2d(before, width, 3, stride, 1, bias=False)
        self.two = nn.Conv2d(width, width, 3, 1, 1, bias=False)
        self.norm, self.last = nn.BatchNorm2d(width), nn.BatchNorm2d(width)
        self.past = nn.Sequential()
        if stride > 1 or before != width:
            self.past = nn.Sequential(nn.Conv2d(before, width, 1, stride, bias=False), nn.BatchNorm2d(width))

    def forward(self, images):
        return relu(self.last(self.two(relu(self.norm(self.one(images))))) + self.past(images))


class Shifted(Dataset):
    """Images, each moved by up to two pixels whenever it is read."""

    def __init__(self, images):
        self.images = images

    def __len__(self):
        return len(self.images)

    def __getitem__(self, number):
        image, target = self.images[number]
        return image.roll(torch.randint(-2, 3, (2,)).tolist(), (1, 2)), target


seed, batch_size = data.arguments(seed=int, batch_size=int)
torch.manual_seed(seed)
train, test = data.mnist(samples=4000)
blocks = []
for before, width in pairwise((16, 16, 32, 64, 128)):
    blocks += [Block(before, width, 1 if before == width else 2), Block(width, width, 1)]
model = nn.Sequential(
    nn.Conv2d(1, 16, 3, 2, 1, bias=False), nn.BatchNorm2d(16), nn.ReLU(), *blocks,
    nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(128, 10),
)  # fmt: skip
replica = db.join()
optimizer = replica.optimizer(model)
loader = DataLoader(Shifted(train), batch_size=batch_size, shuffle=True, num_workers=2)
seen, began = 0, time.perf_counter()
for _ in replica.epochs(3):
    for images, classes in replica.batches(loader):
        optimizer.zero_grad()
        loss = cross_entropy(model(images), classes)
        loss.backward()
        optimizer.step()
        seen += len(images)
rate = seen / (time.perf_counter() - began)
model.eval()
with torch.no_grad():
    images, classes = (part[:2000] for part in test.tensors)
    accuracy = (model(images).argmax(1) == classes).float().mean().item()
print(f"metric {accuracy:.4f} rate {rate:.0f}")
