"""The production ports of one process, and the event loop that they run on."""

from __future__ import annotations

import asyncio
import gc
import logging
import os
import sys
import threading
from collections.abc import Coroutine, Sequence
from pathlib import Path
from random import SystemRandom
from typing import Any, NoReturn, TypeVar

import uvloop

from kvstore.env.beat import BEAT_S, SharedBeat
from kvstore.env.certificates import Certificates
from kvstore.env.clock import SystemClock
from kvstore.env.disk import DirectoryDisk
from kvstore.env.networks import KnownNetworks
from kvstore.env.nursery import OnError, TaskNursery
from kvstore.env.ports import Env
from kvstore.env.starvation import LoopStarvation
from kvstore.env.syncs import Syncs, ThreadSyncs
from kvstore.env.tls import Tls
from kvstore.env.transport import TcpTransport
from kvstore.env.uring import RingSyncs

logger = logging.getLogger(__name__)
T = TypeVar("T")

EXIT_FATAL = 70
"""Exit status of a process that ended itself (EX_SOFTWARE)."""
SWITCH_INTERVAL_S = 0.0005
"""Maximum seconds that a finished sync thread waits for a busy event loop before it can report."""


def real_env(
    root: Path,
    *,
    name: str = "node",
    on_error: OnError | None = None,
    tls: Tls | Certificates | None = None,
    others: Sequence[Path] = (),
) -> Env:
    """Create the production ports of this process. Its files are below `root` and `others`.

    With `Certificates`, connections use the newest TLS files; with `Tls`, they use the files as they are now. Raises
    OSError if the root or the TLS files cannot be used.
    """
    syncs, known = best_syncs(), KnownNetworks()
    return Env(
        clock=SystemClock(),
        random=SystemRandom(),  # nobody may predict the nonces
        transport=transport_of(tls, known),
        disk=DirectoryDisk(root, syncs, others),
        nursery=TaskNursery(name, on_error=on_error),
        fatal=end_process,
        starved=LoopStarvation(),
        report_syncs=syncs.report,
        beat=SharedBeat(SystemRandom().random() * BEAT_S),
        known=known,
    )


def transport_of(tls: Tls | Certificates | None, known: KnownNetworks | None = None) -> TcpTransport:
    """Return a TCP transport, with TLS if TLS files are given. Raises OSError if the files cannot be used."""
    if tls is None:
        return TcpTransport(known=known)
    if isinstance(tls, Tls):
        return TcpTransport(
            serving=tls.server_context(),
            calling=tls.client_context(),
            lenient=tls.server_context(is_lenient=True),
            admits_plain=tls.admits_plain,
            known=known,
        )
    transport = TcpTransport(
        serving=tls.serving,
        calling=tls.calling,
        lenient=tls.lenient,
        admits_plain=tls.tls.admits_plain,
        known=known,
    )
    tls.on_change(lambda: transport.use(tls.serving, tls.calling, tls.lenient))
    return transport


def best_syncs() -> Syncs:
    """Return syncs that use io_uring if the kernel allows it, which containers often forbid, or else threads."""
    try:
        return RingSyncs()
    except OSError as error:
        logger.info("cannot use io_uring, syncing by threads: %s", error)
        return ThreadSyncs()


def end_process(message: str) -> NoReturn:
    """Log the reason and end the process at once. No `finally` block runs, and nothing can be acknowledged any
    longer. If the log cannot be written, the end is delayed by at most logs.writer.FLUSH_S."""
    logger.critical("fatal: %s", message)
    logging.shutdown()
    os._exit(EXIT_FATAL)


def end_within(seconds: float) -> None:
    """End this process after `seconds` unless it has ended by itself. The last steps of a process may block forever,
    for example if it prints an error to a standard error that is not read, or joins a thread whose disk hangs."""
    timer = threading.Timer(seconds, os._exit, (EXIT_FATAL,))
    timer.daemon = True
    timer.start()


def run(main: Coroutine[Any, Any, T]) -> T:
    """Run `main` on uvloop until it returns."""
    sys.setswitchinterval(SWITCH_INTERVAL_S)
    gc.freeze()  # imported objects stay: collecting them would stop the loop for 30 ms now and then
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        return runner.run(main)
