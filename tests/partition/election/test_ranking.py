"""Which candidate runs first."""

from collections.abc import Callable
from dataclasses import replace

import pytest

from kvstore.errors import Corrupted, UndecodableNode
from kvstore.partition.election.ranking import LeaderRecord, Published, furthest, rank_of
from kvstore.types import Seq, ServerId

A, B, C = ServerId("a"), ServerId("b"), ServerId("c")


def published(**seqs: int) -> dict[ServerId, Published]:
    return {ServerId(name): Published(Seq(seq), Seq(0), 1, "x") for name, seq in seqs.items()}


def test_highest_sequence_has_rank_zero() -> None:
    all_ = published(a=5, b=9, c=7)
    assert [rank_of(server, all_, (A, B, C)) for server in (B, C, A)] == [0, 1, 2]


def test_equal_sequences_rank_in_the_rings_order() -> None:
    all_ = published(a=5, b=5, c=5)
    assert [rank_of(server, all_, (C, A, B)) for server in (C, A, B)] == [0, 1, 2]


def test_only_publisher_has_rank_zero() -> None:
    assert rank_of(A, {}, (B, A)) == 0


def test_documents_round_trip_and_damage_is_refused() -> None:
    mine = Published(Seq(3), Seq(2), 4, "n")
    assert Published.decode(mine.encode()) == mine
    leader = LeaderRecord(A, 4, "n")
    assert LeaderRecord.decode(leader.encode()) == leader
    for decode in (Published.decode, LeaderRecord.decode):
        with pytest.raises(Corrupted):
            decode(b"{}")


# docs/protocol.md P34
@pytest.mark.parametrize("decode", [Published.decode, LeaderRecord.decode])
@pytest.mark.parametrize(
    "strange",
    [
        b"",
        b"[]",
        b"7",
        b'"n1"',
        b"null",
        b"[" * 100_000,
        b'{"seq": "3", "durable_seq": 2, "epoch": 4, "nonce": "n", "server": 9}',
        b'{"seq": 3, "durable_seq": null, "epoch": 4, "nonce": "n", "server": ["n1"]}',
        b'{"seq": 3, "durable_seq": 2, "epoch": "4", "nonce": "n", "server": "n1"}',
        b'{"seq": 3, "durable_seq": 2, "epoch": 4, "nonce": {}, "server": "n1"}',
    ],
)
def test_json_of_another_shape_is_refused(decode: Callable[[bytes], object], strange: bytes) -> None:
    """Any other error would end the process of every server that reads the node."""
    with pytest.raises(UndecodableNode):
        decode(strange)


def test_unknown_fields_of_later_releases_are_ignored() -> None:
    doubtful = Published(Seq(3), Seq(2), 4, "n", (Seq(1), Seq(3), 77), is_stopped=True)
    assert Published.decode(doubtful.encode()[:-1] + b',"later":[1]}') == doubtful
    leader = LeaderRecord(A, 4, "n")
    assert LeaderRecord.decode(leader.encode()[:-1] + b',"later":[1]}') == leader


def test_stopped_replica_does_not_count_in_ranks() -> None:
    found = published(a=9, b=5, c=5)
    assert (rank_of(B, found, (A, B, C)), furthest(found, excluding=C)) == (1, [A, B])
    found[A] = replace(found[A], is_stopped=True)
    assert (rank_of(B, found, (A, B, C)), furthest(found, excluding=C)) == (0, [B])
    assert rank_of(C, found, (A, B, C)) == 1
