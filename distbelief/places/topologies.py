"""The topology that a user names: a shape, or a file of the cluster's own."""

from __future__ import annotations

from pathlib import Path

from distbelief.errors import UsageError
from distbelief.network.graph import Topology
from distbelief.network.shapes import EXAMPLES, is_shape, shape
from distbelief.network.slurm import parse_topology

MOST_CHARACTERS = 1 << 22
"""The longest file that is read."""


def topology(text: str) -> Topology:
    """The topology that is named so.

    Raises:
        UsageError: there is none; of a file the line is named, and what to do.
    """
    if is_shape(text):
        return shape(text)
    if text.endswith((".yaml", ".yml")):
        raise UsageError(
            f"--topology {text}: YAML is not read; have a topology.conf written: scontrol show topology > topology.conf"
        )
    try:
        with Path(text).open(encoding="utf-8-sig", errors="replace") as file:
            content = file.read(MOST_CHARACTERS + 1)
    except (OSError, ValueError) as error:
        raise UsageError(
            f"--topology {text[:80]}: cannot be read ({error}); name a topology.conf, or write {EXAMPLES}"
        ) from None
    if len(content) > MOST_CHARACTERS:
        raise UsageError(f"--topology {text}: is longer than {MOST_CHARACTERS:,} characters; name a topology.conf")
    return parse_topology(content, text)
