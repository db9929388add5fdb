"""The clear-text messages before TLS, byte for byte, and how both sides interpret them (docs/protocol.md, B26)."""

from __future__ import annotations

import pytest

from kvstore.proto import bookkeeper as wire
from kvstore.proto import bookkeeper_pb2 as pb
from kvstore.proto import version_two
from kvstore.proto.bookkeeper import BookieOperation, Status
from kvstore.proto.digest import master_key
from kvstore.proto.start_tls import BookiesPrelude, ClientsPrelude
from tests.proto.golden import recorded

KEY = master_key(b"")
REQUEST = "0000000b" + "0a06080310091812" + "d20600"
ANSWER = "0000000d" + "0a06080310091812" + "1000" + "d20600"
"""As LightProto and protobuf write it in Apache's bookie: header, status, an empty StartTLSResponse."""
AUTH = pb.Request(
    header=pb.PacketHeader(version=pb.VERSION_THREE, operation=pb.AUTH, txn_id=5),
    auth=pb.AuthMessage(plugin="BookieAuthZFactory", payload=b""),
).SerializeToString()
WITHOUT_ITS_PART = pb.Request(
    header=pb.PacketHeader(version=pb.VERSION_THREE, operation=pb.START_TLS, txn_id=5)
).SerializeToString()
BODY = b"x" * 40


class TlsListener:
    """A bookie's side, and how often it has refused."""

    def __init__(self) -> None:
        self.refusals = 0
        self.prelude = BookiesPrelude(self._refused)

    def _refused(self) -> None:
        self.refusals += 1


def test_start_tls_messages_match_apaches_bytes() -> None:
    assert wire.encode_start_tls(18).hex() == REQUEST
    assert wire.encode_start_tls(18)[4:] == recorded("bookie.hex")["start TLS"][0]
    listener = TlsListener()
    assert listener.prelude.receive(bytes.fromhex(REQUEST)[4:]).hex() == ANSWER
    assert (listener.prelude.is_over, listener.prelude.greeting, listener.refusals) == (True, b"", 0)


@pytest.mark.parametrize(
    ("request_frame", "operation", "ids"),
    [
        (wire.encode_add(5, 7, 3, KEY, BODY), BookieOperation.ADD_ENTRY, (7, 3)),
        (wire.encode_add(5, 7, 3, KEY, BODY, True), BookieOperation.ADD_ENTRY, (7, 3)),
        (wire.encode_read(5, 7, 3, fence_key=KEY), BookieOperation.READ_ENTRY, (7, 3)),
        (wire.encode_read_lac(5, 7), BookieOperation.READ_LAC, None),
        (wire.encode_write_lac(5, 7, 3, KEY, b"lac"), BookieOperation.WRITE_LAC, None),
        (wire.encode_bookie_info(5, context=wire.bookie_context("b1")), BookieOperation.GET_BOOKIE_INFO, None),
        (wire.encode_force(5, 7), BookieOperation.FORCE_LEDGER, None),
        (wire.encode_list_entries(5, 7), BookieOperation.LIST_ENTRIES, None),
        (b"0000" + AUTH, BookieOperation.AUTH, None),
        (b"0000" + WITHOUT_ITS_PART, BookieOperation.START_TLS, None),
    ],
)
def test_other_requests_before_tls_are_unauthorized(
    request_frame: bytes, operation: BookieOperation, ids: tuple[int, int] | None
) -> None:
    listener = TlsListener()
    answer = wire.decode_response(listener.prelude.receive(request_frame[4:])[4:])
    assert (answer.txn, answer.operation, answer.status) == (5, operation, Status.UNAUTHORIZED)
    assert ids is None or (answer.ledger, answer.entry) == ids
    assert (listener.prelude.is_over, listener.refusals) == (False, 1)
    assert listener.prelude.receive(bytes.fromhex(REQUEST)[4:]).hex() == ANSWER
    assert listener.prelude.is_over, "and START_TLS may follow"


def place(ledger: int, entry: int) -> bytes:
    return ledger.to_bytes(8, "big") + entry.to_bytes(8, "big")


def test_version_two_request_before_tls_is_refused_in_its_format() -> None:
    code = (102).to_bytes(4, "big")
    for payload, operation in (
        (b"\x02\x01\0\0" + KEY + place(7, 3) + BODY, 1),
        (b"\x02\x02\0\x01" + place(7, 3) + KEY, 2),
        (b"\x02\x07\0\0" + place(7, 3) + place(99, 0)[:8] + bytes(12), 7),
    ):
        listener = TlsListener()
        answer = listener.prelude.receive(payload)[4:]
        assert answer[:24] == bytes([2, operation, 0, 0]) + code + place(7, 3)
        assert (listener.prelude.is_over, listener.refusals) == (False, 1)
    listener = TlsListener()
    with pytest.raises(ConnectionError, match="AUTH of version 2"):
        listener.prelude.receive(
            version_two.MARK + b"\x03\0\0" + pb.AuthMessage(plugin="x", payload=b"").SerializeToString()
        )
    assert listener.refusals == 1


def test_payload_without_a_request_closes_the_connection() -> None:
    for payload in (b"", b"GET / HTTP/1.1", b"\x02\x63\0\0"):
        listener = TlsListener()
        with pytest.raises(ConnectionError, match="expected START_TLS"):
            listener.prelude.receive(payload)
        assert not listener.prelude.is_over


def test_client_accepts_only_the_answer_to_its_own_start_tls() -> None:
    client = ClientsPrelude(18)
    assert client.greeting.hex() == REQUEST
    assert client.receive(bytes.fromhex(ANSWER)[4:]) == b""
    assert client.is_over
    for answer, reason in (
        (recorded("bookie.hex")["start TLS"][1], "refused TLS with status 404"),
        (wire.encode_start_tls_response(19)[4:], "expected the answer to START_TLS"),
        (wire.encode_add_response(18, 0, 7, 3)[4:], "expected the answer to START_TLS, got one to operation 2"),
        (wire.encode_status(18, BookieOperation.START_TLS, Status.UNAUTHORIZED)[4:], "refused TLS with status 502"),
        (b"\x15\x03\x03", "expected the answer to START_TLS"),
    ):
        client = ClientsPrelude(18)
        with pytest.raises(ConnectionError, match=reason):
            client.receive(answer)
        assert not client.is_over
