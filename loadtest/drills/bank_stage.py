"""The strikes on a bank while its clients work: leaders are killed and stopped, the metadata store is away, partitions
join and leave. Meanwhile snapshots are taken, which must be consistent over all partitions."""

from __future__ import annotations

import asyncio
import itertools
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Awaitable, Callable
from contextlib import suppress
from pathlib import Path
from random import Random

from kvstore.client.pinned.pins import pin_store, unpin
from kvstore.client.pinned.read import read_pinned
from kvstore.errors import StoreError
from kvstore.spark.snapshots.chains import Cut
from kvstore.spark.snapshots.directory import DirectoryStore
from kvstore.spark.snapshots.local_tables import LocalTables
from kvstore.spark.snapshots.manifest import Manifest
from kvstore.spark.snapshots.usable import usable_chain
from loadtest.drills.bank import Bank
from loadtest.drills.bank_books import Findings
from loadtest.drills.ring_stage import RingStage
from tests.cluster.harness import Cluster
from tests.waiting import wait_until

BETWEEN_S = (2.0, 6.0)
"""Pause between two strikes, in seconds."""
DOWN_S = (0.1, 3.0)
"""Time for which a killed node is down, in seconds."""
STOPPED_S = (0.3, 2.0, 12.0)
"""Times for which a process is stopped. The last one is longer than its session."""
AWAY_S = (3.0, 15.0)
"""Time for which the metadata store is away, in seconds."""
PIN_S, PIN_TTL_S = 10.0, 60.0
"""Interval of pinned reads, and how long a pin that nobody releases lasts."""
SNAPSHOTS = 8
"""Number of Spark snapshots that are begun: a full one, and incremental ones that continue it."""
POLL_S, HEALED_S, LEFT_OVER_S = 0.5, 90.0, 30.0
KILL_HOME, KILL_PARTICIPANT = "kill -9 of a home's leader", "kill -9 of a participant's leader"
STOP_HOME, STOP_PARTICIPANT = "SIGSTOP of a home's leader", "SIGSTOP of a participant's leader"
AWAY_KILLED, AWAY_STOPPED = "ZooKeeper killed", "ZooKeeper stopped"
JOINED, LEFT = "partitions joined", "partitions left"
FULL, INCREMENTAL, PINNED = "full Spark snapshots", "incremental Spark snapshots", "pinned reads"
STRIKES = (KILL_HOME, STOP_PARTICIPANT, AWAY_KILLED, KILL_PARTICIPANT, STOP_HOME, AWAY_STOPPED)


