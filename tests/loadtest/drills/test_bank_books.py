"""The books of a bank: each kind of violation is found, and none where there is none."""

from __future__ import annotations

import pytest

from loadtest.drills.bank_books import (
    ACCOUNTS,
    CORRUPT,
    DOUBLED,
    HALF,
    INVENTED,
    LOST,
    OPENING,
    UNDEAD,
    WRONG_BALANCE,
    WRONG_SUM,
    BankKeys,
    Entry,
    Findings,
    entries_of,
)

KEYS = BankKeys(b"bank-")
FIRST, SECOND = Entry("c1-1", 3, 73, 25, 0), Entry("c2-1", 73, 13, 5, 1)


def book(*entries: Entry) -> dict[bytes, bytes]:
    """Return the contents of all keys after these transfers."""
    rows = {KEYS.account(number): b"%d" % OPENING for number in range(ACCOUNTS)}
    for entry in entries:
        for number in (entry.source, entry.target):
            account, ledger = KEYS.account(number), KEYS.ledger(number, entry.period)
            rows[account] = b"%d" % (int(rows[account]) + entry.of(number))
            rows[ledger] = rows.get(ledger, b"") + entry.value
    return rows


def judged(rows: dict[bytes, bytes]) -> dict[str, int]:
    findings = Findings()
    findings.check_moment(KEYS, rows, "here")
    return dict(findings.counts)


def test_entry_is_read_as_it_was_written() -> None:
    assert entries_of(FIRST.value + SECOND.value) == [FIRST, SECOND]
    assert entries_of(b"") == []
    with pytest.raises(ValueError, match="ends with ;"):
        entries_of(FIRST.value + b"c2")


def test_books_of_whole_transfers_have_no_problem() -> None:
    findings = Findings()
    assert findings.check_moment(KEYS, book(FIRST, SECOND), "here") == {"c1-1": FIRST, "c2-1": SECOND}
    assert findings.counts == {}


def test_half_of_a_transfer_is_found() -> None:
    whole, before = book(FIRST, SECOND), book(FIRST)
    half = whole | {key: before[key] for key in (KEYS.account(13),)} | {KEYS.ledger(13, 1): b""}
    assert judged(half) == {WRONG_SUM: 1, HALF: 1}
    assert judged(whole | {KEYS.account(13): before[KEYS.account(13)]}) == {WRONG_SUM: 1, WRONG_BALANCE: 1}
    assert judged(whole | {KEYS.ledger(13, 1): b""}) == {WRONG_BALANCE: 1, HALF: 1}


def test_doubled_transfer_is_found_though_the_sum_is_right() -> None:
    assert judged(book(FIRST, FIRST)) == {DOUBLED: 2}
    twice = book(FIRST, FIRST) | {key: value for key, value in book(FIRST).items() if b"ledger" in key}
    assert judged(twice) == {WRONG_BALANCE: 2}


def test_missing_account_and_unreadable_value_are_found() -> None:
    rows = book(FIRST)
    assert judged(rows | {KEYS.account(9): b"x"}) == {CORRUPT: 2}
    del rows[KEYS.account(9)]
    assert judged(rows) == {CORRUPT: 2}
    assert judged(book(FIRST) | {KEYS.ledger(3, 0): FIRST.value[:-1]})[CORRUPT] == 1


def test_outcomes_that_clients_were_told_are_checked() -> None:
    findings = Findings()
    findings.check_outcomes({"a", "b", "c"}, acknowledged={"a", "d"}, refused={"b", "e"}, sent={"a", "b", "d", "e"})
    assert findings.counts == {LOST: 1, UNDEAD: 1, INVENTED: 1}
    assert findings.first[0] == "lost: transfer d was acknowledged and is in no ledger"


def test_sum_of_a_read_transaction_is_checked() -> None:
    findings = Findings()
    findings.check_sum([b"%d" % OPENING] * ACCOUNTS, "a read")
    assert findings.counts == {}
    findings.check_sum([b"%d" % OPENING] * 9, "a branch")
    assert findings.counts == {}
    findings.check_sum([b"%d" % OPENING] * (ACCOUNTS - 1) + [b"7"], "a read")
    findings.check_sum([b"%d" % OPENING] * (ACCOUNTS - 1) + [None], "a read")
    assert findings.counts == {WRONG_SUM: 1, CORRUPT: 1}
