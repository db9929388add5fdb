"""The audit log: each admin call and each refusal as one line of JSON; of an address with very many, those that changed
something and some others.

    {"time": ms since 1970, "who": text, "from": text, "call": text, "arguments": text, "outcome": text, "why": text,
     "took_ms": number}                                          those that say nothing are left out

They go to the logger `kvstore.audit`: where the node has a directory for logs, to a file of their own there that is
rotated, and to the node's log otherwise. They name what was asked for as it was asked; no password, no hash, no value.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from dataclasses import dataclass

import orjson

from kvstore.env.networks import address_of
from kvstore.errors import StoreError
from kvstore.rpc.status import listed, reason_of

log = logging.getLogger("kvstore.audit")

LINES_MAX, LINES_S = 120, 60.0
"""Of one address within that time. What is more is counted: a flood of calls must not have the log's own rotation
remove what others did."""
ADDRESSES_MAX = 1_000
WHY_CHARACTERS_MAX = 300
NOBODY = "-"


class AuditLog:
    """The audit log of one node. `date_ms` dates its lines."""

    def __init__(self, now: Callable[[], float], date_ms: Callable[[], int]) -> None:
        self._now, self._date_ms = now, date_ms
        self._callers: dict[str, _Caller] = {}

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
        is_change: bool = False,
    ) -> None:
        """Write a line, unless its address has had too many; `is_change` is written always."""
        if not self._is_due(caller_of(address), is_change):
            return
        line: dict[str, object] = {"time": self._date_ms(), "who": who or NOBODY, "from": address, "call": call}
        if arguments:
            line["arguments"] = arguments
        line["outcome"] = outcome
        if why:
            line["why"] = why[:WHY_CHARACTERS_MAX]
        if took_ms is not None:
            line["took_ms"] = round(took_ms)
        log.info("%s", orjson.dumps(line).decode())

    def refused(self, who: str, address: str, call: str, error: StoreError) -> None:
        """Write that something was refused."""
        self.note(who, address, call, reason_of(listed(type(error))), why=str(error))

    def _is_due(self, address: str, is_change: bool) -> bool:
        caller = self._callers.get(address)
        if caller is None or self._now() - caller.since >= LINES_S:
            self._forget(address)
            if len(self._callers) >= ADDRESSES_MAX:
                self._forget(next(iter(self._callers)))
            caller = self._callers[address] = _Caller(self._now())
        if is_change or caller.lines < LINES_MAX:
            caller.lines += 1
            return True
        caller.left_out += 1
        if caller.timer is None:
            caller.timer = asyncio.get_running_loop().call_later(LINES_S, self._forget, address)
        return False

    def _forget(self, address: str) -> None:
        caller = self._callers.pop(address, None)
        if caller is None or caller.timer is None:
            return
        caller.timer.cancel()
        line = {"time": self._date_ms(), "from": address, "lines_left_out": caller.left_out, "within_s": LINES_S}
        log.warning("%s", orjson.dumps(line).decode())


def caller_of(address: str) -> str:
    """Name those whose lines are counted together: an address of a door or a login, without its port; of IPv6 the
    network, of which one machine may have every address."""
    text = address.removeprefix("ipv4:").removeprefix("ipv6:")
    if "/" in text:
        return text  # a network already
    if text.startswith("["):
        host = text[1:].partition("]")[0]
    else:
        host = text.partition(":")[0] if text.count(":") == 1 else text
    return address_of(f"ipv6:[{host}]:0").removeprefix("ipv4:") if ":" in host else host


@dataclass(slots=True)
class _Caller:
    """An address, since its first line of a minute."""

    since: float
    lines: int = 0
    left_out: int = 0
    timer: asyncio.TimerHandle | None = None
