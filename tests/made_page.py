"""A run that is made up, as its page shows it: as long, and with as many replicas, as a test wants."""

from __future__ import annotations

import math
from typing import Any

from distbelief.core.records import Json

EVIL = "</script><img src=x onerror=alert(1)>"
"""A name that would be markup, were it not text."""


class MadeRun:
    """Reader of such a run.

    Args:
        seconds: where it is now.
        replicas: how many it has.
        whole: how long it takes.
        run: what its `run` says otherwise.
    """

    def __init__(self, seconds: float = 90.0, replicas: int = 3, whole: float = 300.0, **run: Any) -> None:
        self.seconds, self.replicas, self.whole, self.run = seconds, replicas, whole, run

    def view(self, at: float | None) -> Json:
        now = self.seconds if at is None else min(at, self.seconds)
        running = self.run.get("running", True)
        width = 2.0 ** max(0, math.ceil(math.log2(self.whole / 600)))
        losses = {k * width: 2.3 * math.exp(-3 * k * width / self.whole) for k in range(int(now / width))}
        tests = [[20.0 * k, 20_000 * k, 1 - 0.5 * math.exp(-k / 4), 0.1] for k in range(1, int(now / 20) + 1)]
        marks = [[31.0, "replica 1", "died"], [34.0, "replica 1", "joined"], [60.0, "shard 0", "succeeded"]]
        marks = [mark for mark in marks if mark[0] <= now]
        names = [f"replica {number}" for number in range(self.replicas)]
        return {
            "sentence": f"Epoch 2 of 5, {100 * now / self.whole:.0f} %; replica 1 waits for shard 0 for 3.2 s; "
            f"wrong: the rate is too high for {EVIL}",
            "diagnosis": {"rate": [f"lr {EVIL}", "--lr"]},
            "run": {
                "title": "downpour on mnist",
                "folder": f"runs/{EVIL}",
                "running": running,
                "outcome": "" if running else "done",
                "reason": "" if running else "all epochs are done",
                "seconds": self.seconds,
                "at": at and now,
                **self.run,
            },
            "numbers": {"samples": int(1000 * now), "rate": 1000.0, "epoch": 2, "epochs": 5, "sent": int(4e5 * now)},
            "target": {"accuracy": 0.97, "loss": None},
            "series": {
                f"{start:g}": [width, 1000 * width, loss * 0.9, loss, loss * 1.2, 4e5, 3e5, 9e6]
                for start, loss in losses.items()
            },
            "measures": dict(numbered(tests)),
            "members": {name: self._member(name, number, now) for number, name in enumerate(names)},
            "bands": {name: self._band(number, now) for number, name in enumerate(names)},
            "marks": dict(numbered(marks)),
            "events": dict(numbered([[when, f"{who} {what}", "distbelief status"] for when, who, what in marks])),
            "shards": {f"shard {number}": {"version": int(20 * now), "pushes": 20.0} for number in range(2)},
            "staleness": {"0": int(now), "1": int(3 * now), "2": int(2 * now), "7": int(now / 9)},
        }

    def _member(self, name: str, number: int, now: float) -> Json:
        rate, heard = round(12 + number + now % 3 / 10, 1), round(0.1 + now % 1, 1)
        facts = {"state": "busy", "rate": rate, "staleness": number, "participation": 1 / self.replicas, "heard": heard}
        return {**facts, "waits_for": "shard 0: its lock", "waited": 3.2} if number == 1 else facts

    def _band(self, number: int, now: float) -> Json:
        recent = range(max(0, int(now) - 300), int(now))
        waits = {second: 20 + int(15 * math.sin(second / 9 + number)) for second in recent}
        return {str(at): [1.0, 80 - wait, 10, 10, 0, wait, f"shard {at // 20 % 2}"] for at, wait in waits.items()}


def numbered(items: list[Any]) -> list[tuple[str, Any]]:
    return [(str(number), item) for number, item in enumerate(items)]
