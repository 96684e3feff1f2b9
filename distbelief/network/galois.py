"""Finite fields: their elements are the whole numbers below q, the digits of which, to the base of the prime, are the
coefficients of a polynomial.
"""

from __future__ import annotations

from collections.abc import Iterable
from itertools import product

from distbelief.errors import UsageError


def prime_power(number: int) -> tuple[int, int] | None:
    """The prime and its exponent, or None.

    >>> prime_power(8), prime_power(12)
    ((2, 3), None)
    """
    prime = next((p for p in range(2, number + 1) if number % p == 0), 0)
    exponent = 0
    while prime and number % prime == 0:
        number, exponent = number // prime, exponent + 1
    return (prime, exponent) if exponent and number == 1 else None


class GaloisField:
    """GF(q), where that is; sums and products are looked up.

    Raises:
        UsageError: q is no power of a prime.

    >>> field = GaloisField(4)
    >>> field.plus(2, 3), field.times(2, 3)
    (1, 1)
    """

    def __init__(self, q: int) -> None:
        if (found := prime_power(q)) is None:
            raise UsageError(f"there is no field of {q} elements: it must be the power of a prime")
        self.q = q
        self._prime, self._degree = found
        self._powers = self._powers_of_root()
        self._logarithm = {element: power for power, element in enumerate(self._powers)}

    @property
    def powers(self) -> list[int]:
        """The powers of a primitive element, from 0 to q - 2: all elements but 0."""
        return self._powers

    def plus(self, one: int, other: int) -> int:
        """The sum."""
        return self._number(a + b for a, b in zip(self._digits(one), self._digits(other), strict=True))

    def minus(self, one: int, other: int) -> int:
        """The difference."""
        return self._number(a - b for a, b in zip(self._digits(one), self._digits(other), strict=True))

    def times(self, one: int, other: int) -> int:
        """The product."""
        if not (one and other):
            return 0
        return self._powers[(self._logarithm[one] + self._logarithm[other]) % (self.q - 1)]

    def _digits(self, element: int) -> list[int]:
        return [element // self._prime**place % self._prime for place in range(self._degree)]

    def _number(self, digits: Iterable[int]) -> int:
        return sum(digit % self._prime * self._prime**place for place, digit in enumerate(digits))

    def _powers_of_root(self) -> list[int]:
        """Multiplying by x modulo some polynomial of that degree, which is primitive where it goes through all."""
        for below in product(range(self._prime), repeat=self._degree):
            powers, element = [1], self._times_root(1, below)
            while element not in (0, 1) and len(powers) < self.q:
                powers.append(element)
                element = self._times_root(element, below)
            if len(powers) == self.q - 1 and element == 1:
                return powers
        raise AssertionError(f"GF({self.q}) has a primitive polynomial")

    def _times_root(self, element: int, below: tuple[int, ...]) -> int:
        """An element times x, where x to the degree is the polynomial `below`; of a prime field, times below."""
        *low, high = self._digits(element)
        return self._number(a + high * b for a, b in zip([0, *low], below, strict=True))
