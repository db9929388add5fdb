"""Transactions over partitions survive what strikes their leaders and their ranges at the worst moments."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import replace
from itertools import count, permutations
from random import Random
from typing import Any

import pytest

from kvstore.errors import MetadataError
from kvstore.partition.config import PartitionConfig
from kvstore.partition.state import commands
from kvstore.partition.state.commands import Flag
from kvstore.ring.plan import shift_range
from kvstore.types import PartitionId
from tests.ring.rings import unit_of
from tests.sim.clients import Identity, Worker
from tests.sim.judges.operations import Operation, Status, transaction
from tests.sim.judges.probes import hits
from tests.sim.judges.transactions import ACCOUNTS, DEPOSIT
from tests.sim.moving.moves import World
from tests.sim.strikes.knobs import Knobs
from tests.sim.transacting import swarm
from tests.sim.transacting.accidents import Accident, at_records
from tests.sim.transacting.snapshots import Photographer
from tests.sim.transacting.swarm import Plan
from tests.sim.transacting.transactors import Transactors, reads

pytestmark = pytest.mark.sim

KNOBS = Knobs(partitions=3, partition=PartitionConfig(check_every=3), power_cut_at_end=False)
BUSY = Plan(users=3, pause_s=0.04, plain_users=1)
DOWN_S = 0.5
STRUCK_S_MAX = 20.0
Keys = Callable[[Any], bytes]


def home_key(op: Any) -> bytes:
    """Return the home key of the transaction to which a record belongs."""
    found: bytes = getattr(op, "home", op.key)
    return found


def key_elsewhere(op: Any) -> bytes:
    """Return a key that a participant has locked."""
    found: bytes = op.running.intents[0].key
    return found


async def until_struck(world: World, accident: Accident) -> None:
    """Return when the accident has struck as often as it should. Raises AssertionError."""
    loop = asyncio.get_running_loop()
    deadline = loop.time() + STRUCK_S_MAX
    while accident.left:
        assert loop.time() < deadline, f"struck only {accident.struck} times"
        await asyncio.sleep(0.1)
    accident.strike = None
    await asyncio.sleep(1.0)


def play(seed: int, accident: Accident, strike_of: Callable[[World], Any], knobs: Knobs = KNOBS) -> None:
    """Play a run in which the accident strikes."""

    async def story(world: World, _: Transactors) -> None:
        accident.strike = strike_of(world)
        await until_struck(world, accident)

    with at_records(accident):
        swarm.run(seed, knobs, BUSY, story)
    assert accident.struck


def crash_here(world: World) -> Any:
    """Kill the node that evaluates the record, before it can send it or a little later."""
    random = world.cluster.world.fork("crash")

    def strike(name: str, op: Any) -> None:
        world.cluster.spawn(down_and_up(world, name, random.choice((0.0, 0.0005, 0.002, 0.005))), name="crash")

    return strike


def crash_owner(key_of: Keys) -> Callable[[World], Any]:
    """Return a strike that kills the leader of the partition that owns a key."""

    def of(world: World) -> Any:
        random = world.cluster.world.fork("crash")

        def strike(_: str, op: Any) -> None:
            leader = world.cluster.leader(world.ring.partition_of(key_of(op)))
            if leader is not None:
                pause_s = random.choice((0.0, 0.0005, 0.002, 0.005))
                world.cluster.spawn(down_and_up(world, leader.name, pause_s), name="crash")

        return strike

    return of


async def down_and_up(world: World, name: str, after_s: float) -> None:
    await asyncio.sleep(after_s)
    node = next(each for each in world.cluster.nodes if each.name == name)
    if node.sim.is_running:
        node.crash()
        await asyncio.sleep(DOWN_S)
        node.start()


def move(key_of: Keys) -> Callable[[World], Any]:
    """Return a strike that moves a key to another partition."""

    def of(world: World) -> Any:
        random = world.cluster.world.fork("move")

        async def shift(key: bytes) -> None:
            (first, last), owner = unit_of(world.ring.hash, key), world.ring.partition_of(key)
            target = PartitionId(random.choice(sorted(each for each in world.ring.partitions if each != owner)))
            try:
                await world.change(lambda ring: shift_range(ring, first, last, target))
            except (ValueError, MetadataError):
                return  # the key is on its way

        def strike(_: str, op: Any) -> None:
            world.cluster.spawn(shift(key_of(op)), name="move")

        return strike

    return of


STRIKES: dict[str, tuple[str, Callable[[World], Any]]] = {
    "participant crashes at PREPARE": ("prepare", crash_here),
    "home crashes at PREPARE": ("prepare", crash_owner(home_key)),
    "home crashes at DECIDE": ("decide", crash_here),
    "participant crashes at DECIDE": ("decide", crash_owner(key_elsewhere)),
    "participant crashes at RESOLVE": ("resolve", crash_here),
    "home crashes at END": ("end", crash_here),
    "home key moves at PREPARE": ("prepare", move(home_key)),
    "participant's key moves at PREPARE": ("prepare", move(lambda op: op.key)),
    "home key moves at DECIDE": ("decide", move(home_key)),
    "participant's key moves at DECIDE": ("decide", move(key_elsewhere)),
    "participant's key moves at RESOLVE": ("resolve", move(lambda op: op.key)),
    "home key moves at END": ("end", move(home_key)),
}


@pytest.mark.parametrize("name", STRIKES)
def test_transactions_survive(name: str) -> None:
    record, strike_of = STRIKES[name]
    play(len(name), Accident(record), strike_of)


def test_home_paused_beyond_its_session_at_decide_says_nothing_wrong() -> None:
    """Its successor leads while the paused leader still believes that it may answer."""

    def of(world: World) -> Any:
        async def pause(name: str) -> None:
            node = next(each for each in world.cluster.nodes if each.name == name)
            node.pause()
            await asyncio.sleep(world.cluster.knobs.session_s + 1.0)
            if node.is_paused:
                node.resume()

        return lambda name, op: world.cluster.spawn(pause(name), name="pause")

    play(3, Accident("decide", times=1), of, replace(KNOBS, session_s=2.0))


# docs/protocol.md Tx13
def test_changes_up_to_a_pin_contain_the_intents_that_are_committed_there() -> None:
    """The store is pinned at the moment of decisions, so that their intents still exist."""

    def of(world: World) -> Any:
        photographer, numbers = Photographer(world.cluster, world.cluster.world.fork("photos"), 1.0), count()
        return lambda name, op: world.cluster.spawn(photographer.take(f"decided{next(numbers)}"), name="photo")

    before = hits.copy()
    play(1, Accident("decide", times=30, every=2), of)
    assert hits["transact.snapshot_with_intents"] > before["transact.snapshot_with_intents"]


def test_users_of_transactions_do_everything() -> None:
    before = hits.copy()
    swarm.run(1, KNOBS, replace(BUSY, pause_s=0.02), nothing)
    assert hits["transact.doubled_answer"] > before["transact.doubled_answer"]


async def nothing(world: World, _: Transactors) -> None:
    await asyncio.sleep(2.0)


# docs/protocol.md Tx11, Tx16
def test_read_transactions_succeed_under_steady_transfers() -> None:
    """Servers are so far apart that some key always changes between two passes over all accounts."""
    found: list[Operation] = []

    async def story(world: World, _: Transactors) -> None:
        cluster, random = world.cluster, world.cluster.world.fork("bank")
        workers = [Worker(cluster, f"bank{n}", Random(random.getrandbits(64)), Identity(random)) for n in range(11)]
        auditor, *movers = workers
        opening = [commands.Put(key, b"%d" % DEPOSIT, 0, Flag.IF_ABSENT) for key in ACCOUNTS]
        assert (await auditor.do(transaction(opening), with_id=False)).status is Status.OK
        auditor.attempts_max, auditor.timeout_s = 1, 10.0
        names = [node.name for node in cluster.nodes]
        for source, target in permutations(names, 2):
            cluster.network.slow(source, target, 0.02)

        async def transfer(worker: Worker) -> None:
            while len(found) < 5:
                giver, taker = worker.random.sample(ACCOUNTS, 2)
                ops = [commands.Increment(giver, -1), commands.Increment(taker, 1)]
                await worker.do(transaction(ops), with_id=False)

        transferring = [cluster.spawn(transfer(each), name="transfer") for each in movers]
        while len(found) < 5:
            found.append(await auditor.do(reads(ACCOUNTS)))
        for each in transferring:
            await each

    swarm.run(1, KNOBS, Plan(users=0, plain_users=0), story)
    assert all(each.status is Status.OK for each in found), found
