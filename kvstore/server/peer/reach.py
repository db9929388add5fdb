"""Tracks since when each other server has been silent. Decides only.

Its information comes from links that exist anyway: received bytes, lost links and connection attempts. Servers use it
to judge a leader and each other (docs/protocol.md, P25, P40). It therefore measures only time in which this process was
running: a paused process has received nothing, which says nothing about the others.
"""

from __future__ import annotations

from kvstore.types import ServerId

LOOK_S = 0.5
"""Interval of calls of `look` while a server is unheard."""
STOOD_STILL_S = 2 * LOOK_S
"""Delay of a call of `look` that shows that this process was paused or starved."""


class Reach:
    """The servers that are silent now, and since when. Times are seconds of the boot-time clock."""

    def __init__(self) -> None:
        self._since: dict[ServerId, float] = {}
        self._looked_at = 0.0
        self._is_looking = False

    def heard(self, server: ServerId) -> None:
        """Note that a link to the server is open."""
        self._since.pop(server, None)

    def lost(self, server: ServerId, heard_at: float, now: float) -> bool:
        """Note that the link to the server was lost or could not be opened. `heard_at` is when its last bytes arrived,
        or when the attempt began. Return True if the caller must call `look` from now on, until `rest`."""
        must_begin, self._is_looking = not self._is_looking, True
        if must_begin:
            self._looked_at = now
        elif now - self._looked_at > STOOD_STILL_S:
            heard_at = now
        self._since.setdefault(server, heard_at)
        return must_begin

    def rest(self) -> None:
        """Note that `look` is not called until a server is lost again."""
        self._is_looking = False

    def look(self, now: float) -> list[ServerId]:
        """Return the unheard servers. After a pause of this process every measurement restarts."""
        if now - self._looked_at > STOOD_STILL_S:
            self._since = dict.fromkeys(self._since, now)
        self._looked_at = now
        return sorted(self._since)

    def forget(self, server: ServerId) -> None:
        """Forget a server that is not registered."""
        self._since.pop(server, None)

    def unheard_s(self, server: ServerId, now: float) -> float | None:
        """Return for how many seconds the server has been silent; None if it is not, if nothing is known, or if this
        process was just paused."""
        since = self._since.get(server)
        if since is None or now - self._looked_at > STOOD_STILL_S:
            return None
        return max(0.0, now - since)
