"""The settings of the plain loop that are its own."""

from __future__ import annotations

from typing import ClassVar

from distbelief.core.settings import Holder, StrategySettings


class SingleSettings(StrategySettings, frozen=True, kw_only=True):
    """Whoever trains holds the parameters."""

    held_by: ClassVar[Holder] = Holder.REPLICAS
    deals_to_any: ClassVar[str] = "has one replica, which has all the data: use downpour or synchronous"
    one_reader: ClassVar[bool] = True
