"""Audit lines that a test reads back."""

from __future__ import annotations

from typing import Any

import orjson

from kvstore.env.logs.audit_lines import AuditLines


class KeptLines(AuditLines):
    """Keeps the lines in memory. `fault` is the reason why none can be written; empty if they can be."""

    def __init__(self) -> None:
        self.lines: list[str] = []
        self.fault = ""

    def put(self, line: str) -> None:
        self.lines.append(line)

    async def write(self, line: str) -> None:
        if self.fault:
            raise OSError(self.fault)
        self.put(line)

    def documents(self) -> list[dict[str, Any]]:
        return [orjson.loads(each) for each in self.lines]
