"""The calls of the admin service in the audit log (kvstore/server/access/audit.py): who, from where, what, with which
result, how long it took."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, cast
from urllib.parse import unquote

import grpc
from google.protobuf import text_format

from kvstore.proto import admin_pb2
from kvstore.server.access.audit import NOBODY, AuditLog

ARGUMENTS_MAX = 500
"""Characters of what was asked for."""
ASKED_BYTES_MAX = 16 << 10
"""Of what was asked for: beyond this only how much it was."""
_CHANGES = ("ChangeRing", "ChangeReplicas", "Drain", "Undrain", "ChangeAccess", "ChangeNamespaces", "LogLevel")
"""What leaves its line always, if it succeeds."""


class Audited:
    """Stands for the gRPC server where the admin service is registered."""

    def __init__(self, server: Any, now: Callable[[], float], audit: AuditLog, caller: Callable[[], str]) -> None:
        """`caller` names the user of the present call; empty: nobody was asked."""
        self._server, self._now, self._audit, self._caller = server, now, audit, caller

    def add_generic_rpc_handlers(self, handlers: Sequence[grpc.GenericRpcHandler]) -> None:
        self._server.add_generic_rpc_handlers(
            tuple(_Handlers(each, self._now, self._audit, self._caller) for each in handlers)
        )

    def add_registered_method_handlers(self, service: str, handlers: Any) -> None:
        self._server.add_registered_method_handlers(service, handlers)


class _Handlers(grpc.GenericRpcHandler):
    def __init__(
        self, inner: grpc.GenericRpcHandler, now: Callable[[], float], audit: AuditLog, caller: Callable[[], str]
    ) -> None:
        self._inner, self._now, self._audit, self._caller = inner, now, audit, caller

    def service(self, details: grpc.HandlerCallDetails) -> Any:
        handler = self._inner.service(details)
        if handler is None:
            return None
        assert handler.unary_unary is not None, "the admin service has no streams"
        method = details.method.rpartition("/")[2]
        return cast("Any", handler)._replace(unary_unary=self._audited(method, handler.unary_unary))

    def _audited(self, method: str, behaviour: Callable[[Any, Any], Any]) -> Callable[[Any, Any], Any]:
        async def answer(request: Any, context: Any) -> Any:
            began, result = self._now(), "CANCELLED"
            try:
                found = await behaviour(request, context)
                result = "OK"
            except grpc.aio.AbortError:
                result = getattr(context.code(), "name", "UNKNOWN")
                raise
            except Exception:
                result = "UNKNOWN"
                raise
            else:
                return found
            finally:
                self._audit.note(
                    self._caller() or who(context),
                    unquote(context.peer()),
                    method,
                    result,
                    arguments=arguments_of(request),
                    took_ms=(self._now() - began) * 1000,
                    is_change=method in _CHANGES and result == "OK",
                )

        return answer


def arguments_of(request: Any) -> str:
    """Write a request's arguments on one line. To write megabytes of it down would hold the event loop for a second."""
    if request.ByteSize() > ASKED_BYTES_MAX:
        return f"… {request.ByteSize()} bytes"
    if isinstance(request, admin_pb2.ChangeAccessRequest):
        request = without_hash(request)
    text = text_format.MessageToString(request, as_one_line=True)
    return text if len(text) <= ARGUMENTS_MAX else f"{text[:ARGUMENTS_MAX]}…"


def without_hash(request: admin_pb2.ChangeAccessRequest) -> admin_pb2.ChangeAccessRequest:
    """The same without the hash of a password or a token, which is nobody's to read."""
    shown = admin_pb2.ChangeAccessRequest()
    shown.CopyFrom(request)
    for name in ("add_user", "set_password"):
        if shown.HasField(name):
            getattr(shown, name).password_hash = ""
    if shown.HasField("add_token"):
        shown.add_token.token_hash = ""
    return shown


def who(context: Any) -> str:
    """Whom the client's certificate names; without one nobody can tell."""
    identity = context.auth_context()
    names = identity.get("x509_common_name") or identity.get("x509_subject_alternative_name") or ()
    return ",".join(ascii(name.decode("utf-8", "replace")) for name in names) or NOBODY
