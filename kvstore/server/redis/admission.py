"""Admits new connections when the Redis port already has its maximum number of clients. Other servers of the cluster
connect to this port too, and must still be able to connect."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from enum import Enum, auto

SERVERS_MAX = 64
"""Maximum number of connections on trial at a time, beyond the limit of clients. When one more arrives, a connection on
trial is closed: one of the address that has the most of them. A proof takes two round trips, and unauthenticated peers
may connect as fast as they like."""
TRIAL_S = 0.1
"""Time in seconds that a connection on trial has to send the greeting of a server."""
REFUSAL = b"-ERR max number of clients reached\r\n"
_GREETING = b"*6\r\n$12\r\nKVSTORE.PEER\r\n"


class ClientAdmission(Enum):
    """The outcome of the admission check of a new connection."""

    YES = auto()
    IF_SERVER = auto()
    NO = auto()


class ServerTrial:
    """The trial of one connection, which lasts until its first bytes arrive or the connection ends. `refuse` is
    called if no bytes arrive within TRIAL_S seconds."""

    def __init__(self, refuse: Callable[[], None]) -> None:
        self._timer = asyncio.get_running_loop().call_later(TRIAL_S, refuse)

    def is_server(self, data: bytes) -> bool:
        """Return True if a connection whose first bytes are `data` comes from another server."""
        return data.startswith(_GREETING)

    def end(self) -> None:
        self._timer.cancel()
