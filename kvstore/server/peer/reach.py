"""Since when each of the other servers has not been heard. Decides only.

What it knows comes from links that exist anyway: the bytes that arrive on them, their loss, and attempts to connect.
Servers use it to judge a leader and each other (docs/protocol.md, P25, P40), so it measures only time in which this
process was awake: a process that stood still has heard nobody, and that says nothing about the others.
"""

from __future__ import annotations

from kvstore.types import ServerId

LOOK_S = 0.5
"""Between two calls of `look` while a server is unheard."""
STOOD_STILL_S = 2 * LOOK_S
"""A look that comes so late shows that this process stood still, or had no turn."""


class Reach:
    """The servers that this server does not hear now, and since when. Times are seconds of the boot-time clock."""

    def __init__(self) -> None:
        self._since: dict[ServerId, float] = {}
        self._looked_at = 0.0
        self._is_looking = False

    def heard(self, server: ServerId) -> None:
        """Note that a link to the server is open."""
        self._since.pop(server, None)

    def lost(self, server: ServerId, heard_at: float, now: float) -> bool:
        """Note that the link to the server was lost, or could not be opened. `heard_at`: when the server was last heard
        on it, or when the attempt began. Return True if the caller must call `look` from now on, until `rest`."""
        must_begin, self._is_looking = not self._is_looking, True
        if must_begin:
            self._looked_at = now
        elif now - self._looked_at > STOOD_STILL_S:
            heard_at = now
        self._since.setdefault(server, heard_at)
        return must_begin

    def rest(self) -> None:
        """Note that nobody calls `look` until a server is lost again."""
        self._is_looking = False

    def look(self, now: float) -> list[ServerId]:
        """Return the unheard servers. After a standstill of this process every count begins again."""
        if now - self._looked_at > STOOD_STILL_S:
            self._since = dict.fromkeys(self._since, now)
        self._looked_at = now
        return sorted(self._since)

    def forget(self, server: ServerId) -> None:
        """Drop what is known of a server that is not registered: nobody asks about it."""
        self._since.pop(server, None)

    def unheard_s(self, server: ServerId, now: float) -> float | None:
        """Return for how many seconds the server has not been heard; None if it is heard, or nothing is known of it, or
        this process has just stood still."""
        since = self._since.get(server)
        if since is None or now - self._looked_at > STOOD_STILL_S:
            return None
        return max(0.0, now - since)
