"""The contents of a MARK record: a pin begins, lives longer, or ends. Decides only (docs/protocol.md, Pinned reads)."""

from __future__ import annotations

from typing import NamedTuple


class Mark(NamedTuple):
    """DO NOT CHANGE the order of the fields; new ones come last and have a default."""

    pin: str
    deadline_ms: int
    """Wall clock of the leader that logged it. 0: the pin has ended."""
    takes: bool
    """Whether the state is kept as it is here. Else only the deadline of what is kept changes."""
