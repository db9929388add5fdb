"""Who stands first."""

from collections.abc import Callable
from dataclasses import replace

import pytest

from kvstore.errors import Corrupted, UndecodableNode
from kvstore.partition.election.ranking import LeaderRecord, Published, furthest, rank_of
from kvstore.types import Seq, ServerId

A, B, C = ServerId("a"), ServerId("b"), ServerId("c")


def published(**seqs: int) -> dict[ServerId, Published]:
    return {ServerId(name): Published(Seq(seq), Seq(0), 1, "x") for name, seq in seqs.items()}


def test_the_highest_sequence_stands_first() -> None:
    all_ = published(a=5, b=9, c=7)
    assert [rank_of(server, all_, (A, B, C)) for server in (B, C, A)] == [0, 1, 2]


def test_equals_stand_in_the_rings_order() -> None:
    all_ = published(a=5, b=5, c=5)
    assert [rank_of(server, all_, (C, A, B)) for server in (C, A, B)] == [0, 1, 2]


def test_one_that_nobody_else_has_published_beside_stands_at_once() -> None:
    assert rank_of(A, {}, (B, A)) == 0


def test_documents_survive_their_encoding_and_damage_is_refused() -> None:
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
def test_what_is_json_but_no_document_of_ours_cannot_be_decoded(
    decode: Callable[[bytes], object], strange: bytes
) -> None:
    """Any other error would end the process of everybody who looks at the node."""
    with pytest.raises(UndecodableNode):
        decode(strange)


def test_what_a_later_release_says_besides_is_passed_over() -> None:
    doubtful = Published(Seq(3), Seq(2), 4, "n", (Seq(1), Seq(3), 77), is_stopped=True)
    assert Published.decode(doubtful.encode()[:-1] + b',"later":[1]}') == doubtful
    leader = LeaderRecord(A, 4, "n")
    assert LeaderRecord.decode(leader.encode()[:-1] + b',"later":[1]}') == leader


def test_a_replica_that_has_stopped_stands_in_nobodys_way() -> None:
    found = published(a=9, b=5, c=5)
    assert (rank_of(B, found, (A, B, C)), furthest(found, besides=C)) == (1, [A, B])
    found[A] = replace(found[A], is_stopped=True)
    assert (rank_of(B, found, (A, B, C)), furthest(found, besides=C)) == (0, [B])
    assert rank_of(C, found, (A, B, C)) == 1
