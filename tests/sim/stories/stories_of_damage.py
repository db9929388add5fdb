"""Stories of replicas with different states, and ways to make the states differ."""

from __future__ import annotations

import asyncio

from kvstore.meta import paths
from kvstore.partition.election.jury import Trusted
from kvstore.partition.state.commands import Level
from tests.sim.judges.operations import Status
from tests.sim.nodes import Node
from tests.sim.stories.scenarios import P, Stage, knobs
from tests.sim.strikes.damage import damage

CALM = knobs(lead_back_s=100.0, check_every=5)
LEDGERS_MAX = 4
"""Maximum number of ledgers created while a damaged leader is detected: one for its successor and some for other
elections."""


async def busy(stage: Stage, count: int = 12) -> None:
    for _ in range(count):
        await stage.put_until_done(stage.cluster.nodes[0], b"other")


def ledgers(stage: Stage) -> int:
    return sum(paths.ledger_of(path) is not None for path in stage.cluster.metadata.tree.paths())


def is_well(node: Node) -> bool:
    replica = node.replica(P)
    return replica is not None and not replica.statistics()["failure"] and replica.state.position is not None


async def leader_is_damaged(stage: Stage) -> None:
    """The state of the leader differs from both other states. Its leadership ends, and the damaged copy never leads
    again. Once the copy is rebuilt, the server may lead again: its state matches the log like any other."""
    await busy(stage)
    before, bad = ledgers(stage), stage.leader
    damaged = bad.replica(P)
    damage(bad, P)
    await busy(stage)
    await stage.until(lambda: bad.replica(P) not in (damaged, None))
    await stage.until(lambda: all(map(is_well, stage.cluster.nodes)) and stage.cluster.leader(P) is not None)
    good = stage.leader
    assert good.replica(P) is not damaged
    assert (await stage.put(good, attempts=5)).status is Status.OK
    assert ledgers(stage) <= before + LEDGERS_MAX, "each attempt of a failed replica created a ledger"


async def all_differ(stage: Stage) -> Node:
    """All three replicas differ: no replica leads or answers, and no ledgers are created. Returns one of the nodes."""
    await busy(stage)
    first = stage.leader
    second, third = stage.others(first)
    last = first.replica(P).state.seq  # type: ignore[union-attr]
    await stage.until(lambda: all(node.replica(P).state.seq >= last for node in (second, third)))  # type: ignore[union-attr]
    damage(first, P)
    damage(second, P, by=1)
    for _ in range(8):
        await stage.put(first, b"other")
    await stage.until(lambda: stage.cluster.leader(P) is None)
    await asyncio.sleep(30.0)
    before = ledgers(stage)
    await asyncio.sleep(30.0)
    assert stage.cluster.leader(P) is None, "it is unknown if it is right"
    assert ledgers(stage) == before, "a replica that may be damaged has begun a takeover"
    for node in stage.cluster.nodes:
        assert not is_well(node)
        for level in (Level.STALE, Level.SESSION):
            assert (await stage.get(node, level=level)).status is not Status.OK
    return third


async def barred_leader_starts_again(stage: Stage) -> None:
    """The leader is damaged, one replica has reported it, and the third is down: it is unknown which of the two is
    right. Then both restart, and the replica that reported the difference stays down. Servers without replicas also
    hold copies of entries."""
    await busy(stage)
    bad = stage.leader
    replicas = [node for node in stage.others(bad) if node.replica(P) is not None]
    third, teller = replicas
    third.crash()
    damage(bad, P, value=(b"other", b"nobody wrote this"))
    for _ in range(8):
        await stage.put(bad, b"elsewhere")
    await stage.until(lambda: not is_well(bad) and not is_well(teller))
    await asyncio.sleep(1.0)
    teller.crash()
    bad.crash()
    await asyncio.sleep(5.0)
    bad.start()
    for _ in range(40):
        await asyncio.sleep(0.5)
        assert P not in bad.leads, "no operator has declared it right"
    for level in (Level.STALE, Level.SESSION):
        assert (await stage.get(bad, b"other", level=level)).status is not Status.OK
    third.start()
    teller.start()
    await stage.until(lambda: all(is_well(each) for each in (bad, *replicas)))
    found = await stage.get(bad, b"other", level=Level.STALE)
    assert found.status is not Status.OK or found.result.value != b"nobody wrote this"


async def good_leader_starts_again(stage: Stage) -> None:
    """A damaged replica reports a difference to the healthy leader and dies for good, while the third replica is
    down. The leader stays barred after its restart until the third replica confirms its state."""
    await busy(stage)
    good = stage.leader
    third, bad = [node for node in stage.others(good) if node.replica(P) is not None]
    await stage.until(lambda: is_well(bad))
    third.crash()
    damage(bad, P)
    for _ in range(8):
        await stage.put(good, b"other")
    await stage.until(lambda: not is_well(good) and not is_well(bad))
    bad.crash()
    good.crash()
    good.start()
    third.start()
    await stage.until(lambda: is_well(good) and is_well(third) and stage.cluster.leader(P) is not None)
    await stage.until(lambda: good.replica(P).state.reported.since == 0)  # type: ignore[union-attr]
    await asyncio.sleep(5.0)  # it is on disk one flush later
    third.crash()
    good.crash()
    good.start()
    assert (await stage.put_until_done(good)).status is Status.OK, "a settled difference does not bar after a restart"


async def declare(node: Node) -> None:
    """Do the same as `kvstore partition trust`."""
    claims = node.replica(P)._claims  # type: ignore[union-attr]
    said = (await claims.published())[node.id].doubt
    assert said is not None
    await claims.trust(Trusted(node.id, said[1], said[2]))
