"""Supervises the processes of one machine: starts them with configurations that are derived from one file, restarts a
process that ends or hangs, and stops all of them together.

A process that ends takes only its own partitions along, and those have replicas on other machines. So the others keep
running, and this one is started again, later and later while it keeps ending early. The supervisor holds no state that
outlives it. When it ends, the kernel ends its children (kvstore/env/parent.py).

Each process reports to the supervisor as a node reports to systemd (supervisor.py), over a socket pair. The supervisor
reports their state to its own supervisor. Standard output and error are shared, so that no line passes through here.
"""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import socket
import sys
from asyncio.subprocess import Process
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from random import Random
from typing import BinaryIO

from kvstore import config as toml
from kvstore.backoff import delays
from kvstore.env.disk import lock_dir
from kvstore.env.events import wait_within
from kvstore.env.files.private import private_folder
from kvstore.env.log_output import open_log
from kvstore.env.parent import LINK
from kvstore.server.config import NodeConfig
from kvstore.server.processes import configs_of
from kvstore.server.supervisor import ENDED, WATCHDOG_USEC, supervisor_of

log = logging.getLogger(__name__)

AGAIN_FIRST_S, AGAIN_MAX_S = 0.5, 30.0
"""Bounds of the longest delay until a process that has ended is started again. The delay is drawn from zero on."""
LASTING_S = 60.0
"""Seconds after which a process counts as started well, so that the delays begin again."""
HUNG_S = 60.0
"""Seconds without a message after which a process is killed. It sends three in this time, from its first second on,
whatever it waits for."""
LATE_S = 5.0
"""Seconds by which a timer of this process is late if the process was paused, perhaps together with the others."""
STOP_S = 16.0
"""Seconds for all processes to end. A node ends itself after 12 s, and systemd waits for 20 s."""
LOCK = "supervisor"
"""Directory below the data directory that the supervisor locks. The data directory itself belongs to the first
process."""
_MESSAGE_BYTES = 4_096


def run_host(config: NodeConfig) -> None:
    """Run the processes of a machine until SIGTERM or SIGINT. Raises ConfigError with all faults, OSError."""
    configs = configs_of(replace(config, data_dir=config.data_dir.absolute()))
    private_folder(configs[0].data_dir)
    open_log(config.log_output, process=f"{config.id}.{LOCK}", directory=config.log_dir, is_shared=True)
    lock = lock_dir(configs[0].data_dir / LOCK)
    try:
        asyncio.run(_run(configs))
    finally:
        lock.close()
        logging.shutdown()


async def _run(configs: Sequence[NodeConfig]) -> None:
    loop, stop = asyncio.get_running_loop(), asyncio.Event()
    supervisor = supervisor_of(os.environ)  # before the children inherit the environment
    children = [_Child(each) for each in configs]
    for which in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(which, stop.set)
    loop.add_signal_handler(signal.SIGHUP, _hang_up, children)
    tasks = [loop.create_task(each.keep(stop)) for each in children]
    reporting = None

    def not_ready() -> list[str]:
        return [f"{each.id}: {each.reason}" for each in children if each.state]

    if supervisor is not None:
        reporting = loop.create_task(supervisor.follow(not_ready, stop))
    stopping = loop.create_task(stop.wait())
    try:
        await asyncio.wait([stopping, *tasks], return_when=asyncio.FIRST_COMPLETED)
        stop.set()  # also if a task failed, which its result raises below
        log.info("stopping processes=%d", len(children))
        _signal(children, signal.SIGTERM)
        _, late = await asyncio.wait(tasks, timeout=STOP_S)
        if late:
            log.error("killing what has not stopped within %g s", STOP_S)
        _signal(children, signal.SIGKILL)
        await asyncio.gather(*tasks)
    finally:
        if reporting is not None:
            reporting.cancel()
    log.info("stopped processes=%d", len(children))


def _signal(children: Sequence[_Child], which: signal.Signals) -> None:
    for each in children:
        each.signal(which)


def _hang_up(children: Sequence[_Child]) -> None:
    """Notify the processes of new certificates. The signal would end a process that does not handle it yet. Such a
    process has not reported, and reads the certificates later."""
    for each in children:
        if each.has_reported:
            each.signal(signal.SIGHUP)


