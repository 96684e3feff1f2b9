"""One attempt of a job: its run folder, the checkpoint that it resumes from, and its records and their display."""

from __future__ import annotations

import contextlib
import dataclasses
import re
import sys

from distbelief.core.portions import ANEW, StartingPoint
from distbelief.core.records import Json, Note, Record, Started
from distbelief.core.roles import SUPERVISOR
from distbelief.core.settings import OWN_DATA, SHARED, Settings, flat, option
from distbelief.core.values import admit, shown
from distbelief.errors import CheckpointError, UsageError
from distbelief.job import Job
from distbelief.places import signals
from distbelief.places.view import UNSEEN, View
from distbelief.record.checkpoints import Checkpoints, Manifest, read_manifest
from distbelief.record.folder import RunFolder, versions
from distbelief.record.live import Live
from distbelief.record.recorder import Recorder
from distbelief.record.sinks import ShownRun
from distbelief.server import optimizers
from distbelief.strategies import by_name
from distbelief.tasks import Task
from distbelief.tasks.task import ACCURACY


def evaluates(settings: Settings, task: Task) -> bool:
    """Return whether a job measures its model as it goes.

    Raises:
        UsageError: a target or an evaluation interval is set, and the task has no test set for it.
    """
    aims = {"target_accuracy": "" if ACCURACY in task.metrics else "accuracy to reach it", "target_loss": ""}
    for name, lacks in aims.items():
        missing = "test set to reach it on" if task.test is None else lacks
        if (aim := getattr(settings, name)) and missing:
            raise UsageError(f"{option(name)} {aim}: task {task.reference!r} has no {missing}; leave it off")
    if (every := settings.evaluate_every) not in (0, 1, "0", "1") and task.test is None:
        raise UsageError(
            f"--evaluate-every {every}: task {task.reference!r} has no test set to measure on; leave it off"
        )
    return settings.evaluates and task.test is not None


