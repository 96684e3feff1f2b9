"""A small GPT on words: two causal transformer layers, a loader with a worker, and clipped gradients."""

import time

import data
import torch
from torch import nn
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader

import distbelief as db

LENGTH = 32


class Gpt(nn.Module):
    """Model that scores the word after each word, from all words up to it."""

    def __init__(self, vocabulary):
        super().__init__()
        self.embed, self.place = nn.Embedding(vocabulary, 64), nn.Embedding(LENGTH, 64)
        layer = nn.TransformerEncoderLayer(64, 4, 256, dropout=0.0, batch_first=True, norm_first=True)
        self.layers = nn.TransformerEncoder(layer, 2, nn.LayerNorm(64), enable_nested_tensor=False)
        self.decode = nn.Linear(64, vocabulary, bias=False)
        self.decode.weight = self.embed.weight

    def forward(self, words):
        mask = nn.Transformer.generate_square_subsequent_mask(LENGTH)
        read = self.embed(words) + self.place(torch.arange(LENGTH))
        return self.decode(self.layers(read, mask, is_causal=True)).flatten(0, 1)


seed, batch_size = data.arguments(seed=int, batch_size=int)
torch.manual_seed(seed)
train, test = data.words(samples=60_000, vocabulary=1000)
model = Gpt(vocabulary=1000)
replica = db.join()
optimizer = replica.optimizer(model)
loader = DataLoader(train.unfold(0, LENGTH + 1, LENGTH), batch_size, shuffle=True, num_workers=1)
seen, began = 0, time.perf_counter()
for _ in replica.epochs(4):
    for words in replica.batches(loader):
        optimizer.zero_grad()
        loss = cross_entropy(model(words[:, :-1]), words[:, 1:].flatten())
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        seen += len(words)
rate = seen / (time.perf_counter() - began)
with torch.no_grad():
    words = test.unfold(0, LENGTH + 1, LENGTH)
    perplexity = cross_entropy(model(words[:, :-1]), words[:, 1:].flatten()).exp().item()
print(f"metric {perplexity:.4f} rate {rate:.0f}")
