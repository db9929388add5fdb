"""A metadata store with a hundred thousand ledgers: the cost of a round of the auditor, and the effects of a lost
bookie that all of them name."""

from __future__ import annotations

import asyncio
import itertools
import re
import time
from collections.abc import Callable
from contextlib import suppress

import psutil

from kvstore.client import AsyncClient
from kvstore.devcluster import zookeeper
from kvstore.errors import StoreError
from kvstore.meta.address import MetadataKind
from kvstore.meta.ledgers import LedgerStore
from kvstore.meta.store import MetadataStore
from kvstore.meta.underreplication import Underreplication
from kvstore.types import NO_ENTRY, BookieId, EntryId, Fragment, LedgerId, LedgerMetadata, Quorum
from loadtest.drills.repair_stage import RepairStage

FIRST = 1_000_000
MAKERS = 64
"""Number of creations in flight."""
ROUND_READS_PER_S = 1_000
MEMORY_MAX_MIB = 100.0
"""Maximum memory that a round may add to the auditor's process."""
LAG_MAX_S = 0.25
PULSE_S = 0.1
REPAIRED_MAX_S = 1_800.0
_METRIC = r"^kvstore_process_loop_lag_max_seconds (\S+)"


async def make_ledgers(store: MetadataStore, bookies: list[BookieId], count: int) -> None:
    """Create closed ledgers without entries, each on three of the bookies, as a creator stores them."""
    ledgers, numbers = LedgerStore(store), itertools.count()
    trios = list(itertools.permutations(bookies, 3))

    async def make() -> None:
        while (number := next(numbers)) < count:
            fragments = (Fragment(first=EntryId(0), ensemble=trios[number % len(trios)]),)
            opened = LedgerMetadata(LedgerId(FIRST + number), Quorum(3, 3, 2), fragments, token=number + 1)
            await ledgers.create(opened.closed(NO_ENTRY, 0))

    await asyncio.gather(*(make() for _ in range(MAKERS)))


class Watching:
    """The maximum size of each node and the longest delay of its event loop during the drill."""

    def __init__(self, stage: RepairStage) -> None:
        self._stage = stage
        self.rss_mib: dict[str, float] = {}
        self.lag_s: dict[str, float] = {}

    def look(self) -> None:
        for node in self._stage.cluster.ids:
            with suppress(OSError, psutil.Error):
                process = psutil.Process(self._stage.cluster.pid(node))
                size = process.memory_info().rss / (1 << 20)
                self.rss_mib[node] = max(size, self.rss_mib.get(node, 0.0))
                lag = re.search(_METRIC, self._stage.cluster.http(node, "/metrics").decode(), re.MULTILINE)
                self.lag_s[node] = max(float(lag[1]) if lag else 0.0, self.lag_s.get(node, 0.0))


async def many_ledgers(stage: RepairStage) -> None:
    """Run a round of a new auditor over 100,000 ledgers. Then lose a bookie that most of them name."""
    count = stage.counts.ledgers
    bookies = sorted((await stage.bookies()).writable)
    began = time.perf_counter()
    await stage.with_store(lambda store: make_ledgers(store, bookies, count))
    stage.log(f"{count} ledgers made in {time.perf_counter() - began:.0f} s")
    pulse = asyncio.create_task(_put_on(stage))
    try:
        await _rounds(stage, count)
    finally:
        pulse.cancel()
    longest_s, puts, failed = await pulse
    stage.report.add(f"meanwhile: the longest of {puts} puts, one after the other", longest_s, unit="s")
    stage.report.add("meanwhile: puts that failed, which count for the longest too", failed)


async def _put_on(stage: RepairStage) -> tuple[float, int, int]:
    """Put ten times a second until cancelled. Return the longest put in seconds, the number of puts, and the number
    of failed ones."""
    longest_s, number, failed = 0.0, 0, 0
    while True:
        began = time.perf_counter()
        try:
            async with AsyncClient(stage.cluster.url) as client:
                while True:
                    began = time.perf_counter()
                    await client.put(b"pulse", b"%d" % number)
                    longest_s = max(longest_s, time.perf_counter() - began)
                    number += 1
                    await asyncio.sleep(PULSE_S)
        except asyncio.CancelledError:
            return longest_s, number, failed
        except StoreError as error:
            longest_s, number, failed = max(longest_s, time.perf_counter() - began), number + 1, failed + 1
            stage.log(f"a put failed after {time.perf_counter() - began:.1f} s: {error!r}")


