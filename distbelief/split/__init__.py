"""Models split over processes: the split of a model, and rules that divide a user's own layers."""

from distbelief.split.options import Split
from distbelief.split.registry import LayerCall, register

__all__ = ["LayerCall", "Split", "register"]
