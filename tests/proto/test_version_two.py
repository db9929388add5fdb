"""Version 2 of the bookies' wire, byte for byte as Apache's client and bookie write it."""

from __future__ import annotations

import pytest

from kvstore.proto import bookkeeper_pb2 as pb
from kvstore.proto import version_two as two
from kvstore.proto.bookkeeper import BadFrame, BookieOperation, Status
from kvstore.proto.digest import EntryDigest, master_key
from kvstore.proto.version_two import BatchRead
from kvstore.types import DigestType, EntryId, LedgerId
from tests.proto.golden import recorded

GOLDEN = {name: payload for name, (payload,) in recorded("version_two.hex").items()}
KEY = master_key(b"secret")
PACKET = EntryDigest(DigestType.CRC32C).packet(LedgerId(7), EntryId(3), EntryId(2), 20, b"hello")
BATCH = BatchRead(7, 3, 99, 30, 4096, None, False)


def request(name: str) -> pb.Request:
    found = two.decode_request(GOLDEN[name])
    assert isinstance(found, pb.Request)
    return found


def test_javas_adds_decode() -> None:
    plain, recovery = request("add"), request("recovery add")
    for each in (plain, recovery):
        assert each.header.operation == BookieOperation.ADD_ENTRY
        assert (each.add.ledger, each.add.entry, each.add.master_key, each.add.body) == (7, 3, KEY, PACKET)
    assert (plain.add.flag, plain.header.priority) == (pb.AddRequest.NONE, 0)
    assert (recovery.add.flag, recovery.header.priority) == (pb.AddRequest.RECOVERY_ADD, 100)


def test_plain_add_is_what_the_decoder_finds_and_no_other_payload_is_one() -> None:
    add = request("add").add
    assert two.plain_add(GOLDEN["add"]) == (0, add.ledger, add.entry, add.master_key, add.body)
    assert [name for name, payload in GOLDEN.items() if two.plain_add(payload) is not None] == ["add"]
    priority = b"\x02\x01\x00\x04" + GOLDEN["add"][4:]
    assert two.plain_add(priority) is None
    for size in range(4 + 20 + 16):  # too short for a ledger and an entry
        assert two.plain_add(GOLDEN["add"][:size]) is None
        with pytest.raises(BadFrame):
            two.decode_request(GOLDEN["add"][:size])


def test_javas_reads_decode() -> None:
    plain, last, fence = (request(name) for name in ("read", "read the last", "fence and read the last"))
    assert [(each.read.ledger, each.read.entry) for each in (plain, last, fence)] == [(7, 3), (7, -1), (7, -1)]
    assert (plain.read.flag, plain.read.HasField("master_key"), plain.header.priority) == (
        pb.ReadRequest.NONE,
        False,
        0,
    )
    assert (fence.read.flag, fence.read.master_key, fence.header.priority) == (pb.ReadRequest.FENCE_LEDGER, KEY, 100)
    assert two.decode_request(GOLDEN["batched read"]) == BATCH
    assert two.decode_request(GOLDEN["batched read that fences"]) == BATCH._replace(fence_key=KEY, is_priority=True)


def test_fence_without_a_key_has_an_empty_key() -> None:
    found = two.decode_request(GOLDEN["fence and read the last"][:20])
    assert isinstance(found, pb.Request)
    assert (found.read.flag, found.read.master_key) == (pb.ReadRequest.FENCE_LEDGER, b"")


