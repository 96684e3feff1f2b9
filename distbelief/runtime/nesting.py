"""Where a user's script calls something: in which of its loops."""

from __future__ import annotations

import ast
import functools
import inspect
import os
from types import FrameType


def enclosing_loop(frame: FrameType | None) -> int:
    """The line of a loop in whose body a call is made, by the function that makes it or by one that called that, in
    the same folder; 0 where there is none, or no source to look at. A generator is called by the `for` that goes
    through it, not by who takes its items one by one.

    Args:
        frame: that makes the call.
    """
    home = os.path.dirname(frame.f_code.co_filename) if frame else ""
    resumed = False
    while frame is not None and os.path.dirname(frame.f_code.co_filename) == home:
        code = frame.f_code
        try:
            loops = _loops(code.co_filename, os.stat(code.co_filename).st_mtime_ns)
        except (OSError, SyntaxError, ValueError):
            return 0
        if resumed and not any(isinstance(node, ast.For) and node.lineno == frame.f_lineno for node in loops):
            return 0
        for node in loops:
            if (
                node.lineno >= code.co_firstlineno
                and node.body[0].lineno <= frame.f_lineno <= (node.body[-1].end_lineno or 0)
                and node.lineno < frame.f_lineno
            ):
                return node.lineno
        if code.co_name == "<module>":
            return 0
        resumed, frame = bool(code.co_flags & inspect.CO_GENERATOR), frame.f_back
    return 0


@functools.lru_cache(32)
def _loops(path: str, _changed: int) -> list[ast.For | ast.While]:
    """All loops of a source: to parse a script of a thousand lines takes 0.1 s, and each epoch asks again."""
    with open(path, "rb") as file:
        tree = ast.parse(file.read())
    return [node for node in ast.walk(tree) if isinstance(node, ast.For | ast.While)]
