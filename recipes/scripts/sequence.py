"""Time sequences: an LSTM learns the next value of waves by L-BFGS, and continues waves that it has not seen."""

import time

import data
import torch
from torch import nn
from torch.nn.functional import mse_loss

ITERATIONS = 40


class Ahead(nn.Module):
    """Model that predicts the value after each value of a wave."""

    def __init__(self):
        super().__init__()
        self.lstm, self.out = nn.LSTM(1, 32, num_layers=2, batch_first=True), nn.Linear(32, 1)

    def forward(self, values):
        return self.out(self.lstm(values[..., None])[0])[..., 0]


[seed] = data.arguments(seed=int)
torch.manual_seed(seed)
model = Ahead()
train, test = data.waves(96, 101, seed=0), data.waves(32, 101, seed=1)
optimizer = torch.optim.LBFGS(model.parameters(), max_iter=ITERATIONS, line_search_fn="strong_wolfe")
seen, began = 0, time.perf_counter()


def evaluate():
    """Return the loss on all waves, and compute its gradient."""
    global seen
    optimizer.zero_grad()
    loss = mse_loss(model(train[:, :-1]), train[:, 1:])
    loss.backward()
    seen += len(train)
    return loss


optimizer.step(evaluate)
rate = seen / (time.perf_counter() - began)
with torch.no_grad():
    error = mse_loss(model(test[:, :-1]), test[:, 1:]).item()
print(f"metric {error:.6f} rate {rate:.0f}")
