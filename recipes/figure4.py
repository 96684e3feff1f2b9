"""The paper's figure 4, on MNIST: test accuracy against time of SGD, Downpour, Downpour with Adagrad, and Sandblaster;
needs matplotlib.

python recipes/figure4.py docs/figure4.png

Left, real processes on this machine, two replicas each. Right, the virtual cluster with the paper's numbers of
replicas: 1, 20, 200 and 2000. There a sample takes each replica the same time, and every message, copy and update its
own, so what is compared is how far a method gets with so many machines; SGD is the plain loop on one of them, without a
network. MNIST is small for 2000 of them, which compute 30 samples of a batch each, and spend more on fetching
parameters. It takes some 40 minutes on two cores, and 14 GB; a second word scales the numbers of replicas down, a third
is the epochs of the SGD methods, and a tenth of Sandblaster's iterations.
"""

import sys

import matplotlib.pyplot as plt
import numpy as np
from matplotlib.ticker import LogLocator, NullFormatter

import distbelief as db

SECONDS, SAMPLES, BATCH = 15e-6, 60_000, 64
"""Of a virtual replica for the gradient of one sample; in MNIST; in a minibatch."""

VIRTUAL = "virtual cluster"
"""The panel whose seconds are simulated."""

Curves = dict[str, list[tuple[float, float]]]
"""By method, seconds of training and the test accuracy after them."""


def train(
    strategy: db.Downpour | db.Sandblaster | db.Single, on: db.Simulated | str, epochs: int
) -> list[tuple[float, float]]:
    """Seconds of training and the test accuracy after them."""
    own = {} if isinstance(strategy, db.Sandblaster) else {"epochs": epochs, "batch_size": BATCH}
    history = db.run(db.Job("mnist", strategy, checkpoint_every=0, snapshot_every="0", **own), on=on)["history"]
    return [(row["seconds"], row["test_accuracy"]) for row in history if row["test_accuracy"] is not None]


def real(epochs: int) -> Curves:
    """Each method on processes of this machine."""
    sgd, adagrad = db.optim("sgd", lr=0.1), db.optim("adagrad", lr=0.02)
    return {
        "SGD, 1 replica": train(db.Single(optimizer=sgd), "local", epochs),
        "Downpour, 2 replicas": train(db.Downpour(2, 2, optimizer=sgd), "local", epochs),
        "Downpour with Adagrad, 2 replicas": train(db.Downpour(2, 2, optimizer=adagrad), "local", epochs),
        "Sandblaster L-BFGS, 2 replicas": train(db.Sandblaster(2, 2, 10 * epochs), "local", 0),
    }


def simulated(epochs: int, scale: float) -> Curves:
    """Each method on the virtual cluster."""
    few, many, most = (max(2, round(count * scale)) for count in (20, 200, 2000))
    portion = min(500, SAMPLES // most)
    steps, portions = (db.Simulated(compute=db.ComputeModel(step=samples * SECONDS)) for samples in (BATCH, portion))
    return {
        "SGD, 1 machine": train(db.Single(optimizer=db.optim("sgd", lr=0.1)), steps, epochs),
        f"Downpour, {few} replicas": train(db.Downpour(few, 8, optimizer=db.optim("sgd", lr=0.1 / few)), steps, epochs),
        f"Downpour with Adagrad, {many} replicas": train(
            db.Downpour(many, 32, optimizer=db.optim("adagrad", lr=0.001)), steps, epochs
        ),
        f"Sandblaster L-BFGS, {most} replicas": train(
            db.Sandblaster(most, 32, 10 * epochs, portion_size=portion, send_every=1), portions, 0
        ),
    }


def draw(path: str, panels: dict[str, Curves]) -> None:
    """One panel beside the other; the closer to 100 %, the more room a per cent has."""
    figure, places = plt.subplots(1, len(panels), figsize=(11, 4.8), sharey=True, layout="constrained")
    for place, (title, curves) in zip(places, panels.items(), strict=True):
        for (name, curve), marker in zip(curves.items(), "o^sD", strict=True):
            seconds, accuracies = zip(*curve, strict=True)
            marks = {"marker": marker, "markersize": 4, "markevery": max(1, len(curve) // 10)}
            place.plot(seconds, [100 * accuracy for accuracy in accuracies], label=name, **marks)
        place.set_xscale("log")
        place.xaxis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0)))
        place.xaxis.set_major_formatter("{x:g}")
        place.xaxis.set_minor_formatter(NullFormatter())
        place.set_yscale(
            "function", functions=(lambda per_cent: -np.log(100.5 - per_cent), lambda y: 100.5 - np.exp(-y))
        )
        place.set_ylim(80, 99)
        place.set_yticks([80, 90, 94, 96, 97, 98, 99])
        place.set_title(title)
        place.set_xlabel("seconds of training" + ", simulated" * (title == VIRTUAL))
        place.grid(alpha=0.3)
        place.legend(loc="upper center", bbox_to_anchor=(0.5, -0.14), ncols=2, fontsize=8, frameon=False)
    places[0].set_ylabel("test accuracy, %")
    figure.savefig(path, dpi=110)


def main(path: str, scale: float = 1.0, epochs: float = 10) -> None:
    """Train with each of them, here and in simulation, and draw."""
    panels = {"two cores": real(int(epochs)), VIRTUAL: simulated(int(epochs), scale)}
    for title, curves in panels.items():
        for name, curve in curves.items():
            print(
                f"{title}, {name}: {100 * curve[-1][1]:.2f} % after {curve[-1][0]:.2f} "
                f"s{' simulated' * (title == VIRTUAL)}"
            )
    draw(path, panels)


if __name__ == "__main__":
    main(sys.argv[1], *map(float, sys.argv[2:]))
