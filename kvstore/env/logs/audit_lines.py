"""Lines of the audit log on their way to the log writer.

Neither a logger nor a level stands between the caller and the writer, so that no setting of the log can leave audit
lines out. The writer keeps free slots for audit lines, so that a flood of log lines cannot leave them out either.
"""

from __future__ import annotations

import asyncio
import logging
from contextlib import suppress

from kvstore.env.logs.writer import LogWriter, QueuedHandler

AUDIT = "kvstore.audit"
"""The name that the audit log has in the log of a node without a directory for logs. No logger has this name."""
WRITTEN_S = 2.0
"""The longest wait for the writer thread to write one line."""


class AuditLines:
    """The destination of audit lines. This class discards them: simulated nodes have no log."""

    def put(self, line: str) -> None:
        """Queue a line. Never blocks; a line that cannot be queued is dropped and counted."""

    async def write(self, line: str) -> None:
        """Return when the line is written. Raises OSError if the line is not written within WRITTEN_S."""


class QueuedAuditLines(AuditLines):
    """Audit lines that the log writer's thread writes with the format and to the file of a handler."""

    def __init__(self, writer: LogWriter, handler: QueuedHandler) -> None:
        self._writer, self._handler = writer, handler

    def put(self, line: str) -> None:
        self._writer.put(self._handler.sink, self._formatted(line), is_audit=True)

    async def write(self, line: str) -> None:
        loop = asyncio.get_running_loop()
        written = loop.create_future()

        def settle(is_written: bool) -> None:
            if not written.done():
                written.set_result(is_written)

        def report(is_written: bool) -> None:
            with suppress(RuntimeError):  # the event loop has ended
                loop.call_soon_threadsafe(settle, is_written)

        if not self._writer.put(self._handler.sink, self._formatted(line), is_audit=True, written=report):
            raise OSError("the queue of the log is full")
        try:
            async with asyncio.timeout(WRITTEN_S):
                is_written = await written
        except TimeoutError:
            raise OSError(f"the line was not written within {WRITTEN_S:g} s") from None
        if not is_written:
            raise OSError("the write of the line failed")

    def _formatted(self, line: str) -> str:
        return self._handler.format(logging.LogRecord(AUDIT, logging.INFO, "", 0, "%s", (line,), None))
