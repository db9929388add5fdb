"""A node reports each lost connection to its cluster once, with the reason, and reports the recovery once."""

from __future__ import annotations

from typing import Any

from kvstore.server.status.outages import GONE_S, NAMED_MAX, ClusterView, Outages, named
from kvstore.types import PartitionId, ServerId

P0, P1 = PartitionId("p0"), PartitionId("p1")
N1, N2 = ServerId("n1"), ServerId("n2")
GONE = "server=n1, the last leader, is no longer registered, and no other server has taken over"
WELL = ClusterView(writable=3, ack=2, leaders={P0: N1, P1: N2}, servers=frozenset({N1, N2}))


def seen(**other: Any) -> ClusterView:
    return ClusterView(**{name: other.get(name, getattr(WELL, name)) for name in ClusterView.__slots__})


def told(outages: Outages, *sights: ClusterView, begin: float = 0.0, step: float = 1.0) -> list[tuple[bool, str]]:
    return [
        (news.is_loss, news.message % news.arguments)
        for at, sight in enumerate(sights)
        for news in outages.poll(begin + at * step, sight)
    ]


def test_nothing_is_reported_while_healthy() -> None:
    assert told(Outages(), *[WELL] * 20) == []


def test_metadata_outage_and_its_end_are_reported_once() -> None:
    away = seen(metadata="suspended")
    lines = told(Outages(), WELL, *[away] * 10, seen(metadata="lost"), WELL, WELL)
    assert [is_loss for is_loss, _ in lines] == [True, False]
    assert lines[0][1].startswith("metadata=suspended the metadata store is unavailable")
    assert lines[1][1] == "metadata=connected the metadata store is back after 11.0 s"


def test_short_outage_is_not_reported() -> None:
    away = seen(metadata="suspended", leaders={P1: N2}, leaderless=(P0,))
    assert told(Outages(), WELL, away, WELL, away, WELL, step=GONE_S * 0.9) == []


def test_lost_leader_is_reported_with_reason() -> None:
    gone = seen(leaders={P1: N2}, leaderless=(P0,), servers=frozenset({N2}))
    gave_up = seen(leaders={P0: N1}, leaderless=(P1,))
    assert told(Outages(), WELL, *[gone] * 6) == [
        (True, f"partitions=p0 have no leader: {GONE}"),
    ]
    assert told(Outages(), WELL, *[gave_up] * 6) == [
        (
            True,
            (
                "partitions=p1 have no leader: server=n2, the last leader, gave up its leadership, "
                "and no other server has taken over"
            ),
        )
    ]


def test_silent_leader_is_named() -> None:
    silent = seen(leaderless=(P0,))
    assert told(Outages(), *[silent] * 6) == [
        (True, "partitions=p0 have no leader: server=n1 has become leader but does not answer yet")
    ]


def test_partitions_that_lose_leaders_together_are_one_line() -> None:
    gone = seen(leaders={}, leaderless=(P0, P1), servers=frozenset())
    outages = Outages()
    lines = told(outages, seen(leaders={P0: N1, P1: N1}), *[gone] * 5, WELL)
    assert lines == [
        (True, f"partitions=p0,p1 have no leader: {GONE}"),
        (False, "partitions=p0,p1 have a leader again, after 5.0 s"),
    ]


def test_removed_partition_is_not_reported_as_recovered() -> None:
    gone = seen(leaders={P1: N2}, leaderless=(P0,))
    assert [is_loss for is_loss, _ in told(Outages(), WELL, *[gone] * 5, seen(leaders={P1: N2}))] == [True]


def test_lost_ack_quorum_is_reported_only_when_known() -> None:
    few = seen(writable=1, readonly=1)
    lines = told(Outages(), *[few] * 5, WELL)
    assert lines[0][1].startswith("writable=1 readonly=1 ack=2 the ack quorum is lost")
    assert lines[1] == (False, "writable=3 readonly=0 ack=2 the ack quorum is back after 5.0 s")
    unknown = seen(writable=0, metadata="lost")
    assert [text for _, text in told(Outages(), *[unknown] * 5) if "quorum" in text] == []
    kept = Outages()
    assert len([text for _, text in told(kept, *[few] * 5, *[unknown] * 5, *[few] * 5) if "quorum is" in text]) == 1


def test_line_names_few_partitions_and_counts_others() -> None:
    many = [PartitionId(f"p{number}") for number in range(NAMED_MAX + 3)]
    assert named(many).endswith(f"p{NAMED_MAX - 1} and 3 more")
