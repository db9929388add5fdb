"""Processes that contend for locks while they and the nodes are stopped and killed, and the records of these
processes."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from random import Random

from tests.cluster.harness import Cluster

TTL_S, GRACE_S = 1.5, 1.0
"""Times of a session in seconds. The grace is short because all nodes are on one machine and have one wall clock."""
FACES = ("blocking", "asyncio")
STRIKES = ("stop a client", "kill a leader", "kill a client", "stop a leader")
"""The strikes, in the order in which they are made."""
POLL_S = 0.2
STUCK_S = 60.0
"""Maximum time of a lock without a new holder, whatever happens."""


class Progress:
    """Records when each lock last had a new holder. Decides only."""

    def __init__(self, now: float) -> None:
        self._began = now
        self._moved: dict[str, tuple[int, float]] = {}

    def stuck(self, acquired: Mapping[str, int], now: float) -> list[str]:
        """Return the locks whose count has not risen for STUCK_S."""
        for lock, count in acquired.items():
            before, _ = self._moved.get(lock, (0, self._began))
            if count > before:
                self._moved[lock] = count, now
        return [lock for lock in acquired if now - self._moved.get(lock, (0, self._began))[1] >= STUCK_S]


class Contest:
    """`holders` processes for each of `locks` locks. At the end of the `with` block all of them are killed."""

    def __init__(
        self,
        cluster: Cluster,
        folder: Path,
        *,
        locks: int,
        holders: int,
        seed: int,
        ttl_s: float = TTL_S,
        grace_s: float = GRACE_S,
    ) -> None:
        self.cluster, self.random = cluster, Random(seed)
        self._times = str(ttl_s), str(grace_s)
        self.files = {f"lock{number}": folder / f"lock{number}" for number in range(locks)}
        self.struck: Counter[str] = Counter()
        self._faces = {(tag, number): FACES[number % 2] for tag in self.files for number in range(holders)}
        self._running: dict[tuple[str, int], subprocess.Popen[bytes]] = {}

    def __enter__(self) -> Contest:
        for tag, file in self.files.items():
            file.touch()
            for place in self._faces:
                if place[0] == tag:
                    self._start(place)
        return self

    def __exit__(self, *error: object) -> None:
        for process in self._running.values():
            process.kill()
            process.wait()

    def run(self, acquisitions: int, *, strikes_every_s: float) -> None:
        """Continue until the locks were acquired that often in total and each strike was made. Raises AssertionError
        if there is no progress."""
        progress = Progress(time.monotonic())
        strike_at = time.monotonic() + strikes_every_s
        while (done := self._counts()).total() < acquisitions or len(self.struck) < len(STRIKES):
            time.sleep(POLL_S)
            now = time.monotonic()
            stuck = progress.stuck(done, now)
            assert not stuck, f"{stuck} had no new holder for {STUCK_S:g} s: {dict(done)}, after {self.struck}"
            if now >= strike_at:
                self._strike()
                strike_at = time.monotonic() + strikes_every_s

    def _counts(self) -> Counter[str]:
        return Counter({tag: len(moments(file)) for tag, file in self.files.items()})

    def acquired(self) -> list[tuple[str, int]]:
        """Return each lock that was acquired, with its token."""
        return [(tag, token) for tag, file in self.files.items() for token in moments(file)]

    def held_twice(self) -> list[str]:
        """Return the violations: tokens that were held before the last moment of a lower token."""
        return [found for file in self.files.values() for found in overlaps(moments(file))]

    # ── strikes ──

    def _start(self, place: tuple[str, int]) -> None:
        tag, _ = place
        module = [sys.executable, "-m", "loadtest.drills.lock_holder"]
        given = [self.cluster.url, tag, str(self.files[tag]), *self._times, self._faces[place]]
        self._running[place] = subprocess.Popen([*module, *given])

    def _strike(self) -> None:
        """Stop or kill a holder, or a node that leads."""
        kind = STRIKES[self.struck.total() % len(STRIKES)]
        self.struck[kind] += 1
        if kind.endswith("client"):
            place = self.random.choice(sorted(self._running))
            process = self._running[place]
            if kind.startswith("kill"):
                process.kill()
                process.wait()
                self._start(place)
            else:
                os.kill(process.pid, signal.SIGSTOP)
                time.sleep(self.random.uniform(0.2, 2 * (TTL_S + GRACE_S)))
                os.kill(process.pid, signal.SIGCONT)
            return
        leaders = sorted(set(self.cluster.leaders().values()))
        node = self.random.choice(leaders or self.cluster.ids)
        if kind.startswith("kill"):
            self.cluster.kill(node)
            self.cluster.start_node(node)
        else:
            self.cluster.pause(node)
            time.sleep(self.random.uniform(0.2, 4.0))
            self.cluster.resume(node)
        self.cluster.wait_ready()


def moments(file: Path) -> dict[int, tuple[float, float]]:
    """Return the first and the last moment at which each token was held. A line that is still being written counts
    next time."""
    found: dict[int, tuple[float, float]] = {}
    whole, _, _ = file.read_bytes().rpartition(b"\n")
    for line in whole.splitlines():
        word, at = line.split()
        token, moment = int(word), float(at)
        first, last = found.get(token, (moment, moment))
        found[token] = min(first, moment), max(last, moment)
    return found


def overlaps(held: dict[int, tuple[float, float]]) -> list[str]:
    """Return the tokens that were held before the last moment of a lower token."""
    wrong, latest, whose = [], float("-inf"), 0
    for token, (first, last) in sorted(held.items()):
        if first <= latest:
            wrong.append(f"token {token} was held at {first:.6f}, token {whose} until {latest:.6f}")
        if last > latest:
            latest, whose = last, token
    return wrong
