"""Bookies without network and disk: a BookieClient for tests of the code that drives the machines."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial

from kvstore.bookie.digests import is_same_entry, proves_itself
from kvstore.errors import BookieError, LedgerFenced, StoreError
from kvstore.meta.registration import RegisteredBookies
from kvstore.proto.availability import HeldEntries
from kvstore.proto.digest import HEADER, LAC_HEADER, EntryDigest
from kvstore.types import NO_ENTRY, NO_LEDGER, BookieId, EntryId, LedgerId
from kvstore.wal.batches import TIMEOUT_S
from kvstore.wal.ports import EntryListener, ReadAnswer

DELAY_S = 0.0005


@dataclass
class ModelBookie:
    """The content of one bookie's disk."""

    entries: dict[tuple[LedgerId, EntryId], bytes] = field(default_factory=dict)
    fenced: set[LedgerId] = field(default_factory=set)
    lacs: dict[LedgerId, EntryId] = field(default_factory=dict)
    listeners: dict[LedgerId, list[EntryListener]] = field(default_factory=dict)
    zone: str = ""
    is_down: bool = False
    is_readonly: bool = False
    is_silent: bool = False
    """The bookie performs requests and never answers."""
    holds_adds: bool = False
    """Adds do not arrive until `release_adds`, and LAC notices never do."""
    is_in_limbo: bool = False
    """The bookie does not know if a missing entry ever existed."""
    stalls_s: float = 0.0
    """Seconds that it waits for its disk before it reports that it cannot answer."""
    is_old: bool = False
    """The bookie does not support batched reads."""
    batch_max: int = 1000
    batches: int = 0
    """Number of batches returned."""
    batched: int = 0
    """Number of packets in the batches."""
    reads: int = 0
    newest: LedgerId = NO_LEDGER
    """The highest ledger id that it reports as seen, if no entry has it."""

    def raise_lac(self, ledger: LedgerId, lac: int) -> None:
        if lac > self.lacs.setdefault(ledger, NO_ENTRY):
            self.lacs[ledger] = EntryId(lac)
            for each in self.listeners.get(ledger, ()):
                each.lac_raised(lac)

    def of(self, ledger: LedgerId) -> list[EntryId]:
        return sorted(entry for of_ledger, entry in self.entries if of_ledger == ledger)


class ModelView:
    """A view in which all bookies that are up are registered."""

    def __init__(self, bookies: dict[BookieId, ModelBookie]) -> None:
        self._bookies = bookies
        self._listeners: list[Callable[[], None]] = []

    @property
    def current(self) -> RegisteredBookies:
        up = {bookie: "" for bookie, model in self._bookies.items() if not model.is_down}
        readonly = {bookie: "" for bookie in up if self._bookies[bookie].is_readonly}
        return RegisteredBookies({bookie: "" for bookie in up if bookie not in readonly}, readonly)

    def zone(self, bookie: BookieId) -> str:
        return self._bookies[bookie].zone

    def on_change(self, listener: Callable[[], None]) -> None:
        self._listeners.append(listener)

    def changed(self) -> None:
        for listener in self._listeners:
            listener()


