"""Choosers of key numbers; the caller passes the seeded Random. Decides only.

A chooser holds its tables and no state, so all users of a process share it, each with its own Random. `pick` returns a
number below `count`, the current number of keys.
"""

from __future__ import annotations

from array import array
from bisect import bisect_left
from itertools import accumulate
from math import gcd
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from random import Random


ZIPFIAN_CONSTANT = 0.99
"""The constant of YCSB: the k-th most popular key is chosen in proportion to 1 / k ** 0.99."""
CONSTANT_MAX = 10.0
"""At 2, the first key is already chosen more often than all others together. Far above 10, powers overflow."""
GOLDEN = 0.6180339887498949


class Chooser(Protocol):
    """A distribution over key numbers."""

    def pick(self, random: Random, count: int) -> int: ...


class Uniform:
    """Chooses every key equally often."""

    def pick(self, random: Random, count: int) -> int:
        return int(random.random() * count)


class Ranks:
    """Ranks 0, 1, 2, … below `size` with falling odds: rank k in proportion to 1 / (k + 1) ** constant. Exact, from a
    table of 8 bytes per rank."""

    def __init__(self, size: int, constant: float = ZIPFIAN_CONSTANT) -> None:
        if size < 1 or not 0 < constant <= CONSTANT_MAX:
            want = f"expected at least 1 key and a constant above 0 and at most {CONSTANT_MAX:g}"
            raise ValueError(f"{want}, got {size} and {constant}")
        self._odds: array[float] = array("d", accumulate(1 / (rank + 1) ** constant for rank in range(size)))
        self._total: float = self._odds[-1]

    def draw(self, random: Random) -> int:
        return bisect_left(self._odds, random.random() * self._total)

    def share(self, rank: int) -> float:
        """Return the probability of a rank."""
        below = self._odds[rank - 1] if rank else 0.0
        return (self._odds[rank] - below) / self._total


class Zipfian:
    """Chooses few keys often. Popular keys are scattered over the key space, so that they do not share a range."""

    def __init__(self, size: int, constant: float = ZIPFIAN_CONSTANT) -> None:
        self._size = size
        self._stride = scattering_stride(size)
        self.ranks = Ranks(size, constant)

    def pick(self, random: Random, count: int) -> int:
        return self.key_of(self.ranks.draw(random)) % count

    def key_of(self, rank: int) -> int:
        """Return the key of a popularity rank. Each rank has its own key."""
        return rank * self._stride % self._size


class Latest:
    """A chooser that prefers the keys inserted last."""

    def __init__(self, size: int, constant: float = ZIPFIAN_CONSTANT) -> None:
        self.ranks = Ranks(size, constant)

    def pick(self, random: Random, count: int) -> int:
        return count - 1 - self.ranks.draw(random) % count


class HotSet:
    """Chooses evenly among a share `hot` of the keys for a share `wanted` of all picks, else evenly among the
    others."""

    def __init__(self, size: int, *, hot: float = 0.01, wanted: float = 0.9) -> None:
        if not (0 < hot <= 1 and 0 <= wanted <= 1):
            raise ValueError(f"expected shares from 0 to 1, got hot={hot} wanted={wanted}")
        self._size, self._wanted = size, wanted
        self._stride = scattering_stride(size)
        self.hot_keys = max(1, round(size * hot))

    def pick(self, random: Random, count: int) -> int:
        is_hot = random.random() < self._wanted or self.hot_keys == self._size
        first, last = (0, self.hot_keys) if is_hot else (self.hot_keys, self._size)
        return (first + int(random.random() * (last - first))) * self._stride % self._size % count

    def is_hot(self, key: int) -> bool:
        return key * pow(self._stride, -1, self._size) % self._size < self.hot_keys if self._size > 1 else True


def scattering_stride(size: int) -> int:
    """Return a stride that visits each of `size` numbers once and puts no two neighbours close together."""
    stride = max(1, int(size * GOLDEN))
    while gcd(stride, size) != 1:
        stride += 1
    return stride


def chooser_of(text: str, size: int) -> Chooser:
    """Return the chooser for `size` keys: `uniform`, `zipfian[:constant]`, `latest[:constant]`, `hotset[:hot:wanted]`.
    Raises ValueError."""
    name, *arguments = text.split(":")
    try:
        numbers = [float(each) for each in arguments]
        match name, numbers:
            case "uniform", []:
                return Uniform()
            case "zipfian", [] | [_]:
                return Zipfian(size, *numbers)
            case "latest", [] | [_]:
                return Latest(size, *numbers)
            case "hotset", []:
                return HotSet(size)
            case "hotset", [hot, wanted]:
                return HotSet(size, hot=hot, wanted=wanted)
    except ValueError as error:
        raise ValueError(f"{text!r}: {error}") from None
    raise ValueError(f"expected uniform, zipfian[:constant], latest[:constant] or hotset[:hot:wanted], got {text!r}")
