"""Simulated runs of transactions: `python -m tests.sim.transacting.swarm SEED…` replays some, and
`python -m tests.sim.many N --transactions` plays many. With `TRACE=1` in the environment a run prints every event.

Each seed draws a cluster of several partitions, up to three kinds of faults, and whether snapshots are pinned and
ranges move meanwhile, by plan or by the balancer. When the faults have ended, every transaction must end, and
everything is judged: the logs, the answers, the lists' cycles, and all invariants.
"""

from __future__ import annotations

import argparse
import asyncio
import logging
import os
import sys
from collections import Counter
from collections.abc import Callable, Coroutine
from dataclasses import dataclass, replace
from random import Random
from time import process_time
from typing import Any

from kvstore.errors import MetadataError
from kvstore.ring.hashing import TOKENS
from kvstore.ring.moves import Pace
from kvstore.ring.plan import shift_range
from kvstore.ring.steps import set_pace
from kvstore.types import PartitionId
from tests.ring.rings import unit_of
from tests.sim.cluster import Cluster
from tests.sim.judges import checks
from tests.sim.judges.code_paths import counting
from tests.sim.judges.operations import Status
from tests.sim.judges.reach import TRANSACTION_PATHS, asked, paths_with
from tests.sim.judges.refusals import Refusals
from tests.sim.judges.transactions import KINDS, check_values, is_of_transactors, steps_of
from tests.sim.moving.moves import Users, World
from tests.sim.nodes import small_journals
from tests.sim.run import Outcome, all_serve, heal, power_cut_and_up, until_broken
from tests.sim.strikes.balancing import end_balancing, first_steps, restless
from tests.sim.strikes.faults import FAULTS, Chaos
from tests.sim.strikes.knobs import Knobs, draw, drawn_hash, perhaps_balanced, perhaps_processes
from tests.sim.transacting.judging import REST_S_MAX, at_rest, judge_transactions
from tests.sim.transacting.snapshots import Photographer
from tests.sim.transacting.transactors import Transactors
from tests.sim.upgrading.upgrades import all_risen
from tests.sim.watching import watching
from tests.sim.world.env import SimWorld

