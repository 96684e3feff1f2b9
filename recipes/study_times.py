"""Time to a target in a study, for every arm and seed; needs matplotlib.

python recipes/study_times.py studies/mnist docs/study-mnist.png mnist:local:0.98 mnist-lenet:local:0.98

Each task, place and target has a panel: a dot for each seed that reaches the target, a bar at the median, and the share
of seeds that reach it. `distbelief study mnist` makes the folder.
"""

import argparse
import json
import math
from pathlib import Path
from statistics import median
from typing import Any

import matplotlib.pyplot as plt
from matplotlib.axes import Axes


def draw(axes: Axes, found: dict[str, Any], task: str, place: str, target: float) -> None:
    """Draw one panel, with the arms from top to bottom in the order of the study."""
    arms = [arm for arm in found["arms"] if (arm["task"], arm["place"]) == (task, place)]
    for row, arm in enumerate(arms):
        at = next(one for one in arm["targets"] if one["target"] == target)
        seconds = [math.inf if one is None else one for one in at["seconds"]]
        there = [one for one in seconds if math.isfinite(one)]
        axes.scatter(there, [row] * len(there), s=14, color="#0072b2", alpha=0.6)
        if seconds and math.isfinite(median(seconds)):
            axes.plot([median(seconds)] * 2, [row - 0.35, row + 0.35], color="#d55e00", linewidth=2)
        told = f"{at['reached']} of {at['of']}"
        axes.annotate(told, (1.01, row), xycoords=("axes fraction", "data"), fontsize=7, va="center")
    axes.set_yticks(range(len(arms)), [arm["name"] for arm in arms], fontsize=8)
    axes.invert_yaxis()
    axes.set_xlim(left=0)
    axes.set_xlabel(f"seconds to {100 * target:g} %{', simulated' * (place == 'simulated')}")
    axes.grid(alpha=0.3)


def main(folder: str, path: str, *panels: str) -> None:
    """Draw the panels below each other, with heights by their numbers of arms."""
    found = json.loads((Path(folder) / "report.json").read_text())
    asked = [panel.split(":") for panel in panels]
    rows = [sum((arm["task"], arm["place"]) == (task, place) for arm in found["arms"]) for task, place, _ in asked]
    figure, axes = plt.subplots(
        len(asked),
        1,
        figsize=(8, 0.24 * sum(rows) + 0.8 * len(asked)),
        squeeze=False,
        layout="constrained",
        gridspec_kw={"height_ratios": rows},
    )
    for (task, place, target), one in zip(asked, axes[:, 0], strict=True):
        draw(one, found, task, place, float(target))
    figure.savefig(path, dpi=110)


if __name__ == "__main__":
    asked = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    asked.add_argument("folder", help="of the study")
    asked.add_argument("path", help="of the picture, such as docs/study-mnist.png")
    asked.add_argument("panels", nargs="*", metavar="task:place:target")
    told = asked.parse_args()
    main(told.folder, told.path, *told.panels)
