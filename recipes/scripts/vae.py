"""A variational autoencoder of digits, with Adam."""

import time

import data
import torch
from torch import nn
from torch.nn.functional import binary_cross_entropy_with_logits
from torch.utils.data import DataLoader


class Autoencoder(nn.Module):
    """Autoencoder from digits to the mean and log variance of 8 numbers, and back."""

    def __init__(self):
        super().__init__()
        self.encode = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 16))
        self.decode = nn.Sequential(nn.Linear(8, 128), nn.ReLU(), nn.Linear(128, 64))

    def forward(self, images):
        mean, log_variance = self.encode(images).chunk(2, dim=1)
        chosen = mean + torch.randn_like(mean) * (log_variance / 2).exp()
        return self.decode(chosen), mean, log_variance


def loss_of(model, images):
    """Return the negative lower bound of a digit, in nats."""
    logits, mean, log_variance = model(images)
    likeness = binary_cross_entropy_with_logits(logits, images, reduction="sum")
    return (likeness - 0.5 * (1 + log_variance - mean**2 - log_variance.exp()).sum()) / len(images)


[seed] = data.arguments(seed=int)
torch.manual_seed(seed)
train, test = data.digits()
model = Autoencoder()
optimizer = torch.optim.Adam(model.parameters(), lr=2e-3)
loader = DataLoader(train, batch_size=32, shuffle=True)
seen, began = 0, time.perf_counter()
for _ in range(30):
    for images, _classes in loader:
        optimizer.zero_grad()
        loss = loss_of(model, images)
        loss.backward()
        optimizer.step()
        seen += len(images)
rate = seen / (time.perf_counter() - began)
with torch.no_grad():
    loss = loss_of(model, test.tensors[0]).item()
print(f"metric {loss:.4f} rate {rate:.0f}")
