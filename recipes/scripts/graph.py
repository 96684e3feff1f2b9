"""A graph convolution that finds the community of each node from the features of its neighbours."""

import time

import data
import torch
from torch import nn
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader


class Convolution(nn.Module):
    """Two graph convolutions, from features of nodes to scores of their communities."""

    def __init__(self, features, classes):
        super().__init__()
        self.first, self.second = nn.Linear(features, 32), nn.Linear(32, classes)

    def forward(self, graph, features):
        return self.second(graph @ torch.relu(self.first(graph @ features)))


seed, batch_size = data.arguments(seed=int, batch_size=int)
torch.manual_seed(seed)
graph, features, train, test = data.communities(nodes=1200, classes=6)
model = Convolution(features.shape[1], classes=6)
optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
loader = DataLoader(train, batch_size=batch_size, shuffle=True)
seen, began = 0, time.perf_counter()
for _ in range(30):
    for nodes, classes in loader:
        optimizer.zero_grad()
        loss = cross_entropy(model(graph, features)[nodes], classes)
        loss.backward()
        optimizer.step()
        seen += len(nodes)
rate = seen / (time.perf_counter() - began)
with torch.no_grad():
    nodes, classes = test.tensors
    accuracy = (model(graph, features)[nodes].argmax(1) == classes).float().mean().item()
print(f"metric {accuracy:.4f} rate {rate:.0f}")
