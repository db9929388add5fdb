"""How our gRPC channels and servers are set up: sizes, keepalive, reconnection. Both ends here: they must agree."""

from __future__ import annotations

from typing import Any, cast

import grpc

from kvstore.env.tls import Tls
from kvstore.rpc.login import LoggedInChannel, Login, login_of_environment

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

Options = tuple[tuple[str, Any], ...]


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
    """A blocking client's channel, whose calls carry the login: None is that of the environment. Raises OSError if a
    TLS file cannot be read, ConfigError."""
    options = (*channel_options(), *more)
    if tls is None:
        channel = grpc.insecure_channel(address, options=options)
    else:
        channel = grpc.secure_channel(address, grpc.ssl_channel_credentials(*tls.contents()), options=options)
    login = login or login_of_environment()
    return channel if login is None else cast("grpc.Channel", LoggedInChannel(channel, login))


def open_aio_channel(address: str, tls: Tls | None, login: Login | None = None) -> grpc.aio.Channel:
    """The same on asyncio."""
    options = channel_options()
    if tls is None:
        channel = grpc.aio.insecure_channel(address, options=options)
    else:
        channel = grpc.aio.secure_channel(address, grpc.ssl_channel_credentials(*tls.contents()), options=options)
    login = login or login_of_environment()
    return channel if login is None else cast("grpc.aio.Channel", LoggedInChannel(channel, login))


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
