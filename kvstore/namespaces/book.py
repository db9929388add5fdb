"""How much each namespace uses, as one server knows it: what is led here to the byte, the rest by the last reports of
other servers. Decides only.

A quota is the whole cluster's, and each leader decides alone: it goes by what it has admitted itself, by what all other
leaders of its server have, and by what the leaders elsewhere last reported. So a quota can be exceeded by what those
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
    """The amount that one namespace uses."""

    keys: int = 0
    bytes: int = 0


Amounts = dict[str, Amount]
"""By the namespace's name; one that is not there has nothing."""
NOTHING = Amount()


class UsageReport(Struct, array_like=True, frozen=True):
    """Use of namespaces in one partition, as its leader has it."""

    partition: PartitionId
    epoch: int
    amounts: Amounts
    is_counted: bool = True
    """False while its leader counts, and goes by what was known before."""


class PartitionUsage(Protocol):
    """The usage of a partition that is led here: kvstore.partition.leading.usage.Usage."""

    @property
    def amounts(self) -> Amounts:
        """With what is under way."""
        ...

    @property
    def is_counted(self) -> bool: ...
    def count_some(self) -> bool:
        """Count some more keys; True once there is nothing to count. Raises OSError."""
        ...

    def report(self) -> UsageReport: ...
    def forget(self, names: Iterable[str]) -> None:
        """Drop what was counted under these names: it was of other keys."""
        ...


class Book:
    """The book of one server. Leaders join and leave it, read it, and are read; a follower gives it the table, a keeper
    reports."""

    def __init__(self) -> None:
        self.table = NamespaceTable()
        self.prefixes = Prefixes(())
        self.generation = 0
        """How often the prefixes have changed: what was counted for others is no count."""
        self.led: dict[PartitionId, PartitionUsage] = {}
        self.reported: dict[PartitionId, UsageReport] = {}
        self._elsewhere: Amounts | None = None
        """Sums of what is heard of partitions that are not led here; None: to be summed anew."""
        self.refused: Counter[tuple[str, str]] = Counter()
        """By the namespace, and what there was too much of."""

    def take(self, table: NamespaceTable) -> bool:
        """Go by this table from now on. Whether it is another one."""
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
        """A name that comes again may be that of other keys."""
        for own in self.led.values():
            own.forget(names)
        for report in self.reported.values():
            for name in names & report.amounts.keys():
                del report.amounts[name]
        self._elsewhere = None

    def find(self, key: bytes) -> Namespace | None:
        """The namespace of the key; None: it is in none."""
        return self.prefixes.find(key)

    def used(self, name: str) -> Amount:
        """Sum up what a namespace uses in all partitions, as far as it is known here."""
        if self._elsewhere is None:
            self._elsewhere = summed(
                report.amounts for partition, report in self.reported.items() if partition not in self.led
            )
        elsewhere = self._elsewhere.get(name, NOTHING)
        keys, size = elsewhere.keys, elsewhere.bytes
        for own in self.led.values():
            found = own.amounts.get(name)
            if found is not None:
                keys += max(0, found.keys)  # below nothing: records that its leader has not counted yet are deleted
                size += max(0, found.bytes)
        return Amount(keys, size)

    def refusals(self) -> dict[str, dict[str, int]]:
        """How often this server has refused, by namespace and by what there was too much of."""
        found: dict[str, dict[str, int]] = {}
        for (name, quota), count in sorted(self.refused.items()):
            found.setdefault(name, {})[quota] = count
        return found

    def led_amounts(self) -> Amounts:
        """Sum up what namespaces use in the partitions that are led here."""
        return summed(own.amounts for own in self.led.values())

    def uncounted(self, partitions: Iterable[PartitionId]) -> list[PartitionId]:
        """Those whose leaders have not counted yet, as far as it is known here."""
        found = []
        for partition in sorted(partitions):
            own = self.led.get(partition)
            report = self.reported.get(partition) if own is None else own.report()
            if report is None or not report.is_counted:
                found.append(partition)
        return found

    def reports(self) -> list[UsageReport]:
        """Of what is led here."""
        return [self.led[partition].report() for partition in sorted(self.led)]

    # docs/protocol.md N3
    def take_reports(self, reports: Iterable[UsageReport], marks: Mapping[str, int] | None = None) -> None:
        """Take in what another server reports. A later lead's report stands, whatever a former leader still says.
        `marks`: those of the prefixes that the other one counts."""
        mine = self.marks()
        others = {name for name, mark in (marks or {}).items() if mine.get(name) != mark}
        for report in reports:
            known = self.reported.get(report.partition)
            if known is None or report.epoch >= known.epoch:
                for name in others & report.amounts.keys():  # of the keys of another prefix
                    del report.amounts[name]
                self.reported[report.partition] = report
        self._elsewhere = None

    def marks(self) -> dict[str, int]:
        """Return a mark of each namespace's prefix, so that nobody takes a count for that of other keys."""
        return {name: crc32(prefix) for name, prefix in self.prefixes.named}

    def keep_only(self, partitions: Container[PartitionId]) -> None:
        """Forget partitions that are not in the ring any more."""
        for partition in [each for each in self.reported if each not in partitions]:
            del self.reported[partition]
        self._elsewhere = None

    def leave(self, partition: PartitionId, own: PartitionUsage) -> None:
        """A lead has ended. What it had stays until its successor reports."""
        if self.led.get(partition) is own:
            del self.led[partition]
            self.take_reports([own.report()])

    def lead(self, partition: PartitionId, own: PartitionUsage) -> Amounts:
        """A partition is led here from now on, until it leaves. Returns what was last known of it, which holds until it
        is counted."""
        former = self.led.get(partition)
        if former is not None:
            self.take_reports([former.report()])
        self.led[partition] = own
        self._elsewhere = None
        known = self.reported.get(partition)
        return {} if known is None else {name: Amount(each.keys, each.bytes) for name, each in known.amounts.items()}


def summed(amounts: Iterable[Amounts]) -> Amounts:
    """The sums of what several use; none has less than nothing."""
    sums: Amounts = {}
    for each in amounts:
        for name, amount in each.items():
            add(sums, name, max(0, amount.keys), max(0, amount.bytes))
    return sums


def add(amounts: Amounts, name: str, keys: int, size: int) -> None:
    """Add to what is used of one namespace."""
    amount = amounts.get(name)
    if amount is None:
        amount = amounts[name] = Amount()
    amount.keys += keys
    amount.bytes += size


class UsageAnswer(Struct, array_like=True, frozen=True):
    """A server's answer to another one. New fields come last, and have a default."""

    reports: list[UsageReport]
    wanted: dict[str, float] = {}
    """Operations per second that its clients asked for, by namespace, refused ones too."""
    refused: dict[str, dict[str, int]] = {}
    """How many operations it has refused since it began, by namespace and by what there was too much of."""
    marks: dict[str, int] = {}
    """Of the prefixes that it counts: Book.marks."""


_decoder = msgspec.msgpack.Decoder(UsageAnswer)


def encode(said: UsageAnswer) -> bytes:
    return msgspec.msgpack.encode(said)


def decode(body: bytes) -> UsageAnswer:
    """Raises msgspec.MsgspecError."""
    return _decoder.decode(body)
