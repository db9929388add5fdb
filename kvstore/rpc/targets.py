"""Resolves server names for gRPC, because the duration of gRPC's own lookup cannot be limited and its result cannot be
shared.

The server's certificate must still contain the name, and calls still send the name as their authority. A channel keeps
the addresses with which it was opened. If the channel breaks, its user opens another channel with current addresses.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any, NoReturn

import grpc

from kvstore.env.dns.names import LOOKUP_S, NAMES, family_of, is_address
from kvstore.env.transport import split_address

Options = tuple[tuple[str, Any], ...]
NO_ADDRESS = "no address of the server is known"
"""Beginning of the error text of a call that was not sent because the server's name could not be resolved."""


def host_of(address: str) -> str:
    """Return the host in `host:port`. If the address is malformed, return the whole text, so that gRPC reports the
    error."""
    try:
        return split_address(address)[0]
    except ValueError:
        return address


def needs_lookup(address: str) -> bool:
    """Return True if the address contains a host name, which must be resolved before a channel can be opened."""
    host = host_of(address)
    return host != address and not is_address(host)


def target_of(address: str, places: Sequence[str]) -> tuple[str, Options]:
    """Return gRPC's target string for a server with the resolved addresses `places`, and the channel options that
    preserve the server's name."""
    if not needs_lookup(address):
        return address, ()
    host, port = split_address(address)
    options = (("grpc.default_authority", address), ("grpc.ssl_target_name_override", host))
    if all(family_of(place).name == "AF_INET" for place in places):
        return "ipv4:" + ",".join(f"{place}:{port}" for place in places), options
    mapped = (place if ":" in place else f"::ffff:{place}" for place in places)  # a target has addresses of one family
    # A target is a URI, in which the %10 of the zone in fe80::1%10 would be another character.
    return "ipv6:" + ",".join(f"[{place.replace('%', '%25')}]:{port}" for place in mapped), options


async def places_of(address: str, timeout_s: float = LOOKUP_S) -> tuple[str, ...]:
    """Resolve the host in `host:port` and return its addresses; empty if the host is not a name. Raises OSError if the
    lookup fails or takes longer than `timeout_s` seconds."""
    return await NAMES.find_soon(host_of(address), timeout_s) if needs_lookup(address) else ()


class NotFound(grpc.RpcError, grpc.Call):
    """The error of a call to a server whose name could not be resolved: nothing was sent. Also serves as the call
    object that `future` returns."""

    def __init__(self, error: OSError) -> None:
        self._text = f"{NO_ADDRESS}: {error}"
        super().__init__(self._text)

    def code(self) -> grpc.StatusCode:
        return grpc.StatusCode.UNAVAILABLE

    def details(self) -> str:
        return self._text

    def result(self, timeout: float | None = None) -> NoReturn:
        raise self

    def exception(self, timeout: float | None = None) -> NotFound:
        return self

    def initial_metadata(self) -> tuple[()]:
        return ()

    def trailing_metadata(self) -> tuple[()]:
        return ()

    def is_active(self) -> bool:
        return False

    def time_remaining(self) -> float:
        return 0.0

    def cancel(self) -> bool:
        return False

    def add_callback(self, callback: Callable[[], None]) -> bool:
        return False


class NamedChannel:
    """A blocking channel to a server given by name. The first call resolves the name in the thread of its caller. If
    the name has no address, the call fails like a call to an unreachable server. Generated stubs accept this object
    as a channel."""

    def __init__(self, address: str, opens: Callable[[Sequence[str]], grpc.Channel]) -> None:
        self._address, self._opens = address, opens
        self._channel: grpc.Channel | None = None
        self._is_closed = False
        self._lock = threading.Lock()
        """Held while a method is made, because gRPC crashes the process if that channel is closed."""

    def unary_unary(self, *args: Any, **options: Any) -> _Method:
        return _Method(self, "unary_unary", args, options)

    def unary_stream(self, *args: Any, **options: Any) -> _Method:
        return _Method(self, "unary_stream", args, options)

    def stream_unary(self, *args: Any, **options: Any) -> _Method:
        return _Method(self, "stream_unary", args, options)

    def stream_stream(self, *args: Any, **options: Any) -> _Method:
        return _Method(self, "stream_stream", args, options)

    def method(self, kind: str, args: tuple[Any, ...], options: dict[str, Any], timeout_s: float | None) -> Any:
        """Resolve the name if necessary and make a method of the gRPC channel. The lookup takes at most `timeout_s`
        seconds. Raises NotFound, and ValueError (as gRPC does) if the channel is closed."""
        places: Sequence[str] = ()
        if self._channel is None:
            try:
                places = NAMES.find(host_of(self._address), *(() if timeout_s is None else (timeout_s,)))
            except OSError as error:
                raise NotFound(error) from error
        with self._lock:
            if self._is_closed:
                raise ValueError("Cannot invoke RPC on closed channel!")
            if self._channel is None:
                self._channel = self._opens(places)
            return getattr(self._channel, kind)(*args, **options)

    def close(self) -> None:
        with self._lock:
            self._is_closed = True
        if self._channel is not None:
            self._channel.close()

    def __enter__(self) -> NamedChannel:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class _Method:
    """A method of a stub, created by the channel once it is open."""

    __slots__ = ("_args", "_channel", "_kind", "_method", "_options")

    def __init__(self, channel: NamedChannel, kind: str, args: tuple[Any, ...], options: dict[str, Any]) -> None:
        self._channel, self._kind, self._args, self._options = channel, kind, args, options
        self._method: Any = None

    def __call__(self, *args: Any, **options: Any) -> Any:
        return self._opened(options.get("timeout"))(*args, **options)

    def future(self, *args: Any, **options: Any) -> Any:
        try:
            method = self._opened(options.get("timeout"))
        except NotFound as error:
            return error
        return method.future(*args, **options)

    def _opened(self, timeout_s: float | None) -> Any:
        if self._method is None:
            self._method = self._channel.method(self._kind, self._args, self._options, timeout_s)
        return self._method
