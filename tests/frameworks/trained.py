"""Scripts of users of frameworks, one for each, with our hook and without: trained.py FRAMEWORK plain|hook FOLDER.

Each rank writes the weights that it ends with, and how its gradients were added up.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import distbelief as db

STEPS, SAMPLES = 6, 96


def data() -> TensorDataset:
    """Samples of ten classes."""
    torch.manual_seed(1)
    return TensorDataset(torch.randn(SAMPLES, 20), torch.randint(0, 10, (SAMPLES,)))


def model() -> nn.Module:
    """Two layers."""
    torch.manual_seed(2)
    return nn.Sequential(nn.Linear(20, 30), nn.ReLU(), nn.Linear(30, 10))


def lightning(how: db.Reduce | None, by_strategy: bool = False) -> nn.Module:
    """Its Trainer, with our callback; or with what its strategy takes, which it heeds on GPUs only."""
    from lightning.pytorch import LightningModule, Trainer
    from lightning.pytorch.overrides.distributed import _register_ddp_comm_hook
    from lightning.pytorch.strategies import DDPStrategy

    class Own(LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.net = model()

        def training_step(self, batch: Any, _: int) -> torch.Tensor:
            return nn.functional.cross_entropy(self.net(batch[0]), batch[1])

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.SGD(self.parameters(), lr=0.1)

    class AsOnGpus(DDPStrategy):
        def _register_ddp_hooks(self) -> None:
            _register_ddp_comm_hook(self.model, self._ddp_comm_state, self._ddp_comm_hook)

    strategy: DDPStrategy = DDPStrategy(process_group_backend="gloo")
    if how and by_strategy:
        strategy = AsOnGpus(process_group_backend="gloo", ddp_comm_state=how, ddp_comm_hook=db.comm_hook)
    callbacks = [db.integrations.lightning_callback(how)] if how and not by_strategy else []
    trainer = Trainer(
        accelerator="cpu", devices=2, strategy=strategy, callbacks=callbacks, max_steps=STEPS, logger=False,
        enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
    )  # fmt: skip
    own = Own()
    trainer.fit(own, DataLoader(data(), batch_size=8))
    return own.net


def transformers(how: db.Reduce | None) -> nn.Module:
    """Its Trainer, on a language model made from a configuration; it trains twice."""
    from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments

    torch.manual_seed(2)
    sizes = {"n_layer": 1, "n_head": 2, "n_embd": 16, "vocab_size": 40, "n_positions": 16}
    net = GPT2LMHeadModel(GPT2Config(**sizes, bos_token_id=0, eos_token_id=0))
    torch.manual_seed(1)
    texts = [{"input_ids": row, "labels": row} for row in torch.randint(0, 40, (SAMPLES, 12))]
    args = TrainingArguments(
        output_dir=sys.argv[3], use_cpu=True, ddp_backend="gloo", max_steps=STEPS, per_device_train_batch_size=4,
        report_to=[], save_strategy="no", disable_tqdm=True, logging_strategy="no",
    )  # fmt: skip
    trainer = Trainer(model=net, args=args, train_dataset=texts)
    if how:
        trainer.add_callback(db.integrations.transformers_callback(trainer, how))
    trainer.train()
    trainer.train()
    return net


def accelerate(how: db.Reduce | None) -> nn.Module:
    """A loop of one's own, prepared by its Accelerator."""
    from accelerate import Accelerator

    accelerator = Accelerator(cpu=True)
    net = model()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    ddp, optimizer, batches = accelerator.prepare(net, optimizer, DataLoader(data(), batch_size=8))
    if how:
        ddp.register_comm_hook(how, db.comm_hook)
    for x, y in batches:
        optimizer.zero_grad()
        accelerator.backward(nn.functional.cross_entropy(ddp(x), y))
        optimizer.step()
    return net


if __name__ == "__main__":
    framework, how, folder = sys.argv[1], db.Reduce() if sys.argv[2] == "hook" else None, Path(sys.argv[3])
    ways = {
        "lightning": lightning,
        "lightning-strategy": lambda how: lightning(how, by_strategy=True),
        "transformers": transformers,
        "accelerate": accelerate,
    }
    net = ways[framework](how)
    rank, named = os.environ["RANK"], {name: values.detach() for name, values in net.named_parameters()}
    tied = {id(values): name for name, values in named.items()}
    save_file({name: named[name].clone() for name in tied.values()}, folder / f"{rank}.safetensors")
    chosen = how.chosen if how else ""
    (folder / f"{rank}.json").write_text(json.dumps(chosen))
