"""Apache BookKeeper's wire, version 2, as a bookie needs it: requests in, answers out. Decides only.

Java's client speaks it if configured to (`useV2WireProtocol`, Pulsar's default), to add and to read entries. A call has
no number: the caller matches answers by operation, ledger and entry. Big-endian:

    request := 2 u8 | operation u8 | flags u16 | rest
    rest    := key 20 bytes | entry packet                                  of an add
             | ledger i64 | entry i64 | key 20 bytes if it fences           of a read
             | ledger i64 | entry i64 | request i64 | entries i32 | bytes i64 | key 20 bytes if it fences
             | AuthMessage
    answer  := 2 u8 | operation u8 | 0 u16 | code u32 | ledger i64 | entry i64 | rest
    rest    := entry packet, of a read | request i64 | (size u32 | entry packet)*, of a batched read

Our own client uses one request of it, the batched read, which version 3 does not have (kvstore/wal/batches.py). One
flag is ours: with 0x4000 an absent entry does not end the answer, and `entries` counts ids, so that a bookie of a
striped ensemble returns everything it has. A bookie that does not know the flag returns less, and each packet says
which entry it is.
"""

from __future__ import annotations

from collections.abc import Sequence
from struct import Struct
from struct import error as Short
from typing import NamedTuple

from google.protobuf.message import DecodeError

from kvstore.proto import bookkeeper_pb2 as pb
from kvstore.proto.bookkeeper import (
    AUTH_DISABLED,
    PAYLOAD_MAX,
    RECOVERY_PRIORITY,
    BadFrame,
    BookieOperation,
    BookieResponse,
    Status,
)

MARK = b"\x02"
"""First byte of a payload of version 2. No protobuf message begins with it."""
BATCH_BYTES_MAX = PAYLOAD_MAX - 32
"""Maximum bytes of the entries of a batched read, including four bytes for the size of each."""
BATCH_ENTRIES_MAX = 1000
"""Maximum number of entries in one answer. More would keep others waiting; Java asks for the rest."""

_ADD, _READ, _AUTH, _BATCH_READ = 1, 2, 3, 7
_PLAIN_ADD = b"\x02\x01\x00\x00"
_KEY_AT, _BODY_AT = 4, 24
_FENCE, _RECOVERY, _PRIORITY, _PASSES_OVER = 1, 2, 4, 0x4000
_KEY_SIZE = 20
_START = Struct(">BBH")
_PLACE = Struct(">qq")
_BATCH = Struct(">qqqiq")
_ANSWER = Struct(">IBBHIqq")
_ANSWERED = Struct(">BBHIqq")
_REQUEST = Struct(">q")
_SIZE = Struct(">I")
_CODES: dict[Status, int] = {
    Status.OK: 0,
    Status.NO_LEDGER: 1,
    Status.NO_ENTRY: 2,
    Status.BAD_REQUEST: 100,
    Status.IO_ERROR: 101,
    Status.UNAUTHORIZED: 102,
    Status.BAD_VERSION: 103,
    Status.FENCED: 104,
    Status.READ_ONLY: 105,
    Status.TOO_MANY_REQUESTS: 106,
    Status.UNKNOWN_LEDGER_STATE: 101,  # Java's client breaks on 107, its own code; an I/O error is as unknown
}
_STATUSES = {code: status for status, code in reversed(_CODES.items())}


class BatchRead(NamedTuple):
    """A read of consecutive entries, up to its limits."""

    ledger: int
    entry: int
    request: int
    """Returned in the answer."""
    entries_max: int
    """0 or less: no limit."""
    bytes_max: int
    fence_key: bytes | None
    is_priority: bool
    passes_over: bool = False
    """If True, absent entries do not end the answer, and `entries_max` counts ids."""

    @property
    def limits(self) -> tuple[int, int]:
        """Maximum number of entries and bytes of the answer. One entry is always returned."""
        entries = self.entries_max if self.entries_max > 0 else BATCH_ENTRIES_MAX
        return min(entries, BATCH_ENTRIES_MAX), min(self.bytes_max, BATCH_BYTES_MAX)


def plain_add(payload: bytes) -> tuple[int, int, int, bytes, bytes] | None:
    """Return 0 for the number of the call, ledger, entry, key and body of an ordinary add; None for any other payload,
    which decode_request understands."""
    if not payload.startswith(_PLAIN_ADD) or len(payload) < _BODY_AT + _PLACE.size:
        return None
    ledger, entry = _PLACE.unpack_from(payload, _BODY_AT)
    return 0, ledger, entry, payload[_KEY_AT:_BODY_AT], payload[_BODY_AT:]


def decode_request(payload: bytes) -> pb.Request | BatchRead:
    """Decode a request to a bookie, as its version 3 equivalent if there is one. Raises BadFrame."""
    try:
        _, operation, flags = _START.unpack_from(payload)
        if operation == _ADD:
            return _add(payload, flags)
        if operation == _READ:
            return _read(payload, flags)
        if operation == _BATCH_READ:
            key = _key(payload, 4 + _BATCH.size, flags)
            ledger, entry, request, entries, size = _BATCH.unpack_from(payload, 4)
            passes_over = bool(flags & _PASSES_OVER)
            return BatchRead(ledger, entry, request, entries, size, key, bool(flags & _PRIORITY), passes_over)
        if operation == _AUTH:
            return pb.Request(header=_header(BookieOperation.AUTH, 0), auth=pb.AuthMessage.FromString(payload[4:]))
    except (Short, DecodeError) as error:
        raise BadFrame(f"cannot decode a request of version 2: {error}") from None
    raise BadFrame(f"expected a known operation of version 2, got {operation}")


