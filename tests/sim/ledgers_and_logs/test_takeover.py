"""Takeovers with an accident at every step: of the candidate, of the old leader, of both."""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from kvstore.meta import paths
from kvstore.partition.election.replica import Replica
from kvstore.partition.state.commands import Level
from kvstore.wal.leading.leader_log import LeaderLog
from tests.sim.judges.operations import Operation, Status
from tests.sim.nodes import Node
from tests.sim.stories.scenarios import KEY, Countdown, P, Stage, Stepped, Story, knobs, play
from tests.sim.stories.stories import (
    acks_under_way,
    holder_that_does_not_answer,
    late_add_meets_a_recovery,
    wiped_bookie_answers,
    zombie_reads,
)
from tests.sim.world.loop import current_node

pytestmark = pytest.mark.sim

STORIES = (zombie_reads, acks_under_way, wiped_bookie_answers, holder_that_does_not_answer, late_add_meets_a_recovery)
STEPS_MAX = 120


@pytest.fixture
def patch() -> Iterator[pytest.MonkeyPatch]:
    with pytest.MonkeyPatch.context() as context:
        yield context


def step_by_step(patch: pytest.MonkeyPatch, owner: type, method: str, accident: Callable[[int], object]) -> None:
    """Call `accident(count)` each time that `owner.method` waits, in any process."""
    original = getattr(owner, method)

    async def stepped(self: Any, *args: Any) -> Any:
        return await Stepped(original(self, *args), accident)

    patch.setattr(owner, method, stepped)


def node_of_this_process(stage: Stage) -> Node | None:
    process = current_node.get()
    return None if process is None else next(n for n in stage.cluster.nodes if n.name == process.name)


# ── the candidate ─────────────────────────────────────────────────────────────────────────────────────────────────────


def candidate_struck_at(
    patch: pytest.MonkeyPatch, step: int, strike: Callable[[Stage, Node], None], lease_ms: int
) -> bool:
    """Kill the leader and strike the first candidate at its `step`-th wait. Returns False if its takeover has fewer
    steps."""
    struck: list[Node] = []

    async def story(stage: Stage) -> None:
        first = stage.leader
        await stage.put(first)
        busy = [stage.spawn(stage.put(first, b"r%d" % n)) for n in range(3)]

        def accident(count: int) -> None:
            node = node_of_this_process(stage)
            if count == step and not struck and node is not None and node is not first:
                struck.append(node)
                strike(stage, node)

        step_by_step(patch, Replica, "_open", accident)
        await asyncio.sleep(0.002)
        first.crash()
        for each in busy:
            await each
        try:
            await stage.until(lambda: bool(struck) or stage.cluster.leader_other_than(first) is not None)
            if not struck:
                return
            victim = struck[0]
            third = next(node for node in stage.cluster.nodes if node not in (first, victim))
            first.start()
            await stage.put_until_done(third)
            if victim.is_paused:
                reading = [stage.spawn(stage.get(victim)) for _ in range(3)]
                victim.resume()
                for each in reading:
                    await each
                await stage.get(third)
            elif not victim.sim.is_running:
                victim.start()
        finally:
            patch.undo()

    play(story, knobs(lease_ms=lease_ms), seed=step)
    return bool(struck)


def kill(stage: Stage, node: Node) -> None:
    node.crash()


def cut_power(stage: Stage, node: Node) -> None:
    node.crash(power=True, silent=True)


def stop_and_unseat(stage: Stage, node: Node) -> None:
    node.pause()
    stage.world.network.at(stage.world.loop.time() + 0.01, stage.unseat, node)


@pytest.mark.parametrize(("strike", "lease_ms"), [(kill, 500), (cut_power, 0), (stop_and_unseat, 500)])
def test_candidate_may_fail_at_every_step_of_takeover(
    patch: pytest.MonkeyPatch, strike: Callable[[Stage, Node], None], lease_ms: int
) -> None:
    steps = 1
    while candidate_struck_at(patch, steps, strike, lease_ms):
        steps += 1
        assert steps < STEPS_MAX, "a takeover without end"
    assert steps > 10, f"a takeover of {steps} steps"


# ── the old leader ────────────────────────────────────────────────────────────────────────────────────────────────────


def leader_stopped_after(step: int, ask: Callable[[Stage, Node], Any], lease_ms: int) -> list[Operation]:
    """Pause the leader at the `step`-th callback after a request, let another node take over and write, then resume
    the leader and send the request again. Everything is judged."""
    seen: list[Operation] = []

    async def story(stage: Stage) -> None:
        old = stage.leader
        await stage.put(old)
        assert old.sim.process is not None
        asked = stage.spawn(ask(stage, old))
        Countdown(old.sim.process, step, old.pause)
        await stage.until(lambda: old.is_paused, 30)
        stage.unseat(old)
        new = await stage.until_led_by_another(old)
        seen.append(await stage.put_until_done(new))
        waiting = [stage.spawn(stage.get(old)) for _ in range(3)]
        old.resume()
        for _ in range(3):
            seen.append(await stage.get(old))
            seen.append(await stage.put(old, b"r3"))
        seen.append(await asked)
        seen.extend([await each for each in waiting])
        seen.append(await stage.get(new))

    play(story, knobs(lease_ms=lease_ms), seed=step)
    return seen


