"""A rate limit for log lines that unauthenticated peers can cause. After a burst, it allows one line per second, which
says how many lines were suppressed."""

from __future__ import annotations

import asyncio
import logging

BURST = 20
"""Maximum number of lines in a burst. The budget grows by one line per second."""


class RateLimitedLog:
    """Limits the rate of lines to one logger. Suppressed events are only counted in the bookie's statistics."""

    def __init__(self, log: logging.Logger) -> None:
        self._log = log
        self._budget = float(BURST)
        self._refilled_at = 0.0
        self._left_out = 0

    def emit(self, level: int, message: str, *values: object) -> None:
        now = asyncio.get_running_loop().time()
        self._budget = min(BURST, self._budget + now - self._refilled_at)
        self._refilled_at = now
        if self._budget < 1:
            self._left_out += 1
            return
        self._budget -= 1
        if self._left_out:
            message, values = message + " (and %d lines like this)", (*values, self._left_out)
            self._left_out = 0
        self._log.log(level, message, *values)
