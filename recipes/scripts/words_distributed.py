"""A language model of words, whose hidden state is carried from one piece of the text to the next."""

import time

import data
import torch
from torch import nn
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader

import distbelief as db


class Words(nn.Module):
    """Model that scores the word after each word."""

    def __init__(self, vocabulary):
        super().__init__()
        self.embed, self.gru = nn.Embedding(vocabulary, 64), nn.GRU(64, 128)
        self.decode = nn.Linear(128, vocabulary)

    def forward(self, words, hidden):
        out, hidden = self.gru(self.embed(words), hidden)
        return self.decode(out).flatten(0, 1), hidden


seed, columns = data.arguments(seed=int, columns=int)
torch.manual_seed(seed)
train, test = data.words(samples=60_000, vocabulary=1000)
model = Words(vocabulary=1000)
replica = db.join()
optimizer = replica.optimizer(model)
loader = DataLoader(data.pieces(train, columns=columns, length=20), batch_size=1)
seen, began = 0, time.perf_counter()
for _ in replica.epochs(3):
    hidden = None
    for (words,) in replica.batches(loader, order="sequential"):
        optimizer.zero_grad()
        scores, hidden = model(words[:-1], hidden)
        loss = cross_entropy(scores, words[1:].flatten())
        loss.backward()
        optimizer.step()
        hidden = hidden.detach()
        seen += len(scores)
rate = seen / (time.perf_counter() - began)
with torch.no_grad():
    words = data.pieces(test, columns=1, length=len(test) - 1)[0]
    perplexity = cross_entropy(model(words[:-1], None)[0], words[1:].flatten()).exp().item()
print(f"metric {perplexity:.4f} rate {rate:.0f}")