async def _rounds(stage: RepairStage, count: int) -> None:
    auditor = _auditor(stage)
    await asyncio.to_thread(stage.cluster.terminate, auditor)  # the next one begins with a round
    began, requests = time.perf_counter(), _requests(stage)
    watching = Watching(stage)
    watching.look()
    before = dict(watching.rss_mib)
    await stage.start_again(auditor)
    await _until(stage, watching, lambda: _audits(stage) > 0, 6 * count / ROUND_READS_PER_S + 60)
    took = time.perf_counter() - began
    now = _auditor(stage)
    stage.report.add(f"a round over {count} ledgers", took, most=2 * count / ROUND_READS_PER_S + 20, unit="s")
    asked = (_requests(stage) - requests) / took
    stage.report.add("requests of all sessions to the metadata store meanwhile", asked, unit="/s")
    grown = watching.rss_mib[now] - before.get(now, watching.rss_mib[now])
    stage.report.add(f"memory of the auditor {now}: grown by", grown, most=MEMORY_MAX_MIB, unit="MiB")
    stage.report.add(f"memory of the auditor {now}: largest", watching.rss_mib[now], unit="MiB")
    stage.report.add(f"longest delay of the auditor's event loop {now}", watching.lag_s[now], most=LAG_MAX_S, unit="s")
    await _lose_one(stage, count, now)


async def _lose_one(stage: RepairStage, count: int, auditor: str) -> None:
    victim = next(each for each in stage.cluster.ids if each != auditor)
    lost = await stage.bookie_of(victim)
    await stage.destroy(victim)
    began, watching = time.perf_counter(), Watching(stage)
    await stage.start_again(victim)
    peak, seen_at = 0, began
    is_marked = False
    while time.perf_counter() - began < REPAIRED_MAX_S:
        await asyncio.to_thread(watching.look)
        marked = await stage.with_store(_count_marks)
        peak = max(peak, marked)
        is_marked = is_marked or marked > 0
        if is_marked and not marked and not await stage.with_store(lambda store: _naming(store, lost)):
            break
        if time.perf_counter() - seen_at > 15:
            seen_at = time.perf_counter()
            stage.log(f"{seen_at - began:.0f} s: {marked} marked; loop {watching.lag_s}; MiB {watching.rss_mib}")
        await asyncio.sleep(2)
    took = time.perf_counter() - began
    stage.report.add(f"a bookie of {count} ledgers lost: all whole after", took, most=REPAIRED_MAX_S, unit="s")
    stage.report.add("marks at once, at most", peak)
    for node in stage.cluster.ids:
        lag, size = watching.lag_s.get(node, 0.0), watching.rss_mib.get(node, 0.0)
        stage.report.add(f"longest delay of the event loop of {node}", lag, most=LAG_MAX_S, unit="s")
        stage.report.add(f"largest size of {node}", size, unit="MiB")


async def _count_marks(store: MetadataStore) -> int:
    return len([ledger async for ledger in Underreplication(store).marked_ledgers()])


async def _naming(store: MetadataStore, bookie: BookieId) -> bool:
    """Return True if one of the ledgers made last still names the bookie."""
    ledgers = LedgerStore(store)
    for ledger in (await ledgers.list_ids())[-50:]:
        if any(bookie in each.ensemble for each in (await ledgers.read(ledger))[0].fragments):
            return True
    return False


async def _until(stage: RepairStage, watching: Watching, condition: Callable[[], bool], most_s: float) -> None:
    until = time.perf_counter() + most_s
    while not condition() and time.perf_counter() < until:
        await asyncio.to_thread(watching.look)
        await asyncio.sleep(1)


def _auditor(stage: RepairStage) -> str:
    """Return the node that is the auditor."""
    until = time.perf_counter() + 60
    while time.perf_counter() < until:
        for node in stage.cluster.ids:
            with suppress(OSError, KeyError):
                if stage.cluster.status(node)["auditor"]["active"]:
                    return node
        time.sleep(0.2)
    raise TimeoutError("nobody is auditor")


def _audits(stage: RepairStage) -> int:
    """Return the number of completed rounds, according to the status of the auditor."""
    found = 0
    for node in stage.cluster.ids:
        with suppress(OSError, KeyError):
            found += stage.cluster.status(node)["auditor"]["rounds_total"]
    return found


def _requests(stage: RepairStage) -> int:
    """Return the number of packets that ZooKeeper has received; 0 for other stores."""
    file = stage.cluster.file
    if file.store.kind is not MetadataKind.ZOOKEEPER:
        return 0
    said = zookeeper.four_letters(file.store.hosts[0], "mntr")
    found = re.search(r"^zk_packets_received\s+(\d+)", said, re.MULTILINE)
    return int(found[1]) if found else 0
