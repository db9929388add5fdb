"""Servers report namespace usage to each other, which bounds by how much a quota can be exceeded."""

from __future__ import annotations

from collections.abc import Iterable
from random import Random

import msgspec
import pytest

from kvstore.errors import QuotaExceeded
from kvstore.namespaces import Book, Meter, Namespace, NamespaceTable, UsageReport
from kvstore.namespaces.book import Amount, Amounts, UsageAnswer, add, decode, encode
from kvstore.types import PartitionId

LIMIT = 200
SPACE = NamespaceTable(namespaces=(Namespace(name="n", prefix=b"n/", keys_max=LIMIT, bytes_max=100_000),))
P1, P2 = PartitionId("p1"), PartitionId("p2")


class Led:
    """The leadership of one partition."""

    def __init__(self, partition: PartitionId, epoch: int = 1) -> None:
        self.partition, self.epoch = partition, epoch
        self.amounts: Amounts = {}

    is_counted = True

    def count_some(self) -> bool:
        return True

    def report(self) -> UsageReport:
        return UsageReport(self.partition, self.epoch, self.amounts)

    def forget(self, names: Iterable[str]) -> None:
        for name in names:
            self.amounts.pop(name, None)


def copied(book: Book) -> list[UsageReport]:
    return decode(encode(UsageAnswer(book.reports()))).reports


def of(partition: PartitionId, epoch: int, keys: int) -> UsageReport:
    return UsageReport(partition, epoch, {"n": Amount(keys, keys)})


# docs/protocol.md N3
def test_report_of_former_leader_does_not_replace_successors() -> None:
    book = Book()
    book.take_reports([of(P1, 2, 5)])
    book.take_reports([of(P1, 1, 50)])
    assert book.used("n").keys == 5
    book.take_reports([of(P1, 2, 6), of(P2, 1, 1)])
    assert book.used("n") == Amount(7, 7)


def test_partition_led_here_counts_once_whatever_others_report() -> None:
    book, own = Book(), Led(P1, epoch=3)
    book.take_reports([of(P1, 2, 50), of(P2, 1, 1)])
    assert book.lead(P1, own) == {"n": Amount(50, 50)}
    own.amounts = {"n": Amount(3, 3)}
    assert book.used("n").keys == 4
    book.take_reports([of(P1, 2, 60)])
    assert book.used("n").keys == 4


def test_usage_stays_until_successor_reports() -> None:
    book, own = Book(), Led(P1)
    book.lead(P1, own)
    own.amounts = {"n": Amount(9, 9)}
    book.leave(P1, own)
    assert book.used("n").keys == 9
    book.take_reports([of(P1, 2, 8)])
    assert book.used("n").keys == 8
    book.keep_only([P2])  # it has left the ring
    assert book.used("n").keys == 0


def test_ended_leadership_does_not_end_its_successor() -> None:
    book, former, own = Book(), Led(P1), Led(P1, epoch=2)
    book.lead(P1, former)
    book.lead(P1, own)
    book.leave(P1, former)
    assert book.led == {P1: own}
    book.leave(P1, own)
    book.leave(P1, own)
    assert book.led == {}


def test_reused_name_with_another_prefix_starts_empty() -> None:
    book, own = Book(), Led(P1)
    book.take(SPACE)
    book.lead(P1, own)
    own.amounts = {"n": Amount(9, 9)}
    book.take_reports([of(P2, 1, 5)])
    assert book.used("n").keys == 14
    same = NamespaceTable(namespaces=(Namespace(name="n", prefix=b"n/", keys_max=7),))
    book.take(same)
    assert book.used("n").keys == 14, "another quota is no other namespace"
    former = encode(UsageAnswer([of(P2, 1, 5)], marks=book.marks()))
    book.take(NamespaceTable())
    book.take(NamespaceTable(namespaces=(Namespace(name="n", prefix=b"other/", keys_max=7),)))
    assert book.used("n").keys == 0
    late = decode(former)  # from a server that does not know of it yet
    book.take_reports(late.reports, late.marks)
    assert book.used("n").keys == 0
    own.amounts = {}
    book.take_reports([of(P2, 1, 3)], book.marks())
    assert book.used("n").keys == 3


def test_negative_usage_frees_no_quota_for_others() -> None:
    book, own = Book(), Led(P1)
    book.lead(P1, own)
    own.amounts = {"n": Amount(-40, -40)}
    book.take_reports([of(P2, 1, 30), of(PartitionId("p3"), 1, -20)])
    assert book.used("n") == Amount(30, 30)
    assert book.led_amounts() == {"n": Amount(0, 0)}


def test_malformed_report_is_refused() -> None:
    with pytest.raises(msgspec.MsgspecError, match="array"):
        decode(b"\x00")


def test_counts_of_removed_namespaces_are_dropped() -> None:
    book = Book()
    book.take(SPACE)
    book.refused["n", "keys"] += 1
    assert book.refusals() == {"n": {"keys": 1}}
    assert book.take(NamespaceTable())
    assert book.refusals() == {}
    assert not book.take(NamespaceTable())


# docs/protocol.md N2
@pytest.mark.parametrize("seed", range(30))
def test_quota_is_exceeded_at_most_by_admissions_between_reports(seed: int) -> None:
    """Three servers, six partitions. Reports arrive late, out of order or not at all for a while; keys are deleted."""
    random = Random(seed)
    books = [Book() for _ in range(3)]
    leads: dict[PartitionId, tuple[int, Led]] = {}
    for number in range(6):
        partition = PartitionId(f"p{number}")
        leads[partition] = (number % 3, Led(partition))
    for book in books:
        book.take(SPACE)
    for partition, (server, led) in leads.items():
        books[server].lead(partition, led)
    untold = {(teller, hearer): 0 for teller in range(3) for hearer in range(3) if teller != hearer}
    """Number of keys admitted by the first server that have not been reported to the second."""
    exceeded = 0
    for number in range(3000):
        server, led = leads[random.choice(sorted(leads))]
        meter = Meter(books[server])
        try:
            meter.put(b"n/%d" % number, 1, None)
        except QuotaExceeded:
            pass
        else:
            add(led.amounts, "n", 1, 1)
            for pair in untold:
                untold[pair] += pair[0] == server
            total = sum(led.amounts["n"].keys for _, led in leads.values() if "n" in led.amounts)
            unheard = sum(untold[other, server] for other in range(3) if other != server)
            assert total <= LIMIT + unheard
            exceeded = max(exceeded, total - LIMIT)
        if random.random() < 0.05:
            teller, hearer = random.sample(range(3), 2)
            books[hearer].take_reports(copied(books[teller]))
            untold[teller, hearer] = 0
        if random.random() < 0.1:  # a delete is never refused
            server, led = leads[random.choice(sorted(leads))]
            if "n" in led.amounts and led.amounts["n"].keys:
                meter = Meter(books[server])
                meter.delete(b"n/x", 1)
                add(led.amounts, "n", -1, -1)
    assert exceeded > 0, "nothing was ever late, so nothing was tried"
