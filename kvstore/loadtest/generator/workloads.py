"""Workloads: the core workloads of YCSB, and mixes of our own. Decides only."""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import accumulate
from typing import TYPE_CHECKING

from kvstore.loadtest.generator.choosers import Chooser, chooser_of
from kvstore.loadtest.generator.pacing import BURSTS, POISSON, Arrivals
from kvstore.loadtest.generator.sizes import Sizes, sizes_of
from kvstore.loadtest.report.goals import CAS, INSERT, MODIFY, READ, SCAN, UPDATE

if TYPE_CHECKING:
    from random import Random


INSERTED_MAX = 1_000_000
"""Maximum number of inserted keys that one process remembers. Further keys are written and forgotten."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Workload:
    """A mix of operations on keys."""

    name: str
    does: str
    operations: tuple[tuple[str, int], ...]
    """Operations with their weights."""
    keys: str = "zipfian"
    """The key chooser; see choosers.chooser_of."""
    sizes: str = "1000"
    """The value sizes; see sizes.sizes_of."""
    arrivals: Arrivals = POISSON
    scan_max: int = 100
    """Maximum length of a scan. Lengths are drawn evenly from 1."""


WORKLOADS = {
    each.name: each
    for each in (
        Workload(name="ycsb-a", does="update heavy: sessions", operations=((READ, 50), (UPDATE, 50))),
        Workload(name="ycsb-b", does="read mostly: tags of photos", operations=((READ, 95), (UPDATE, 5))),
        Workload(name="ycsb-c", does="read only: profiles", operations=((READ, 100),)),
        Workload(
            name="ycsb-d", does="read latest: status updates", operations=((READ, 95), (INSERT, 5)), keys="latest"
        ),
        Workload(name="ycsb-e", does="short ranges: threads", operations=((SCAN, 95), (INSERT, 5))),
        Workload(name="ycsb-f", does="read-modify-write: records", operations=((READ, 50), (MODIFY, 50))),
        Workload(
            name="hot-reads",
            does="reads, nine of ten on one key in a hundred",
            operations=((READ, 98), (UPDATE, 2)),
            keys="hotset:0.01:0.9",
            sizes="lognormal:300:1.0",
        ),
        Workload(
            name="write-bursts",
            does="writes that come in bursts of one second in five",
            operations=((UPDATE, 80), (READ, 20)),
            keys="uniform",
            sizes="mix:100=80,1000=18,16000=2",
            arrivals=BURSTS,
        ),
        Workload(name="writes", does="writes only", operations=((UPDATE, 100),), keys="uniform"),
        Workload(
            name="scans",
            does="scans of up to 500 keys among point reads",
            operations=((SCAN, 20), (READ, 70), (UPDATE, 10)),
            keys="uniform",
            sizes="100",
            scan_max=500,
        ),
        Workload(
            name="cas", does="compare-and-set loops on contended keys", operations=((CAS, 80), (READ, 20)), sizes="100"
        ),
    )
}


def workloads_of(text: str, *, keys: str = "", sizes: str = "") -> list[Workload]:
    """Return the named workloads, comma-separated, with the given key chooser or sizes if any. Raises ValueError."""
    names = [name.strip() for name in text.split(",") if name.strip()]
    unknown = sorted(set(names) - WORKLOADS.keys())
    if unknown or not names:
        raise ValueError(f"--workload: expected one or more of {', '.join(WORKLOADS)}, got {text!r}")
    found = []
    for name in names:
        workload = WORKLOADS[name]
        found.append(replace(workload, keys=keys or workload.keys, sizes=sizes or workload.sizes))
    return found


class Draws:
    """The random draws of a workload, shared by the users of a process: operations, keys, sizes, scan lengths."""

    def __init__(self, workload: Workload, keys: int) -> None:
        self.workload = workload
        self._names = [name for name, _ in workload.operations]
        self._odds = list(accumulate(weight for _, weight in workload.operations))
        self._chooser: Chooser = chooser_of(workload.keys, keys)
        self._sizes: Sizes = sizes_of(workload.sizes)

    def operation(self, random: Random) -> str:
        return random.choices(self._names, cum_weights=self._odds)[0]

    def key(self, random: Random, count: int) -> int:
        return self._chooser.pick(random, count)

    def size(self, random: Random) -> int:
        return self._sizes(random)

    def scan_length(self, random: Random) -> int:
        return 1 + int(random.random() * self.workload.scan_max)


class Keyspace:
    """The names of the keys: `count` records that exist from the start, and the records this process has inserted."""

    def __init__(self, prefix: bytes, count: int, writer: int) -> None:
        self.prefix, self.loaded, self._writer = prefix, count, writer
        self._inserted: list[bytes] = []
        self._numbers = 0
        self.records = prefix + b"r/"
        """Prefix of all records, including inserted ones."""

    @property
    def count(self) -> int:
        return self.loaded + len(self._inserted)

    def record(self, number: int) -> bytes:
        return self._inserted[number - self.loaded] if number >= self.loaded else b"%b%012d" % (self.records, number)

    def new_record(self, random: Random) -> bytes:
        """Return a unique key somewhere among the others."""
        self._numbers += 1
        near = int(random.random() * self.loaded)
        return b"%b%012d.%016x.%d" % (self.records, near, self._writer, self._numbers)

    def inserted(self, key: bytes) -> None:
        """Note that the insert of a key was acknowledged; from now on it is read."""
        if len(self._inserted) < INSERTED_MAX:
            self._inserted.append(key)

    def register(self, number: int) -> bytes:
        """Return a key for compare-and-set; initially absent."""
        return b"%bc/%012d" % (self.prefix, number % self.loaded)

    def counter(self, number: int) -> bytes:
        """Return a key that holds a decimal number; initially absent."""
        return b"%bn/%012d" % (self.prefix, number % self.loaded)
