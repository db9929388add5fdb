"""Repair drills: destroyed bookies, the rate of repair, restarts that copy nothing, and an auditor or a worker that is
paused while it works."""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import Awaitable, Callable
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

from kvstore.cli.cluster import ClusterOptions, Tools, with_tools
from kvstore.errors import BookieError
from kvstore.meta.ledgers import LedgerStore
from kvstore.meta.registration import RegistrationClient
from kvstore.meta.store import MetadataStore
from kvstore.meta.underreplication import Underreplication
from kvstore.types import BookieId, LedgerId
from kvstore.wal.bookies import BookieClients
from kvstore.wal.placement import machine_of_bookie
from loadtest.drills.load import Load
from loadtest.drills.many_ledgers import many_ledgers
from loadtest.drills.repair_stage import ANSWER_S, COMPLETE_MAX_S, SUPERVISOR_S, Made, RepairStage

WRITE = 3
MIB = 1 << 20
RATE = MIB // 2
RATE_SHARE_LEAST, RATE_SHARE_MOST = 0.8, 1.001
SESSION_S = 6.0
TAKEN_OVER_MAX_S = SESSION_S + 9.0
"""The session's end as ZooKeeper sees it, the next poll of the other candidate or worker, and its work."""
ZONES = {"n1": "a", "n2": "b", "n3": "c", "n4": "a", "n5": "b"}
BUSY_LEAST_S = 1.0
AWAY_S = 10.0
SETTLE_S = 15.0
SETTLED_MAX_S = 60.0
STOPS_TRIED_MAX = 4

# ── bookies destroyed ─────────────────────────────────────────────────────────────────────────────────────────────────


async def destroyed(stage: RepairStage, at_once: int) -> None:
    """Destroy the data of `at_once` nodes under load, several times, each time of other nodes. Their supervisor
    restarts them, and no command is run."""
    await stage.stand_in_zones({node: ZONES[node] for node in stage.cluster.ids})
    await stage.fill(stage.counts.filled_mib * MIB)
    name = f"{at_once} destroyed, {stage.counts.disks} times"

    async def work(load: Load) -> None:
        victims = itertools.cycle(stage.cluster.ids)
        for number in range(stage.counts.disks):
            chosen = list(itertools.islice(victims, at_once))
            before, began = await asyncio.to_thread(stage.copied.total), time.perf_counter()
            await stage.destroy(*chosen)
            await asyncio.sleep(SUPERVISOR_S)
            for node in chosen:
                await stage.start_again(node)
            up = time.perf_counter() - began
            await stage.wait_complete(write=WRITE, zones=WRITE)
            took, made = time.perf_counter() - began, await asyncio.to_thread(stage.copied.total) - before
            gaps = [load.longest_gap(each, began, time.perf_counter())[0] for each in load.partitions]
            what = f"{name}: round {number + 1} ({', '.join(chosen)})"
            stage.report.add(f"{what}: up again after", up, unit="s")
            stage.report.add(
                f"{what}: every ledger whole and in {WRITE} zones after", took, most=COMPLETE_MAX_S, unit="s"
            )
            stage.report.add(f"{what}: copies made", made.copies, least=1)
            stage.report.add(f"{what}: bytes copied", made.bytes / MIB, unit="MiB")
            stage.report.add(f"{what}: longest gap between acknowledged writes", max(gaps), unit="s")

    await stage.under_load(name, work)
    faults = await stage.faults(write=WRITE, zones=WRITE)
    stage.report.add_safety(f"{name}: ledgers without {WRITE} copies in {WRITE} zones", len(faults))
    await _check_as_operator(stage, name)
    await stage.check_files(name)


async def _check_as_operator(stage: RepairStage, name: str) -> None:
    """Check that lost bookies are listed as away and named by no ledger, until they are decommissioned."""
    until = time.perf_counter() + SETTLED_MAX_S
    while True:  # a bookie may have lost its session just now, or be late for a copy
        listed = {each["id"]: each for each in await asyncio.to_thread(stage.command, "bookie", "list")}
        wrong = [each for each in stage.lost if listed.get(each, {}).get("ledgers") != 0 or listed[each]["address"]]
        status = await asyncio.to_thread(stage.command, "autorecovery", "status")
        if not (wrong or status["marked_ledgers"] or status["away"]) or time.perf_counter() > until:
            break
        await asyncio.sleep(1)
    for each in wrong:
        stage.log(f"bookie list: {listed.get(each)}")
    stage.report.add(
        f"{name}: lost bookies that `bookie list` shows as anything but away, without ledgers", len(wrong), most=0
    )
    stage.report.add(f"{name}: ledgers that lack copies by `autorecovery status`", status["marked_ledgers"], most=0)
    stage.report.add(f"{name}: bookies away that ledgers name", len(status["away"]), most=0)


