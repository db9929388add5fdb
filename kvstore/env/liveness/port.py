"""Liveness: the port by which parts of a node report that they work, and ask whether it may keep its session."""

from __future__ import annotations

from collections.abc import Callable

GiveUp = Callable[[], bool]
"""Ends a metadata session without the event loop. Called repeatedly while the evidence fails, by the watchdog's thread.
Must not block. Returns True once no heartbeat can follow."""
Hung = Callable[[str], None]
"""Receives the reason why a directory is abandoned."""


class Liveness:
    """Evidence that this process works (docs/protocol.md, P45). This class watches nothing, so nothing ever fails: for
    tools, and for processes without a metadata session."""

    @property
    def failure(self) -> str:
        """Reason why the process may have no metadata session now; empty if it may."""
        return ""

    def beat(self) -> None:
        """Record that the event loop turns."""

    def watch_disk(self, path: str, on_hung: Hung | None = None) -> None:
        """Require that the disk of the directory `path` completes writes. With `on_hung` the process can do without the
        directory: if it hangs while another such directory works, `on_hung` is called on the event loop, and the
        directory is no longer watched."""

    def disk_works(self, path: str) -> None:
        """Record that a write into the watched directory has been completed."""

    def add_session(self, give_up: GiveUp) -> Callable[[], None]:
        """Call `give_up` while the evidence fails. Returns the function that undoes this."""
        return lambda: None

    def statistics(self) -> dict[str, float]:
        """Return the metrics."""
        return {}


UNWATCHED = Liveness()
"""Stateless, so all may share it."""
