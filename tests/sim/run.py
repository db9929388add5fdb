"""One simulated run of a whole cluster: `python -m tests.sim.run NAME…`, or `make sim SEED=n`. With `TRACE=1` in the
environment it prints every event.

A run has phases. The cluster starts and serves. Users work while faults strike. The faults end, and every partition
must serve again through every node within a bounded time. In some runs the power of all machines is then cut once.
Finally the recorded history is judged.
"""

from __future__ import annotations

import argparse
import asyncio
import logging
import os
import sys
from collections import Counter
from collections.abc import Coroutine
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from time import process_time
from typing import Any

from kvstore.partition.leading.range_delete import RANGE_KEYS_MAX
from kvstore.partition.state import commands
from kvstore.ring.hashing import MURMUR3
from tests.sim.clients import Identity, Worker
from tests.sim.clocks.lodgers import Lodgers
from tests.sim.cluster import Cluster
from tests.sim.judges import checks, probes
from tests.sim.judges.code_paths import CODE_PATHS, counting
from tests.sim.judges.operations import Status
from tests.sim.judges.reach import PATHS, asked
from tests.sim.nodes import short_ranges, small_journals
from tests.sim.spaces.tenants import Tenants, check_counts, drawn, metering
from tests.sim.strikes.balancing import end_balancing, first_steps, restless
from tests.sim.strikes.faults import FAULTS, Chaos, has_failed_directory
from tests.sim.strikes.knobs import (
    Knobs,
    draw,
    drawn_hash,
    hinted,
    perhaps_balanced,
    perhaps_older,
    perhaps_processes,
    perhaps_split,
)
from tests.sim.transacting.judging import REST_S_MAX
from tests.sim.transacting.transactors import Transactors
from tests.sim.upgrading.upgrades import all_risen, older_ones, upgrade, written_back
from tests.sim.watching import watching
from tests.sim.workloads import Workload
from tests.sim.world.env import SimWorld

UP_S_MAX = 30.0
CALM_S = 1.0
"""Duration of the phases before and after the faults."""
RECOVERY_S_MAX = 90.0
"""Maximum time in seconds from the last fault until every partition serves. A candidate that has given up waits up
to 30 s before it runs again."""
RUN_S_MAX = 600.0
TTL_S = 2.0, 6.0
SPACES_SHARE = 1 / 4
"""Share of the runs that have namespaces."""
TENANTS = 2
TRANSACTORS_SHARE = 1 / 3
"""Share of the runs of several partitions that have transactions."""
TAIL = 60
"""Number of trace events that a failure shows."""
HELP = "Replay simulated runs of a whole cluster. A failed run names its seed."
NAMES = (
    "a seed, for example 17 (default: 1); fault:kill:17 lets one fault strike alone, path:a_ledger_is_rolled:17 makes "
    "one code path likely; a name that does not exist lists all of them"
)
MORE = "With TRACE=1 in the environment, a run prints every event to standard error: time in s, node, event, details."


@dataclass(slots=True)
class Outcome:
    """The result of a run."""

    seed: int
    knobs: Knobs
    digest: str = ""
    virtual_s: float = 0.0
    cpu_s: float = 0.0
    recovery_s: float = 0.0
    """Seconds from the last fault until all partitions served."""
    answered: tuple[int, int, int] = (0, 0, 0)
    """Number of operations before, during and after the faults."""
    statuses: Counter[Status] = field(default_factory=Counter)
    struck: Counter[str] = field(default_factory=Counter)
    asked: Counter[str] = field(default_factory=Counter)
    """Operations of tests.sim.judges.reach.OPERATIONS that were answered."""
    mutations: int = 0
    handles: int = 0


def play(name: str) -> Outcome:
    """Play a run by its name. `17` is seed 17. `fault:kill:17` and `path:a_ledger_is_rolled:17` are seeds with knobs
    under which that fault strikes alone or that path is likely. Raises the failure of the run."""
    kind, _, rest = name.partition(":")
    of, _, number = rest.rpartition(":")
    if kind == "fault":
        return run(int(number), hinted(int(number), (of,), {}), name=name)
    if kind == "path":
        code_path = CODE_PATHS[of.replace("_", " ")]
        return run(
            int(number),
            hinted(int(number), code_path.faults, code_path.hints) if code_path.is_rare else None,
            name=name,
        )
    return run(int(name))