# ── the rate ──────────────────────────────────────────────────────────────────────────────────────────────────────────


async def rate(stage: RepairStage, limit: int | None) -> None:
    """Measure how fast a destroyed bookie's copies are recreated: at the throttle, or for None as fast as the disk
    allows."""
    name = "rate of repair" if limit else "rate of repair without a throttle"
    await stage.fill((40 if limit else 120) * MIB, value_bytes=100_000)
    victim = stage.cluster.ids[-1]
    await stage.destroy(victim)
    before = stage.copied.look()
    began = time.perf_counter()
    copied = asyncio.create_task(_spans_of_copying(stage))
    await stage.start_again(victim)
    await stage.wait_complete(write=WRITE)
    stage.log(f"whole after {time.perf_counter() - began:.1f} s")
    copied.cancel()
    spans, judged = await copied, 0
    for node, said in stage.copied.look().items():
        start = before.get(node, {}) if node != victim else {}
        size, busy_s = (said[each] - start.get(each, 0) for each in ("paced_bytes", "paced_seconds"))
        if busy_s < (BUSY_LEAST_S if limit else 0.01):
            continue
        judged += 1
        stage.report.add(f"{name}: {node}: bytes paced", size / MIB, unit="MiB")
        share = size / busy_s / (limit or MIB)
        if limit:
            most = RATE_SHARE_MOST
            stage.report.add(f"{name}: {node}: share of {limit} B/s", share, least=RATE_SHARE_LEAST)
            stage.report.add(f"{name}: {node}: share of {limit} B/s", share, most=most)
        else:
            stage.report.add(f"{name}: {node}", share, unit="MiB/s")
    for node, (size, lasted_s) in spans.items() if limit else ():
        what, found = f"{name}: {node}: by the wall clock, in {lasted_s:.1f} s", size / lasted_s / MIB
        stage.report.add(what, found, least=0.8 * limit / MIB, most=1.2 * limit / MIB, unit="MiB/s")
    stage.report.add(f"{name}: nodes that copied long enough to be judged", judged, least=1)
    await stage.check_files(name)


async def _spans_of_copying(stage: RepairStage) -> dict[str, tuple[float, float]]:
    """Record until cancelled, by node, the bytes copied and the seconds from the first to the last copy seen."""
    first: dict[str, tuple[float, float]] = {}
    last: dict[str, tuple[float, float]] = {}
    with suppress(asyncio.CancelledError):
        while True:
            for node, said in (await asyncio.to_thread(stage.copied.look)).items():
                point = (said["paced_bytes"], time.perf_counter())
                if node not in first or (node not in last and point[0] == first[node][0]):
                    first[node] = point
                elif point[0] > last.get(node, first[node])[0]:
                    last[node] = point
            await asyncio.sleep(0.2)
    return {
        node: (last[node][0] - first[node][0], last[node][1] - first[node][1])
        for node in last
        if last[node][1] - first[node][1] > 1
    }


# ── restarts ──────────────────────────────────────────────────────────────────────────────────────────────────────────


async def restarts(stage: RepairStage) -> None:
    """Check that a rolling restart, and a node that is away for less than the delay, copy nothing. Entries written
    meanwhile are counted separately."""
    await stage.fill(10 * MIB)
    await asyncio.sleep(SETTLE_S)
    await _restart_all(stage, "rolling restart")
    before = await asyncio.to_thread(stage.copied.total)
    victim = stage.cluster.ids[0]
    await asyncio.to_thread(stage.cluster.kill, victim)
    await asyncio.sleep(AWAY_S)
    await stage.start_again(victim)
    await asyncio.sleep(SETTLE_S)
    _add_made(stage, f"away for {AWAY_S:.0f} s", await asyncio.to_thread(stage.copied.total) - before)
    await stage.under_load("rolling restart", lambda _: _restart_all(stage, "rolling restart under load"))
    await stage.wait_complete(write=WRITE)
    await stage.check_files("rolling restart")


