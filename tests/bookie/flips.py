"""Random byte flips in the files of a stopped bookie: python -m tests.bookie.flips [COUNT [SEED]]

It syncs often: TMPDIR=/dev/shm makes it ten times as fast. It uses real files and a real bookie. A directory is written
once, over several starts, with ledgers that are open, closed, fenced or deleted, and with entries that were stored
again. A second one has been in limbo. Each flip changes a fresh copy. The bookie is started on it, read, scrubbed,
repaired as by a worker, and started again. A wrong result raises Broken.
"""

from __future__ import annotations

import copy
import logging
import shutil
import sys
import tempfile
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from random import Random

from kvstore.bookie import Bookie
from kvstore.bookie.authority import MetadataAuthority
from kvstore.bookie.config import BookieConfig
from kvstore.bookie.identity import STARTS
from kvstore.bookie.index.blocks import block_span, blocks_of
from kvstore.bookie.index.checkpoint import HEADER_SIZE, table_span
from kvstore.bookie.index.entry_index import OFFSET_MASK, file_of
from kvstore.bookie.journal.record import (
    CLEARED,
    FILE_HEADER_SIZE,
    GROUP_HEADER_SIZE,
    RECORD_HEADER_SIZE,
    RecordKind,
    decode_file_header,
    decode_record_head,
    seed_of,
)
from kvstore.bookie.journal.scan import group_headers
from kvstore.bookie.steps import at_once
from kvstore.bookie.upkeep.limbo import settle, survey
from kvstore.env import Env
from kvstore.env.disk import DirectoryDisk
from kvstore.env.real import real_env, run
from kvstore.errors import ConfigError
from kvstore.meta.layout import ClusterIdentity, LayoutStore
from kvstore.meta.ledgers import LedgerStore
from kvstore.meta.memory import MemoryStore, MemoryTree
from kvstore.proto.bookkeeper import LAST_ENTRY, Status
from kvstore.types import BookieId, EntryId, LedgerId, LedgerState
from tests.bookie.support import OTHERS, Shelf, given_ids, lac_packet, metadata, packet
from tests.waiting import wait_until

CLUSTER = "8d5e2f52-93a6-4d6c-9a2e-0f5d8a1c3b47"
CLOSED, OPEN, FENCED, ELSEWHERE, GONE, GONE_FENCED, NEVER = 1, 2, 3, 4, 5, 6, 7
"""Ledgers: ELSEWHERE is open, names this bookie and has no entry; NEVER is unknown everywhere."""
COUNTS = {CLOSED: 40, OPEN: 24, FENCED: 11}
EXPLICIT_LAC = 23
ABSENT = {Status.NO_ENTRY, Status.NO_LEDGER}
NEEDED = "needed ADD"
"""A record of which reads and scrubs must notice every byte. Other records of adds were replaced, or belong to deleted
ledgers; facts are also in the checkpoints."""
CONFIG = BookieConfig(
    name="b1", listen="127.0.0.1:0", segment_bytes=4096, reserve_bytes=0, scrub_bytes_per_s=1 << 30,
    scrub_first_s=86_400.0, reclaim_interval_s=86_400.0,
)  # fmt: skip


class Broken(AssertionError):
    """A promise of the bookie does not hold."""


def payload_of(ledger: int, entry: int) -> bytes:
    return bytes([ledger, entry]) * (60 + entry * 7 % 200)


def body_of(ledger: int, entry: int) -> bytes:
    return packet(ledger, entry, payload_of(ledger, entry))


# ── the original ──────────────────────────────────────────────────────────────────────────────────────────────────────


@dataclass
class Original:
    """A stopped bookie's directory, and the metadata store as it was then."""

    directory: Path
    tree: MemoryTree
    bookie: BookieId
    places: dict[str, list[tuple[str, int, int]]] = field(default_factory=dict)
    """Kind of bytes → file, first, end."""


class _Bookie(Shelf):
    """A whole bookie with the calls of a Shelf."""

    def __init__(self, env: Env, bookie: Bookie, store: MemoryStore) -> None:
        self.env, self.bookie, self.storage = env, bookie, bookie.storage
        self.authority = MetadataAuthority(store, ClusterIdentity(store, CLUSTER))


