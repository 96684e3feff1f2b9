"""Our communication hook inside Lightning, transformers and Accelerate: the bits of plain DDP, by our own sums."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

from distbelief import integrations
from distbelief.errors import UsageError

SCRIPT = Path(__file__).with_name("trained.py")
ROOT = Path(__file__).parents[2]


def ranks(framework: str, way: str, folder: Path) -> None:
    """Run a script on two ranks."""
    folder.mkdir()
    words = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", str(SCRIPT)]
    done = subprocess.run(
        [*words, framework, way, str(folder)], capture_output=True, text=True, timeout=100,
        env={**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), *sys.path]), "OMP_NUM_THREADS": "1",
            "GLOO_SOCKET_IFNAME": "lo", "HF_HUB_OFFLINE": "1", "PYTHONWARNINGS": "ignore"},
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]


@pytest.mark.timeout(240)
@pytest.mark.parametrize("framework", ["lightning", "lightning-strategy", "transformers", "accelerate"])
def test_the_hook_gives_the_bits_of_plain_ddp(framework: str, tmp_path: Path) -> None:
    for way in ("plain", "hook"):
        ranks(framework, way, tmp_path / way)
    weights = {
        way: [load_file(tmp_path / way / f"{rank}.safetensors") for rank in range(2)] for way in ("plain", "hook")
    }
    for one in (*weights["plain"], *weights["hook"]):
        assert one.keys() == weights["plain"][0].keys()
        assert all(torch.equal(values, weights["plain"][0][name]) for name, values in one.items())
    chosen = [json.loads((tmp_path / "hook" / f"{rank}.json").read_text()) for rank in range(2)]
    assert chosen == ["shared", "shared"]


def test_a_model_without_ddp_is_refused_with_what_to_run() -> None:
    alone = SimpleNamespace(model_wrapped=nn.Linear(2, 1), strategy=SimpleNamespace(model=nn.Linear(2, 1)))
    with pytest.raises(UsageError, match=r"is a Linear, not a DistributedDataParallel.*under torchrun"):
        integrations.transformers_callback(alone).on_train_begin(None, None, None)
    with pytest.raises(UsageError, match=r'is a Linear, not a DistributedDataParallel.*strategy="ddp"'):
        integrations.lightning_callback().on_train_start(alone, None)


@pytest.mark.parametrize("package", ["lightning", "transformers"])
def test_a_framework_that_is_not_there_is_one_error(package: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in sys.modules if name.partition(".")[0] == package]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, package, None)
    make = {
        "lightning": integrations.lightning_callback,
        "transformers": lambda: integrations.transformers_callback(None),
    }
    with pytest.raises(UsageError, match=f"{package} cannot be imported .*: pip install {package}"):
        make[package]()
