"""One server's record of the usage of each namespace. The usage is exact for the partitions that the server leads. For
all other partitions, it comes from the latest reports of other servers. Decides only.

A quota applies to the whole cluster, but each leader decides alone. It counts the writes that it has admitted, those of
the other leaders on its server, and the latest reports of leaders on other servers. A quota can therefore be exceeded
by what the leaders on other servers admit between two reports, and by no more (docs/protocol.md N2).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Container, Iterable, Mapping
from typing import Protocol
from zlib import crc32

import msgspec
from msgspec import Struct

from kvstore.namespaces.table import Namespace, NamespaceTable, Prefixes
from kvstore.types import PartitionId


class Amount(Struct, array_like=True):
    """The usage of a namespace: the number of its keys, and the bytes of those keys and their values."""

    keys: int = 0
    bytes: int = 0


Amounts = dict[str, Amount]
"""Usage by name of the namespace. A namespace that is missing uses nothing."""
NOTHING = Amount()


class UsageReport(Struct, array_like=True, frozen=True):
    """The usage of each namespace within one partition, as its leader reports it."""

    partition: PartitionId
    epoch: int
    amounts: Amounts
    is_counted: bool = True
    """False while the leader is still counting; the report then repeats the amounts known before."""


class PartitionUsage(Protocol):
    """The usage of a partition that this server leads. Implemented by kvstore.partition.leading.usage.Usage."""

    @property
    def amounts(self) -> Amounts:
        """The usage, including operations in progress."""
        ...

    @property
    def is_counted(self) -> bool: ...
    def count_some(self) -> bool:
        """Count some more keys. Returns True once all keys are counted. Raises OSError if the engine cannot be read."""
        ...

    def report(self) -> UsageReport: ...
    def forget(self, names: Iterable[str]) -> None:
        """Drop the counts of namespaces whose names now stand for other keys."""
        ...


class Book:
    """The usage of all namespaces, as far as this server knows it. Leaders register their partitions and read the usage
    of others. A follower of the namespace table updates `table`, and a keeper exchanges reports with other servers."""

    def __init__(self) -> None:
        self.table = NamespaceTable()
        self.prefixes = Prefixes(())
        self.generation = 0
        """Number of times that the prefixes have changed. Counts made under an older generation are invalid."""
        self.led: dict[PartitionId, PartitionUsage] = {}
        self.reported: dict[PartitionId, UsageReport] = {}
        self._elsewhere: Amounts | None = None
        """Sum of the reports of partitions that are not led here; None if it must be recalculated."""
        self.refused: Counter[tuple[str, str]] = Counter()
        """Number of refusals by namespace and exceeded quota."""

    def take(self, table: NamespaceTable) -> bool:
        """Replace the namespace table. Returns True if the new table differs from the current one."""
        if table == self.table:
            return False
        former, self.table, self.prefixes = self.prefixes, table, Prefixes(table.namespaces)
        if former.named != self.prefixes.named:
            self.generation += 1
            self._forget({name for name, prefix in set(former.named) - set(self.prefixes.named)})
        names = {each.name for each in table.namespaces}
        for key in [key for key in self.refused if key[0] not in names]:
            del self.refused[key]
        return True

    def _forget(self, names: set[str]) -> None:
        """Drop the counts of removed namespaces, because a new namespace with the same name may have other keys."""
        for own in self.led.values():
            own.forget(names)
        for report in self.reported.values():
            for name in names & report.amounts.keys():
                del report.amounts[name]
        self._elsewhere = None

    def find(self, key: bytes) -> Namespace | None:
        """Return the namespace that contains the key, or None."""
        return self.prefixes.find(key)

    def used(self, name: str) -> Amount:
        """Return a namespace's usage in all partitions, as far as this server knows it."""
        if self._elsewhere is None:
            self._elsewhere = summed(
                report.amounts for partition, report in self.reported.items() if partition not in self.led
            )
        elsewhere = self._elsewhere.get(name, NOTHING)
        keys, size = elsewhere.keys, elsewhere.bytes
        for own in self.led.values():
            found = own.amounts.get(name)
            if found is not None:
                keys += max(0, found.keys)  # negative if records are deleted that the leader has not counted yet
                size += max(0, found.bytes)
        return Amount(keys, size)

    def refusals(self) -> dict[str, dict[str, int]]:
        """Return how often this server has refused operations, by namespace and exceeded quota."""
        found: dict[str, dict[str, int]] = {}
        for (name, quota), count in sorted(self.refused.items()):
            found.setdefault(name, {})[quota] = count
        return found

    def led_amounts(self) -> Amounts:
        """Return the usage of each namespace, summed over the partitions that this server leads."""
        return summed(own.amounts for own in self.led.values())

    def uncounted(self, partitions: Iterable[PartitionId]) -> list[PartitionId]:
        """Return those of `partitions` whose leaders are still counting or have not reported to this server, sorted."""
        found = []
        for partition in sorted(partitions):
            own = self.led.get(partition)
            report = self.reported.get(partition) if own is None else own.report()
            if report is None or not report.is_counted:
                found.append(partition)
        return found

    def reports(self) -> list[UsageReport]:
        """Return this server's reports to other servers: one for each partition that it leads."""
        return [self.led[partition].report() for partition in sorted(self.led)]

    # docs/protocol.md N3
    def take_reports(self, reports: Iterable[UsageReport], marks: Mapping[str, int] | None = None) -> None:
        """Record the reports of another server. A report is ignored if a later epoch of its partition has already
        reported. `marks` identifies the prefixes by which the other server counts (`Book.marks`); amounts counted by a
        different prefix are dropped."""
        mine = self.marks()
        others = {name for name, mark in (marks or {}).items() if mine.get(name) != mark}
        for report in reports:
            known = self.reported.get(report.partition)
            if known is None or report.epoch >= known.epoch:
                for name in others & report.amounts.keys():  # counts the keys of another prefix
                    del report.amounts[name]
                self.reported[report.partition] = report
        self._elsewhere = None

    def marks(self) -> dict[str, int]:
        """Return a checksum of each namespace's prefix. Servers compare them, so that they never use a count made for
        other keys."""
        return {name: crc32(prefix) for name, prefix in self.prefixes.named}

    def keep_only(self, partitions: Container[PartitionId]) -> None:
        """Forget the reports of all partitions that are not in `partitions`, because they have left the ring."""
        for partition in [each for each in self.reported if each not in partitions]:
            del self.reported[partition]
        self._elsewhere = None

    def leave(self, partition: PartitionId, own: PartitionUsage) -> None:
        """Record that this server has stopped leading the partition. The last report stays in use until the new leader
        reports."""
        if self.led.get(partition) is own:
            del self.led[partition]
            self.take_reports([own.report()])

    def lead(self, partition: PartitionId, own: PartitionUsage) -> Amounts:
        """Record that this server now leads the partition. Returns the last known usage, to be used until the new
        leader has counted the partition."""
        former = self.led.get(partition)
        if former is not None:
            self.take_reports([former.report()])
        self.led[partition] = own
        self._elsewhere = None
        known = self.reported.get(partition)
        return {} if known is None else {name: Amount(each.keys, each.bytes) for name, each in known.amounts.items()}


