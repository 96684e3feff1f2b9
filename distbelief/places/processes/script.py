"""User's script: a file, or a module named as for `python -m`."""

from __future__ import annotations

import importlib.util
import os
import sys
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path

from distbelief.errors import UsageError

MODULE = "-m"
"""Option before the name of a module."""


def is_module(script: list[str]) -> bool:
    """Return whether a script is named as a module."""
    return script[:1] == [MODULE]


def name_of(script: list[str]) -> str:
    """Return the name of a script, without its arguments.

    >>> name_of(["train.py", "--lr", "1"]), name_of(["-m", "package.train", "--lr", "1"])
    ('train.py', '-m package.train')
    """
    return " ".join(script[: 1 + is_module(script)])


def file_of(script: list[str]) -> str:
    """Return the absolute path of the file that is run.

    Raises:
        UsageError: there is no such module.
    """
    return os.path.abspath(str(module_spec(script[1]).origin) if is_module(script) else script[0])


def check_file(script: list[str]) -> None:
    """Refuse a script that does not exist, or that Python cannot run."""
    name = script[0]
    if script == [MODULE]:
        raise UsageError(f"{MODULE}: which module? Write its name after it: {MODULE} package.train")
    if not os.path.isfile(file_of(script)):
        raise UsageError(f"script {name!r} is no file; name the Python script that every replica runs")
    if name.endswith(".ipynb"):
        raise UsageError(
            f"script {name!r} is a notebook, and Python runs none; export it as a script: jupyter nbconvert --to "
            f"script {name}, and launch {name.removesuffix('.ipynb')}.py"
        )


def module_spec(name: str) -> ModuleSpec:
    """Return the import spec of a module in the working folder, or of an installed one.

    Nothing is imported: only the replicas run the code of its packages.

    Raises:
        UsageError: there is no such module.
    """
    if name.endswith(".py"):
        module = name.removesuffix(".py").replace(os.sep, ".").lstrip(".")
        raise UsageError(f"{MODULE} {name}: takes the name of a module, not of a file: {MODULE} {module}, or {name}")
    parts, places, origin = name.split("."), [os.getcwd(), *sys.path], None
    for at, part in enumerate(parts):
        # each part by itself: `find_spec` of a dotted name would import the outer package
        spec = PathFinder.find_spec(part, places) if part.isidentifier() else None
        if spec is None and not at and part.isidentifier():
            spec = importlib.util.find_spec(part)  # an editable installation has its own finder
        if spec is None:
            within = ".".join(parts[:at]) if at else f"{os.getcwd()}, nor among what is installed"
            raise UsageError(f"{MODULE} {name}: there is no module {part!r} in {within}; name it as python -m does")
        places, origin = list(spec.submodule_search_locations or ()), spec.origin
    if places:
        return module_spec(f"{name}.__main__")
    made = importlib.util.spec_from_file_location(name, origin)
    if made is None or Path(origin or "").suffix != ".py":
        raise UsageError(f"{MODULE} {name}: is no Python source ({origin}); name a module that is")
    return made


def hint(script: list[str], error: BaseException) -> str:
    """Return the remedy if a file of a package was run by itself and imports its neighbours; else ""."""
    if is_module(script) or "no known parent package" not in str(error):
        return ""
    file = Path(script[0]).resolve()
    root = file.parent.parent
    while (root / "__init__.py").is_file():
        root = root.parent
    name = ".".join(file.relative_to(root).with_suffix("").parts)
    where = "" if root == Path.cwd().resolve() else f", in the folder {root}"
    return f"; it is a module of a package, which is launched by its name{where}: {MODULE} {name}"
