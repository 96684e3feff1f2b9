"""Settings of a job for tests that need no job."""

from __future__ import annotations

from dataclasses import fields
from typing import Any

import msgspec

from distbelief.core.learning_rate import LearningRate
from distbelief.core.settings import DataSettings, Settings
from distbelief.strategies import STRATEGIES


def made(strategy: str = "downpour", **options: Any) -> Settings:
    """Settings of a strategy by name, from options by name; the others have their defaults."""
    kind = STRATEGIES[strategy]
    data, rate, whole = [
        {name: options.pop(name) for name in struct.__struct_fields__ if name in options}
        for struct in (DataSettings, LearningRate, Settings)
    ]
    own = {one.name for one in fields(kind)}
    assert options.keys() <= own, f"no option of {strategy}: {sorted(options.keys() - own)}"
    return msgspec.structs.replace(
        Settings(data=DataSettings(**data), rate=LearningRate(**rate), strategy=kind(**options)), **whole
    )
