"""A user's own training loop under Downpour: four lines away from the plain PyTorch script.

distbelief launch downpour --replicas 2 --optimizer adagrad --lr 0.02 --epochs 1 recipes/own_loop.py
"""

import torch.nn.functional as F
from torch import nn

import distbelief as db

model = nn.Sequential(nn.Linear(784, 300), nn.ReLU(), nn.Linear(300, 100), nn.ReLU(), nn.Linear(100, 10))
dataset = db.tasks.mnist().train()

replica = db.join()
optimizer = replica.optimizer(model)
for inputs, targets in replica.batches(dataset, batch_size=64):
    optimizer.zero_grad()
    loss = F.cross_entropy(model(inputs), targets)
    loss.backward()
    optimizer.step()
    replica.report(loss=loss)
