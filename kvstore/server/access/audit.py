"""The audit log: one line of JSON for each admin call and each refusal, and two for each administrative change.

    {"time": ms since 1970, "who": text, "from": text, "call": text, "arguments": text, "change": number,
     "outcome": text, "why": text, "took_ms": number}                                  empty fields are left out

An address with very many lines within a minute gets no further ones, except for changes. The lines name the request as
it was made; they contain no password, no hash and no value. They do not pass through a logger, so no log level applies
to them (kvstore/env/logs/audit_lines.py): a node with a directory for logs has a rotated file for them there, and other
nodes write them to the log.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import NamedTuple

import orjson

from kvstore.env.logs.audit_lines import AuditLines
from kvstore.env.networks import address_of
from kvstore.errors import StoreError
from kvstore.rpc.status import listed, reason_of

LINES_MAX, LINES_S = 120, 60.0
"""Maximum number of lines of one address within this many seconds. Further lines are counted, because a flood of
calls must not make the log's rotation remove the lines of others."""
ADDRESSES_MAX = 1_000
WHY_CHARACTERS_MAX = 300
NOBODY = "-"
RECENT_MAX, FIELD_CHARACTERS_MAX = 200, 300
"""Number of lines kept in memory for the dashboard, and maximum length of each of their fields."""


BEGUN = "BEGUN"
"""The outcome in the line that is written before a change is attempted."""


class CallAuthor(NamedTuple):
    """The user who made a call and the address from which it was made."""

    who: str
    """The user, or the name in the client's certificate; empty if unknown."""
    address: str


class AuditLog:
    """The audit log of one node. `date_ms` returns the wall-clock time for its lines."""

    def __init__(self, now: Callable[[], float], date_ms: Callable[[], int], lines: AuditLines) -> None:
        self._now, self._date_ms, self._lines = now, date_ms, lines
        self._addresses: dict[str, _AddressLines] = {}
        self.recent: deque[Mapping[str, object]] = deque(maxlen=RECENT_MAX)
        """The last lines, oldest first, each field shortened to FIELD_CHARACTERS_MAX."""

    def note(
        self,
        who: str,
        address: str,
        call: str,
        outcome: str,
        *,
        arguments: str = "",
        why: str = "",
        took_ms: float | None = None,
        change: int | None = None,
    ) -> None:
        """Queue a line. The line is dropped if its address has had too many, unless it belongs to a change, which
        has a number."""
        if not self._is_due(caller_of(address), is_change=change is not None):
            return
        self._lines.put(self._line(CallAuthor(who, address), call, outcome, arguments, change, why, took_ms))

    async def begin(self, by: CallAuthor, call: str, arguments: str, change: int) -> None:
        """Write the line that must precede a change, before the change is attempted. Raises OSError if the line
        cannot be written."""
        self._is_due(caller_of(by.address), is_change=True)
        await self._lines.write(self._line(by, call, BEGUN, arguments, change))

    def _line(
        self,
        by: CallAuthor,
        call: str,
        outcome: str,
        arguments: str,
        change: int | None,
        why: str = "",
        took_ms: float | None = None,
    ) -> str:
        line: dict[str, object] = {
            "time": self._date_ms(),
            "who": by.who or NOBODY,
            "from": _plain(by.address),
            "call": call,
        }
        if arguments:
            line["arguments"] = arguments
        if change is not None:
            line["change"] = change
        line["outcome"] = outcome
        if why:
            line["why"] = why[:WHY_CHARACTERS_MAX]
        if took_ms is not None:
            line["took_ms"] = round(took_ms)
        self.recent.append(
            {name: value[:FIELD_CHARACTERS_MAX] if isinstance(value, str) else value for name, value in line.items()}
        )
        return orjson.dumps(line).decode()

    def refused(self, who: str, address: str, call: str, error: StoreError) -> None:
        """Write a line for a refusal."""
        self.note(who, address, call, reason_of(listed(type(error))), why=str(error))

    def _is_due(self, address: str, *, is_change: bool) -> bool:
        caller = self._addresses.get(address)
        if caller is None or self._now() - caller.since >= LINES_S:
            self._forget(address)
            if len(self._addresses) >= ADDRESSES_MAX:
                self._forget(next(iter(self._addresses)))
            caller = self._addresses[address] = _AddressLines(self._now())
        if is_change or caller.lines < LINES_MAX:
            caller.lines += 1
            return True
        caller.left_out += 1
        if caller.timer is None:
            caller.timer = asyncio.get_running_loop().call_later(LINES_S, self._forget, address)
        return False

    def _forget(self, address: str) -> None:
        caller = self._addresses.pop(address, None)
        if caller is None or caller.timer is None:
            return
        caller.timer.cancel()
        line = {"time": self._date_ms(), "from": address, "lines_left_out": caller.left_out, "within_s": LINES_S}
        self._lines.put(orjson.dumps(line).decode())


def caller_of(address: str) -> str:
    """Return the address under which lines are counted: without the port, and for IPv6 only the network, because one
    machine may own every address of an IPv6 network."""
    text = _plain(address)
    if "/" in text:
        return text  # already a network
    if text.startswith("["):
        host = text[1:].partition("]")[0]
    else:
        host = text.partition(":")[0] if text.count(":") == 1 else text
    return address_of(f"ipv6:[{host}]:0").removeprefix("ipv4:") if ":" in host else host


def _plain(address: str) -> str:
    """Return the address without the prefix that gRPC gives it, as the other endpoints write it."""
    return address.removeprefix("ipv4:").removeprefix("ipv6:")


@dataclass(slots=True)
class _AddressLines:
    """The number of lines of one address since the first line of the current minute."""

    since: float
    lines: int = 0
    left_out: int = 0
    timer: asyncio.TimerHandle | None = None
