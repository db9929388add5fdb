"""A bookie's storage in a test: packets, settable metadata, and awaitable calls."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from functools import wraps
from inspect import signature
from typing import Any, TypeVar

from kvstore.bookie.config import BookieConfig
from kvstore.bookie.inventory import IsOurs, OwnLedgers, none_are_ours
from kvstore.bookie.storage import BookieStorage
from kvstore.env import Env
from kvstore.errors import MetadataUnavailable
from kvstore.meta.ledger_ids import LedgerIdCount, LedgerIdGenerator
from kvstore.meta.store import MetadataStore
from kvstore.proto.bookkeeper import LAST_ENTRY, Status
from kvstore.proto.digest import EntryDigest, master_key
from kvstore.types import BookieId, DigestType, EntryId, Fragment, LedgerId, LedgerMetadata, LedgerState, Quorum
from tests.sim.world.disk import DiskConfig, SimDisk
from tests.sim.world.env import SimWorld

ME = BookieId("b1-aaaa")
CLUSTER = "c-ours"
OTHERS = (BookieId("b2-bbbb"), BookieId("b3-cccc"))
KEY = master_key(b"")
DIGEST = EntryDigest(DigestType.CRC32C)
FAST = DiskConfig(sync_s=(0.001, 0.001), slow_chance=0)
T = TypeVar("T")


def tiny(**changes: Any) -> BookieConfig:
    """Small enough that tests cross every boundary."""
    values: dict[str, Any] = {"name": "b1", "segment_bytes": 4096, "reserve_bytes": 0, **changes}
    return BookieConfig(**values)


def packet(ledger: int, entry: int, payload: bytes = b"hello", lac: int | None = None) -> bytes:
    """Return the packet of a writer whose earlier entries are all acknowledged."""
    lac = entry - 1 if lac is None else lac
    return DIGEST.packet(LedgerId(ledger), EntryId(entry), EntryId(lac), len(payload) * (entry + 1), payload)


def lac_packet(ledger: int, lac: int) -> bytes:
    return DIGEST.lac_packet(LedgerId(ledger), EntryId(lac))


def metadata(
    ledger: int, *bookies: BookieId, state: LedgerState = LedgerState.OPEN, last_entry: int = -1
) -> LedgerMetadata:
    ensemble = bookies or (ME, *OTHERS)
    size = len(ensemble)
    quorum = Quorum(size, size, min(2, size))
    fragment = Fragment(EntryId(0), ensemble)
    return LedgerMetadata(LedgerId(ledger), quorum, (fragment,), state=state, last_entry=EntryId(last_entry))


class Metadata:
    """The metadata store's answers. Every ledger is open and names ME unless set otherwise."""

    def __init__(self) -> None:
        self.known: dict[int, LedgerMetadata | None] = {}
        self.is_away = False
        self.fails_listing = False
        self.asked: list[int] = []
        self.marked: list[str] = []
        self.counts_to = 1 << 31
        """The next id that the metadata store would give."""
        self.listed: list[int] | None = None
        """The ledgers that a listing returns; None: everything that is known."""
        self.gate: asyncio.Event | None = None
        """If set, answers wait for it."""

    async def metadata(self, ledger: LedgerId) -> LedgerMetadata | None:
        self.asked.append(ledger)
        if self.gate is not None:
            await self.gate.wait()
        if self.is_away:
            raise MetadataUnavailable("not connected")
        return self.known.get(ledger, metadata(ledger))

    async def mark_older(self, why: str) -> None:
        self.marked.append(why)

    async def counted(self) -> LedgerIdCount:
        if self.is_away:
            raise MetadataUnavailable("not connected")
        return LedgerIdCount(LedgerId(self.counts_to))

    async def ledgers(self) -> list[LedgerId]:
        if self.is_away or self.fails_listing:
            raise MetadataUnavailable("not connected")
        ids = self.listed if self.listed is not None else [each for each, value in self.known.items() if value]
        return [LedgerId(each) for each in sorted(ids)]


