"""Ways to break a bookie's index files (docs/protocol.md, B31). tests/bookie/mutants.py has the other breakages and
runs all."""

from __future__ import annotations

from typing import Any

from crc32c import crc32c

from kvstore.bookie import index_rebuild, inventory, opening, replay
from kvstore.bookie.index import blocks, entry_index, index_files, sealed_entries
from kvstore.bookie.steps import Steps
from tests.bookie.breakages.registry import mutant, replace


@mutant("releases a full segment's entries before its index file is synced")
def _early_release() -> None:
    def make(_original: Any) -> Any:
        def hold(self: Any, checkpoint: Any) -> None:
            self.known(checkpoint.file, checkpoint.salt)
            self._in_memory[checkpoint.file] = {}
            self._in_memory = _Nothing()

        return hold

    replace(index_files.IndexFiles, "hold", make)


class _Nothing(dict[int, Any]):
    """Stores items, but finds none."""

    def get(self, _: Any, default: Any = None) -> Any:
        return default

    def __contains__(self, _: object) -> bool:
        return False


@mutant("reads an index file without verifying checksums")
def _believed_index() -> None:
    def decode(data: bytes, _salt: int, _at: int, count: int) -> Any:
        padded = data.ljust(blocks.block_bytes(count), b"\0")
        head = blocks._HEAD.pack(crc32c(padded[8:], blocks.seed_of(0, 0) ^ count), count)
        return original(head + padded[8:], 0, 0, count)

    original = blocks.decode_block
    replace(index_files, "decode_block", lambda _original: decode)


@mutant("reads the block before the one that has the entry")
def _wrong_fence() -> None:
    def make(original: Any) -> Any:
        return lambda first, fences, entry: max(0, original(first, fences, entry) - bool(fences))

    replace(sealed_entries, "block_number", make)


@mutant("uses the oldest copy of an entry")
def _oldest_copy() -> None:
    def make(_original: Any) -> Any:
        def find(self: Any, entry: int) -> tuple[int, int]:
            looks = [
                self._find(row, entry) for row, first in enumerate(self._firsts) if first <= entry <= self._lasts[row]
            ]
            return min((look for look in looks if look[0]), default=(0, 0))

        return find

    replace(sealed_entries.SealedEntries, "find", make)


@mutant("serves a deleted ledger's entries from the index files that still have them")
def _stale_index() -> None:
    def make(original: Any) -> Any:
        def known(self: Any, ledger: int, key: bytes = b"") -> Any:
            found = original(self, ledger, key)
            kept = self.__dict__.setdefault("_ever_sealed", {})
            if found.sealed is None and ledger in kept:
                found.sealed = kept[ledger]
                found.index.has_sealed(found.sealed)
            return found

        return known

    def keep(original: Any) -> Any:
        def drop(self: Any, ledger: int, *, tombstone: bool) -> None:
            gone = self.ledgers.get(ledger)
            if gone is not None and gone.sealed is not None:
                self.__dict__.setdefault("_ever_sealed", {})[ledger] = gone.sealed
            original(self, ledger, tombstone=tombstone)

        return drop

    replace(inventory.Inventory, "known", make)
    replace(inventory.Inventory, "drop", keep)


@mutant("rebuilds an index with entries that were dropped before the segment was full")
def _revived() -> None:
    replace(index_rebuild, "_FORGETS", lambda _original: ())


@mutant("calls entries absent that are lost in both index and segment")
def _lost_is_absent() -> None:
    replace(index_rebuild.IndexRebuilder, "_lose", lambda _original: lambda self, ledger, file: None)


@mutant("hides a segment's damage behind a checkpoint of the readable part")
def _hidden_damage() -> None:
    replace(replay._Replay, "_hides_damage", lambda _original: lambda *_: False)


@mutant("forgets at a start which older copies are superseded")
def _all_live() -> None:
    def make(original: Any) -> Any:
        def load(self: Any, file: int, part: Any) -> None:
            part.superseded = []
            original(self, file, part)

        return load

    replace(inventory.Inventory, "_load_entries", make)


@mutant("adds without looking up the replaced copy in index files")
def _blind_adds() -> None:
    replace(entry_index.EntryIndex, "_former", lambda _original: lambda self, entry: (0, 0))


@mutant("does not list the segment that a start has begun")
def _unlisted() -> None:
    replace(opening, "_listing", lambda _original: lambda checkpoint, _files: checkpoint)


@mutant("lets index files take the space of fences and of the next start")
def _greedy() -> None:
    replace(index_files.IndexFiles, "_require_space", lambda _original: lambda self, size: None)


@mutant("treats a segment with one bad sector as entirely unreadable")
def _all_or_nothing() -> None:
    def make(_original: Any) -> Any:
        def read(segment: Any) -> Steps[bytes]:
            yield
            try:
                whole: bytes = segment.handle.read(0, segment.end)
            except OSError:
                return b""
            return whole

        return read

    replace(index_rebuild, "_read_what_can_be", make)
