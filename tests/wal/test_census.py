"""The count of ledgers' copies by registrations."""

from __future__ import annotations

from kvstore.types import BookieId, EntryId, Fragment, LedgerId, LedgerMetadata, LedgerState, Quorum
from kvstore.wal.census import AGAIN_S, REST_MIN_S, RESTS, Census, CompletedCount, is_due, kind_of
from kvstore.wal.creator import OWNER_KEY

A, B, C, D, E = (BookieId(each) for each in "abcde")
THREE, STRIPED = Quorum(3, 3, 2), Quorum(4, 2, 2)
OWN = ((OWNER_KEY, b"p1"),)


def ledger(
    *ensembles: tuple[BookieId, ...], quorum: Quorum = THREE, last: int | None = 99, own: bool = True
) -> LedgerMetadata:
    """Return a ledger whose ensembles begin at entries 0, 10, 20 …; closed at `last`, or open."""
    fragments = tuple(Fragment(EntryId(10 * number), each) for number, each in enumerate(ensembles))
    found = LedgerMetadata(LedgerId(7), quorum, fragments, custom=OWN if own else ())
    return found if last is None else found.closed(EntryId(last), 1_000)


def census(*ledgers: LedgerMetadata) -> Census:
    found = Census()
    for each in ledgers:
        found.add(each)
    return found


def test_census_counts_ledgers_of_every_writer_when_a_bookie_is_away() -> None:
    found = census(ledger((A, B, C)), ledger((C, B, A), own=False), ledger((A, B, D)))
    assert (found.ledgers, found.foreign, len(found.kinds)) == (3, 1, 3)
    short = found.shortage([A, B, D])
    assert (short.lacking, short.lacking_foreign, short.at_risk) == (2, 1, 0)
    assert (short.away, short.closed[C], short.lacking_at[C]) == ([C], 2, 2)
    assert found.shortage([A, B, C, D]).lacking == 0
    short = found.shortage([C])
    assert (short.at_risk, short.at_risk_foreign) == (3, 1)


def test_census_counts_ledgers_at_risk_below_an_ack_quorum() -> None:
    found = census(ledger((A, B, C)))
    assert found.shortage([A]).at_risk == 1
    assert found.shortage([A, B]).at_risk == 0
    striped = census(ledger((A, B, C, D), quorum=STRIPED))
    assert striped.shortage([B, C, D]).at_risk == 1, "an ack quorum is both copies of an entry"


def test_census_ignores_fragments_without_entries() -> None:
    found = census(ledger((A, B, C), (A, B, D), last=9), ledger((A, B, E), last=-1))
    assert found.shortage([A, B, C]).lacking == 0
    assert census(ledger((A, B, C), (A, B, D), last=10)).shortage([A, B, C]).lacking == 1


def test_census_shows_a_leaders_ensemble_and_leaves_it_to_the_leader() -> None:
    """A ledger created ahead has no entries, and a leader reports the missing copies of its open ledger."""
    short = census(ledger((A, B, C), last=None)).shortage([A, B])
    assert (short.lacking, short.away, short.open[C], short.lacking_at[C]) == (0, [C], 1, 0)
    assert census(ledger((A, B, C), (A, B, D), last=None)).shortage([A, B, D]).lacking == 1, "its earlier fragments"


def test_census_counts_an_open_foreign_ledger() -> None:
    short = census(ledger((A, B, C), last=None, own=False)).shortage([A])
    assert (short.lacking, short.lacking_foreign, short.at_risk, short.open[B]) == (1, 1, 1, 1)


def test_census_merges_ledgers_with_equal_ensembles() -> None:
    assert kind_of(ledger((A, B, C))) == kind_of(ledger((C, A, B), (A, B, C)))
    assert kind_of(ledger((A, B, C, D), quorum=STRIPED)) != kind_of(ledger((A, C, B, D), quorum=STRIPED))


def test_census_is_due_after_changes_and_rests_by_its_cost() -> None:
    def taken(away: set[BookieId], took_s: float = 0.1) -> CompletedCount:
        return CompletedCount(Census(), 1_000.0, took_s, frozenset(away), frozenset({A, B, C}))

    soon, late = 1_000.0 + REST_MIN_S, 1_000.0 + AGAIN_S
    assert is_due(None, (), 0.0)
    assert not is_due(taken(set()), (), soon), "nobody is away"
    assert is_due(taken(set()), (), late)
    assert not is_due(taken(set()), {C}, soon - 1)
    assert is_due(taken(set()), {D}, soon), "the count began before D was away, and may not know of its ledgers"
    assert not is_due(taken({D}), {D}, soon), "no ledger names D"
    assert is_due(taken({C}), {C}, soon), "repair may have continued"
    assert not is_due(taken({C}, took_s=100.0), {C}, 1_000.0 + RESTS * 100.0 - 1)


def test_census_takes_only_the_closed_state_for_closed() -> None:
    recovering = ledger((A, B, C), last=None, own=False).recovering()
    assert recovering.state is LedgerState.IN_RECOVERY
    assert census(recovering).shortage([A, B]).open[C] == 1
