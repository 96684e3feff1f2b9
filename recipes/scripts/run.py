"""Plain scripts, and the same with a few lines changed on two replicas: lines, results and speed of both.

python recipes/scripts/run.py [NAME...] [--frameworks] [--seeds 3] [--json FILE]

Each NAME.py is a plain PyTorch script, NAME_distributed.py the same under `distbelief launch`, or a framework's with
our hook under torchrun. Each is run with several seeds. A script's last line is its result and its samples per second;
those of replicas are added up. The command fails if a result on two replicas is outside the range of the plain seeds.
"""

import argparse
import difflib
import json
import os
import re
import statistics
import subprocess
import sys
import tempfile
from enum import Enum
from pathlib import Path
from typing import NamedTuple

HERE = Path(__file__).parent
SECONDS = 120
"""Longest run."""
TOLD = re.compile(r"metric (\S+) rate (\d+)$", re.MULTILINE)


class Started(Enum):
    """Way in which a script gets two replicas."""

    LAUNCHED = "by distbelief launch"
    TORCHRUN = "by torchrun, as DistributedDataParallel has it"
    ITSELF = "by the script, which starts the job with a task: one result is printed"


class Script(NamedTuple):
    """Way to run a script on two replicas, and the meaning of its result."""

    result: str
    options: str = ""
    strategy: str = "downpour"
    started: Started = Started.LAUNCHED
    lines: int = 5
    """Most lines that may be changed."""
    plain: str = ""
    """Further arguments of the plain script, after its seed."""
    distributed: str = ""
    """Arguments of the distributed script."""


SCRIPTS = {
    "mnist": Script("test accuracy", "--optimizer adadelta --lr 1.0"),
    "vae": Script("test loss, nats", "--optimizer adam --lr 0.002"),
    "siamese": Script("triples in order", "--optimizer momentum --lr 0.05"),
    # in either script an update is computed from 16 columns of the text, or 32 digits
    "words": Script(
        "test perplexity", "--optimizer adam --lr 0.003", strategy="synchronous", plain="16", distributed="8"
    ),
    "stream": Script(
        "test accuracy", "--optimizer adam --lr 0.002", strategy="synchronous", plain="32", distributed="16"
    ),
    "gpt": Script(
        "test perplexity", "--optimizer adam --lr 0.001", strategy="synchronous", plain="32", distributed="16"
    ),
    "graph": Script(
        "test accuracy", "--optimizer adam --lr 0.01", strategy="synchronous", plain="64", distributed="32"
    ),
    "resnet": Script("test accuracy", "--optimizer momentum --lr 0.05", plain="64", distributed="64"),
    "dcgan": Script("distance from digits", strategy="synchronous", lines=8),
    # started with a task, since L-BFGS evaluates a model as often as its line search requires
    "sequence": Script("test loss", strategy="sandblaster", started=Started.ITSELF, lines=20),
}
FRAMEWORKS = {
    "trainer": Script("test perplexity", strategy="", started=Started.TORCHRUN, plain="32", distributed="16"),
    "lightning_module": Script("test accuracy", strategy="", started=Started.TORCHRUN, plain="64", distributed="32"),
}
"""Scripts that need what `make test-frameworks` installs, and are run with `--frameworks`, or by name."""
ALL = SCRIPTS | FRAMEWORKS


def lines_changed(name: str) -> int:
    """Return the lines of the distributed script that the plain one lacks."""
    plain, distributed = ((HERE / f"{one}.py").read_text().splitlines() for one in (name, f"{name}_distributed"))
    return sum(line.startswith("+ ") and bool(line[2:].strip()) for line in difflib.ndiff(plain, distributed))


def options(script: Script) -> str:
    """Return the words that start a script on two replicas."""
    return f"{script.strategy or 'torchrun'} {script.options}".strip()


def run(name: str, seed: int, distributed: bool) -> tuple[float, float]:
    """Run a script; return its result and its samples per second."""
    script, of = str(HERE / f"{name}{'_distributed' * distributed}.py"), ALL[name]
    with tempfile.TemporaryDirectory() as folder:
        words = [script, str(seed), *(of.distributed if distributed else of.plain).split()]
        if distributed and of.started is Started.TORCHRUN:
            words = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", *words]
        elif distributed and of.started is Started.ITSELF:
            words.append(f"{folder}/run")
        elif distributed:
            launch = ["-m", "distbelief", "launch", of.strategy, "--replicas", "2", "--quiet", "--seed", str(seed)]
            words = [*launch, "--out", f"{folder}/run", *of.options.split(), *words]
        command = [sys.executable, *words]
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
        done = subprocess.run(command, capture_output=True, text=True, timeout=SECONDS, env=environment)
    told = TOLD.findall(done.stdout)
    if done.returncode or len(told) != 1 + (distributed and of.started is not Started.ITSELF):
        raise SystemExit(f"{' '.join(command)} has failed:\n{done.stdout}{done.stderr}")
    return float(told[0][0]), sum(float(rate) for _, rate in told)


def compare(name: str, seeds: int) -> dict[str, object]:
    """Run both scripts with each seed, in turns."""
    plain, distributed = [], []
    for seed in range(seeds):
        plain.append(run(name, seed, distributed=False))
        distributed.append(run(name, seed, distributed=True))
    results, others = [result for result, _ in plain], [result for result, _ in distributed]
    middle, away = statistics.median(results), max(results) - min(results)
    return {
        "script": name,
        "lines": lines_changed(name),
        "result": ALL[name].result,
        "options": options(ALL[name]),
        "plain": results,
        "distributed": others,
        "within": abs(statistics.median(others) - middle) <= away,
        "plain_rate": statistics.median(rate for _, rate in plain),
        "distributed_rate": statistics.median(rate for _, rate in distributed),
    }


def row(found: dict[str, object]) -> str:
    """Return a row of the table: medians, and the range of the seeds."""
    cells = [f"{found['script']}", f"{found['lines']}", f"{found['result']}"]
    both = (found["plain"], found["distributed"])
    cells += [f"{statistics.median(values):.4f} ({min(values):.4f} to {max(values):.4f})" for values in both]
    cells += ["yes" if found["within"] else "no"]
    cells += [f"{found['plain_rate']:,.0f}", f"{found['distributed_rate']:,.0f}", f"`{found['options']}`"]
    return f"| {' | '.join(cells)} |"


def main() -> None:
    """Run the named scripts, and print the table."""
    asked = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    asked.add_argument("names", nargs="*", default=[], metavar="NAME", help=", ".join(ALL))
    asked.add_argument("--seeds", type=int, default=3)
    asked.add_argument("--json", type=Path)
    asked.add_argument("--frameworks", action="store_true", help=f"{' and '.join(FRAMEWORKS)}, which need packages")
    given = asked.parse_args()
    if wrong := [name for name in given.names if name not in ALL]:
        asked.error(f"no script {wrong[0]!r}; there are {', '.join(ALL)}")
    print("| script | lines | result | plain | two replicas | within | plain samples/s | two replicas | options |")
    print("|---|---|---|---|---|---|---|---|---|", flush=True)
    told = []
    for name in given.names or (FRAMEWORKS if given.frameworks else SCRIPTS):
        told.append(compare(name, given.seeds))
        print(row(told[-1]), flush=True)
        if given.json:
            given.json.write_text(json.dumps(told, indent=2))
    if outside := [str(one["script"]) for one in told if not one["within"]]:
        sys.exit(f"on two replicas {' and '.join(outside)} gave a result outside the range of the plain seeds")


if __name__ == "__main__":
    main()
