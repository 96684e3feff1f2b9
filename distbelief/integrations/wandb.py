"""Run of Weights & Biases that follows a job; its own variables, such as WANDB_PROJECT, say where."""

from __future__ import annotations

import os
import secrets
from collections.abc import Sequence
from itertools import groupby
from operator import itemgetter
from typing import Any

from distbelief.core.records import Json, Outcome
from distbelief.errors import UsageError
from distbelief.record.curves import Curves, Scalar
from distbelief.record.sinks import ShownRun, SinkMaker, need, values_of


def sink(argument: str) -> SinkMaker:
    """Return the maker of a sink, once the user is logged in."""
    if argument:
        raise UsageError("wandb takes no more words: set WANDB_PROJECT, WANDB_ENTITY or WANDB_BASE_URL")
    need("wandb")
    import wandb

    if wandb.setup().settings.mode == "online" and not wandb.login(prompt=False, verify=False):
        raise UsageError("nobody is logged in to Weights & Biases here: run wandb login, or set WANDB_MODE=offline")
    return lambda run: Curves(WandbRun(run), run.warn)


class WandbRun:
    """Writer of one run of Weights & Biases; a resumed job goes on with the same."""

    def __init__(self, run: ShownRun) -> None:
        self._run = run
        self._open: Any = None

    def __str__(self) -> str:
        return "points for Weights & Biases"

    def open(self) -> None:
        """Begin the run, or go on with it."""
        import wandb  # which takes seconds

        name = self._run.identity("wandb", lambda: secrets.token_hex(8))
        self._open = wandb.init(
            project=os.environ.get("WANDB_PROJECT") or "distbelief", id=name, name=self._run.folder.name,
            resume="allow", dir=str(self._run.folder), config=self._run.parameters,
            settings=wandb.Settings(silent=True, console="off"),
        )  # fmt: skip
        self._open.define_metric("samples")
        self._open.define_metric("*", step_metric="samples")

    def write(self, points: Sequence[Scalar], first: int) -> None:
        """Log points over samples."""
        for samples, at_once in groupby(points, key=itemgetter(2)):
            self._open.log({tag: value for tag, value, *_ in at_once} | {"samples": samples})

    def close(self, result: Json) -> None:
        """Log the result and the model, and end the run."""
        import wandb

        run = self._open
        run.summary.update(values_of(result))
        if (model := self._run.folder / "model.safetensors").exists():
            artifact = wandb.Artifact(f"model-{run.id}", type="model")
            artifact.add_file(str(model))
            run.log_artifact(artifact)
        run.finish(exit_code=int(result["outcome"] not in (Outcome.DONE, Outcome.TARGET)))
