"""View of a job: a live table on a terminal, plain lines, JSON lines, or nothing; and the final lines."""

from __future__ import annotations

import math
import re
import sys
import time
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, TextIO

from distbelief.core import records, roles
from distbelief.core.records import Json, Outcome
from distbelief.record.metrics import line
from distbelief.record.summary import Mean, Summary, duration, in_words, many
from distbelief.record.timeline import sentence

if TYPE_CHECKING:
    from rich.console import RenderableType
    from rich.live import Live as Table

PERIOD = 10.0
"""Seconds between two lines of progress where there is no terminal."""
FRAME = 0.25
"""Least seconds between two pictures on a terminal, and before replicas are shown as having joined."""
NAMES = 8
"""Most names of replicas in one line."""
ROWS = 16
"""Most replicas in the table."""
BAR, GAP = 30, 2
"""Columns of the bar, and of a gap, on a terminal."""
LEAST_IMPORTANT = ("bytes", "staleness", "time", "bar", "rate", "accuracy", "loss")
"""Cells of a row of progress, in the order in which a narrow terminal drops them."""
SIMULATED = " simulated"
"""Mark of a time or a rate on the simulated clock."""


class Live:
    """View of the records of a job as they come; if its stream breaks, the job continues without it.

    Args:
        stream: output, such as standard output.
        quiet: show nothing.
        json: write records as lines of JSON, the same as in `metrics.jsonl`, and nothing else.
        title: title of the job, such as "downpour on mnist".
        now: clock in seconds.
        simulated: mark every time and rate of the job as simulated.
    """

    def __init__(
        self,
        stream: TextIO,
        quiet: bool = False,
        json: bool = False,
        title: str = "",
        now: Callable[[], float] = time.monotonic,
        simulated: bool = False,
    ) -> None:
        self._mark = SIMULATED if simulated else ""
        self._stream, self._json, self._title, self._now = stream, json, title, now
        self._silent = quiet and not json
        self._summary = Summary({})
        self._loss = Mean()
        self._recent = Mean()
        self._unsaved = ""
        self._tested: set[int] = set()
        self._joined: list[str] = []
        self._built: set[str] = set()
        """Partitions that have built their part of the model."""
        self._last = now()
        self._table: Table | None = None  # rich's, imported only where there is a terminal
        self._terminal = not json and not quiet and stream.isatty()

    def __enter__(self) -> Live:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def take(self, seconds: float, record: records.Record, summary: Summary) -> None:
        """Show a record from `seconds` after the job began, and the sums that include it."""
        self._summary = summary
        if self._silent:
            return
        try:
            if self._json:
                self._stream.write(line(seconds, record).decode())
                self._stream.flush()
            else:
                self._show(record)
        except (OSError, ValueError):  # the pipe is closed, the terminal is gone
            self._silent, self._table = True, None

    def print_of(self, role: str, lines: Iterable[str], aside: bool = False) -> None:
        """Show lines that a role has printed, on standard error if `aside` or if records are shown as JSON."""
        try:
            for text in lines:
                line = f"[{role}] {text}"
                if self._table is not None:
                    self._table.console.print(line, markup=False, highlight=False)
                else:
                    print(line, file=sys.stderr if aside or self._json else self._stream, flush=True)
        except (OSError, ValueError):
            self._silent = True

    @property
    def _unit(self) -> str:
        return self._summary.started.unit if self._summary.started else "epoch"

    def _stale(self) -> str:
        """Format the mean staleness of all pushes so far."""
        mean = self._summary.staleness()["mean"]
        return "" if mean is None else f"staleness {mean:.2f}"

    def close(self) -> None:
        """Release the terminal; the table of replicas stays visible, and after a failure the progress too."""
        if self._silent or self._json:
            return
        try:
            self._tell_joined()
            if self._table is not None:
                failed = self._summary.outcome in ("", Outcome.FAILED)
                self._table.update(self._picture() if failed else self._replicas(), refresh=False)
                self._table.stop()
        except (OSError, ValueError):
            self._silent = True
        self._table = None

    def _show(self, record: records.Record) -> None:
        now, due = self._now(), FRAME if self._terminal else PERIOD
        if isinstance(record, records.PartBuilt):
            self._tell_built(record, now)
        elif isinstance(record, records.Joined):
            self._joined.append(record.role)
        elif self._joined and (now - self._last >= FRAME or not isinstance(record, records.Stepped)):
            self._tell_joined()
        if isinstance(record, records.Stepped):
            self._loss.add(record.loss, record.losses)
            self._recent.add(record.loss, record.losses)
        text = self._told(record)
        if text:
            self._print(text)
        if now - self._last >= due and not self._terminal and isinstance(record, records.Stepped):
            self._print(self._progress())
            self._last = now
        if self._terminal and (now - self._last >= due or isinstance(record, records.Started)):
            self._rich().update(self._picture(), refresh=True)
            self._last = now

    def _told(self, record: records.Record) -> str:
        """Return the line for a record; "" if the record only changes numbers."""
        match record:
            case records.Started():
                # a job without a server has no shards
                shards = f"{many(record.shards, 'shard')}, " if record.shards else ""
                size = f"{many(record.replicas, 'replica')}, {shards}{record.parameters:,} parameters"
                resumed = f"; goes on after {record.samples:,} samples" if record.samples else ""
                cut = "batches" if record.unit == "epoch" else "portions"
                of = f"{record.samples_per_epoch:,} samples" if record.samples_per_epoch else "each replica's own data"
                work = f"{many(record.epochs, record.unit)} of {of} in {cut} of {record.batch_size}"
                few = (
                    "; the batch size exceeds the number of samples: an epoch is one minibatch"
                    if record.batch_size > record.samples_per_epoch > 0
                    else ""
                )
                return f"{self._title or 'training'}: {size}; {work}{few}{resumed}"
            case records.EpochDone():
                return self._progress(record.epoch)
            case records.Tested():
                # a job that ends within an epoch is evaluated once more
                again = not record.epoch or record.epoch in self._tested
                self._tested.add(record.epoch)
                when = (
                    f"at the end, after {self._summary.samples:,} samples,"
                    if again
                    else f"after {many(record.epoch, self._unit)}"
                )
                moment = duration(self._summary.history[-1]["seconds"]) + self._mark
                return f"tested {when} at {moment}: {figures(record.accuracy, record.metrics, record.loss)}"
            case records.Checkpointed():
                before, self._unsaved = self._unsaved, re.sub(r"\d+", "", record.error)
                if not record.error or self._unsaved == before:  # a full disk makes all later checkpoints fail too
                    return ""
            case records.Finished(outcome=Outcome.FAILED):  # the caller gets an error, which is shown
                return ""
        return sentence(record)

    def _tell_joined(self) -> None:
        if self._joined:
            names, self._joined = roles.named(self._joined, NAMES), []
            self._print(f"joined: {names}")

    def _tell_built(self, record: records.PartBuilt, now: float) -> None:
        """Show how many partitions have built their part, every `PERIOD` until the job begins."""
        self._built.add(record.role)
        if self._summary.started is None and now - self._last >= PERIOD:
            self._print(f"{len(self._built)} of {record.of} partitions have built their part of the model")
            self._last = now

    def _progress(self, epoch: int = 0) -> str:
        """Return a line of progress, with the mean loss since the last such line."""
        started, loss = self._summary.started, self._loss.take()
        per_epoch = started.samples_per_epoch if started else 0
        epochs = started.epochs if started else 0
        counted = self._unit == "epoch" and per_epoch > 0
        done = self._summary.samples // per_epoch if counted else self._summary.epochs
        where = (
            f"{self._unit} {epoch}/{epochs} done" if epoch else f"{self._unit} {min(done + 1, max(epochs, 1))}/{epochs}"
        )
        share = f"{self._summary.samples:,}{f'/{per_epoch * epochs:,}' if counted else ''} samples"
        trained = "" if loss is None else f"train loss {loss:.4f}"
        seconds = f"{duration(self._summary.seconds)}{self._mark}"
        rate = f"{self._summary.rate:,.0f} samples/s{self._mark}"
        parts = [share, seconds, rate, trained, self._stale(), in_words(self._summary.bytes)]
        return f"{where}: {', '.join(filter(None, parts))}"

    def _print(self, text: str) -> None:
        if self._terminal:
            self._rich().console.print(text, markup=False, highlight=False)
        else:
            self._stream.write(text + "\n")
            self._stream.flush()

    def _rich(self) -> Table:
        if self._table is None:
            from rich.console import Console
            from rich.live import Live as Table

            self._table = Table(console=Console(file=self._stream), auto_refresh=False)
            self._table.start()
        return self._table

    def _picture(self) -> RenderableType:
        """Return the progress and the table of replicas for rich to draw."""
        from rich.console import Group

        return Group(self._bar(self._rich().console.width), self._replicas())

    def _bar(self, width: int) -> RenderableType:
        """Return the progress in one row, without the least important cells that do not fit."""
        from rich.progress_bar import ProgressBar
        from rich.table import Table

        summary = self._summary
        whole = summary.started.samples_per_epoch * summary.started.epochs if summary.started else 0
        counted = self._unit == "epoch" and whole > 0
        bar_of = (
            (whole, summary.samples) if counted or not summary.started else (summary.started.epochs, summary.epochs)
        )
        accuracy = summary.history[-1]["test_accuracy"] if summary.history else None
        loss = self._recent.latest()
        cells = {
            "bar": " " * BAR,
            "count": f"{bar_of[1]:,}/{bar_of[0]:,} {'samples' if counted else f'{self._unit}s'}",
            "rate": f"{summary.rate:,.0f}/s{self._mark}",
            "time": f"{duration(summary.seconds)}{self._mark}",
            "loss": "" if loss is None else f"loss {loss:.4f}",
            "accuracy": "" if accuracy is None else f"accuracy {100 * accuracy:.2f} %",
            "staleness": self._stale(),
            "bytes": in_words(self._summary.bytes),
        }
        cells = {name: text for name, text in cells.items() if text}
        for name in LEAST_IMPORTANT:
            if sum(map(len, cells.values())) + GAP * (len(cells) - 1) > width:
                cells.pop(name, None)
        drawn: dict[str, RenderableType] = {**cells}
        if "bar" in cells:
            drawn["bar"] = ProgressBar(total=max(bar_of[0], 1), completed=bar_of[1], width=BAR)
        bar = Table.grid(padding=(0, GAP, 0, 0), pad_edge=False)
        for _ in drawn:
            bar.add_column(no_wrap=True, overflow="ellipsis")
        bar.add_row(*drawn.values())
        return bar

    def _replicas(self) -> RenderableType:
        """Return the table of replicas, each in one row; a long reason is cut."""
        from rich.table import Table
        from rich.text import Text

        summary = self._summary
        table = Table.grid(padding=(0, GAP))
        for _ in range(5):
            table.add_column(no_wrap=True)
        table.add_column()
        total, fair = max(summary.steps, 1), 1 / max(len(summary.replicas), 1)
        for index, replica in sorted(summary.replicas.items())[:ROWS]:
            share = replica.steps / total
            state = (
                f"gone: {replica.gone}" if replica.gone else "slow" if share < fair / 2 and summary.steps > 10 else ""
            )
            speed = replica.steps / summary.seconds if summary.seconds > 0 else 0.0
            lost = f"lost {replica.lost}" if replica.lost else ""
            cut = Text(state, no_wrap=True, overflow="ellipsis")
            table.add_row(
                f" {roles.replica(index)}",
                f"{replica.steps:,} steps",
                f"{speed:,.1f}/s{self._mark}",
                f"{100 * share:.0f} %",
                lost,
                cut,
            )
        if len(summary.replicas) > ROWS:
            table.add_row(f" and {len(summary.replicas) - ROWS} more")
        return table


