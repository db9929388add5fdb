"""A node's high-water mark: a count in the metadata store that only this node raises, and its highest confirmed value.

A count is confirmed once the store has acknowledged it and a majority of the nodes has raised its own counts after
that. A store whose count is lower than a confirmed count is an older copy of itself (docs/protocol.md B29). A node that
recognises an older copy does not raise its count there. So a node that does not recognise the older copy gets no count
confirmed there, and does not refuse the later copy afterwards. The node keeps the confirmed count in a file, so that it
also recognises an older copy when it starts.
"""

from __future__ import annotations

import asyncio
import logging
from contextlib import suppress
from typing import NamedTuple

from crc32c import crc32c

from kvstore.env.ports import Disk
from kvstore.errors import MetadataDenied, NoSuchNode, UndecodableNode, VersionConflict
from kvstore.meta import paths
from kvstore.meta.layout import get_unless_closed
from kvstore.meta.store import MetadataStore, ensure_path

log = logging.getLogger(__name__)

FILE = "HIGH_WATER"
"""File in the node's data directory with the cluster, the node, the count, and a CRC32C of these. A damaged file, or
one of another cluster or node, is ignored, because a count that is too high would stop every node."""
FILE_BYTES_MAX = 4_096
DIGITS_MAX = 18
MEMBERS_MAX = 7
"""Number of nodes of which a majority confirms a count. They are the first nodes by name. So a large cluster has the
same cost as a small one."""
MEMBERS_READ_MAX = 50
"""Number of nodes whose missing answers are counted. Nodes that have left do not use up this number."""
RINGS_MAX = 10_000
"""Number of unanswered rings in a row after which a node has left the cluster. They take 8 h at least."""
GONE = b"gone"
"""Value that replaces the count of a node that has left. Like every value that is not a number, it proves nothing,
so the node may come back. If the mark were deleted, its node would take the store for an older copy."""
NO_VERSION = 2**31 - 1
"""Version of a mark that another user of the store has closed to ours. No node has it."""
BARRIER = "/barrier"
"""Path of a node that no process ever creates."""


class _Mark(NamedTuple):
    """A node's mark in the store."""

    value: int
    version: int


class HighWater:
    """The high-water mark of one node in one cluster. Calls raise MetadataUnavailable, MetadataUnknown. A mark in
    the store that is not a number proves nothing, and its node replaces it (docs/protocol.md, P34)."""

    def __init__(self, store: MetadataStore, disk: Disk, node: str, cluster: str) -> None:
        self._store, self._disk, self._node = store, disk, node
        self._path = paths.high_water(node)
        self.cluster = cluster
        self.confirmed = _read(disk, node, cluster)
        """Highest confirmed count; 0 if there is none."""
        self._raised: int | None = None
        """The last acknowledged count while it is not confirmed; None otherwise."""
        self._others: dict[str, int] = {}
        """Counts of the other nodes after this node has raised its own."""
        self._unanswered: dict[str, int] = {}
        """Number of rings in a row that each other node has not answered."""
        self._rings_seen = 0
        """Version of the directory up to which this node has answered."""

    @property
    def is_pending(self) -> bool:
        """True if the last raised count is not confirmed yet."""
        return self._raised is not None

    def forget(self) -> None:
        """Forget the count that is not confirmed, because it may be in an older copy."""
        self._raised = None

    async def why_older(self) -> str:
        """Return the reason why the store is an older copy of itself, or an empty string if it is not.

        A server that lags is not taken for an older copy. Before this method believes a lower count, a majority of the
        servers has agreed to a request, and the answering server has applied everything that was committed before.
        """
        found, _ = await self._read(self._path)
        if found is None or self.confirmed <= found:
            return ""
        await agreed_by_a_majority(self._store)
        found, _ = await self._read(self._path)
        if found is None or self.confirmed <= found:
            return ""
        return f"it has high-water mark {found} of node {self._node}, and {self.confirmed} was confirmed"

    async def raise_it(self, *, rings: bool) -> None:
        """Raise the count by one. With `rings`, ask the other nodes to raise theirs, too, which confirms this count.
        Raises VersionConflict or NodeExists if another process of this node came first."""
        count, version = await self._read(self._path)
        if count is None:
            count = self.confirmed
        elif count < self.confirmed:
            return
        data = b"%d" % (count + 1)
        if version is None:
            await ensure_path(self._store, paths.HIGH_WATER)
            await self._store.create(self._path, data)
        else:
            await self._store.set(self._path, data, version)
        if rings:
            await self._note_unanswered(await self._marks(MEMBERS_READ_MAX))
            self._raised = count + 1
            rung = await self._store.set(paths.HIGH_WATER, self._node.encode(), -1)
            if rung == self._rings_seen + 1:
                self._rings_seen = rung  # else another has rung, too

    async def is_rung(self) -> bool:
        """Return True if another node has raised its count and waits for other nodes to raise theirs. Returns True
        once per ring."""
        try:
            _, stat = await self._store.get(paths.HIGH_WATER)
        except NoSuchNode:
            return False
        is_new, self._rings_seen = stat.version > self._rings_seen, max(stat.version, self._rings_seen)
        return is_new

    async def confirm(self) -> None:
        """Confirm the last raised count if a majority of the nodes has raised its counts since. Raises OSError if
        the file cannot be written."""
        raised, members = self._raised, await self._members()
        later = [node for node, count in members.items() if count > self._others.get(node, 0)]
        if raised is None or 2 * len({*later, self._node}) <= len({*members, self._node}):
            return
        self.confirmed, self._raised = raised, None
        await _write(self._disk, self._node, self.cluster, self.confirmed)

    async def _note_unanswered(self, marks: dict[str, _Mark]) -> None:
        """Remember the counts of the other nodes at this ring, and which of these nodes have not answered the
        previous ring. Record in the store which nodes have left."""
        before, self._others = self._others, {node: mark.value for node, mark in marks.items()}
        still = [node for node, count in self._others.items() if before.get(node) == count]
        self._unanswered = {node: self._unanswered.get(node, 0) + 1 for node in still}
        for node in [node for node, rings in self._unanswered.items() if rings >= RINGS_MAX]:
            log.warning("node=%s has not raised its high-water mark for %d rings: it has left", node, RINGS_MAX)
            with suppress(VersionConflict, NoSuchNode, MetadataDenied):
                await self._store.set(paths.high_water(node), GONE, marks[node].version)

    async def _members(self) -> dict[str, int]:
        """Return the counts of the nodes of which a majority confirms."""
        return {node: mark.value for node, mark in (await self._marks(MEMBERS_MAX)).items()}

    async def _marks(self, count: int) -> dict[str, _Mark]:
        """Return the marks of the first `count` nodes that have not left. Also reads one mark for each node that has
        left among them."""
        found: dict[str, _Mark] = {}
        for node in await self._store.children(paths.HIGH_WATER):
            if len(found) == count:
                break
            try:
                data, stat = await get_unless_closed(self._store, paths.high_water(node))
            except UndecodableNode:
                found[node] = _Mark(0, NO_VERSION)  # it is a node, and confirms nothing that can be read
                continue
            if data != GONE:
                found[node] = _Mark(_number(data, node) or 0, stat.version)
        return found

    async def _read(self, path: str) -> tuple[int | None, int | None]:
        """Return the count and its version. The count is None if it is not a number. Returns 0 and None if there is
        no mark."""
        try:
            data, stat = await self._store.get(path)
        except NoSuchNode:
            return 0, None
        return _number(data, path), stat.version


