"""A state contains the intents and decisions of its log, whatever crashes in between."""

from __future__ import annotations

from random import Random

import pytest

from kvstore.errors import Corrupted, WrittenByNewer
from kvstore.partition.state import rows
from kvstore.partition.state.draft import Draft
from kvstore.partition.state.engine import EngineBatch
from kvstore.partition.state.entry import decode
from kvstore.partition.state.intents import Intent, IntentEffect, IntentName, IntentRecord
from kvstore.partition.state.internal import Attempt
from kvstore.partition.state.state import ReplicaState
from kvstore.ring.hashing import MURMUR3
from tests.partition.effects import all_records, check_indexes, state_over
from tests.partition.state.engine_memory import MemoryEngine
from tests.partition.transaction_log import HOME, TransactionLog

every_seed = pytest.mark.parametrize("seed", range(20))


def check(state: ReplicaState, log: TransactionLog) -> None:
    """Assert that the state contains what the log's transactions and writes leave."""
    assert {key: record.value for key, record in all_records(state).items()} == log.values
    check_indexes(state)
    assert {each.name: each for each in state.intents} == log.intents
    assert {key: each.name for key, each in state.intents.exclusive.items()} == {
        name.key: name for name, each in log.intents.items() if each.is_exclusive
    }
    assert state.intents.size_bytes == sum(each.size_bytes for each in log.intents.values())
    assert {each.attempt: each for each in state.decisions} == log.decisions
    stored = [rows.name_of_row(key) for key, _ in state.engine.iterate(*rows.ALL_INTENTS)]
    assert sorted(stored) == sorted(log.intents)


@every_seed
def test_state_contains_the_intents_and_decisions_of_its_log(seed: int) -> None:
    log = TransactionLog(seed)
    for _ in range(120):
        log.any()
        check(log.state, log)


@every_seed
def test_restarted_state_has_the_same_intents_and_decisions(seed: int) -> None:
    log, engine, random = TransactionLog(seed), MemoryEngine(), Random(seed)
    for _ in range(120):
        log.any()
    state = state_over(engine)
    while state.position != log.log[-1].position:
        at = 0 if state.position is None else state.position.entry + 1
        state.apply_all(log.log[at : at + random.randrange(1, 9)])
        engine.crash(keep=random.randrange(12) if random.random() < 0.5 else 10_000)
        state = state_over(engine)
    check(state, log)
    assert (state.fingerprint(), state.crc) == (log.state.fingerprint(), log.state.crc)


@every_seed
def test_entries_applied_together_leave_the_same_intents(seed: int) -> None:
    log, state = TransactionLog(seed), state_over(MemoryEngine())
    for _ in range(120):
        log.any()
    for at in range(0, 120, 10):
        state.apply_all(log.log[at : at + 10])
    check(state, log)
    assert (state.fingerprint(), state.crc) == (log.state.fingerprint(), log.state.crc)


def test_intent_changes_no_key_and_its_commit_does() -> None:
    log = TransactionLog(0)
    log.put(b"a", b"1")
    before = log.record(b"a")
    intent = log.intent(b"a", b"2")
    assert log.record(b"a") == before
    log.resolve(intent, is_committed=True)
    after = log.record(b"a")
    assert after is not None
    assert (after.value, after.version) == (b"2", log.state.seq)


def test_aborted_intent_leaves_the_key_as_it_was() -> None:
    log = TransactionLog(0)
    log.put(b"a", b"1")
    before = log.record(b"a")
    log.resolve(log.intent(b"a", None), is_committed=False)
    assert log.record(b"a") == before
    assert not log.state.intents.by_key


@pytest.mark.parametrize(
    ("effect", "kinds"),
    [
        (IntentEffect.NONE, "07"),
        (IntentEffect.PUT, "0762"),
        (IntentEffect.DELETE, "0743"),
        (IntentEffect.RECREATE, "074321"),
    ],
)
def test_commit_logs_the_mutations_that_the_intent_asks_for(effect: IntentEffect, kinds: str) -> None:
    attempt = Attempt(HOME, 1, 1)
    writes = effect in (IntentEffect.PUT, IntentEffect.RECREATE)
    record = IntentRecord(
        attempt,
        b"h",
        True,
        9,
        2,
        effect,
        b"new" if writes else b"",
        created=3 if effect else 0,
        expires_ms=99 if writes else 0,
        replaced_ms=50 if effect else 0,
    )
    draft = Draft(10, 20, MURMUR3)
    draft.resolved(Intent(b"a", 5, record), is_committed=True)
    assert bytes(draft.kinds).hex() == kinds
    if writes:
        row = draft.layer.rows[b"a"]
        assert row is not None
        last = draft.last_seq
        assert row == (b"new", last, 3 if effect == IntentEffect.PUT else last, 20, 99)


