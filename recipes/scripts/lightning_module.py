"""A convolutional network on MNIST as a LightningModule, trained by Lightning's Trainer."""

import time

import data
import torch
from lightning.pytorch import LightningModule, Trainer, seed_everything
from torch import nn
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader


class Classifier(LightningModule):
    """Two convolutions, Adam, and a rate that falls."""

    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(
            nn.Conv2d(1, 16, 3, stride=2), nn.ReLU(), nn.Conv2d(16, 32, 3, stride=2), nn.ReLU(),
            nn.Flatten(), nn.Linear(1152, 64), nn.ReLU(), nn.Linear(64, 10),
        )  # fmt: skip

    def training_step(self, batch, _):
        return cross_entropy(self.net(batch[0]), batch[1])

    def configure_optimizers(self):
        optimizer = torch.optim.Adam(self.parameters(), lr=2e-3)
        return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, step_size=1, gamma=0.7)]


seed, batch_size = data.arguments(seed=int, batch_size=int)
seed_everything(seed, verbose=False)
train, test = data.mnist(samples=20_000)
model = Classifier()
quiet = dict.fromkeys(("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary"), False)
trainer = Trainer(accelerator="cpu", devices=1, max_epochs=3, **quiet)
began = time.perf_counter()
trainer.fit(model, DataLoader(train, batch_size, shuffle=True))
rate = 3 * len(train) / trainer.world_size / (time.perf_counter() - began)
with torch.no_grad():
    images, classes = test.tensors
    accuracy = (model.net(images).argmax(1) == classes).float().mean().item()
print(f"metric {accuracy:.4f} rate {rate:.0f}")
