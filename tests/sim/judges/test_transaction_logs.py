"""The judges of transactions accept what a correct store logs and answers, and reject every forgery."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from typing import Any

import pytest

from kvstore.errors import ConditionFailed, Conflict, OutcomeUnknown
from kvstore.partition.state import commands
from kvstore.partition.state.commands import Flag, Op, Record, RequestId
from kvstore.partition.state.decisions import Decision
from kvstore.partition.state.draft import Draft
from kvstore.partition.state.entry import Entry
from kvstore.partition.state.intents import Intent, IntentEffect, IntentName, IntentRecord
from kvstore.partition.state.internal import Attempt
from kvstore.partition.state.overlay import Row
from kvstore.ring.hashing import MURMUR3
from kvstore.types import EntryId, LedgerId, PartitionId, Position
from tests.sim.judges.cycles import Cycle
from tests.sim.judges.log_states import Wrong
from tests.sim.judges.operations import Operation, Status
from tests.sim.judges.transacted import Transacted
from tests.sim.judges.transaction_logs import TransactionLogs
from tests.sim.judges.transactions import (
    ACCOUNTS,
    CIRCLES,
    DEPOSIT,
    LISTS,
    check_reads,
    check_values,
    is_refused,
    list_history,
)

P1, P2 = PartitionId("p1"), PartitionId("p2")
K, L, M = b"T/r0", b"T/r1", b"T/r2"
CLIENT = b"c" * 16
ATTEMPT = Attempt(P1, 1, 1)
DATE_MS = 1_000


class Logs:
    """Builds the logs of two partitions."""

    def __init__(self) -> None:
        self.entries: defaultdict[PartitionId, list[tuple[Position, Entry]]] = defaultdict(list)
        self.seqs: defaultdict[PartitionId, int] = defaultdict(int)
        self.rows: dict[bytes, Row] = {}

    def draft(self, partition: PartitionId) -> Draft:
        return Draft(self.seqs[partition] + 1, DATE_MS, MURMUR3)

    def log(self, partition: PartitionId, draft: Draft) -> None:
        entry = draft.entry(partition, 1)
        self.entries[partition].append((Position(LedgerId(1), EntryId(len(self.entries[partition]))), entry))
        self.seqs[partition] = entry.last_seq
        for key, row in draft.layer.rows.items():
            if row is not None:
                self.rows[key] = row

    def put(self, partition: PartitionId, key: bytes, value: bytes, request: int = 0) -> int:
        draft = self.draft(partition)
        seq = draft.put(key, value, self.rows.get(key), 0)
        if request:
            draft.answer(RequestId(CLIENT, request, request, 0), 1, seq, b"")
        self.log(partition, draft)
        return seq

    def intent(
        self,
        key: bytes = L,
        value: bytes = b"2.",
        *,
        attempt: Attempt = ATTEMPT,
        is_exclusive: bool = True,
        partition: PartitionId = P2,
    ) -> Intent:
        draft, old = self.draft(partition), self.rows.get(key)
        effect = IntentEffect.PUT if is_exclusive else IntentEffect.NONE
        record = IntentRecord(
            attempt, K, is_exclusive, DATE_MS, 2, effect, value, old[2] if old and is_exclusive else 0
        )
        intent = draft.intent(key, record)
        self.log(partition, draft)
        return intent

    def decide(
        self,
        *intents: Intent,
        attempt: Attempt = ATTEMPT,
        value: bytes = b"1.",
        request: int = 1,
    ) -> Decision:
        draft = self.draft(P1)
        names = [IntentName(each.key, each.seq) for each in intents]
        draft.put(K, value, self.rows.get(K), 0)
        decision = draft.decision(K, attempt, names, part=1, parts=2, since=self.seqs[P1])
        if request:
            draft.answer(RequestId(CLIENT, request, request, 0), 1, (), b"")
        self.log(P1, draft)
        return decision

    def resolve(self, intent: Intent, *, is_committed: bool = True) -> int:
        draft = self.draft(P2)
        seq = draft.resolved(intent, is_committed=is_committed)
        self.log(P2, draft)
        return seq

    def end(self, decision: Decision) -> None:
        draft = self.draft(P1)
        draft.end(decision)
        self.log(P1, draft)


def asked(op: Op, result: Any, began: float = 0.0, ended: float = 1.0, *, number: int = 0, **more: Any) -> Operation:
    made = Operation(number, "client", op, P1, began, ended, more.pop("status", Status.OK), result)
    for name, value in more.items():
        setattr(made, name, value)
    return made


BOTH = commands.Transact(K, (commands.Put(K, b"1."), commands.Put(L, b"2.")))


def transact(result: Any = (1, 1), *, request: int = 1, **more: Any) -> Operation:
    more.setdefault("positions", {P1: 2, P2: 1})
    return asked(more.pop("op", BOTH), result, request=RequestId(CLIENT, request, request, 0), **more)


def judge(logs: Logs, *operations: Operation) -> Transacted:
    found = TransactionLogs(logs.entries)
    found.check()
    for number, each in enumerate(operations):
        each.number = number
    transacted = Transacted(found, operations)
    transacted.check()
    transacted.check_order()
    return transacted


def right() -> Logs:
    logs = Logs()
    intent = logs.intent()
    decision = logs.decide(intent)
    logs.resolve(intent)
    logs.end(decision)
    return logs


def record(value: bytes, version: int) -> Record:
    return Record(value, version, version, DATE_MS, 0)


OLD_K, NEW_L = None, record(b"2.", 3)


def test_committed_transaction_is_right() -> None:
    transacted = judge(right(), transact())
    (found,) = transacted.found.values()
    assert (found.begin, found.last, found.intents) == (0, 2, {L: 1})


def test_transaction_of_unknown_outcome_may_be_done_or_not() -> None:
    judge(right(), transact(None, status=Status.INFO, ended=float("inf")))
    judge(Logs(), transact(None, status=Status.INFO, ended=float("inf")))


def test_transaction_of_one_partition_may_share_an_entry_with_a_decision() -> None:
    logs = Logs()
    intent = logs.intent()
    draft = logs.draft(P1)
    draft.put(K, b"1.", None, 0)
    decision = draft.decision(K, ATTEMPT, [intent.name], part=1, parts=2, since=logs.seqs[P1])
    draft.answer(RequestId(CLIENT, 1, 1, 0), 1, (), b"")
    seq = draft.put(K, b"3.", draft.layer.rows[K], 0)
    draft.answer(RequestId(CLIENT, 2, 1, 0), 1, (), b"")
    logs.log(P1, draft)
    logs.resolve(intent)
    logs.end(decision)
    alone = transact(
        (3,), op=commands.Transact(K, (commands.Put(K, b"3."),)), request=2, positions={P1: seq}, began=1.0, ended=2.0
    )
    judge(logs, transact(), alone)


def test_part_that_changes_nothing_is_noted() -> None:
    """A put that is past its expiry changes nothing if the key is absent."""
    logs = Logs()
    draft = logs.draft(P1)
    seq = draft.note(K)
    draft.answer(RequestId(CLIENT, 1, 1, 0), 1, (), b"")
    logs.log(P1, draft)
    judge(logs, transact((seq,), op=commands.Transact(K, (commands.Put(K, b"1.", 1),)), positions={P1: seq}))


def test_delete_of_unknown_outcome_belongs_to_the_part_at_home() -> None:
    """Without an answer, the state after the delete would fit a delete that changes nothing."""
    logs = Logs()
    before = logs.put(P1, K, b"0.")
    intent = logs.intent()
    draft = logs.draft(P1)
    draft.delete(K, logs.rows[K])
    decision = draft.decision(K, ATTEMPT, [intent.name], part=1, parts=2, since=logs.seqs[P1])
    draft.answer(RequestId(CLIENT, 1, 1, 0), 1, (), b"")
    logs.log(P1, draft)
    logs.resolve(intent)
    logs.end(decision)
    op = commands.Transact(K, (commands.Delete(K), commands.Put(L, b"2.")))
    transacted = judge(logs, transact(None, op=op, status=Status.INFO, ended=float("inf")))
    (found,) = transacted.found.values()
    assert (found.begin, found.last) == (before, decision.seq)


def test_refused_step_may_name_the_version_of_an_earlier_step() -> None:
    logs = Logs()
    seq = logs.put(P1, K, b"1.", request=1)
    steps = (commands.Put(K, b"1."), commands.Delete(K, Flag.IF_VERSION, seq + 7))
    op = commands.Transact(K, steps, Flag.INDEPENDENT)
    judge(logs, transact((seq, ConditionFailed(seq)), op=op, positions={P1: seq}))
    with pytest.raises(Wrong, match="is answered"):
        judge(logs, transact((seq, Conflict("locked")), op=op, positions={P1: seq}))


def test_aborted_attempt_may_be_followed_by_another() -> None:
    logs, second = Logs(), Attempt(P1, 2, 1)
    logs.resolve(logs.intent(), is_committed=False)
    intent = logs.intent(attempt=second)
    decision = logs.decide(intent, attempt=second)
    logs.resolve(intent)
    logs.end(decision)
    judge(logs, transact(positions={P1: 2, P2: 3}))


def test_transaction_without_request_id_is_found_by_its_values() -> None:
    logs = Logs()
    intent = logs.intent()
    decision = logs.decide(intent, request=0)
    logs.resolve(intent)
    logs.end(decision)
    transacted = judge(logs, asked(BOTH, (1, 1), positions={P1: 2, P2: 1}))
    assert transacted.found
    with pytest.raises(Wrong, match="refused, but"):
        judge(logs, asked(BOTH, Conflict(""), status=Status.FAIL))


def _half(logs: Logs) -> None:
    intent = logs.intent()
    decision = logs.decide(intent)
    logs.resolve(intent, is_committed=False)
    logs.end(decision)


def _without_resolution(logs: Logs) -> None:
    logs.end(logs.decide(logs.intent()))


def _resolved_twice(logs: Logs) -> None:
    intent = logs.intent()
    decision = logs.decide(intent)
    logs.resolve(intent)
    logs.resolve(intent, is_committed=False)
    logs.end(decision)


def _committed_undecided(logs: Logs) -> None:
    logs.resolve(logs.intent())


def _by_another_attempt(logs: Logs) -> None:
    intent = logs.intent()
    decision = logs.decide(intent)
    logs.resolve(intent._replace(record=intent.record._replace(attempt=Attempt(P1, 9, 9))))
    logs.end(decision)


def _other_value(logs: Logs) -> None:
    intent = logs.intent()
    decision = logs.decide(intent)
    logs.resolve(intent._replace(record=intent.record._replace(value=b"9.")))
    logs.end(decision)


def _never_intended(logs: Logs) -> None:
    intent = logs.intent()
    decision = logs.decide(intent)
    logs.resolve(intent)
    logs.end(decision)
    logs.resolve(intent._replace(seq=9), is_committed=False)


def _written_under_intent(logs: Logs) -> None:
    intent = logs.intent()
    logs.put(P2, L, b"9.")
    logs.resolve(intent, is_committed=False)


def _two_intents(logs: Logs) -> None:
    first = logs.intent()
    second = logs.intent(attempt=Attempt(P1, 1, 2), is_exclusive=False)
    logs.resolve(first, is_committed=False)
    logs.resolve(second, is_committed=False)


def _without_end(logs: Logs) -> None:
    intent = logs.intent()
    logs.decide(intent)
    logs.resolve(intent)


def _ended_twice(logs: Logs) -> None:
    intent = logs.intent()
    decision = logs.decide(intent)
    logs.resolve(intent)
    logs.end(decision)
    logs.end(decision)


def _ended_undecided(logs: Logs) -> None:
    intent = logs.intent()
    decision = logs.decide(intent)
    logs.resolve(intent)
    logs.end(decision)
    logs.end(decision._replace(record=decision.record._replace(attempt=Attempt(P1, 1, 7))))


def _decided_without_intent(logs: Logs) -> None:
    intent = logs.intent()
    decision = logs.decide(intent, intent._replace(key=M))
    logs.resolve(intent)
    logs.end(decision)


def _decided_twice(logs: Logs) -> None:
    intent = logs.intent()
    decision = logs.decide(intent)
    logs.decide(intent, value=b"8.", request=0)
    logs.resolve(intent)
    logs.end(decision)


def _decided_by_two_attempts(logs: Logs) -> None:
    intent = logs.intent()
    decision = logs.decide(intent)
    again = logs.decide(attempt=Attempt(P1, 1, 2), value=b"1.", request=0)
    logs.resolve(intent)
    logs.end(decision)
    logs.end(again)


def _done_twice(logs: Logs) -> None:
    intent = logs.intent()
    decision = logs.decide(intent)
    logs.resolve(intent)
    logs.end(decision)
    logs.put(P2, M, b"1.", request=1)


def _intent_of_another_key(logs: Logs) -> None:
    intent = logs.intent(M)
    decision = logs.decide(intent)
    logs.resolve(intent)
    logs.end(decision)


def _wrong_effect(logs: Logs) -> None:
    intent = logs.intent(value=b"9.")
    decision = logs.decide(intent)
    logs.resolve(intent)
    logs.end(decision)


def _wrong_effect_at_home(logs: Logs) -> None:
    intent = logs.intent()
    decision = logs.decide(intent, value=b"9.")
    logs.resolve(intent)
    logs.end(decision)


FORGED: dict[str, tuple[Callable[[Logs], None], str]] = {
    "half": (_half, "Tx6"),
    "no resolution": (_without_resolution, "Tx7"),
    "resolved twice": (_resolved_twice, "Tx7"),
    "committed, not decided": (_committed_undecided, "Tx6"),
    "another attempt": (_by_another_attempt, "another attempt"),
    "another value": (_other_value, "carried out by"),
    "no intent": (_never_intended, "which is no intent"),
    "write under an intent": (_written_under_intent, "Tx9"),
    "two intents": (_two_intents, "Tx4"),
    "no end": (_without_end, "Tx8"),
    "two ends": (_ended_twice, "Tx8"),
    "an end without a decision": (_ended_undecided, "never decided"),
    "a decision of no intent": (_decided_without_intent, "Tx5"),
    "two decisions": (_decided_twice, "is committed at"),
    "two decisions of two attempts": (_decided_by_two_attempts, "no operation explains"),
    "done twice": (_done_twice, "P4"),
    "an intent on another key": (_intent_of_another_key, "Tx5"),
    "wrong effect": (_wrong_effect, "becomes"),
    "wrong effect at home": (_wrong_effect_at_home, "at home"),
}


@pytest.mark.parametrize("name", FORGED)
def test_forged_log_is_rejected(name: str) -> None:
    forge, match = FORGED[name]
    logs = Logs()
    forge(logs)
    with pytest.raises(Wrong, match=match):
        judge(logs, transact())


WRONG_ANSWERS = {
    "acknowledged, but in no log": transact(request=2),
    "refused, but committed": transact(Conflict(""), status=Status.FAIL),
    "no operation explains": asked(commands.Get(K), record(b"1.", 1)),
    "does not cover Found": transact(positions={P2: 1}),
    "does not cover the intent": transact(positions={P1: 2}),
    "is answered 0, expected": transact((1, 0)),
    "a part that a model refuses": transact(
        op=commands.Transact(K, (commands.Put(K, b"1."), commands.Put(L, b"2.", 0, Flag.IF_PRESENT)))
    ),
}


@pytest.mark.parametrize("match", WRONG_ANSWERS)
def test_forged_answer_is_rejected(match: str) -> None:
    with pytest.raises(Wrong, match=match):
        judge(right(), WRONG_ANSWERS[match])


def test_refused_transaction_may_be_in_log_only_after_unknown_outcome() -> None:
    refused = transact(ConditionFailed(0), errors=[(OutcomeUnknown(""), 0.5)])
    assert not is_refused(refused)
    judge(right(), refused)
    with pytest.raises(Wrong, match="refused, but"):
        judge(right(), transact(ConditionFailed(0)))


def test_reads_see_all_of_a_transaction_once_they_have_seen_a_part() -> None:
    """The transaction writes both keys. A read of the second key sees it; a later read of the first does not."""
    new, old = asked(commands.Get(L), NEW_L, 1, 2), asked(commands.Get(K), None, 3, 4)
    with pytest.raises(Cycle, match="G-single"):
        judge(right(), transact(ended=9.0), new, old)
    judge(right(), transact(ended=9.0), asked(commands.Get(L), None, 1, 2), asked(commands.Get(K), None, 3, 4))
    judge(right(), transact(ended=9.0), asked(commands.Get(K), None, 1, 2), asked(commands.Get(L), NEW_L, 3, 4))


def test_range_delete_is_no_change_of_another_partition_at_its_sequence() -> None:
    """A range delete of p1 begins at a key of p2, which was written twice long before."""
    logs = Logs()
    first, second = logs.put(P2, M, b"a", request=1), logs.put(P2, M, b"b", request=2)
    draft = logs.draft(P1)
    draft.answer(RequestId(CLIENT, 3, 3, 0), 1, draft.note(M), b"")
    logs.log(P1, draft)
    assert logs.seqs[P1] == first
    judge(
        logs,
        asked(commands.Put(M, b"a"), first, 0, 1, request=RequestId(CLIENT, 1, 1, 0)),
        asked(commands.Put(M, b"b"), second, 2, 3, request=RequestId(CLIENT, 2, 2, 0)),
        asked(commands.DeleteRange(M, M + b"\x00"), 0, 4, 5, request=RequestId(CLIENT, 3, 3, 0)),
    )


def test_read_of_what_no_log_has_is_rejected() -> None:
    with pytest.raises(Wrong, match="no log has version"):
        judge(right(), transact(), asked(commands.Get(L), record(b"2.", 7), 1, 2))


def test_read_transaction_that_sees_half_is_rejected() -> None:
    half = asked(commands.Transact(K, (commands.Get(K), commands.Get(L))), (None, NEW_L), 0, 9)
    with pytest.raises(Cycle, match="G-single"):
        judge(right(), transact(ended=9.0), half)


def test_write_skew_is_rejected() -> None:
    """Each transaction checks the key that the other one writes."""
    logs, other = Logs(), Attempt(P2, 1, 1)
    logs.put(P1, K, b"k.")
    logs.put(P2, L, b"l.")
    shared = logs.intent(value=b"", is_exclusive=False)
    first = logs.decide(shared)
    logs.resolve(shared)
    logs.end(first)
    draft = logs.draft(P1)
    shared_at_home = draft.intent(K, IntentRecord(other, L, False, DATE_MS, 1))
    logs.log(P1, draft)
    draft = logs.draft(P2)
    draft.put(L, b"2.", logs.rows[L], 0)
    second = draft.decision(L, other, [shared_at_home.name], part=1, parts=1)
    draft.answer(RequestId(CLIENT, 2, 2, 0), 1, (), b"")
    logs.log(P2, draft)
    draft = logs.draft(P1)
    draft.resolved(shared_at_home, is_committed=True)
    logs.log(P1, draft)
    draft = logs.draft(P2)
    draft.end(second)
    logs.log(P2, draft)
    one = transact(
        (2, 1),
        op=commands.Transact(K, (commands.Put(K, b"1."), commands.Check(L, Flag.IF_VERSION, 1))),
        positions={P1: 3, P2: 2},
    )
    ops = (commands.Put(L, b"2."), commands.Check(K, Flag.IF_VERSION, 1))
    two = transact((5, 1), op=commands.Transact(L, ops), request=2, positions={P1: 9, P2: 9})
    found = TransactionLogs(logs.entries)
    found.check()
    one.number, two.number = 0, 1
    with pytest.raises(Wrong, match="a part that a model refuses"):
        Transacted(found, [one, two]).check()
    transacted = Transacted(found, [one, two])
    transacted._check_effects = lambda operation, found: None  # type: ignore[method-assign]
    transacted.check()
    for each in transacted.found.values():
        each.begin = each.last - 2
    with pytest.raises(Cycle, match="G2"):
        transacted.check_order()


# ── answers alone ─────────────────────────────────────────────────────────────────────────────────────────────────────


def reading(keys: tuple[bytes, ...], values: dict[bytes, bytes]) -> Operation:
    results = tuple(record(values[key], 1) if key in values else None for key in keys)
    return asked(commands.Transact(keys[0], tuple(map(commands.Get, keys))), results)


def test_sum_of_accounts_is_checked() -> None:
    right = dict.fromkeys(ACCOUNTS, b"%d" % DEPOSIT)
    assert check_reads([reading(ACCOUNTS, right), reading(ACCOUNTS, {}), reading(LISTS, {})]) == 3
    for wrong in ({**right, ACCOUNTS[0]: b"99"}, {ACCOUNTS[0]: b"%d" % (DEPOSIT * len(ACCOUNTS))}):
        with pytest.raises(Wrong, match="accounts have"):
            check_reads([reading(ACCOUNTS, wrong)])


@pytest.mark.parametrize("circle", CIRCLES)
def test_full_circle_is_rejected(circle: tuple[bytes, ...]) -> None:
    check_values(dict.fromkeys(circle[1:], b"x") | {circle[0]: None}, "a read")
    with pytest.raises(Wrong, match="all of a circle"):
        check_values(dict.fromkeys(circle, b"x"), "a read")


def test_history_of_lists_has_reads_appends_and_checked_versions() -> None:
    first, second = LISTS[:2]
    history = list_history(
        [
            asked(commands.Append(first, b"0.1,"), (4, 1)),
            asked(commands.Get(first), record(b"0.1,", 1), number=1),
            asked(commands.Get(first, commands.Level.STALE), None, number=2),
            transact(
                (4, 1), op=commands.Transact(second, (commands.Append(second, b"0.2,"), commands.Check(first, 4, 1)))
            ),
            transact(None, status=Status.INFO, op=commands.Append(first, b"0.3,")),
            transact(ConditionFailed(0), op=commands.Append(first, b"0.4,")),
            transact(Conflict(""), status=Status.FAIL, op=commands.Transact(first, (commands.Get(first),))),
        ]
    )
    assert [[str(step) for step in each.steps] for each in history] == [
        [f"append {first!r} b'0.1,'"],
        [f"read {first!r} (b'0.1,',)"],
        [f"append {second!r} b'0.2,'", f"read {first!r} (b'0.1,',)"],
        [f"append {first!r} b'0.3,'"],
        [f"append {first!r} b'0.4,'"],
    ]
    assert [each.is_aborted for each in history] == [False, False, False, False, True]


def test_version_with_two_contents_is_rejected() -> None:
    with pytest.raises(Wrong, match="version 1"):
        list_history(
            [asked(commands.Get(LISTS[0]), record(value, 1)) for value in (b"0.1,", b"0.2,")],
        )
