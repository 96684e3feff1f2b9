"""Timeline of a run, thinned to what pixels show: sums of its records over short times, marks and events.

Recent bins are short and old ones long, so that eight hours fit into some hundred bins, and the last minutes keep their
detail. When there are too many bins of a width, the two oldest become one of twice the width.
"""

from __future__ import annotations

import math
from typing import Annotated, Generic, TypeVar

import msgspec

from distbelief.core import records, roles
from distbelief.core.messages import WAYS
from distbelief.core.records import Json
from distbelief.record.summary import Summary, many

WIDTH = 2.0
"""Seconds of the shortest bins: replicas and shards give accounts as often."""
SIMULATED_WIDTH = 2.0**-10
"""The same in simulated time, where a job may take a tenth of a second; it doubles, up to `WIDTH`, as a job lasts."""
FINE, COARSE = 256, 64
"""Most bins of one width, for a job's amounts, and for each replica's uses or shard's updates; even numbers."""
LATELY, PART = 10.0, 0.02
"""Seconds that count as lately, and the part of a simulated job's time that does."""
SHOWN = 64
"""Most replicas whose use of time is kept, and most shards whose updates are."""
DIGITS = 5
"""Binary digits of a class of staleness: below 32 each number is one, then two numbers are, then four, ..."""
LATEST = 400
"""Most happenings, and most measures, that are kept."""
BACK = 5.0
"""Seconds by which a record may come late; one that is further back is of an attempt that has not started yet."""


class Amounts(msgspec.Struct, array_like=True):
    """Amounts of a job in one bin."""

    samples: float = 0.0
    loss: float = 0.0
    """Sum of the training losses."""
    losses: float = 0.0
    least: float = math.inf
    """Smallest loss."""
    most: float = -math.inf
    """Largest loss."""
    sent: float = 0.0
    received: float = 0.0
    shared_memory: float = 0.0

    def add(self, other: Amounts, share: float = 1.0) -> None:
        """Add a share of other amounts."""
        self.samples += share * other.samples
        self.loss, self.losses = self.loss + share * other.loss, self.losses + share * other.losses
        self.least, self.most = min(self.least, other.least), max(self.most, other.most)
        self.sent, self.received = self.sent + share * other.sent, self.received + share * other.received
        self.shared_memory += share * other.shared_memory


class Uses(msgspec.Struct, array_like=True):
    """Samples of a replica, and its seconds by use, in one bin."""

    samples: float = 0.0
    compute: float = 0.0
    update: float = 0.0
    communicate: float = 0.0
    load: float = 0.0
    wait: float = 0.0
    role: str = ""
    """Role that ended the longest waits."""
    longest: float = 0.0
    """Seconds of these waits."""

    def add(self, other: Uses, share: float = 1.0) -> None:
        """Add a share of other uses."""
        self.samples, self.compute = self.samples + share * other.samples, self.compute + share * other.compute
        self.update, self.communicate = self.update + share * other.update, self.communicate + share * other.communicate
        self.load, self.wait = self.load + share * other.load, self.wait + share * other.wait
        if share * other.longest > self.longest:
            self.role, self.longest = other.role, share * other.longest


class Updates(msgspec.Struct, array_like=True):
    """Updates of a shard in one bin; where it has gone back to a checkpoint they are negative."""

    updates: float = 0.0
    staleness: dict[int, float] = {}
    """Pushes, by class of staleness."""

    @property
    def pushes(self) -> float:
        """Return the number of pushes."""
        return sum(self.staleness.values())

    def add(self, other: Updates, share: float = 1.0) -> None:
        """Add a share of other updates."""
        self.updates += share * other.updates
        for staleness, count in other.staleness.items():
            self.staleness[staleness] = self.staleness.get(staleness, 0.0) + share * count


B = TypeVar("B", Amounts, Uses, Updates)


class Bin(msgspec.Struct, Generic[B], array_like=True):
    """Sums over some time."""

    start: float
    width: float
    sums: B


