"""The death watch of a real process: starts watcher.py beside it, and starts it again if it ends."""

from __future__ import annotations

import asyncio
import json
import logging
import os
import secrets
import sys
from asyncio.subprocess import DEVNULL, PIPE, Process
from collections.abc import Collection
from contextlib import suppress
from pathlib import Path
from typing import Any

from kvstore.env.death.port import CERTIFICATE_BYTES, DeathWatch
from kvstore.env.tls import Tls

log = logging.getLogger(__name__)

PROGRAM = Path(__file__).with_name("watcher.py")
FILES = 16
"""File descriptors that must be free for a start. If they run out during a start, uvloop leaks those of the pipes."""
AGAIN_S = 10.0
"""Seconds until a watcher that has ended is started again."""


class WatchedProcess(DeathWatch):
    """The death watch of this process, while `run` runs. If the watcher is missing when the process ends, nothing is
    published and other processes wait."""

    def __init__(self, tls: Tls | None = None) -> None:
        """`tls`: the TLS files of this node's connections to other nodes."""
        self.certificate = secrets.token_bytes(CERTIFICATE_BYTES)
        self._tls = None if tls is None or not (tls.serves or tls.ca) else tls
        self._line = b""
        self._watcher: Process | None = None
        self.started = asyncio.Event()
        """Set once the first watcher has started."""

    @property
    def watcher_pid(self) -> int | None:
        """Process id of the watcher; None while there is none."""
        return None if self._watcher is None else self._watcher.pid

    def leave(self, message: bytes, addresses: Collection[str]) -> None:
        words: dict[str, Any] = {"message": message.hex(), "addresses": sorted(addresses)}
        if (tls := self._tls) is not None:
            words["tls"] = {name: path and str(path) for name, path in zip(_PATHS, _paths(tls), strict=True)}
            words["tls"]["prefers"] = tls.admits_plain
        line = json.dumps(words).encode() + b"\n"
        if line != self._line:
            self._line = line
            self._pass_on()

    async def run(self) -> None:
        """Keep a watcher running until cancelled. The watcher stays when this process ends."""
        while True:
            try:
                await self._watch()
            except OSError as error:
                log.warning("the death watch cannot start, a failover waits for this node's leases: %s", error)
            await asyncio.sleep(AGAIN_S)

    async def _watch(self) -> None:
        """Run one watcher until it ends. Raises OSError if it cannot start."""
        itself = os.pidfd_open(os.getpid())
        try:
            _check_free_files(itself)
            self._watcher = watcher = await asyncio.create_subprocess_exec(
                sys.executable,
                "-I",
                "-S",
                str(PROGRAM),
                str(itself),
                stdin=PIPE,
                stdout=DEVNULL,
                stderr=DEVNULL,
                pass_fds=(itself,),
                start_new_session=True,
                cwd="/",
                env={},
            )
        finally:
            os.close(itself)
        self._pass_on()
        self.started.set()
        status = await watcher.wait()
        self._watcher = None
        log.warning("the death watch ended with status %d, starting it again in %g s", status, AGAIN_S)

    def _pass_on(self) -> None:
        if self._watcher is not None and self._watcher.stdin is not None and self._line:
            with suppress(OSError):  # it has just ended, and the next one receives the line
                self._watcher.stdin.write(self._line)


def _check_free_files(file: int) -> None:
    """Raise OSError unless FILES file descriptors are free. `file` is any open file."""
    copies: list[int] = []
    try:
        copies.extend(os.dup(file) for _ in range(FILES))
    finally:
        for copy in copies:
            os.close(copy)


_PATHS = ("ca", "cert", "key")


def _paths(tls: Tls) -> tuple[Path | None, ...]:
    return tuple(None if each is None else each.absolute() for each in (tls.ca, tls.cert, tls.key))


def death_watch(tls: Tls | None = None) -> WatchedProcess | None:
    """Return the death watch of this process, or None if the kernel has no pidfds."""
    try:
        os.close(os.pidfd_open(os.getpid()))
    except (AttributeError, OSError) as error:
        log.info("no death watch, a failover waits for this node's leases: %r", error)
        return None
    return WatchedProcess(tls)
