"""Stories that a store has to survive. They also reveal breakages that random runs reveal rarely. Several suites
play them; scenarios.py provides the stage."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from contextvars import Context
from typing import Any

import pytest

from kvstore.types import BookieId, EntryId
from kvstore.wal import opener
from kvstore.wal.recovery import Unknown
from kvstore.wal.takeover import LogTakeover
from tests.sim.judges.operations import Status
from tests.sim.nodes import Node
from tests.sim.stories.scenarios import Stage, Story
from tests.sim.world.loop import current_node


async def zombie_reads(stage: Stage) -> None:
    """The leader is cut from the metadata store and loses its session, then its writes stop. It answers reads for as
    long as it may, while another leader takes over and writes."""
    old = stage.leader
    await stage.put(old)
    _unseat_for_good(stage, old)
    await _read_here_write_there(stage, old, 6.0)
    stage.cluster.metadata.mend(old.name)


def zombie_whose_clock_stood_still(hidden_s: float) -> Story:
    """The former leader loses its session as in `zombie_reads`, and the next candidate begins its takeover at the
    worst moment. The old leader has just written and no longer reaches the other bookies, so nothing reports the
    fence to it. Its machine then pauses for `hidden_s` without its clock seeing the pause. Its lease ends that much
    later than it believes."""

    async def story(stage: Stage) -> None:
        old = stage.leader
        struck = asyncio.Event()

        def strike() -> None:
            for other in stage.others(old):
                stage.world.network.cut(old.name, other.name)
            old.pause(hidden=True)
            stage.world.loop.call_later(hidden_s, old.resume, context=Context())
            struck.set()

        await stage.put(old)
        with before_a_takeover(strike):
            _unseat_for_good(stage, old)
            while not struck.is_set():
                await stage.put(old)
                await asyncio.sleep(0.002)
            await _read_here_write_there(stage, old, 3.0)
        stage.world.network.heal()
        stage.cluster.metadata.mend(old.name)

    return story


@contextmanager
def before_a_takeover(strike: Callable[[], object]) -> Iterator[None]:
    """Call `strike`, outside of all nodes, when a candidate begins to take over the log for the first time."""
    run, left = LogTakeover.run, [strike]

    async def struck(self: Any, *args: Any) -> Any:
        if left:
            asyncio.get_running_loop().call_soon(left.pop(), context=Context())
            await asyncio.sleep(0)
        return await run(self, *args)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(LogTakeover, "run", struck)
        yield


async def acks_under_way(stage: Stage) -> None:
    """As in `zombie_reads`, but other bookies have stored a write that the leader does not know of yet. A successor
    finds the write, and must not show it while the old leader may still answer reads from before it."""
    old = stage.leader
    await stage.put(old)
    for other in stage.others(old):
        stage.world.network.cut_one_way(other.name, old.name)
    in_flight = stage.spawn(stage.put(old))
    await asyncio.sleep(0.005)
    _unseat_for_good(stage, old)
    await _read_here_write_there(stage, old, 4.0)
    stage.world.network.heal()
    stage.cluster.metadata.mend(old.name)
    await in_flight


async def wiped_bookie_answers(stage: Stage) -> None:
    """A write is on the leader's bookie and on one other bookie, whose disk is then lost. The leader is paused and
    cut from the third bookie. No bookie may answer that the write never existed."""
    old = stage.leader
    holder, stranger = stage.others(old)
    await stage.put_until_done(old)
    stage.world.network.cut(old.name, stranger.name)
    for _ in range(3):
        await stage.put_until_done(old)
    old.pause()
    holder.crash()
    holder.wipe()
    stage.cluster.lossy = holder
    stage.unseat(old)
    holder.start()
    await asyncio.sleep(8.0)
    old.resume()
    stage.world.network.heal()
    await stage.put_until_done(old)


async def holder_that_does_not_answer(stage: Stage) -> None:
    """A write is on the leader's bookie and on one other bookie. The leader is paused, the other bookie cannot be
    read, and the third bookie never had the write. It is unknown if the write exists, so no node may answer that it
    does not."""
    old = stage.leader
    stranger = stage.others(old)[-1]
    await stage.put_until_done(old)
    stage.world.network.cut(old.name, stranger.name)
    for _ in range(3):
        await stage.put_until_done(old)
    old.pause()
    stage.unseat(old)
    until = stage.world.loop.time() + 6.0

    async def ask(run: Any, bookie: BookieId, entry: EntryId | None) -> bool:
        if entry is None or _is_of(bookie, stranger) or stage.world.loop.time() > until:
            return True
        await asyncio.sleep(0.01)
        run._handle(Unknown(bookie, entry))
        return False

    with _asking(ask):
        await asyncio.sleep(6.0)
        old.resume()
        stage.world.network.heal()
        await stage.put_until_done(old)


async def late_add_meets_a_recovery(stage: Stage) -> None:
    """A recovery has fenced two bookies and did not reach the third. The old leader's last write is on its own
    bookie. The second bookie refuses the write, but its refusal is late. The write reaches the third bookie after
    the recovery has asked that bookie for it and found nothing. The third bookie must then refuse the write."""
    old = stage.leader
    network = stage.world.network
    await stage.put_until_done(old)
    candidates: list[Node] = []
    asked, stored = asyncio.Event(), asyncio.Event()

    async def ask(run: Any, bookie: BookieId, entry: EntryId | None) -> bool:
        process = current_node.get()
        candidate = next(node for node in stage.others(old) if process and node.name == process.name)
        if not candidates:
            candidates.append(candidate)
        if candidate is not candidates[0] or _is_of(bookie, candidate) or (stored.is_set() and entry is None):
            return True
        if entry is None and _is_of(bookie, old):
            asked.set()
            await stored.wait()
            return True
        if entry is None or _is_of(bookie, old):
            run._handle(Unknown(bookie, entry))
            return False
        return True

    with _asking(ask):
        _unseat_for_good(stage, old)
        await asked.wait()
        (candidate,) = candidates
        (third,) = (node for node in stage.others(old) if node is not candidate)
        await asyncio.sleep(0.02)  # the candidate's own bookie is fenced
        network.slow(old.name, candidate.name, 0.3)
        network.slow(old.name, third.name, 1.2)
        in_flight = stage.spawn(stage.put(old))
        await asyncio.sleep(0.01)
        stored.set()
        await asyncio.sleep(0.1)
        network.cut_one_way(candidate.name, old.name)
        await asyncio.sleep(4.0)
    network.slow(old.name, candidate.name, 0.0)
    network.slow(old.name, third.name, 0.0)
    network.heal()
    stage.cluster.metadata.mend(old.name)
    await in_flight


Ask = Callable[[Any, BookieId, EntryId | None], Awaitable[bool]]
"""Called before a recovery asks a bookie for an entry, or for its last entry. Returns True if the recovery may ask."""


@contextmanager
def _asking(before: Ask) -> Iterator[None]:
    """Let accidents happen to the requests of recoveries."""
    original = opener._Run._ask

    async def ask(self: Any, bookie: Any, entry: Any) -> None:
        if await before(self, bookie, entry):
            await original(self, bookie, entry)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(opener._Run, "_ask", ask)
        yield


def _is_of(bookie: BookieId, node: Node) -> bool:
    return bookie.startswith(f"{node.name}-")


def _unseat_for_good(stage: Stage, node: Node) -> None:
    stage.cluster.metadata.cut(node.name)
    stage.cluster.metadata.expire(node.name)


async def _read_here_write_there(stage: Stage, old: Node, seconds: float) -> None:
    """Read at the old leader, one read after the other. Read and write at the other nodes as soon as one of them
    leads."""
    loop = asyncio.get_running_loop()
    end = loop.time() + seconds

    async def reads(node: Node) -> None:
        while loop.time() < end:
            if node is old or node.leads:  # forwarded operations to the old leader would delay later ones
                await stage.get(node, timeout_s=0.1)
            await asyncio.sleep(0.02)

    async def writes(node: Node) -> None:
        while loop.time() < end:
            if node.leads and (await stage.put(node)).status is not Status.OK:
                await asyncio.sleep(0.02)
            await asyncio.sleep(0.02)

    others: list[Any] = [stage.spawn(work(node)) for node in stage.others(old) for work in (reads, writes)]
    await reads(old)
    for each in others:
        await each