def put(stage: Stage, node: Node) -> Any:
    return stage.put(node)


def get(stage: Stage, node: Node) -> Any:
    return stage.get(node)


def strict_get(stage: Stage, node: Node) -> Any:
    return stage.get(node, KEY, Level.STRICT)


@pytest.mark.parametrize(("ask", "lease_ms"), [(put, 500), (get, 500), (get, 0), (strict_get, 500)])
def test_leader_paused_in_any_operation_returns_nothing_stale_on_resume(
    ask: Callable[[Stage, Node], Any], lease_ms: int
) -> None:
    answered = 0
    for step in range(1, 16):
        answered += sum(each.status is Status.OK for each in leader_stopped_after(step, ask, lease_ms))
    assert answered > 15 * 3


# ── both ──────────────────────────────────────────────────────────────────────────────────────────────────────────────


def roller_stopped_at(patch: pytest.MonkeyPatch, step: int) -> bool:
    """Pause the leader at the `step`-th wait of a roll, let another node take over, then resume the leader. Returns
    False if rolls have fewer steps."""
    struck: list[Node] = []

    async def story(stage: Stage) -> None:
        old = stage.leader

        def accident(count: int) -> None:
            if count == step and not struck and node_of_this_process(stage) is old:
                struck.append(old)
                old.pause()

        step_by_step(patch, LeaderLog, "_roll", accident)
        try:
            until = stage.world.loop.time() + 3.0
            while not struck and stage.world.loop.time() < until:
                await stage.put(old)
            if not struck:
                return
            stage.unseat(old)
            new = await stage.until_led_by_another(old)
            await stage.put_until_done(new)
            old.resume()
            for _ in range(4):
                await stage.put(old)
                await stage.get(old)
                await stage.put(new)
        finally:
            patch.undo()

    play(story, knobs(roll_entries=3), seed=step)
    return bool(struck)


def test_takeover_may_come_at_every_step_of_roll(patch: pytest.MonkeyPatch) -> None:
    steps = 1
    while roller_stopped_at(patch, steps):
        steps += 1
        assert steps < STEPS_MAX, "a roll without end"
    assert steps > 4, f"a roll of {steps} steps"


@pytest.mark.parametrize("seed", range(1, 9))
def test_one_of_two_leaders_that_both_won_election_continues(patch: pytest.MonkeyPatch, seed: int) -> None:
    """Every claim wins: the election decides nothing any more, only fencing and the list decide."""
    from kvstore.partition.election.leader_znode import Claims

    async def story(stage: Stage) -> None:
        first = stage.leader
        await stage.put(first)

        async def claim(self: Any, record: Any) -> bool:
            return True

        with pytest.MonkeyPatch.context() as both:
            both.setattr(Claims, "claim", claim)
            stage.unseat(first)
            await asyncio.sleep(0.2)
            for round_ in range(6):
                for node in stage.cluster.nodes:
                    await stage.put(node, b"r%d" % (round_ % 3))
                    await stage.get(node)

    play(story, knobs(lease_ms=500 if seed % 2 else 0, roll_entries=4), seed=seed)


@pytest.mark.parametrize("lease_ms", [1000, 100, 0])
@pytest.mark.parametrize("story", STORIES)
def test_superseded_leader_returns_nothing_stale(story: Story, lease_ms: int) -> None:
    for seed in range(1, 4):
        play(story, knobs(lease_ms=lease_ms), seed)


def test_old_leader_answers_under_its_lease_while_new_leader_waits() -> None:
    """The time from the fence to the list is longer than the lease. The old leader answers meanwhile, unless its
    last append is so old that its lease ends at once. In some runs it is not."""
    assert max(map(answered_meanwhile, range(3, 8))) > 5


def answered_meanwhile(seed: int) -> int:
    """Return the number of operations answered from the fence to the list."""
    stages: list[Stage] = []
    written: dict[str, list[float]] = defaultdict(list)

    async def story(stage: Stage) -> None:
        stages.append(stage)

        def note(path: str, old: bytes | None, new: bytes | None) -> None:
            written[path].append(stage.world.loop.time())

        stage.cluster.metadata.tree.observers.insert(0, note)
        await zombie_reads(stage)

    play(story, knobs(lease_ms=1000), seed)
    cluster = stages[0].cluster
    first, second = cluster.rules.lists[P][:2]
    assert second.epoch == first.epoch + 1
    taken, closed = written[paths.ledger(first.id)]
    assert closed - taken > 1.0
    return cluster.recorder.succeeded(taken, closed)