def _number(data: bytes, what: str) -> int | None:
    """Return the count. If the data are not a number, log that and return None."""
    if data.isdigit() and len(data) <= DIGITS_MAX:
        return int(data)
    if data == GONE:
        return None
    log.warning("high-water mark of %s: expected at most %d digits, got %r", what, DIGITS_MAX, data[:40])
    return None


async def agreed_by_a_majority(store: MetadataStore) -> None:
    """Wait until a majority of the store's servers has agreed to a request of this session. Later reads on this
    connection see everything that was committed before.

    A sync guarantees less, because a ZooKeeper server that has been deposed also answers a sync. The request is a write
    that fails, which needs the same agreement as one that succeeds.
    """
    with suppress(NoSuchNode):
        await store.delete(BARRIER, -1)


def _read(disk: Disk, node: str, cluster: str) -> int:
    """Return the count in the file, or 0 if there is no file for this node of this cluster."""
    if not disk.exists(FILE):
        return 0
    try:
        file = disk.open(FILE)
        try:
            line = file.read(0, FILE_BYTES_MAX).partition(b"\n")[0] + b"\n"
        finally:
            file.close()
    except OSError as error:
        log.error("%s cannot be read: %s", FILE, error)
        return 0
    words = line.split()
    if len(words) != 4 or not words[2].isdigit() or line != _line(words[0], words[1], int(words[2])):
        log.error("%s: expected cluster, node, count and their CRC32C, got %r", FILE, line[:200])
        return 0
    return int(words[2]) if words[:2] == [cluster.encode(), node.encode()] else 0


def _line(cluster: bytes, node: bytes, count: int) -> bytes:
    text = b"%b %b %20d" % (cluster, node, count)
    return b"%b %08x\n" % (text, crc32c(text))


async def _write(disk: Disk, node: str, cluster: str, count: int) -> None:
    """Write the count and wait until it is on the disk. The file is overwritten in place, so that this works on a
    full disk. Raises OSError."""
    is_new = not disk.exists(FILE)
    file = disk.open(FILE, create=True)
    try:
        file.pwrite(0, _line(cluster.encode(), node.encode(), count))
        if is_new:
            disk.sync_dir("")
        done: asyncio.Future[OSError | None] = asyncio.get_running_loop().create_future()
        file.submit_sync(lambda error: None if done.done() else done.set_result(error))
        error = await done
    finally:
        file.close()
    if error is not None:
        raise error
