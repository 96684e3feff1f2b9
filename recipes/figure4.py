"""The paper's figures 4 and 5 on MNIST, from two studies: test accuracy against simulated time, and the time to an
accuracy against the number of replicas; needs matplotlib.

python recipes/figure4.py studies/figure4 studies/figure5 docs/figure4.png

`distbelief study figure4` and `distbelief study figure5` make the folders. The left shows the median of the seeds and
the range from the least to the best; the right shows every seed and their median. A seed that misses the accuracy is
not drawn, and neither is a median that is missed.
"""

import argparse
import json
import math
from pathlib import Path
from statistics import median
from typing import Any

import matplotlib.pyplot as plt
from matplotlib.axes import Axes


def draw_accuracies(place: Axes, found: dict[str, Any]) -> None:
    """Draw a line for each arm; all seeds have their points at nearly the same times."""
    for arm in found["arms"]:
        trials = [one["points"] for one in found["trials"] if one["arm"] == arm["name"] and one["points"]]
        moments = list(zip(*trials, strict=False))
        seconds = [median(point["seconds"] for point in moment) for moment in moments]
        accuracies = [sorted(100 * point["accuracy"] for point in moment) for moment in moments]
        [line] = place.plot(seconds, [median(one) for one in accuracies], marker="o", markersize=3, label=arm["name"])
        least, best = [one[0] for one in accuracies], [one[-1] for one in accuracies]
        place.fill_between(seconds, least, best, color=line.get_color(), alpha=0.15, linewidth=0)
    place.set_ylim(bottom=90)
    place.set_xlabel("seconds of training, simulated")
    place.set_ylabel("test accuracy, %")


def draw_times(place: Axes, found: dict[str, Any]) -> None:
    """Draw a line for each method, over its arms."""
    target = found["study"]["targets"][-1]
    groups: dict[str, list[tuple[int, list[float]]]] = {}
    for arm in found["arms"]:
        name, _, _ = arm["name"].partition(", replicas")
        at = next(one for one in arm["targets"] if one["target"] == target)
        seconds = [math.inf if one is None else one for one in at["seconds"]]
        groups.setdefault(name, []).append((arm["replicas"], seconds))
    place.set_xscale("log", base=2)
    place.set_xticks(sorted({count for arms in groups.values() for count, _ in arms}))
    for name, arms in groups.items():
        middle = [median(seconds) for _, seconds in arms]
        [line] = place.plot([count for count, _ in arms], middle, marker="o", label=name)
        every = [(count, one) for count, seconds in arms for one in seconds if math.isfinite(one)]
        place.scatter([count for count, _ in every], [one for _, one in every], s=9, color=line.get_color(), alpha=0.4)
    place.xaxis.set_major_formatter("{x:g}")
    place.set_ylim(bottom=0)
    place.set_xlabel("replicas")
    place.set_ylabel(f"seconds to {100 * target:g} %, simulated")


def main(accuracies: str, times: str, path: str) -> None:
    """Draw both parts."""
    figure, places = plt.subplots(1, 2, figsize=(11, 4.8), layout="constrained")
    for draw, folder, place in zip((draw_accuracies, draw_times), (accuracies, times), places, strict=True):
        draw(place, json.loads((Path(folder) / "report.json").read_text()))
        place.grid(alpha=0.3)
        place.legend(fontsize=8, frameon=False)
    figure.savefig(path, dpi=110)


if __name__ == "__main__":
    asked = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    asked.add_argument("accuracies", help="folder of the study figure4")
    asked.add_argument("times", help="folder of the study figure5")
    asked.add_argument("path", help="of the picture, such as docs/figure4.png")
    main(**vars(asked.parse_args()))
