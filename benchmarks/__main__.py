"""`python -m benchmarks NAME [options]`, in the root of the project."""

from __future__ import annotations

import sys

from benchmarks import BENCHES
from benchmarks.table import table
from distbelief.cli import main
from distbelief.cli.arguments import ask
from distbelief.errors import unknown
from distbelief.places import signals

PROGRAM = "python -m benchmarks"


def run(args: list[str]) -> int:
    """Run a benchmark, or make the table of several runs; return the exit status."""
    name, *rest = args or ["--help"]
    if name in ("--help", "-h") or (name == "table" and rest[:1] in (["--help"], ["-h"])):
        print(f"usage: {PROGRAM} NAME [options]\n       {PROGRAM} table FILE...\n")
        for bench in BENCHES.values():
            print(f"  {bench.module:<11} {bench.summary}")
        print("\n  table       medians and spread of several runs that --json has written")
        return 0 if args else 2
    if name == "table":
        print(table(rest))
        return 0
    if name not in BENCHES:
        raise unknown("benchmark", name, [*BENCHES, "table"])
    chosen, program = BENCHES[name], f"{PROGRAM} {name}"
    given = ask(program, chosen.options, rest, f"Measure {chosen.summary}.", chosen.defaults("--quick" in rest))
    with signals.raised():
        chosen.run(given)
    return 0


if __name__ == "__main__":
    sys.exit(main.run(sys.argv[1:], run))
