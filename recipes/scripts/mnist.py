"""A convolutional network on MNIST, with Adadelta, whose rate falls after each epoch."""

import time

import data
import torch
from torch import nn
from torch.nn.functional import cross_entropy
from torch.optim.lr_scheduler import StepLR
from torch.utils.data import DataLoader

[seed] = data.arguments(seed=int)
torch.manual_seed(seed)
train, test = data.mnist(samples=20_000)
model = nn.Sequential(
    nn.Conv2d(1, 16, 3, stride=2), nn.ReLU(), nn.Conv2d(16, 32, 3, stride=2), nn.ReLU(), nn.Dropout(0.25),
    nn.Flatten(), nn.Linear(1152, 64), nn.ReLU(), nn.Linear(64, 10),
)  # fmt: skip
optimizer = torch.optim.Adadelta(model.parameters(), lr=1.0)
schedule = StepLR(optimizer, step_size=1, gamma=0.7)
loader = DataLoader(train, batch_size=64, shuffle=True)
seen, began = 0, time.perf_counter()
for _ in range(3):
    model.train()
    for images, classes in loader:
        optimizer.zero_grad()
        loss = cross_entropy(model(images), classes)
        loss.backward()
        optimizer.step()
        seen += len(images)
    schedule.step()
rate = seen / (time.perf_counter() - began)
model.eval()
with torch.no_grad():
    images, classes = test.tensors
    accuracy = (model(images).argmax(1) == classes).float().mean().item()
print(f"metric {accuracy:.4f} rate {rate:.0f}")
