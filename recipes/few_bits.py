"""Cost and savings of fewer bits: tables of seconds and bytes of a training step and of inference, relative to float32.

python recipes/few_bits.py

Times are CPU times: medians over rounds in which the ways take turns.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable, Mapping
from functools import partial

import torch

from benchmarks.parts.timing import interleave
from distbelief.codecs.file import ModelFile
from distbelief.core.effects import Batch
from distbelief.core.settings import Settings
from distbelief.lab.compress import compressing
from distbelief.tasks import Task, as_data, resolve
from distbelief.tasks.constrained import fill, layers
from distbelief.tasks.inference import held_bytes, lean
from distbelief.tasks.worker import Trainer, build_model

TRAINING = ("float32", "bf16", "fp16", "dynamic:10,12")
INFERENCE = ("float32", "int8", "ids", "ids, 8.5 % kept")


def timed(ways: Mapping[str, Callable[[], object]], turns: int) -> dict[str, list[float]]:
    """Measure the seconds of each way in turns, after a first one that warms up."""

    def seconds(way: Callable[[], object]) -> float:
        begun = time.process_time()
        way()
        return time.process_time() - begun

    taken = interleave({name: partial(seconds, way) for name, way in ways.items()}, turns + 1)
    return {name: values[1:] for name, values in taken.items()}


def held_for_backward(step: Callable[[], object]) -> int:
    """Count the bytes of the tensors that a step keeps for its gradient."""
    seen: dict[int, torch.UntypedStorage] = {}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        seen[storage.data_ptr()] = storage
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        step()
    return sum(one.nbytes() for one in seen.values())


def training(task: Task, batch: int, turns: int) -> list[list[str]]:
    """Make a row for each arithmetic."""
    data = Settings(batch_size=batch)
    trainers = {name: Trainer(task, build_model(task, 0, "cpu"), data, arithmetic=name) for name in TRAINING}
    steps: dict[str, Callable[[], object]] = {
        name: lambda one=one: one.compute(Batch(0, 0))  # type: ignore[misc]  # bound at once
        for name, one in trainers.items()
    }
    held = {name: f"{held_for_backward(step) / 1e6:.2f}" for name, step in steps.items()}
    return rows(task, batch, timed(steps, turns), held)


def inference(task: Task, batch: int, turns: int) -> list[list[str]]:
    """Make a row for each way."""
    assert task.test is not None
    data = as_data(task.test())
    batch = min(batch, len(data))
    inputs, _ = data.batch(torch.arange(batch))
    models = {name: model(task, name) for name in INFERENCE}

    def infer(one: torch.nn.Module) -> None:
        with torch.no_grad():
            for _ in range(max(1, 100 // batch)):
                one(inputs)

    ways = {name: lambda one=one: infer(one) for name, one in models.items()}
    seconds = {name: [1 / max(1, 100 // batch) * one for one in all_] for name, all_ in timed(ways, turns).items()}
    return rows(task, batch, seconds, {name: f"{held_bytes(one) / 1e6:.3f}" for name, one in models.items()})


def rows(task: Task, batch: int, seconds: Mapping[str, list[float]], held: Mapping[str, str]) -> list[list[str]]:
    """Make a row for each way, from its seconds and megabytes."""
    start = [task.reference, str(batch)]
    return [[*start, name, told(taken, seconds["float32"]), held[name]] for name, taken in seconds.items()]


def model(task: Task, how: str) -> torch.nn.Module:
    """Make an untrained model whose layers share 16 values, in all weights or in a part."""
    made = build_model(task, 0, "cpu").eval()
    tensors, aliases = compressing.stored_tensors(made.state_dict())
    for name in layers(made):
        kept = compressing.prune(tensors[name], 0.085 if "kept" in how else 1.0)
        shared = compressing.share_values(kept, 4, "linear", 0)
        tensors[name] = kept if isinstance(shared, str) else shared
    file = ModelFile(task.reference, tensors, True, aliases)
    return lean(fill(made, file), how.partition(",")[0], file)


def told(seconds: list[float], beside: list[float]) -> str:
    """Format milliseconds, their middle half, and the ratio to float32."""
    low, middle, high = (1000 * one for one in statistics.quantiles(seconds, n=4))
    return f"{middle:.3g} ({low:.3g} to {high:.3g}), {middle / 1000 / statistics.median(beside):.2f}"


def main() -> None:
    """Measure, and show the tables."""
    asked = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    asked.add_argument("--tasks", nargs="*", default=["mnist", "mnist-lenet"])
    asked.add_argument("--turns", type=int, default=15)
    given = asked.parse_args()
    torch.set_num_threads(1)
    tasks = [resolve(name) for name in given.tasks]
    for head, what, sizes in (("training", training, (128,)), ("inference", inference, (1, 1000))):
        last = "MB kept for the gradient" if what is training else "MB of the model"
        print(f"\n| {head} | batch | in | ms (middle half), times float32's | {last} |\n|---|---|---|---|---|")
        for task in tasks:
            for size in sizes:
                for row in what(task, size, given.turns):
                    print(f"| {' | '.join(row)} |", flush=True)


if __name__ == "__main__":
    main()
