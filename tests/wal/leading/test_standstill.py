"""The rules by which a bookie of the open ledger counts as silent."""

from kvstore.types import BookieId, EntryId, LedgerId
from kvstore.wal.leading.standstill import SILENCE_S, SilentBookies

A, B = BookieId("a"), BookieId("b")
LEDGER = LedgerId(7)


def looks(*owed: dict[BookieId, int], every_s: float = 2.0, ledgers: tuple[int, ...] = ()) -> list[list[BookieId]]:
    silences = SilentBookies()
    return [
        silences.poll(LedgerId(ledger), {bookie: EntryId(entry) for bookie, entry in each.items()}, every_s)
        for ledger, each in zip(ledgers or [LEDGER] * len(owed), owed, strict=True)
    ]


# docs/protocol.md W2
def test_bookie_is_silent_after_two_checks_and_three_idle_seconds() -> None:
    assert looks({A: 1, B: 5}, {A: 1, B: 6}, {A: 1, B: 7}) == [[], [], [A]]
    every_s = SILENCE_S / 4
    assert looks(*[{A: 1}] * 5, every_s=every_s) == [[], [], [], [], [A]]
    assert looks(*[{A: 1}] * 3, every_s=60.0) == [[], [], [A]]


def test_bookie_that_stores_between_checks_is_not_silent() -> None:
    assert looks({A: 1}, {A: 1}, {A: 2}, {A: 2}, {}, {A: 2}, {A: 2}) == [[]] * 7


def test_entry_of_the_next_ledger_counts_as_progress() -> None:
    assert looks({A: 0}, {A: 0}, {A: 0}, {A: 0}, ledgers=(7, 7, 8, 8)) == [[]] * 4
