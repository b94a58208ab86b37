"""Numbers that are drawn: how long, how many, how late. Written ``50``, ``uniform:20:80``, ``lognormal:50:0.4``.

One way of writing serves the mock server's script and made-up prompt and answer lengths.
"""

from __future__ import annotations

import bisect
import functools
import itertools
import math
import random
from dataclasses import dataclass
from typing import Final, Literal

from headrace.base.errors import ConfigError

Kind = Literal["constant", "uniform", "exponential", "lognormal", "zipf"]
FORMS: Final = "50, uniform:LOW:HIGH, exponential:MEAN, lognormal:MEDIAN:SIGMA or zipf:HIGHEST:EXPONENT"
_NUM_PARAMETERS: Final[dict[str, int]] = {"constant": 1, "uniform": 2, "exponential": 1, "lognormal": 2, "zipf": 2}


_MAX_ZIPF: Final = 1_000_000


@dataclass(frozen=True, slots=True)
class Spread:
    """A distribution of numbers ≥ 0.

    Args:
        first: the constant, the lowest, the mean, the median, or the highest of ``zipf``, whose lowest is 1.
        second: the highest of ``uniform``, σ of the logarithm of ``lognormal``, or the exponent of ``zipf``: a number
            n comes with a chance of n to the power of minus the exponent.
    """

    kind: Kind
    first: float
    second: float = 0.0

    @property
    def is_constant(self) -> bool:
        """Whether each draw gives the same."""
        return self.kind == "constant"

    @property
    def mean(self) -> float:
        """The mean of many draws."""
        match self.kind:
            case "constant" | "exponential":
                return self.first
            case "uniform":
                return (self.first + self.second) / 2
            case "lognormal":
                return self.first * math.exp(self.second**2 / 2)
            case "zipf":
                reached = _zipf_reached(int(self.first), self.second)
                return sum(1 - before for before in (0.0, *reached[:-1]))  # the sum of the chances of n or more

    def draw(self, rng: random.Random) -> float:
        """Gives one number."""
        match self.kind:
            case "constant":
                return self.first
            case "uniform":
                return rng.uniform(self.first, self.second)
            case "exponential":
                return rng.expovariate(1 / self.first) if self.first else 0.0
            case "lognormal":
                return self.first * math.exp(rng.gauss(0.0, self.second))
            case "zipf":
                reached = _zipf_reached(int(self.first), self.second)
                return 1.0 + bisect.bisect_left(reached, rng.random(), hi=len(reached) - 1)

    def __str__(self) -> str:
        if self.kind == "constant":
            return f"{self.first:g}"
        numbers = (self.first, self.second)[: _NUM_PARAMETERS[self.kind]]
        return ":".join([self.kind, *(f"{number:g}" for number in numbers)])


@functools.lru_cache(maxsize=8)
def _zipf_reached(highest: int, exponent: float) -> tuple[float, ...]:
    """Gives the chance of at most n, for n from 1 to ``highest``."""
    sums = tuple(itertools.accumulate(n**-exponent for n in range(1, highest + 1)))
    return tuple(value / sums[-1] for value in sums)


def parse_spread(text: str | float, name: str) -> Spread:
    """Reads a distribution.

    Args:
        name: of the field or option, for the message.

    Raises:
        ConfigError: it is none; the message names the field, the value and the forms.
    """
    kind, *values = str(text).split(":")
    if not values:
        kind, values = "constant", [kind]
    try:
        numbers = [float(value) for value in values]
    except ValueError:
        numbers = []
    if kind not in _NUM_PARAMETERS or len(numbers) != _NUM_PARAMETERS[kind]:
        raise ConfigError(f"{name} is {str(text)!r}; write {FORMS}")
    if not all(math.isfinite(number) and number >= 0 for number in numbers):
        raise ConfigError(f"{name} is {str(text)!r}; its numbers must be finite and at least 0")
    if kind == "uniform" and numbers[0] > numbers[1]:
        raise ConfigError(f"{name} is {str(text)!r}; the lower end comes first")
    if kind == "zipf" and not (1 <= numbers[0] <= _MAX_ZIPF and numbers[0] == int(numbers[0])):
        raise ConfigError(f"{name} is {str(text)!r}; the highest number is a whole one from 1 to {_MAX_ZIPF}")
    return Spread(kind, *numbers)  # type: ignore[arg-type]  # a key of _NUM_PARAMETERS is a Kind