class Attempt:
    """A run folder opened for a job; `record` takes each record, and `finish` returns the result.

    Args:
        view: its display; None for none.
        began: the time at which it begins, on the clock of the records.
        kept: whether to create a run folder.
        more: further contents of `job.json`, such as the simulated cluster.
    """

    def __init__(
        self,
        job: Job,
        settings: Settings,
        view: View | None,
        began: float,
        kept: bool = True,
        more: Json | None = None,
    ) -> None:
        view = UNSEEN if view is None else view
        if not isinstance(view, View):
            admit(view, View, f"view={shown(view)}")
        if (elsewhere := bool(view.metrics or view.track)) and "cluster" in (more or {}):
            raise UsageError("--metrics and --track follow real time, which a simulation has not: leave them off")
        self.job, self.settings, self._began = job, settings, began
        self.folder: RunFolder | None = None
        self.manifest: Manifest | None = None
        self.checkpoint = ""
        self.begun = False
        self._changes: list[str] = []
        """Sentences that describe what changed since the attempt before."""
        optimizers.check(settings.optimizer)
        self._description = self._describe(more or {})
        try:
            if job.resume:
                self._resume(str(job.out))
            elif kept:
                named = re.sub(r"[^\w.-]+", ".", job.reference)
                self.folder = RunFolder.create(job.out, f"{named}-{job.strategy.name}")
                self.folder.lock()
                self.folder.write_job(self._description)
            self.live = Live(
                sys.stdout,
                view.quiet,
                view.json,
                f"{job.strategy.name} on {job.reference}",
                simulated="cluster" in (more or {}),
            )
            self.recorder = Recorder(self.folder, self._description)
            if elsewhere and self.folder:
                self._open_sinks(view, self.folder)
        except BaseException:
            if self.folder:
                if not (job.resume or self.folder.gone):  # a folder locked by another job belongs to that job
                    self.folder.remove()  # it was empty, or did not exist
                self.folder.unlock()
            raise
        if self.folder and view.page is not False:
            view.open_page(self.folder.path)

    def _open_sinks(self, view: View, folder: RunFolder) -> None:
        """Open what shows the job elsewhere, and go on without what fails.

        What cannot be opened as the user wrote it raises a `UsageError`.
        """
        run = ShownRun(folder.path, self._description, self._note, self.recorder.warn)
        for make in view.sinks():
            try:
                self.recorder.sinks.append(make(run))
            except UsageError:
                self.recorder.finish(write=False)
                raise
            except Exception as error:
                self.recorder.warn(f"a sink cannot be opened ({error!r}); the job continues without it")

    def _note(self, text: str) -> None:
        """Record a note of the supervisor at the beginning."""
        self.record(self._began, SUPERVISOR, Note(text))

    def _describe(self, more: Json) -> Json:
        own = {
            field.name: getattr(self.job, field.name)
            for field in dataclasses.fields(self.job)
            if field.name not in ("task", "strategy")
        }
        return {
            "task": self.job.reference,
            "strategy": self.job.strategy.name,
            "settings": flat(self.settings),
            "seed": self.job.seed,
            "device": self.job.device,
            "options": own,
            **more,
            "versions": versions(),
        }

    def _resume(self, out: str) -> None:
        """Continue in a run folder from its newest checkpoint."""
        self.folder = RunFolder.open(out)
        self.folder.lock()
        before = self.folder.read_job()
        if before.get("task") != self.job.reference:
            raise CheckpointError(
                f"{out} trained task {before.get('task')!r}, this job's is {self.job.reference!r}: resume with the "
                "same task"
            )
        newest = Checkpoints(self.folder.path).latest()
        if newest is None:
            raise CheckpointError(
                f"{self.folder.path} has no checkpoint to resume from: train anew into another folder"
            )
        self.checkpoint, self.manifest = str(newest), read_manifest(newest)
        strategy, now = str(before.get("strategy")), self.job.strategy.name
        if by_name(self.manifest.plan.settings.strategy.name).unit != self.job.strategy.unit:
            raise CheckpointError(
                f"{out} was trained with {strategy}, and {now} counts its data differently: "
                f"start another run from its weights with --init-from {out}"
            )
        # Compare the options as the user gave them: a script may have changed the batch size, and will do so again.
        kept, asks = before.get("settings", {}), flat(self.settings)
        kept.setdefault("data", OWN_DATA if kept.get("own_data") else SHARED)
        for name in ("batch_size", "drop_last", "order", "data", "seed"):
            asked = asks[name]
            was = kept.get(name, asked)
            if was != asked:
                raise CheckpointError(
                    f"{out} was made with {name} {was}, but this job has {asked}: the order of the data would "
                    f"change; use {was}"
                )
        if strategy != now:
            self._changes.append(f"this run was trained with {strategy} before, and goes on with {now}")
        if gone := sorted(kept.keys() - flat(Settings(strategy=by_name(strategy))).keys()):
            self._changes.append(f"its job.json has {', '.join(gone)}, no setting of {strategy}: it goes on without")

    @property
    def start(self) -> StartingPoint:
        """Return where the attempt starts: at its checkpoint, or at the beginning."""
        made = self.manifest
        return StartingPoint(self.checkpoint, made.position, made.samples, made.number + 1) if made else ANEW

    def record(self, moment: float, role: str, record: Record) -> None:
        """Store and show a role's record of one moment."""
        seconds = moment - self._began
        if isinstance(record, Started) and not self.begun:
            self.begun = True
            if self.folder:
                with contextlib.suppress(OSError):
                    self.folder.result.unlink(missing_ok=True)  # left by the attempt before; this one may be killed
        self.recorder.take(seconds, record)
        self.live.take(seconds, record, self.recorder.summary)
        if isinstance(record, Started) and self._changes:
            self._note_changes(moment)

    def _note_changes(self, moment: float) -> None:
        """Record what has changed since the attempt before."""
        changes, self._changes = self._changes, []
        assert self.folder is not None
        try:
            self.folder.write_job(self._description)
        except UsageError as error:
            changes.append(str(error))
        for change in changes:
            self.record(moment, SUPERVISOR, Note(change))

    def keep_folder(self, moment: float) -> bool:
        """Create a deleted run folder again, so that the run can be read; return whether it was deleted.

        Raises:
            UsageError: it cannot be created.
        """
        if self.folder is None or not self.folder.gone:
            return False
        self.folder.make_again(self._description)
        self.recorder.write_again()
        lost = "its checkpoints and TensorBoard events so far are lost; settings and metrics are written again"
        self.record(moment, SUPERVISOR, Note(f"the run folder {self.folder.path} was deleted or moved away: {lost}"))
        return True

    def finish(self) -> Json:
        """End the display, and write the result.

        A run that never began leaves no folder. A resumed run that never began keeps its previous result.
        """
        self.live.close()
        result, folder = self.recorder.finish(self.begun, signals.raised), self.folder
        if folder and not self.begun and not self.job.resume:
            folder.remove()
            self.folder = None
        if folder:
            folder.unlock()
        return {**result, "run": str(self.folder.path) if self.folder else None}
