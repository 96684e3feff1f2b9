"""The state of a run at a moment of its clock, for its page, against what the run did then."""

import pytest

from distbelief.core import records as r
from distbelief.lab.watch.reading import Reading
from distbelief.record.folder import RunFolder
from distbelief.record.recorder import Recorder

SECONDS = 8000


@pytest.fixture(scope="module")
def reading(tmp_path_factory: pytest.TempPathFactory) -> Reading:
    """A run of 100 samples a second, long enough for old bins to be long."""
    run = RunFolder(tmp_path_factory.mktemp("run"))
    run.job.write_bytes(b'{"task": "mnist", "strategy": "downpour"}')
    job = Recorder(run, {})
    job.take(0.0, r.Started(1, 1, 10, 100 * SECONDS, 10, 1))
    for second in range(1, SECONDS + 1):
        job.take(second, r.Stepped("replica 0", 1, 100, 1, 0.5, 0, 1))
        job.take(second, r.StepsTimed("replica 0", 1, 0.7, 0.1, 0.0, 0.2, 0.0, {"shard 0": 0.2}))
    job.take(SECONDS, r.Finished.of(r.Cause.EPOCHS_DONE, "all epochs are done"))
    job.finish()
    return Reading(run.path)


@pytest.mark.parametrize("moment", [5.0, 50.0, 333.0, 1001.0, 4000.0, 4033.0, 7000.0, 7999.5, 2.0 * SECONDS])
def test_every_moment_has_its_own_rate_samples_and_uses_of_time(reading: Reading, moment: float) -> None:
    state, known = reading.view(moment), min(moment, SECONDS)
    assert state["numbers"]["rate"] == pytest.approx(100, rel=0.11)
    assert state["numbers"]["samples"] == pytest.approx(100 * known, abs=101)
    told = state["members"]["replica 0"]
    assert (told["state"], told["waits_for"], told["participation"]) == ("compute", "shard 0", 1.0)
    assert told["rate"] == pytest.approx(100, rel=0.11)
