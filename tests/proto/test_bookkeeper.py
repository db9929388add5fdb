"""The bookie protocol against Apache's bytes, and against itself."""

from __future__ import annotations

from random import Random
from types import SimpleNamespace

import pytest

from kvstore.bookie.index.entry_index import EntryIndex
from kvstore.proto import bookkeeper as wire
from kvstore.proto import bookkeeper_pb2 as pb
from kvstore.proto.availability import decode_availability, encode_availability
from kvstore.proto.bookkeeper import BadFrame, BadRequest, BookieOperation, Status
from kvstore.proto.digest import EntryDigest, master_key
from kvstore.proto.shortcuts import TXN_END
from kvstore.types import NO_ENTRY, DigestType, EntryId, LedgerId
from kvstore.wal import bookies
from tests.proto.golden import recorded

KEY = master_key(b"")
PACKET = EntryDigest(DigestType.CRC32C).packet(LedgerId(7), EntryId(0), NO_ENTRY, 5, b"hello")
GOLDEN = {
    "add": (
        wire.encode_add(1, 7, 0, KEY, PACKET),
        f"00000050 0a06080310021801 aa0645 0807 1000 1a14{KEY.hex()} 2229 {PACKET.hex()}",
    ),
    "add stored": (
        wire.encode_add_response(1, Status.OK, 7, 0),
        "00000013 0a06080310021801 1000 aa0606 0800 1007 1800",
    ),
    "read the last": (
        wire.encode_read(2, 7, wire.LAST_ENTRY),
        "00000018 0a06080310011802 a2060d 0807 10ffffffffffffffffff01",
    ),
    "read the last and fence": (
        wire.encode_read(2, 7, wire.LAST_ENTRY, fence_key=KEY),
        f"00000031 0a06080310011802 a20626 0807 10ffffffffffffffffff01 1a14{KEY.hex()} a00601",
    ),
    "long poll": (
        wire.encode_long_poll(3, 7, 0, 1000),
        "00000020 0a06080310011803 a20615 0807 10ffffffffffffffffff01 2000 28e807 a00602",
    ),
    "auth": (
        wire.encode_auth_response(1),
        "00000023 0a06080310051801 1000 b20616 0a12 4175746844697361626c6564506c7567696e 1200",
    ),
}


@pytest.mark.parametrize("name", GOLDEN)
def test_frames_match_apaches_bytes(name: str) -> None:
    frame, expected = GOLDEN[name]
    assert frame.hex() == expected.replace(" ", "")


def test_context_names_a_bookie_and_a_cluster() -> None:
    request = wire.decode_request(wire.encode_bookie_info(1, context=wire.bookie_context("b1-3f", "c7"))[4:])
    assert {pair.key: pair.value for pair in request.context} == {"kvstore-bookie": "b1-3f", "kvstore-cluster": "c7"}
    assert wire.bookie_context("b1-3f", "c7").hex() == (
        "c20c170a0e6b7673746f72652d626f6f6b6965120562312d3366c20c150a0f6b7673746f72652d636c757374657212026337"
    )


NUMBERS = [0, 1, 127, 128, 16383, 16384, 2**28 - 1, 2**28, 2**31, 2**62]


