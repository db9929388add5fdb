"""The Data service without a network: refusals, waits, and readers that take turns."""

from __future__ import annotations

import asyncio
from itertools import pairwise
from random import Random
from typing import Any

import pytest

from kvstore.env.clock import SystemClock
from kvstore.env.nursery import TaskNursery
from kvstore.env.ports import Env
from kvstore.errors import InvalidRequest, NoSuchPin, NotCaughtUp, Overloaded, Unavailable
from kvstore.partition.state import move_records, pinned_scan
from kvstore.partition.state.entry import EntryKind, control
from kvstore.partition.state.marks import MarkRecord
from kvstore.partition.state.pinned_scan import PinnedScan
from kvstore.partition.state.state import ReplicaState
from kvstore.proto import data_pb2
from kvstore.proto.pinned_page import columns_of, rows_of
from kvstore.rpc import calls
from kvstore.server.grpc import data
from kvstore.server.grpc.data import Data
from kvstore.types import PartitionId, Position
from tests.partition.effects import P1, Writer, state_over
from tests.partition.state.engine_memory import MemoryEngine
from tests.waiting import PATIENCE_S

FOREVER_MS = 1 << 60


class OneReplica:
    """A node with one replica, which has applied what the test gave it."""

    store: Any = None
    topology: Any = None
    links: Any = None
    cluster = "the cluster"

    def __init__(self) -> None:
        self.writer = Writer(1)
        self.state = state_over(MemoryEngine())

    def state_of(self, partition: PartitionId) -> ReplicaState | None:
        return self.state if partition == P1 else None

    def mark(self, pin: str, deadline_ms: int = FOREVER_MS, *, apply: bool = True) -> Position:
        entry = control(P1, self.writer.epoch, self.writer.seq + 1, self.writer.time_ms, EntryKind.MARK)
        entry.control = move_records.encode(MarkRecord(pin, deadline_ms, bool(deadline_ms)))
        position = self.writer.add(entry).position
        if apply:
            self.catch_up()
        return position

    def catch_up(self) -> None:
        for entry in self.writer.log:
            self.state.apply(entry)


@pytest.fixture
def node() -> OneReplica:
    made = OneReplica()
    for number in range(100):
        made.writer.put(**{f"key{number}": "x" * 50})
    return made


def asked(position: Position, pin: str = "pin", **fields: Any) -> data_pb2.ReadPinnedRequest:
    return data_pb2.ReadPinnedRequest(
        **{"id": pin, "partition": P1, "ledger": position.ledger, "entry": position.entry, "page_bytes": 500, **fields}
    )


async def read(service: Data, request: data_pb2.ReadPinnedRequest) -> list[bytes]:
    return [row.key async for page in service.pages(request) for row in rows_of(columns_of(page))]


def service_of(node: OneReplica, starved: float = 0.0) -> Data:
    nothing: Any = None
    nursery = TaskNursery("test")
    return Data(Env(SystemClock(), Random(0), nothing, nothing, nursery, nothing, lambda: starved), node)


async def test_pinned_view_is_read_page_by_page(node: OneReplica) -> None:
    position = node.mark("pin")
    node.writer.put(key1="changed", another="x")
    node.catch_up()
    found = await read(service_of(node), asked(position))
    assert sorted(found) == sorted(b"key%d" % number for number in range(100))


@pytest.mark.parametrize(
    "fields",
    [{"first_token": 9, "last_token": 8}, {"after": b"x"}, {"after": b"d123"}],
)
async def test_invalid_read_is_refused(node: OneReplica, fields: dict[str, Any]) -> None:
    with pytest.raises(InvalidRequest):
        await read(service_of(node), asked(node.mark("pin"), **fields))


# docs/protocol.md F6
async def test_pin_of_another_cluster_is_refused(node: OneReplica) -> None:
    service = service_of(node)
    call: Any = Called()
    for answer in (
        service.Pin(data_pb2.PinRequest(id="pin", cluster="another"), call),
        service.Renew(data_pb2.RenewRequest(id="pin", cluster="another"), call),
    ):
        with pytest.raises(Unavailable, match="of another cluster: expected another, got the cluster"):
            await answer


async def test_unknown_pin_is_no_such_pin(node: OneReplica) -> None:
    service, position = service_of(node), node.mark("pin")
    for request in (
        asked(position, pin="other"),
        asked(position._replace(entry=position.entry - 1)),
        asked(position, partition="p2"),
    ):
        with pytest.raises(NoSuchPin):
            await read(service, request)


async def test_pin_that_ends_during_a_read_is_an_error(node: OneReplica) -> None:
    pages = service_of(node).pages(asked(node.mark("pin")))
    assert (await anext(pages)).count
    node.mark("pin", 0)
    with pytest.raises(NoSuchPin, match="has ended at this server"):
        async for _ in pages:
            pass


