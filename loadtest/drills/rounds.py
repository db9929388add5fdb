"""A drill by seed: rounds of faults under load. After each round the faults are undone, the results are judged, and
every process is checked.

    python -m loadtest.drill --nemesis --seed 1 --minutes 10

In each round several faults of `nemesis.py` and `crowds.py` begin at random moments and overlap. Then all are undone,
and the drill measures the time until every partition accepts writes through every node. No fault may violate safety: no
acknowledged write is lost, answers are linearizable, no process ends by itself, and logs have no unexpected error.
"""

from __future__ import annotations

import asyncio
import itertools
import re
import time
from pathlib import Path
from random import Random
from statistics import median

import psutil

from kvstore.env.liveness.watchdog import GAVE_UP
from loadtest.drills import crowds as crowds
from loadtest.drills.contest import Contest
from loadtest.drills.faults import check_files
from loadtest.drills.load import Load
from loadtest.drills.mixed import Endpoint, MixedLoad, NotDone, Unknown
from loadtest.drills.nemesis import FAULTS, ONE_ILL, REPAIRED_MAX_S, Field
from loadtest.drills.net import WiredCluster
from loadtest.drills.stage import Counts, Report, Stage
from loadtest.drills.stale import StaleReaders
from tests.sim.judges.linearizable import Undecided, check_search
from tests.sim.versions import Violation

ROUND_S = 40.0
AT_ONCE = (1, 1, 2, 2, 3)
BEGIN_WITHIN_S = 4.0
BACK_MAX_S, STARTED_MAX_S = 10.0, 20.0
"""The second limit applies if a process was restarted, because Python starts slowly."""
BACK_WAIT_S = 90.0
GAP_MAX_S = 10.0
"""Longest time without an acknowledged write of a partition while two healthy nodes reach each other."""
STARTS = frozenset({"wiped", "killed", "two_killed", "killed_zookeeper", "older_metadata", "told_to_stop"})
LOCK_TTL_S, LOCK_GRACE_S = 3.0, 6.0
"""The default grace: the wall clocks of nodes differ."""
MEMORY_MAX_MIB = 1_500.0
MEMORY_GROWTH_MAX = 1.2
"""Maximum growth of the largest process from the second to the last third of the rounds: it may hold more keys, but not
leak."""
ROUNDS_OF_GROWTH_MIN = 9
"""Minimum number of rounds for the memory figure. In fewer rounds a process that was just started distorts it."""
_UNEXPECTED = re.compile(
    rf"Traceback \(most recent|CRITICAL(?!.*{GAVE_UP})|never retrieved|was destroyed but it is pending"
)


async def rounds(cluster: WiredCluster, report: Report, *, seed: int, minutes: float, only: str = "") -> None:
    """Run rounds until the time is over, then check the files."""
    stage = Stage(cluster, Counts(), report)
    until = time.perf_counter() + minutes * 60
    names = [name for name in FAULTS if any(part in name for part in only.split(","))]
    seen: dict[Path, int] = {}
    sizes: list[float] = []
    for number in itertools.count(1):
        random = Random(f"{seed}/{number}")

        async def work(load: Load, random: Random = random, number: int = number) -> None:
            sizes.append(await _round(stage, load, random, names, f"round {number} of seed {seed}"))

        await stage.under_load(f"round {number}", work)
        _check_logs(stage, cluster.local.data_dir / "logs", seen)
        if time.perf_counter() > until:
            break
    if len(sizes) >= ROUNDS_OF_GROWTH_MIN:
        third = len(sizes) // 3
        growth = median(sizes[-third:]) / median(sizes[-2 * third : -third])
        report.add("largest process, last third of the rounds by the third before", growth, most=MEMORY_GROWTH_MAX)
    await check_files(stage)


async def _round(stage: Stage, load: Load, random: Random, names: list[str], title: str) -> float:
    """Run one round. Return the MiB of the largest process at its end."""
    cluster = stage.cluster
    assert isinstance(cluster, WiredCluster)
    field = Field(cluster, random, load)
    addresses = [cluster.address(node, "resp") for node in field.nodes]
    mixed = MixedLoad(addresses, load.tags, time.perf_counter)
    mixed.start(b"%x" % time.time_ns())
    readers = [StaleReaders(load.history, node.grpc, load.register_keys()[::3]) for node in cluster.file.nodes]
    for each in readers:
        await each.start()
    until = time.perf_counter() + ROUND_S
    folder = cluster.local.data_dir / "locks"
    folder.mkdir(exist_ok=True)
    seed, times = random.getrandbits(32), {"ttl_s": LOCK_TTL_S, "grace_s": LOCK_GRACE_S}
    supervisor = asyncio.create_task(field.supervise())
    with Contest(cluster, folder, locks=1, holders=2, seed=seed, **times) as contest:
        while time.perf_counter() < until:
            await _accidents(stage, field, names, title)
    supervisor.cancel()
    held_twice = contest.held_twice()
    stage.report.add_safety(f"{title}: locks held twice, of {len(contest.acquired())} acquisitions", len(held_twice))
    for each in readers:
        await each.stop()
    await mixed.stop()
    stage.report.add_safety(f"{title}: wrong answers to crowds", len(field.wrong))
    stage.report.add(f"{title}: lost disks not repaired in {REPAIRED_MAX_S:.0f} s", len(field.unrepaired), most=0)
    for each in (*field.wrong, *field.unrepaired, *held_twice[:5]):
        stage.log(each)
    await _judge(stage, mixed, title)
    return _check_processes(stage, field, title)


