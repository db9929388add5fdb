"""The feed shows a transaction's changes once they are committed, with their transaction (docs/protocol.md, F9)."""

from __future__ import annotations

import pytest

from kvstore.partition.state.changes import (
    CREATED,
    DELETED,
    EXPIRED,
    OVERWRITTEN,
    FeedEntry,
    Interest,
    TransactionPart,
    feed_entry_of,
)
from kvstore.partition.state.intents import IntentName
from kvstore.server.feed.pages import FeedPage, PageBounds
from tests.partition.effects import P1
from tests.partition.transaction_log import TransactionLog

ALL = PageBounds(0, 1000, 1 << 20)


def feed_of(log: TransactionLog) -> list[FeedEntry]:
    return [feed_entry_of(each) for each in log.log]


def page_of(entries: list[FeedEntry], *, after: int = 0, bounds: PageBounds = ALL) -> FeedPage:
    page = FeedPage(Interest(), bounds, after, keys_only=False)
    for entry in entries:
        if entry.is_behind(after) and not page.add(entry):
            break
    page.finish(0)
    return page


def committed_together() -> tuple[TransactionLog, FeedEntry]:
    """Return a log whose last entry has an ordinary put, a transaction of its own home and three resolved intents, one
    aborted and one without a change, and that entry of the feed."""
    log = TransactionLog(0)
    log.put(b"a", b"1")
    first, second = log.intent(b"a", b"2"), log.intent(b"b", b"2")
    aborted, idle = log.intent(b"c", b"2"), log.intent(b"d", None)
    shared = log.intent(b"e", is_exclusive=False)
    draft = log.draft()
    draft.put(b"f", b"1", None, 0)
    since = draft.last_seq
    draft.put(b"h", b"1", None, 0)
    draft.decision(b"h", log.attempt(P1), [IntentName(b"x", 7)], part=1, parts=2, since=since)
    draft.resolved(first, is_committed=True)
    draft.resolved(aborted, is_committed=False)
    draft.resolved(idle, is_committed=True)
    draft.resolved(shared, is_committed=True)
    draft.resolved(second, is_committed=True)
    draft.put(b"g", b"1", None, 0)
    log.append(draft)
    return log, feed_of(log)[-1]


def test_intents_are_no_changes() -> None:
    log = TransactionLog(0)
    log.intent(b"a", b"secret")
    log.resolve(log.intent(b"b", b"secret"), is_committed=False)
    for entry in feed_of(log):
        assert (entry.keys, entry.values, entry.parts) == ([], [], [])
    assert feed_of(log)[-1].after == log.state.seq


def test_changes_name_the_part_of_the_transaction_that_made_them() -> None:
    log, entry = committed_together()
    assert [*zip(entry.keys, entry.part_of, strict=True)] == [
        (b"f", 0),
        (b"h", 1),
        (b"a", 2),
        (b"b", 4),
        (b"g", 0),
    ]
    seq = log.state.seq - 10
    attempt = entry.parts[0].attempt
    assert (attempt.partition, [each[1:] for each in entry.parts]) == (
        P1,
        [(seq + 2, 1, 2), (seq + 3, 1, 2), (seq + 6, 1, 2), (seq + 8, 1, 2)],
    )


@pytest.mark.parametrize(("deletes_first", "kinds"), [(True, [DELETED, CREATED]), (False, [OVERWRITTEN])])
def test_both_changes_of_a_recreated_key_belong_to_its_part(deletes_first: bool, kinds: list[int]) -> None:
    log = TransactionLog(0)
    log.put(b"a", b"1")
    intent = log.intent(b"a", b"2", deletes_first=deletes_first)
    log.resolve(intent, is_committed=True)
    entry = feed_of(log)[-1]
    assert list(entry.kinds) == kinds
    assert list(entry.part_of) == [1] * len(kinds)
    assert entry.parts == [TransactionPart(intent.attempt, entry.before + 1, 1, 2)]