class _Child:
    """One process of the machine, over all its restarts."""

    def __init__(self, config: NodeConfig) -> None:
        self.id, self._config = config.id, config
        self.state = "starting"
        """The condition that the process waits for; empty once it is ready."""
        self.has_reported = False
        """True if the running process has sent a message."""
        self._ended = ""
        """How the process ended before; empty once it is ready again."""
        self._process: Process | None = None
        self._silence: asyncio.TimerHandle | None = None
        """The timer that fires when the process has sent no message for too long."""

    @property
    def reason(self) -> str:
        """Return why the process is not ready. If it ended before, include how: a process that keeps ending is
        starting most of the time."""
        if not self._ended or self.state.startswith(self._ended):
            return self.state
        return f"{self.state}, after it {self._ended}"

    async def keep(self, stop: asyncio.Event) -> None:
        """Run the process, and again whenever it ends, until `stop` is set and it has ended."""
        now, random = asyncio.get_running_loop().time, Random()
        pauses = delays(random, first_s=AGAIN_FIRST_S, cap_s=AGAIN_MAX_S)
        while not stop.is_set():
            began = now()
            why = await self._run_once(stop)
            if stop.is_set():
                return
            if now() - began >= LASTING_S:
                pauses = delays(random, first_s=AGAIN_FIRST_S, cap_s=AGAIN_MAX_S)
            pause_s = next(pauses)
            self._ended, self.state = why, f"{why}, starting it again"
            log.error("process=%s %s, starting it again in %.1f s", self.id, why, pause_s)
            await wait_within(stop, pause_s)

    def signal(self, which: signal.Signals) -> None:
        """Send a signal to the process if it runs."""
        if self._process is not None:
            with suppress(ProcessLookupError):
                self._process.send_signal(which)

    async def _run_once(self, stop: asyncio.Event) -> str:
        """Run the process until it ends. Return how it ended."""
        self.has_reported = False
        try:
            mine, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        except OSError as error:
            return f"cannot be started: {error}"
        loop = asyncio.get_running_loop()
        try:
            with theirs, _file_of(self._config) as file:
                self._process = process = await asyncio.create_subprocess_exec(
                    sys.executable,
                    "-Pm",
                    "kvstore",
                    "node",
                    "run",
                    "--config",
                    "/dev/stdin",
                    "--set",
                    f"id={self.id}",  # the id is for `ps`
                    stdin=file,
                    pass_fds=(theirs.fileno(),),
                    env={**os.environ, LINK: str(theirs.fileno()), WATCHDOG_USEC: str(round(HUNG_S * 1e6))},
                )
            log.info("process=%s pid=%d started", self.id, process.pid)
            if stop.is_set():
                self.signal(signal.SIGTERM)
            mine.setblocking(False)
            self._expect_message()
            loop.add_reader(mine, self._read_message, mine)
            try:
                status = await process.wait()
            finally:
                while self._read_message(mine):  # its last message says why it ended
                    pass
                self._expect_none()
                loop.remove_reader(mine)
                self._process = None
        except OSError as error:
            return f"cannot be started: {error}"
        finally:
            mine.close()
        if status < 0:
            return f"was ended by {signal.Signals(-status).name}"
        reason = f": {self.state.removeprefix(ENDED)}" if self.state.startswith(ENDED) else ""
        return f"ended with exit code {status}{reason}"

    def _read_message(self, link: socket.socket) -> bool:
        """Read one message of the process. Return False if there is none."""
        try:
            data = link.recv(_MESSAGE_BYTES)
        except (BlockingIOError, ConnectionResetError):
            return False
        if not data:  # it has ended
            asyncio.get_running_loop().remove_reader(link)
            return False
        self.has_reported = True
        self._expect_message()
        for line in data.decode(errors="replace").splitlines():
            name, _, value = line.partition("=")
            if name == "STATUS":
                self.state = "" if value == "ready" else value
                self._ended = self._ended if self.state else ""
        return True

    def _expect_message(self) -> None:
        self._expect_none()
        self._silence = asyncio.get_running_loop().call_later(HUNG_S, self._hung)

    def _expect_none(self) -> None:
        if self._silence is not None:
            self._silence.cancel()

    def _hung(self) -> None:
        loop = asyncio.get_running_loop()
        if self._silence is not None and loop.time() - self._silence.when() > LATE_S:
            log.warning("process=%s has sent no message while this process was paused, waiting for one", self.id)
            self._expect_message()
            return
        log.error("process=%s hangs: no message for %g s, killing it", self.id, HUNG_S)
        self.signal(signal.SIGKILL)


def _file_of(config: NodeConfig) -> BinaryIO:
    """Return a file in memory with a configuration. So a process that is started again has the configuration of the
    others, even if the file on the disk has changed."""
    file = os.fdopen(os.memfd_create("node.toml"), "w+b")
    file.write(toml.to_toml(config).encode())
    file.flush()
    return file
