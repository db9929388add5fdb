"""Stories in which wall clocks jump by up to an hour. Each accident happens to the leading server (docs/protocol.md,
P28 to P31)."""

from __future__ import annotations

import asyncio
from typing import Any

from kvstore.meta.store import MetadataStore
from kvstore.partition.state import commands
from kvstore.partition.state.commands import Flag
from kvstore.proto import kv_pb2
from kvstore.server.clock.clock_judge import RATE
from kvstore.server.grpc.session import progress_message
from kvstore.types import LedgerId, PartitionId
from kvstore.wal.lists import LedgerLists
from kvstore.wal.pins import Pins
from tests.sim.judges.operations import Operation, Status
from tests.sim.nodes import Node
from tests.sim.stories.scenarios import P, Stage
from tests.sim.world.env import EPOCH_MS

HOUR_MS, MINUTE_MS = 3_600_000, 60_000
JUMPS_MS = (-HOUR_MS, -3_000, 3_000, MINUTE_MS, HOUR_MS)
KEY = b"tr1"
NOTICED_S = 6.0
"""Maximum time in seconds until another server leads."""


async def put_for(stage: Stage, node: Node, ttl_ms: int, key: bytes = KEY) -> Operation:
    """Write a key with this time to live until a write is acknowledged."""
    for _ in range(200):
        done = await stage.ask(commands.Put(key, value(stage), ttl_ms, Flag.RELATIVE_TTL), node)
        if done.status is Status.OK:
            return done
        await asyncio.sleep(0.05)
    raise AssertionError(f"{node.name} accepts no write: {done}")


async def found(stage: Stage, node: Node, key: bytes = KEY) -> Any:
    """Return the result of the first answered read."""
    for _ in range(200):
        read = await stage.get(node, key)
        if read.status is Status.OK:
            return read.result
        await asyncio.sleep(0.05)
    raise AssertionError(f"{node.name} answers no read: {read}")


def value(stage: Stage) -> bytes:
    """Return a value that no operation has written before."""
    return b"dated-%f" % stage.world.loop.time()


def store_of(node: Node) -> MetadataStore:
    assert node.store is not None
    return node.store


async def jump(stage: Stage, by_ms: int) -> Node:
    """Let the leader's date jump while the leader writes."""
    node = stage.leader
    node.sim.clock.step_wall(by_ms)
    await stage.put_until_done(node, b"other")
    return node


async def key_of_ten_minutes(stage: Stage) -> None:
    await put_for(stage, stage.leader, 10 * MINUTE_MS)
    node = await jump(stage, HOUR_MS)
    assert await found(stage, node) is not None
    node.sim.clock.set_right()
    await asyncio.sleep(NOTICED_S)
    for each in stage.cluster.nodes:
        assert await found(stage, each) is not None


async def requests_over_a_jump(stage: Stage) -> None:
    """No server refuses as expired the requests of a client whose time is from before the jump, nor of a client that
    has asked any server for the time."""
    await stage.get(stage.leader)
    seen_ms = stage.identity.seen_ms
    node = await jump(stage, HOUR_MS)
    for each in stage.cluster.nodes:
        assert (await request(stage, each, seen_ms)).status is Status.OK
        told = time_told_by(each)
        assert abs(told.time_ms - stage.others(node)[0].sim.clock.wall_ms()) < 3_000
        assert (await request(stage, each, told.time_ms)).status is Status.OK
    node.sim.clock.set_right()
    await asyncio.sleep(NOTICED_S)
    for each in stage.cluster.nodes:
        assert (await request(stage, each, time_told_by(each).time_ms)).status is Status.OK


def time_told_by(node: Node) -> kv_pb2.Progress:
    """Return the time that a client receives when it connects to this server first."""
    assert node.served is not None
    return progress_message(node.served.dispatcher, node.served.env.clock, P)


async def request(stage: Stage, node: Node, seen_ms: int) -> Operation:
    stage.identity.seen_ms = seen_ms
    number = stage.identity.next()
    op = commands.Put(b"with id", value(stage), request=number)
    for _ in range(5):
        done = await stage.ask(op, node)
        if done.status is not Status.INFO:
            break
        await asyncio.sleep(0.5)
    stage.identity.done(number)
    return done


async def pin_over_a_jump(stage: Stage) -> None:
    pins, ledger = await pins_of(stage)
    deadline_ms = stage.others(stage.leader)[0].sim.clock.wall_ms() + 10 * MINUTE_MS
    await pins.hold(P, "mine", ledger, deadline_ms=deadline_ms)
    await jump(stage, HOUR_MS)
    await asyncio.sleep(NOTICED_S)
    assert "mine" in await pins.names(P)