def test_version_two_answers_match_apaches_bytes() -> None:
    frames = {
        "stored": two.encode_add_response(0, Status.OK, 7, 3),
        "fenced": two.encode_add_response(0, Status.FENCED, 7, 3),
        "read-only": two.encode_add_response(0, Status.READ_ONLY, 7, 3),
        "entry": two.encode_read_response(0, Status.OK, 7, 3, b"packet", 2),
        "no entry": two.encode_read_response(0, Status.NO_ENTRY, 7, 3),
        "no ledger": two.encode_read_response(0, Status.NO_LEDGER, 7, -1),
        "entries": two.encode_batch_response(BATCH, Status.OK, [b"first", b"second"]),
        "no entries": two.encode_batch_response(BATCH, Status.NO_ENTRY, []),
        "no authentication": two.encode_auth_response(0),
    }
    for name, frame in frames.items():
        assert frame[4:].hex() == GOLDEN[name].hex(), name
        assert int.from_bytes(frame[:4], "big") == len(GOLDEN[name])
    assert request("auth").auth.plugin == "AuthDisabledPlugin"


def test_no_status_code_breaks_java() -> None:
    known = {0, 1, 2, *range(100, 107)}  # for any other operation its client has no answer, but an exception
    for status in Status:
        code = int.from_bytes(two.encode_add_response(0, status, 7, 3)[8:12], "big")
        assert code in known
        assert code not in (1, 2) or status in (Status.NO_LEDGER, Status.NO_ENTRY), (
            "an unknown status never becomes a negative"
        )


def test_own_batched_reads_match_javas_bytes() -> None:
    for name, asked in {
        "batched read": BATCH,
        "batched read that fences": BATCH._replace(fence_key=KEY, is_priority=True),
    }.items():
        frame = two.encode_batch_read(asked)
        assert frame[4:].hex() == GOLDEN[name].hex(), name
        assert int.from_bytes(frame[:4], "big") == len(GOLDEN[name])
    ours = BATCH._replace(passes_over=True)
    assert two.encode_batch_read(ours)[4:].hex() == GOLDEN["batched read"].hex().replace("02070000", "02074000", 1)
    assert two.decode_request(two.encode_batch_read(ours)[4:]) == ours


def test_javas_answers_to_batched_reads_decode() -> None:
    found, none = (two.decode_batch_response(GOLDEN[name]) for name in ("entries", "no entries"))
    assert (found.txn, found.operation, found.status) == (99, BookieOperation.BATCH_READ_ENTRY, Status.OK)
    assert two.packets_of(found.body or b"") == [b"first", b"second"]
    assert (none.txn, none.status, none.body) == (99, Status.NO_ENTRY, b"")
    unknown = two.decode_batch_response(GOLDEN["no entries"].replace(b"\0\0\0\x02", b"\0\0\x01\0", 1))
    assert unknown.status == Status.IO_ERROR, "an unknown code is never a negative"


def test_truncated_or_foreign_batch_answer_is_refused() -> None:
    for cut in range(len(GOLDEN["entries"])):
        try:
            found = two.packets_of(two.decode_batch_response(GOLDEN["entries"][:cut]).body or b"")
        except BadFrame:
            continue
        assert found in ([], [b"first"]), "only complete packets"
    for name in ("entry", "stored"):
        with pytest.raises(BadFrame):
            two.decode_batch_response(GOLDEN[name] + bytes(8))


@pytest.mark.parametrize("name", ["add", "read", "batched read", "auth"])
def test_truncated_version_two_request_is_refused_or_another_one(name: str) -> None:
    for cut in range(len(GOLDEN[name])):
        try:
            found = two.decode_request(GOLDEN[name][:cut])
        except BadFrame:
            continue
        assert isinstance(found, pb.Request), "a truncated batched read"
        assert found.add.body != PACKET


def test_unknown_version_two_operation_is_refused() -> None:
    for operation in (0, 4, 5, 6, 8, 255):
        with pytest.raises(BadFrame):
            two.decode_request(bytes([2, operation, 0, 0]) + bytes(60))


def test_batched_read_is_bounded() -> None:
    assert BATCH.limits == (30, 4096)
    assert BATCH._replace(entries_max=0, bytes_max=1 << 40).limits == (two.BATCH_ENTRIES_MAX, two.BATCH_BYTES_MAX)
