"""What is wrong with a ledger, and when to look (docs/protocol.md, A6, A7, A8)."""

from dataclasses import replace

import pytest

from kvstore.autorecovery.config import AutorecoveryConfig
from kvstore.autorecovery.verdicts import is_due, last_to_check, lost_of
from kvstore.types import BookieId, EntryId, Fragment, LedgerId, LedgerMetadata, Quorum
from kvstore.wal.placement import leaving

B1, B2, B3, B4 = (BookieId(f"b{number}-1") for number in range(1, 5))
OPEN = LedgerMetadata(
    LedgerId(7),
    Quorum(3, 3, 2),
    (Fragment(EntryId(0), (B1, B2, B3)), Fragment(EntryId(10), (B1, B2, B4))),
)
CLOSED = OPEN.closed(EntryId(14), 100)


def test_verdict_names_lost_bookies_of_any_fragment() -> None:
    assert lost_of(OPEN, {B3, B4, BookieId("b9-1")}) == [B3, B4]
    assert lost_of(OPEN, set()) == []


def test_verdict_checks_only_finished_fragments_of_an_open_ledger() -> None:
    assert last_to_check(CLOSED) == 14
    assert last_to_check(OPEN) == last_to_check(OPEN.recovering()) == 9
    assert last_to_check(replace(OPEN, fragments=OPEN.fragments[:1])) == -1


def test_verdict_reports_bookies_whose_places_are_taken() -> None:
    spread = replace(CLOSED, fragments=(Fragment(EntryId(0), (B1, B4, B3)), CLOSED.fragments[1]))
    assert leaving(CLOSED, spread) == [B2]
    assert leaving(CLOSED, CLOSED) == []


def test_check_is_due_after_its_interval_despite_a_wrong_clock() -> None:
    assert is_due(None, 0, 60)
    assert not is_due(1_000, 60_999, 60)
    assert is_due(1_000, 61_000, 60)
    assert is_due(1_000, 999, 60)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("lost_bookie_delay_s", -1),
        ("lost_bookie_delay_s", 2**31),
        ("check_interval_s", -1.0),
        ("placement_interval_s", float("inf")),
        ("check_ledgers_per_s", 0.0),
        ("check_ledgers_per_s", float("nan")),
    ],
)
def test_setting_out_of_range_is_refused_by_name(name: str, value: float) -> None:
    with pytest.raises(ValueError, match=name):
        AutorecoveryConfig(**{name: value})  # type: ignore[arg-type]