@asynccontextmanager
async def started(env: Env, directory: Path, tree: MemoryTree) -> AsyncIterator[_Bookie]:
    store = MemoryStore(tree)
    disk = DirectoryDisk(directory, env.disk._syncs)  # type: ignore[attr-defined]
    own = replace(env, disk=disk, nursery=env.nursery.child("trial"))
    try:
        async with Bookie(own, CONFIG, store) as bookie:
            yield _Bookie(own, bookie, store)
        if (ahead := bookie.storage.journal.supply.spare) is not None:
            ahead.release()  # many bookies end in this process
    finally:
        await own.nursery.close()
        await store.close()


async def write(env: Env, directory: Path, *, is_doubted: bool) -> Original:
    """Create an original. `is_doubted`: the bookie takes itself for a copy once, and puts all its ledgers in limbo."""
    tree = MemoryTree()
    store = MemoryStore(tree)
    await LayoutStore(store).ensure(CLUSTER)
    ledgers = LedgerStore(store)
    await given_ids(store, max(ELSEWHERE, GONE, GONE_FENCED))
    async with started(env, directory, tree) as one:
        bookie = one.bookie.id
        for ledger in (CLOSED, OPEN, FENCED, ELSEWHERE, GONE, GONE_FENCED):
            await ledgers.create(replace(metadata(ledger, bookie, *OTHERS), token=1))
        for entry in range(12):
            for ledger in (CLOSED, OPEN, FENCED, GONE, GONE_FENCED):
                if entry < COUNTS.get(ledger, 12):
                    await _stored(one, ledger, entry)
        await one.status(FENCED, fence=True)
        await one.status(GONE_FENCED, fence=True)
    async with started(env, directory, tree) as one:
        for gone in (GONE, GONE_FENCED):
            await ledgers.remove(LedgerId(gone), -1)
        await one.bookie.upkeep[0].reclaimer.drop_deleted()
        await one.bookie.upkeep[0].reclaimer.free_segments()
        for ledger in (CLOSED, OPEN):
            for entry in range(12, COUNTS[ledger]):
                await _stored(one, ledger, entry)
        for entry in (3, 4, 30):
            await _stored(one, CLOSED, entry, recovery=True)
        if await one.write_lac(OPEN, EXPLICIT_LAC) is not Status.OK:
            raise AssertionError("the last-add-confirmed is not taken")
        needed = _needed(one)
    await _set(ledgers, CLOSED, LedgerState.CLOSED, COUNTS[CLOSED] - 1)
    await _set(ledgers, FENCED, LedgerState.IN_RECOVERY, -1)
    if is_doubted:
        (directory / CONFIG.journal_dir / STARTS).write_bytes(b"a copy of an older one")
        async with started(env, directory, tree) as one:
            await survey(one.storage, one.authority)
            await settle(one.storage, one.authority)
            await _stored(one, CLOSED, 5, recovery=True)
            needed = _needed(one)
    await store.close()
    return Original(directory, tree, bookie, _places(directory, needed))


def _needed(one: Shelf) -> set[tuple[int, int]]:
    """Return segment and offset of the records that reads are answered from."""
    ledgers = one.storage.inventory.ledgers
    places = [ledgers[ledger].index.get(entry)[0] for ledger, count in COUNTS.items() for entry in range(count)]
    return {(file_of(place), place & OFFSET_MASK) for place in places}


async def _stored(one: Shelf, ledger: int, entry: int, *, recovery: bool = False) -> None:
    status = await one.add(ledger, entry, payload_of(ledger, entry), recovery=recovery)
    if status is not Status.OK:
        raise AssertionError(f"ledger {ledger} entry {entry}: {status!r}")


async def _set(ledgers: LedgerStore, ledger: int, state: LedgerState, last: int) -> None:
    found, version = await ledgers.read(LedgerId(ledger))
    length = sum(len(payload_of(ledger, entry)) for entry in range(last + 1))
    changed = found.closed(EntryId(last), length) if state is LedgerState.CLOSED else replace(found, state=state)
    await ledgers.write(changed, version)


