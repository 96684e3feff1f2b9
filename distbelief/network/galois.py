"""Finite fields: their elements are the numbers below q, whose digits, to the base of the prime, are coefficients of a
polynomial.
"""

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
        found = prime_power(q)
        assert found is not None, f"there is no field of {q} elements"
        self._prime, self._degree = found
        all_ = map(self._powers, product(range(self._prime), repeat=self._degree))
        self.powers = next(powers for powers in all_ if len(powers) == q - 1)
        """Of a primitive element, from 0 to q - 2: all elements but 0."""
        self._logarithm = {element: power for power, element in enumerate(self.powers)}

    def plus(self, one: int, other: int, times: int = 1) -> int:
        """The sum of one and so many times the other."""
        digits = zip(self._digits(one), self._digits(other), strict=True)
        return self._number([a + times * b for a, b in digits])

    def times(self, one: int, other: int) -> int:
        """The product."""
        if not (one and other):
            return 0
        return self.powers[(self._logarithm[one] + self._logarithm[other]) % len(self.powers)]

    def _digits(self, element: int) -> list[int]:
        return [element // self._prime**place % self._prime for place in range(self._degree)]

    def _number(self, digits: list[int]) -> int:
        return sum(digit % self._prime * self._prime**place for place, digit in enumerate(digits))

    def _powers(self, below: tuple[int, ...]) -> list[int]:
        """Those of x, until one comes again, where x to the degree is the polynomial `below`."""
        powers = [1]
        while True:
            *low, high = self._digits(powers[-1])
            element = self._number([a + high * b for a, b in zip([0, *low], below, strict=True)])
            if element == 0 or element in powers:
                return powers if element == 1 else []
            powers.append(element)
