"""Models from compressed files: plain modules, without what compressed them."""

from __future__ import annotations

import os
from pathlib import Path

from torch import nn

from distbelief.codecs.file import ModelFile, read
from distbelief.core.values import admit, shown
from distbelief.errors import UsageError
from distbelief.references import TASKS
from distbelief.tasks.files.constrained import fill
from distbelief.tasks.files.lean import lean
from distbelief.tasks.task import Task, resolve


def load(path: str | os.PathLike[str], model: nn.Module | str | None = None, inference: str = "float32") -> nn.Module:
    """The model of a file that `distbelief compress` wrote, as a plain module in evaluation mode.

    Args:
        path: of the file.
        model: a module to take the values, or the task that builds it, by its name or `module:function`; None for the
            built-in task that the file names. What a file names is never imported.
        inference: float32; int8, whose linear layers and convolutions multiply numbers of 8 bits; or ids, which makes
            shared weights of their ids whenever they are used.

    Returns:
        The module, its parameters dense float32 (or as they were); with int8 or ids, those layers replaced, for
        inference only.

    Raises:
        DataError: there is no such file, or it is truncated, foreign or spoilt.
        LayoutError: the model does not fit it; the first difference is named.
        UsageError: it names no built-in task, and no model was given; or there is no such inference of it.
    """
    file = read(Path(admit(path, str | os.PathLike, f"load({shown(path)})")))
    admit(model, nn.Module | str | None, f"load(model={shown(model)})")
    whole = model if isinstance(model, nn.Module) else task_of(file, model).model()
    return lean(fill(whole, file).eval(), admit(inference, str, f"load(inference={shown(inference)})"), file)


def task_of(file: ModelFile, task: str | None = None, data_dir: str | None = None) -> Task:
    """The task of a file's model: the one that is named here, else the built-in one that the file names.

    Raises:
        UsageError: there is none.
    """
    if not task and file.task not in TASKS:
        raise UsageError(
            f"{file.name} is of task {file.task!r}, which is no built-in one, and nothing is imported because a file "
            f"names it: name it yourself, --task {file.task} or load(..., {file.task!r})"
        )
    return resolve(task or file.task, data_dir)
