"""The state of a bookie as health probes read it."""

from __future__ import annotations

from typing import NamedTuple


class BookieState(NamedTuple):
    """The state of the node's bookie, as Apache's StateManager reports it."""

    is_running: bool
    """False while the bookie starts, and while its node has no metadata session because a disk or the event loop
    hangs."""
    is_readonly: bool = False
    is_stopping: bool = False
    takes_copies: bool = True
    """True if recovery adds are accepted. Apache calls them high-priority writes."""
