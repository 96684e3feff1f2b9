"""Smaller models, over seeds: error and size of each way to compress, as a table in markdown.

python recipes/compression.py --arms lenet-300-100 lenet-5 --seeds 5

Each seed trains the dense model once; every arm compresses that. What was measured is kept in `results.jsonl` of the
folder, so that the recipe goes on where it was ended, and shows all that is there.
"""

from __future__ import annotations

import argparse
import json
import statistics
from pathlib import Path
from typing import Any

import distbelief as db

PAPER = {"mnist": (0.085, 0.1, 0.3), "mnist-lenet": (0.66, 0.12, 0.08, 0.19)}
"""What Han et al. (2016) keep of the layers of LeNet-300-100 (here a little more) and LeNet-5."""
EPOCHS = {"mnist": 12, "mnist-lenet": 5}
FINE = {"mnist": 3, "mnist-lenet": 1}
ARMS: dict[str, tuple[str, dict[str, Any]]] = {
    "lenet-300-100": ("mnist", {"keep": PAPER["mnist"], "bits": 4, "huffman": True}),
    "lenet-300-100, 3 bits": ("mnist", {"keep": PAPER["mnist"], "bits": 3, "huffman": True}),
    "lenet-300-100, 2 bits": ("mnist", {"keep": PAPER["mnist"], "bits": 2, "huffman": True}),
    "lenet-300-100, 4 % kept": ("mnist", {"keep": (0.04, 0.05, 0.2), "bits": 4, "huffman": True}),
    "lenet-300-100, at once": ("mnist", {"keep": PAPER["mnist"], "bits": 4, "huffman": True, "fine_tune": 0}),
    "4-bits": ("mnist", {"bits": 4}),
    **{f"2-bits from {start}": ("mnist", {"bits": 2, "start": start}) for start in ("linear", "density", "random")},
    "lenet-5": ("mnist-lenet", {"keep": PAPER["mnist-lenet"], "bits": 4, "huffman": True}),
    "lenet-5, 4-bits": ("mnist-lenet", {"bits": 4}),
}


def dense(task: str, seed: int, epochs: int, runs: Path) -> Path:
    """The run folder of a dense model, trained once."""
    run = runs / f"{task}-{seed}"
    if not (run / "model.safetensors").is_file():
        strategy = db.Single(db.optim("adam", lr=0.001))
        rare: dict[str, Any] = {"evaluate_every": epochs, "checkpoint_every": 0}
        job = db.Job(task, strategy, epochs, batch_size=128, lr_schedule="cosine", seed=seed, out=run, **rare)
        db.run(job)
    return run


def main() -> None:
    """Measure what is missing, and show the table."""
    asked = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    asked.add_argument("--runs", type=Path, default=Path("runs/compression"))
    asked.add_argument("--arms", nargs="*", default=list(ARMS), choices=ARMS, metavar="ARM")
    asked.add_argument("--seeds", type=int, default=5)
    asked.add_argument("--task", help="instead of the arms' own")
    asked.add_argument("--epochs", type=int, help="of the dense model, and of each pruning")
    given = asked.parse_args()
    given.runs.mkdir(parents=True, exist_ok=True)
    kept = given.runs / "results.jsonl"
    found = [json.loads(line) for line in kept.read_text().splitlines()] if kept.is_file() else []
    done = {(one["arm"], one["seed"]) for one in found}
    for seed in range(given.seeds):
        for arm in given.arms:
            if (arm, seed) in done:
                continue
            task, options = ARMS[arm]
            task = given.task or task
            run = dense(task, seed, given.epochs or EPOCHS[task], given.runs)
            how = db.Compression(**{"fine_tune": given.epochs or FINE[task], "seed": seed, **options})
            result = db.compress(run, given.runs / f"{task}-{seed}-{arm.replace(' ', '-')}.dbz", how)
            found.append({"arm": arm, "seed": seed, **result})
            with kept.open("a") as file:
                file.write(json.dumps(found[-1]) + "\n")
    print("\n".join(table(found)))


def table(found: list[dict[str, Any]]) -> list[str]:
    """Means over the seeds of each arm, and their spread."""
    rows = ["| arm | seeds | dense error % | error % | bytes | times fewer |", "|---|---|---|---|---|---|"]
    for arm in dict.fromkeys(one["arm"] for one in found):
        of = [one for one in found if one["arm"] == arm]
        errors = [
            f"{mean:.2f} ± {spread:.2f}" for mean, spread in (over(of, key) for key in ("dense_error", "test_error"))
        ]
        size, ratio = (statistics.mean(one[key] for one in of) for key in ("bytes", "ratio"))
        rows.append(f"| {arm} | {len(of)} | {errors[0]} | {errors[1]} | {size:,.0f} | {ratio:.1f} |")
    return rows


def over(of: list[dict[str, Any]], key: str) -> tuple[float, float]:
    """Mean and standard deviation."""
    values = [one[key] for one in of]
    return statistics.mean(values), statistics.stdev(values) if len(values) > 1 else 0.0


if __name__ == "__main__":
    main()
