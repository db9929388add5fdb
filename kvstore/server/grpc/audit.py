"""One line in the log for each call of the admin service: who, from where, what, with which result, how long it took;
of an address with very many calls, for those that changed something and for some others.

The lines are those of the logger `kvstore.audit`, so that they can be sent elsewhere. They name what was asked for as
it was asked; no admin call carries keys or values of users.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, cast
from urllib.parse import unquote

import grpc
from google.protobuf import text_format

from kvstore.proto import admin_pb2
from kvstore.rpc.calls import address_of

log = logging.getLogger("kvstore.audit")

ARGUMENTS_MAX = 500
"""Characters of what was asked for."""
ASKED_BYTES_MAX = 16 << 10
"""Of what was asked for: beyond this only how much it was."""
NOBODY = "-"
LINES_MAX, LINES_S = 120, 60.0
"""Of one address within that time. What is more is counted: a flood of calls must not have the log's own rotation
remove what others did."""
ADDRESSES_MAX = 1_000
_CHANGES = ("ChangeRing", "ChangeReplicas", "Drain")
"""What leaves its line always, if it succeeds."""


class _Lines:
    """Decides which calls leave a line of their own."""

    def __init__(self, now: Callable[[], float]) -> None:
        self._now = now
        self._callers: dict[str, _Caller] = {}

    def is_due(self, address: str, method: str, result: str) -> bool:
        caller = self._callers.get(address)
        if caller is None or self._now() - caller.since >= LINES_S:
            self._forget(address)
            if len(self._callers) >= ADDRESSES_MAX:
                self._forget(next(iter(self._callers)))
            caller = self._callers[address] = _Caller(self._now())
        if (method in _CHANGES and result == "OK") or caller.lines < LINES_MAX:
            caller.lines += 1
            return True
        caller.left_out += 1
        if caller.timer is None:
            caller.timer = asyncio.get_running_loop().call_later(LINES_S, self._forget, address)
        return False

    def _forget(self, address: str) -> None:
        caller = self._callers.pop(address, None)
        if caller is None or caller.timer is None:
            return
        caller.timer.cancel()
        log.warning("from=%s calls_without_a_line=%d within_s=%.0f", address, caller.left_out, LINES_S)


@dataclass(slots=True)
class _Caller:
    """An address, since its first call of a minute."""

    since: float
    lines: int = 0
    left_out: int = 0
    timer: asyncio.TimerHandle | None = None


class Audited:
    """Stands for the gRPC server where the admin service is registered."""

    def __init__(self, server: Any, now: Callable[[], float]) -> None:
        self._server, self._now = server, now
        self._lines = _Lines(now)

    def add_generic_rpc_handlers(self, handlers: Sequence[grpc.GenericRpcHandler]) -> None:
        self._server.add_generic_rpc_handlers(tuple(_Handlers(each, self._now, self._lines) for each in handlers))

    def add_registered_method_handlers(self, service: str, handlers: Any) -> None:
        self._server.add_registered_method_handlers(service, handlers)


class _Handlers(grpc.GenericRpcHandler):
    def __init__(self, inner: grpc.GenericRpcHandler, now: Callable[[], float], lines: _Lines) -> None:
        self._inner, self._now, self._lines = inner, now, lines

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
                if self._lines.is_due(address_of(context.peer()), method, result):
                    log.info(
                        "who=%s from=%s call=%s arguments={%s} result=%s took_ms=%.0f",
                        who(context), unquote(context.peer()), method, arguments_of(request), result, took_ms,
                    )  # fmt: skip

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
    """The same without the hash of a password, which is nobody's to read."""
    shown = admin_pb2.ChangeAccessRequest()
    shown.CopyFrom(request)
    for name in ("add_user", "set_password"):
        if shown.HasField(name):
            getattr(shown, name).password_hash = ""
    return shown


def who(context: Any) -> str:
    """Whom the client's certificate names; without one nobody can tell."""
    identity = context.auth_context()
    names = identity.get("x509_common_name") or identity.get("x509_subject_alternative_name") or ()
    return ",".join(ascii(name.decode("utf-8", "replace")) for name in names) or NOBODY
