"""What the documents show is what the code prints."""

import contextlib
import io
import re
from pathlib import Path

import pytest

DOCS = Path(__file__).parents[2] / "docs"
SHOWN = re.compile(r"```python\n(.*?)```\n```\n(.*?)```", re.DOTALL)
BLOCKS = [(path.name, *match) for path in sorted(DOCS.glob("*.md")) for match in SHOWN.findall(path.read_text())]


@pytest.mark.parametrize(("name", "code", "shown"), BLOCKS, ids=[name for name, _, _ in BLOCKS])
def test_an_example_prints_what_stands_below_it(name: str, code: str, shown: str) -> None:
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        exec(compile(code, name, "exec"), {})
    assert printed.getvalue() == shown


def test_there_are_examples() -> None:
    assert "consistency.md" in {name for name, _, _ in BLOCKS}