def test_undone_batch_leaves_neither_intents_nor_decisions() -> None:
    draft = Draft(1, 20, MURMUR3)
    record = IntentRecord(Attempt(HOME, 1, 1), b"h", True, 20)
    kept = draft.intent(b"a", record)
    mark = draft.begin()
    draft.intent(b"b", record)
    draft.decision(b"c", Attempt(HOME, 1, 2), [IntentName(b"x", 7)])
    draft.resolved(Intent(b"d", 3, record), is_committed=True)
    draft.undo(mark)
    assert draft.layer.transactions is not None
    assert draft.layer.transactions.counts == (1, 0, 0, 0)
    assert draft.layer.transactions.intents == [kept]
    entry = draft.entry(HOME, 1)
    assert len(decode(entry.encode()).transactions) == len(entry.keys) == 1


def test_resolving_an_absent_intent_is_refused() -> None:
    log = TransactionLog(0)
    intent = log.intent(b"a", b"1")
    log.resolve(intent, is_committed=False)
    draft = log.draft()
    draft.resolved(intent, is_committed=True)
    with pytest.raises(Corrupted, match="contradicts the transactions"):
        log.append(draft)


def test_intent_is_resolved_by_its_sequence_not_by_its_attempt() -> None:
    log = TransactionLog(0)
    attempt = log.attempt()
    first = log.intent(b"a", b"1", attempt=attempt)
    log.resolve(first, is_committed=False)
    second = log.intent(b"a", b"2", attempt=attempt)
    draft = log.draft()
    draft.resolved(first, is_committed=True)
    with pytest.raises(Corrupted):
        log.append(draft)
    assert log.state.intents.at(b"a") == (second,)


def test_end_of_an_absent_decision_and_a_second_decision_are_refused() -> None:
    log = TransactionLog(0)
    decision = log.decide(b"a", b"1")
    again = log.draft()
    again.decision(b"a", decision.attempt, [IntentName(b"x", 7)])
    with pytest.raises(Corrupted):
        log.append(again)
    log.log.pop()
    log.end(decision)
    draft = log.draft()
    draft.end(decision)
    with pytest.raises(Corrupted):
        log.append(draft)


def test_decision_names_intents_by_key_and_sequence() -> None:
    log = TransactionLog(0)
    draft = log.draft()
    attempt = log.attempt()
    draft.decision(b"a", attempt, [IntentName(b"x", 7)])
    log.append(draft)
    assert log.state.decisions.commits(attempt, b"x", 7)
    assert not log.state.decisions.commits(attempt, b"x", 8)
    assert not log.state.decisions.commits(log.attempt(), b"x", 7)


def test_several_shared_intents_share_a_key() -> None:
    log = TransactionLog(0)
    first, second = (log.intent(b"a", is_exclusive=False) for _ in range(2))
    assert log.state.intents.at(b"a") == (first, second)
    assert not log.state.intents.exclusive
    log.resolve(first, is_committed=True)
    assert log.state.intents.at(b"a") == (second,)
    assert log.state.intents.of(first.attempt) == ()


def test_ranges_find_their_exclusive_intents() -> None:
    log = TransactionLog(0)
    wanted = log.intent(b"b", b"1")
    log.intent(b"c", is_exclusive=False)
    intents = log.state.intents
    assert intents.exclusive_between(MURMUR3, b"a", b"c") == [wanted]
    assert intents.exclusive_between(MURMUR3, b"b", b"") == [wanted]
    assert intents.exclusive_between(MURMUR3, b"b\0", b"") == []
    assert intents.exclusive_between(MURMUR3, b"", b"b") == []


def test_row_keys_of_a_key_and_its_prefixes_never_collide() -> None:
    seq = int.from_bytes(b"\0\0\0\0\0\0\0\1", "big")
    one = rows.transaction_key(rows.ALL_INTENTS, rows.data_key(MURMUR3, b"a"), seq)
    assert rows.name_of_row(one) == (b"a", 1)
    assert one.hex() == f"69{MURMUR3.token_of(b'a'):08x}610000000000000001"
    assert rows.transaction_key(rows.ALL_DECISIONS, rows.data_key(MURMUR3, b"a"), seq).hex() == "6a" + one.hex()[2:]


def test_row_of_an_unknown_format_is_refused() -> None:
    log = TransactionLog(0)
    log.intent(b"a", b"1")
    engine = log.state.engine
    [(key, row)] = engine.iterate(*rows.ALL_INTENTS)
    batch = engine.batch()
    batch.put(key, b"\x02" + row[1:])
    engine.write(batch)
    with pytest.raises(WrittenByNewer, match="format 02"):
        state_over(engine)


class Refusing(MemoryEngine):
    """Refuses writes while it has no space."""

    is_full = False

    def write(self, batch: EngineBatch) -> None:
        if self.is_full:
            raise OSError(28, "no space")
        super().write(batch)


def test_refused_write_leaves_the_index_as_it_was() -> None:
    log, engine = TransactionLog(0), Refusing()
    state = state_over(engine)
    log.intent(b"a", b"1")
    engine.is_full = True
    with pytest.raises(OSError, match="no space"):
        state.apply(log.log[0])
    assert not state.intents.by_key
