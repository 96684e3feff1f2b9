"""Models that are split over processes: what a user says of that, and how layers of his own are divided.

>>> from torch import nn
>>> class Scaled(nn.Module):
...     def __init__(self, features: int) -> None:
...         super().__init__()
...         self.factor = nn.Parameter(torch.ones(features))
...     def forward(self, x):
...         return x * self.factor
>>> import torch
>>> def features(call: LayerCall):  # what a partition gives of dimension 1 needs the same of what the layer takes
...     return call.sections(1, lambda start, stop: (1, start, stop), {"factor": 0}, lambda start, stop: {})
>>> register(Scaled, "columns", features)
"""

from distbelief.split.options import Split
from distbelief.split.registry import LayerCall, register

__all__ = ["LayerCall", "Split", "register"]
