"""Numbers of a trace as products of labels, and what they are in a layout."""

from collections.abc import Mapping, Sequence
from typing import Any

type Monomial = tuple[int, tuple[tuple[str, int], ...]]
"""A number as a factor and powers of sizes."""

TOKENS = frozenset("bluq")
"""Labels of the sizes of sequences and positions."""


def labelled(fields: Any) -> Monomial:
    """A monomial from its fields as JSON has them."""
    factor, powers = fields
    return factor, tuple((letter, power) for letter, power in powers)


def evaluate(monomials: Sequence[Monomial], values: Mapping[str, tuple[int, int]]) -> list[int]:
    """The numbers that monomials are in a layout, from the numerators and denominators of `label_values`."""
    numbers: list[int] = []
    for number, powers in monomials:
        # Multiplied first and divided once: single ratios need not be whole, the number of elements is.
        divisor = 1
        for letter, power in powers:
            numerator, denominator = values[letter]
            number *= numerator**power
            divisor *= denominator**power
        assert number % divisor == 0, "an array has a whole number of elements"
        numbers.append(number // divisor)
    return numbers