def figures(accuracy: float | None, metrics: Mapping[str, float | None], loss: float | None) -> str:
    """Format the known measures of a model.

    >>> figures(0.975, {"top5": 0.99}, 0.0631), figures(None, {}, 0.5)
    ('accuracy 97.50 %, top5 0.9900, loss 0.0631', 'loss 0.5000')
    """
    parts = [] if accuracy is None else [f"accuracy {100 * accuracy:.2f} %"]
    others = {**metrics, "loss": loss}
    return ", ".join([*parts, *(f"{name} {value:.4f}" for name, value in others.items() if value is not None)])


def summary(result: Json, folder: str | Path | None = None) -> str:
    """Return the lines that end a run.

    Args:
        result: contents of `result.json`.
        folder: the run folder, if any.
    """
    mark = SIMULATED if result.get("cluster") else ""
    rows = [("outcome", f"{result.get('outcome') or 'unknown'}: {result.get('reason', '')}".rstrip(": "))]
    text = figures(result["test_accuracy"], result.get("test_metrics") or {}, result["test_loss"])
    if text:
        what, _, rest = text.partition(" ")
        rows.append((what, rest))
    target = result["target"]
    if target["accuracy"] or target["loss"]:
        reached = (
            f"reached after {duration(target['seconds'])}{mark}, {many(target['epochs'], 'epoch')}"
            if target["reached"]
            else "not reached"
        )
        accuracy, loss = target["accuracy"], target["loss"]
        aims = [*([f"{100 * accuracy:.2f} %"] if accuracy else []), *([f"loss {loss:g}"] if loss else [])]
        rows.append(("target", f"{', '.join(aims)} {reached}"))
    # without shards there are no pushes
    applied = many(result["pushes"], "push", "es") if result["shards"] else many(result["updates"], "update")
    work = f"{result['samples']:,} samples, {many(result['steps'], 'step')}, {applied}"
    rows.append(
        ("time", f"{duration(result['seconds'])}{mark}, {result['samples_per_second']:,.0f} samples/s{mark} ({work})")
    )
    if descent := result.get("descent"):
        searches = f", {many(descent['restarts'], 'search', 'es')} that failed" if descent["restarts"] else ""
        loss = "" if descent["loss"] is None else f"training loss {descent['loss']:.6g} after "
        counted = f"{many(descent['iterations'], 'iteration')}, {many(descent['evaluations'], 'evaluation')}"
        rows.append(("descent", f"{loss}{counted}{searches}"))
    if split := result.get("split"):
        rows.append(("split", split["told"]))
    if result["staleness"]["mean"] is not None:
        rows.append(("staleness", f"mean {result['staleness']['mean']:.2f}, max {result['staleness']['max']}"))
    if text := in_words(result["bytes"]):
        rows.append(("bytes", text))
    lost = [
        f"{many(counts['lost'], 'minibatch', 'es')} of {roles.replica(counts['id'])}"
        for counts in result["per_replica"]
        if counts["lost"]
    ]
    if result["dropped"]:
        reason = "for their round: their minibatches were dealt again, or the changes of local steps pushed again"
        rows.append(("too late", f"{many(result['dropped'], 'push', 'es')}, {reason}"))
    if lost:
        rows.append(("dealt again", roles.named(lost, NAMES)))
    if network := result.get("network"):
        rows.append(("network", network["told"]))
    if cluster := result.get("cluster"):
        rows.append(("simulated", _cluster(cluster, network, result.get("path") == "direct")))
    rows += [(each["level"], told_of(each)) for each in result.get("diagnosis", [])]
    if folder is not None:
        rows.append(("run folder", str(folder)))
    return "\n".join(f"{name:<12}{text}" for name, text in rows)


def told_of(found: Json) -> str:
    """Return the sentence of a diagnosis, with the remedy.

    Args:
        found: an entry of `diagnosis` in `result.json`.

    >>> told_of({"sentence": "the disk is full", "remedy": "--out"}), told_of({"sentence": "it is slow", "remedy": ""})
    ('the disk is full; try --out', 'it is slow')
    """
    return f"{found['sentence']}; try {found['remedy']}" if found["remedy"] else str(found["sentence"])


def _cluster(cluster: Json, network: Json | None, direct: bool) -> str:
    """Describe a simulated cluster: its steps, messages, memory and hosts."""
    handling, hosts = cluster["handling"], cluster["hosts"]
    memory = f"{handling['memory'] / 1e9:g} GB/s" if math.isfinite(handling["memory"]) else "no time"
    each = "all roles on one machine" if direct else "a machine for each role"
    if hosts:
        each = f"hosts of {many(hosts['cores'], 'core')}"
    elif network:
        each = f"replicas on {many(network['hosts'], 'host')}"
    return (
        f"steps of {duration(cluster['compute']['step'])}, {1e6 * handling['message']:g} us a message, {memory} for "
        f"memory access, {each}"
    )
