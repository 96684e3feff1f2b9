"""Finite fields: elements are the numbers below q, whose digits to base p are a polynomial's coefficients."""

from __future__ import annotations

from itertools import product


def prime_power(number: int) -> tuple[int, int] | None:
    """The prime and its exponent, or None.

    >>> prime_power(8), prime_power(12)
    ((2, 3), None)
    """
    prime, exponent = next((p for p in range(2, number + 1) if number % p == 0), 0), 0
    while prime and number % prime == 0:
        number, exponent = number // prime, exponent + 1
    return (prime, exponent) if exponent and number == 1 else None


class GaloisField:
    """GF(q) for the power q of a prime.

    >>> field = GaloisField(4)
    >>> field.plus(2, 3), field.times(2, 3)
    (1, 1)
    """

    def __init__(self, q: int) -> None:
        power = prime_power(q)
        assert power is not None, f"there is no field of {q} elements"
        self._prime, degree = power
        self._digits = list(product(range(self._prime), repeat=degree))
        self._elements = {digits: element for element, digits in enumerate(self._digits)}
        self.powers = next(powers for powers in map(self._powers_of_x, range(q)) if len(powers) == q - 1)
        """Powers of a primitive element, from 0 to q - 2: all elements but 0."""
        self._logarithms = {element: power for power, element in enumerate(self.powers)}

    def plus(self, a: int, b: int, times: int = 1) -> int:
        """The sum of one and so many times the other."""
        digits = zip(self._digits[a], self._digits[b], strict=True)
        return self._elements[tuple([(a + times * b) % self._prime for a, b in digits])]

    def times(self, a: int, b: int) -> int:
        """The product."""
        if not (a and b):
            return 0
        return self.powers[(self._logarithms[a] + self._logarithms[b]) % len(self.powers)]

    def _powers_of_x(self, below: int) -> list[int]:
        """The powers of x, until one comes again, where x to the degree is the element `below`."""
        powers = [1]
        while True:
            high, *low = self._digits[powers[-1]]
            element = self.plus(self._elements[*low, 0], below, high)
            if element == 0 or element in powers:
                return powers if element == 1 else []
            powers.append(element)
