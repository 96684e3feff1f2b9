"""From a task's name to the task: the built-in ones, and a user's own `module:function`."""

from __future__ import annotations

import inspect
from collections.abc import Callable

from distbelief.core.values import admit, shown
from distbelief.errors import DataError, UsageError
from distbelief.references import TASKS, check_task, find
from distbelief.tasks.files.constrained import MARK, constrained
from distbelief.tasks.task import Task


def resolve(reference: str, data_dir: str | None = None) -> Task:
    """The task of that name, or the one that a user's own function returns.

    Args:
        reference: A built-in name, or `module:function`: a module as `import` would find it (from the current folder
            too), and in it a function without required arguments that returns a `Task`. With `@FILE` behind it, its
            model begins as that compressed file has it, and keeps what is pruned and shared there.
        data_dir: Folder of the data; the function must have a parameter `data_dir` to be given one.

    Raises:
        UsageError: No such task, or its module or function does not yield one.

    >>> resolve("digits").reference
    'digits'
    """
    if MARK in admit(reference, str, f"task={shown(reference)}"):
        whole, _, path = reference.partition(MARK)
        return constrained(resolve(whole, data_dir), path)
    check_task(reference)
    module = TASKS.get(reference)
    named = f"distbelief.{module}:{reference.replace('-', '_')}" if module else reference
    function = _find(named)
    options = {}
    if data_dir:
        if not _takes_data_dir(function):
            raise UsageError(
                f"--data-dir {data_dir}: task {reference!r} reads no folder: leave it off, or give its function a "
                "parameter data_dir"
            )
        options = {"data_dir": data_dir}
    try:
        task = function(**options)
    # SystemExit too: a user's script may parse its arguments or end itself
    except (Exception, SystemExit) as error:
        raise UsageError(
            f"task {reference!r}: its function raised {type(error).__name__}: {error}; called without arguments, it "
            "must return a Task"
        ) from error
    if not isinstance(task, Task):
        raise UsageError(
            f"task {reference!r}: its function returned {type(task).__name__}; it must return a distbelief.tasks.Task"
        )
    return task.named(reference, data_dir)


def available(reference: str, data_dir: str | None = None) -> str | None:
    """Why a task's data cannot be had here, in one line; None where they can.

    Loads the smaller data set once, downloading where that is the task's way: call it before many processes do.

    Raises:
        UsageError: As `resolve`.

    >>> available("digits")
    """
    task = resolve(reference, data_dir)
    try:
        (task.test or task.train)()
    except DataError as error:
        return " ".join(str(error).split())
    except (Exception, SystemExit) as error:
        return f"the data of task {reference!r} cannot be loaded: {type(error).__name__}: {error}"
    return None


def _find(reference: str) -> Callable[..., Task]:
    module, function, error = find("task", reference, "function")
    if not callable(function):
        others = [n for n, value in vars(module).items() if inspect.isfunction(value) and not n.startswith("_")]
        raise UsageError(f"{error}; name a function of it that returns a Task: {', '.join(others) or 'it has none'}")
    return function


def _takes_data_dir(function: Callable[..., Task]) -> bool:
    try:
        return "data_dir" in inspect.signature(function).parameters
    except (TypeError, ValueError):
        return False
