"""References to tasks and strategies: the name of a built-in one, or `module:name` for a user's."""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Mapping
from pathlib import PurePosixPath
from types import ModuleType

from distbelief.errors import UsageError, unknown

TASKS: Mapping[str, str] = {
    "digits": "tasks.digits",
    "mnist": "tasks.digits",
    "mnist-lenet": "tasks.digits",
    "mnist-alexnet": "zoo.convnets",
    "mnist-inception": "zoo.convnets",
    "mnist-siamese": "zoo.mnist",
    "mnist-gru": "zoo.mnist",
    "mnist-local": "zoo.mnist",
    "mnist-squeezenet": "zoo.convnets",
    "alexnet": "zoo.convnets",
    "vgg16": "zoo.convnets",
    "inception-v1": "zoo.convnets",
    "squeezenet": "zoo.convnets",
    "gpt-tiny": "zoo.gpt",
    "sparse-svm": "zoo.svm",
    "dense-svm": "zoo.svm",
}
"""The module of each built-in task; its function has the task's name, with underscores."""


def check_task(task: str) -> None:
    """Refuse a name that is no task's, with the nearest task."""
    named = task.partition("@")[0]
    check_no_path("task", named, "function")
    if named not in TASKS and ":" not in named:
        raise unknown("task", named, [*TASKS, "module:function"])


def check_no_path(what: str, reference: str, kind: str) -> None:
    """Refuse a file's path instead of a module's name, with that name.

    >>> check_no_path("task", "mine/file.py", "function")
    Traceback (most recent call last):
    distbelief.errors.UsageError: task 'mine/file.py' is a path: write the module as ... here, mine.file:function
    """
    module, _, name = reference.partition(":")
    if "/" in module or module.endswith(".py"):
        named = ".".join(PurePosixPath(module).with_suffix("").parts)
        raise UsageError(
            f"{what} {reference!r} is a path: write the module as Python imports it here, {named}:{name or kind}"
        )


def find(what: str, reference: str, kind: str) -> tuple[ModuleType, object, str]:
    """Import `module:name`, also from the current folder.

    Returns:
        The module; its object of that name, or None; and a description, for an error if the object has another type.

    >>> [pi, text] = find("strategy", "math:pi", "Class")[1:]
    >>> pi > 3, text
    (True, "strategy 'math:pi': module 'math' has a float by the name 'pi'")
    """
    module_name, _, name = reference.partition(":")
    if os.getcwd() not in sys.path:
        # for a console script this entry is the script's folder, for python -m the current one
        sys.path.insert(0, os.getcwd())
    try:
        module = importlib.import_module(module_name)
    except (Exception, SystemExit) as error:
        raise UsageError(
            f"{what} {reference!r}: importing {module_name!r} raised {type(error).__name__}: {error};"
            f" write module:{kind} so that `python -c 'import MODULE'` works in {os.getcwd()}"
        ) from error
    value = getattr(module, name, None)
    got = "has no" if value is None else f"has a {type(value).__name__} by the name"
    return module, value, f"{what} {reference!r}: module {module_name!r} {got} {name!r}"
