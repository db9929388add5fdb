"""The payload's columns and its bytes."""

import contextlib

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvstore.errors import Corrupted
from kvstore.partition.state import decisions, intents
from kvstore.partition.state.decisions import DecisionRecord, EndRecord
from kvstore.partition.state.entry import (
    CREATE,
    DECISION,
    DELETE,
    END,
    EXPIRES,
    INTENT,
    NOTE,
    OVERWRITE,
    REPLACES,
    RESOLVED,
    Entry,
    EntryKind,
    Mutation,
    Requests,
    control,
    decode,
    is_release,
)
from kvstore.partition.state.intents import IntentEffect, IntentName, IntentRecord, ResolvedRecord
from kvstore.partition.state.internal import Attempt
from kvstore.proto import entry_pb2
from kvstore.types import PartitionId, Seq

P1 = PartitionId("p1")
TIME_MS = 1_700_000_000_000


def fields(entry: Entry) -> dict[str, object]:
    return {name: getattr(entry, name) for name in vars(Entry)["__slots__"]}


def full_entry() -> Entry:
    entry = Entry(P1, 3, 100, TIME_MS, bytes((CREATE | EXPIRES, OVERWRITE | REPLACES, DELETE, NOTE)))
    entry.keys = [b"a", b"b", b"c", b"d"]
    entry.values = [b"1", b"22"]
    entry.ages = [7]
    entry.expires_ms = [TIME_MS + 5]
    entry.replaced_ms = [TIME_MS + 9]
    entry.requests = Requests(
        [b"x" * 16, b"y" * 16],
        [4, 1],
        [TIME_MS - 2, TIME_MS - 1],
        [0, 1],
        [5, 1],
        [1 << 63, 2],
        [1, 3],
        [b"", b"r"],
        [b"", b"tttt"],
    )
    entry.check_seq, entry.check_crc = 99, 0xDEADBEEF
    return entry


def test_entry_has_golden_bytes() -> None:
    assert full_entry().encode().hex() == GOLDEN
    assert fields(decode(bytes.fromhex(GOLDEN))) == fields(full_entry())


def test_release_record_has_golden_bytes() -> None:
    payload = control(P1, 3, 101, TIME_MS, EntryKind.RELEASE_LEAD).encode()
    assert payload.hex() == "080112027031180320652880d095ffbc31320111"
    assert is_release(payload)


def test_only_a_release_record_counts_as_release() -> None:
    others = [control(P1, 3, 101, TIME_MS, kind).encode() for kind in (EntryKind.EPOCH_START, EntryKind.EMPTY)]
    unreadable = b"\xff\xff"
    put = Entry(P1, 1, 1, TIME_MS, bytes((CREATE,)))
    put.keys, put.values = [b"a"], [b"1"]
    assert not any(map(is_release, (*others, unreadable, put.encode(), b"")))


def test_release_record_of_another_format_does_not_skip_the_wait() -> None:
    message = entry_pb2.Entry.FromString(control(P1, 3, 101, TIME_MS, EntryKind.RELEASE_LEAD).encode())
    message.format = 2
    assert not is_release(message.SerializeToString())


def test_entry_of_an_unknown_format_is_refused_by_number() -> None:
    message = entry_pb2.Entry.FromString(full_entry().encode())
    message.format = 7
    with pytest.raises(Corrupted, match="format 7"):
        decode(message.SerializeToString())


@pytest.mark.parametrize(
    "kinds",
    [
        b"\x09",
        bytes((EntryKind.IMPORT_BEGIN,)),
        bytes((CREATE, EntryKind.RELEASE_LEAD)),
        b"\x80",
        bytes((CREATE | 0x80,)),
    ],
)
def test_unknown_kind_is_refused(kinds: bytes) -> None:
    message = entry_pb2.Entry(format=1, partition="p1", kinds=kinds, keys=[b"a"] * len(kinds), values=[b"1"])
    with pytest.raises(Corrupted):
        decode(message.SerializeToString())


@pytest.mark.parametrize("column", ["keys", "values", "ages", "expires_ms", "replaced_ms"])
def test_columns_inconsistent_with_kinds_are_refused(column: str) -> None:
    message = entry_pb2.Entry.FromString(full_entry().encode())
    getattr(message, column).pop()
    with pytest.raises(Corrupted, match="columns"):
        decode(message.SerializeToString())


@pytest.mark.parametrize("column", ["first_unacked", "seen_ms", "client", "hashes", "mutations", "results", "touched"])
def test_inconsistent_request_columns_are_refused(column: str) -> None:
    message = entry_pb2.Entry.FromString(full_entry().encode())
    getattr(message.requests, column).pop()
    with pytest.raises(Corrupted, match="request"):
        decode(message.SerializeToString())


def test_request_of_an_absent_mutation_is_refused() -> None:
    message = entry_pb2.Entry.FromString(full_entry().encode())
    message.requests.mutations[1] = 4
    with pytest.raises(Corrupted, match="mutation"):
        decode(message.SerializeToString())


