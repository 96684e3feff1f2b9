"""The sources of the package, read and parsed once for all tests that look at them."""

from __future__ import annotations

import ast
import functools
from pathlib import Path

import distbelief

PACKAGE = Path(distbelief.__file__).parent
FILES = {str(path.relative_to(PACKAGE)): path.read_text() for path in sorted(PACKAGE.rglob("*.py"))}


@functools.cache
def trees() -> dict[str, ast.Module]:
    return {name: ast.parse(text) for name, text in FILES.items()}


@functools.cache
def nodes_of() -> dict[str, list[ast.AST]]:
    return {name: [*ast.walk(tree)] for name, tree in trees().items()}
