"""Users' own scripts on a GPU: pinned loaders, autocast, GradScaler, two models, our hook over NCCL."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

import distbelief as db
from distbelief.places.processes.local import Local

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device here")
DEVICE = "cuda"
SCRIPT = """
import sys, torch, distbelief as db
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, TensorDataset

scaled = sys.argv[1] == "scaled"
replica = db.join()
kind = replica.device.type
data = db.tasks.digits().train()
model = db.tasks.digits().model().to(replica.device)
optimizer = replica.optimizer(model)
scaler = torch.amp.GradScaler(kind, enabled=scaled)
loader = DataLoader(
    TensorDataset(data.inputs, data.targets), 32, shuffle=True, num_workers=int(sys.argv[2]), pin_memory=kind == "cuda"
)
for _ in replica.epochs(2):
    for inputs, classes in replica.batches(loader):
        assert inputs.device.type == classes.device.type == kind
        with torch.autocast(kind, torch.float16, enabled=scaled):
            loss = cross_entropy(model(inputs), classes)
        optimizer.zero_grad()
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
"""
MODELS = """
import torch, distbelief as db
from torch import nn
from torch.utils.data import TensorDataset

replica = db.join()
torch.manual_seed(0)
one, other = (nn.Linear(4, 1).to(replica.device) for _ in range(2))
of_one = replica.optimizer(one, optim=db.optim("sgd", lr=0.1))
of_other = replica.optimizer(other, optim=db.optim("adam", lr=0.01))
for (inputs,) in replica.batches(TensorDataset(torch.randn(64, 4)), batch_size=8):
    for model, optimizer in ((one, of_one), (other, of_other)):
        optimizer.zero_grad()
        (model(inputs) - inputs.sum(1, keepdim=True)).square().mean().backward()
        optimizer.step()
"""
HOOK = """
import os, sys, torch, distbelief as db
import torch.distributed as dist
from safetensors.torch import save_file
from torch import nn
from torch.nn.parallel import DistributedDataParallel

rank = int(os.environ["RANK"])
torch.cuda.set_device(rank)
dist.init_process_group("nccl")
torch.manual_seed(0)
model = DistributedDataParallel(nn.Sequential(nn.Linear(20, 30), nn.ReLU(), nn.Linear(30, 10)).cuda())
if sys.argv[1] == "hook":
    model.register_comm_hook(db.Reduce(), db.comm_hook)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
torch.manual_seed(rank)
for _ in range(5):
    optimizer.zero_grad()
    model(torch.randn(8, 20).cuda()).square().mean().backward()
    optimizer.step()
if rank == 0:
    save_file({name: values.cpu() for name, values in model.module.state_dict().items()}, sys.argv[2])
dist.destroy_process_group()
"""


def launch(folder: Path, source: str, strategy: db.strategies.Strategy, device: str, *words: str) -> dict[str, object]:
    """Run a script; returns its result."""
    folder.mkdir()
    (folder / "script.py").write_text(source)
    job = db.Job("script", strategy, device=device, out=str(folder / "run"))
    return Local().launch(job, [str(folder / "script.py"), *words])


@pytest.mark.parametrize("workers", ["0", "2"])
@pytest.mark.parametrize(("way", "apart"), [("plain", 1e-4), ("scaled", 2e-2)])
def test_a_pinned_loader_gives_what_the_cpu_computes_with(way: str, apart: float, workers: str, tmp_path: Path) -> None:
    """In fp16 with its loss scaled, to the digits that it has."""
    alone = db.Downpour(replicas=1, shards=2)
    launch(tmp_path / "cpu", SCRIPT, alone, "cpu", "plain", "0")
    launch(tmp_path / DEVICE, SCRIPT, alone, DEVICE, way, workers)
    here, there = (load_file(tmp_path / device / "run" / "model.safetensors") for device in ("cpu", DEVICE))
    for name, value in here.items():
        assert float((there[name] - value).norm() / value.norm()) < apart


def test_two_models_are_trained_as_on_a_cpu(tmp_path: Path) -> None:
    for device in ("cpu", DEVICE):
        assert launch(tmp_path / device, MODELS, db.Downpour(replicas=1), device)["outcome"] == "done"
    here, there = (load_file(tmp_path / device / "run" / "model.safetensors") for device in ("cpu", DEVICE))
    for name, value in here.items():
        torch.testing.assert_close(there[name], value, rtol=1e-4, atol=1e-5)


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="NCCL wants a device for each rank, and there are not two")
def test_the_hook_over_nccl_gives_what_plain_ddp_does(tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(HOOK)
    for way in ("plain", "hook"):
        words = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", str(tmp_path / "script.py")]
        done = subprocess.run(
            [sys.executable, *words, way, str(tmp_path / way)], capture_output=True, text=True, timeout=100,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
        )  # fmt: skip
        assert done.returncode == 0, done.stderr[-3000:]
    plain, hooked = load_file(tmp_path / "plain"), load_file(tmp_path / "hook")
    for name, value in plain.items():
        torch.testing.assert_close(hooked[name], value)
