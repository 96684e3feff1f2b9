"""Commands, and what they say."""

from collections.abc import Callable
from typing import Any

Ask = Callable[..., Any]
"""Runs a command of these words, holds its status (0), and gives what it has said: `out` and `err`."""
