"""Moves a cluster's metadata from one metadata store to another with a file, while no node of the cluster runs."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from kvstore.errors import ConfigError, MetadataError, NoSuchNode
from kvstore.meta import paths
from kvstore.meta.layout import LayoutStore
from kvstore.meta.ledger_ids import LedgerIdGenerator, counter_above, counts_by_ledgers, counts_with
from kvstore.meta.store import Create, MetadataStore

BATCH_NODES = 30
"""Number of nodes that one transaction creates. etcd allows 128 operations in a transaction, and a node needs at
most three."""
BATCH_BYTES = 500_000
ZOOKEEPERS_OWN = "/zookeeper"


async def export(store: MetadataStore) -> tuple[dict[str, bytes], str]:
    """Return the cluster's persistent nodes by path, and its instance id. The nodes include one that records the
    counter of ledger ids. Uses up one ledger id, because the counter can only be read by raising it.

    Raises ConfigError if there is no cluster, or if an ephemeral node shows that the cluster is in use, because the
    process that owns the node may change anything. Raises MetadataError if the metadata changed during the export.
    """
    instance = await LayoutStore(store).instance_id()
    counted_to = await LedgerIdGenerator(store).next_id()  # before the read: a later ledger has a later id
    nodes = await _nodes_at_rest(store)
    if await _nodes_at_rest(store) != nodes:
        raise MetadataError("the metadata has changed while it was read: something still uses it")
    return {**nodes, **counts_with(nodes, counted_to)}, instance


async def restore(store: MetadataStore, nodes: Mapping[str, bytes], instance: str) -> None:
    """Create the nodes in an empty store. Raises ConfigError if the store is not empty, MetadataError if the result
    differs from the nodes.

    The node that makes the store a cluster is created last, so that no server starts on incomplete metadata. Counters
    of ids do not move with the nodes. Therefore new ledgers get ids from a new range, and the former counter is
    recorded.
    """
    there = [path for path in await _children(store, "/") if path != ZOOKEEPERS_OWN]
    if there:
        whole = paths.INSTANCE_ID in await _children(store, paths.LEDGERS)
        what = "a cluster" if whole else "something (an import that did not end?)"
        raise ConfigError(f"expected an empty place, got {what}: {', '.join(there)}; choose another, or remove it")
    wanted = {**nodes, **counter_above(nodes), **counts_by_ledgers(nodes)}
    for batch in _batches(wanted):
        await store.multi(batch)
    await store.create(paths.INSTANCE_ID, instance.encode())
    if await _nodes_at_rest(store) != wanted:
        raise MetadataError("the imported metadata differ from the file: do not use them")


async def _nodes_at_rest(store: MetadataStore) -> dict[str, bytes]:
    """Return the data of all nodes by path. Raises ConfigError if there is an ephemeral node."""
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
            raise ConfigError(f"{path} was deleted while it was read: stop every node first") from None
        if stat.owner:
            raise ConfigError(
                f"{path} belongs to a running process: stop every node, and wait until their sessions have ended"
            )
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
    """Yield batches of nodes, parents before their children and without the instance id. Cookies come last, in
    transactions without ledgers: the file does not record creation order, and a bookie that seems older than a ledger
    is believed when it reports entries as absent (docs/protocol.md, A12)."""
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
