"""The table of benchmarks: medians over runs, their spread, and what is no run."""

import json
from pathlib import Path
from typing import Any

import pytest

from benchmarks.parts.timing import Measured, figure, report
from benchmarks.table import table
from benchmarks.wire import WireOptions
from distbelief.errors import UsageError


def written(tmp_path: Path, name: str, *measured: float, **options: Any) -> str:
    figures = [figure(f"figure {i}", value, 2.0, lower=bool(i)) for i, value in enumerate(measured)]
    path = tmp_path / f"{name}.json"
    report("wire", lambda _: Measured({}, figures, []), WireOptions(json=str(path), quiet=True, **options))
    return str(path)


def test_a_table_has_the_median_of_the_runs_and_what_they_lie_between(tmp_path: Path) -> None:
    paths = [
        written(tmp_path, str(i), a, b, repeats=4) for i, (a, b) in enumerate([(1.0, 3.0), (5.0, 1.0), (2.5, 2.5)])
    ]
    lines = table(paths).splitlines()
    assert lines[0].startswith("`python -m benchmarks wire --repeats 4`, runs of ")
    assert lines[0].count(json.loads(Path(paths[0]).read_text())["machine"]["date"][:10]) == 3
    assert lines[-2:] == [
        "| figure 0 | >= 2 | 2.5 | 1 to 5 | reached |",
        "| figure 1 | <= 2 | 2.5 | 1 to 3 | not reached |",
    ]


def test_one_run_has_no_spread_and_a_figure_that_not_all_have_says_so(tmp_path: Path) -> None:
    one, more = written(tmp_path, "one", 3.0), written(tmp_path, "more", 4.0, 1.0)
    assert table([one]).splitlines()[-1] == "| figure 0 | >= 2 | 3 | one run | reached |"
    assert table([one, more, more]).splitlines()[-1] == "| figure 1 | <= 2 | 1 | 1 to 1 (2 runs) | reached |"


def test_what_is_no_run_or_another_run_is_refused(tmp_path: Path) -> None:
    (tmp_path / "list.json").write_text("[1, 2]")
    for path in (str(tmp_path / "list.json"), str(tmp_path / "missing.json"), str(tmp_path)):
        with pytest.raises(UsageError, match=r"is not what a benchmark's --json has written"):
            table([path])
    with pytest.raises(UsageError, match="needs the files"):
        table([])
    with pytest.raises(UsageError, match="other options cannot be one figure: --repeats 4; none"):
        table([written(tmp_path, "a", 1.0), written(tmp_path, "b", 1.0, repeats=4)])
