"""A bookie's storage in several directories, in a test: opened as a node would, on a metadata store in memory."""

from __future__ import annotations

from collections.abc import Sequence
from copy import deepcopy
from dataclasses import replace
from typing import Any

from kvstore.bookie.directories.gathering import gather
from kvstore.bookie.directories.places import PlaceFile, decode_place
from kvstore.bookie.directories.spread import SpreadStorage, storage_of
from kvstore.meta.cookie_store import CookieStore
from kvstore.meta.memory import MemoryStore, MemoryTree
from kvstore.types import LedgerId, LedgerMetadata, LedgerState
from tests.bookie.support import ME, OTHERS, Metadata, Shelf, metadata, tiny
from tests.sim.world.disk import SimDisk
from tests.sim.world.env import SimWorld
from tests.sim.world.oplog import OpLog

CLUSTER = "8d5e2f52-93a6-4d6c-9a2e-0f5d8a1c3b47"
A, B, C = "disk0/journal", "disk1/journal", "disk2/journal"


class Naming(Metadata):
    """What the metadata store says: every ledger that is known names this bookie, whatever its incarnation is."""

    def __init__(self) -> None:
        super().__init__()
        self.me = ME

    def create(self, ledger: int, state: LedgerState = LedgerState.OPEN, last_entry: int = -1) -> None:
        """A ledger, or its next state."""
        self.known[ledger] = metadata(ledger, self.me, *OTHERS, state=state, last_entry=last_entry)

    def elsewhere(self, ledger: int) -> None:
        """A ledger that does not name this bookie."""
        self.known[ledger] = metadata(ledger, *OTHERS)

    async def metadata(self, ledger: LedgerId) -> LedgerMetadata | None:
        await super().metadata(ledger)
        return self.known.get(ledger)


class Marking(MemoryStore):
    """A metadata store whose every state is noted in the log of the disk's operations."""

    def __init__(self, tree: MemoryTree, oplog: OpLog) -> None:
        super().__init__(tree)
        self._oplog = oplog

    async def create(self, path: str, data: bytes = b"", *, ephemeral: bool = False, sequential: bool = False) -> str:
        created = await super().create(path, data, ephemeral=ephemeral, sequential=sequential)
        self._oplog.mark(("tree", deepcopy(self.tree)))
        return created

    async def set(self, path: str, data: bytes, version: int) -> int:
        version = await super().set(path, data, version)
        self._oplog.mark(("tree", deepcopy(self.tree)))
        return version


class Spread(Shelf):
    """A storage in several directories with calls that can be awaited."""

    storage: Any

    @property
    def doubted(self) -> list[int]:
        """The ledgers in limbo; −1: those that nobody knows too."""
        several = isinstance(self.storage, SpreadStorage)
        inventories = [each.storage.inventory for each in self.storage.parts] if several else [self.storage.inventory]
        ledgers = [ledger for each in inventories for ledger, found in each.ledgers.items() if found.is_limbo]
        return sorted([-1] * any(each.is_limbo for each in inventories) + ledgers)

    def home(self, ledger: int) -> str:
        """The directory that has the ledger."""
        (part,) = (each for each in self.storage.parts if ledger in each.ledgers)
        path: str = part.directory.path
        return path

    def in_directory(self, path: str, ledgers: Sequence[int]) -> list[int]:
        return [each for each in ledgers if self.home(each) == path]


async def open_spread(
    world: SimWorld,
    store: MemoryStore,
    meta: Naming,
    dirs: Sequence[str] = (A, B),
    lost: Sequence[str] = (),
    *,
    node: str = "b1",
    **config: Any,
) -> Spread:
    """Start as a node does, as far as its storage."""
    env = world.env(node)
    settings = tiny(**{"journal_dirs": tuple(dirs), "lost_dirs": tuple(lost), "index_dir": "disk0/index", **config})
    gathered = await gather(env, settings, CookieStore(store), CLUSTER, meta)
    meta.me = gathered.identity.bookie
    for ledger, each in meta.known.items():
        if each is not None and ME in each.fragments[0].ensemble:
            (fragment,) = each.fragments
            ensemble = tuple(meta.me if bookie == ME else bookie for bookie in fragment.ensemble)
            meta.known[ledger] = replace(each, fragments=(replace(fragment, ensemble=ensemble),))
    shelf = Spread(env, settings, meta)
    shelf.storage = storage_of(env, settings, gathered, meta)
    await shelf.storage.start(gathered.identity.doubts)
    assert isinstance(shelf.storage, SpreadStorage) or len(dirs) == 1
    return shelf


def place_of(disk: SimDisk, path: str) -> PlaceFile | None:
    """What a directory says, as it is in the page cache."""
    inode = disk.names.now.files.get(f"{path}/PLACE")
    return None if inode is None else decode_place(inode.cache.read(0, inode.cache.size))


def empty(disk: SimDisk, path: str) -> None:
    """A new disk is mounted there."""
    disk.exchange(path)
