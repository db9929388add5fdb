"""Keeps one message from filling the log: lines beyond a limit are counted instead of written. Decides only."""

from __future__ import annotations

from typing import NamedTuple

LINES_MAX, WINDOW_S = 100, 60.0
"""Maximum number of lines of one message, whatever its arguments, in a window of WINDOW_S seconds. A node may have
hundreds of partitions that all log the same once."""
MESSAGES_MAX = 1_000
"""Maximum number of messages that are counted. One more ends the window of the oldest."""


Message = tuple[str, object]
"""The logger, and the text without its arguments."""


class LeftOut(NamedTuple):
    """Lines of a message that were not written."""

    message: Message
    lines: int


class LogLimit:
    """Limits the messages of one process."""

    def __init__(self) -> None:
        self.left_out = 0
        """Total number of lines that were not written."""
        self._windows: dict[Message, list[float]] = {}
        """By message: start of its window, lines written in it, lines left out. Oldest first."""
        self._pushed_out: list[LeftOut] = []
        """Windows that ended early because there are too many. Reported with the next ones that end."""

    def admit(self, message: Message, now: float) -> bool:
        """Return True if a line of this message may be written."""
        window = self._windows.get(message)
        if window is None:
            if len(self._windows) >= MESSAGES_MAX:
                self._pushed_out += self._end(next(iter(self._windows)))
            window = self._windows[message] = [now, 0, 0]
        if window[1] < LINES_MAX:
            window[1] += 1
            return True
        window[2] += 1
        self.left_out += 1
        return False

    def ended(self, now: float) -> list[LeftOut]:
        """End the windows whose time is over, and return those in which lines were left out."""
        found, self._pushed_out = self._pushed_out, []
        while self._windows:
            message, (began, _, _) = next(iter(self._windows.items()))
            if now - began < WINDOW_S:
                break
            found += self._end(message)
        return found

    def _end(self, message: Message) -> list[LeftOut]:
        _, _, left_out = self._windows.pop(message)
        return [LeftOut(message, int(left_out))] if left_out else []
