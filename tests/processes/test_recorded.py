"""What one replica learns on real processes, as it was recorded. See `tests/simulated/test_recorded.py`."""

import json
import os
from hashlib import blake2b
from pathlib import Path
from typing import Any

import jobs
import pytest
import torch
from made import processor
from safetensors.torch import load_file

from distbelief.core.optimizer import optim
from distbelief.job import Job
from distbelief.places.processes.local import Local
from distbelief.strategies import Allreduce, Downpour, Locking, Sandblaster, Synchronous

RECORDED = Path(__file__).with_name("recorded.json")
PROCESSOR = processor()
WAYS: dict[str, Any] = {
    "downpour": Downpour(1, 2, optim("adam", lr=0.01), push_every=2),
    "synchronous": Synchronous(1, 2, optim("adagrad", lr=0.05), standby=1),
    "allreduce": Allreduce(1, optim("adam", lr=0.01)),
    "locking": Locking(1, optim("momentum", lr=0.05)),
    "sandblaster": Sandblaster(1, 2, 3, portion_size=64),
}


@pytest.mark.skipif(
    "json.loads(RECORDED.read_text())['processor'] != PROCESSOR and 'DISTBELIEF_RENEW' not in os.environ",
    reason="rounds otherwise",
)
@pytest.mark.parametrize("way", WAYS)
def test_what_was_recorded_is_learned_again(tmp_path: Path, way: str) -> None:
    fit = {} if way == "sandblaster" else {"epochs": 2}
    Local().run(
        jobs.job(tmp_path / "run", WAYS[way], **fit) if fit else Job("jobs:tiny", WAYS[way], out=str(tmp_path / "run"))
    )
    learned = blake2b(digest_size=16)
    for name, tensor in sorted(load_file(tmp_path / "run" / "model.safetensors").items()):
        learned.update(name.encode() + bytes(tensor.contiguous().view(-1).view(torch.uint8).numpy()))
    known = json.loads(RECORDED.read_text())
    if "DISTBELIEF_RENEW" in os.environ:
        known = {"processor": PROCESSOR, "parameters": {**known["parameters"], way: learned.hexdigest()}}
        RECORDED.write_text(json.dumps(known, indent=1, sort_keys=True) + "\n")
    assert learned.hexdigest() == known["parameters"][way]