# ── what bytes there are ──────────────────────────────────────────────────────────────────────────────────────────────


def _places(directory: Path, needed: set[tuple[int, int]]) -> dict[str, list[tuple[str, int, int]]]:
    """Return every byte of every file, by kind."""
    found: dict[str, list[tuple[str, int, int]]] = {}
    for path in sorted(each for each in directory.rglob("*") if each.is_file()):
        name, data = str(path.relative_to(directory)), path.read_bytes()
        for kind, first, end in _journal(data, needed) if name.endswith(".journal") else _small(name, data):
            if end > first:
                found.setdefault(kind, []).append((name, first, end))
    return found


def _small(name: str, data: bytes) -> Iterator[tuple[str, int, int]]:
    size = len(data)
    if name.endswith(".index"):
        span = table_span(data[:HEADER_SIZE])
        assert span is not None
        yield "checkpoint: format", 8, 12
        yield "checkpoint: head", 0, HEADER_SIZE
        yield "checkpoint: blocks of entries", HEADER_SIZE, span[0]
        yield "checkpoint: table", span[0], size
    elif name.endswith(".files"):
        yield "list of segments", 0, size
    else:
        yield name.rpartition("/")[2], 0, size


def _journal(data: bytes, needed: set[tuple[int, int]]) -> Iterator[tuple[str, int, int]]:
    header = decode_file_header(data)
    assert header is not None
    yield "file header", 0, FILE_HEADER_SIZE
    at, seed = FILE_HEADER_SIZE, seed_of(header.salt)
    for start, group in sorted(at_once(group_headers(data, header.salt)).items()):
        at = start + GROUP_HEADER_SIZE
        yield "group header", start, at
        end = at + group.size
        while at < end:
            head = decode_record_head(data, at, seed=seed, offset=at)
            assert head is not None
            what = NEEDED if (header.file, at) in needed else RecordKind(head.kind).name
            if head.kind == RecordKind.LIMBO and head.flags & CLEARED:
                what = "LIMBO over"
            body = at + RECORD_HEADER_SIZE
            yield f"record head: {what}", at, body
            yield f"record body: {what}", body, body + head.size
            at = body + head.size
    yield "behind the last group", at, len(data)


@dataclass(frozen=True)
class Flip:
    kind: str
    file: str
    at: int
    mask: int


def draw(random: Random, original: Original, turn: int) -> Flip:
    """A byte of a kind. Kinds take turns, because most bytes belong to packets."""
    kinds = sorted(original.places)
    kind = kinds[turn % len(kinds)]
    file, first, end = random.choice(original.places[kind])
    mask = 1 << random.randrange(8) if random.random() < 0.5 else random.randrange(1, 256)
    return Flip(kind, file, random.randrange(first, end), mask)


# ── one flip ──────────────────────────────────────────────────────────────────────────────────────────────────────────