class Bins(msgspec.Struct, Generic[B]):
    """Bins of a whole run: the older, the wider.

    >>> bins = Bins[Amounts](kept=64, width=2.0)
    >>> for second in range(1024): bins.add(second, second + 1, Amounts(samples=3))
    >>> len(bins), bins.between(0, 8)[0].width, sum(bin.sums.samples for bin in bins.between(0, 2000))
    (200, 16.0, 3072.0)
    """

    kept: Annotated[int, msgspec.Meta(ge=2)]
    """Most bins of one width."""
    width: Annotated[float, msgspec.Meta(ge=SIMULATED_WIDTH)]
    """Seconds of the shortest bins."""
    levels: list[dict[int, B]] = []
    """Bins by number; bin k of level n begins at `k * width * 2**n` seconds."""
    firsts: list[int] = []
    """First number of each level; earlier bins have been merged into the next level."""

    def __len__(self) -> int:
        return sum(map(len, self.levels))

    def add(self, start: float, stop: float, sums: B) -> None:
        """Add sums that belong to the time from `start` to `stop`, evenly; to that moment if both are the same."""
        while self.width < WIDTH and stop >= self.kept * self.width:
            self._widen()
        first, last = int(start / self.width), int(stop / self.width)
        if first == last and self.levels and (known := self.levels[0].get(last)) is not None:  # most are such
            known.add(sums)
            return
        last -= last > first and last * self.width == stop
        whole = stop - start
        first = max(first, last - 2 * self.kept)  # the rest of a very long record counts there
        for number in range(first, last + 1):
            begin = start if number == first else number * self.width
            share = (min(stop, (number + 1) * self.width) - begin) / whole if whole else 1.0
            self._bin(number, type(sums)).add(sums, share)
        self._thin(0, last)

    def _widen(self) -> None:
        """Merge the shortest bins by twos."""
        self.width *= 2
        shortest = self.levels[0] if self.levels else {}
        self.levels, self.firsts = self.levels[1:] or [{}], self.firsts[1:] or [0]
        for number, sums in shortest.items():
            self.levels[0].setdefault(number >> 1, type(sums)()).add(sums)

    def _bin(self, number: int, kind: type[B]) -> B:
        """Return the bin of the time that bin `number` has at the first level."""
        level = 0
        while level < len(self.firsts) and number < self.firsts[level]:
            number, level = number >> 1, level + 1
        if level == len(self.levels):
            self.levels.append({})
            self.firsts.append(0)
        return self.levels[level].setdefault(number, kind())

    def _thin(self, level: int, last: int) -> None:
        """Merge the oldest bins of a level, by twos, until it has at most `kept` numbers."""
        first = max(self.firsts[level], (last - self.kept + 2) & ~1)
        if first == self.firsts[level]:
            return
        bins, self.firsts[level] = self.levels[level], first
        if level + 1 == len(self.levels):
            self.levels.append({})
            self.firsts.append(0)
        for number in [number for number in bins if number < first]:
            merged = bins.pop(number)
            self.levels[level + 1].setdefault(number >> 1, type(merged)()).add(merged)
        self._thin(level + 1, (first >> 1) - 1)

    def between(self, start: float, stop: float) -> list[Bin[B]]:
        """Return the bins of which a part lies between `start` and `stop`, in the order of time."""
        kept = []
        for level in reversed(range(len(self.levels))):
            width = self.width * 2**level
            bins = self.levels[level]
            kept += [Bin(k * width, width, bins[k]) for k in sorted(bins) if start - width < k * width < stop]
        return kept

    def sum(self, kind: type[B], start: float, stop: float, until: float, per: float = 1.0) -> B:
        """Return what the bins have from `start` to `stop`, divided by `per`; of a bin that is partly there, its share.

        The newest bin is of the time `until` some moment.
        """
        total = kind()
        for bin in self.between(start, stop):
            end = min(bin.start + bin.width, until)
            whole = end - bin.start
            share = max(0.0, min(end, stop) - max(bin.start, start)) / whole if whole > 0 else 1.0
            total.add(bin.sums, share / per)
        return total


