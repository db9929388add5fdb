"""Administration of the ring: plans are shown first, made in one step, and refused with a reason."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import replace
from random import Random
from typing import Any

import pytest

from kvstore.env import Env
from kvstore.errors import InvalidRequest, MetadataUnavailable
from kvstore.meta import codec, paths
from kvstore.meta.memory import MemoryStore
from kvstore.meta.store import ensure_path
from kvstore.partition.election.ranking import Published
from kvstore.partition.state.commands import Code, ScanTokens
from kvstore.proto import admin_pb2
from kvstore.ring import TOKENS, MoveId, MoveState, Ring, plan, steps
from kvstore.ring.moves import Pace
from kvstore.ring.operations import REMEMBERED_MAX
from kvstore.server.cluster import proposal
from kvstore.server.grpc.ring_admin import RingAdmin
from kvstore.server.load.load import HotKey, PartitionLoad
from kvstore.types import LedgerId, PartitionId, Seq, ServerId
from kvstore.versions import LATEST, Fixed
from kvstore.wal.lists import LedgerLists
from kvstore.wal.pins import Pin, Pins
from tests.client.model import Endpoint, View
from tests.client.serving import ModelClock
from tests.ring.rings import differences, new_ring, settle

P1 = PartitionId("p1")
Action = admin_pb2.ChangeRingRequest
SERVERS = {ServerId(f"n{i}"): "" for i in range(1, 4)}


class Node:
    """The ring in memory, with partitions of a thousand keys of 68 bytes each."""

    id = ServerId("n1")

    def __init__(self, servers: int = 3) -> None:
        self.store = MemoryStore()
        ring = new_ring([PartitionId(f"p{i}") for i in range(1, 4)], SERVERS, 3)
        up = {ServerId(f"n{i}"): Endpoint(f"n{i}:1", f"n{i}:2", f"n{i}:3", "") for i in range(1, servers + 1)}
        self.topology = View(ring, {}, up)
        self.rings = self
        self.versions = Fixed()
        self.silent: set[str] = set()
        self.plans: list[bool] = []
        self.parts: dict[MoveId, float] = {}
        self.changed: dict[ServerId, Endpoint] = {}
        """Registrations that no watch has reported."""

    @property
    def ring(self) -> Ring:
        return self.topology.ring

    async def change(self, step: Callable[[Ring], Ring], *, plans: bool = False) -> Ring:
        self.plans.append(plans)
        self.have(step(self.ring))
        return self.ring

    def have(self, ring: Ring) -> None:
        self.topology = replace(self.topology, ring=ring)

    async def reread_servers(self) -> None:
        self.topology.servers.update(self.changed)

    async def copied(self) -> dict[MoveId, float]:
        return self.parts

    async def loads(self) -> dict[PartitionId, PartitionLoad]:
        hot = (HotKey(b"k1", 0.2),)
        return {P1: PartitionLoad(P1, 9_000.0, 4_000.0, 1e6, hot, tuple(range(0, 1 << 32, 1 << 24)))}

    def on_ring(self, changed: Callable[[], None]) -> Callable[[], None]:
        raise NotImplementedError

    def submit(self, ops: Any, sink: Any, tokens: Any, ring_version: int = 0, partition: Any = None) -> None:
        if partition in self.silent:
            return
        (op,), (token,) = ops, tokens
        result = 1000 if op.code == Code.COUNT else ([(b"k" * 4, (b"v" * 32, 0, 0))], None)
        asyncio.get_running_loop().call_soon(sink.complete, token, result)


@pytest.fixture
def node() -> Node:
    return Node()


@pytest.fixture
def admin(node: Node) -> RingAdmin:
    nothing: Any = None
    return RingAdmin(Env(ModelClock(), Random(1), nothing, nothing, nothing, nothing), node, node)  # type: ignore[arg-type]


async def test_dry_run_shows_keys_bytes_and_balance_and_changes_nothing(admin: RingAdmin, node: Node) -> None:
    before = node.ring
    answer = await admin.change(Action(action=Action.ADD, partitions=["p4"], dry_run=True))
    assert node.ring is before
    assert (answer.version_before, answer.version) == (1, 0)
    assert {(move.target, move.state) for move in answer.moves} == {("p4", "planned")}
    assert answer.keys == pytest.approx(750, abs=40)
    assert answer.bytes == pytest.approx(750 * 68, rel=0.06)
    assert 1 <= answer.balance <= 1.05
    assert sum(row.share for row in answer.partitions) == pytest.approx(1)


async def test_plan_is_made_in_one_step_as_shown(admin: RingAdmin, node: Node) -> None:
    shown = await admin.change(Action(action=Action.ADD, count=2, dry_run=True))
    done = await admin.change(Action(action=Action.ADD, count=2))
    assert done.version == node.ring.version == 2
    assert list(done.moves) == list(shown.moves)
    assert {"p4", "p5"} < set(node.ring.partitions)


async def test_plan_for_a_changed_ring_is_refused(admin: RingAdmin, node: Node) -> None:
    await admin.change(Action(action=Action.PAUSE))
    with pytest.raises(InvalidRequest, match="expected ring version 1, it is now 2"):
        await admin.change(Action(action=Action.ADD, count=1, ring_version=1))


@pytest.mark.parametrize("silent", ["p1", "p2"])
async def test_partition_that_does_not_answer_is_missing_from_the_estimate(
    admin: RingAdmin, node: Node, monkeypatch: pytest.MonkeyPatch, silent: str
) -> None:
    monkeypatch.setattr("kvstore.server.grpc.ring_admin.ASK_S", 0.01)
    node.silent = {silent}
    answer = await admin.change(Action(action=Action.REMOVE, partitions=["p1", "p2"], dry_run=True))
    assert {row.id for row in answer.partitions if row.HasField("keys")} == {"p1", "p2"} - {silent}
    assert answer.keys == pytest.approx(1000, abs=16)
    assert answer.bytes == pytest.approx(1000 * 68, rel=0.05)


async def test_new_partition_has_as_many_replicas_when_a_server_is_down(admin: RingAdmin, node: Node) -> None:
    away = node.topology.servers.pop(ServerId("n3"))
    with pytest.raises(
        InvalidRequest, match="expected 3 machines for new replicas, like the existing partitions, got 2"
    ):
        await admin.change(Action(action=Action.ADD, partitions=["p4"]))
    await admin.change(Action(action=Action.ADD, partitions=["p4"], replicas=2))
    node.topology.servers[ServerId("n3")] = away
    await admin.change(Action(action=Action.ADD, partitions=["p5"]))
    assert [len(node.ring.partitions[PartitionId(each)].replicas) for each in ("p4", "p5")] == [2, 3]


async def test_record_size_is_sampled_when_the_last_range_is_empty(
    admin: RingAdmin, node: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    [source] = {node.ring.owner_of(0)}
    full = 0

    def submitted(ops: Any, sink: Any, tokens: Any, ring_version: int = 0, partition: Any = None) -> None:
        """All records of a partition have the token 0."""
        (op,), (token,) = ops, tokens
        if isinstance(op, ScanTokens) and op.token != full:
            asyncio.get_running_loop().call_soon(sink.complete, token, ([], None))
        else:
            Node.submit(node, ops, sink, tokens, ring_version, partition)

    monkeypatch.setattr(node, "submit", submitted)
    answer = await admin.change(Action(action=Action.REMOVE, partitions=[source], dry_run=True))
    assert answer.bytes == pytest.approx(1000 * 68, rel=0.05)


@pytest.mark.parametrize(
    ("request_", "why"),
    [
        (Action(action=Action.ADD, partitions=["p1"]), "p1 is or was in the ring"),
        (Action(action=Action.ADD, partitions=["P 4"]), "expected lower-case letters"),
        (Action(action=Action.ADD, partitions=["p4", "p4"]), "expected each partition once"),
        (Action(action=Action.ADD, replicas=4), "expected 1 to 3 replicas"),
        (Action(action=Action.REMOVE), "expected partitions to remove"),
        (Action(action=Action.REMOVE, partitions=["p9"]), "expected a partition that stays"),
        (Action(action=Action.REMOVE, partitions=["p1", "p2", "p3"]), "at least one partition to stay"),
        (Action(action=Action.MOVE, source="p1", target="p1", share=0.1), "expected a target other"),
        (Action(action=Action.MOVE, source="p1", target="p2", share=0.5), "tokens of p1 to move"),
        (Action(action=Action.MOVE, first=9, last=3, target="p2"), "expected first <= last"),
        (Action(action=Action.CANCEL, moves=[7]), "move 7 is not in progress"),
        (Action(action=Action.THROTTLE, parallel=0), "expected bytes_per_s >= 0 and parallel >= 1"),
    ],
)
async def test_impossible_change_is_refused_with_the_reason(
    admin: RingAdmin, node: Node, request_: admin_pb2.ChangeRingRequest, why: str
) -> None:
    before = node.ring
    with pytest.raises(InvalidRequest, match=why):
        await admin.change(request_)
    request_.dry_run = True
    with pytest.raises(InvalidRequest, match=why):
        await admin.change(request_)
    assert node.ring is before


async def test_pause_resume_and_throttle_change_only_the_pace(admin: RingAdmin, node: Node) -> None:
    await admin.change(Action(action=Action.PAUSE))
    await admin.change(Action(action=Action.THROTTLE, bytes_per_s=1_000_000))
    assert (node.ring.pace.paused, node.ring.pace.bytes_per_s, node.ring.pace.parallel) == (
        True,
        1_000_000,
        Pace().parallel,
    )
    await admin.change(Action(action=Action.RESUME))
    assert (node.ring.pace.paused, node.ring.pace.bytes_per_s) == (False, 1_000_000)


async def test_plans_lists_exactly_the_planning_actions(admin: RingAdmin, node: Node) -> None:
    """All other actions may be written when the ring is too large for another plan."""
    for action, names in ((Action.ADD, ["p7"]), (Action.PAUSE, []), (Action.CANCEL, [])):
        await admin.change(Action(action=action, partitions=names))
    assert node.plans == [True, False, False]


async def test_cancel_keeps_completed_moves(admin: RingAdmin, node: Node) -> None:
    before = node.ring
    await admin.change(Action(action=Action.ADD, count=1))
    first, second, *_ = sorted(node.ring.moves)
    ring = steps.flip(steps.begin(node.ring, first, 1), first)
    node.have(steps.begin(ring, second, 1))
    with pytest.raises(InvalidRequest, match="move it back instead"):
        await admin.change(Action(action=Action.CANCEL, moves=[first]))
    size = node.ring.moves[first].size
    answer = await admin.change(Action(action=Action.CANCEL))
    assert {move.id: move.state for move in node.ring.moves.values()} == {
        first: MoveState.FLIPPED,
        second: MoveState.CANCELLING,
    }
    assert len(answer.moves) == 15
    assert differences(before, settle(node.ring)) == size


async def test_status_shows_progress_and_remaining_time(admin: RingAdmin, node: Node) -> None:
    node.have(plan.shift(node.ring, P1, PartitionId("p2"), TOKENS // 8, now_ms=1))
    half = sum(move.size for move in node.ring.moves.values()) // 2
    done = 0
    for id in sorted(node.ring.moves):
        if done < half:
            done += node.ring.moves[id].size
            node.have(steps.flip(steps.begin(node.ring, id, 1), id))
    status = await admin.status()
    assert 0.5 <= status.progress < 0.75
    assert status.moves_planned == len(status.moves)
    elapsed_s = (ModelClock().wall_ms() - 1) / 1000
    assert status.eta_s == pytest.approx(elapsed_s * (1 - status.progress) / status.progress)
    await admin.change(Action(action=Action.PAUSE))
    assert not (await admin.status()).HasField("eta_s"), "paused moves are never done"


async def test_status_of_a_move_shows_copied_keys_and_bytes(admin: RingAdmin, node: Node) -> None:
    await admin.change(Action(action=Action.ADD, partitions=["p4"]))
    half, all_, none = sorted(node.ring.moves)[:3]
    node.parts = {half: 0.5, all_: 1.0}
    rows = {row.id: row for row in (await admin.status()).moves}
    for id, part in ((half, 0.5), (all_, 1.0), (none, 0.0)):
        expected = 1000 * node.ring.moves[id].size / TOKENS / node.ring.shares()[node.ring.moves[id].source]
        assert rows[id].keys == pytest.approx(expected, abs=1)
        assert rows[id].bytes == pytest.approx(68 * expected, abs=68)
        assert rows[id].keys_copied == pytest.approx(part * expected, abs=1)
        assert rows[id].bytes_copied == pytest.approx(part * 68 * expected, abs=68)
    node.have(steps.flip(steps.begin(node.ring, none, 1), none))
    rows = {row.id: row for row in (await admin.status()).moves}
    assert rows[none].keys_copied == rows[none].keys > 0


async def test_copied_part_of_open_moves_counts_as_progress(admin: RingAdmin, node: Node) -> None:
    await admin.change(Action(action=Action.ADD, partitions=["p4"]))
    assert (await admin.status()).progress == 0
    node.parts = dict.fromkeys(node.ring.moves, 0.25)
    assert (await admin.status()).progress == pytest.approx(0.25)


async def test_replica_moves_to_a_running_server(admin: RingAdmin, node: Node) -> None:
    with pytest.raises(InvalidRequest, match=r"up and not draining \(n1, n2, n3\), got 'n4'"):
        await admin.change_replicas(admin_pb2.ChangeReplicasRequest(partition="p1", newcomer="n4", leaving="n1"))
    node.topology.servers[ServerId("n4")] = Endpoint("n4:1", "n4:2", "n4:3", "")
    await ensure_path(node.store, paths.partition_replicas(P1))
    path = paths.partition_replica(P1, ServerId("n2"))
    await node.store.create(path, Published(Seq(60), Seq(60), 2, "x").encode(), ephemeral=True)
    request = admin_pb2.ChangeReplicasRequest(partition="p1", newcomer="n4", leaving="n1")
    node.versions = Fixed(cluster=LATEST + 1)  # docs/protocol.md V2
    with pytest.raises(InvalidRequest, match="got 'n4'"):
        await admin.change_replicas(request)
    node.versions = Fixed()
    [move] = (await admin.change_replicas(request)).replacing
    assert (move.partition, move.newcomer, move.leaving) == ("p1", "n4", "n1")
    assert (move.newcomer_sequence, move.leader_sequence) == (0, 60)


async def test_replica_moves_to_a_server_whose_drain_ended_just_now(admin: RingAdmin, node: Node) -> None:
    up = Endpoint("n4:1", "n4:2", "n4:3", "")
    node.topology.servers[ServerId("n4")] = replace(up, draining=True)
    node.changed = {ServerId("n4"): up}
    request = admin_pb2.ChangeReplicasRequest(partition="p1", newcomer="n4", leaving="n1")
    assert len((await admin.change_replicas(request)).replacing) == 1


async def test_new_partitions_use_servers_that_registered_just_now(admin: RingAdmin, node: Node) -> None:
    node.changed = {ServerId("n4"): Endpoint("n4:1", "n4:2", "n4:3", "")}
    await admin.change(Action(action=Action.ADD, partitions=["p4"]))
    assert "n4" in node.ring.partitions[PartitionId("p4")].replicas


async def test_server_is_drained_only_when_others_can_take_its_replicas(admin: RingAdmin, node: Node) -> None:
    with pytest.raises(InvalidRequest, match="no other server can take the replicas of p1, p2, p3; add a server first"):
        await admin.change_replicas(admin_pb2.ChangeReplicasRequest(drain="n1"))
    for stranger in (admin_pb2.ChangeReplicasRequest(drain="n7"), admin_pb2.ChangeReplicasRequest(undrain="n7")):
        with pytest.raises(InvalidRequest, match="got n7"):
            await admin.change_replicas(stranger)
    node.topology.servers[ServerId("n4")] = Endpoint("n4:1", "n4:2", "n4:3", "")
    assert (await admin.change_replicas(admin_pb2.ChangeReplicasRequest(drain="n1"))).draining == ["n1"]
    assert (await admin.change_replicas(admin_pb2.ChangeReplicasRequest(undrain="n1"))).draining == []
    node.topology.servers[ServerId("n4")] = replace(node.topology.servers[ServerId("n4")], draining=True)
    undrained = await admin.change_replicas(admin_pb2.ChangeReplicasRequest(undrain="n4"))
    assert undrained.draining == [], "it drains, holds nothing, and the ring does not know of it"


async def test_loads_show_hot_keys_and_suggested_moves(admin: RingAdmin, node: Node) -> None:
    answer = await admin.loads()
    [row] = answer.partitions
    assert (row.id, row.ops_per_s, [(hot.key, hot.share) for hot in row.hot_keys]) == ("p1", 9_000, [(b"k1", 0.2)])
    [suggestion] = answer.suggestions
    assert (suggestion.source, suggestion.target) == ("p1", "p2")
    request = Action(action=Action.MOVE, target="p2", first=suggestion.first, last=suggestion.last, dry_run=True)
    assert {(move.source, move.target) for move in (await admin.change(request)).moves} == {("p1", "p2")}


def test_new_partition_names_follow_the_largest_used_number() -> None:
    ring = new_ring([PartitionId("p1"), PartitionId("p7"), PartitionId("east")], SERVERS, 1)
    assert proposal.next_ids(ring, 2) == ["p8", "p9"]
    ring = settle(plan.leave(ring, [PartitionId("p7")]))
    assert proposal.next_ids(ring, 1) == ["p8"]


@pytest.mark.parametrize(
    ("asked", "why"),
    [
        ({"action": Action.ADD, "partitions": ["p1"]}, "p1 is or was in the ring"),
        ({"action": Action.ADD, "partitions": ["p4", "p4"]}, "expected each partition once"),
        ({"action": Action.ADD, "partitions": ["P 4"]}, "expected lower-case letters"),
        (
            {"action": Action.ADD, "count": 1_000_000_000},
            "expected at most 1000 partitions, got 1000000000 in addition to 3",
        ),
        ({"action": Action.ADD, "count": 1, "replicas": 9}, "expected 1 to 3 replicas"),
        ({"action": Action.REMOVE}, "expected partitions to remove"),
        ({"action": Action.REMOVE, "partitions": ["p9"]}, "got p9"),
        ({"action": Action.REMOVE, "partitions": ["p1", "p2", "p3"]}, "expected at least one partition to stay"),
        ({"action": Action.REMOVE, "partitions": ["p1", "p2", "p3", "p4"]}, "got p4"),
        ({"action": Action.MOVE, "source": "p1", "target": "p1", "share": 0.1}, "expected a target other"),
        ({"action": Action.MOVE, "source": "p1", "target": "p2", "share": 0.9}, "tokens of p1 to move"),
        ({"action": Action.MOVE, "source": "p1", "target": "p9", "share": 0.1}, "got p9"),
        (
            {"action": Action.MOVE, "source": "p1", "target": "p2", "share": float("nan")},
            "expected a share of the ring",
        ),
        (
            {"action": Action.MOVE, "source": "p1", "target": "p2", "share": float("inf")},
            "expected a share of the ring",
        ),
        ({"action": Action.MOVE, "target": "p2", "first": 9, "last": 3}, "expected first <= last"),
        ({"action": Action.CANCEL}, "no open move"),
        ({"action": Action.CANCEL, "moves": [7]}, "move 7 is not in progress"),
        ({"action": Action.THROTTLE, "parallel": 0}, "parallel >= 1"),
    ],
)
async def test_invalid_change_is_refused_in_one_line(
    admin: RingAdmin, node: Node, asked: dict[str, Any], why: str
) -> None:
    before = node.ring
    for dry_run in (True, False):
        with pytest.raises(InvalidRequest, match=why) as refused:
            await admin.change(Action(**asked, dry_run=dry_run))
        assert "\n" not in str(refused.value)
    assert node.ring is before


async def test_concurrent_additions_get_distinct_names(admin: RingAdmin, node: Node) -> None:
    await asyncio.gather(*(admin.change(Action(action=Action.ADD, count=1)) for _ in range(2)))
    assert {"p4", "p5"} < set(node.ring.partitions)
    given = await asyncio.gather(
        *(admin.change(Action(action=Action.ADD, partitions=["extra"])) for _ in range(2)), return_exceptions=True
    )
    assert sum(isinstance(each, InvalidRequest) for each in given) == 1


async def test_throttle_of_zero_is_no_limit(admin: RingAdmin, node: Node) -> None:
    await admin.change(Action(action=Action.THROTTLE, bytes_per_s=0))
    assert node.ring.pace.bytes_per_s == 0


async def test_hold_on_all_logs_covers_joining_partitions(admin: RingAdmin, node: Node) -> None:
    """A log without a hold was gone before the nightly incremental snapshot read it."""
    pins = Pins(node.store, LedgerLists(node.store))
    now_ms = ModelClock().wall_ms()
    held = {"feed-nightly@9": now_ms + 60_000, "feed-over@1": now_ms - 1, "p7.copy": 0, "snapshot-1": now_ms + 60_000}
    for name, deadline_ms in held.items():
        path = paths.partition_pin(P1, name)
        await ensure_path(node.store, paths.parent(path))
        await node.store.create(path, codec.encode(Pin(LedgerId(7), deadline_ms)))
    await admin.change(Action(action=Action.ADD, partitions=["p4", "p5"]))
    for joined in ("p4", "p5"):
        assert await pins.all(PartitionId(joined)) == [("feed-nightly@9", Pin(LedgerId(0), now_ms + 60_000))]
    await node.store.create(paths.partition_pin(P1, "feed-of-tomorrow@9"), b"{}")
    await admin.change(Action(action=Action.ADD, partitions=["p6"]))
    assert [name for name, _ in await pins.all(PartitionId("p6"))] == ["feed-nightly@9"], "one that cannot be read"


async def test_partition_joins_when_its_log_cannot_be_held(
    admin: RingAdmin, node: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def away(*_: object) -> None:
        raise MetadataUnavailable("away")

    monkeypatch.setattr(Pins, "hold_as_others", away)
    await admin.change(Action(action=Action.ADD, partitions=["p4"]))
    assert "p4" in node.ring.partitions


# ── once, and as shown (docs/protocol.md, H11) ────────────────────────────────────────────────────────────────────────


async def test_repeated_operation_is_done_once_with_the_same_answer(admin: RingAdmin, node: Node) -> None:
    asked = Action(action=Action.ADD, count=1, operation="a1")
    first = await admin.change(asked)
    node.have(steps.set_pace(node.ring, Pace(paused=True)))
    again = await admin.change(asked)
    assert set(node.ring.partitions) == {"p1", "p2", "p3", "p4"}
    assert (again.version_before, again.version) == (first.version_before, first.version) == (1, 2)
    assert list(again.moves) == list(first.moves)
    assert (first.was_done, again.was_done) == (False, True)
    another = await admin.change(Action(action=Action.ADD, count=1, operation="a2"))
    assert another.version == 4
    assert "p5" in node.ring.partitions


async def test_answer_to_an_old_operation_names_its_open_moves(admin: RingAdmin, node: Node) -> None:
    asked = Action(action=Action.MOVE, source="p1", target="p2", share=0.01, operation="m1")
    await admin.change(asked)
    node.have(settle(node.ring))
    again = await admin.change(asked)
    assert (again.was_done, list(again.moves)) == (True, [])
    assert not node.ring.moves, "nothing more moves"


async def test_id_is_valid_for_one_request_only(admin: RingAdmin) -> None:
    await admin.change(Action(action=Action.ADD, count=1, operation="a1"))
    with pytest.raises(InvalidRequest, match="another request, done as ring version 2"):
        await admin.change(Action(action=Action.ADD, count=2, operation="a1"))
    with pytest.raises(InvalidRequest, match="lower-case letters, digits and dashes"):
        await admin.change(Action(action=Action.ADD, count=1, operation="no id"))


async def test_every_change_of_the_ring_is_made_once(admin: RingAdmin, node: Node) -> None:
    await admin.change(Action(action=Action.ADD, count=1, operation="add"))
    for action in (Action.CANCEL, Action.PAUSE, Action.RESUME):
        asked = Action(action=action, operation=f"o{action}")
        done = await admin.change(asked)
        ring = node.ring
        again = await admin.change(asked)
        assert node.ring is ring
        assert (again.version, again.was_done) == (done.version, True)


async def test_remembered_operations_are_bounded(admin: RingAdmin, node: Node) -> None:
    for number in range(REMEMBERED_MAX + 3):
        paused = Action.PAUSE if number % 2 == 0 else Action.RESUME
        await admin.change(Action(action=paused, operation=f"o{number}"))
    assert [each.id for each in node.ring.operations] == [f"o{number}" for number in range(3, REMEMBERED_MAX + 3)]


async def test_shown_plan_is_made_exactly_or_refused(admin: RingAdmin, node: Node) -> None:
    shown = await admin.change(Action(action=Action.ADD, count=1, dry_run=True))
    later = await admin.change(Action(action=Action.ADD, count=1, dry_run=True))
    assert shown.plan == later.plan, "when it is asked does not matter"
    with pytest.raises(InvalidRequest, match="has become"):
        await admin.change(Action(action=Action.ADD, count=2, plan=shown.plan))
    done = await admin.change(Action(action=Action.ADD, count=1, plan=shown.plan, operation="a1"))
    assert list(done.moves) == list(shown.moves)
    with pytest.raises(InvalidRequest, match="of ring version 1, which is 2 by now"):
        await admin.change(Action(action=Action.ADD, count=1, plan=shown.plan))
    again = await admin.change(Action(action=Action.ADD, count=1, plan=shown.plan, operation="a1"))
    assert again.was_done, "what was done is told, whatever has changed since"


async def test_plan_that_differs_because_a_server_left_is_refused(admin: RingAdmin, node: Node) -> None:
    asked = Action(action=Action.ADD, count=1, replicas=1)
    shown = await admin.change(Action(action=Action.ADD, count=1, replicas=1, dry_run=True))
    (holder,) = plan_of(node, asked)
    left = {id: each for id, each in node.topology.servers.items() if id != holder}
    node.topology = replace(node.topology, servers=left)
    asked.plan = shown.plan
    with pytest.raises(InvalidRequest, match="has become"):
        await admin.change(asked)
    assert node.ring.version == 1


def plan_of(node: Node, asked: Action) -> tuple[ServerId, ...]:
    """Return the servers that would hold the added partition."""
    servers = {ServerId(id): "" for id in node.topology.servers}
    return proposal.step_of(asked, servers, 0)(node.ring).partitions[PartitionId("p4")].replicas


async def test_repeated_operation_holds_logs_that_the_first_server_missed(
    admin: RingAdmin, monkeypatch: pytest.MonkeyPatch
) -> None:
    held: list[tuple[list[str], list[str]]] = []

    async def hold(self: Pins, joined: Any, others: Any, *_: Any) -> None:
        held.append((list(joined), sorted(others)))

    monkeypatch.setattr(Pins, "hold_as_others", hold)
    asked = Action(action=Action.ADD, count=1, operation="a1")
    await admin.change(asked)
    await admin.change(asked)
    assert held == [(["p4"], ["p1", "p2", "p3"])] * 2
