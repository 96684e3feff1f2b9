"""Arithmetic in which gradients are computed."""

from __future__ import annotations

from torch import nn

from distbelief.core.settings import PRECISIONS, fixed_point_bits
from distbelief.tasks.arithmetic.autocast import Autocast
from distbelief.tasks.arithmetic.fixed_point import FixedPoint


def arithmetic_of(name: str, model: nn.Module) -> Autocast | FixedPoint:
    """Build the arithmetic of a model's gradients, by the name in `Settings.arithmetic`."""
    bits = None if name in PRECISIONS else fixed_point_bits(name)
    return FixedPoint(bits.products) if bits else Autocast(name, model)
