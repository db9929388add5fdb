"""Audits the calls of the admin service. Changes go through AdminChanges (kvstore/server/access/changes.py). Every
other call leaves a line in the audit log when it ends."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, cast

import grpc
from google.protobuf import text_format
from google.protobuf.descriptor_pb2 import MethodOptions

from kvstore.errors import StoreError
from kvstore.proto import admin_pb2
from kvstore.rpc.callers import caller_of
from kvstore.rpc.status import listed, reason_of
from kvstore.server.access.audit import NOBODY, AuditLog, CallAuthor
from kvstore.server.access.changes import DONE, UNKNOWN, AdminChanges

ARGUMENTS_MAX = 500
"""Maximum number of characters of the arguments in a line."""
ASKED_BYTES_MAX = 16 << 10
"""Maximum size in bytes of a request whose arguments are written to the log. For a larger request, only its size is
written."""
_READS = frozenset(
    each.name
    for each in admin_pb2.DESCRIPTOR.services_by_name["Admin"].methods
    if each.GetOptions().idempotency_level == MethodOptions.NO_SIDE_EFFECTS
)
"""Methods that admin.proto declares to change nothing. Every other method is a change."""


class Audited:
    """Stands in for the gRPC server when the admin service is registered."""

    def __init__(
        self,
        server: Any,
        now: Callable[[], float],
        audit: AuditLog,
        changes: AdminChanges,
        caller: Callable[[], str] = lambda: "",
    ) -> None:
        """`caller` returns the user of the current call; empty if access control is off."""
        self._server = server
        self._calls = AuditedCalls(now, audit, changes, caller)

    def add_generic_rpc_handlers(self, handlers: Sequence[grpc.GenericRpcHandler]) -> None:
        self._server.add_generic_rpc_handlers(tuple(_AuditedHandlers(each, self._calls) for each in handlers))

    def add_registered_method_handlers(self, service: str, handlers: Any) -> None:
        self._server.add_registered_method_handlers(service, handlers)


class _AuditedHandlers(grpc.GenericRpcHandler):
    def __init__(self, inner: grpc.GenericRpcHandler, calls: AuditedCalls) -> None:
        self._inner, self._calls = inner, calls

    def service(self, details: grpc.HandlerCallDetails) -> Any:
        handler = self._inner.service(details)
        if handler is None:
            return None
        assert handler.unary_unary is not None, "the admin service has no streams"
        method = details.method.rpartition("/")[2]
        return cast("Any", handler)._replace(unary_unary=self._calls.audited(method, handler.unary_unary))


class AuditedCalls:
    """Wraps the methods of the admin service with auditing."""

    def __init__(
        self, now: Callable[[], float], audit: AuditLog, changes: AdminChanges, caller: Callable[[], str]
    ) -> None:
        self._now, self._audit, self._changes, self._caller = now, audit, changes, caller

    def audited(self, method: str, behaviour: Callable[[Any, Any], Any]) -> Callable[[Any, Any], Any]:
        """Return the audited method in the form that gRPC calls. `behaviour` may raise StoreError."""

        async def answer(request: Any, context: Any) -> Any:
            by = CallAuthor(self._caller() or who(context), caller_of(context))
            if is_change(method, request):
                work = partial(behaviour, request, context)
                return await self._changes.make(by, method, work, arguments_of(request))
            return await self._read(by, method, behaviour, request, context)

        return answer

    async def _read(
        self, by: CallAuthor, method: str, behaviour: Callable[[Any, Any], Any], request: Any, context: Any
    ) -> Any:
        began, outcome = self._now(), "CANCELLED"
        try:
            found = await behaviour(request, context)
            outcome = DONE
        except StoreError as error:
            outcome = reason_of(listed(type(error)))
            raise
        except Exception:
            outcome = UNKNOWN
            raise
        else:
            return found
        finally:
            took_ms = (self._now() - began) * 1000
            self._audit.note(*by, method, outcome, arguments=arguments_of(request), took_ms=took_ms)


def is_change(method: str, request: Any) -> bool:
    """Return True if the call changes the node or the cluster, False if it only reads."""
    if isinstance(request, admin_pb2.LogLevelRequest):
        return bool(request.logger or request.level)
    if isinstance(request, admin_pb2.ChangeRingRequest):
        return not request.dry_run and request.action != admin_pb2.ChangeRingRequest.SHOW
    return method not in _READS


def arguments_of(request: Any) -> str:
    """Return a request's arguments on one line. The length is limited, because formatting megabytes would block the
    event loop for a second."""
    if request.ByteSize() > ASKED_BYTES_MAX:
        return f"… {request.ByteSize()} bytes"
    if isinstance(request, admin_pb2.ChangeAccessRequest):
        request = without_hash(request)
    text = text_format.MessageToString(request, as_one_line=True)
    return text if len(text) <= ARGUMENTS_MAX else f"{text[:ARGUMENTS_MAX]}…"


def without_hash(request: admin_pb2.ChangeAccessRequest) -> admin_pb2.ChangeAccessRequest:
    """Return a copy of the request without the hash of a password or a token."""
    shown = admin_pb2.ChangeAccessRequest()
    shown.CopyFrom(request)
    for name in ("add_user", "set_password"):
        if shown.HasField(name):
            getattr(shown, name).password_hash = ""
    if shown.HasField("add_token"):
        shown.add_token.token_hash = ""
    return shown


def who(context: Any) -> str:
    """Return the name in the client's certificate, or NOBODY."""
    identity = context.auth_context()
    names = identity.get("x509_common_name") or identity.get("x509_subject_alternative_name") or ()
    return ",".join(ascii(name.decode("utf-8", "replace")) for name in names) or NOBODY