class Trial:
    """One flip, on a separate copy."""

    def __init__(self, env: Env, original: Original, flip: Flip, directory: Path, *, reads_first: bool) -> None:
        self._env, self._original, self._flip, self._directory = env, original, flip, directory
        self._tree = copy.deepcopy(original.tree)
        self._reads_first = reads_first

    async def run(self) -> str:
        """Return the result of the flip. Raises Broken."""
        shutil.copytree(self._original.directory, self._directory)
        path = self._directory / self._flip.file
        data = bytearray(path.read_bytes())
        data[self._flip.at] ^= self._flip.mask
        path.write_bytes(data)
        try:
            return await self._start()
        except ConfigError as error:
            if self._flip.file not in str(error):
                raise Broken(f"{self._flip}: refused without the file's name: {error}") from None
            return "does not start, and names the file"
        except Broken as error:
            raise Broken(f"{self._flip}, seen by {'reads' if self._reads_first else 'scrub'} first: {error}") from None
        finally:
            shutil.rmtree(self._directory)

    async def _start(self) -> str:
        async with started(self._env, self._directory, self._tree) as one:
            if one.bookie.id != self._original.bookie:
                raise Broken(f"it is {one.bookie.id} now")
            is_doubted = one.storage.inventory.is_limbo
            if self._reads_first:
                await self._judge_reads(one)
                await self._judge_writes(one)
            await one.bookie.upkeep[0].scrubber.round()
            found = one.storage.statistics.damaged_records > 0
            mended = await self._mend(one)
            await self._judge_reads(one)
            await self._judge_writes(one)
            await _judge_index(one)
        async with started(self._env, self._directory, self._tree) as one:  # a repaired entry stays repaired
            await self._judge_reads(one, all_there=True)
            await self._judge_writes(one)
            await _judge_index(one)
            if one.storage.inventory.index_files.rebuilt:
                raise Broken("an index file is still damaged after it was mended")
        if NEEDED in self._flip.kind and not found and not is_doubted:
            raise Broken("nobody has found it")
        return _outcome(found=found, is_doubted=is_doubted, mended=mended)

    async def _judge_reads(self, one: _Bookie, *, all_there: bool = False) -> None:
        for ledger, count in COUNTS.items():
            for entry in range(count):
                status, body, lac = await one.read(ledger, entry)
                _judge(ledger, entry, status, body, is_there=all_there)
                if lac > max(count - 1, EXPLICIT_LAC if ledger == OPEN else -1):
                    raise Broken(f"ledger {ledger}: last-add-confirmed {lac} of {count} entries")
            for entry in (count, count + 1, 1 << 40):
                if (status := await one.status(ledger, entry)) is Status.OK:
                    raise Broken(f"ledger {ledger} entry {entry} was never written: {status!r}")
            status, body, _ = await one.read(ledger, LAST_ENTRY)
            if status in ABSENT:
                raise Broken(f"ledger {ledger} has no last entry: {status!r}")
            _judge_poll(ledger, count, await one.poll(ledger, -1, 0))
            await self._judge_lac(one, ledger)
        for ledger in (ELSEWHERE, GONE, GONE_FENCED, NEVER):
            if (status := await one.status(ledger, 0)) is Status.OK:
                raise Broken(f"ledger {ledger} has an entry: {status!r}")

    async def _judge_lac(self, one: _Bookie, ledger: int) -> None:
        status, explicit, last = await one.read_lac(ledger)
        if status in ABSENT:
            raise Broken(f"ledger {ledger} has no last-add-confirmed: {status!r}")
        if explicit and explicit not in (lac_packet(ledger, EXPLICIT_LAC), lac_packet(ledger, -1)):
            raise Broken(f"ledger {ledger}: a last-add-confirmed that nobody wrote: {explicit!r}")
        if last and last not in {body_of(ledger, entry) for entry in range(COUNTS[ledger])}:
            raise Broken(f"ledger {ledger}: a last packet that nobody wrote: {last!r}")

    async def _judge_writes(self, one: _Bookie) -> None:
        """Assert that nobody without permission can write."""
        for ledger in (FENCED, GONE, GONE_FENCED):
            entry = COUNTS.get(ledger, 12)
            if (status := await one.add(ledger, entry)) is Status.OK:
                raise Broken(f"ledger {ledger} takes entry {entry} from a former writer: {status!r}")
        for ledger in (CLOSED, OPEN, FENCED, ELSEWHERE):
            status = await one.add(ledger, 77, key=b"x" * 20, recovery=True)
            if status is Status.OK:
                raise Broken(f"ledger {ledger} takes an entry of who has not its key")

    async def _mend(self, one: _Bookie) -> int:
        """Store entries that the bookie does not list, as workers do; then its doubt ends if the metadata allows it."""
        mended = 0
        await survey(one.storage, one.authority)
        for ledger, count in COUNTS.items():
            status, runs = await one.entries(ledger)
            if status in ABSENT:
                raise Broken(f"ledger {ledger} is not known: {status!r}")
            listed = {entry for first, number in runs for entry in range(first, first + number)}
            for entry in sorted(set(range(count)) - listed):
                await _mended(one, ledger, entry)
                mended += 1
        await settle(one.storage, one.authority)
        if (doubted := one.storage.inventory.ledgers.get(CLOSED)) is None or doubted.is_limbo:
            raise Broken("the closed ledger has all its entries and is doubted still")
        for ledger, count in COUNTS.items():
            for entry in range(count):
                status, body, _ = await one.read(ledger, entry)
                _judge(ledger, entry, status, body, is_there=True)
        return mended