@pytest.mark.parametrize("txn", NUMBERS)
@pytest.mark.parametrize("number", [-1, *NUMBERS])
def test_hand_encoded_messages_match_protobuf(txn: int, number: int) -> None:
    context = wire.bookie_context("b1-3f2a9c")
    for recovery in (False, True):
        payload = wire.encode_add(txn, number, number, KEY, b"x" * 300, recovery, context)[4:]
        request = wire.decode_request(payload)
        assert request.SerializeToString() == payload
        assert (request.header.txn_id, request.add.ledger, request.add.entry) == (txn, number, number)
        assert (request.add.flag == pb.AddRequest.RECOVERY_ADD) is recovery
        assert (request.header.priority == wire.RECOVERY_PRIORITY) is recovery
        assert [(pair.key, pair.value) for pair in request.context] == [("kvstore-bookie", "b1-3f2a9c")]
    payload = wire.encode_read(txn, number, number, fence_key=KEY, priority=100, context=context)[4:]
    request = wire.decode_request(payload)
    assert request.SerializeToString() == payload
    assert (request.read.entry, request.read.flag, request.read.master_key) == (number, 1, KEY)
    payload = wire.encode_long_poll(txn, number, number, 1000)[4:]
    assert wire.decode_request(payload).read.previous_lac == number
    for status in Status:
        payload = wire.encode_add_response(txn, status, number, number)[4:]
        assert pb.Response.FromString(payload).SerializeToString() == payload
        assert wire.decode_response(payload) == (txn, BookieOperation.ADD_ENTRY, status, number, number, *[None] * 6)
        assert wire.stored_txn(payload) == (txn if status is Status.OK and txn < TXN_END else -1)
        payload = wire.encode_read_response(txn, status, number, number, b"y" * 300, number)[4:]
        assert pb.Response.FromString(payload).SerializeToString() == payload
        assert wire.decode_response(payload)[1:7] == (
            BookieOperation.READ_ENTRY,
            status,
            number,
            number,
            b"y" * 300,
            number,
        )


def test_fast_path_takes_only_the_exact_bytes_of_a_stored_answer() -> None:
    payload = wire.encode_add_response(300, Status.OK, 7, 9)[4:]
    assert wire.stored_txn(payload) == 300
    for cut in range(len(payload)):
        assert wire.stored_txn(payload[:cut]) == -1
    assert wire.stored_txn(payload + b"\0") == -1
    assert wire.stored_txn(wire.encode_read_response(300, Status.OK, 7, 9)[4:]) == -1
    assert wire.stored_txn(b"\x0a\x06\x08\x03\x10\x02\x18" + b"\xff" * 30) == -1


def test_every_own_txn_takes_the_fast_path(monkeypatch: pytest.MonkeyPatch) -> None:
    for txn in (1, 127, 128, 1 << 14, 1 << 21, TXN_END - 1):
        assert wire.stored_txn(wire.encode_add_response(txn, Status.OK, 7, 9)[4:]) == txn
        assert wire.plain_add(wire.encode_add(txn, 7, 9, KEY, b"x" * 300)[4:]) == (txn, 7, 9, KEY, b"x" * 300)
    monkeypatch.setattr(bookies, "TXN_END", 4)
    ours = bookies.BookieClients(SimpleNamespace(nursery=None), lambda bookie: None)  # type: ignore[arg-type]
    assert [ours._next_txn() for _ in range(7)] == [1, 2, 3, 1, 2, 3, 1]


@pytest.mark.parametrize("seed", range(30))
def test_fast_path_takes_only_ordinary_adds_and_decodes_the_same(seed: int) -> None:
    random = Random(seed)
    txn, ledger, entry = (random.choice([0, 127, 128, 16384, 2**28 - 1, random.getrandbits(20)]) for _ in range(3))
    body = random.randbytes(random.choice([0, 1, 200, 70_000]))
    payload = wire.encode_add(txn, ledger, entry, KEY, body)[4:]
    assert wire.plain_add(payload) == (txn, ledger, entry, KEY, body)
    assert wire.plain_add(payload + b"\0") is None
    assert wire.plain_add(wire.encode_add(txn, ledger, entry, KEY, body, True)[4:]) is None
    assert wire.plain_add(wire.encode_add(txn, ledger, entry, KEY, body, context=CONTEXT)[4:]) is None
    assert wire.plain_add(wire.encode_add(2**28, ledger, entry, KEY, body)[4:]) is None
    assert wire.plain_add(wire.encode_add(txn, ledger, entry, KEY[1:], body)[4:]) is None
    assert wire.plain_add(wire.encode_read(txn, ledger, entry)[4:]) is None
    for _ in range(200):
        mangled = bytearray(payload[: random.choice([len(payload), random.randrange(len(payload))])] or b"\0")
        mangled[random.randrange(min(60, len(mangled)))] = random.randrange(256)
        plain = wire.plain_add(bytes(mangled))
        if plain is not None:
            request = wire.decode_request(bytes(mangled))
            add = request.add
            assert plain == (request.header.txn_id, add.ledger, add.entry, add.master_key, add.body)
            assert [add.flag, request.header.priority, len(request.context), add.write_flags] == [0, 0, 0, 0]