async def _restart_all(stage: RepairStage, name: str) -> None:
    before, began = await asyncio.to_thread(stage.copied.total), time.perf_counter()
    stored = await _stored(stage)
    for node in stage.cluster.ids:
        await asyncio.to_thread(stage.copied.look)
        await asyncio.to_thread(stage.cluster.terminate, node)
        await stage.start_again(node)
    await asyncio.sleep(SETTLE_S)
    stage.report.add(f"{name}: took", time.perf_counter() - began - SETTLE_S, unit="s")
    made = await asyncio.to_thread(stage.copied.total) - before
    _add_made(stage, name, made, of_bytes=await _stored(stage) - stored if "load" in name else 0)


def _add_made(stage: RepairStage, name: str, made: Made, *, of_bytes: int = 0) -> None:
    """Report the copies made. `of_bytes` were written meanwhile, and a node that was away may lack some of them."""
    most = of_bytes / MIB
    stage.report.add(f"{name}: copies made by workers", made.copies, most=None if of_bytes else 0)
    what = f"bytes copied, of {most:.1f} MiB written meanwhile"
    stage.report.add(f"{name}: {what}, by workers", made.bytes / MIB, most=most, unit="MiB")
    stage.report.add(f"{name}: {what}, by leaders too", made.paced / MIB, most=most, unit="MiB")


async def _stored(stage: RepairStage) -> int:
    """Return the live bytes in all bookies' journals, of the nodes that answer."""
    found = 0
    for node in stage.cluster.ids:
        with suppress(OSError, KeyError):
            found += (await asyncio.to_thread(stage.cluster.status, node))["bookie"]["live_bytes"]
    return found


# ── repair is halted ──────────────────────────────────────────────────────────────────────────────────────────────────


async def halted(stage: RepairStage) -> None:
    """Pause the auditor's process and then a worker's with SIGSTOP, while they copy under load, for longer than their
    sessions."""
    await stage.fill(24 * MIB, value_bytes=50_000)
    name = "repair is halted"

    async def work(load: Load) -> None:
        await _stop_auditor(stage)
        await _stop_worker(stage)

    await stage.under_load(name, work)
    await stage.wait_complete(write=WRITE)
    faults = await stage.faults(write=WRITE, zones=1)
    stage.report.add_safety(f"{name}: ledgers that are not whole", len(faults))
    await stage.check_files(name)


def _active_auditors(stage: RepairStage) -> list[str]:
    """Return the nodes that answer at once and report that they are the auditor."""
    found = []
    for node in stage.cluster.ids:
        with suppress(OSError, KeyError):
            if stage.cluster.status(node, timeout_s=ANSWER_S)["auditor"]["active"]:
                found.append(node)
    return found


async def _busy(stage: RepairStage, *, but: str = "") -> str:
    """Wait for a node whose worker is copying, and return it."""
    until = time.perf_counter() + 60
    while time.perf_counter() < until:
        for node, said in (await asyncio.to_thread(stage.copied.look)).items():
            if said["ledgers_repairing"] and said["copied_bytes"] and node != but:
                return node
        await asyncio.sleep(0.1)
    raise TimeoutError("no worker copies anything")


async def _destroy_one(stage: RepairStage, node: str) -> None:
    await stage.destroy(node)
    await asyncio.sleep(SUPERVISOR_S)
    await stage.start_again(node)


async def _stop_auditor(stage: RepairStage) -> None:
    (auditor,) = await _wait_office(stage, ())
    await _destroy_one(stage, next(each for each in stage.cluster.ids if each != auditor))
    worker = await _busy(stage)
    stage.log(f"{auditor} is auditor and is stopped, while {worker} copies")
    began = time.perf_counter()
    stage.cluster.pause(auditor)
    others = [node for node in stage.cluster.ids if node != auditor]
    (successor,) = await _wait_office(stage, (auditor,))
    stage.report.add(
        "auditor stopped: another in office after", time.perf_counter() - began, most=TAKEN_OVER_MAX_S, unit="s"
    )
    await asyncio.sleep(2)
    stage.cluster.resume(auditor)
    awake = time.perf_counter()
    doubles, claims_s = 0, 0.0
    while (at := time.perf_counter() - awake) < 8:
        found = await asyncio.to_thread(_active_auditors, stage)
        if len(found) > 1:
            doubles, claims_s = doubles + 1, at
        await asyncio.sleep(0.02)
    stage.report.add("auditor stopped: two claim the office at once, for up to", claims_s, most=1.0, unit="s")
    stage.log(f"{successor} of {others} is auditor now; checks that found two: {doubles}")
    await stage.wait_complete(write=WRITE)


