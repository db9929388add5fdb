"""How our gRPC channels and servers are set up: sizes, keepalive, reconnection. Both ends here: they must agree."""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable, Sequence
from functools import lru_cache
from typing import Any, cast

import grpc

from kvstore.env.dns.names import LOOKUP_S
from kvstore.env.networks import is_loopback
from kvstore.env.tls import Tls
from kvstore.rpc.login import LoggedInChannel, Login, login_of_environment
from kvstore.rpc.targets import NamedChannel, Options, needs_lookup, places_of, target_of

log = logging.getLogger(__name__)

MESSAGE_BYTES_MAX = 4 << 20
"""Of one message. Senders stay far below: 1 MiB and one operation."""
METADATA_BYTES_MAX = 16 << 10
TIMEOUT_DEFAULT_MS = 5_000
TIMEOUT_MAX_MS = 30_000
KEEPALIVE_MS = 10_000
KEEPALIVE_TIMEOUT_MS = 5_000
AHEAD_BYTES = 1 << 20
"""What a reader of pages has of them at most that it has not asked for yet, and the message that is coming."""
CONNECTIONS_MAX = 2_500
"""Of one server, unless it is told otherwise; one more is closed at once."""
HANDSHAKE_MS = 5_000
"""From the accept of a connection to its first HTTP/2 frame."""
CONCURRENT_CALLS_MAX = 4_096
"""Of one server; more are answered RESOURCE_EXHAUSTED. A session stream counts as one."""
CONNECTION_CALLS_MAX = CONCURRENT_CALLS_MAX // 4
"""Of one connection, so that one client does not take them all; its library keeps back what is more."""


def sizes() -> Options:
    return (
        ("grpc.max_receive_message_length", MESSAGE_BYTES_MAX),
        ("grpc.max_send_message_length", MESSAGE_BYTES_MAX),
        ("grpc.max_metadata_size", METADATA_BYTES_MAX),
    )


def keepalive(*, server: bool) -> Options:
    """A client pings every KEEPALIVE_MS, without calls too; a server allows pings twice as often as that."""
    if server:
        return (
            ("grpc.http2.min_ping_interval_without_data_ms", KEEPALIVE_MS // 2),
            ("grpc.keepalive_permit_without_calls", 1),
        )
    return (
        ("grpc.keepalive_time_ms", KEEPALIVE_MS),
        ("grpc.keepalive_timeout_ms", KEEPALIVE_TIMEOUT_MS),
        ("grpc.keepalive_permit_without_calls", 1),
        ("grpc.http2.max_pings_without_data", 0),
    )


def channel_options() -> Options:
    """Of a client. Each channel has connections of its own, so that closing it forgets gRPC's reconnection back-off."""
    return (
        *sizes(),
        *keepalive(server=False),
        ("grpc.initial_reconnect_backoff_ms", 50),
        ("grpc.max_reconnect_backoff_ms", 500),
        ("grpc.min_reconnect_backoff_ms", 1_000),  # this one is the time that connecting may take
        ("grpc.use_local_subchannel_pool", 1),
        ("grpc.enable_retries", 0),  # we retry, with request ids
        ("grpc.enable_http_proxy", 0),
    )


def paging() -> Options:
    """Of a client that reads streams of pages. Left to itself, gRPC takes in as much as the connection carries in a
    round trip, tens of MiB on a busy machine, whether anybody reads it or not."""
    return (("grpc.http2.bdp_probe", 0), ("grpc.http2.lookahead_bytes", AHEAD_BYTES))


def open_channel(address: str, tls: Tls | None, more: Options = (), login: Login | None = None) -> grpc.Channel:
    """A blocking client's channel, whose calls carry the login: None is that of the environment. The first call looks
    the server's name up. Raises OSError if a TLS file cannot be read, ConfigError."""
    credentials = None if tls is None else grpc.ssl_channel_credentials(*tls.contents())
    login = login or login_of_environment()

    def opens(places: Sequence[str]) -> grpc.Channel:
        return blocking_channel(address, places, credentials, (*channel_options(), *more))

    channel = cast("grpc.Channel", NamedChannel(address, opens)) if needs_lookup(address) else opens(())
    return cast("grpc.Channel", _logged_in(channel, login, address, tls))


def aio_opener(
    address: str, tls: Tls | None, login: Login | None = None
) -> Callable[[float], Awaitable[grpc.aio.Channel]]:
    """Return a function that opens such a channel on asyncio, after it has looked the server's name up for at most so
    many seconds: it raises OSError if there is no address. Raises OSError if a TLS file cannot be read, ConfigError."""
    credentials = None if tls is None else grpc.ssl_channel_credentials(*tls.contents())
    login = login or login_of_environment()

    async def opens(timeout_s: float) -> grpc.aio.Channel:
        channel = aio_channel(address, await places_of(address, timeout_s), credentials, channel_options())
        return cast("grpc.aio.Channel", _logged_in(channel, login, address, tls))

    return opens


def _logged_in(channel: Any, login: Login | None, address: str, tls: Tls | None) -> Any:
    """Return a channel whose calls carry the login."""
    if login is None:
        return channel
    if tls is None:
        warn_of_plain_login(address.rpartition(":")[0])
    return LoggedInChannel(channel, login)


@lru_cache(maxsize=1_024)
def warn_of_plain_login(host: str) -> None:
    """Warn once for each host beyond loopback that a login is sent to it without TLS."""
    if not is_loopback(host):
        text = "%s: the login is sent without TLS, so anybody on the way can read it; use kvs:// or set KVSTORE_TLS_CA"
        log.warning(text, host)


async def open_aio_channel(address: str, tls: Tls | None, login: Login | None = None) -> grpc.aio.Channel:
    """Open a channel on asyncio as `aio_opener` does, with its errors."""
    return await aio_opener(address, tls, login)(LOOKUP_S)


def blocking_channel(
    address: str, places: Sequence[str], credentials: grpc.ChannelCredentials | None, options: Options
) -> grpc.Channel:
    """Return a blocking channel to a server at these addresses; none if `address` is one."""
    target, named = target_of(address, places)
    if credentials is None:
        return grpc.insecure_channel(target, options=(*options, *named))
    return grpc.secure_channel(target, credentials, options=(*options, *named))


def aio_channel(
    address: str, places: Sequence[str], credentials: grpc.ChannelCredentials | None, options: Options
) -> grpc.aio.Channel:
    """A channel to a server at these addresses; none if it is given by one."""
    target, named = target_of(address, places)
    if credentials is None:
        return grpc.aio.insecure_channel(target, options=(*options, *named))
    return grpc.aio.secure_channel(target, credentials, options=(*options, *named))


def server_options(connections_max: int = CONNECTIONS_MAX) -> Options:
    """Of a server. Connections count from their accept. Without SO_REUSEPORT a port that is taken is an error instead
    of a shared port."""
    return (
        *sizes(),
        *keepalive(server=True),
        ("grpc.max_allowed_incoming_connections", connections_max),
        ("grpc.max_concurrent_streams", CONNECTION_CALLS_MAX),
        ("grpc.server_handshake_timeout_ms", HANDSHAKE_MS),
        ("grpc.so_reuseport", 0),
    )


def timeout_s(timeout_ms: int) -> float:
    """Seconds that a request may take which asks for `timeout_ms`: 0 is the default, and there is a cap."""
    return min(timeout_ms or TIMEOUT_DEFAULT_MS, TIMEOUT_MAX_MS) / 1000
