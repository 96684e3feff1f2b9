"""Models split over processes: the split of a model, and rules that divide a user's own layers.

>>> from torch import nn
>>> class Scaled(nn.Module):
...     def __init__(self, features: int) -> None:
...         super().__init__()
...         self.factor = nn.Parameter(torch.ones(features))
...     def forward(self, x):
...         return x * self.factor
>>> import torch
>>> def features(call: LayerCall):  # a run of output columns needs the same input columns
...     return call.sections(1, lambda start, stop: (1, start, stop), {"factor": 0}, lambda start, stop: {})
>>> register(Scaled, "columns", features)
"""

from distbelief.split.options import Split
from distbelief.split.registry import LayerCall, register

__all__ = ["LayerCall", "Split", "register"]