async def pins_of(stage: Stage) -> tuple[Pins, LedgerId]:
    store = store_of(stage.others(stage.leader)[0])
    lists = LedgerLists(store)
    listed, _ = await lists.read(P, latest=True)
    return Pins(store, lists), listed.ledgers[-1].id


async def ledgers(stage: Stage) -> list[LedgerId]:
    listed, _ = await LedgerLists(store_of(stage.others(stage.leader)[0])).read(P, latest=True)
    return [each.id for each in listed.ledgers]


async def log_ahead(stage: Stage) -> None:
    """Such a log may come from servers of an older version, or from machines that were all rebooted with wrong
    clocks: no server then has a date that elapsed time explains."""
    await reboot_all(stage, HOUR_MS)
    await stage.put_until_done(stage.leader)
    await reboot_all(stage, 0)
    leader = stage.leader
    ahead_ms = await ahead(stage, leader)
    assert ahead_ms > HOUR_MS - 60_000
    await put_for(stage, leader, 1_000)
    assert await found(stage, leader) is not None
    await asyncio.sleep(1.5)
    assert await found(stage, leader) is None
    for each in stage.cluster.nodes:
        assert (await request(stage, each, time_told_by(each).time_ms)).status is Status.OK
    await asyncio.sleep(20.0)
    assert await ahead(stage, stage.leader) < ahead_ms - 1_500


async def reboot_all(stage: Stage, wrong_ms: int) -> None:
    """Reboot all machines at once with clocks that are wrong by `wrong_ms`. Return when one leads."""
    for node in stage.cluster.nodes:
        node.crash(power=True)
        node.sim.clock.set_right()
        node.sim.clock.step_wall(wrong_ms)
        node.start()
    await stage.until(lambda: any(P in node.leads for node in stage.cluster.nodes))


async def ahead(stage: Stage, node: Node) -> int:
    """Return by how much record time is ahead of the date, in milliseconds."""
    await stage.put_until_done(node)
    replica = node.replica(PartitionId("p1"))
    assert replica is not None
    return replica.state.record_time_ms - node.sim.clock.wall_ms()


async def cold_start(stage: Stage) -> None:
    """One server starts with a wrong date, and before the others."""
    await put_for(stage, stage.leader, 10 * MINUTE_MS)
    first, *others = stage.cluster.nodes
    for node in stage.cluster.nodes:
        node.crash(power=True)
    first.sim.clock.step_wall(HOUR_MS)
    first.start()
    await asyncio.sleep(0.2)
    for node in others:
        node.start()
    assert await found(stage, others[0]) is not None
    assert abs(wrong_date_ms(first)) < 3_000


async def endpoint_without_a_date(stage: Stage, by_ms: int) -> None:
    """A machine reboots with a wrong clock. Clients connect to its server first and receive its time. A client with
    a time from the future would be refused until that time has come."""
    await stage.put(stage.leader)
    node = stage.others(stage.leader)[0]
    node.crash(power=True)
    node.sim.clock.step_wall(by_ms)
    node.start()
    await asyncio.sleep(5.0)
    told_ms = time_told_by(node).time_ms
    assert abs(told_ms - stage.leader.sim.clock.wall_ms()) < 3_000
    assert (await request(stage, node, told_ms)).status is Status.OK


async def endpoints_of_a_cold_start(stage: Stage) -> None:
    """All servers start at once, one with a date in the future. Clients connect to that server before any server is
    sure of its date."""
    await stage.put(stage.leader)
    bad = stage.cluster.nodes[0]
    for node in stage.cluster.nodes:
        node.crash(power=True)
    bad.sim.clock.step_wall(HOUR_MS)
    bad.start()
    await stage.until(lambda: bad.served is not None and bad.replica(P) is not None)
    told = [time_told_by(bad).time_ms]
    for node in stage.others(bad):
        node.start()
    for _ in range(100):
        told.append(time_told_by(bad).time_ms)
        await asyncio.sleep(0.05)
    assert max(told) < stage.others(bad)[0].sim.clock.wall_ms() + 3_000
    await stage.until(lambda: any(P in each.leads for each in stage.cluster.nodes))
    node = stage.leader
    bad.sim.clock.set_right()
    assert (await request(stage, node, max(told))).status is Status.OK


