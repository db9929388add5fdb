"""Which bookie is asked for which entries, for every quorum up to six bookies (docs/protocol.md T12)."""

import pytest

from kvstore.types import BookieId, EntryId, Fragment, LedgerId, LedgerMetadata, Quorum
from kvstore.wal.shares import shares_of

NAMES = tuple(BookieId(f"b{number}") for number in range(1, 7))
QUORUMS = [Quorum(size, write, 1) for size in range(1, 7) for write in range(1, size + 1)]
ENTRIES = [EntryId(entry) for entry in range(7, 40)]


@pytest.mark.parametrize("quorum", QUORUMS, ids=str)
def test_shares_ask_one_bookie_of_the_write_set_for_each_entry(quorum: Quorum) -> None:
    ensemble = NAMES[: quorum.ensemble]
    metadata = LedgerMetadata(LedgerId(1), quorum, (Fragment(EntryId(0), ensemble),))
    for own in (None, *ensemble):
        for avoided in (set[BookieId](), {ensemble[0]}, set(ensemble[1:]), set(ensemble)):
            shares = shares_of(ENTRIES, metadata.write_set, own, avoided, gap_max=quorum.ensemble)
            asked = [entry for share in shares for entry in share.entries]
            assert sorted(asked) == [e for e in ENTRIES if not avoided.issuperset(metadata.write_set(e))]
            for share in shares:
                assert share.bookie not in avoided
                assert list(share.entries) == sorted(share.entries)
                assert all(share.bookie in metadata.write_set(entry) for entry in share.entries)
            assert len(shares) == len({share.bookie for share in shares})
            if own is not None and own not in avoided:
                mine = [entry for entry in ENTRIES if own in metadata.write_set(entry)]
                assert [list(share.entries) for share in shares if share.bookie == own] == [mine]


def test_shares_ask_few_bookies() -> None:
    whole = LedgerMetadata(LedgerId(1), Quorum(3, 3, 2), (Fragment(EntryId(0), NAMES[:3]),))
    assert len(shares_of(ENTRIES, whole.write_set, None, (), gap_max=3)) == 1
    striped = LedgerMetadata(LedgerId(1), Quorum(5, 3, 2), (Fragment(EntryId(0), NAMES[:5]),))
    for first in range(5):
        for own in NAMES:
            assert len(shares_of(ENTRIES[first:], striped.write_set, own, (), gap_max=5)) <= 3


def test_shares_end_at_a_wide_gap() -> None:
    whole = LedgerMetadata(LedgerId(1), Quorum(3, 3, 2), (Fragment(EntryId(0), NAMES[:3]),))
    for entries, asked in ([1, 2, 5, 9, 10], [1, 2, 5]), ([1, 5, 6, 7], []), ([3], []), ([3, 6], [3, 6]):
        shares = shares_of([EntryId(entry) for entry in entries], whole.write_set, None, (), gap_max=3)
        assert [list(share.entries) for share in shares] == [asked][: len(asked)]
