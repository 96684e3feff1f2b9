"""What the page of a run shows of its records: who takes part, and how fast."""

from collections.abc import Iterable
from pathlib import Path

import msgspec
import pytest

from distbelief.core import records as r
from distbelief.core.records import Json
from distbelief.core.roles import is_lead
from distbelief.lab.watch import reading
from distbelief.lab.watch.reading import Reading
from distbelief.record import following
from distbelief.record.diagnosis import Diagnosis, Level
from distbelief.record.folder import RunFolder
from distbelief.record.recorder import Recorder


def left_by(folder: Path, records: Iterable[tuple[float, r.Record]], **job: Json) -> Reading:
    """The reading of a run that has left these records."""
    run = RunFolder.create(folder, "run")
    run.write_job({"task": "t", "strategy": "s", **job})
    made = Recorder(run, run.read_job())
    for each in records:
        made.take(*each)
    made.finish()
    return Reading(folder)


def steady(roles: tuple[str, ...], seconds: int, scale: float = 1.0) -> Iterable[tuple[float, r.Record]]:
    """Records of a job of which each role computes ten samples a second."""
    yield 0.0, r.Started(len(roles), 1, 10, 6000, 10, 1000)
    for second in range(1, seconds + 1):
        for role in roles:
            if is_lead(role):
                yield second * scale, r.Stepped(role, 1, 10, 1, 1.0, 0, 1)
            yield second * scale, r.StepsTimed(role, 1, 0.5 * scale, 0.0, 0.2 * scale, 0.3 * scale)


@pytest.mark.parametrize(
    "roles", [("single",), ("replica 0", "replica 1"), ("replica 0.0", "replica 0.1", "replica 1.0")]
)
def test_who_trains_is_shown_once_by_its_own_name(tmp_path: Path, roles: tuple[str, ...]) -> None:
    seen, leads = left_by(tmp_path, steady(roles, 100)), [role for role in roles if is_lead(role)]
    for state in (seen.view(None), seen.view(90.0)):
        assert {*state["members"]} == {*state["bands"]} == {*roles}
        for role, one in state["members"].items():
            assert one["rate"] == (pytest.approx(10, rel=0.1) if role in leads else None)
            assert one["participation"] == (pytest.approx(1 / len(leads), abs=0.01) if role in leads else None)


def test_a_moment_long_ago_has_its_rate(tmp_path: Path) -> None:
    for scale, job in ((1.0, {}), (1e-4, {"cluster": {}})):
        seen = left_by(tmp_path / f"{scale}", steady(("replica 0", "replica 1"), 4000, scale), **job)
        for moment in (35, 1001, 1999, 2876, 3500, 4000):
            state = seen.view(moment * scale)
            assert state["numbers"]["rate"] * scale == pytest.approx(20, rel=0.3)
            assert state["numbers"]["samples"] == pytest.approx(20 * moment, rel=0.02, abs=200)
            for one in state["members"].values():
                assert one["rate"] * scale == pytest.approx(10, rel=0.3)
                assert one["participation"] == 0.5
                assert one["state"] == "compute"


def test_of_an_ended_run_all_is_read_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reading, "READS", 1)
    monkeypatch.setattr(following, "AT_ONCE", 1000)
    left_by(tmp_path, steady(("replica 0",), 100))
    (tmp_path / "timeline.msgpack").unlink()
    assert Reading(tmp_path).view(None)["numbers"]["samples"] == 1000


def test_a_command_can_be_copied_to_a_shell(tmp_path: Path) -> None:
    run = tmp_path / "my $(run)"
    seen = left_by(run, [(0.0, r.Note("a"))]).view(None)
    assert [command for *_, command in seen["events"].values()] == [f"distbelief status '{run}'"]


def test_a_shard_has_the_pushes_and_staleness_of_each_moment(tmp_path: Path) -> None:
    """Until its latest account: of what it has done since nothing is known; it goes back once."""
    told: list[tuple[float, r.Record]] = [(0.0, r.Started(1, 1, 10, 6000, 10, 2))]
    for second in range(1, 400, 2):
        done = second if second < 300 else second - 100
        told.append((second, r.Applied("shard 0", 10 * done, 100 * done, {0: 8 * done, 70: done, 71: done})))
        told.append((second + 1.5, r.BytesCounted("shard 0", {"push": 40}, {}, {})))
    seen = left_by(tmp_path, told)
    for moment, done in ((None, 299), (3.0, 3), (151.0, 151), (280.0, 280), (351.0, 251)):
        state = seen.view(moment)
        assert state["shards"]["shard 0"]["pushes"] == 10.0
        assert state["shards"]["shard 0"]["version"] == pytest.approx(10 * done, rel=0.05)
        assert state["staleness"]["0"] == pytest.approx(8 * done, rel=0.05)
        assert state["staleness"]["68"] == pytest.approx(2 * done, rel=0.05), "68 to 71 are one class"
    assert seen.view(300.0)["shards"]["shard 0"]["pushes"] == 0.0, "fewer than none"


