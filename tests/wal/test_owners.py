"""Whose ledgers are, as a node's leaders remember it."""

import pytest

from kvstore.types import LedgerId, PartitionId
from kvstore.wal.leading import owners as owners_module
from kvstore.wal.leading.owners import Owners

P, Q = PartitionId("p"), PartitionId("q")
ONE, TWO, THREE = (LedgerId(number) for number in (1, 2, 3))


def test_only_of_a_ledger_that_is_known_it_is_said_that_it_is_anothers() -> None:
    owners = Owners()
    owners.note(ONE, P)
    owners.note(TWO, None)
    assert [owners.is_anothers(each, P) for each in (ONE, TWO, THREE)] == [False, True, False]
    assert [owners.is_anothers(each, Q) for each in (ONE, TWO, THREE)] == [True, True, False]


def test_what_is_gone_makes_room_when_there_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(owners_module, "OWNERS_MAX", 2)
    owners = Owners()
    for ledger in (ONE, TWO, THREE):
        owners.note(ledger, Q)
    assert not owners.is_anothers(THREE, P), "there was no room for it"
    owners.keep({TWO, THREE})
    owners.note(THREE, Q)
    assert [owners.is_anothers(each, P) for each in (ONE, TWO, THREE)] == [False, True, True]
