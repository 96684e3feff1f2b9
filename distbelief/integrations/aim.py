"""Run of Aim that follows a job, in the repository of this folder or in a named one."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from distbelief.core.records import Json
from distbelief.record.curves import Curves, Scalar
from distbelief.record.sinks import ShownRun, SinkMaker, need, values_of


def sink(argument: str) -> SinkMaker:
    """Return the maker of a sink for a repository, a folder or aim://HOST:PORT."""
    need("aim")
    return lambda run: Curves(AimRun(run, argument), run.warn)


class AimRun:
    """Writer of one run of Aim; a resumed job goes on with the same."""

    def __init__(self, run: ShownRun, repository: str) -> None:
        self._run, self._repository = run, repository
        self._open: Any = None

    def __str__(self) -> str:
        return "points for Aim"

    def open(self) -> None:
        """Begin the run, or go on with it."""
        self._run.identity(f"aim:{self._repository}", self._begin, self._knows)
        self._open.name, self._open["parameters"] = self._run.folder.name, self._run.parameters

    def _begin(self, name: str | None = None) -> str:
        import aim  # which takes seconds

        quiet = {"system_tracking_interval": None, "log_system_params": False, "capture_terminal_logs": False}
        experiment = None if name else "distbelief"
        self._open = aim.Run(name, repo=self._repository or None, experiment=experiment, **quiet)
        return str(self._open.hash)

    def _knows(self, name: str) -> bool:
        from aim.sdk.errors import MissingRunError

        try:
            return bool(self._begin(name))
        except MissingRunError:
            return False

    def write(self, points: Sequence[Scalar], first: int) -> None:
        """Track points over samples."""
        for tag, value, samples, _ in points:
            self._open.track(value, name=tag, step=samples)

    def close(self, result: Json) -> None:
        """Keep the result and the model, and end the run."""
        run, model = self._open, self._run.folder / "model.safetensors"
        run["result"] = values_of(result)
        if model.exists():
            if not run.artifacts_uri and not run.repo.is_remote_repo:
                run.set_artifacts_uri((Path(run.repo.path) / "artifacts").as_uri())
            run.log_artifact(str(model), block=True)
        run.close()