class Happening(msgspec.Struct, array_like=True):
    """Something that happened to a role, or to the job ("")."""

    seconds: float
    role: str
    text: str
    """Sentence about it; "" if it needs none."""
    mark: str
    """Words for its mark: that the role has joined, left or died, ...; "" without one."""


MARKS: dict[type[records.Record], str] = {
    records.Joined: "joined",
    records.Succeeded: "succeeded",
    records.Vacant: "is replaced",
    records.Rewound: "went back to a checkpoint",
}
"""Marks of records, besides those of roles that are gone."""


class MeasurePoint(msgspec.Struct, array_like=True):
    """Measure of the model; `accuracy` is 0 to 1, None where the task has none."""

    seconds: float
    samples: int
    accuracy: float | None
    loss: float | None


class Timeline(msgspec.Struct):
    """Timeline of a run, over all its attempts, in seconds of training."""

    amounts: Bins[Amounts]
    simulated: bool = False
    uses: dict[str, Bins[Uses]] = {}
    """Use of time of each replica; of the first `SHOWN`."""
    heard: dict[str, float] = {}
    """Moment of the latest record of each role."""
    happenings: list[Happening] = []
    dropped: int = 0
    """Number of happenings before those that are kept."""
    measures: list[MeasurePoint] = []
    """All up to `LATEST`; beyond that every second, fourth, ..."""
    seconds: float = 0.0
    """Time of the last record."""
    _offset: float | None = None
    """Difference to the attempt's seconds; None before the first one has started."""
    _measured: int = 0
    _stride: int = 1
    """Distance between kept measures."""
    updates: dict[str, Bins[Updates]] = {}
    """Updates of each shard; of the first `SHOWN`."""
    accounts: dict[str, tuple[float, Updates]] = {}
    """Moment and contents of the latest account of each of these shards."""
    _counted: dict[str, float] = {}
    """Moment until which each role's bytes, or a replica's steps, are counted."""

    @property
    def lately(self) -> float:
        """Seconds over which a present rate is a mean; in simulated time a part of the run."""
        return PART * self.seconds if self.simulated else LATELY

    @staticmethod
    def of(job: Json) -> Timeline:
        """Return an empty timeline for a job, by the contents of its `job.json`."""
        simulated = "cluster" in job
        return Timeline(Bins[Amounts](FINE, SIMULATED_WIDTH if simulated else WIDTH), simulated)

    def take(self, seconds: float, record: records.Record, summary: Summary) -> None:
        """Add a record from `seconds` after its attempt began; the sums include it."""
        if isinstance(record, records.Started):
            self._offset = self.seconds - seconds
            for gone in [role for role in self.accounts if roles.index_of(role) >= record.shards]:
                self._take_applied(self.seconds, records.Applied(gone, 0, 0, {}))  # an earlier attempt had more shards
        now = self.seconds if self._offset is None else self._offset + seconds
        if now < self.seconds - BACK:
            now = self.seconds
        self.seconds = max(self.seconds, now)
        role = getattr(record, "role", "")
        if role:
            self.heard[role] = now
        match record:
            case records.Joined():
                self._since(now, f"steps of {role}")
            case records.Stepped():
                self._take_stepped(now, record)
            case records.StepsTimed():
                self._take_times(now, record)
            case records.BytesCounted():
                ways = {way: sum(getattr(record, way).values()) for way in WAYS}
                self.amounts.add(self._since(now, f"bytes of {role}"), now, Amounts(**ways))
            case records.Applied():
                self._take_applied(now, record)
            case records.Tested():
                self._take_tested(now, record, summary)
        self._take_happening(now, role, record)

    def _take_happening(self, now: float, role: str, record: records.Record) -> None:
        text, mark = sentence(record), _mark_of(record)
        if not (text or mark):
            return
        self.happenings.append(Happening(now, role, text, mark))
        while len(self.happenings) > LATEST:
            self.happenings.pop(0)
            self.dropped += 1

    def _since(self, now: float, what: str) -> float:
        """Return the moment until which something was counted, which is now from here on."""
        before, self._counted[what] = self._counted.get(what, now), now
        return min(before, now)  # a record may come late

    def _take_stepped(self, now: float, record: records.Stepped) -> None:
        amounts = Amounts(record.samples)
        if record.loss is not None and math.isfinite(record.loss):
            loss, weight = record.loss, record.losses
            amounts = Amounts(record.samples, loss * weight, weight, loss, loss)
        start = self._since(now, f"steps of {record.role}")
        self.amounts.add(start, now, amounts)
        self._use(start, now, record.role, Uses(record.samples))

    def _take_times(self, now: float, record: records.StepsTimed) -> None:
        spent = record.compute, record.update, record.communicate, record.load, record.wait
        role, longest = max(record.waited.items(), key=lambda one: one[1], default=("", 0.0))
        start = min(now, max(0.0, now - sum(spent)))
        self._use(start, now, record.role, Uses(0.0, *spent, role, longest))

    def _use(self, start: float, stop: float, role: str, uses: Uses) -> None:
        bins = self.uses.get(role)
        if bins is None:
            if len(self.uses) == SHOWN:
                return
            bins = self.uses[role] = Bins[Uses](COARSE, self.amounts.width)
        bins.add(start, stop, uses)

    def _take_applied(self, now: float, record: records.Applied) -> None:
        if record.role not in self.updates:
            if len(self.updates) == SHOWN:
                return
            self.updates[record.role] = Bins[Updates](COARSE, self.amounts.width)
        (before, known), account = self.accounts.get(record.role, (0.0, Updates())), Updates(record.updates)
        for staleness, count in record.staleness.items():
            low = max(0, staleness.bit_length() - DIGITS)
            lowest = staleness >> low << low
            account.staleness[lowest] = account.staleness.get(lowest, 0.0) + count
        self.accounts[record.role] = now, account
        more = Updates(account.updates, dict(account.staleness))
        more.add(known, -1.0)
        more.staleness = {staleness: count for staleness, count in more.staleness.items() if count}
        self.updates[record.role].add(min(before, now), now, more)

    def _take_tested(self, now: float, record: records.Tested, summary: Summary) -> None:
        loss = record.loss if math.isfinite(record.loss) else None
        if self.measures and (self._measured - 1) % self._stride:
            self.measures.pop()  # this one was kept only while it was the last
        self.measures.append(MeasurePoint(now, summary.samples, record.accuracy, loss))
        self._measured += 1
        if len(self.measures) > LATEST:
            self.measures, self._stride = self.measures[::2], 2 * self._stride


