"""The paper's figure 4, on MNIST: test accuracy against time of SGD, Downpour, Downpour with Adagrad, and Sandblaster; needs matplotlib.

python recipes/figure4.py docs/figure4.png

Left, real processes on this machine, two replicas each. Right, the virtual cluster with the paper's numbers of replicas: 1, 20, 200 and 2000. There a
sample takes each replica the same time, so what is compared is how far a method gets with so many machines. It takes an hour on one core, and 8 GB; a
second word scales the numbers of replicas down, a third is the epochs of the SGD methods.
"""

import sys

import matplotlib.pyplot as plt

import distbelief as db

SECONDS, SAMPLES, BATCH = 15e-6, 60_000, 64
"""Of a virtual replica for the gradient of one sample; in MNIST; in a minibatch."""


def train(strategy: db.Downpour | db.Sandblaster | db.Single, on: db.Local | db.Simulated | None, epochs: int) -> list[tuple[float, float]]:
    """Seconds of training and the test accuracy after them."""
    own = {} if isinstance(strategy, db.Sandblaster) else {"epochs": epochs, "batch_size": BATCH}
    history = db.run(db.Job("mnist", strategy, checkpoint_every=0, snapshot_every="0", **own), on=on)["history"]
    return [(row["seconds"], row["test_accuracy"]) for row in history if row["test_accuracy"]]


def real(epochs: int) -> dict[str, list[tuple[float, float]]]:
    """Each method on processes of this machine."""
    sgd, adagrad = db.optim("sgd", lr=0.1), db.optim("adagrad", lr=0.02)
    return {
        "SGD, 1 replica": train(db.Single(optimizer=sgd), None, epochs),
        "Downpour, 2 replicas": train(db.Downpour(2, 2, optimizer=sgd), None, epochs),
        "Downpour with Adagrad, 2 replicas": train(db.Downpour(2, 2, optimizer=adagrad), None, epochs),
        "Sandblaster L-BFGS, 2 replicas": train(db.Sandblaster(2, 2, 10 * epochs), None, 0),
    }


def simulated(epochs: int, scale: float) -> dict[str, list[tuple[float, float]]]:
    """Each method on the virtual cluster."""
    few, many, most = (max(2, round(count * scale)) for count in (20, 200, 2000))
    portion = min(500, max(10, SAMPLES // (3 * most)))
    steps, portions = (db.Simulated(pace=db.Pace(step=samples * SECONDS)) for samples in (BATCH, portion))
    return {
        "SGD, 1 replica": train(db.Downpour(1, 1, optimizer=db.optim("sgd", lr=0.1)), steps, epochs),
        f"Downpour, {few} replicas": train(db.Downpour(few, 8, optimizer=db.optim("sgd", lr=0.1 / few)), steps, epochs),
        f"Downpour with Adagrad, {many} replicas": train(db.Downpour(many, 32, optimizer=db.optim("adagrad", lr=0.001)), steps, epochs),
        f"Sandblaster L-BFGS, {most} replicas": train(db.Sandblaster(most, 32, 10 * epochs, portion_size=portion, send_every=1), portions, 0),
    }


def main(path: str, scale: float = 1.0, epochs: float = 10) -> None:
    """Train with each of them, here and in simulation, and draw."""
    _, places = plt.subplots(1, 2, figsize=(11, 4), sharey=True)
    for place, title in zip(places, ("two cores", "virtual cluster"), strict=True):
        curves = real(int(epochs)) if place is places[0] else simulated(int(epochs), scale)
        for name, curve in curves.items():
            place.plot([seconds for seconds, _ in curve], [100 * accuracy for _, accuracy in curve], label=name)
            print(f"{title}, {name}: {100 * curve[-1][1]:.2f} % after {curve[-1][0]:.2f} s")
        place.set_xscale("log")
        place.set_xlabel("seconds of training")
        place.set_title(title)
        place.legend()
    places[0].set_ylabel("test accuracy, %")
    places[0].set_ylim(85, 99)
    plt.savefig(path, dpi=110, bbox_inches="tight")


if __name__ == "__main__":
    main(sys.argv[1], *map(float, sys.argv[2:]))
