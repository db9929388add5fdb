"""Creates a new cluster in an empty metadata store: BookKeeper's layout and the first ring. Idempotent."""

from __future__ import annotations

from collections.abc import Mapping

from kvstore.errors import ConfigError, NodeExists
from kvstore.meta import paths
from kvstore.meta.layout import LayoutStore
from kvstore.meta.store import MetadataStore
from kvstore.meta.update import until_known
from kvstore.ring import codec
from kvstore.ring.builder import new_ring
from kvstore.ring.hashing import KeyHash
from kvstore.ring.ring import Ring
from kvstore.types import PartitionId, ServerId


async def found(
    store: MetadataStore,
    servers: Mapping[ServerId, str],
    *,
    partitions: int,
    replicas: int,
    instance_id: str,
    hash: KeyHash,
) -> Ring:
    """Return the cluster's ring. If there is none, create it with the partitions p1 to p<n> on `servers`, which maps
    ids to zones. `hash` is the key hash of a new ring.

    Raises ConfigError for invalid numbers or if the metadata store has the layout of another system, and
    MetadataUnavailable.
    """
    await LayoutStore(store).ensure(instance_id)
    ids = [PartitionId(f"p{number}") for number in range(1, partitions + 1)]
    try:
        ring = new_ring(ids, servers, replicas, hash)
    except ValueError as error:
        raise ConfigError(str(error)) from error
    try:
        await until_known(lambda: store.create(paths.RING, codec.encode(ring)))
    except NodeExists:
        data, _ = await store.get(paths.RING)
        ring = codec.decode(data)
    return ring
