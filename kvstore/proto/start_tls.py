"""Both sides of the clear-text exchange on a connection to a bookie before its TLS handshake. Decides only.

    client   request START_TLS, in version 3 of the wire whatever version it speaks afterwards
    bookie   answer OK; the client sends its handshake next

Neither side says anything else in the clear: a bookie with TLS refuses all other requests, and a client with TLS sends
none (docs/protocol.md, B26).
"""

from __future__ import annotations

from collections.abc import Callable

from kvstore.proto import bookkeeper as wire
from kvstore.proto import bookkeeper_pb2 as pb
from kvstore.proto import version_two
from kvstore.proto.bookkeeper import BadFrame, BadRequest, BookieOperation, Status
from kvstore.proto.version_two import BatchRead


# docs/protocol.md B26
class BookiesPrelude:
    """The bookie's side of one connection (kvstore.env.ports.Prelude)."""

    greeting = b""

    def __init__(self, refused: Callable[[], None]) -> None:
        """`refused` is called for each request that is not START_TLS."""
        self.is_over = False
        self._refused = refused

    def receive(self, payload: bytes) -> bytes:
        """Answer a request. Raises ConnectionError: the connection must close."""
        try:
            if payload.startswith(version_two.MARK):
                return self._refuse_version_two(version_two.decode_request(payload))
            request = wire.decode_request(payload)
        except BadFrame as error:
            raise ConnectionError(f"expected START_TLS, got no request: {error}") from None
        except BadRequest as error:
            return self._refuse(error.txn, error.operation)
        operation: int = request.header.operation
        if operation == BookieOperation.START_TLS:
            self.is_over = True
            return wire.encode_start_tls_response(request.header.txn_id)
        of_entry = request.add if operation == BookieOperation.ADD_ENTRY else request.read
        return self._refuse(request.header.txn_id, operation, of_entry.ledger, of_entry.entry)

    def asks_for_tls(self, payload: bytes) -> bool:
        """Return True if the payload is START_TLS."""
        try:
            operation: int = wire.decode_request(payload).header.operation
        except (BadFrame, BadRequest):
            return False
        return operation == BookieOperation.START_TLS

    def _refuse(self, txn: int, operation: int, ledger: int = 0, entry: int = 0) -> bytes:
        self._refused()
        return wire.encode_status(txn, operation, Status.UNAUTHORIZED, ledger, entry)

    def _refuse_version_two(self, request: pb.Request | BatchRead) -> bytes:
        self._refused()
        if isinstance(request, BatchRead):
            return version_two.encode_batch_response(request, Status.UNAUTHORIZED, ())
        operation: int = request.header.operation
        if operation == BookieOperation.AUTH:
            raise ConnectionError("expected START_TLS, got AUTH of version 2, whose answer cannot refuse")
        if operation == BookieOperation.ADD_ENTRY:
            return version_two.encode_add_response(0, Status.UNAUTHORIZED, request.add.ledger, request.add.entry)
        return version_two.encode_read_response(0, Status.UNAUTHORIZED, request.read.ledger, request.read.entry)


class ClientsPrelude:
    """The client's side of one connection (kvstore.env.ports.Prelude)."""

    def __init__(self, txn: int) -> None:
        self.greeting = wire.encode_start_tls(txn)
        self.is_over = False
        self._txn = txn

    def receive(self, payload: bytes) -> bytes:
        """Process the answer. Raises ConnectionError: there will be no TLS, and so no connection."""
        try:
            answer = wire.decode_response(payload)
        except BadFrame as error:
            raise ConnectionError(f"expected the answer to START_TLS: {error}") from None
        if (answer.operation, answer.txn) != (BookieOperation.START_TLS, self._txn):
            raise ConnectionError(f"expected the answer to START_TLS, got one to operation {answer.operation}")
        if answer.status != Status.OK:
            raise ConnectionError(f"the bookie refused TLS with status {answer.status}")
        self.is_over = True
        return b""

    def asks_for_tls(self, payload: bytes) -> bool:
        """Return False: a client's side is never asked for TLS."""
        return False