def run(seed: int, knobs: Knobs | None = None, *, name: str = "") -> Outcome:
    """Play `seed` with the given knobs, by default with the knobs that the seed draws. Raises the failure of the
    run."""
    began = process_time()
    with SimWorld(seed) as world:
        world.replay = f"make sim SEED={name or seed}"
        chosen = knobs or _drawn(world)
        outcome = Outcome(seed, chosen)
        try:
            world.run(_guarded(world, outcome), limit_s=RUN_S_MAX)
        except BaseException as error:
            error.add_note(f"{chosen}\n{world.trace.tail(TAIL)}")
            raise
        outcome.digest, outcome.virtual_s = world.trace.digest(), world.loop.time()
        outcome.handles = world.loop.handles_run
    outcome.cpu_s = process_time() - began
    return outcome


def _drawn(world: SimWorld) -> Knobs:
    knobs = perhaps_split(draw(world.fork("knobs"), sorted(FAULTS)), world.fork("split"))
    knobs = perhaps_older(knobs, world.fork("older"))
    knobs = replace(knobs, hash=MURMUR3 if knobs.older else drawn_hash(world.fork("hash")))
    if not knobs.older:  # the first release knows neither machines nor the balancer
        knobs = perhaps_balanced(knobs, world.fork("balance"), ranges=False)
        knobs = perhaps_processes(knobs, world.fork("processes"))
    random = world.fork("ranges")
    knobs = replace(knobs, range_keys=random.choice((2, RANGE_KEYS_MAX, RANGE_KEYS_MAX)))
    random = world.fork("transactors")  # older servers do not support transactions
    if knobs.partitions > 1 and not knobs.older and random.random() < TRANSACTORS_SHARE:
        knobs = replace(knobs, load=replace(knobs.load, transactors=random.choice((2, 3))))
    random = world.fork("spaces")  # older servers do not support namespaces
    return replace(knobs, spaces=drawn(random)) if random.random() < SPACES_SHARE and not knobs.older else knobs


async def _guarded(world: SimWorld, outcome: Outcome) -> None:
    """Run the scenario. End it at once when a rule is broken."""
    cluster = Cluster(world, outcome.knobs)
    small = small_journals(outcome.knobs), short_ranges(outcome.knobs)
    meters = metering(cluster) if outcome.knobs.spaces else nullcontext()
    balancing = restless(outcome.knobs)
    with watching(cluster.logbook, cluster.rules), counting(CODE_PATHS | PATHS), small[0], small[1], meters, balancing:
        await until_broken(cluster, scenario(cluster, outcome))


async def until_broken(cluster: Cluster, work: Coroutine[Any, Any, None]) -> None:
    """Run `work` and raise RuleBroken as soon as a rule is broken."""
    working = asyncio.get_running_loop().create_task(work)
    watching_rules = asyncio.get_running_loop().create_task(cluster.on_violation.wait())
    await asyncio.wait((working, watching_rules), return_when=asyncio.FIRST_COMPLETED)
    cluster.check()
    await working


async def scenario(cluster: Cluster, outcome: Outcome) -> None:
    """Run all phases."""
    world, knobs = cluster.world, outcome.knobs
    loop = world.loop
    older = older_ones(cluster, knobs.older)
    await cluster.found()
    await all_serve(cluster, UP_S_MAX)
    if knobs.load.transactors:
        await all_risen(cluster, UP_S_MAX)
    workload = Workload(cluster, world.fork("workload"), knobs.load)
    lodgers = Lodgers(cluster, TTL_S)
    users = [cluster.spawn(each, name="user") for each in workload.workers]
    users += [cluster.spawn(lodgers.live(each), name="lodger") for each in workload.lodgers()]
    tenants = Tenants(cluster, knobs.spaces)
    await tenants.define()
    users += [cluster.spawn(each, name="tenant") for each in tenants.users(TENANTS if knobs.spaces else 0)]
    transactors = Transactors(cluster, world.fork("transactors"), knobs.load.transactors, knobs.load.pause_s)
    users += [cluster.spawn(each, name="transactor") for each in transactors.workers]
    begun = loop.time()
    await asyncio.sleep(CALM_S)
    await first_steps(cluster)
    chaos = Chaos(cluster, world.fork("chaos"), list(knobs.faults), knobs.pace_s)
    struck_from = loop.time()
    upgrading = cluster.spawn(upgrade(cluster, older, knobs.chaos_s / 2), name="upgrade")
    await chaos.run(knobs.chaos_s)
    await upgrading
    struck_to = loop.time()
    heal(cluster)
    await all_serve(cluster, RECOVERY_S_MAX)
    if older:
        await all_risen(cluster, RECOVERY_S_MAX)
        await written_back(cluster, RECOVERY_S_MAX)
    outcome.recovery_s = loop.time() - struck_to
    served = loop.time()
    await asyncio.sleep(CALM_S)
    await end_balancing(cluster)
    workload.stop()
    lodgers.stop()
    tenants.stop()
    transactors.stop()
    for user in users:
        await user
    succeeded = cluster.recorder.succeeded
    outcome.answered = (
        succeeded(begun, struck_from),
        succeeded(struck_from, struck_to),
        succeeded(served, loop.time()),
    )
    outcome.struck = Counter(name for _, name in chaos.struck)
    await check_counts(cluster, knobs.spaces)
    if knobs.power_cut_at_end:
        await power_cut_and_up(cluster)
        await check_counts(cluster, knobs.spaces)
    await transactors.read_all(REST_S_MAX)
    await checks.judge(cluster, search=knobs.search)
    outcome.statuses = checks.count_statuses(cluster)
    outcome.asked = asked(cluster.recorder.operations, cluster.knobs.hash)
    outcome.mutations = sum(len(entry.keys) for p in cluster.partitions for _, entry in cluster.logbook.log(p))


