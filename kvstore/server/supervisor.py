"""Tells the supervisor that started this process, systemd or one that speaks like it, when the node is ready, what it
waits for, that its event loop runs, and that it stops (sd_notify(3)). Without NOTIFY_SOCKET nobody is told.
"""

from __future__ import annotations

import asyncio
import logging
import os
import socket
from collections.abc import Callable, MutableMapping

from kvstore.env.events import wait_within

log = logging.getLogger(__name__)

LOOK_S = 0.5
"""Between two looks at whether the node is ready; what is said is said when it changes."""
PINGS = 3
"""In the time after which a silent process is ended: one that is late, or lost, costs nothing."""
STATUS_CHARS_MAX = 500
NOTIFY_SOCKET, WATCHDOG_USEC, WATCHDOG_PID = "NOTIFY_SOCKET", "WATCHDOG_USEC", "WATCHDOG_PID"


class Supervisor:
    """One that listens at a datagram socket. Nothing here raises: a node that serves is not ended for that."""

    def __init__(self, address: str, watchdog_s: float | None = None) -> None:
        """`address` is a path, or begins with @ (an abstract socket). `watchdog_s`: after so long without a word the
        process is ended."""
        self._address = "\0" + address[1:] if address.startswith("@") else address
        self._watchdog_s = watchdog_s
        self._failed = False
        self._sent_status = ""
        self._is_ready = False

    async def follow(
        self, not_ready: Callable[[], list[str]], stop: asyncio.Event, is_live: Callable[[], bool] = lambda: True
    ) -> None:
        """Say how the node is until the task is cancelled; `stop` is set when it is told to stop. Nothing is said to
        the supervisor's watchdog unless `is_live`."""
        loop = asyncio.get_running_loop()
        pause_s = LOOK_S if self._watchdog_s is None else min(LOOK_S, self._watchdog_s / PINGS)
        pinged = -float("inf")
        while not await wait_within(stop, pause_s):
            self._report_status(not_ready())
            if is_live():
                pinged = self._ping(loop.time(), pinged)
        self._send("STOPPING=1\nSTATUS=stopping")
        while True:
            pinged = self._ping(loop.time(), pinged)
            await asyncio.sleep(pause_s)

    def _report_status(self, reasons: list[str]) -> None:
        """Say what the node waits for, when it changes; and once that it is ready, which it stays for a supervisor."""
        status = " ".join("; ".join(reasons).split())[:STATUS_CHARS_MAX] or "ready"
        if status == self._sent_status:
            return
        begins = not reasons and not self._is_ready
        if self._send(f"READY=1\nSTATUS={status}" if begins else f"STATUS={status}"):
            self._sent_status = status  # else it is said again at the next look
            self._is_ready |= begins

    def _ping(self, now: float, pinged: float) -> float:
        """Say that the event loop runs, if that is due; returns when it was said last."""
        if self._watchdog_s is None or now - pinged < self._watchdog_s / PINGS:
            return pinged
        self._send("WATCHDOG=1")
        return now

    def _send(self, text: str) -> bool:
        """Tell whether it could be said."""
        try:
            with socket.socket(
                socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC | socket.SOCK_NONBLOCK
            ) as endpoint:
                endpoint.sendto(text.encode(errors="replace"), self._address)  # a path may be no UTF-8
        except OSError as error:
            if not self._failed:
                log.warning("the supervisor at %s cannot be told: %s", NOTIFY_SOCKET, error)
            self._failed = True
            return False
        return True


def supervisor_of(environ: MutableMapping[str, str], pid: int | None = None) -> Supervisor | None:
    """The supervisor that the environment names; None: nobody wants to be told. Takes the names out, so that no other
    process speaks for this one."""
    address = environ.pop(NOTIFY_SOCKET, "")
    microseconds, whose = environ.pop(WATCHDOG_USEC, ""), environ.pop(WATCHDOG_PID, "")
    if not address:
        return None
    if not address.startswith(("/", "@")) or len(address) < 2:
        log.warning("%s: want a path or an abstract socket, got %r: nobody is told", NOTIFY_SOCKET, address)
        return None
    return Supervisor(address, _watchdog_s(microseconds, whose, os.getpid() if pid is None else pid))


def _watchdog_s(microseconds: str, whose: str, pid: int) -> float | None:
    if not microseconds or (whose and whose != str(pid)):
        return None
    if not (microseconds.isascii() and microseconds.isdecimal() and int(microseconds) > 0):
        log.warning("%s: want microseconds, got %r: no watchdog", WATCHDOG_USEC, microseconds)
        return None
    return int(microseconds) / 1e6
