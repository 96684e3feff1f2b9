"""The names of the built-in tasks, for which nothing need be imported."""

from __future__ import annotations

from distbelief.errors import unknown
from distbelief.references import check_no_path

TASKS = (
    "digits", "mnist", "mnist-lenet", "mnist-alexnet", "mnist-inception", "mnist-siamese", "mnist-gru", "mnist-local",
    "mnist-squeezenet", "alexnet", "vgg16", "inception-v1", "squeezenet", "gpt-tiny", "sparse-svm", "dense-svm",
)  # fmt: skip
"""The names of `tasks.BUILTINS`, which cannot be looked at without torch."""


def check_task(task: str) -> None:
    """Refuse what is no task's name."""
    named = task.partition("@")[0]
    check_no_path("task", named, "function")
    if named not in TASKS and ":" not in named:
        raise unknown("task", named, [*TASKS, "module:function"])
