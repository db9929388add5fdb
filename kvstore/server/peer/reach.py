"""Tracks how long each other server has been silent. Decides only.

The information comes from links that exist anyway: received bytes, lost links and connection attempts. Servers use it
to judge their leader and each other (docs/protocol.md, P25, P40). Only time in which this process was running counts,
because a paused process receives nothing, which tells nothing about the other servers.
"""

from __future__ import annotations

from kvstore.types import ServerId

CHECK_S = 0.5
"""Interval in seconds at which `check` is called while a server is silent."""
STALLED_S = 2 * CHECK_S
"""Delay in seconds of a call of `check` that shows that this process was paused or got no CPU time."""


class Reach:
    """The servers that are silent now, and since when. All times are seconds of the boot-time clock."""

    def __init__(self) -> None:
        self._since: dict[ServerId, float] = {}
        self._checked_at = 0.0
        self._is_checking = False

    def received(self, server: ServerId) -> None:
        """Record that a link to the server is open."""
        self._since.pop(server, None)

    def lost(self, server: ServerId, received_at: float, now: float) -> bool:
        """Record that the link to the server was lost or could not be opened. `received_at` is the time at which its
        last bytes arrived or the attempt began. Return True if the caller must now call `check` every CHECK_S seconds,
        until it calls `rest`."""
        must_begin, self._is_checking = not self._is_checking, True
        if must_begin:
            self._checked_at = now
        elif now - self._checked_at > STALLED_S:
            received_at = now
        self._since.setdefault(server, received_at)
        return must_begin

    def pause(self) -> None:
        """Record that `check` will not be called until a server is lost again."""
        self._is_checking = False

    def check(self, now: float) -> list[ServerId]:
        """Return the silent servers. After a pause of this process, every measurement restarts."""
        if now - self._checked_at > STALLED_S:
            self._since = dict.fromkeys(self._since, now)
        self._checked_at = now
        return sorted(self._since)

    def forget(self, server: ServerId) -> None:
        """Forget a server that is no longer registered."""
        self._since.pop(server, None)

    def silent_s(self, server: ServerId, now: float) -> float | None:
        """Return the seconds for which the server has been silent. Return None if it is not silent, if nothing is
        known about it, or if this process was just paused."""
        since = self._since.get(server)
        if since is None or now - self._checked_at > STALLED_S:
            return None
        return max(0.0, now - since)
