"""One line in the log for each call of the admin service: who, from where, what, with which result, how long it took.

The lines are those of the logger `kvstore.audit`, so that they can be sent elsewhere. They name what was asked for as
it was asked; no admin call carries keys or values of users.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import Any, cast
from urllib.parse import unquote

import grpc
from google.protobuf import text_format

log = logging.getLogger("kvstore.audit")

ARGUMENTS_MAX = 500
"""Characters of what was asked for."""
NOBODY = "-"


class Audited:
    """Stands for the gRPC server where the admin service is registered."""

    def __init__(self, server: Any, now: Callable[[], float]) -> None:
        self._server, self._now = server, now

    def add_generic_rpc_handlers(self, handlers: Sequence[grpc.GenericRpcHandler]) -> None:
        self._server.add_generic_rpc_handlers(tuple(_Handlers(each, self._now) for each in handlers))

    def add_registered_method_handlers(self, service: str, handlers: Any) -> None:
        self._server.add_registered_method_handlers(service, handlers)


class _Handlers(grpc.GenericRpcHandler):
    def __init__(self, inner: grpc.GenericRpcHandler, now: Callable[[], float]) -> None:
        self._inner, self._now = inner, now

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
                took_ms = (self._now() - began) * 1000
                log.info(
                    "who=%s from=%s call=%s arguments={%s} result=%s took_ms=%.0f",
                    who(context), unquote(context.peer()), method, arguments_of(request), result, took_ms,
                )  # fmt: skip

        return answer


def arguments_of(request: Any) -> str:
    """What was asked for, on one line."""
    text = text_format.MessageToString(request, as_one_line=True)
    return text if len(text) <= ARGUMENTS_MAX else f"{text[:ARGUMENTS_MAX]}…"


def who(context: Any) -> str:
    """Whom the client's certificate names; without one nobody can tell."""
    identity = context.auth_context()
    names = identity.get("x509_common_name") or identity.get("x509_subject_alternative_name") or ()
    return ",".join(ascii(name.decode("utf-8", "replace")) for name in names) or NOBODY
