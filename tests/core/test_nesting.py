"""In which loop of a script something is called."""

import sys
from pathlib import Path
from typing import Any

import pytest

from distbelief.runtime.nesting import enclosing_loop

SHAPES: dict[str, tuple[str, int]] = {
    "a header": ("for x in made: pass", 0),
    "a body": ("for epoch in range(2):\n    for x in made: pass", 1),
    "a function in a body": ("def train():\n    for x in made: pass\nwhile True:\n    train()\n    break", 3),
    "an iterator before": ("it = iter(made)\nwhile next(it, None): pass", 0),
    "a generator": ("def through():\n    yield from made\nfor x in through(): pass", 0),
    "a generator in a body": (
        "def through():\n    yield from made\nfor epoch in range(2):\n    for x in through(): pass", 3
    ),
    "a generator, item by item": (
        "def through():\n    yield from made\nit = through()\nfor step in range(2):\n    next(it, None)", 0
    ),
}  # fmt: skip


@pytest.mark.parametrize("shape", SHAPES)
def test_a_loop_is_found_where_what_it_goes_through_is_begun_in_it(tmp_path: Path, shape: str) -> None:
    source, line = SHAPES[shape]
    script, found = tmp_path / "script.py", []
    script.write_text(source)

    class Made:
        def __iter__(self) -> Any:
            found.append(enclosing_loop(sys._getframe(1)))
            return iter(())

    exec(compile(source, str(script), "exec"), {"made": Made()})
    assert found[0] == line
