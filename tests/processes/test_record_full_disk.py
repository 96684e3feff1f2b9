"""A disk that is really full: a tiny tmpfs, where one may be mounted."""

import contextlib
import subprocess

import pytest
import torch

from distbelief.core import records
from distbelief.core.portions import START
from distbelief.core.records import Cause
from distbelief.core.settings import Plan, Settings
from distbelief.errors import CheckpointError
from distbelief.record.checkpoints import Checkpoints
from distbelief.record.folder import RunFolder
from distbelief.record.recorder import Recorder
from distbelief.record.restore import load_part
from distbelief.sharding.assignments import cut
from distbelief.sharding.layout import Tensor, lay_out


@pytest.fixture
def tiny(tmp_path):
    path = tmp_path / "tiny"
    path.mkdir()
    if subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", str(path)], capture_output=True, check=False
    ).returncode:
        pytest.skip("may not mount a tmpfs here (needs root)")
    yield path
    subprocess.run(["umount", str(path)], check=True)


def test_a_full_disk_costs_a_checkpoint_and_lines_of_metrics_but_not_the_job(tiny):
    layout = lay_out([Tensor("w", (60_000,), "float32")])
    plan = Plan(Settings(), layout, cut(layout, 1, 1), 10)
    folder, told = RunFolder.create(tiny / "run", "x"), []
    recorder, store = Recorder(folder, {}, warn=told.append), Checkpoints(folder.path)
    part = {
        "vector.moving": torch.ones(layout.moving, dtype=torch.uint8),
        "vector.frozen": torch.zeros(0, dtype=torch.uint8),
    }
    store.save_part(1, "shard-0", part, {})
    good = store.commit(1, plan, START, 0)
    large = {**part, "state.0.sum": torch.ones(200_000)}
    with pytest.raises(CheckpointError, match=r"No space left on device.*000001 stays the last good one"):
        store.save_part(2, "shard-0", large, {})
    assert [path.name for path in store.folder.iterdir()] == ["000001"]
    assert torch.equal(load_part(good, plan, 0)[0]["vector.moving"], part["vector.moving"])
    with (tiny / "filler").open("wb", buffering=0) as filler, contextlib.suppress(OSError):
        while filler.write(b"x" * 4096):
            pass
    for number in range(2000):
        recorder.take(float(number), records.Note("a sentence that takes room"))
    recorder.take(3000.0, records.Finished.of(Cause.EPOCHS_DONE, "all is done"))
    assert recorder.finish()["outcome"] == "done"
    assert len([text for text in told if "metrics cannot be written" in text]) == 1
