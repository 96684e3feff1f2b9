"""A classifier of an endless stream of randomly moved digits, trained with Adam."""

import time

import data
import torch
from torch import nn
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, IterableDataset


class Moved(IterableDataset):
    """Endless digits, each drawn at random and moved by at most one pixel."""

    def __init__(self, digits, seed):
        self.digits, self.chance = digits, torch.Generator().manual_seed(seed)

    def __iter__(self):
        while True:
            number, *by = torch.randint(1 << 30, (3,), generator=self.chance).tolist()
            image, digit = self.digits[number % len(self.digits)]
            yield image.view(8, 8).roll([one % 3 - 1 for one in by], (0, 1)).flatten(), digit


seed, batch_size = data.arguments(seed=int, batch_size=int)
torch.manual_seed(seed)
train, test = data.digits()
model = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 64), nn.ReLU(), nn.Linear(64, 10))
optimizer = torch.optim.Adam(model.parameters(), lr=2e-3)
loader = DataLoader(Moved(train, seed=seed), batch_size=batch_size)
seen, began = 0, time.perf_counter()
for images, digits in loader:
    optimizer.zero_grad()
    loss = cross_entropy(model(images), digits)
    loss.backward()
    optimizer.step()
    seen += len(images)
    if seen >= 60_000:
        break
rate = seen / (time.perf_counter() - began)
with torch.no_grad():
    images, digits = test.tensors
    accuracy = (model(images).argmax(1) == digits).float().mean().item()
print(f"metric {accuracy:.4f} rate {rate:.0f}")
