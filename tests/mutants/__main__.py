"""Run mutants: `python -m mutants [NAME ...] [--minutes M] [--passed]`. Fails where the tests of one do not notice
it. Where none is named and no time is, those that were killed are not tried again as long as no source has changed.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from rings import Log, hash_of_sources, show

from mutants import Mutant, left_out, table
from mutants.runs import LEAST_SECONDS, TIMES, Outcome, Run, Verdict, judged, play, unfit

ROOT = Path(__file__).parents[2]
AT_ONCE = min(2, len(os.sched_getaffinity(0)))


def main(words: Sequence[str] | None = None) -> int:
    """Run the mutants that the words of a command line choose; returns the status to exit with."""
    parser = argparse.ArgumentParser(prog="make test-mutants", description=__doc__)
    parser.add_argument("names", nargs="*", help="mutants to run, or promises of docs/guarantees.md; all by default")
    parser.add_argument(
        "--minutes", type=float, help="run what fits into so many minutes, chosen by a hash of the sources"
    )
    parser.add_argument(
        "--passed", action="store_true", help="`make test` has passed: run nothing of it without mutants first"
    )
    options = parser.parse_args(words)
    mutants = table()
    if unknown := set(options.names) - {name for mutant in mutants for name in (mutant.name, mutant.promise)}:
        parser.error(f"there is no mutant or promise {', '.join(sorted(unknown))}")
    chosen = [m for m in mutants if not options.names or {m.name, m.promise} & {*options.names}]
    end, write = None, show
    if options.minutes:
        end = time.monotonic() + 60 * options.minutes
        chosen = within(chosen, 60 * options.minutes, hash_of_sources(ROOT))
    elif not options.names:
        log = Log("test-mutants")
        killed = log.names(Verdict.KILLED.value)
        chosen = [mutant for mutant in chosen if mutant.name not in killed]
        write = log.write
    outcomes = try_all(ROOT, chosen, passed=options.passed, end=end, write=write)
    print(f"{len(mutants)} mutants: {len(chosen)} chosen, " + told(outcomes, len(chosen)))
    return int(not all(outcome.good for outcome in outcomes))


def within(mutants: Sequence[Mutant], seconds: float, chance: str) -> list[Mutant]:
    """As many as take so long, by what is said of each, in an order that a hash of the sources decides."""
    chosen: list[Mutant] = []
    for mutant in sorted(mutants, key=lambda mutant: hashlib.sha256((chance + mutant.name).encode()).digest()):
        takes = mutant.seconds / (1 if mutant.processes else AT_ONCE)
        if takes <= seconds:
            chosen.append(mutant)
            seconds -= takes
    return chosen


def try_all(
    root: Path,
    mutants: Sequence[Mutant],
    *,
    passed: bool,
    end: float | None = None,
    write: Callable[[str, float, str, str], object] = show,
) -> list[Outcome]:
    """Try mutants of the project at `root`, two at once where their tests start no processes; begins none after the
    moment `end`, and writes down how each ended.

    Raises:
        ValueError: the text of one does not stand exactly once in its file.
    """
    for mutant in mutants:
        if (count := (root / "distbelief" / mutant.file).read_text().count(mutant.text)) != 1:
            raise ValueError(
                f"{mutant.name}: its text stands {count} times in {mutant.file}, once is needed: make it follow the "
                "code"
            )
    outcomes: list[Outcome] = []

    def done(outcome: Outcome) -> None:
        outcomes.append(outcome)
        write(outcome.verdict.value, outcome.seconds, outcome.mutant.name, outcome.why)

    with tempfile.TemporaryDirectory(prefix="mutants-", ignore_cleanup_errors=True) as folder:
        unseen = [m for m in mutants if not passed or any(left_out(root, test) for test in m.tests)]
        wrong = unmutated(root, unseen, Path(folder))
        runs: dict[bool, list[Run]] = {False: [], True: []}
        for mutant in mutants:
            if found := [wrong[test] for test in mutant.tests if test in wrong]:
                done(Outcome(mutant, *found[0]))
            else:
                limit = LEAST_SECONDS + TIMES * mutant.seconds
                runs[mutant.processes].append(Run(root, Path(folder) / mutant.name, mutant.tests, limit, mutant))
        for processes, some in runs.items():
            play(
                some,
                1 if processes else AT_ONCE,
                lambda run: done(judged(run)),
                lambda: end is None or time.monotonic() < end,
            )
    return outcomes


def unmutated(root: Path, mutants: Sequence[Mutant], folder: Path) -> dict[str, tuple[Verdict, str]]:
    """Run the tests of some mutants on the code as it is; returns which cannot judge a mutant, and why."""
    found: dict[str, tuple[Verdict, str]] = {}
    light, heavy = (
        {test: None for m in mutants for test in m.tests if Mutant("", "", "", "", "", (test,)).processes is kind}
        for kind in (False, True)
    )
    parts = [list(light)[at::AT_ONCE] for at in range(AT_ONCE)]
    limit = LEAST_SECONDS + TIMES * sum(mutant.seconds for mutant in mutants)
    runs = [Run(root, folder / f"unmutated {at}", tests, limit) for at, tests in enumerate([*parts, heavy])]
    *beside, alone = runs
    for some, at_once in (beside, AT_ONCE), ([alone], 1):
        play([run for run in some if run.tests], at_once, lambda run: found.update(unfit(run)))
    return found


def told(outcomes: Sequence[Outcome], chosen: int) -> str:
    """How many ended in which way, and a table of those that nothing noticed."""
    counts = [
        f"{count} {verdict.value}"
        for verdict in Verdict
        if (count := sum(outcome.verdict is verdict for outcome in outcomes))
    ]
    late = [f"{chosen - len(outcomes)} not begun in time"] * (chosen > len(outcomes))
    lines = [", ".join([*counts, *late]) or "none tried"]
    for outcome in outcomes:
        if not outcome.good:
            mutant = outcome.mutant
            lines += [
                f"  {outcome.verdict.value}: {mutant.name} ({mutant.file})",
                f"    of: {mutant.promise}",
                f"    {outcome.why}",
            ]
    return "\n".join(lines)


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("ended by SIGTERM"))
    try:
        sys.exit(main())
    except KeyboardInterrupt:
        sys.exit("interrupted")
