"""Which consistency learns fastest if one machine is slow? Test loss against time, measured on real processes; needs
matplotlib.

python recipes/stragglers.py docs/stragglers.png

Four replicas take 30 ms for a step, one of them four times as long; they sleep for the rest of a step, so that two
cores are enough. Rounds and updates of softsync average four gradients, so their learning rate is four times that of
the others.
"""

import argparse

import matplotlib.pyplot as plt

import distbelief as db

REPLICAS, RATE = 4, 0.05
ONE, FOUR = db.optim("sgd", lr=RATE), db.optim("sgd", lr=REPLICAS * RATE)
STRATEGIES = {
    "synchronous": db.Synchronous(REPLICAS, optimizer=FOUR),
    "synchronous, 1 backup worker": db.Synchronous(REPLICAS, optimizer=FOUR, backup_workers=1),
    "bounded, staleness 3": db.Bounded(REPLICAS, optimizer=ONE, staleness=3),
    "softsync, n 1": db.Softsync(REPLICAS, optimizer=FOUR, n=1),
    "downpour": db.Downpour(REPLICAS, optimizer=ONE),
}


def main(path: str, step: float = 0.03, epochs: int = 8) -> None:
    """Train with each strategy, and draw."""
    place = db.Local(compute=db.ComputeModel(step=step, spread="constant", slow={0: 4.0}))
    plt.figure(figsize=(7, 4))
    for name, strategy in STRATEGIES.items():
        history = db.run(
            db.Job(task="digits", strategy=strategy, epochs=epochs, batch_size=16, checkpoint_every=0), on=place
        )["history"]
        plt.plot([row["seconds"] for row in history], [row["test_loss"] for row in history], marker=".", label=name)
        print(f"{name}: loss {history[-1]['test_loss']:.3f} after {history[-1]['seconds']:.1f} s")
    plt.xlabel("seconds of training")
    plt.ylabel("test loss")
    plt.yscale("log")
    plt.title(f"digits, {REPLICAS} replicas, one of them 4 times slower, {epochs} epochs")
    plt.legend()
    plt.savefig(path, dpi=110, bbox_inches="tight")


if __name__ == "__main__":
    asked = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    asked.add_argument("path", help="of the picture, such as docs/stragglers.png")
    main(**vars(asked.parse_args()))
