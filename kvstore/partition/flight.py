"""An entry that is not acknowledged yet, and whom to answer when it is. Decides only."""

from __future__ import annotations

from kvstore.partition.answers import Reply
from kvstore.partition.evaluate import NextEntry


class Flight:
    """From its append to its acknowledgement."""

    __slots__ = ("made", "observed", "replies")

    def __init__(self, made: NextEntry, replies: list[Reply]) -> None:
        self.made, self.replies = made, replies
        self.observed: list[Reply] = []
        """Answers found in what this entry and those before it make of the state."""