class ModelBookies:
    """A BookieClient on `ModelBookie`s. Answers arrive a little later, on the event loop."""

    def __init__(self, *names: BookieId) -> None:
        self.at = {name: ModelBookie() for name in names}
        self.view = ModelView(self.at)
        self.own: BookieId | None = None
        """The bookie of the calling node, if its events are available."""
        self._held: dict[BookieId, list[Callable[[], None]]] = {}

    def stop(self, *bookies: BookieId) -> None:
        """Stop the machines. The content of their disks stays."""
        for bookie in bookies:
            self.at[bookie].is_down = True
        self.view.changed()

    def start(self, *bookies: BookieId) -> None:
        for bookie in bookies:
            self.at[bookie].is_down = False
        self.view.changed()

    def release_adds(self, bookie: BookieId) -> None:
        """Let held adds arrive now, in order."""
        self.at[bookie].holds_adds = False
        for arrive in self._held.pop(bookie, []):
            arrive()

    def add(
        self,
        bookie: BookieId,
        ledger: LedgerId,
        entry: EntryId,
        packet: bytes,
        key: bytes,
        recovery: bool,
        done: Callable[[StoreError | None], None],
    ) -> None:
        loop = asyncio.get_running_loop()

        def arrive() -> None:
            error = self._store(bookie, ledger, entry, packet, recovery)
            if not self.at[bookie].is_silent:
                loop.call_later(DELAY_S, done, error)

        if self.at[bookie].holds_adds and not recovery:
            self._held.setdefault(bookie, []).append(arrive)
        else:
            loop.call_later(DELAY_S, arrive)

    def _store(
        self, bookie: BookieId, ledger: LedgerId, entry: EntryId, packet: bytes, recovery: bool
    ) -> StoreError | None:
        model = self.at[bookie]
        if model.is_down or (model.is_readonly and not recovery):
            return BookieError(f"{bookie} is down or read-only")
        if ledger in model.fenced and not recovery:
            return LedgerFenced(f"{bookie}")
        held = model.entries.get((ledger, entry))
        if held is not None and proves_itself(held) and not is_same_entry(held, packet):
            return LedgerFenced(f"{bookie}")  # docs/protocol.md B36
        model.entries[ledger, entry] = packet
        for each in model.listeners.get(ledger, ()):
            each.entry_stored(entry, packet)
        model.raise_lac(ledger, HEADER.unpack_from(packet)[2])
        return None

    def add_to_all(
        self,
        bookies: Sequence[BookieId],
        ledger: LedgerId,
        entry: EntryId,
        packet: bytes,
        key: bytes,
        recovery: bool,
        done: Callable[[EntryId, BookieId, StoreError | None], None],
    ) -> None:
        for bookie in bookies:
            self.add(bookie, ledger, entry, packet, key, recovery, partial(done, entry, bookie))

    def write_lac(self, bookie: BookieId, ledger: LedgerId, key: bytes, body: bytes, lac: EntryId) -> None:
        model = self.at[bookie]
        if not model.is_down and not model.holds_adds:
            model.raise_lac(ledger, LAC_HEADER.unpack_from(body)[1])

    async def read(
        self, bookie: BookieId, ledger: LedgerId, entry: EntryId, *, fence_key: bytes | None = None, priority: int = 0
    ) -> ReadAnswer:
        model = await self._reach(bookie)
        model.reads += 1
        if fence_key is not None:
            model.fenced.add(ledger)
        wanted = (model.of(ledger) or [NO_ENTRY])[-1] if entry == NO_ENTRY else entry
        lac = model.lacs.get(ledger, NO_ENTRY)
        if model.is_in_limbo and (ledger, wanted) not in model.entries:
            raise BookieError(f"{bookie} does not know")
        return ReadAnswer(entry, model.entries.get((ledger, wanted)), lac)

    async def read_batch(
        self,
        bookie: BookieId,
        ledger: LedgerId,
        entries: range,
        *,
        bytes_max: int,
        fence_key: bytes | None = None,
        priority: int = 0,
    ) -> Sequence[bytes]:
        if self.at[bookie].stalls_s:
            await asyncio.sleep(TIMEOUT_S)
            raise BookieError(f"{bookie} does not answer in time")
        model = await self._reach(bookie)
        if model.is_old:
            raise BookieError(f"{bookie} gives no batches")
        if fence_key is not None:
            model.fenced.add(ledger)
        model.batches += 1
        held = [EntryId(each) for each in entries if (ledger, each) in model.entries]
        given: list[bytes] = []
        for each in held[: model.batch_max] if held[:1] == [entries[0]] else []:
            if given and sum(map(len, given)) + len(model.entries[ledger, each]) > bytes_max:
                break
            given.append(model.entries[ledger, each])
        model.batched += len(given)
        return given

    async def read_lac(self, bookie: BookieId, ledger: LedgerId, digest: EntryDigest) -> EntryId:
        return (await self._reach(bookie)).lacs.get(ledger, NO_ENTRY)

    def ask_lac(
        self, bookie: BookieId, ledger: LedgerId, digest: EntryDigest, done: Callable[[EntryId | BookieError], None]
    ) -> None:
        asking = asyncio.get_running_loop().create_task(self.read_lac(bookie, ledger, digest))

        def answered(task: asyncio.Task[EntryId]) -> None:
            if not task.cancelled():
                error = task.exception()
                assert error is None or isinstance(error, BookieError)
                done(task.result() if error is None else error)

        asking.add_done_callback(answered)

    def long_poll(
        self,
        bookie: BookieId,
        ledger: LedgerId,
        previous_lac: EntryId,
        timeout_ms: int,
        done: Callable[[ReadAnswer | BookieError], None],
    ) -> None:
        deadline = asyncio.get_running_loop().time() + timeout_ms / 1000
        self._look(bookie, ledger, previous_lac, deadline, done)

    def listen(self, ledger: LedgerId, listener: EntryListener) -> Callable[[], None] | None:
        model = self.at[self.own] if self.own is not None else None
        if model is None or not model.of(ledger):
            return None
        listeners = model.listeners.setdefault(ledger, [])
        listeners.append(listener)
        listener.lac_raised(model.lacs.get(ledger, NO_ENTRY))
        return lambda: listeners.remove(listener)

    def _look(
        self,
        bookie: BookieId,
        ledger: LedgerId,
        previous_lac: EntryId,
        deadline: float,
        done: Callable[[ReadAnswer | BookieError], None],
    ) -> None:
        loop, model = asyncio.get_running_loop(), self.at[bookie]
        if model.is_down or model.is_silent:
            loop.call_soon(done, BookieError(f"{bookie} is down or silent"))
            return
        lac = model.lacs.get(ledger, NO_ENTRY)
        if lac <= previous_lac and loop.time() < deadline:
            loop.call_later(0.01, self._look, bookie, ledger, previous_lac, deadline, done)
            return
        entry = EntryId(previous_lac + 1)
        packet = model.entries.get((ledger, entry)) if lac >= entry else None
        loop.call_later(DELAY_S, done, ReadAnswer(NO_ENTRY if packet is None else entry, packet, lac))

    async def entries(self, bookie: BookieId, ledger: LedgerId) -> HeldEntries:
        model = await self._reach(bookie)
        return HeldEntries.of_runs((entry, 1) for entry in model.of(ledger))

    async def newest_ledger(self, bookie: BookieId) -> LedgerId:
        model = self.at[bookie]
        await asyncio.sleep(model.stalls_s or DELAY_S)
        if model.is_down or model.is_silent:
            raise BookieError(f"{bookie} is down or silent")
        return max((ledger for ledger, _ in model.entries), default=model.newest)

    async def _reach(self, bookie: BookieId) -> ModelBookie:
        model = self.at[bookie]
        await asyncio.sleep(model.stalls_s or DELAY_S)
        if model.is_down or model.is_silent or model.stalls_s:
            raise BookieError(f"{bookie} is down or silent")
        return model
