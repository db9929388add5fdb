"""A cluster's metadata from one metadata store to another, by a file, while no node runs."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from kvstore.errors import ConfigError, MetadataError, NoSuchNode
from kvstore.meta import paths
from kvstore.meta.layout import LayoutStore
from kvstore.meta.ledger_ids import LedgerIdGenerator, counter_above, counts_by_ledgers, counts_with
from kvstore.meta.store import Create, MetadataStore

BATCH_NODES = 30
"""Created at once; etcd takes 128 operations in a transaction, a node is at most three."""
BATCH_BYTES = 500_000
ZOOKEEPERS_OWN = "/zookeeper"


async def export(store: MetadataStore) -> tuple[dict[str, bytes], str]:
    """The cluster's persistent nodes, with one that says how far its counter of ledger ids is, and its instance id.
    Takes one id, since the counter cannot be read otherwise.

    Raises ConfigError if there is no cluster, or if it is in use: an ephemeral is a process's, and while there is one
    anything may change. MetadataError if it changed all the same.
    """
    instance = await LayoutStore(store).instance_id()
    counted_to = await LedgerIdGenerator(store).next_id()  # before all is read: what is made later has a later id
    nodes = await _nodes_at_rest(store)
    if await _nodes_at_rest(store) != nodes:
        raise MetadataError("the metadata has changed while it was read: something still uses it")
    return {**nodes, **counts_with(nodes, counted_to)}, instance


async def restore(store: MetadataStore, nodes: Mapping[str, bytes], instance: str) -> None:
    """Create the nodes in an empty store. Raises ConfigError if it is not empty, MetadataError if not all are there
    afterwards as they should be.

    The node that makes a cluster of it comes last: on less than all of its metadata no node starts. Counters of ids do
    not move with the nodes, so ledgers get ids from a range that was never counted in, and it is kept how far the
    former one was.
    """
    there = [path for path in await _children(store, "/") if path != ZOOKEEPERS_OWN]
    if there:
        whole = paths.INSTANCE_ID in await _children(store, paths.LEDGERS)
        what = "a cluster" if whole else "something (an import that did not end?)"
        raise ConfigError(f"want an empty place, got {what}: {', '.join(there)}; choose another, or remove it")
    wanted = {**nodes, **counter_above(nodes), **counts_by_ledgers(nodes)}
    for batch in _batches(wanted):
        await store.multi(batch)
    await store.create(paths.INSTANCE_ID, instance.encode())
    if await _nodes_at_rest(store) != wanted:
        raise MetadataError("what is there after the import is not what was in the file: do not use it")


async def _nodes_at_rest(store: MetadataStore) -> dict[str, bytes]:
    """Raises ConfigError for an ephemeral."""
    await store.sync("/")
    found: dict[str, bytes] = {}
    left = await _children(store, "/")
    while left:
        path = left.pop()
        if path == ZOOKEEPERS_OWN:
            continue
        try:
            data, stat = await store.get(path)
        except NoSuchNode:
            raise ConfigError(f"{path} has gone while it was read: stop every node first") from None
        if stat.owner:
            raise ConfigError(f"{path} is a running process's: stop every node, and wait until its session is over")
        found[path] = data
        left += await _children(store, path)
    return found


async def _children(store: MetadataStore, path: str) -> list[str]:
    try:
        return [paths.join(path, name) for name in await store.children(path)]
    except NoSuchNode:
        return []


def _is_cookie(path: str) -> bool:
    return path == paths.COOKIES or path.startswith(f"{paths.COOKIES}/")


def _batches(nodes: Mapping[str, bytes]) -> Iterator[list[Create]]:
    """Parents before their children; without the instance id. Cookies in the last of the transactions, apart from all
    ledgers: who was set up when is not in the file, and a bookie that seems older than a ledger is believed what it
    says that it does not have of it (docs/protocol.md, A12)."""
    batch: list[Create] = []
    size = 0
    for path in sorted(nodes, key=lambda path: (_is_cookie(path), path)):
        if path == paths.INSTANCE_ID:
            continue
        is_first_cookie = _is_cookie(path) and bool(batch) and not _is_cookie(batch[-1].path)
        if batch and (is_first_cookie or len(batch) == BATCH_NODES or size + len(nodes[path]) > BATCH_BYTES):
            yield batch
            batch, size = [], 0
        batch.append(Create(path, nodes[path]))
        size += len(nodes[path])
    yield batch