async def test_replica_barred_during_a_read_sends_no_further_page(node: OneReplica) -> None:
    pages = service_of(node).pages(asked(node.mark("pin")))
    assert (await anext(pages)).count
    node.state.is_suspect = True
    with pytest.raises(NoSuchPin, match="may be damaged"):
        await anext(pages)


async def test_read_waits_for_a_replica_that_is_behind(node: OneReplica) -> None:
    position = node.mark("pin", apply=False)
    asyncio.get_running_loop().call_later(0.03, node.catch_up)
    assert len(await read(service_of(node), asked(position))) == 100


async def test_read_fails_when_the_replica_stays_behind(node: OneReplica, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(data, "CATCH_UP_S", 0.02)
    with pytest.raises(NotCaughtUp):
        await read(service_of(node), asked(node.mark("pin", apply=False)))


@pytest.mark.parametrize(("starved", "slice_s"), [(0.0, data.SLICE_S), (0.3, data.SLICE_STARVED_S)])
async def test_concurrent_readers_share_slices_of_the_event_loop(
    node: OneReplica, monkeypatch: pytest.MonkeyPatch, starved: float, slice_s: float
) -> None:
    service, position = service_of(node, starved), node.mark("pin")
    now, step = asyncio.get_running_loop().time, PinnedScan.step
    slices: list[tuple[int, float, float]] = []
    """Number of steps, start and end of each slice: the steps between which no other reader had its turn."""
    turns = 0

    def slow(scan: PinnedScan) -> bool:
        nonlocal turns
        began = now()
        while now() < began + slice_s / 3:
            pass
        steps, first, _ = slices.pop() if turns == 0 and slices else (0, began, began)
        slices.append((steps + 1, first, now()))
        turns = 0
        return step(scan)

    monkeypatch.setattr(PinnedScan, "step", slow)
    monkeypatch.setattr(pinned_scan, "STEP_ROWS", 1)
    tasks = [asyncio.ensure_future(read(service, asked(position))) for _ in range(4)]
    while not all(task.done() for task in tasks):
        await asyncio.sleep(0)
        turns += 1
    assert [len(task.result()) for task in tasks] == [100] * 4
    assert len(slices) > 100
    assert max(steps for steps, _, _ in slices) == 3
    assert min(after[1] - before[2] for before, after in pairwise(slices)) >= data.PAUSE_S / 2


class Called:
    """Records the pages that a call was sent. No page arrives before `reads` is set."""

    def __init__(self, address: str = "10.0.0.7") -> None:
        self._peer = f"ipv4:{address}:1"
        self.pages: list[data_pb2.PinnedPage] = []
        self.reads = asyncio.Event()

    def peer(self) -> str:
        return self._peer

    async def write(self, page: data_pb2.PinnedPage) -> None:
        await self.reads.wait()
        self.pages.append(page)


async def test_concurrent_lists_of_pins_are_bounded(node: OneReplica, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each list reads every pin of every partition and asks every replica."""
    monkeypatch.setattr(calls, "FEW", 2)
    service, resume = service_of(node), asyncio.Event()

    async def listed() -> data_pb2.PinsResponse:
        await resume.wait()
        return data_pb2.PinsResponse()

    monkeypatch.setattr(service._keeper, "listed", listed)
    context: Any = Called()
    first = asyncio.ensure_future(service.Pins(data_pb2.PinsRequest(), context))
    await asyncio.sleep(0)
    with pytest.raises(Overloaded):
        async with asyncio.timeout(PATIENCE_S):
            await service.Pins(data_pb2.PinsRequest(), context)
    resume.set()
    assert await first == data_pb2.PinsResponse()


async def test_reads_of_one_network_leave_slots_for_another(node: OneReplica) -> None:
    """One job used to keep all others from reading at this server."""
    service, request = service_of(node), asked(node.mark("pin"))
    service._reads.most = 3

    def begun(address: str) -> tuple[Any, asyncio.Future[None]]:
        context: Any = Called(address)
        return context, asyncio.ensure_future(service.ReadPinned(request, context))

    many = [begun("10.0.0.1") for _ in range(3)]
    await asyncio.sleep(0)
    few = begun("10.0.0.2")
    refused = begun("10.0.0.1")
    async with asyncio.timeout(PATIENCE_S):
        for _, reading in (many[0], refused):
            with pytest.raises(Overloaded):
                await reading
        for context, reading in (few, *many[1:]):
            context.reads.set()
            await reading
            assert sum(page.count for page in context.pages) == 100
    assert len(service._reads) == 0