def sentence(record: records.Record) -> str:
    """Return what a record says to people; "" if it only changes numbers.

    >>> sentence(records.Gone("replica 1", 2, "killed by signal 9", True))
    'replica 1 died: killed by signal 9; its 2 minibatches are dealt again'
    """
    match record:
        case records.Gone():
            return _of_gone(record)
        case records.Checkpointed(error=error) if error:
            return error if error.startswith("checkpoint") else f"checkpoint {record.number} failed: {error}"
        case records.Forgotten():
            count = many(record.last - record.first + 1, "push", "es")
            return f"{record.role} has lost {count} of {record.replica}, made after its latest checkpoint"
        case records.StandbyReady():
            return f"{record.role} holds everything that {roles.shard_of(record.role)} has acknowledged"
        case records.Note():
            return record.text
        case records.Finished():
            return f"{record.outcome}: {record.reason}"
    return ""


def _mark_of(record: records.Record) -> str:
    if isinstance(record, records.Gone):
        return "died" if record.died else "left"
    return MARKS.get(type(record), "")


def _of_gone(record: records.Gone) -> str:
    verb = "is" if record.lost == 1 else "are"
    dealt = f"; its {many(record.lost, 'minibatch', 'es')} {verb} dealt again" if record.lost else ""
    if record.given_up:
        known = record.given_up > 0
        left = many(record.given_up, "minibatch", "es") if known else "what is left of its stream"
        dealt = f"; {left}{' of its own' if known else ''} will not be trained on"
    shown = record.died or dealt
    return f"{record.role} {'died' if record.died else 'left'}: {record.reason}{dealt}" if shown else ""
