"""Opens a metadata store by its address, using the driver for the kind of store."""

from __future__ import annotations

from kvstore.env.liveness.port import UNWATCHED, Liveness
from kvstore.env.tls import Tls
from kvstore.meta.address import MetadataKind, parse
from kvstore.meta.etcd import EtcdStore
from kvstore.meta.login import MetadataLogin
from kvstore.meta.zookeeper.store import ZooKeeperStore

Store = EtcdStore | ZooKeeperStore


CONNECT_TIMEOUT_S = 15.0


async def connect(
    address: str,
    *,
    tls: Tls | None = None,
    login: MetadataLogin | None = None,
    timeout_s: float = CONNECT_TIMEOUT_S,
    liveness: Liveness = UNWATCHED,
) -> Store:
    """Connect to a metadata store and return it. The session lasts while `liveness` reports no failure.

    Raises MetadataUnavailable if no server answers within `timeout_s` seconds, MetadataDenied if the store refuses the
    login or its user, ValueError for a malformed address, OSError for unusable TLS files, ConfigError.
    """
    found = parse(address)
    driver = EtcdStore if found.kind is MetadataKind.ETCD else ZooKeeperStore
    return await driver.connect(found.connection, tls=tls, login=login, connect_timeout_s=timeout_s, liveness=liveness)
