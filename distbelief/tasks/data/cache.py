"""The cache folder: what lies there can be had again."""

from __future__ import annotations

import os
from pathlib import Path

NO_HOME = "this user has no home folder: name one for what is kept, by $XDG_CACHE_HOME"


def cache_folder() -> Path | None:
    """Ours, of this user; None where he has no home."""
    folder = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    return None if folder.startswith("~") else Path(folder, "distbelief")
