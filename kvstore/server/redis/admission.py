"""Chooses the connections to let in when the Redis port has as many clients as it may: other servers, which speak over
it too."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from enum import Enum, auto

SERVERS_MAX = 64
"""Connections beyond the limit of clients that may be on trial at a time. When one more comes, one is closed of the
address that has most of these places: a proof takes two round trips, and strangers may come as fast as they like."""
TRIAL_S = 0.1
"""How long one of them may take to show that it is another server's."""
REFUSAL = b"-ERR max number of clients reached\r\n"
_GREETING = b"*6\r\n$12\r\nKVSTORE.PEER\r\n"


class ClientAdmission(Enum):
    """The ways in which a new connection is let in."""

    YES = auto()
    IF_SERVER = auto()
    NO = auto()


class ServerTrial:
    """The trial of one connection, until its first bytes or its end. `refuse` is called if none come in time."""

    def __init__(self, refuse: Callable[[], None]) -> None:
        self._timer = asyncio.get_running_loop().call_later(TRIAL_S, refuse)

    def is_server(self, data: bytes) -> bool:
        """Whether a connection that begins with `data` is another server's."""
        return data.startswith(_GREETING)

    def end(self) -> None:
        self._timer.cancel()