CONTEXT = wire.bookie_context("b1-3f2a9c")
REQUESTS = {
    BookieOperation.READ_ENTRY: wire.encode_read(5, 7, 3),
    BookieOperation.ADD_ENTRY: wire.encode_add(5, 7, 3, KEY, PACKET),
    BookieOperation.WRITE_LAC: wire.encode_write_lac(5, 7, 3, KEY, b"lac"),
    BookieOperation.READ_LAC: wire.encode_read_lac(5, 7),
    BookieOperation.GET_BOOKIE_INFO: wire.encode_bookie_info(5),
    BookieOperation.FORCE_LEDGER: wire.encode_force(5, 7),
    BookieOperation.LIST_ENTRIES: wire.encode_list_entries(5, 7),
}


@pytest.mark.parametrize("operation", REQUESTS)
def test_request_without_its_part_or_a_required_field_is_bad(operation: BookieOperation) -> None:
    request = wire.decode_request(REQUESTS[operation][4:])
    assert (request.header.operation, request.header.txn_id) == (operation, 5)
    part = wire.PART[operation]
    fields = [field for field in request.DESCRIPTOR.fields_by_name[part].message_type.fields if field.is_required]
    for field in fields:
        damaged = wire.decode_request(REQUESTS[operation][4:])
        getattr(damaged, part).ClearField(field.name)
        with pytest.raises(BadRequest) as caught:
            wire.decode_request(damaged.SerializePartialToString())
        assert (caught.value.txn, caught.value.operation) == (5, operation)
    request.ClearField(part)
    with pytest.raises(BadRequest, match="lacks its part"):
        wire.decode_request(request.SerializePartialToString())


@pytest.mark.parametrize(
    "payload",
    [b"", b"\x02\x01\x00\x00", b"\x0a\x04\x08\x03\x10\x02", b"\xff" * 20, b"\x0a\x06\x08\x03\x10\x63\x18\x01"],
)
def test_payload_without_a_readable_header_raises_bad_frame(payload: bytes) -> None:
    with pytest.raises(BadFrame):
        wire.decode_request(payload)
    with pytest.raises(BadFrame):
        wire.decode_response(payload)


@pytest.mark.parametrize("operation", wire.PART)
def test_refusal_carries_its_part_with_the_requested_ids(operation: BookieOperation) -> None:
    payload = wire.encode_status(9, operation, Status.IO_ERROR, 7, 3)[4:]
    response = pb.Response.FromString(payload)
    assert response.IsInitialized()
    answer = wire.decode_response(payload)
    assert (answer.txn, answer.operation, answer.status) == (9, operation, Status.IO_ERROR)
    if operation in (BookieOperation.AUTH, BookieOperation.START_TLS):
        return
    assert response.HasField(wire.PART[operation])
    part = getattr(response, wire.PART[operation])
    assert part.status == Status.IO_ERROR
    if operation != BookieOperation.GET_BOOKIE_INFO:
        assert part.ledger == 7


def test_availability_matches_apaches_bytes() -> None:
    data = encode_availability([(0, 2), (3, 2), (6, 2)])
    assert data.hex() == "0000000000000001" + "00" * 56 + "0000000000000000000000000000000600000002" + "00000003"


@pytest.mark.parametrize("seed", range(30))
def test_availability_round_trips(seed: int) -> None:
    random = Random(seed)
    index = EntryIndex()
    entries = sorted(random.sample(range(60), random.randint(0, 60)))
    for entry in entries:
        index.put(entry, 1, 1)
    held = decode_availability(encode_availability(index.runs()))
    assert list(held) == entries
    first, last = sorted(random.sample(range(-2, 64), 2))
    assert held.between(first, last) == {entry for entry in entries if first <= entry <= last}


