"""Where a user's script calls something: in which of its loops."""

from __future__ import annotations

import ast
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
            with open(code.co_filename, "rb") as file:
                tree = ast.parse(file.read())
        except (OSError, SyntaxError, ValueError):
            return 0
        loops = [node for node in ast.walk(tree) if isinstance(node, ast.For | ast.While)]
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
