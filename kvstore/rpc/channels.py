"""Configures gRPC channels and servers: sizes, keepalive, reconnection. Both ends are configured here, because they
must agree."""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable, Sequence
from functools import lru_cache
from typing import Any, cast

import grpc

from kvstore.env.dns.names import LOOKUP_S
from kvstore.env.networks import is_loopback
from kvstore.env.tls import Tls, usable
from kvstore.rpc.login import LoggedInChannel, Login, login_of_environment
from kvstore.rpc.targets import NamedChannel, Options, needs_lookup, places_of, target_of

log = logging.getLogger(__name__)

MESSAGE_BYTES_MAX = 4 << 20
"""Maximum bytes of a message. Senders stay far below it: 1 MiB and one operation."""
METADATA_BYTES_MAX = 16 << 10
TIMEOUT_DEFAULT_MS = 5_000
TIMEOUT_MAX_MS = 30_000
KEEPALIVE_MS = 10_000
KEEPALIVE_TIMEOUT_MS = 5_000
AHEAD_BYTES = 1 << 20
"""Maximum bytes of pages that a reader receives before it requests them, in addition to the message in transit."""
CONNECTIONS_MAX = 2_500
"""Default maximum number of connections of one server. A further connection is closed at once."""
HANDSHAKE_MS = 5_000
"""Maximum time from accepting a connection to its first HTTP/2 frame."""
CONCURRENT_CALLS_MAX = 4_096
"""Maximum number of concurrent calls of one server. Further calls are answered RESOURCE_EXHAUSTED. A session stream
counts as one call."""
CONNECTION_CALLS_MAX = CONCURRENT_CALLS_MAX // 4
"""Maximum number of concurrent calls of one connection, so that one client cannot use up all calls. The client's gRPC
library delays further calls."""


def sizes() -> Options:
    return (
        ("grpc.max_receive_message_length", MESSAGE_BYTES_MAX),
        ("grpc.max_send_message_length", MESSAGE_BYTES_MAX),
        ("grpc.max_metadata_size", METADATA_BYTES_MAX),
    )


def keepalive(*, server: bool) -> Options:
    """Return the keepalive options of a server or a client. A client pings every KEEPALIVE_MS, even without calls. A
    server accepts pings at twice that rate."""
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
    """Return the options of a client channel. Each channel has its own connections, so closing a channel also resets
    gRPC's reconnection backoff."""
    return (
        *sizes(),
        *keepalive(server=False),
        ("grpc.initial_reconnect_backoff_ms", 50),
        ("grpc.max_reconnect_backoff_ms", 500),
        ("grpc.min_reconnect_backoff_ms", 1_000),  # the timeout of a connection attempt
        ("grpc.use_local_subchannel_pool", 1),
        ("grpc.enable_retries", 0),  # kvstore retries itself, with request ids
        ("grpc.enable_http_proxy", 0),
    )


def paging() -> Options:
    """Return the options of a client that reads streams of pages. These options limit how much gRPC receives ahead.
    By default gRPC buffers as much as the connection carries in a round trip, which is tens of MiB on a busy
    machine, even if the client reads nothing."""
    return (("grpc.http2.bdp_probe", 0), ("grpc.http2.lookahead_bytes", AHEAD_BYTES))


def open_channel(address: str, tls: Tls | None, more: Options = (), login: Login | None = None) -> grpc.Channel:
    """Open a channel for a blocking client. Its calls carry `login`, or the login from the environment if `login` is
    None. The server's name is resolved by the first call, not here. Raises ConfigError, also if a TLS file cannot be
    read."""
    credentials = _credentials(tls)
    login = login or login_of_environment()

    def opens(places: Sequence[str]) -> grpc.Channel:
        return blocking_channel(address, places, credentials, (*channel_options(), *more))

    channel = cast("grpc.Channel", NamedChannel(address, opens)) if needs_lookup(address) else opens(())
    return cast("grpc.Channel", _logged_in(channel, login, address, tls))


def aio_opener(
    address: str, tls: Tls | None, login: Login | None = None
) -> Callable[[float], Awaitable[grpc.aio.Channel]]:
    """Return a function that resolves the server's name and opens an asyncio channel. The function takes the maximum
    time of the lookup in seconds, and raises OSError if the name has no address. `aio_opener` itself raises
    ConfigError, also if a TLS file cannot be read."""
    credentials = _credentials(tls)
    login = login or login_of_environment()

    async def opens(timeout_s: float) -> grpc.aio.Channel:
        channel = aio_channel(address, await places_of(address, timeout_s), credentials, channel_options())
        return cast("grpc.aio.Channel", _logged_in(channel, login, address, tls))

    return opens


def _credentials(tls: Tls | None) -> grpc.ChannelCredentials | None:
    if tls is None:
        return None
    with usable():
        return grpc.ssl_channel_credentials(*tls.contents())


def _logged_in(channel: Any, login: Login | None, address: str, tls: Tls | None) -> Any:
    """Wrap a channel so that its calls carry the login."""
    if login is None:
        return channel
    if tls is None:
        warn_of_plain_login(address.rpartition(":")[0])
    return LoggedInChannel(channel, login)


@lru_cache(maxsize=1_024)
def warn_of_plain_login(host: str) -> None:
    """Log a warning, once for each host other than loopback, that a login is sent without TLS."""
    if not is_loopback(host):
        text = (
            "%s: the login is sent without TLS, so others on the network can read it; use kvs:// or set KVSTORE_TLS_CA"
        )
        log.warning(text, host)


async def open_aio_channel(address: str, tls: Tls | None, login: Login | None = None) -> grpc.aio.Channel:
    """Resolve the server's name and open an asyncio channel. Raises the errors of `aio_opener` and of the function
    that `aio_opener` returns."""
    return await aio_opener(address, tls, login)(LOOKUP_S)


def blocking_channel(
    address: str, places: Sequence[str], credentials: grpc.ChannelCredentials | None, options: Options
) -> grpc.Channel:
    """Return a blocking channel. `places` are the resolved addresses of the server, empty if `address` is not a
    name."""
    target, named = target_of(address, places)
    if credentials is None:
        return grpc.insecure_channel(target, options=(*options, *named))
    return grpc.secure_channel(target, credentials, options=(*options, *named))


def aio_channel(
    address: str, places: Sequence[str], credentials: grpc.ChannelCredentials | None, options: Options
) -> grpc.aio.Channel:
    """Return an asyncio channel. `places` are the resolved addresses of the server, empty if `address` is not a
    name."""
    target, named = target_of(address, places)
    if credentials is None:
        return grpc.aio.insecure_channel(target, options=(*options, *named))
    return grpc.aio.secure_channel(target, credentials, options=(*options, *named))


def server_options(connections_max: int = CONNECTIONS_MAX) -> Options:
    """Return the options of a server. A connection counts against `connections_max` as soon as it is accepted.
    SO_REUSEPORT is off, so a port in use is an error and is not shared."""
    return (
        *sizes(),
        *keepalive(server=True),
        ("grpc.max_allowed_incoming_connections", connections_max),
        ("grpc.max_concurrent_streams", CONNECTION_CALLS_MAX),
        ("grpc.server_handshake_timeout_ms", HANDSHAKE_MS),
        ("grpc.so_reuseport", 0),
    )


def timeout_s(timeout_ms: int) -> float:
    """Return the timeout of a request in seconds. `timeout_ms` is the requested timeout; 0 selects the default. A
    timeout above TIMEOUT_MAX_MS is reduced to it."""
    return min(timeout_ms or TIMEOUT_DEFAULT_MS, TIMEOUT_MAX_MS) / 1000
