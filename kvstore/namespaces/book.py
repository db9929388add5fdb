"""The usage of each namespace as one server knows it: exact for the partitions that the server leads, and according to
the last reports of other servers for the rest. Decides only.

A quota applies to the whole cluster, but each leader decides alone. It counts its own admitted writes, those of the
other leaders on its server, and the last reports of leaders on other servers. So a quota can be exceeded by what those
admit between two reports, and by no more (docs/protocol.md N2).
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
    """The usage of a namespace: its number of keys, and their bytes."""

    keys: int = 0
    bytes: int = 0


Amounts = dict[str, Amount]
"""Usage by name of the namespace; a missing namespace uses nothing."""
NOTHING = Amount()


class UsageReport(Struct, array_like=True, frozen=True):
    """The usage of namespaces in one partition, according to its leader."""

    partition: PartitionId
    epoch: int
    amounts: Amounts
    is_counted: bool = True
    """False while the leader counts, and reports what was known before."""


class PartitionUsage(Protocol):
    """The usage of a partition that this server leads. Implemented by kvstore.partition.leading.usage.Usage."""

    @property
    def amounts(self) -> Amounts:
        """The usage, including operations in progress."""
        ...

    @property
    def is_counted(self) -> bool: ...
    def count_some(self) -> bool:
        """Count more keys. Returns True once nothing is left to count. Raises OSError."""
        ...

    def report(self) -> UsageReport: ...
    def forget(self, names: Iterable[str]) -> None:
        """Drop the counts under these names, because they belong to other keys."""
        ...


class Book:
    """The usage known to one server. Leaders join, read and leave it; a follower sets the table, and a keeper exchanges
    reports."""

    def __init__(self) -> None:
        self.table = NamespaceTable()
        self.prefixes = Prefixes(())
        self.generation = 0
        """Number of changes of the prefixes. Counts of an older generation are invalid."""
        self.led: dict[PartitionId, PartitionUsage] = {}
        self.reported: dict[PartitionId, UsageReport] = {}
        self._elsewhere: Amounts | None = None
        """Sum of the reports of partitions that are not led here; None if it must be recalculated."""
        self.refused: Counter[tuple[str, str]] = Counter()
        """Number of refusals by namespace and exceeded quota."""

    def take(self, table: NamespaceTable) -> bool:
        """Use this table from now on. Returns True if it differs from the current one."""
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
        """Return the namespace of the key, or None."""
        return self.prefixes.find(key)

    def used(self, name: str) -> Amount:
        """Return a namespace's usage in all partitions, as far as known here."""
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
        """Return the usage of namespaces in the partitions led here."""
        return summed(own.amounts for own in self.led.values())

    def uncounted(self, partitions: Iterable[PartitionId]) -> list[PartitionId]:
        """Return the partitions whose leaders have not finished counting, as far as known here."""
        found = []
        for partition in sorted(partitions):
            own = self.led.get(partition)
            report = self.reported.get(partition) if own is None else own.report()
            if report is None or not report.is_counted:
                found.append(partition)
        return found

    def reports(self) -> list[UsageReport]:
        """Return the reports of the partitions led here."""
        return [self.led[partition].report() for partition in sorted(self.led)]

    # docs/protocol.md N3
    def take_reports(self, reports: Iterable[UsageReport], marks: Mapping[str, int] | None = None) -> None:
        """Take in the reports of another server. A report of a later epoch wins over reports of former leaders. `marks`
        identify the prefixes that the other server counts."""
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
        """Return a mark of each namespace's prefix, so that a server never uses a count of other keys."""
        return {name: crc32(prefix) for name, prefix in self.prefixes.named}

    def keep_only(self, partitions: Container[PartitionId]) -> None:
        """Forget partitions that have left the ring."""
        for partition in [each for each in self.reported if each not in partitions]:
            del self.reported[partition]
        self._elsewhere = None

    def leave(self, partition: PartitionId, own: PartitionUsage) -> None:
        """Note the end of a leadership. Its last report stays valid until the successor reports."""
        if self.led.get(partition) is own:
            del self.led[partition]
            self.take_reports([own.report()])

    def lead(self, partition: PartitionId, own: PartitionUsage) -> Amounts:
        """Note the start of a leadership here. Returns the last known usage, which stays valid until the partition is
        counted."""
        former = self.led.get(partition)
        if former is not None:
            self.take_reports([former.report()])
        self.led[partition] = own
        self._elsewhere = None
        known = self.reported.get(partition)
        return {} if known is None else {name: Amount(each.keys, each.bytes) for name, each in known.amounts.items()}


def summed(amounts: Iterable[Amounts]) -> Amounts:
    """Return the sum of several usages; negative amounts count as zero."""
    sums: Amounts = {}
    for each in amounts:
        for name, amount in each.items():
            add(sums, name, max(0, amount.keys), max(0, amount.bytes))
    return sums


def add(amounts: Amounts, name: str, keys: int, size: int) -> None:
    """Add to the usage of one namespace."""
    amount = amounts.get(name)
    if amount is None:
        amount = amounts[name] = Amount()
    amount.keys += keys
    amount.bytes += size


class UsageAnswer(Struct, array_like=True, frozen=True):
    """A server's answer to another server. New fields come last and have a default."""

    reports: list[UsageReport]
    wanted: dict[str, float] = {}
    """Operations per second requested by its clients, by namespace, including refused ones."""
    refused: dict[str, dict[str, int]] = {}
    """Number of refused operations since the server started, by namespace and exceeded quota."""
    marks: dict[str, int] = {}
    """Marks of the prefixes that the server counts: Book.marks."""


_decoder = msgspec.msgpack.Decoder(UsageAnswer)


def encode(said: UsageAnswer) -> bytes:
    return msgspec.msgpack.encode(said)


def decode(body: bytes) -> UsageAnswer:
    """Decode an answer. Raises msgspec.MsgspecError."""
    return _decoder.decode(body)