async def _wait_office(stage: RepairStage, but: tuple[str, ...]) -> list[str]:
    until = time.perf_counter() + 60
    while time.perf_counter() < until:
        asked = [node for node in stage.cluster.ids if node not in but]
        found = []
        for node in asked:
            with suppress(OSError, KeyError):
                if (await asyncio.to_thread(stage.cluster.status, node))["auditor"]["active"]:
                    found.append(node)
        if len(found) == 1:
            return found
        await asyncio.sleep(0.1)
    raise TimeoutError("nobody is auditor")


async def _stop_worker(stage: RepairStage) -> None:
    victim = stage.cluster.ids[-1]
    for _ in range(STOPS_TRIED_MAX):  # until a worker is stopped before it has done what it was seen at
        await _destroy_one(stage, victim)
        worker = await _busy(stage, but=victim)
        began = time.perf_counter()
        stage.cluster.pause(worker)
        held = await stage.with_store(partial(_locked_by, worker=worker))
        if held:
            break
        stage.log(f"{worker} has no lock any more")
        stage.cluster.resume(worker)
        await stage.wait_complete(write=WRITE)
    stage.log(f"{worker} is stopped with the locks of ledgers {held}")
    stage.report.add("worker stopped: ledgers that it had the locks of", len(held), least=1)
    await stage.with_store(partial(_wait_released, worker=worker))
    stage.report.add("worker stopped: its locks gone after", time.perf_counter() - began, most=SESSION_S + 3, unit="s")
    taken = await stage.with_store(lambda store: _wait_taken(store, held, worker))
    stage.report.add(
        "worker stopped: all of them taken, or whole, after",
        time.perf_counter() - began,
        most=TAKEN_OVER_MAX_S,
        unit="s",
    )
    stage.log(f"taken by: {taken}")
    stage.report.add("worker stopped: ledgers that nobody took", len(held) - len(taken), most=0)
    stage.cluster.resume(worker)
    await asyncio.to_thread(stage.cluster.wait_ready, worker)


async def _locked_by(store: MetadataStore, worker: str) -> list[LedgerId]:
    """Return the marked ledgers that the node's worker has locked."""
    marks = Underreplication(store)
    found = []
    async for ledger in marks.marked_ledgers():
        holder = await marks.holder_or_none(ledger)
        if holder is not None and (holder == worker or machine_of_bookie(BookieId(holder)) == worker):
            found.append(ledger)
    return found


async def _wait_released(store: MetadataStore, worker: str) -> None:
    for _ in range(300):
        if not await _locked_by(store, worker):
            break
        await asyncio.sleep(0.2)


async def _wait_taken(store: MetadataStore, ledgers: list[LedgerId], worker: str) -> dict[int, str]:
    """Wait until another worker has locked each ledger, or its mark is gone."""
    marks, taken = Underreplication(store), dict[int, str]()
    until = time.perf_counter() + 60
    while len(taken) < len(ledgers) and time.perf_counter() < until:
        for ledger in ledgers:
            holder = await marks.holder_or_none(ledger)
            if holder is not None and worker not in (holder, machine_of_bookie(BookieId(holder))):
                taken[ledger] = holder
            elif holder is None and await marks.get(ledger) is None:
                taken.setdefault(ledger, "nobody: it is whole")
        await asyncio.sleep(0.1)
    return taken


# ── wiped while it is registered ──────────────────────────────────────────────────────────────────────────────────────