def summed(amounts: Iterable[Amounts]) -> Amounts:
    """Return the sum of several usages. Negative amounts count as zero."""
    sums: Amounts = {}
    for each in amounts:
        for name, amount in each.items():
            add(sums, name, max(0, amount.keys), max(0, amount.bytes))
    return sums


def add(amounts: Amounts, name: str, keys: int, size: int) -> None:
    """Add keys and bytes to one namespace's usage, in place."""
    amount = amounts.get(name)
    if amount is None:
        amount = amounts[name] = Amount()
    amount.keys += keys
    amount.bytes += size


class UsageAnswer(Struct, array_like=True, frozen=True):
    """One server's answer to another server's request for usage. New fields are appended and have a default, so that
    servers of different releases understand each other."""

    reports: list[UsageReport]
    wanted: dict[str, float] = {}
    """Operations per second that the server's clients request, by namespace, including refused operations."""
    refused: dict[str, dict[str, int]] = {}
    """Number of refused operations since the server started, by namespace and exceeded quota."""
    marks: dict[str, int] = {}
    """Checksums of the prefixes by which the server counts (`Book.marks`)."""


_decoder = msgspec.msgpack.Decoder(UsageAnswer)


def encode(answer: UsageAnswer) -> bytes:
    return msgspec.msgpack.encode(answer)


def decode(body: bytes) -> UsageAnswer:
    """Decode an answer. Raises msgspec.MsgspecError if the body is malformed."""
    return _decoder.decode(body)
