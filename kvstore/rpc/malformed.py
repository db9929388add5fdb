"""Wraps every gRPC method of a server. The wrapper counts calls (kvstore/rpc/calls.py), refuses messages that cannot be
parsed, and converts the StoreErrors of methods to gRPC statuses. Without the wrapper, gRPC would answer UNKNOWN, which
means that a write may have been done, and would log a traceback for each message."""

from __future__ import annotations

import inspect
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import aclosing
from typing import Any

import grpc
from google.protobuf.message import DecodeError

from kvstore.env.networks import KnownNetworks
from kvstore.errors import InvalidRequest, StoreError
from kvstore.rpc.calls import ServerCalls
from kvstore.rpc.gate import Gate, Passage
from kvstore.rpc.status import abort

Behaviour = Callable[[Any, Any], Any]


class Malformed:
    """Placeholder for a message that could not be parsed."""

    def __init__(self, reason: str) -> None:
        self.error = InvalidRequest(f"malformed message: {reason}")


class Guarded:
    """Stands in for the gRPC server when services are registered, and wraps their methods. The services never
    receive malformed messages."""

    def __init__(
        self,
        server: grpc.aio.Server,
        gate: Gate | None = None,
        known: KnownNetworks | None = None,
        carried: Mapping[str, str] | None = None,
    ) -> None:
        """Without a gate no login is required. `known` and `carried` have the same meaning as for ServerCalls."""
        self._server, self._gate = server, gate
        self._calls = ServerCalls(known, carried)

    def add_generic_rpc_handlers(self, handlers: Sequence[grpc.GenericRpcHandler]) -> None:
        self._server.add_generic_rpc_handlers(tuple(_Handlers(each, self._calls, self._gate) for each in handlers))

    def add_registered_method_handlers(self, service: str, handlers: Any) -> None:
        """Ignore handlers that are registered by name. They equal the generic handlers, which this server uses."""


class _Handlers(grpc.GenericRpcHandler):
    def __init__(self, inner: grpc.GenericRpcHandler, calls: ServerCalls, gate: Gate | None) -> None:
        self._inner, self._calls, self._gate = inner, calls, gate
        self._known: dict[str, Any] = {}

    def service(self, details: grpc.HandlerCallDetails) -> Any:
        found = self._known.get(details.method)
        if found is None and (handler := self._inner.service(details)) is not None:
            found = self._known[details.method] = _guarded(handler, self._calls, Passage(self._gate, details.method))
        return found


def _guarded(handler: Any, calls: ServerCalls, passage: Passage) -> Any:
    """Return the wrapped method. A method with a single request is presented to gRPC as a stream, because a stream
    begins when the headers arrive. The wrapper then reads the request itself, so it can limit the wait."""
    if handler.request_streaming:
        is_generator = inspect.isasyncgenfunction(handler.stream_stream)
        streaming = _streaming_pages if is_generator else _streaming
        return handler._replace(stream_stream=streaming(handler.stream_stream, calls, passage))
    parse = _parser(handler.request_deserializer)
    parsing = handler._replace(request_streaming=True, request_deserializer=parse)
    if passage.needs_no_user:
        return parsing._replace(
            response_streaming=True, unary_unary=None, unary_stream=None, stream_stream=_open(handler, calls, passage)
        )
    if handler.response_streaming:
        return parsing._replace(unary_stream=None, stream_stream=_lasting(handler.unary_stream, calls, passage))
    return parsing._replace(unary_unary=None, stream_unary=_unary(handler.unary_unary, calls, passage))


def _parser(parse: Callable[[bytes], Any]) -> Callable[[bytes], Any]:
    def parse_or_explain(data: bytes) -> Any:
        try:
            return parse(data)
        except DecodeError as error:
            return Malformed(str(error))

    return parse_or_explain


def _unary(behaviour: Behaviour, calls: ServerCalls, passage: Passage) -> Behaviour:
    async def answer(_: Any, context: Any) -> Any:
        address = await calls.begin(context)
        try:
            request = await _request(context, calls, address)
            if passage.is_asked:
                async with passage.through(request, context):
                    return await behaviour(request, context)
            return await behaviour(request, context)
        except StoreError as error:
            await abort(context, error)
        finally:
            calls.end(address)

    return answer


def _lasting(behaviour: Behaviour, calls: ServerCalls, passage: Passage) -> Behaviour:
    """Wrap a method that writes answers for as long as its client wants."""

    async def answer(_: Any, context: Any) -> Any:
        address = await calls.begin(context)
        try:
            request = await _request(context, calls, address)
            async with passage.lasting(request, context):
                return await behaviour(request, context)
        except StoreError as error:
            await abort(context, error)
        finally:
            calls.end(address)

    return answer


def _open(handler: Any, calls: ServerCalls, passage: Passage) -> Behaviour:
    """Wrap a method that needs no login. The wrapper writes even a single answer itself, so that the call counts
    until the client has received the answer."""
    lasts = handler.response_streaming

    async def answer(_: Any, context: Any) -> Any:
        address = await calls.begin(context)
        try:
            request = await _request(context, calls, address)
            async with calls.without_user(context, address, lasts=lasts), passage.lasting(request, context):
                if lasts:
                    return await handler.unary_stream(request, context)
                await context.write(await handler.unary_unary(request, context))
        except StoreError as error:
            await abort(context, error)
        finally:
            calls.end(address)

    return answer


async def _request(context: Any, calls: ServerCalls, address: str) -> Any:
    request = await calls.message(context, address)
    if request.__class__ is Malformed:
        raise request.error
    return request


def _streaming(behaviour: Behaviour, calls: ServerCalls, passage: Passage) -> Behaviour:
    """Wrap a streaming method, whose messages are parsed when it reads them."""

    async def answer(requests: Any, context: Any) -> Any:
        address = await calls.begin(context)
        try:
            async with passage.lasting(None, context):
                return await behaviour(requests, context)
        except DecodeError as error:
            await abort(context, Malformed(str(error)).error)
        except StoreError as error:
            await abort(context, error)
        finally:
            calls.end(address)

    return answer


def _streaming_pages(behaviour: Behaviour, calls: ServerCalls, passage: Passage) -> Behaviour:
    """Wrap a streaming method that yields its answers."""

    async def answer(requests: Any, context: Any) -> AsyncIterator[Any]:
        address = await calls.begin(context)
        try:
            async with passage.lasting(None, context), aclosing(behaviour(requests, context)) as answers:
                async for each in answers:
                    yield each
        except DecodeError as error:
            await abort(context, Malformed(str(error)).error)
        except StoreError as error:
            await abort(context, error)
        finally:
            calls.end(address)

    return answer
