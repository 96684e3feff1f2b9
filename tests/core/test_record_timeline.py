"""The timeline of a run against sums written without it, and its follower against a reading of all metrics."""

import itertools
import math
from pathlib import Path

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from distbelief.core import records as r
from distbelief.core.effects import Arrival, Computed
from distbelief.record import following, metrics, recorder
from distbelief.record.folder import RunFolder
from distbelief.record.following import Follower
from distbelief.record.metrics import LONGEST, line
from distbelief.record.summary import Summary
from distbelief.record.timeline import BACK, LATEST, SHOWN, SIMULATED_WIDTH, WIDTH, Amounts, Bins, Timeline
from distbelief.runtime.player import StepTimes

SPANS = st.lists(
    st.tuples(st.floats(0, 300), st.floats(0, 60), st.integers(0, 9)).map(
        lambda t: (round(t[0], 2), round(t[1], 2), t[2])
    ),
    max_size=60,
)


def overlap(start: float, stop: float, begin: float, end: float) -> float:
    """The share of a span that lies in a bin; a moment lies in one bin."""
    if start == stop:
        return float(begin <= start < end)
    return max(0.0, min(stop, end) - max(start, begin)) / (stop - start)


@given(SPANS, st.sampled_from([2, 4, 16]), st.sampled_from([SIMULATED_WIDTH, 0.5, WIDTH]))
def test_each_bin_has_the_shares_of_the_spans_that_lie_in_it(
    spans: list[tuple[float, float, int]], kept: int, width: float
) -> None:
    bins = Bins[Amounts](kept, width)
    at, added = 0.0, []
    for step, length, samples in spans:
        at += step
        start = max(0.0, at - length)
        bins.add(start, at, Amounts(samples))
        added.append((start, at, samples))
    whole = bins.between(0.0, math.inf)
    assert math.isclose(sum(bin.sums.samples for bin in whole), sum(samples for _, _, samples in added))
    assert all(before.start + before.width <= after.start for before, after in itertools.pairwise(whole))
    assert all(before.width >= after.width for before, after in itertools.pairwise(whole))
    for level in bins.levels:
        assert len(level) <= kept
    assert bins.width <= WIDTH
    oldest = 2 * kept * WIDTH  # the rest of a longer span is not spread
    if all(stop - start <= oldest - WIDTH for start, stop, _ in added):
        for bin in whole:
            end = bin.start + bin.width
            naive = sum(samples * overlap(start, stop, bin.start, end) for start, stop, samples in added)
            # a moment at the end of a bin may count in either
            border = sum(samples for start, stop, samples in added if stop in (bin.start, end))
            assert abs(bin.sums.samples - naive) <= border + 1e-6


def timeline_of(job: recorder.Recorder) -> Timeline:
    """The timeline that a recorder keeps."""
    return next(sink.timeline for sink in job.sinks if isinstance(sink, following.TimelineKeeper))