@pytest.mark.parametrize(
    ("value", "deletes_first", "kinds"), [(None, False, [DELETED]), (b"2", True, [DELETED, CREATED])]
)
def test_delete_by_a_transaction_is_no_expiry(value: bytes | None, deletes_first: bool, kinds: list[int]) -> None:
    """The transaction decided the delete before the key's expiry, although RESOLVED is behind it."""
    log = TransactionLog(0)
    log.put(b"a", b"1", expires_ms=log.time_ms + 100)
    intent = log.intent(b"a", value, deletes_first=deletes_first)
    log.time_ms += 200
    log.resolve(intent, is_committed=True)
    assert list(feed_of(log)[-1].kinds) == kinds


def test_expired_key_beside_a_resolved_intent_expires() -> None:
    log = TransactionLog(0)
    log.put(b"a", b"1", expires_ms=log.time_ms + 100)
    log.put(b"b", b"1", expires_ms=log.time_ms + 100)
    intent = log.intent(b"a", None)
    log.time_ms += 200
    draft = log.draft()
    draft.resolved(intent, is_committed=True)
    old = log.record(b"b")
    assert old is not None
    draft.delete(b"b", old)
    log.append(draft)
    entry = feed_of(log)[-1]
    assert [*zip(entry.keys, entry.kinds, strict=True)] == [(b"a", DELETED), (b"b", EXPIRED)]


def test_page_carries_parts_and_their_changes() -> None:
    log, entry = committed_together()
    log.put(b"z", b"1")
    message = page_of(feed_of(log)).message
    assert list(message.keys) == [b"a", b"f", b"h", b"a", b"b", b"g", b"z"]
    assert list(message.part_of) == [0, 0, 1, 2, 4, 0, 0]
    assert [each.transaction for each in message.parts] == [str(each.attempt) for each in entry.parts]
    assert [each.keys_of_all for each in message.parts] == [2] * 4
    assert str(entry.parts[0].attempt) == "p1/1/6"


def test_page_without_transactions_has_no_parts() -> None:
    log = TransactionLog(0)
    log.put(b"a", b"1")
    message = page_of(feed_of(log)).message
    assert (list(message.parts), list(message.part_of)) == ([], [])


@pytest.mark.parametrize("rows", [1, 2, 3, 4, 5])
def test_small_pages_bring_each_part_and_tag_each_change(rows: int) -> None:
    """Parts may come twice: their sequence identifies them."""
    log, entry = committed_together()
    after, parts, tags = entry.before, dict[int, tuple[str, int]](), list[tuple[bytes, str]]()
    while after < log.state.seq:
        page = page_of([entry], after=after, bounds=PageBounds(0, rows, 1 << 20)).message
        assert page.next > after
        after = page.next
        parts.update({each.sequence: (each.transaction, each.keys) for each in page.parts})
        numbers = list(page.part_of) or [0] * len(page.keys)
        tags += [
            (key, page.parts[number - 1].transaction if number else "")
            for key, number in zip(page.keys, numbers, strict=True)
        ]
    names = {place: str(part.attempt) for place, part in enumerate(entry.parts, 1)} | {0: ""}
    assert parts == {each.sequence: (str(each.attempt), each.keys) for each in entry.parts}
    assert tags == [(key, names[part]) for key, part in zip(entry.keys, entry.part_of, strict=True)]


def test_part_without_changes_is_news() -> None:
    log = TransactionLog(0)
    log.resolve(log.intent(b"a", None), is_committed=True)
    page = page_of(feed_of(log))
    assert page.is_news
    assert [each.keys for each in page.message.parts] == [1]


def test_bound_leaves_later_parts_out() -> None:
    log, entry = committed_together()
    second = entry.parts[1].sequence
    page = page_of([entry], after=entry.before, bounds=PageBounds(second, 1000, 1 << 20)).message
    assert [each.sequence for each in page.parts] == [entry.parts[0].sequence, second]
    assert log.state.seq > second
