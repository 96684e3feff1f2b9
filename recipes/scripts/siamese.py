"""A siamese network on triples of digits: each is to be nearer to one of its class than to one of another."""

import time

import data
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset


class Triples(Dataset):
    """Each digit, with another of its class and one of another class, drawn at random."""

    def __init__(self, digits):
        self.images, self.classes = digits.tensors
        self.of = [(self.classes == one).nonzero().flatten() for one in range(10)]

    def __len__(self):
        return len(self.images)

    def __getitem__(self, number):
        own = int(self.classes[number])
        other = (own + int(torch.randint(1, 10, ()))) % 10
        chosen = [self.of[one][torch.randint(len(self.of[one]), ())] for one in (own, other)]
        return self.images[number], self.images[chosen[0]], self.images[chosen[1]]


[seed] = data.arguments(seed=int)
torch.manual_seed(seed)
train, test = data.digits()
model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 16))
optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
nearer = nn.TripletMarginLoss(margin=1.0)
triples = DataLoader(Triples(train), batch_size=32, shuffle=True)
seen, began = 0, time.perf_counter()
for _ in range(10):
    for images, same, different in triples:
        optimizer.zero_grad()
        loss = nearer(model(images), model(same), model(different))
        loss.backward()
        optimizer.step()
        seen += len(images)
rate = seen / (time.perf_counter() - began)
torch.manual_seed(0)
with torch.no_grad():
    images, same, different = (model(one) for one in next(iter(DataLoader(Triples(test), batch_size=360))))
    right = ((images - same).norm(dim=1) < (images - different).norm(dim=1)).float().mean().item()
print(f"metric {right:.4f} rate {rate:.0f}")