# docs/reference/formats.md, Transactions
def transaction_entry() -> Entry:
    attempt = Attempt(PartitionId("p2"), 3, 4)
    intent = IntentRecord(attempt, b"h", True, TIME_MS, 2, IntentEffect.PUT, b"new", 60, TIME_MS + 5, TIME_MS + 9)
    decision = DecisionRecord(attempt, (IntentName(b"a", 100), IntentName(b"b", 70)), TIME_MS, 1, 3, 0)
    entry = Entry(P1, 3, 100, TIME_MS, bytes((INTENT, DECISION, RESOLVED, OVERWRITE, END)))
    entry.keys = [b"a", b"h", b"b", b"b", b"h"]
    entry.values, entry.ages = [b"2"], [38]
    ends = ResolvedRecord(attempt, 70, True, 3, 1), EndRecord(attempt, 50)
    entry.transactions = [intents.encode(each) for each in (intent, decision, *ends)]
    return entry


def test_entry_of_transactions_has_golden_bytes() -> None:
    assert transaction_entry().encode().hex() == GOLDEN_TRANSACTIONS
    found = decode(bytes.fromhex(GOLDEN_TRANSACTIONS))
    assert fields(found) == fields(transaction_entry())
    intent, decision, resolved, put, end = found.mutations()
    assert intents.encode(intents.intent_of(intent.key, intent.seq, intent.value).record) == intent.value
    assert intents.encode(decisions.decision_of(decision.key, decision.seq, decision.value).record) == decision.value
    assert intents.encode(intents.resolved_of(resolved.value)) == resolved.value
    assert intents.encode(decisions.end_of(end.value)) == end.value
    assert (put.value, put.seq, put.created) == (b"2", 103, 65)


def test_transactions_without_their_contents_are_refused() -> None:
    message = entry_pb2.Entry.FromString(transaction_entry().encode())
    message.transactions.pop()
    with pytest.raises(Corrupted, match="contents of 4 mutations of transactions, got 3"):
        decode(message.SerializeToString())


def test_mutation_of_a_transaction_has_no_flags() -> None:
    message = entry_pb2.Entry.FromString(transaction_entry().encode())
    message.kinds = bytes((INTENT | EXPIRES,)) + message.kinds[1:]
    message.expires_ms.append(TIME_MS)
    with pytest.raises(Corrupted, match="flags"):
        decode(message.SerializeToString())


def test_fields_of_newer_releases_in_transactions_are_ignored() -> None:
    record = intents.ResolvedRecord(Attempt(PartitionId("p2"), 3, 4), 70, True, 3, 2)
    newer = msgspec.msgpack.encode([[*record.attempt, "new"], *record[1:], "new"])
    assert intents.resolved_of(newer) == record


@pytest.mark.parametrize("data", [b"", b"\x90", b"\xc1", b"\x93\x01\x02\x03"])
def test_damaged_contents_of_transactions_raise_corrupted(data: bytes) -> None:
    for decode_contents in (intents.resolved_of, decisions.end_of):
        with pytest.raises(Corrupted):
            decode_contents(data)


@given(st.binary(max_size=200))
def test_undecodable_bytes_raise_corrupted_only(payload: bytes) -> None:
    with contextlib.suppress(Corrupted):
        decode(payload)


def test_mutation_takes_its_share_of_each_column() -> None:
    assert list(full_entry().mutations()) == [
        Mutation(CREATE, Seq(100), b"a", b"1", 100, TIME_MS + 5, 0),
        Mutation(OVERWRITE, Seq(101), b"b", b"22", 94, 0, TIME_MS + 9),
        Mutation(DELETE, Seq(102), b"c", b"", 102, 0, 0),
        Mutation(NOTE, Seq(103), b"d", b"", 103, 0, 0),
    ]


def test_control_records_take_no_sequence() -> None:
    record = decode(control(P1, 3, 101, TIME_MS, EntryKind.EMPTY).encode())
    assert (record.is_control, record.first_seq, record.last_seq) == (True, 101, 100)
    assert full_entry().last_seq == 103


def test_single_put_with_expiry_is_no_control_record() -> None:
    entry = Entry(P1, 3, 100, TIME_MS, bytes((CREATE | EXPIRES,)))
    assert not entry.is_control


GOLDEN = (
    "080112027031180320642880d095ffbc313204214203043a01613a01623a01633a0164420131420232324a0107520685d095"
    "ffbc315a0689d095ffbc3162610a10787878787878787878787878787878780a107979797979797979797979797979797912"
    "0204011a0cfecf95ffbc31ffcf95ffbc31220200012a0205013210000000000000008002000000000000003a020103420042"
    "01724a004a04747474747207086315efbeadde"
)
GOLDEN_TRANSACTIONS = (
    "080112027031180320642880d095ffbc31320505060702083a01613a01683a01623a01623a01684201324a01267a2e9a93a2"
    "70320304c40168c3cf0000018bcfe568000201c4036e65773ccf0000018bcfe56805cf0000018bcfe568097a1e9693a27032"
    "03049292c401616492c4016246cf0000018bcfe568000103007a0b9593a27032030446c303017a089293a27032030432"
)
