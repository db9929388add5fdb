"""How much each namespace uses, as one server knows it: what is led here to the byte, the rest by the last reports of
other servers. Decides only.

A quota is the whole cluster's, and each leader decides alone: it goes by what it has admitted itself, by what all other
leaders of its server have, and by what the leaders elsewhere last reported. So a quota can be exceeded by what those
admit between two reports, and by no more (docs/protocol.md N2).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Container, Iterable
from typing import Protocol

import msgspec
from msgspec import Struct

from kvstore.namespaces.table import Namespace, NamespaceTable, Prefixes
from kvstore.types import PartitionId


class Amount(Struct, array_like=True):
    """Of one namespace."""

    keys: int = 0
    bytes: int = 0


Amounts = dict[str, Amount]
"""By the namespace's name; one that is not there has nothing."""
NOTHING = Amount()


class Report(Struct, array_like=True, frozen=True):
    """Use of namespaces in one partition, as its leader has it."""

    partition: PartitionId
    epoch: int
    amounts: Amounts
    is_counted: bool = True
    """False while its leader counts, and goes by what was known before."""


class Own(Protocol):
    """The usage of a partition that is led here: kvstore.partition.leading.usage.Usage."""

    @property
    def amounts(self) -> Amounts:
        """With what is under way."""
        ...

    def report(self) -> Report: ...


class Book:
    """Of one server. Leaders read it, and it reads them; a follower gives it the table, a keeper reports."""

    def __init__(self) -> None:
        self.table = NamespaceTable()
        self.prefixes = Prefixes(())
        self.generation = 0
        """How often the prefixes have changed: what was counted for others is no count."""
        self.led: dict[PartitionId, Own] = {}
        self.heard: dict[PartitionId, Report] = {}
        self._elsewhere: Amounts | None = None
        """Sums of what is heard of partitions that are not led here; None: to be summed anew."""
        self.refused: Counter[tuple[str, str]] = Counter()
        """By the namespace, and what there was too much of."""

    def take(self, table: NamespaceTable) -> bool:
        """Go by this table from now on. Whether it is another one."""
        if table == self.table:
            return False
        former, self.table, self.prefixes = self.prefixes, table, Prefixes(table.namespaces)
        self.generation += former.named != self.prefixes.named
        names = {each.name for each in table.namespaces}
        for key in [key for key in self.refused if key[0] not in names]:
            del self.refused[key]
        return True

    def find(self, key: bytes) -> Namespace | None:
        """The namespace of the key; None: it is in none."""
        return self.prefixes.find(key)

    def used(self, name: str) -> Amount:
        """Sum up what a namespace uses in all partitions, as far as it is known here."""
        if self._elsewhere is None:
            self._elsewhere = summed(
                report.amounts for partition, report in self.heard.items() if partition not in self.led
            )
        elsewhere = self._elsewhere.get(name, NOTHING)
        keys, size = elsewhere.keys, elsewhere.bytes
        for own in self.led.values():
            found = own.amounts.get(name)
            if found is not None:
                keys += found.keys
                size += found.bytes
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
            report = self.heard.get(partition) if own is None else own.report()
            if report is None or not report.is_counted:
                found.append(partition)
        return found

    def reports(self) -> list[Report]:
        """Of what is led here."""
        return [self.led[partition].report() for partition in sorted(self.led)]

    # docs/protocol.md N3
    def hear(self, reports: Iterable[Report]) -> None:
        """Take in what another server reports. A later lead's report stands, whatever a former leader still says."""
        for report in reports:
            known = self.heard.get(report.partition)
            if known is None or report.epoch >= known.epoch:
                self.heard[report.partition] = report
        self._elsewhere = None

    def keep_only(self, led: Container[PartitionId], partitions: Container[PartitionId]) -> None:
        """Forget leads that have ended, and partitions that are not in the ring any more. What a lead had when it ended
        stays until its successor reports."""
        for partition in [each for each in self.led if each not in led]:
            self.hear([self.led.pop(partition).report()])
        for partition in [each for each in self.heard if each not in partitions]:
            del self.heard[partition]
        self._elsewhere = None

    def lead(self, partition: PartitionId, own: Own) -> Amounts:
        """A partition is led here from now on. Returns what was last known of it, which holds until it is counted."""
        former = self.led.get(partition)
        if former is not None:
            self.hear([former.report()])
        self.led[partition] = own
        self._elsewhere = None
        known = self.heard.get(partition)
        return {} if known is None else {name: Amount(each.keys, each.bytes) for name, each in known.amounts.items()}


def summed(amounts: Iterable[Amounts]) -> Amounts:
    """The sums of what several use."""
    sums: Amounts = {}
    for each in amounts:
        for name, amount in each.items():
            add(sums, name, amount.keys, amount.bytes)
    return sums


def add(amounts: Amounts, name: str, keys: int, size: int) -> None:
    """Add to what is used of one namespace."""
    amount = amounts.get(name)
    if amount is None:
        amount = amounts[name] = Amount()
    amount.keys += keys
    amount.bytes += size


class Said(Struct, array_like=True, frozen=True):
    """A server's answer to another one. New fields come last, and have a default."""

    reports: list[Report]
    wanted: dict[str, float] = {}
    """Operations per second that its clients asked for, by namespace, refused ones too."""
    refused: dict[str, dict[str, int]] = {}
    """How many operations it has refused since it began, by namespace and by what there was too much of."""


_decoder = msgspec.msgpack.Decoder(Said)


def encode(said: Said) -> bytes:
    return msgspec.msgpack.encode(said)


def decode(body: bytes) -> Said:
    """Raises msgspec.MsgspecError."""
    return _decoder.decode(body)
