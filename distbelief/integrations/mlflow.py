"""Run of MLflow that follows a job, at a URI or where MLflow's own variables say."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

from distbelief.core.records import Json, Outcome
from distbelief.record.curves import Curves, Scalar
from distbelief.record.sinks import ShownRun, SinkMaker, need, values_of

METRICS, PARAMETERS = 1000, 100
"""Most metrics, and most parameters, that MLflow takes at once."""
ENDS = {Outcome.DONE: "FINISHED", Outcome.TARGET: "FINISHED", Outcome.FAILED: "FAILED"}
"""States of ended runs; others were killed."""


def sink(argument: str) -> SinkMaker:
    """Return the maker of a sink for the server or store at a URI."""
    need("mlflow")
    return lambda run: Curves(MlflowRun(run, argument), run.warn)


class MlflowRun:
    """Writer of one run of MLflow; a resumed job goes on with the same."""

    def __init__(self, run: ShownRun, uri: str) -> None:
        self._run, self._uri, self._id = run, uri, ""
        self._client: Any = None

    def __str__(self) -> str:
        return "points for MLflow"

    def open(self) -> None:
        """Begin the run, or go on with it."""
        from mlflow import MlflowClient  # which takes seconds
        from mlflow.entities import Param

        self._client = MlflowClient(self._uri or None)
        self._id = self._run.identity(f"mlflow:{self._uri}", self._begin, self._knows)
        self._client.update_run(self._id, "RUNNING")
        known = self._client.get_run(self._id).data.params  # which MLflow never changes
        given = [Param(name, str(value)) for name, value in self._run.parameters.items() if name not in known]
        for at in range(0, len(given), PARAMETERS):
            self._client.log_batch(self._id, params=given[at : at + PARAMETERS])

    def _begin(self) -> str:
        name = os.environ.get("MLFLOW_EXPERIMENT_NAME") or "distbelief"
        known = self._client.get_experiment_by_name(name)
        experiment = known.experiment_id if known else self._client.create_experiment(name)
        return str(self._client.create_run(experiment, run_name=self._run.folder.name).info.run_id)

    def _knows(self, identity: str) -> bool:
        from mlflow.exceptions import MlflowException

        try:
            return bool(self._client.get_run(identity).info.lifecycle_stage == "active")
        except MlflowException as error:  # the next call tells of another error
            return bool(error.error_code != "RESOURCE_DOES_NOT_EXIST")

    def write(self, points: Sequence[Scalar], first: int) -> None:
        """Log points as metrics over samples."""
        from mlflow.entities import Metric

        metrics = [Metric(tag, value, int(when * 1000), samples) for tag, value, samples, when in points]
        for at in range(0, len(metrics), METRICS):
            self._client.log_batch(self._id, metrics=metrics[at : at + METRICS])

    def close(self, result: Json) -> None:
        """Log the result and the model, and end the run."""
        for name, value in values_of(result).items():
            if isinstance(value, str):
                self._client.set_tag(self._id, name, value)
            else:
                self._client.log_metric(self._id, name, value, step=result["samples"])
        for path in (self._run.folder / "result.json", self._run.folder / "model.safetensors"):
            if path.exists():
                self._client.log_artifact(self._id, str(path))
        self._client.set_terminated(self._id, ENDS.get(result["outcome"], "KILLED"))