async def _accidents(stage: Stage, field: Field, names: list[str], title: str) -> None:
    """Run several faults at once until all are over, then measure the time until the cluster is healthy."""
    chosen = field.random.sample(names, min(len(names), field.random.choice(AT_ONCE)))
    starts = [field.random.random() * BEGIN_WITHIN_S for _ in chosen]
    stage.log(f"{time.strftime('%H:%M:%S')} {' + '.join(chosen)}")

    async def one(name: str, start: float) -> None:
        await asyncio.sleep(start)
        await FAULTS[name](field)

    began, began_at = time.perf_counter(), time.time()
    await asyncio.gather(*map(one, chosen, starts))
    healed = time.perf_counter()
    if len(chosen) == 1 and chosen[0] in ONE_ILL:
        gaps = {each: field.load.longest_gap(each, began, healed)[0] for each in field.load.partitions}
        what = f"{title}: {chosen[0]}: longest gap in acknowledged writes"
        stage.report.add(what, max(gaps.values()), most=GAP_MAX_S, unit="s")
    ways = [_is_back_by(field, node, healed) for node in field.nodes]
    back = await asyncio.gather(_is_back_by_client(field, healed), *ways)
    took = max(back)
    most = STARTED_MAX_S if any(name in STARTS for name in chosen) else BACK_MAX_S
    most += field.hold_s(since=began_at)
    if took > most:
        slow = [f"{way} {each:.1f} s" for way, each in zip(["client", *field.nodes], back, strict=True)]
        stage.report.add(f"{title}: back after {' + '.join(chosen)}: {', '.join(slow)}", took, most=most, unit="s")
    else:
        stage.log(f"{time.strftime('%H:%M:%S')} back after {took:.1f} s")
    await asyncio.sleep(1.0)


async def _is_back_by_client(field: Field, since: float) -> float:
    """Return the seconds until every partition has accepted a write of the load's client on its old connections."""
    while not all(field.load.count(each, since, time.perf_counter()) for each in field.load.partitions):
        if time.perf_counter() - since > BACK_WAIT_S:
            break
        await asyncio.sleep(0.05)
    return time.perf_counter() - since


async def _is_back_by(field: Field, node: str, since: float) -> float:
    """Return the seconds until every partition has accepted a write through the node, on a new connection."""
    for tag in field.load.tags:
        endpoint = Endpoint(field.cluster.address(node, "resp"))
        while time.perf_counter() - since < BACK_WAIT_S:
            try:
                await endpoint.ask([b"SET", b"{%b}back" % tag, b"1"], timeout_s=2.0)
                break
            except (NotDone, Unknown):
                await asyncio.sleep(0.05)
        endpoint.close()
    return time.perf_counter() - since


async def _judge(stage: Stage, mixed: MixedLoad, title: str) -> None:
    wrong = undecided = 0
    try:
        await asyncio.to_thread(check_search, mixed.history)
    except Undecided as error:
        undecided = 1
        stage.log(str(error))
    except Violation as error:
        wrong = 1
        stage.log(f"VIOLATION {error}")
    if wrong or undecided:
        mixed.history.dump(stage.cluster.local.data_dir / "logs" / f"{title.replace(' ', '-')}.jsonl")
    counts = dict(mixed.history.counts())
    stage.report.add_safety(f"{title}: violations in {len(mixed.history)} operations by Redis", wrong)
    stage.report.add(f"{title}: searches without a verdict", undecided, most=0)
    stage.log(f"by Redis: {counts}, {dict(mixed.errors.most_common(8))}")


def _check_processes(stage: Stage, field: Field, title: str) -> float:
    ended = [node for node in field.nodes if not field.cluster.is_running(node)]
    stage.report.add_safety(f"{title}: processes that ended by themselves {ended}", len(ended))
    for node in ended:
        field.cluster.start_node(node)
    sizes = [psutil.Process(field.pid(node)).memory_info().rss / (1 << 20) for node in field.nodes if node not in ended]
    largest = max(sizes, default=0.0)
    stage.report.add(f"{title}: largest process", largest, most=MEMORY_MAX_MIB, unit="MiB")
    return largest


def _check_logs(stage: Stage, logs: Path, seen: dict[Path, int]) -> None:
    """Report unexpected log lines since the last check."""
    found = []
    for path in sorted(logs.iterdir()):
        lines = path.read_text(errors="replace").splitlines()
        found += [f"{path.name}: {line}" for line in lines[seen.get(path, 0) :] if _UNEXPECTED.search(line)]
        seen[path] = len(lines)
    stage.report.add_safety("unexpected errors in logs", len(found))
    for line in found[:10]:
        stage.log(line)