async def _judge_index(one: Shelf) -> None:
    """Assert that all blocks that lookups may read in index files are as they were written."""
    inventory, files = one.storage.inventory, one.storage.inventory.index_files

    async def is_written() -> bool:
        return not files.in_memory

    await wait_until(is_written, what="index files on the disk")
    for segment in inventory.segments.values():
        for ledger, sealed in inventory.sealed_in(segment):
            checkpoint = files.checkpoint(segment.file)
            if checkpoint is None:
                raise Broken(f"segment {segment.file} has no index file")
            part = next(part for part in checkpoint.ledgers if part.ledger == ledger)
            for extent in part.extents:
                for number in range(blocks_of(extent.entries)):
                    if files.block(segment.file, *block_span(extent.start, extent.entries, number)) is None:
                        raise Broken(f"the index of segment {segment.file} stays damaged")
            if sum(extent.entries for extent in part.extents) != sealed.count(segment.file):
                raise Broken(f"segment {segment.file} has other entries than its index says")


async def _mended(one: Shelf, ledger: int, entry: int) -> None:
    status = await one.add(ledger, entry, payload_of(ledger, entry), recovery=True)
    if status is not Status.OK:
        raise Broken(f"ledger {ledger} entry {entry} cannot be mended: {status!r}")


def _judge(ledger: int, entry: int, status: Status, body: bytes | None, *, is_there: bool) -> None:
    if status in ABSENT:
        raise Broken(f"ledger {ledger} entry {entry} was acknowledged and is denied: {status!r}")
    if status is Status.OK and body != body_of(ledger, entry):
        raise Broken(f"ledger {ledger} entry {entry} is served wrong: {body!r}")
    if is_there and status is not Status.OK:
        raise Broken(f"ledger {ledger} entry {entry} was mended and cannot be read: {status!r}")


def _judge_poll(ledger: int, count: int, answer: tuple[Status, int, bytes | None, int]) -> None:
    status, entry, body, lac = answer
    if lac >= count:
        raise Broken(f"ledger {ledger}: a poll tells of entry {lac}, of {count}")
    if status is Status.OK and body is not None and body != body_of(ledger, entry):
        raise Broken(f"ledger {ledger} entry {entry} is served wrong by a poll: {body!r}")


def _outcome(*, found: bool, is_doubted: bool, mended: int) -> str:
    if is_doubted:
        return "found at the start: all is doubted, and mended"
    if mended:
        return "found, told as unreadable, and mended"
    return "found, and nothing was lost" if found else "nothing was lost"


# ── many ──────────────────────────────────────────────────────────────────────────────────────────────────────────────


async def flip_many(count: int, seed: int, folder: Path, say: Callable[[str], None] = lambda _: None) -> Counter[str]:
    """Return the results of `count` flips, by kind. Raises Broken."""
    env, random, results = real_env(folder), Random(seed), Counter[str]()
    originals = [await write(env, folder / f"original-{each}", is_doubted=each) for each in (False, True)]
    for number in range(count):
        original = originals[number % 2]
        flip, reads_first = draw(random, original, number // 2), random.random() < 0.5
        trial = Trial(env, original, flip, folder / f"flip-{number}", reads_first=reads_first)
        results[f"{flip.kind}: {await trial.run()}"] += 1
        if number % 100 == 99:
            say(f"{number + 1} flips")
    await env.nursery.close()
    return results


def main() -> None:
    logging.disable()
    count, seed = (int(each) for each in (*sys.argv[1:], *("1000", "1")[len(sys.argv) - 1 :]))
    with tempfile.TemporaryDirectory() as folder:
        results = run(flip_many(count, seed, Path(folder), lambda said: print(said, file=sys.stderr)))
    for what, number in sorted(results.items()):
        print(f"{number:6} {what}")
    print(f"{results.total()} flips, seed {seed}: no wrong byte, no entry denied, all mended")


if __name__ == "__main__":
    main()
