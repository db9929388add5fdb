"""Opens the metadata store that an address names, by its driver."""

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
    """A store, connected. Its session lasts while `liveness` has no failure.

    Raises MetadataUnavailable if none answers within `timeout_s`, MetadataDenied if it refuses the login or its user,
    ValueError for what is no address, OSError for TLS files that are none, ConfigError."""
    found = parse(address)
    driver = EtcdStore if found.kind is MetadataKind.ETCD else ZooKeeperStore
    return await driver.connect(found.connection, tls=tls, login=login, connect_timeout_s=timeout_s, liveness=liveness)
