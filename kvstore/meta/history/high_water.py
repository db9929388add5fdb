"""A node's high-water mark: a count in the metadata store that only this node raises, and the highest value of it that
the store has acknowledged.

The acknowledged value is never above the store's. A store that has less is an older copy of itself (docs/protocol.md
B29). The node keeps the acknowledged value in a file, so that it recognises an older copy at its start, too.
"""

from __future__ import annotations

import asyncio
import logging
from contextlib import suppress

from kvstore.env.ports import Disk
from kvstore.errors import Corrupted, NoSuchNode
from kvstore.meta import paths
from kvstore.meta.store import MetadataStore, ensure_path

log = logging.getLogger(__name__)

FILE = "HIGH_WATER"
"""In the node's data directory: cluster, node, count. A file of another cluster or node says nothing."""
FILE_BYTES_MAX = 4_096
DIGITS_MAX = 18
BARRIER = "/barrier"
"""Nobody ever creates this node."""


class HighWater:
    """One node's high-water mark in one cluster. Calls raise MetadataUnavailable, MetadataUnknown, and Corrupted if the
    store's value is not a number."""

    def __init__(self, store: MetadataStore, disk: Disk, node: str, cluster: str) -> None:
        self._store, self._disk, self._node = store, disk, node
        self._path = paths.high_water(node)
        self.cluster = cluster
        self.acknowledged = _read(disk, node, cluster)
        """The highest count that the store has acknowledged; 0 if it has acknowledged none."""

    async def why_older(self) -> str:
        """Return why the store is an older copy of itself, or an empty string if it is not. A server that lags is not
        taken for an older copy: before a lower count is believed, a majority of the servers has agreed to a request,
        and the answering server has applied what was committed before."""
        if self.acknowledged <= (await self._read())[0]:
            return ""
        await agreed_by_a_majority(self._store)
        found = (await self._read())[0]
        if self.acknowledged <= found:
            return ""
        return f"it has high-water mark {found} of node {self._node}, and has acknowledged {self.acknowledged}"

    async def raise_it(self) -> None:
        """Raise the count by one: in the store, and then in the file. A count that is behind is left as it is. Raises
        VersionConflict, NodeExists if another process of this node was first; OSError if the file could not be
        written."""
        count, version = await self._read()
        if count < self.acknowledged:
            return
        data = b"%d" % (count + 1)
        if version is None:
            await ensure_path(self._store, paths.HIGH_WATER)
            await self._store.create(self._path, data)
        else:
            await self._store.set(self._path, data, version)
        self.acknowledged = count + 1
        await _write(self._disk, self._node, self.cluster, self.acknowledged)

    async def _read(self) -> tuple[int, int | None]:
        """The count and its version; 0 and None if there is none."""
        try:
            data, stat = await self._store.get(self._path)
        except NoSuchNode:
            return 0, None
        if not (data.isdigit() and len(data) <= DIGITS_MAX):
            raise Corrupted(f"{self._path}: expected at most {DIGITS_MAX} digits, got {data[:40]!r}")
        return int(data), stat.version


async def agreed_by_a_majority(store: MetadataStore) -> None:
    """Return once a majority of the store's servers has agreed to a request of this session; later reads of this
    connection see all that was committed before. A sync does less: a ZooKeeper server that has been deposed answers it,
    too. A write that fails is agreed on like one that succeeds."""
    with suppress(NoSuchNode):
        await store.delete(BARRIER, -1)


def _read(disk: Disk, node: str, cluster: str) -> int:
    if not disk.exists(FILE):
        return 0
    try:
        file = disk.open(FILE)
        try:
            words = file.read(0, FILE_BYTES_MAX).decode(errors="replace").partition("\n")[0].split()
        finally:
            file.close()
    except OSError as error:
        log.error("%s cannot be read: %s", FILE, error)
        return 0
    is_ours = len(words) == 3 and words[:2] == [cluster, node] and words[2].isdecimal()
    return int(words[2]) if is_ours else 0


async def _write(disk: Disk, node: str, cluster: str, count: int) -> None:
    """Return once it is on the disk. In place, so that a full disk takes it, too. Raises OSError."""
    is_new = not disk.exists(FILE)
    file = disk.open(FILE, create=True)
    try:
        file.pwrite(0, f"{cluster} {node} {count:20d}\n".encode())
        if is_new:
            disk.sync_dir("")
        done: asyncio.Future[OSError | None] = asyncio.get_running_loop().create_future()
        file.submit_sync(lambda error: None if done.done() else done.set_result(error))
        error = await done
    finally:
        file.close()
    if error is not None:
        raise error