class Shelf:
    """A storage with awaitable calls."""

    def __init__(
        self,
        env: Env,
        config: BookieConfig | None = None,
        meta: Metadata | None = None,
        is_ours: IsOurs = none_are_ours,
    ) -> None:
        self.env = env
        self.meta = meta or Metadata()
        self.storage = BookieStorage(env, config or tiny(), ME, self.meta, OwnLedgers(is_ours))

    async def start(self) -> Shelf:
        await self.storage.start()
        return self

    def submit(
        self, ledger: int, entry: int, payload: bytes = b"hello", *, lac: int | None = None, key: bytes = KEY,
        recovery: bool = False,
    ) -> asyncio.Future[Status]:  # fmt: skip
        answer: asyncio.Future[Status] = asyncio.get_running_loop().create_future()
        body = packet(ledger, entry, payload, lac)
        self.storage.add(ledger, entry, body, key, recovery=recovery, done=answer.set_result)
        return answer

    async def add(self, ledger: int, entry: int, payload: bytes = b"hello", **how: Any) -> Status:
        return await self.submit(ledger, entry, payload, **how)

    def submit_read(
        self, ledger: int, entry: int = LAST_ENTRY, *, fence: bool = False, key: bytes | None = None
    ) -> asyncio.Future[tuple[Status, bytes | None, int]]:
        answer: asyncio.Future[tuple[Status, bytes | None, int]] = asyncio.get_running_loop().create_future()
        if fence and key is None:
            key = KEY
        self.storage.read(
            ledger, entry, key=key, fence=fence, done=lambda s, _entry, body, lac: answer.set_result((s, body, lac))
        )
        return answer

    async def read(self, ledger: int, entry: int = LAST_ENTRY, **how: Any) -> tuple[Status, bytes | None, int]:
        return await self.submit_read(ledger, entry, **how)

    async def payload(self, ledger: int, entry: int, **how: Any) -> bytes:
        """Return the verified payload of an entry, which must be there."""
        status, body, _ = await self.read(ledger, entry, **how)
        assert status is Status.OK, f"ledger {ledger} entry {entry}: {status!r}"
        assert body is not None
        return DIGEST.open(LedgerId(ledger), EntryId(entry), body).payload

    async def status(self, ledger: int, entry: int = LAST_ENTRY, **how: Any) -> Status:
        return (await self.read(ledger, entry, **how))[0]

    async def write_lac(self, ledger: int, lac: int, key: bytes = KEY) -> Status:
        answer: asyncio.Future[Status] = asyncio.get_running_loop().create_future()
        self.storage.write_lac(ledger, lac_packet(ledger, lac), key, done=answer.set_result)
        return await answer

    async def read_lac(self, ledger: int) -> tuple[Status, bytes | None, bytes | None]:
        answer: asyncio.Future[tuple[Status, bytes | None, bytes | None]]
        answer = asyncio.get_running_loop().create_future()
        self.storage.read_lac(ledger, done=lambda *values: answer.set_result(values))
        return await answer

    def poll(
        self, ledger: int, previous: int, timeout_ms: int = 1000
    ) -> asyncio.Future[tuple[Status, int, bytes | None, int]]:
        answer: asyncio.Future[tuple[Status, int, bytes | None, int]] = asyncio.get_running_loop().create_future()
        self.storage.long_poll(ledger, previous, timeout_ms, done=lambda *values: answer.set_result(values))
        return answer

    async def entries(self, ledger: int) -> tuple[Status, list[tuple[int, int]]]:
        answer: asyncio.Future[tuple[Status, list[tuple[int, int]]]] = asyncio.get_running_loop().create_future()
        self.storage.list_entries(ledger, done=lambda status, runs: answer.set_result((status, list(runs))))
        return await answer


def run(world: SimWorld, work: Coroutine[Any, Any, T], node: str = "b1") -> T:
    """Run `work` as the process of a node."""
    return world.run(world.node(node).call(work))


def in_world(test: Callable[..., Coroutine[Any, Any, None]]) -> Callable[..., None]:
    """Run a test as the process of the node b1, in the simulated world that is its fixture `world`."""

    @wraps(test)
    def ran(*given: Any, **fixtures: Any) -> None:
        run(signature(test).bind(*given, **fixtures).arguments["world"], test(*given, **fixtures))

    return ran


def crash(world: SimWorld, node: str = "b1", *, power: bool = True) -> None:
    """Cut the node's power, or kill -9 if not `power`. The next `run` on the node is a new process."""
    world.node(node).crash(power=power)


def segments(disk: SimDisk, config: BookieConfig | None = None) -> list[str]:
    """Return the paths of the journal's segments, oldest first."""
    directory = (config or tiny()).journal_dir
    return [f"{directory}/{name}" for name in disk.list(directory) if name.endswith(".journal")]


async def given_ids(store: MetadataStore, last: int) -> None:
    """Set the store's counter as if it had created the ledgers up to that one."""
    generator = LedgerIdGenerator(store)
    while await generator.next_id() < last:
        pass