def happenings(count: int) -> list[tuple[float, r.Record]]:
    """Records of a job of three replicas, of which one dies and comes back."""
    made: list[tuple[float, r.Record]] = [(3.0, r.Joined("replica 0")), (3.1, r.Started(3, 1, 10, 6000, 10, 2))]
    for step in range(count):
        moment, role = 3.2 + step / 2, f"replica {step % 3}"
        made.append((moment, r.Stepped(role, 1, 10, 1, 1.0 / (1 + step), 0, 1)))
        made.append((moment, r.StepsTimed(role, 1, 0.2, 0.0, 0.1, 0.15, 0.05, {"shard 0": 0.1, "coordinator": 0.05})))
        made.append((moment, r.BytesCounted(role, {"push": 40}, {"fetch": 40}, {})))
        made.append((moment, r.Applied(f"shard {step % 2}", step, 10 * step, {0: step // 3, 40: step % 7})))
        if step % 9 == 4:
            made.append((moment, r.Gone(role, 1, "killed by signal 9", True)))
            made.append((moment, r.Joined(role)))
        if step % 20 == 19:
            made.append((moment, r.Tested(1, 1.0 / step, 0.5)))
    return made


def test_a_timeline_goes_on_after_it_was_written() -> None:
    whole, summary = Timeline.of({}), Summary({})
    kept: Timeline | None = None
    for index, (seconds, record) in enumerate(happenings(400)):
        summary.take(seconds, record)
        whole.take(seconds, record, summary)
        if index == 300:
            kept = msgspec.msgpack.decode(msgspec.msgpack.encode(whole), type=Timeline)
        elif kept is not None:
            kept.take(seconds, record, summary)
    assert kept == whole
    assert whole.uses.keys() == {"replica 0", "replica 1", "replica 2"}
    times = [bin.sums for bin in whole.uses["replica 1"].between(0, math.inf)]
    assert {uses.role for uses in times} == {"shard 0"}, "the role that was waited for longest"
    assert math.isclose(sum(uses.load for uses in times), 133 * 0.05)
    assert math.isclose(sum(bin.sums.sent for bin in whole.amounts.between(0, math.inf)), 400 * 40)


def test_what_is_kept_is_bounded() -> None:
    timeline, summary = Timeline.of({}), Summary({})
    timeline.take(0.0, r.Started(200, 1, 10, 6000, 10, 2), summary)
    for number in range(4 * LATEST):
        role = f"replica {number % 200}"
        timeline.take(number, r.Joined(role), summary)
        timeline.take(number, r.Note(f"note {number}"), summary)
        timeline.take(number, r.Tested(number, 0.1, 0.9), summary)
        timeline.take(number, r.Stepped(role, 1, 1, 1, 0.5, 0, 1), summary)
        timeline.take(number, r.Applied(f"shard {number % 200}", number, number, {number: number}), summary)
    assert (len(timeline.happenings), timeline.dropped) == (LATEST, 7 * LATEST)
    first, second = timeline.happenings[:2]
    assert (first.role, first.mark, second.text) == ("replica 0", "joined", f"note {7 * LATEST // 2}")
    assert len(timeline.measures) <= LATEST
    assert (timeline.measures[0].seconds, timeline.measures[-1].seconds) == (0.0, 4 * LATEST - 1)
    assert len(timeline.uses) == len(timeline.updates) == len(timeline.accounts) == SHOWN


def test_staleness_has_few_classes_however_large_it_is() -> None:
    timeline, summary = Timeline.of({}), Summary({})
    timeline.take(1.0, r.Applied("shard 0", 1, 1, dict.fromkeys(range(1 << 14), 1)), summary)
    _, account = timeline.accounts["shard 0"]
    assert account.pushes == 1 << 14
    assert [account.staleness[low] for low in (0, 31, 32, 34, 62, 64, 1 << 13)] == [1, 1, 2, 2, 2, 4, 512]
    assert len(account.staleness) == 32 + 9 * 16


def test_time_is_that_of_training_and_goes_on_in_the_next_attempt() -> None:
    timeline, summary = Timeline.of({}), Summary({})
    started = r.Started(1, 1, 10, 6000, 10, 2)
    for seconds, record in [(9.0, r.Note("before")), (10.0, started), (30.0, r.Note("later")), (29.0, r.Note("late"))]:
        timeline.take(seconds, record, summary)
    for seconds, record in [(1.0, r.Note("again")), (12.0, started), (17.0, r.Note("on"))]:
        timeline.take(seconds, record, summary)
    assert [(one.seconds, one.text) for one in timeline.happenings] == [
        (0.0, "before"), (20.0, "later"), (19.0, "late"), (20.0, "again"), (25.0, "on"),
    ]  # fmt: skip
    assert BACK > 1.0


@given(st.lists(st.integers(1, 4000), max_size=12), st.integers(0, 200))
def test_a_follower_has_what_a_reader_of_all_metrics_has(
    tmp_path_factory: pytest.TempPathFactory, cuts: list[int], kept_at: int
) -> None:
    folder = RunFolder(tmp_path_factory.mktemp("run"))
    written = [line(*each) for each in happenings(60)]
    whole, summary, timeline = b"".join(written), Summary({}), Timeline.of({})
    for index, (seconds, record) in enumerate(happenings(60)):
        if index == kept_at:  # the recorder keeps the sums until here
            following.RunSums(len(b"".join(written[:index])), summary, timeline).write(folder.timeline)
        summary.take(seconds, record)
        timeline.take(seconds, record, summary)
    if folder.timeline.exists():
        folder.metrics.write_bytes(whole[: len(b"".join(written[:kept_at]))])
    follower, at = Follower(folder, {}), folder.metrics.stat().st_size if folder.metrics.exists() else 0
    for cut in cuts:  # lines may come in parts
        at = min(len(whole), at + cut)
        folder.metrics.write_bytes(whole[:at])
        follower.read()
    folder.metrics.write_bytes(whole)
    follower.read_all()
    assert (follower.timeline, follower.summary.result()) == (timeline, summary.result())


def test_a_follower_reads_only_what_came_after_the_kept_sums(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = RunFolder(tmp_path)
    monkeypatch.setattr(following, "KEEP_SECONDS", math.inf)
    job = recorder.Recorder(run, {"task": "t"})
    for each in [*happenings(600), (999.0, r.Finished.of(r.Cause.EPOCHS_DONE, "all epochs are done"))]:
        job.take(*each)
    job.finish()
    read: list[int] = []
    further = following.read_further

    def counted(path: Path, start: int, limit: int) -> object:
        read.append(start)
        return further(path, start, limit)

    monkeypatch.setattr(following, "read_further", counted)
    follower = Follower(run, job.job).read_all()
    assert follower.timeline == timeline_of(job)
    assert read == [run.metrics.stat().st_size]


def test_a_line_that_is_longer_than_one_reading_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(following, "AT_ONCE", 100)
    run = RunFolder(tmp_path)
    notes = [r.Note("a" * 50), r.Note("b" * 5000), r.Note("c" * 50)]
    run.metrics.write_bytes(b"".join(line(0.0, note) for note in notes))
    assert [one.text for one in Follower(run, {}).read_all().timeline.happenings] == [note.text for note in notes]


NO_TEXT = b"\x81\xa7summary\x81\xa3job\x81\xa1\xff\x00"
WIDE = following.RunSums(0, Summary({}), Timeline(Bins[Amounts](64, 0.0)))
DEEP = b"\x81\xa7summary\x81\xa3job\x81\xa1a" + b"\x91" * 100_000


@pytest.mark.parametrize("spoilt", [b"", b"\x00" * 40, b"garbage", NO_TEXT, DEEP, msgspec.msgpack.encode(WIDE), None])
def test_without_kept_sums_the_metrics_are_read(tmp_path: Path, spoilt: bytes | None) -> None:
    run = RunFolder(tmp_path)
    job = recorder.Recorder(run, {"task": "t"})
    for each in happenings(60):
        job.take(*each)
    job.finish()
    if spoilt is None:
        run.timeline.unlink()
    else:
        run.timeline.write_bytes(spoilt)
    assert Follower(run, job.job).read_all().timeline == timeline_of(job)


def test_a_line_of_no_possible_time_is_skipped(tmp_path: Path) -> None:
    run = RunFolder(tmp_path)
    spoilt = [line(3.0, r.Note("a")).replace(b"3.0", number) for number in (b"1e300", b"-1e300", b"1e9999")]
    run.metrics.write_bytes(b"".join([*spoilt, line(4.0, r.StepsTimed("replica 0", 1, -1e9, 0.0, 0.0, 0.0))]))
    follower = Follower(run, {}).read_all()
    assert (follower.timeline.happenings, follower.timeline.heard) == ([], {"replica 0": 0.0})


def test_a_follower_goes_on_after_a_line_that_is_too_long(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(metrics, "LONGEST", following.AT_ONCE)
    run = RunFolder(tmp_path)
    made = [line(*each) for each in happenings(60)]
    run.metrics.write_bytes(b"".join([*made[:9], line(5.0, r.Note("x" * 3 * LONGEST)), *made[9:]]))
    read = Follower(run, {}).read_all()
    run.metrics.write_bytes(b"".join(made))
    assert read.timeline == Follower(run, {}).read_all().timeline


def test_a_follower_has_the_sums_of_a_resumed_job(tmp_path: Path) -> None:
    run = RunFolder(tmp_path)
    first = recorder.Recorder(run, {"task": "t"})
    for each in happenings(60):
        first.take(*each)
    first.finish(write=False)
    open_for_long = Follower(run, {"task": "t"}).read_all()
    second = recorder.Recorder(run, {"task": "t"})
    second.take(0.0, r.Note("again"))
    early = Follower(run, {"task": "t"}).read_all()
    assert early.summary.bytes == first.summary.bytes, "the sums of the new recorder are not known yet"
    second.take(3.0, r.Started(3, 1, 10, 6000, 10, 2, 300))
    second.take(4.0, r.Stepped("replica 0", 1, 10, 1, 1.0, 0, 1))
    assert second.summary.steps < first.summary.steps, "half of the work is undone"
    for follower in (open_for_long, early, Follower(run, {"task": "t"})):
        assert follower.read_all().summary.result() == second.summary.result()
        assert follower.timeline == timeline_of(second)
    second.finish(write=False)


def test_another_job_in_the_folder_is_followed_from_its_start(tmp_path: Path) -> None:
    run = RunFolder(tmp_path)
    run.metrics.write_bytes(b"".join(line(*each) for each in happenings(60)))
    follower = Follower(run, {}).read_all()
    run.metrics.write_bytes(b"".join(line(*each) for each in happenings(3)))
    assert follower.read_all().timeline == Follower(run, {}).read_all().timeline
    assert follower.summary.steps == 3


def test_a_full_disk_costs_only_the_kept_sums(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object, **__: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(following, "write_atomically", full)
    job = recorder.Recorder(RunFolder(tmp_path), {"task": "t"})
    for each in happenings(20):
        job.take(*each)
    assert job.finish()["steps"] == 20
    assert not RunFolder(tmp_path).timeline.exists()


@given(st.lists(st.tuples(st.sampled_from(["compute", "wait", "work", "update"]), st.floats(0.01, 3)), max_size=40))
def test_the_records_of_times_add_up_to_all_of_the_time(uses: list[tuple[str, float]]) -> None:
    def recorded(seldom: float) -> list[r.StepsTimed]:
        now, noted = 0.0, list[r.StepsTimed]()
        times = StepTimes("replica 0", lambda: now, noted.append, every=seldom)
        for doing, seconds in uses:
            times.begin(doing)
            now += seconds
            loaded = Computed(0.1, 1, 0.75 * seconds, load=0.25 * seconds)
            times.go_on({"compute": loaded, "wait": Arrival("shard 1", None)}.get(doing))  # type: ignore[arg-type]
        times.tell()
        return noted

    whole, parts = recorded(math.inf), recorded(2.0)
    assert len(whole) <= 1
    assert bool(whole) == bool(parts)
    for name in ("steps", "compute", "update", "communicate", "wait", "load"):
        assert math.isclose(*(sum(getattr(one, name) for one in some) for some in (whole, parts)), abs_tol=1e-9)
    assert all(each.compute + each.load + each.wait >= 0 and each.communicate >= 0 for each in parts)
    if whole:
        end = max(i for i, (doing, _) in enumerate(uses) if doing == "compute")
        begin = min(i for i, (doing, _) in enumerate(uses) if doing == "compute")
        spent = sum(seconds for _, seconds in uses[begin : end + 1])
        names = ("compute", "update", "communicate", "wait", "load")
        assert math.isclose(sum(getattr(one, name) for one in parts for name in names), spent)
