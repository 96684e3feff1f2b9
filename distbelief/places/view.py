"""View of a job while it runs."""

from __future__ import annotations

from distbelief.core.values import CheckedStruct
from distbelief.record.sinks import SinkMaker, find


class View(CheckedStruct, frozen=True):
    """View of a job while it runs."""

    quiet: bool = True
    json: bool = False
    title: str = ""
    """Description of the job, shown as it starts."""
    metrics: str = ""
    """PORT or HOST:PORT at which Prometheus reads the metrics of the job."""
    track: str = ""
    """Sink that follows the job: mlflow, mlflow:URI, wandb, aim, or one of another package."""

    def sinks(self) -> list[SinkMaker]:
        """Return the makers of what shows the job elsewhere.

        Raises:
            UsageError: as `find`.
        """
        found = [find("prometheus", self.metrics, f"--metrics {self.metrics}")] if self.metrics else []
        if self.track:
            name, _, argument = self.track.partition(":")
            found.append(find(name, argument, f"--track {self.track}"))
        return found

    def show_start(self) -> None:
        """Print what begins, at once, since importing torch comes next and takes seconds.

        Raises:
            UsageError: as `sinks`.
        """
        self.sinks()
        if self.title and not (self.quiet or self.json):
            print(f"starting {self.title}", flush=True)


UNSEEN = View()