def test_an_attempt_with_fewer_shards_has_no_others(tmp_path: Path) -> None:
    def attempt(shards: int, start: float) -> Iterable[tuple[float, r.Record]]:
        yield start, r.Started(1, shards, 10, 6000, 10, 2)
        for second in range(2, 40, 2):
            for shard in range(shards):
                yield start + second, r.Applied(f"shard {shard}", second, second, {shard: second})

    seen = left_by(tmp_path, [*attempt(3, 0.0), *attempt(1, 50.0)])
    assert (seen.view(30.0)["shards"].keys(), seen.view(30.0)["staleness"]) == (
        {"shard 0", "shard 1", "shard 2"}, {"0": 30, "1": 30, "2": 30},
    )  # fmt: skip
    assert (seen.view(None)["shards"].keys(), seen.view(None)["staleness"]) == ({"shard 0"}, {"0": 38})
    assert seen.view(70.0)["shards"].keys() == {"shard 0"}


def test_a_page_that_is_open_has_the_settings_of_a_resumed_job(tmp_path: Path) -> None:
    run = RunFolder.create(tmp_path, "run")
    run.write_job({"task": "t", "strategy": "downpour"})
    first = Recorder(run, run.read_job())
    first.take(0.0, r.Started(1, 1, 10, 6000, 10, 2))
    seen = Reading(tmp_path)
    assert seen.view(None)["run"]["title"] == "downpour on t"
    first.finish()
    run.write_job({"task": "t", "strategy": "softsync", "settings": {"target_accuracy": 0.9}})
    second = Recorder(run, run.read_job())
    second.take(0.0, r.Started(1, 1, 10, 6000, 10, 2, 300))
    state = seen.view(None)
    assert (state["run"]["title"], state["target"]["accuracy"]) == ("softsync on t", 0.9)
    second.finish()


@pytest.mark.parametrize("scale", [1e-4, 1e-2, 1.0])
def test_a_simulated_run_has_as_many_bins_as_its_charts_show(tmp_path: Path, scale: float) -> None:
    """Though a role that counts its bytes seldom gives one account of half of the run."""
    told = [*steady(("replica 0",), 1000, scale), (1000 * scale, r.BytesCounted("evaluator", {"push": 40}, {}, {}))]
    told.insert(500, (400 * scale, r.BytesCounted("evaluator", {"push": 40}, {}, {})))
    state = left_by(tmp_path, sorted(told, key=lambda one: one[0]), cluster={}).view(None)
    assert 100 <= len(state["series"]) <= 1000


def test_steps_that_a_record_counts_together_are_spread_over_their_time(tmp_path: Path) -> None:
    """Since the replica's record before, or since it has joined."""
    told: list[tuple[float, r.Record]] = [(0.0, r.Joined("replica 0")), (0.0, r.Started(1, 1, 10, 6000, 10, 2))]
    told += [(second, r.Stepped("replica 0", 20, 2000, 20, 0.5, 0, 1)) for second in (20.0, 40.0, 60.0)]
    told += [(60.0, r.Gone("replica 0", 0, "killed", True)), (80.0, r.Joined("replica 0"))]
    seen = left_by(tmp_path, [*told, (100.0, r.Stepped("replica 0", 20, 2000, 20, 0.5, 0, 1))])
    for moment, rate, samples in ((15.0, 100, 1500), (50.0, 100, 5000), (76.0, 0, 6000), (95.0, 100, 7500)):
        state = seen.view(moment)
        assert state["numbers"]["rate"] == state["members"]["replica 0"]["rate"] == pytest.approx(rate, abs=1)
        assert state["numbers"]["samples"] == pytest.approx(samples, abs=10)


def test_what_is_wrong_ends_the_first_line(tmp_path: Path) -> None:
    left_by(tmp_path, [(0.0, r.Started(1, 1, 10, 6000, 10, 2))])
    wrong = Diagnosis(Level.WRONG, "rate", "the loss has risen", {"lr": 0.5, "implied_momentum": 0.75}, "--lr 0.1")
    advice = Diagnosis(Level.ADVICE, "alone", "one process would be faster", {}, "single")
    result = {"outcome": "done", "reason": "all epochs are done", "diagnosis": [wrong, advice]}
    RunFolder(tmp_path).result.write_bytes(msgspec.json.encode(result))
    state = Reading(tmp_path).view(None)
    assert state["sentence"] == "done: all epochs are done; 0 samples in 0.0 s; wrong: the loss has risen"
    assert state["diagnosis"] == {"rate": ["lr 0.5, implied momentum 0.75", "--lr 0.1"]}
    assert not Reading(tmp_path).view(0.0)["diagnosis"]