async def wiped(stage: RepairStage) -> None:
    """Restart a bookie that has lost its disk at once, so that it is up before its former registration has ended.
    Nobody refuses it or takes it for the former one."""
    await stage.fill(4 * MIB)
    name = "wiped while registered"

    async def work(load: Load) -> None:
        for number, victim in enumerate(stage.cluster.ids[: stage.counts.disks]):
            former = await stage.bookie_of(victim)
            named = await stage.with_store(partial(_naming, bookie=former))
            began = time.perf_counter()
            await stage.destroy(victim)
            await asyncio.to_thread(stage.cluster.start_node, victim)
            both = await asyncio.to_thread(_ask_both, stage, victim, former, named[:20])
            await asyncio.to_thread(stage.cluster.wait_ready, victim)
            what = f"{name}: round {number + 1} ({victim})"
            stage.report.add(f"{what}: ready after", time.perf_counter() - began, most=30, unit="s")
            stage.report.add(f"{what}: registered under both ids for", both.lasted_s, unit="s")
            stage.report.add(f"{what}: questions to the former one where the new one listens", both.asked, least=1)
            stage.report.add_safety(f"{what}: answers to these", both.answered)
            stage.report.add(f"{what}: answers in its own name", both.own, least=1)
            await stage.wait_complete(write=WRITE)

    await stage.under_load(name, work)
    await stage.check_files(name)


async def _naming(store: MetadataStore, bookie: BookieId) -> list[LedgerId]:
    ledgers = LedgerStore(store)
    found = []
    for ledger in await ledgers.list_ids():
        metadata, _ = await ledgers.read(ledger)
        if any(bookie in each.ensemble for each in metadata.fragments):
            found.append(ledger)
    return found


class Both(NamedTuple):
    """Results of requests to the former and the new bookie at one address."""

    lasted_s: float
    asked: int
    answered: int
    own: int


def _ask_both(stage: RepairStage, node: str, former: BookieId, ledgers: list[LedgerId]) -> Both:
    """Send requests with the former bookie's id to the new one, at least once, until the former registration is
    gone."""

    async def work(tools: Tools) -> Both:
        client = BookieClients(tools.env, lambda _: stage.cluster.file.node(node).bookie)
        registrations = RegistrationClient(tools.store)
        since, lasted_s, asked, answered = time.perf_counter(), 0.0, 0, 0
        new: list[BookieId] = []
        while time.perf_counter() - since < 60:
            found = await registrations.names()
            new = [each for each in found if machine_of_bookie(each) == node and each != former]
            if asked and former not in found:
                break
            at = time.perf_counter()
            if new:
                answered, asked = answered + await _answers(client, former, ledgers), asked + len(ledgers)
            await asyncio.sleep(0.05)
            if new and former in found:
                lasted_s += time.perf_counter() - at
        own = sum([await _answers(client, each, ledgers) for each in new])
        client.close()
        return Both(lasted_s, asked, answered, own)

    return with_tools(ClusterOptions(stage.cluster.local.data_dir), work)


async def _answers(client: BookieClients, bookie: BookieId, ledgers: list[LedgerId]) -> int:
    count = 0
    for ledger in ledgers:
        with suppress(BookieError):
            await client.entries(bookie, ledger)
            count += 1
    return count


# ── all of them ───────────────────────────────────────────────────────────────────────────────────────────────────────


@dataclass(frozen=True)
class Scene:
    """A scenario and the cluster that it needs."""

    play: Callable[[RepairStage], Awaitable[None]]
    nodes: int = 4
    partitions: int = 2
    settings: tuple[str, ...] = ()


_SOON = ("autorecovery.lost_bookie_delay_s=2", "autorecovery.placement_interval_s=15", f"log.roll_bytes={MIB}")
_THREE_ACKS = ("log.quorum.ensemble=3", "log.quorum.write=3", "log.quorum.ack=3")

SCENES: dict[str, Scene] = {
    "one of Qa 2 destroyed": Scene(partial(destroyed, at_once=1), nodes=5, settings=_SOON),
    "two of Qa 3 destroyed": Scene(partial(destroyed, at_once=2), nodes=5, settings=_SOON + _THREE_ACKS),
    "rate by the throttle": Scene(partial(rate, limit=RATE), settings=(*_SOON, f"autorecovery.bytes_per_s={RATE}")),
    "rate by the disk": Scene(partial(rate, limit=None), settings=(*_SOON, f"autorecovery.bytes_per_s={1 << 31}")),
    "restarts": Scene(restarts, settings=("autorecovery.lost_bookie_delay_s=60",)),
    "repair is halted": Scene(halted, settings=(*_SOON, f"autorecovery.bytes_per_s={MIB // 2}")),
    "wiped while registered": Scene(wiped, settings=_SOON),
    "many ledgers": Scene(many_ledgers, nodes=3, partitions=1, settings=_SOON),
}
