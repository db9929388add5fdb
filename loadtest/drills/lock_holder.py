"""A process that acquires a lock repeatedly and records when it believed to hold the lock:

    python -m loadtest.drills.lock_holder URL TAG FILE TTL_S GRACE_S blocking|asyncio

Each line of FILE is a fencing token and a time of the machine's boot-time clock, taken before a check that found the
lock held. Readers of the file need not trust this process: two tokens whose times overlap are two holders.
"""

from __future__ import annotations

import asyncio
import itertools
import os
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from random import Random

from kvstore.client import AsyncClient, Client
from kvstore.client.coordination import AsyncLock, AsyncSession, Lock, Session
from kvstore.errors import StoreError

NAME = b"contested"
CHECKS = 3
AGAIN_S = 0.05
"""Pause in seconds after an error, which may be caused by the death of a leader."""


class Observer:
    """The file that holders write to, one line at a time."""

    def __init__(self, file: Path) -> None:
        self._fd = os.open(file, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)

    def check(self, lock: Lock | AsyncLock, token: int) -> None:
        moment = time.clock_gettime(time.CLOCK_BOOTTIME)
        if lock.is_held:
            os.write(self._fd, b"%d %.9f\n" % (token, moment))


def checks(random: Random) -> Iterator[float]:
    """Yield pauses between checks: mostly none, so that holders change often."""
    return itertools.repeat(random.choice((0.0, 0.0, 0.0, 0.0, 0.02)), CHECKS)


def take_turns(url: str, tag: bytes, observer: Observer, ttl_s: float, grace_s: float) -> None:
    random = Random(os.getpid())
    with Client(url) as client:
        while True:
            try:
                with Session(client, tag, ttl_s=ttl_s, grace_s=grace_s) as session:
                    lock = Lock(session, NAME)
                    while session.is_alive:
                        with lock as token:
                            for pause_s in checks(random):
                                observer.check(lock, token)
                                time.sleep(pause_s)
            except StoreError:
                time.sleep(AGAIN_S)


async def take_turns_on_asyncio(url: str, tag: bytes, observer: Observer, ttl_s: float, grace_s: float) -> None:
    random = Random(os.getpid())
    async with AsyncClient(url) as client:
        while True:
            try:
                async with AsyncSession(client, tag, ttl_s=ttl_s, grace_s=grace_s) as session:
                    lock = AsyncLock(session, NAME)
                    while session.is_alive:
                        async with lock as token:
                            for pause_s in checks(random):
                                observer.check(lock, token)
                                await asyncio.sleep(pause_s)
            except StoreError:
                await asyncio.sleep(AGAIN_S)


def main(url: str, tag: str, file: str, ttl_s: str, grace_s: str, face: str) -> None:
    given = (url, tag.encode(), Observer(Path(file)), float(ttl_s), float(grace_s))
    if face == "asyncio":
        asyncio.run(take_turns_on_asyncio(*given))
    else:
        take_turns(*given)


if __name__ == "__main__":
    main(*sys.argv[1:])
