"""Time sequences: an LSTM learns the next value of waves by L-BFGS, and continues waves that it has not seen."""

import data
from torch import nn
from torch.nn.functional import mse_loss

import distbelief as db

ITERATIONS = 40


class Ahead(nn.Module):
    """Model that predicts the value after each value of a wave."""

    def __init__(self):
        super().__init__()
        self.lstm, self.out = nn.LSTM(1, 32, num_layers=2, batch_first=True), nn.Linear(32, 1)

    def forward(self, values):
        return self.out(self.lstm(values[..., None])[0])[..., 0]


def pairs(count, seed):
    """Return waves, and the same waves one step later."""
    waves = data.waves(count, 101, seed)
    return waves[:, :-1], waves[:, 1:]


def ahead():
    """Return the task, which each process makes by its name."""
    return db.Task(
        model=Ahead, train=lambda: pairs(96, seed=0), test=lambda: pairs(32, seed=1), loss=mse_loss, metric=None
    )


if __name__ == "__main__":
    batch = db.Sandblaster(replicas=2, shards=1, iterations=ITERATIONS, portion_size=12, send_every=1)
    seed, out = data.arguments(seed=int, out=str)
    job = db.Job("sequence_distributed:ahead", batch, seed=seed, evaluate_every=ITERATIONS, out=out)
    result = db.run(job, view=db.View(quiet=True))
    print(f"metric {result['test_loss']:.6f} rate {result['samples_per_second']:.0f}")
