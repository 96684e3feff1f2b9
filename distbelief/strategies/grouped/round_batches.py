"""Round batches: an epoch's minibatches, dealt to a whole group round by round, and taken back as it breaks up."""

from __future__ import annotations

from collections import deque
from typing import NamedTuple

from distbelief.core.portions import START, Epochs, Portion, Position
from distbelief.errors import RemoteProtocolError

ROUNDS_LIMIT = 16
"""Most rounds in one round batch; a group is dealt the next while it makes one."""


class Share(NamedTuple):
    """Work of one member in a round."""

    steps: int = 0
    samples: int = 0


def round_of(portion: Portion, width: int, number: int) -> list[int]:
    """The minibatches of round `number` of a round batch, at most `width`; the members take them by turns.

    >>> round_of(Portion(0, 10, 5), 2, 0), round_of(Portion(0, 10, 5), 2, 2)
    ([10, 11], [14])
    """
    first = portion.first + number * width
    return list(range(first, min(first + width, portion.first + portion.count)))


class RoundBatches(Epochs):
    """Deals `epochs` epochs of `samples` samples in minibatches of `batch_size`.

    A round takes one minibatch for each member, or `accumulate` of them, so that it is the same as one of a larger
    minibatch; only the last of an epoch may be smaller.

    >>> round_batches = RoundBatches(samples=50, batch_size=10, epochs=1)
    >>> round_batches.deal(2)
    Portion(epoch=0, first=0, count=5)
    >>> round_batches.settle(1), round_batches.recall(), round_batches.deal(3)
    ([Share(steps=1, samples=10), Share(steps=1, samples=10)], [2, 1], Portion(epoch=0, first=2, count=3))
    """

    def __init__(
        self, samples: int, batch_size: int, epochs: int, position: Position = START, accumulate: int = 1
    ) -> None:
        super().__init__(-(-samples // batch_size), epochs, position)
        self._samples, self._batch_size, self._accumulate = samples, batch_size, accumulate
        self._out: deque[tuple[Portion, int]] = deque()
        self._members = 1

    def samples_of(self, index: int) -> int:
        """Samples in a minibatch."""
        return min(self._batch_size, self._samples - index * self._batch_size)

    def deal(self, members: int, rounds: int = ROUNDS_LIMIT) -> Portion | None:
        """The next round batch of a group of so many, of at most so many rounds; None when all is dealt."""
        self._members = members
        most = self._width * rounds
        if self._again:
            whole = self._again.popleft()
            portion = Portion(whole.epoch, whole.first, min(whole.count, most))
            if whole.count > most:
                self._again.appendleft(Portion(whole.epoch, whole.first + most, whole.count - most))
        elif self._epoch < self.epochs:
            portion = self._forward(min(self.batches - self._batch, most))
        else:
            return None
        self._out.append((portion, 0))
        return portion

    @property
    def _width(self) -> int:
        """Minibatches in a round."""
        return self._members * self._accumulate

    @property
    def out(self) -> int:
        """Round batches that are dealt and not done."""
        return len(self._out)

    @property
    def at_start(self) -> bool:
        """Return whether what is dealt next begins an epoch."""
        return not self._again and not self._batch

    @property
    def epochs_dealt(self) -> int:
        """Epochs of which everything has been dealt."""
        return self._epoch

    def settle(self, rounds: int) -> list[Share]:
        """So many more rounds are done; returns the share of each member in them.

        Raises:
            RemoteProtocolError: more than were dealt.
        """
        dealt = sum(-(-portion.count // self._width) - done for portion, done in self._out)
        if rounds > dealt:
            raise RemoteProtocolError(f"{rounds} rounds are reported, and {dealt} were dealt")
        shares = [Share() for _ in range(self._members)]
        for _ in range(rounds):
            portion, done = self._out.popleft()
            batches = round_of(portion, self._width, done)
            for turn, index in enumerate(batches):
                member = turn % self._members
                steps, samples = shares[member]
                shares[member] = Share(steps + 1, samples + self.samples_of(index))
            self._count(portion.epoch, len(batches))
            if (done + 1) * self._width < portion.count:
                self._out.appendleft((portion, done + 1))
        return shares

    def held(self) -> list[int]:
        """Return how many minibatches of what is dealt and not done are each member's."""
        held = [0] * self._members
        for portion, done in self._out:
            for index in range(portion.count - done * self._width):
                held[index % self._members] += 1
        return held

    def recall(self) -> list[int]:
        """Take back what is not done; returns how many minibatches of it were each member's."""
        lost = self.held()
        for portion, done in reversed(self._out):
            first, end = portion.first + done * self._width, portion.first + portion.count
            here = (self._epoch, self._batch)
            if (
                not self._again
                and here in ((portion.epoch, end), (portion.epoch + 1, 0))
                and (here[1] or end == self.batches)
            ):
                if here[0] > portion.epoch and self._left.get(here[0]) == self.batches:
                    del self._left[here[0]]  # it has not begun
                self._epoch, self._batch = portion.epoch, first
            else:
                self._again.appendleft(Portion(portion.epoch, first, end - first))
        self._out.clear()
        return lost

    def position(self) -> Position:
        """Return the position of the data, where nothing is dealt and not done."""
        return Position(self._epoch, self._batch, tuple(self._again))