def _add(payload: bytes, flags: int) -> pb.Request:
    key, body = payload[_KEY_AT:_BODY_AT], payload[_BODY_AT:]
    ledger, entry = _PLACE.unpack_from(body)
    add = pb.AddRequest(ledger=ledger, entry=entry, master_key=key, body=body)
    if flags & _RECOVERY:
        add.flag = pb.AddRequest.RECOVERY_ADD
    return pb.Request(header=_header(BookieOperation.ADD_ENTRY, flags), add=add)


def _read(payload: bytes, flags: int) -> pb.Request:
    ledger, entry = _PLACE.unpack_from(payload, 4)
    read = pb.ReadRequest(ledger=ledger, entry=entry)
    if flags & _FENCE:
        read.flag = pb.ReadRequest.FENCE_LEDGER
        read.master_key = _key(payload, 4 + _PLACE.size, flags) or b""
    return pb.Request(header=_header(BookieOperation.READ_ENTRY, flags), read=read)


def _key(payload: bytes, at: int, flags: int) -> bytes | None:
    return payload[at : at + _KEY_SIZE] if flags & _FENCE else None


def _header(operation: BookieOperation, flags: int) -> pb.PacketHeader:
    header = pb.PacketHeader(version=pb.VERSION_THREE, operation=pb.OperationType.ValueType(operation), txn_id=0)
    if flags & _PRIORITY:
        header.priority = RECOVERY_PRIORITY
    return header


def encode_add_response(_txn: int, status: int, ledger: int, entry: int) -> bytes:
    """Encode the answer to an add."""
    if status is Status.OK:
        return _ANSWER.pack(24, 2, _ADD, 0, 0, ledger, entry)
    return _answer(_ADD, status, ledger, entry, b"")


def encode_read_response(
    _txn: int, status: int, ledger: int, entry: int, body: bytes | None = None, _max_lac: int | None = None
) -> bytes:
    """Encode an entry. Version 2 has no place for the highest known LAC."""
    return _answer(_READ, status, ledger, entry, body or b"")


def encode_batch_response(asked: BatchRead, status: int, bodies: Sequence[bytes]) -> bytes:
    """Encode the entries from the requested one on."""
    parts = [asked.request.to_bytes(8, "big", signed=True)]
    for body in bodies:
        parts += (_SIZE.pack(len(body)), body)
    return _answer(_BATCH_READ, status, asked.ledger, asked.entry, b"".join(parts))


def encode_batch_read(asked: BatchRead) -> bytes:
    """Encode the request as a client sends it."""
    flags = _FENCE * (asked.fence_key is not None) | _PRIORITY * asked.is_priority | _PASSES_OVER * asked.passes_over
    place = _BATCH.pack(asked.ledger, asked.entry, asked.request, asked.entries_max, asked.bytes_max)
    payload = _START.pack(2, _BATCH_READ, flags) + place + (asked.fence_key or b"")
    return _SIZE.pack(len(payload)) + payload


def decode_batch_response(payload: bytes) -> BookieResponse:
    """Decode the answer to a batched read; its body is for `packets_of`. An unknown code counts as an I/O error. Raises
    BadFrame."""
    try:
        version, operation, _, code, ledger, entry = _ANSWERED.unpack_from(payload)
        (request,) = _REQUEST.unpack_from(payload, _ANSWERED.size)
    except Short as error:
        raise BadFrame(f"cannot decode an answer of version 2: {error}") from None
    if version != 2 or operation != _BATCH_READ:
        raise BadFrame(f"expected the answer to a batched read of version 2, got operation {operation} of {version}")
    status = _STATUSES.get(code, Status.IO_ERROR)
    body = payload[_ANSWERED.size + _REQUEST.size :]
    return BookieResponse(request, BookieOperation.BATCH_READ_ENTRY, status, ledger, entry, body)


def packets_of(body: bytes) -> list[bytes]:
    """Return the entry packets in the answer to a batched read. Raises BadFrame."""
    packets: list[bytes] = []
    at = 0
    while at < len(body):
        start = at + _SIZE.size
        at = start + int.from_bytes(body[at:start], "big")
        if at > len(body):
            raise BadFrame(f"expected a batch of at least {at} bytes, got {len(body)}")
        packets.append(body[start:at])
    return packets


def encode_auth_response(_txn: int) -> bytes:
    """Encode the answer that there is no authentication."""
    message = _START.pack(2, _AUTH, 0) + pb.AuthMessage(plugin=AUTH_DISABLED, payload=b"").SerializeToString()
    return _SIZE.pack(len(message)) + message


def _answer(operation: int, status: int, ledger: int, entry: int, rest: bytes) -> bytes:
    return _ANSWER.pack(24 + len(rest), 2, operation, 0, _CODES[Status(status)], ledger, entry) + rest
