"""Topology that a user names: a shape, or a file that describes a cluster."""

from __future__ import annotations

from pathlib import Path

from distbelief.errors import UsageError
from distbelief.network.graph import Topology
from distbelief.network.shapes import EXAMPLES, is_shape, shape
from distbelief.network.slurm import parse_topology

MOST_CHARACTERS = 1 << 22
"""Longest file that is read, in characters."""


def topology(text: str) -> Topology:
    """Return the topology of this name.

    Raises:
        UsageError: there is none. For a file the message names the line and the remedy.
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