def heal(cluster: Cluster) -> None:
    """Undo the lasting effects of faults."""
    cluster.metadata.trouble(0.0)
    cluster.network.heal()
    for node in cluster.nodes:
        node.disk.mend()
        node.free_inodes()
        node.engines.are_wedged = False
        node.sim.clock.set_right()
        if node.is_paused:
            node.resume()
        if not node.sim.is_running:
            node.start()
        elif has_failed_directory(node):  # the node's operator notices that
            node.crash()
            node.start()


async def power_cut_and_up(cluster: Cluster) -> None:
    """Cut the power of all machines. Only synced data survives, and it must contain all acknowledged writes."""
    for node in cluster.nodes:
        node.crash(power=True)
    for node in cluster.nodes:
        node.start()
    await all_serve(cluster, RECOVERY_S_MAX)


async def all_serve(cluster: Cluster, within_s: float) -> None:
    """Return when each partition has accepted a write through each node. Raises AssertionError after `within_s`."""
    loop = asyncio.get_running_loop()
    random = cluster.world.fork(f"liveness/{loop.time()}")
    deadline = loop.time() + within_s
    for node in cluster.servers:
        for partition in cluster.partitions:
            worker = Worker(Only(cluster, node), f"check-{node.name}", random, Identity(random))
            worker.attempts_max = 1
            key = next(
                key for number in range(10_000) if cluster.ring.partition_of(key := b"live%d" % number) == partition
            )
            while True:
                done = await worker.do(commands.Put(key, b"%s@%.6f" % (node.name.encode(), loop.time())), with_id=False)
                if done.status is Status.OK:
                    break
                await asyncio.sleep(0.05)
                assert loop.time() < deadline, (
                    f"P8 {partition} accepts no write through {node.name} within {within_s} s: {done.result!r}; "
                    f"leader {cluster.leader(partition)}"
                )


class Only:
    """A cluster of which only one node is known."""

    def __init__(self, cluster: Cluster, node: Any) -> None:
        self.ring, self.network, self.recorder = cluster.ring, cluster.network, cluster.recorder
        self.endpoints = [node]


def main(words: list[str]) -> None:
    """Play the runs one after the other and print their results."""
    parser = argparse.ArgumentParser(prog="python -m tests.sim.run", description=HELP, epilog=MORE)
    parser.add_argument("names", nargs="*", default=["1"], metavar="NAME", type=_name, help=NAMES)
    names = parser.parse_args(words).names
    logging.getLogger("kvstore").setLevel(logging.DEBUG if "TRACE" in os.environ else logging.CRITICAL)
    for name in names:
        outcome = play(name)
        print(
            f"seed {name}: {outcome.virtual_s:.1f} s in {outcome.cpu_s:.2f} s of CPU, {outcome.handles} callbacks, "
            f"answered {outcome.answered}, recovery {outcome.recovery_s:.1f} s, {dict(outcome.statuses)}, "
            f"{outcome.mutations} mutations, faults {dict(outcome.struck)}, trace {outcome.digest[:16]}"
        )
    if len(names) > 1:
        print(f"paths never taken: {', '.join(probes.missed()) or 'nothing'}")


def _name(text: str) -> str:
    """Return the name of a run. Raises ArgumentTypeError if `play` knows no such run."""
    kind, _, rest = text.partition(":")
    of, _, number = rest.rpartition(":")
    known = {"fault": FAULTS.keys(), "path": {name.replace(" ", "_") for name in CODE_PATHS}}
    if text.isdecimal() or (number.isdecimal() and of in known.get(kind, ())):
        return text
    raise argparse.ArgumentTypeError(
        f"expected a seed such as 17, fault:NAME:SEED or path:NAME:SEED, got {text!r}; "
        f"faults: {', '.join(sorted(FAULTS))}; code paths: {', '.join(sorted(known['path']))}"
    )


if __name__ == "__main__":
    main(sys.argv[1:])
