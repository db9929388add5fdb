"""Reports to the supervisor that started this process (systemd, a compatible one, or host.py): readiness, what the node
is waiting for, that its event loop runs, and that it stops (sd_notify(3)). Without a supervisor nothing is reported.
"""

from __future__ import annotations

import asyncio
import logging
import os
import socket
from collections.abc import Callable, MutableMapping

from kvstore.env.events import wait_within
from kvstore.env.parent import LINK

log = logging.getLogger(__name__)

POLL_S = 0.5
"""Interval of the readiness check. The status is sent when it changes."""
PINGS = 3
"""Watchdog messages per watchdog interval, so that a late or lost message costs nothing."""
STATUS_CHARS_MAX = 500
ENDED = "ended with an error: "
"""The beginning of the last status of a process that an error ends."""
NOTIFY_SOCKET, WATCHDOG_USEC, WATCHDOG_PID = "NOTIFY_SOCKET", "WATCHDOG_USEC", "WATCHDOG_PID"


class Supervisor:
    """A process supervisor that receives reports on a socket. No method raises, because a failed report must not end a
    node that serves."""

    def __init__(self, address: str | socket.socket, watchdog_s: float | None = None) -> None:
        """`address` is the path of a datagram socket, the name of an abstract one that begins with @, or this process's
        end of a socket pair. The supervisor ends the process if it receives no watchdog message for `watchdog_s`
        seconds."""
        if isinstance(address, str) and address.startswith("@"):
            address = "\0" + address[1:]
        self._address = address
        self._watchdog_s = watchdog_s
        self._failed = False
        self._sent_status = ""
        self._is_ready = False

    async def follow(
        self, not_ready: Callable[[], list[str]], stop: asyncio.Event, is_live: Callable[[], bool] = lambda: True
    ) -> None:
        """Report the node's status until the task is cancelled. `not_ready` returns why the node is not ready, and
        `stop` is set when the node is to stop. No watchdog message is sent while `is_live` returns False."""
        loop = asyncio.get_running_loop()
        pause_s = POLL_S if self._watchdog_s is None else min(POLL_S, self._watchdog_s / PINGS)
        pinged = -float("inf")
        while not await wait_within(stop, pause_s):
            self._report_status(not_ready())
            if is_live():
                pinged = self._ping(loop.time(), pinged)
        self._send("STOPPING=1\nSTATUS=stopping")
        while True:
            pinged = self._ping(loop.time(), pinged)
            await asyncio.sleep(pause_s)

    def report_end(self, error: BaseException) -> None:
        """Report the error that ends this process."""
        self._send(f"STATUS={_line(f'{ENDED}{error}')}")

    def _report_status(self, reasons: list[str]) -> None:
        """Report startup progress to the supervisor, then readiness once. Readiness is never withdrawn."""
        status = _line("; ".join(reasons)) or "ready"
        if status == self._sent_status:
            return
        begins = not reasons and not self._is_ready
        if self._send(f"READY=1\nSTATUS={status}" if begins else f"STATUS={status}"):
            self._sent_status = status  # otherwise sent again at the next check
            self._is_ready |= begins

    def _ping(self, now: float, pinged: float) -> float:
        """Send a watchdog message if it is due. `now` and `pinged` (the time of the last message) are in seconds.
        Returns the new time of the last message."""
        if self._watchdog_s is None or now - pinged < self._watchdog_s / PINGS:
            return pinged
        self._send("WATCHDOG=1")
        return now

    def _send(self, text: str) -> bool:
        """Send a report and return True, or return False if it could not be sent."""
        data = text.encode(errors="replace")  # a path may not be UTF-8
        try:
            if isinstance(self._address, socket.socket):
                self._address.send(data, socket.MSG_DONTWAIT)
                return True
            with socket.socket(
                socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC | socket.SOCK_NONBLOCK
            ) as endpoint:
                endpoint.sendto(data, self._address)
        except OSError as error:
            if not self._failed:
                log.warning("cannot reach the supervisor at %s: %s", NOTIFY_SOCKET, error)
            self._failed = True
            return False
        return True


def _line(text: str) -> str:
    """Return a status in one line that is not too long."""
    return " ".join(text.split())[:STATUS_CHARS_MAX]


def supervisor_of(environ: MutableMapping[str, str], pid: int | None = None) -> Supervisor | None:
    """Return the supervisor that the environment names, or None. The variables are removed from `environ`, so that
    no child process reports on behalf of this process."""
    address, link = environ.pop(NOTIFY_SOCKET, ""), environ.pop(LINK, "")
    microseconds, whose = environ.pop(WATCHDOG_USEC, ""), environ.pop(WATCHDOG_PID, "")
    if link:
        return Supervisor(socket.socket(fileno=int(link)), _watchdog_s(microseconds, "", 0))
    if not address:
        return None
    if not address.startswith(("/", "@")) or len(address) < 2:
        log.warning("%s: expected a path or an abstract socket, got %r; nothing is reported", NOTIFY_SOCKET, address)
        return None
    return Supervisor(address, _watchdog_s(microseconds, whose, os.getpid() if pid is None else pid))


def _watchdog_s(microseconds: str, whose: str, pid: int) -> float | None:
    if not microseconds or (whose and whose != str(pid)):
        return None
    if not (microseconds.isascii() and microseconds.isdecimal() and int(microseconds) > 0):
        log.warning("%s: expected microseconds, got %r; no watchdog messages are sent", WATCHDOG_USEC, microseconds)
        return None
    return int(microseconds) / 1e6