async def nobody_else_can_lead(stage: Stage) -> None:
    """One replica is dead, and the dates of the others are wrong by different amounts. A server without a replica is
    sure of its date."""
    hosts = [node for node in stage.cluster.nodes if node.id in stage.cluster.ring.partitions[P].replicas]
    (stranger,) = set(stage.cluster.nodes) - set(hosts)
    leader = stage.leader
    other, dead = [node for node in hosts if node is not leader]
    dead.crash()
    misjudge(leader, 2 * MINUTE_MS)
    misjudge(other, MINUTE_MS)
    await asyncio.sleep(2 * NOTICED_S)
    assert [node.served.clock_sync.report().is_sure for node in (leader, other, stranger) if node.served] == [0, 0, 1]
    assert P in leader.leads
    leader.crash(power=True)
    await asyncio.sleep(40.0)
    assert P in other.leads, "it is not sure of its date, but no other server can lead"


def misjudge(node: Node, by_ms: int) -> None:
    """Let the node's monotonic clock have run too fast, which no clock should do."""
    assert node.served is not None
    judge = node.served.clock_sync.clock.judge
    judge.offset_ms += by_ms
    judge.is_confirmed = False


def wrong_date_ms(node: Node) -> int:
    """Return by how much a server's date is ahead of the true time, in milliseconds."""
    assert node.served is not None
    return node.served.env.clock.date_ms() - EPOCH_MS - round(asyncio.get_running_loop().time() * 1000)


async def metadata_away(stage: Stage) -> None:
    """No other server could take over leadership."""
    leader = stage.leader
    stage.cluster.metadata.stop()
    await asyncio.sleep(1.0)
    misjudge(leader, MINUTE_MS)
    await asyncio.sleep(2 * NOTICED_S)
    assert leader.leads
    assert (await stage.put(leader)).status is Status.OK
    stage.cluster.metadata.start()
    await asyncio.sleep(2 * NOTICED_S)
    assert stage.leader is not leader


async def leader_whose_wall_clock_jumps(stage: Stage, by_ms: int = HOUR_MS) -> None:
    node = await jump(stage, by_ms)
    await asyncio.sleep(NOTICED_S)
    served = node.served
    assert served is not None
    assert served.env.clock.may_lead(), "a majority has confirmed its date"
    assert abs(wrong_date_ms(node)) < 3_000
    assert abs(served.clock_sync.statistics()["date_drift_s"] * 1000 - by_ms) < 3_000


async def leader_whose_date_is_wrong(stage: Stage) -> None:
    node = stage.leader
    misjudge(node, MINUTE_MS)
    await asyncio.sleep(NOTICED_S)
    assert not node.leads
    assert node.served is not None
    assert "2 other servers" in node.served.clock_sync.report().doubt
    assert stage.leader is not node


async def clocks_of_most(stage: Stage, by_ms: int = HOUR_MS) -> None:
    """The clocks of two of three servers step. Then all processes restart at once, then processes restart one by
    one, then machines do. Finally two machines reboot while the third server is down for a while."""
    stepped = stage.cluster.nodes[:2]
    for node in stepped:
        node.sim.clock.step_wall(by_ms)
    await _dates_move_slowly(stage, by_ms)
    for node in stage.cluster.nodes:
        node.crash()
    for node in stage.cluster.nodes:
        node.start()
    await _dates_move_slowly(stage, by_ms)
    for power in (False, True):
        for node in stage.cluster.nodes:
            node.crash(power=power)
            node.start()
            await stage.until(lambda node=node: node.served is not None and node.served.env.clock.may_lead())  # type: ignore[misc]
            await _dates_move_slowly(stage, by_ms)
    for node in stage.cluster.nodes:
        node.crash(power=node in stepped)
    for node in stepped:
        node.start()
    await asyncio.sleep(10.0)
    stage.cluster.nodes[2].start()
    await _dates_move_slowly(stage, by_ms)


async def _dates_move_slowly(stage: Stage, by_ms: int) -> None:
    await asyncio.sleep(NOTICED_S)
    await stage.until(lambda: all(node.served is not None for node in stage.cluster.nodes))
    for node in stage.cluster.nodes:
        moved_ms = wrong_date_ms(node)
        assert abs(moved_ms) < 1_000 + 1_000 * 2 * RATE * asyncio.get_running_loop().time()
        assert node.served is not None
        said = node.served.clock_sync.statistics()
        assert abs(said["date_behind_s"] * 1000 + moved_ms - by_ms) < 3_000
        assert not said["date_doubtful"]
    await stage.put_until_done(stage.leader)
