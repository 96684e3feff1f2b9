"""The phases of a job, and what the coordinator waits for in each."""

from __future__ import annotations

from typing import Literal

Phase = Literal["gathering", "restoring", "initialising", "training", "leaving", "closing"]

PHASES: dict[Phase, str] = {
    "gathering": "waits for all shards, and for the first replica, which tells the layout",
    "restoring": "waits for the shards to know their ranges, and to load a checkpoint if there is one",
    "initialising": "waits for one replica to send the initial parameters",
    "training": "deals portions until all are done, a target is reached or somebody stops the job",
    "leaving": "waits for the replicas to push what they have accrued, and to leave",
    "closing": "waits for the last evaluation, the last checkpoint and the shards' accounts",
}
"""What the coordinator does, and what it waits for, in order."""