def test_availability_is_unbounded() -> None:
    """The ledger of a list that is too long is never rolled (docs/protocol.md, G21), and its copies are made all the
    same."""
    held = decode_availability(encode_availability([(0, 1 << 25), (2 << 25, 1 << 25)]))
    assert held.between((1 << 25) - 2, (1 << 25) + 2) == {(1 << 25) - 2, (1 << 25) - 1}


@pytest.mark.parametrize("data", [b"", b"\0" * 65, b"\0\0\0\1" + b"\0" * 60, encode_availability([(1, 1)])[:64]])
def test_malformed_availability_is_refused(data: bytes) -> None:
    with pytest.raises(BadFrame):
        decode_availability(data)


JAVA = recorded("shell.hex")


def test_own_requests_match_javas_byte_for_byte() -> None:
    for name, (payload,) in JAVA.items():
        if not name.startswith("request"):
            continue
        request = wire.decode_request(payload)
        txn, read, add = request.header.txn_id, request.read, request.add
        key = read.master_key if read.HasField("master_key") else None
        match request.header.operation:
            case BookieOperation.ADD_ENTRY:
                frame = wire.encode_add(txn, add.ledger, add.entry, add.master_key, add.body, "recovery" in name)
            case BookieOperation.READ_ENTRY:
                frame = wire.encode_read(txn, read.ledger, read.entry, fence_key=key, priority=request.header.priority)
            case BookieOperation.READ_LAC:
                frame = wire.encode_read_lac(txn, request.read_lac.ledger)
            case BookieOperation.GET_BOOKIE_INFO:
                frame = wire.encode_bookie_info(txn, request.bookie_info.requested)
            case operation:
                raise AssertionError(operation)
        assert frame[4:].hex() == payload.hex(), name


def test_recorded_answers_of_apaches_bookie_decode() -> None:
    answers = {name: wire.decode_response(answer) for name, (_, answer) in recorded("bookie.hex").items()}
    assert {name: Status(answer.status) for name, answer in answers.items() if answer.status} == {
        "read an unknown ledger": Status.NO_LEDGER,
        "read the LAC of an unknown ledger": Status.NO_ENTRY,
        "list an unknown ledger": Status.NO_LEDGER,
        "add with another key": Status.UNAUTHORIZED,
        "read 1 past the end": Status.NO_ENTRY,
        "start TLS": Status.BAD_REQUEST,
        "fence and read past the end": Status.NO_ENTRY,
        "fence with another key": Status.UNAUTHORIZED,
        "add when fenced": Status.FENCED,
        "fence an unknown ledger": Status.NO_ENTRY,
    }
    digest = EntryDigest(DigestType.CRC32C)
    last = answers["read the last"]
    assert last.body is not None
    assert digest.open(LedgerId(7), None, last.body) == (1, 0, 10, b"world")
    again = answers["read the LAC again"]
    assert again.body is not None
    assert digest.open_lac(LedgerId(7), again.body) == 1
    assert (answers["long poll that is over"].entry, answers["long poll in vain"].entry) == (1, -1)
    listed = answers["list"].body
    assert listed is not None
    assert list(decode_availability(listed)) == [0, 1]


@pytest.mark.parametrize("name", [name for name in JAVA if name.startswith("request")])
def test_truncated_java_request_is_not_taken_for_a_whole_one(name: str) -> None:
    (payload,) = JAVA[name]
    for size in range(len(payload)):
        with pytest.raises((BadFrame, BadRequest)):
            wire.decode_request(payload[:size])


def test_availability_lists_runs_beyond_the_maximum_period() -> None:
    runs = [(0, 1), (1 << 40, 1), (1 << 41, 1), ((1 << 63) - 1, 1)]
    listed = decode_availability(encode_availability(runs))
    assert list(listed) == [first for first, _ in runs]
