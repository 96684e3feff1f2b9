"""Reading of a run for its page: its state now, or at a moment of its clock, as JSON.

It reads the run folder, and asks the job itself, if it runs, what each of its roles waits for.
"""

from __future__ import annotations

import itertools
import math
import shlex
import time
from pathlib import Path

from distbelief.core import roles
from distbelief.core.records import Json
from distbelief.places import status
from distbelief.record.folder import RunFolder
from distbelief.record.following import Follower
from distbelief.record.live import figures
from distbelief.record.summary import HistoryRow, Summary, duration
from distbelief.record.timeline import Amounts, B, Bin, Bins, Timeline, Updates, Uses

BAND = 60
"""Times `lately` before the shown moment for which the use of time is shown."""
LONG = 1.0
"""Seconds of a wait that the first line names."""
READS = 64
"""Most reads of a running job's metrics in one look, so that a long file delays no page for long."""


class Reading:
    """Reading of one run.

    Args:
        run: the run folder.

    Raises:
        UsageError: it is no run folder.
        CheckpointError: its `job.json` is corrupt.
    """

    def __init__(self, run: Path) -> None:
        self._folder = RunFolder.open(run)
        self._follower = Follower(self._folder, self._folder.read_job())

    def view(self, at: float | None) -> Json:
        """Return the state of the run.

        Args:
            at: moment in seconds of training; None for now.

        Raises:
            DistbeliefError: the job does not answer.
            OSError: the metrics cannot be read.
        """
        live = status.status(self._folder.path)  # first, since one that has ended then writes no more
        running, simulated = bool(live["running"]), "cluster" in self._follower.job
        for _ in range(READS) if running else itertools.count():
            if not self._follower.read():
                break
        timeline, summary = self._follower.timeline, self._follower.summary
        self._follower.job = summary.job = self._folder.read_job()  # a resumed job may have other settings
        now = timeline.seconds + (self._silent() if running and not simulated else 0.0)
        moment = now if at is None else min(at, now)
        if at is None:
            members = self._members(live, now)
            numbers = self._numbers(live)
        else:
            members, numbers = _members_at(timeline, moment), _numbers_at(timeline, moment)
        numbered = enumerate(timeline.happenings, timeline.dropped)
        happened = [(str(number), each) for number, each in numbered if each.seconds <= moment]
        settings = summary.settings
        outcome = live.get("outcome") or ""
        wrong = live.get("wrong", []) if at is None else []
        return {
            "sentence": "; wrong: ".join(
                [self._sentence(live, members, moment, at is not None), *(each["sentence"] for each in wrong)]
            ),
            "diagnosis": {each["rule"]: _details(each) for each in wrong},
            "run": {
                "title": f"{self._follower.job.get('strategy')} on {self._follower.job.get('task')}",
                "folder": str(self._folder.path),
                "running": running,
                "simulated": simulated,
                "outcome": "" if running else outcome,
                "reason": live.get("reason") or "",
                "seconds": _round(timeline.seconds),
                "at": None if at is None else _round(moment),
            },
            "numbers": numbers,
            "target": {name: settings.get(f"target_{name}") or None for name in ("accuracy", "loss")},
            "series": {_name(bin): _amounts(bin) for bin in timeline.amounts.between(0.0, moment)},
            "measures": {
                str(index): [_round(point.seconds), point.samples, point.accuracy, point.loss]
                for index, point in enumerate(timeline.measures)
                if point.seconds <= moment
            },
            "members": members,
            "bands": {
                role: {_name(bin): _uses(bin) for bin in uses.between(moment - BAND * timeline.lately, moment)}
                for role, uses in timeline.uses.items()
            },
            "marks": {name: [_round(each.seconds), each.role, each.mark] for name, each in happened if each.mark},
            "events": {
                name: [_round(each.seconds), each.text, self._command(each.role)]
                for name, each in happened
                if each.text
            },
            **_shards(timeline, members, moment),
        }

    def _silent(self) -> float:
        """Return the seconds since the job has recorded anything."""
        path = self._folder.metrics
        return max(0.0, time.time() - path.stat().st_mtime) if path.exists() else 0.0

    def _command(self, role: str) -> str:
        """Return the command, or the file, that explains what happened to a role."""
        log = self._folder.path / "logs" / f"{role.replace(' ', '-')}.log"
        words = ["less", log] if role and log.exists() else ["distbelief", "status", self._folder.path]
        return shlex.join(map(str, words))

    def _numbers(self, live: Json) -> Json:
        """Return the figures of the run now."""
        summary, timeline = self._follower.summary, self._follower.timeline
        started = summary.started
        last: HistoryRow | None = summary.history[-1] if summary.history else None
        return {
            **_numbers_at(timeline, timeline.seconds),
            "samples": summary.samples,
            "epoch": summary.epochs,
            "epochs": started.epochs if started else None,
            **({} if live["running"] else {"rate": _round(summary.rate)}),
            "accuracy": last["test_accuracy"] if last else None,
            "test_loss": last["test_loss"] if last else None,
            "staleness": summary.staleness()["mean"],
            **{way: sum(counts.values()) for way, counts in summary.bytes.items()},
        }

    def _members(self, live: Json, now: float) -> Json:
        """Return each member of a running job, or of an ended one, by its role."""
        summary, timeline = self._follower.summary, self._follower.timeline
        answered = {member["role"]: member for member in live.get("members") or ()}
        trains = {role for role in [*timeline.heard, *answered] if role == roles.SINGLE or roles.is_replica(role)}
        known = sorted(trains, key=lambda role: (roles.index_of(role), roles.partition_of(role)))
        members = {}
        for role in dict.fromkeys([*known, *answered]):
            answer, index = answered.get(role, {}), max(roles.index_of(role), 0)
            counts = summary.replicas.get(index) if role in trains else None
            heard, uses, leads = timeline.heard.get(role), timeline.uses.get(role), roles.is_lead(role)
            waited = answer.get("waited_seconds")
            members[role] = {
                "state": answer.get("state") or ("gone" if live["running"] else "ended"),
                "waits_for": "; ".join(filter(None, [answer.get("waits_for"), *answer.get("held_by", ())])),
                "waited": None if waited is None else round(waited, 1),
                "rate": _round(_per_second(timeline, uses, Uses, now).samples) if uses and leads else None,
                "participation": _round(summary.participation(index)) if counts and leads else None,
                "heard": None if heard is None or not live["running"] else round(max(0.0, now - heard)),
                "staleness": answer.get("staleness"),
                "gone": counts.gone if counts else "",
            }
        return members

    def _sentence(self, live: Json, members: Json, moment: float, past: bool) -> str:
        """Return how far the job is, when it will be over, and what it waits for."""
        summary, timeline = self._follower.summary, self._follower.timeline
        if not live["running"]:
            ended = f"{live.get('outcome')}: {live.get('reason')}".rstrip(": ")
            return (
                f"at {duration(moment)} of {duration(timeline.seconds)}; {ended}" if past else _ending(ended, summary)
            )
        started = summary.started
        if started is None:
            return f"starting{_longest(members)}"
        if started.unit == "epoch" and (whole := started.samples_per_epoch * started.epochs):
            epoch = min(summary.samples // max(started.samples_per_epoch, 1) + 1, started.epochs)
            rate = _per_second(timeline, timeline.amounts, Amounts, timeline.seconds).samples
            left = duration(math.ceil(max(0, whole - summary.samples) / rate)) if rate else ""
            far = f"epoch {epoch} of {started.epochs}, {min(100, 100 * summary.samples / whole):.0f} %"
            far += f"; over in about {left}" if left else ""
        else:
            far = f"{started.unit} {min(summary.epochs + 1, started.epochs)} of {started.epochs}"
        return f"{far}{_longest(members)}"


def _details(diagnosis: Json) -> list[str]:
    """Return the numbers of a diagnosis, and its remedy."""
    numbers = [f"{name.replace('_', ' ')} {value:.3g}" for name, value in diagnosis["evidence"].items()]
    return [", ".join(numbers), diagnosis["remedy"]]


def _ending(ended: str, summary: Summary) -> str:
    last = summary.history[-1] if summary.history else None
    measured = figures(last["test_accuracy"], last.get("test_metrics") or {}, last["test_loss"]) if last else ""
    return "; ".join(filter(None, [ended, measured, f"{summary.samples:,} samples in {duration(summary.seconds)}"]))


def _longest(members: Json) -> str:
    """Return a phrase about the replica that waits longest: an evaluator or a standby waits for its turn."""
    waits = {
        role: member["waited"]
        for role, member in members.items()
        if roles.is_replica(role) and member["waits_for"] and (member["waited"] or 0) >= LONG
    }
    if not waits:
        return ""
    role = max(waits, key=lambda role: float(waits[role]))
    return f"; {role} waits {members[role]['waits_for']} for {waits[role]:.0f} s"


def _numbers_at(timeline: Timeline, moment: float) -> Json:
    """Return the figures at a moment, as far as the timeline has them."""
    done = timeline.amounts.sum(Amounts, 0.0, moment, timeline.seconds)
    latest = next((bin.sums for bin in reversed(timeline.amounts.between(0.0, moment)) if bin.sums.losses), None)
    measure = next((point for point in reversed(timeline.measures) if point.seconds <= moment), None)
    return {
        "samples": round(done.samples),
        "rate": _round(_per_second(timeline, timeline.amounts, Amounts, moment).samples),
        "train_loss": _round(latest.loss / latest.losses) if latest else None,
        "accuracy": measure.accuracy if measure else None,
        "test_loss": measure.loss if measure else None,
        **{way: round(getattr(done, way)) for way in ("sent", "received", "shared_memory")},
    }


def _members_at(timeline: Timeline, moment: float) -> Json:
    """Return each replica at a moment, with what it did most."""
    since, now = moment - 6 * timeline.lately, timeline.seconds
    window = {role: uses.sum(Uses, since, moment, now).samples for role, uses in timeline.uses.items()}
    whole = sum(window.values())
    members = {}
    for role, uses in timeline.uses.items():
        last = _per_second(timeline, uses, Uses, moment)
        members[role] = {
            "state": _mostly(last),
            "waits_for": last.role if last.wait else "",
            "waited": None,
            "rate": _round(last.samples) if roles.is_lead(role) else None,
            "participation": _round(window[role] / whole) if whole and roles.is_lead(role) else None,
        }
    return members


def _shards(timeline: Timeline, members: Json, moment: float) -> Json:
    """Return each shard at a moment: version, pushes a second and who has its lock; and the staleness of all pushes.

    They are those of the first shards, whose updates a timeline keeps.
    """
    shards, pushes = {}, Updates()
    for role, bins in sorted(timeline.updates.items()):
        known, account = timeline.accounts[role]  # what it has done since is not known
        if moment < known:
            account = bins.sum(Updates, 0.0, moment, known)
        pushes.add(account)
        if not round(account.updates):  # it has not begun, or is of an attempt that had more shards
            continue
        lately = _per_second(timeline, bins, Updates, min(moment, known), known)
        shards[role] = {
            "version": round(account.updates),
            "pushes": _round(max(0.0, lately.pushes)),
            "waits_for": members.get(role, {}).get("waits_for", ""),
        }
    histogram = {str(staleness): round(count) for staleness, count in sorted(pushes.staleness.items())}
    return {"shards": shards, "staleness": {staleness: count for staleness, count in histogram.items() if count > 0}}


def _mostly(uses: Uses) -> str:
    """Return the use that took most of the time."""
    spent = {name: getattr(uses, name) for name in ("compute", "update", "communicate", "load", "wait")}
    most = max(spent, key=lambda name: float(spent[name]))
    return most if spent[most] else ""


def _per_second(timeline: Timeline, bins: Bins[B], kind: type[B], moment: float, known: float = math.inf) -> B:
    """Return what the bins have for each of the last seconds before a moment; they are `known` until another."""
    seconds = min(timeline.lately, moment)
    return bins.sum(kind, moment - seconds, moment, min(known, timeline.seconds), seconds)


def _amounts(bin: Bin[Amounts]) -> list[float | None]:
    """Return a bin's width, samples, smallest, mean and largest loss, and bytes by way."""
    sums = bin.sums
    losses = (sums.least, sums.loss / sums.losses, sums.most) if sums.losses else (None, None, None)
    ways = (sums.sent, sums.received, sums.shared_memory)
    return [bin.width, round(sums.samples), *map(_round, losses), *map(round, ways)]


def _uses(bin: Bin[Uses]) -> list[object]:
    """Return a bin's width, percentages of the time by use, and the role that was waited for longest."""
    uses = bin.sums
    spent = (uses.compute, uses.update, uses.communicate, uses.load, uses.wait)
    return [bin.width, *(round(100 * seconds / bin.width) for seconds in spent), uses.role]


def _round(value: float | None) -> float | None:
    """Return a number with four digits, which is as much as a page shows."""
    return None if value is None else float(f"{value:.4g}")


def _name(bin: Bin[Amounts] | Bin[Uses]) -> str:
    return f"{bin.start:.10g}"


def newest(folder: Path) -> Path | None:
    """Return the run that was started last in a folder of runs; None if there is none."""
    runs = [job.parent for job in folder.glob("*/job.json")]
    return max(runs, key=lambda run: (run / "job.json").stat().st_mtime, default=None)
