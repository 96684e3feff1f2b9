"""The sources of the package, read and parsed once for all tests that look at them."""

from __future__ import annotations

import ast
from pathlib import Path

import distbelief

PACKAGE = Path(distbelief.__file__).parent
FILES = {str(path.relative_to(PACKAGE)): path.read_text() for path in sorted(PACKAGE.rglob("*.py"))}
TREES = {name: ast.parse(text) for name, text in FILES.items()}
NODES = {name: [*ast.walk(tree)] for name, tree in TREES.items()}