UP_S_MAX = 30.0
CALM_S = 0.5
RECOVERY_S_MAX = 90.0
RUN_S_MAX = 600.0
KEYS, COUNTERS = tuple(b"k%d" % number for number in range(6)), (b"c0", b"c1")
"""Keys of plain users."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """The users of one run and its moves."""

    users: int = 3
    """Users of transactions."""
    pause_s: float = 0.04
    """Mean time in seconds between two operations of a user."""
    plain_users: int = 1
    moves_s: float = 0.0
    """Mean time in seconds between two plans to move a range; 0 for none."""
    moves_parallel: int = Pace().parallel
    """Maximum number of moves to one partition at a time."""
    snapshots_s: float = 0.0
    """Mean time in seconds between two snapshots of the whole store; 0 for none."""


Story = Callable[[World, Transactors], Coroutine[Any, Any, None]]


def drawn(seed: int) -> tuple[Knobs, Plan]:
    """Draw the cluster and the plan of a run."""
    random = Random(f"transactions/{seed}")
    names = sorted(FAULTS)
    knobs = draw(random, names)
    faults = tuple(random.sample(names, random.choice((0, 1, 1, 2, 3))))
    knobs = replace(knobs, partitions=random.choice((2, 2, 3, 4)), faults=faults, chaos_s=random.uniform(2.0, 5.0))
    plan = Plan(
        users=random.choice((2, 3, 5)),
        pause_s=random.choice((0.02, 0.05, 0.1)),
        moves_s=random.choice((0.0, 0.0, 0.7, 2.0)),
        snapshots_s=random.choice((0.0, 0.1, 0.5)),
        moves_parallel=random.choice((1, 4, 16)),
    )
    if plan.moves_s:
        knobs = replace(knobs, moves_rest_s=random.choice((0.0, 0.1, 0.3)))
    knobs = perhaps_balanced(knobs, Random(f"transactions/{seed}/balance"), ranges=True)
    if knobs.is_balanced:  # the balancer plans the moves, and waits while others have open ones
        plan = replace(plan, moves_s=0.0)
    if plan.moves_s or knobs.is_balanced:
        # The users of moves rely on what the retry table remembers, and servers of one release know all moves.
        kept = replace(knobs.partition, retry_window_ms=600_000, retry_bytes_max=64 << 20, retry_results_max=1024)
        knobs = replace(knobs, partition=kept)
    random = Random(f"transactions/{seed}/cluster")
    return perhaps_processes(replace(knobs, hash=drawn_hash(random)), random), plan


def run(seed: int, knobs: Knobs | None = None, plan: Plan | None = None, story: Story | None = None) -> Outcome:
    """Play a run. Raises its failure. `story` happens instead of the drawn faults and moves."""
    began = process_time()
    drawn_knobs, drawn_plan = drawn(seed)
    outcome = Outcome(seed, knobs or drawn_knobs)
    with SimWorld(seed) as world:
        world.replay = f"python -m tests.sim.transacting.swarm {seed}"
        try:
            world.run(
                _guarded(world, outcome, plan or drawn_plan, story or trouble(plan or drawn_plan, outcome)),
                limit_s=RUN_S_MAX,
            )
        except BaseException as error:
            error.add_note(f"{outcome.knobs}\n{plan or drawn_plan}\n{world.trace.tail(60)}")
            raise
        outcome.digest, outcome.virtual_s = world.trace.digest(), world.loop.time()
        outcome.handles = world.loop.handles_run
    outcome.cpu_s = process_time() - began
    return outcome


async def _guarded(world: SimWorld, outcome: Outcome, plan: Plan, story: Story) -> None:
    cluster = Cluster(world, outcome.knobs)
    small, paths = small_journals(outcome.knobs), TRANSACTION_PATHS | paths_with(outcome.knobs.hash)
    with watching(cluster.logbook, cluster.rules), counting(paths), small, restless(outcome.knobs):
        await until_broken(cluster, _scenario(cluster, outcome, plan, story))


async def _scenario(cluster: Cluster, outcome: Outcome, plan: Plan, story: Story) -> None:
    loop = asyncio.get_running_loop()
    await cluster.found()
    await all_serve(cluster, UP_S_MAX)
    await all_risen(cluster, UP_S_MAX)
    world = World(cluster, await cluster.metadata.connect(), KEYS, COUNTERS)
    users = Users(cluster, cluster.world.fork("users"), plan.plain_users, KEYS, COUNTERS, plan.pause_s)
    transactors = Transactors(cluster, cluster.world.fork("transactors"), plan.users, plan.pause_s)
    working = [cluster.spawn(work, name="transactor") for work in transactors.workers]
    photographer = Photographer(cluster, cluster.world.fork("snapshots"), plan.snapshots_s or 1.0)
    if plan.snapshots_s:
        working.append(cluster.spawn(photographer.work(), name="snapshots"))
    begun = loop.time()
    await asyncio.sleep(CALM_S)
    await first_steps(cluster)
    struck_from = loop.time()
    await story(world, transactors)
    struck_to = loop.time()
    heal(cluster)
    await end_balancing(cluster)
    transactors.calm_down()  # open moves take most of a run's time
    users.calm_down()
    photographer.calm_down()
    await world.moved()
    await world.retired()
    await all_serve(cluster, RECOVERY_S_MAX)
    outcome.recovery_s, served = loop.time() - struck_to, loop.time()
    await asyncio.sleep(CALM_S)
    transactors.stop()
    photographer.stop()
    await users.stop()
    for task in working:
        await task
    succeeded = cluster.recorder.succeeded
    outcome.answered = succeeded(begun, struck_from), succeeded(struck_from, struck_to), succeeded(served, loop.time())
    if outcome.knobs.power_cut_at_end:
        await power_cut_and_up(cluster)
    await at_rest(cluster)
    last = await transactors.read_all(REST_S_MAX)
    await at_rest(cluster)  # reads of several partitions are transactions, too
    await world.judge()
    judge(cluster)
    for read in last:
        check_values({op.key: None if result is None else result[0] for op, result in steps_of(read)}, read)
    outcome.statuses = checks.count_statuses(cluster)
    outcome.asked = asked(cluster.recorder.operations, cluster.knobs.hash)
    outcome.mutations = sum(len(entry.keys) for p in cluster.partitions for _, entry in cluster.logbook.entries_of(p))


def judge(cluster: Cluster) -> None:
    """Judge all operations on keys of transactors. Raises AssertionError."""
    operations = [each for each in cluster.recorder.operations if is_of_transactors(each)]
    may_lose_dates = cluster.knobs.may_lose_dates
    refusals = Refusals(cluster.knobs.partition, (), is_older=False, has_moves=True, may_lose_dates=may_lose_dates)
    refusals.check(operations)
    judge_transactions(cluster, operations)
    cluster.check()


# ── what happens meanwhile ────────────────────────────────────────────────────────────────────────────────────────────


def trouble(plan: Plan, outcome: Outcome) -> Story:
    """Return the story of the drawn faults, with moves. The outcome lists the faults that have struck."""

    async def strike(world: World, _: Transactors) -> None:
        cluster, knobs = world.cluster, world.cluster.knobs
        moving = cluster.spawn(_move(world, plan, knobs.chaos_s), name="moves") if plan.moves_s else None
        chaos = Chaos(cluster, cluster.world.fork("chaos"), list(knobs.faults), knobs.pace_s)
        if knobs.faults:
            await chaos.run(knobs.chaos_s)
        else:
            await asyncio.sleep(knobs.chaos_s)
        outcome.struck = Counter(name for _, name in chaos.struck)
        if moving is not None:
            await moving

    return strike


async def _move(world: World, plan: Plan, duration_s: float) -> None:
    """Plan moves for a while: of single keys of transactors, of wide ranges, and of partitions that join."""
    random = world.cluster.world.fork("moves")
    loop = asyncio.get_running_loop()
    until, joined = loop.time() + duration_s, 0
    await world.change(lambda ring: set_pace(ring, Pace(parallel=plan.moves_parallel)))
    while (pause := random.expovariate(1 / plan.moves_s)) < until - loop.time():
        await asyncio.sleep(pause)
        try:
            if random.random() < 0.15 and not joined:
                joined += 1
                await world.join("px")
            else:
                await shift(world, random)
        except (ValueError, MetadataError):
            continue  # such a range is already on its way


async def shift(world: World, random: Random, keys: tuple[bytes, ...] = (), target: str = "") -> None:
    """Plan that a range around one of `keys`, by default any of transactors, moves to another partition."""
    key = random.choice(keys or tuple(key for kind in KINDS for key in kind))
    (first, last), width = unit_of(world.ring.hash, key), random.choice((0, 0, 1 << 24, 1 << 28))
    others = [each for each in world.ring.partitions if each != world.ring.owner_of(first)]
    first, last = max(0, first - width), min(TOKENS - 1, last + width)
    goal = PartitionId(target or random.choice(sorted(others)))
    await world.change(lambda ring: shift_range(ring, first, last, goal))


def main(words: list[str]) -> None:
    """Play the runs one after the other and print their results."""
    parser = argparse.ArgumentParser(prog="python -m tests.sim.transacting.swarm", description="Replay runs.")
    parser.add_argument("seeds", nargs="+", type=int)
    logging.getLogger("kvstore").setLevel(logging.DEBUG if "TRACE" in os.environ else logging.CRITICAL)
    for seed in parser.parse_args(words).seeds:
        outcome = run(seed)
        counts: Counter[Status] = outcome.statuses
        print(
            f"seed {seed}: {outcome.virtual_s:.1f} s in {outcome.cpu_s:.2f} s of CPU, answered {outcome.answered}, "
            f"recovery {outcome.recovery_s:.1f} s, {dict(counts)}, {outcome.mutations} mutations, "
            f"{outcome.handles} callbacks, faults {dict(outcome.struck)}, trace {outcome.digest[:16]}"
        )


if __name__ == "__main__":
    main(sys.argv[1:])