class BankStage:
    """One cluster under a bank's load. `counts` has how often everything happened."""

    def __init__(self, cluster: Cluster, stage: RingStage, bank: Bank, *, seed: int, folder: Path) -> None:
        """`folder` receives the snapshots."""
        self.cluster, self.bank = cluster, bank
        self.counts: Counter[str] = Counter()
        self.failed: Counter[str] = Counter()
        """Attempts that a strike made impossible, which were repeated."""
        self.rows_of_intents = 0
        """Number of rows of incremental snapshots that the logs lack (docs/protocol.md Tx13)."""
        self._stage, self._folder = stage, folder
        self._random = Random(seed)
        self._until = 0.0

    async def run(self, seconds: float) -> None:
        """Strike for so many seconds; at the end everything is healed. Raises TimeoutError if the cluster does not
        heal."""
        self._until = time.monotonic() + seconds
        works: tuple[Callable[[], Awaitable[None]], ...] = (self._strike, self._change_ring, self._pin, self._snapshot)
        async with asyncio.TaskGroup() as group:
            for work in works:
                group.create_task(work())
        await asyncio.to_thread(self.cluster.wait_ready, timeout_s=HEALED_S)

    async def alone(self, seconds: float) -> None:
        """Let the clients work without strikes."""
        await asyncio.sleep(seconds)
        self.bank.check_running()

    async def left_over(self) -> int:
        """Return how many intents and decisions remain once all transactions have ended. Waits LEFT_OVER_S for the last
        ones to be resolved."""

        async def is_none_left() -> bool:
            return not await asyncio.to_thread(self._standing)

        with suppress(TimeoutError):
            await wait_until(is_none_left, timeout_s=LEFT_OVER_S)
        return await asyncio.to_thread(self._standing)

    def _standing(self) -> int:
        reports = [each for node in self.cluster.ids for each in self.cluster.status(node)["partitions"].values()]
        leading = [each["leading"] for each in reports if each["leading"]]
        return sum(each["intents"] + each["decisions"] for each in leading)

    @property
    def _is_over(self) -> bool:
        return time.monotonic() >= self._until

    # ── strikes on processes ──────────────────────────────────────────────────────────────────────────────────────────

    async def _strike(self) -> None:
        while not self._is_over:
            for strike in self._random.sample(STRIKES, len(STRIKES)):
                await asyncio.sleep(self._random.uniform(*BETWEEN_S))
                self.bank.check_running()
                if self._is_over:
                    break
                self._stage.log(f"{strike}; {len(self.bank.commits)} transfers so far")
                if strike in (AWAY_KILLED, AWAY_STOPPED):
                    await self._take_metadata_away(strike)
                else:
                    await self._strike_leader(strike)

    async def _strike_leader(self, strike: str) -> None:
        is_home = strike in (KILL_HOME, STOP_HOME)
        node = await self._leader(is_home=is_home)
        if strike in (KILL_HOME, KILL_PARTICIPANT):
            await asyncio.to_thread(self.cluster.kill, node)
            await asyncio.sleep(self._random.uniform(*DOWN_S))
            await asyncio.to_thread(self.cluster.start_node, node)
        else:
            self.cluster.pause(node)
            await asyncio.sleep(self._random.choice(STOPPED_S))
            self.cluster.resume(node)
        self.counts[strike] += 1
        await asyncio.to_thread(self.cluster.wait_ready, node, timeout_s=HEALED_S)

    async def _leader(self, *, is_home: bool) -> str:
        """Return the node that leads the home, or a participant, of a transfer that is being carried out at this
        moment."""
        until = time.monotonic() + HEALED_S
        while time.monotonic() < until:
            leaders = await asyncio.to_thread(self.cluster.leaders)
            for home, others in self.bank.in_flight.values():
                wanted = {home} if is_home or not others else others
                nodes = sorted({leaders[each] for each in wanted if each in leaders})
                if nodes:
                    return self._random.choice(nodes)
        raise TimeoutError(f"no transfer is carried out within {HEALED_S} s\n{self.cluster.last_words()}")

    async def _take_metadata_away(self, strike: str) -> None:
        away_s = self._random.uniform(*AWAY_S)
        if strike == AWAY_KILLED:
            await asyncio.to_thread(self.cluster.kill_zookeeper)
            await asyncio.sleep(away_s)
            await asyncio.to_thread(self.cluster.start_zookeeper)
        else:
            self.cluster.pause_zookeeper()
            await asyncio.sleep(away_s)
            self.cluster.resume_zookeeper()
        self.counts[strike] += 1
        await asyncio.to_thread(self.cluster.wait_ready, timeout_s=HEALED_S)

    # ── the ring ──────────────────────────────────────────────────────────────────────────────────────────────────────

    async def _change_ring(self) -> None:
        """Let a partition join and another one leave, in turn."""
        while not self._is_over:
            await asyncio.sleep(self._random.uniform(*BETWEEN_S))
            await self._change("add", "--count", "1")
            self.counts[JOINED] += 1
            await asyncio.sleep(self._random.uniform(*BETWEEN_S))
            await self._change("remove", self._random.choice(await self._partitions()))
            self.counts[LEFT] += 1

    async def _partitions(self) -> list[str]:
        while True:
            try:
                return await self._stage.partitions()
            except (StoreError, OSError):  # the metadata store is away
                await asyncio.sleep(POLL_S)

    async def _change(self, *words: str) -> None:
        """Change the ring, and wait until the moves have ended. Snapshots may hold the log of a partition that has left
        for longer."""
        self._stage.log(f"ring {' '.join(words)}")
        while True:
            try:
                await self._stage.change(*words)
                break
            except (AssertionError, StoreError) as error:
                self.failed[f"ring {words[0]}"] += 1
                self._stage.log(f"ring {words[0]}: {error!r:.200}")
        while True:
            await asyncio.sleep(POLL_S)
            try:
                if not await self._stage.open_moves():
                    break
            except StoreError:
                self.failed["ring status"] += 1

    # ── snapshots ─────────────────────────────────────────────────────────────────────────────────────────────────────

    async def _pin(self) -> None:
        """Read the whole store at one moment again and again, through a pin."""
        while not self._is_over:
            try:
                rows = await asyncio.to_thread(self._pinned_rows)
            except (StoreError, OSError):
                self.failed[PINNED] += 1
            else:
                self.counts[PINNED] += 1
                self._judge(rows, f"pinned read {self.counts[PINNED]}")
            await asyncio.sleep(PIN_S * 2 * self._random.random())

    def _pinned_rows(self) -> dict[bytes, bytes]:
        store = pin_store(self.cluster.url, ttl_s=PIN_TTL_S)
        try:
            pages = (page for split in store.splits() for page in read_pinned(split, prefix=self.bank.keys.prefix))
            return {row.key: row.value for page in pages for row in page.rows()}
        finally:
            unpin(self.cluster.url, store.id)

    async def _snapshot(self) -> None:
        """Take a full Spark snapshot and then incremental ones, at least one of each. If the logs no longer have all
        changes, because a partition has joined and left, a full one takes the place of an incremental one."""
        began, left_s = time.monotonic(), self._until - time.monotonic()
        for number in itertools.count():
            await asyncio.sleep(max(0.0, began + left_s * (0.1 + number / SNAPSHOTS) - time.monotonic()))
            if self._is_over and self.counts[FULL] and self.counts[INCREMENTAL]:
                break
            self._stage.log(f"Spark snapshot {number + 1}")
            if not await asyncio.to_thread(self._take_snapshot, is_first=number == 0):
                self.failed["Spark snapshots"] += 1
                continue
            store = DirectoryStore(self._folder / "snapshots")
            newest = store.newest()
            rows = await asyncio.to_thread(_rows_at_the_end, store, newest)
            self.counts[INCREMENTAL if newest.parent else FULL] += 1
            of_intents = sum(file.rows for file in newest.files if file.is_of_intents)
            self._stage.log(f"snapshot {newest.id}: {newest.rows} rows, {of_intents} of them by intents")
            self.rows_of_intents += of_intents
            self._judge(rows, f"snapshot {newest.id}")

    def _take_snapshot(self, *, is_first: bool) -> bool:
        """Take a snapshot by Spark. Return False if that fails."""
        place = ("--data-dir", str(self.cluster.local.data_dir))
        options = ["--to", str(self._folder / "snapshots"), "--master", "local[1]", "--nice", "0"]
        if not is_first:
            options += ["--incremental", "--or-full"]
        # Not by asyncio: uvloop forks, and a copy of a process with many gRPC threads can crash.
        done = subprocess.run(
            [sys.executable, "-m", "kvstore", "snapshot", "create", *options, *place],
            capture_output=True,
            text=True,
            check=False,
        )
        if done.returncode:
            self._stage.log(f"snapshot: {done.stderr[-500:]}")
        return done.returncode == 0

    def _judge(self, rows: dict[bytes, bytes], where: str) -> None:
        findings: Findings = self.bank.findings
        entries = findings.check_moment(self.bank.keys, rows, where)
        findings.check_outcomes(
            entries, acknowledged=(), refused=self.bank.refused, sent=self.bank.sent | set(self.bank.in_flight)
        )
        self._stage.log(f"{where}: {len(entries)} transfers; wrong so far: {dict(findings.counts)}")


def _rows_at_the_end(store: DirectoryStore, newest: Manifest) -> dict[bytes, bytes]:
    """Return what a restore of the newest snapshot writes."""
    chain = usable_chain(store, store.load_chain(newest.id), newest.id)
    batches = LocalTables().folded(store, chain, Cut()).batches()
    return {row["key"]: row["value"] for batch in batches for row in batch.to_pylist()}
