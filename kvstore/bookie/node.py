"""One bookie of a node: its identity, storage, listener, registration and upkeep. A bookie registers as the last step
of its start, and unregisters as the first step of its end."""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection
from typing import Any

from kvstore.bookie.authority import MetadataAuthority
from kvstore.bookie.config import BookieConfig
from kvstore.bookie.connections.service import BookieService
from kvstore.bookie.directories.gathering import gather
from kvstore.bookie.directories.spread import AnyStorage, SpreadStorage, storage_of
from kvstore.bookie.directories.state import DirectoryState
from kvstore.bookie.directories.upkeep import DirectoryUpkeep, admitted, start_upkeep
from kvstore.bookie.directories.watching import watch_disks
from kvstore.bookie.identity import refuse_beside_another, remember_start
from kvstore.bookie.inventory import IsOurs, none_are_ours
from kvstore.bookie.upkeep.aging import Aging
from kvstore.bookie.upkeep.counted import refuse_older_metadata
from kvstore.env.histogram import Histogram
from kvstore.env.ports import Env, Listener, Nursery, Stream
from kvstore.errors import ConfigError, MetadataError, NodeExists, NoSuchNode
from kvstore.meta.cookie_store import CookieStore
from kvstore.meta.layout import ClusterIdentity, LayoutStore
from kvstore.meta.registration import BookieRegistration, RegistrationClient
from kvstore.meta.store import MetadataStore
from kvstore.proto.start_tls import BookiesPrelude
from kvstore.types import BookieId

log = logging.getLogger(__name__)


# docs/protocol.md B11
class Bookie:
    """A bookie, which stores ledger entries for the cluster that the metadata store describes.

    The node's own ledger client uses `storage` directly. The caller must hold the lock of the data directory.
    """

    id: BookieId
    """The bookie id, including the incarnation, by which ensembles name this bookie. Set by `start`."""
    storage: AnyStorage

    def __init__(
        self,
        env: Env,
        config: BookieConfig,
        store: MetadataStore,
        is_ours: IsOurs = none_are_ours,
        is_user: Callable[[Stream], bool] = lambda _: False,
    ) -> None:
        """`is_ours` recognizes the cluster's own ledgers, which requires the cluster secret. `is_user` returns True if
        a client presents the certificate of one of the cluster's users."""
        self._is_ours, self._is_user = is_ours, is_user
        self._env = env
        self._config = config
        self._store = store
        self._opened: AnyStorage | None = None
        """The storage, set before its start begins. It must be stopped from then on."""
        self._service: BookieService | None = None
        self._listener: Listener | None = None
        self._registration: BookieRegistration | None = None
        self._nursery: Nursery | None = None
        self.upkeep: list[DirectoryUpkeep] = []
        """The upkeep of each directory, once it has started."""

    async def start(self) -> None:
        """Read the disk, start to listen, and register. Takes as long as reading the journal takes. Raises ConfigError,
        MetadataError, or OSError (for example if the address is in use)."""
        config, env = self._config, self._env
        instance_id = await LayoutStore(self._store).instance_id()
        cluster = ClusterIdentity(self._store, instance_id)
        await cluster.check()
        authority = MetadataAuthority(self._store, cluster)
        cookies = CookieStore(self._store)
        await refuse_beside_another(env, config, RegistrationClient(self._store))
        gathered = await gather(env, config, cookies, instance_id, authority)
        self.id = gathered.identity.bookie
        self._nursery = nursery = env.nursery.child("bookie")
        self.storage = self._opened = storage = storage_of(env, config, gathered, authority, self._is_ours)
        storage.statistics.new_incarnations = int(gathered.identity.is_new)
        await storage.start(gathered.identity.doubts)
        remember_start(env.disk, [each.path for each in gathered.directories], gathered.identity)
        watch_disks(env.liveness, config, storage)
        await refuse_older_metadata(admitted(storage, self._is_ours), authority)
        if config.admit_raw_adds:
            log.warning("raw adds are admitted, anybody can fill the disk bookie=%s", self.id)
        self._service = BookieService(storage, config, instance_id, self._is_user, env.known)
        self._listener = await env.transport.listen(config.listen, self._service.handler, prelude=self._prelude)
        self._registration = BookieRegistration(self._store, self.id, self.address, config.zone)
        storage.on_readonly(self._move)
        try:
            await self._registration.start(nursery, readonly=storage.is_readonly)
        except NodeExists:
            raise ConfigError(
                f"another process is registered as bookie {self.id}; expected one process per bookie"
            ) from None
        await self._refuse_if_forgotten(cookies)
        self.upkeep = start_upkeep(env, config, storage, authority, self._is_ours, nursery)
        aging = Aging(env, cookies, self.id, self._all_directories, self._stored_bytes)
        nursery.spawn(aging.run(), name="aging")
        log.info("bookie serving bookie=%s address=%s", self.id, self.address)

    # docs/protocol.md A10
    async def _refuse_if_forgotten(self, cookies: CookieStore) -> None:
        """Raise ConfigError if an operator removed the bookie after this start began. The removal did not see the
        bookie registered, and does not check again."""
        try:
            await cookies.read(self.id)
        except NoSuchNode:
            raise ConfigError(f"bookie {self.id} was removed while it started; empty its directories") from None

    @property
    def address(self) -> str:
        """The address `host:port` that the bookie announces to others."""
        return self._config.advertise or self.listening

    @property
    def listening(self) -> str:
        """The address `host:port` to which the listener is bound."""
        assert self._listener is not None, "not started"
        return self._listener.address

    def _prelude(self) -> BookiesPrelude:
        assert self._service is not None
        return BookiesPrelude(self._service.refused_plain)

    def _move(self, readonly: bool) -> None:
        if self._nursery is not None:
            self._nursery.spawn(self._move_to(readonly), name="registration")

    async def _move_to(self, readonly: bool) -> None:
        assert self._registration is not None
        try:
            await self._registration.set_readonly(readonly)
        except MetadataError as error:
            log.warning(
                "registration not updated, retrying later bookie=%s readonly=%s error=%r", self.id, readonly, error
            )

    def statistics(self) -> dict[str, int | float]:
        """Return the bookie's current counters and gauges, by name."""
        return self.storage.refresh_statistics().numbers()

    def histograms(self) -> dict[str, Histogram]:
        """Return the bookie's histograms, by name."""
        return self.storage.refresh_statistics().histograms()

    def space(self) -> tuple[int, int]:
        """Return the bytes that this bookie can use in total, and the free bytes. Raises OSError."""
        return self.storage.space()

    def directories(self) -> list[DirectoryState]:
        """Return the state of each journal directory."""
        if isinstance(self.storage, SpreadStorage):
            return self.storage.directories()
        counted = self.storage.refresh_statistics()  # for the only directory; if it fails, the process ends
        path, why = self._config.directories[0], self.storage.journal.why_full
        return [DirectoryState(path, "", counted.free_bytes, counted.readonly, why)]

    def _all_directories(self) -> list[str]:
        """Return all directories, or an empty list while any directory has failed."""
        if isinstance(self.storage, SpreadStorage):
            parts = self.storage.parts
            return [] if any(each.reason for each in parts) else [each.directory.path for each in parts]
        return list(self._config.directories)

    def _stored_bytes(self) -> int:
        """Return the number of bytes synced so far. Called every few seconds, so it must be cheap."""
        if isinstance(self.storage, SpreadStorage):
            return sum(part.storage.statistics.synced_bytes for part in self.storage.parts)
        return self.storage.statistics.synced_bytes

    def on_damage(self, listener: Callable[[Collection[int]], None]) -> None:
        """Call `listener` with the ledgers in which damaged entries are found. It is also called once now, with the
        ledgers that may lack entries because a directory was lost."""
        for each in self.upkeep:
            each.scrubber.on_damage = listener
        if isinstance(self.storage, SpreadStorage):
            listener(self.storage.homes.doubted)

    # docs/protocol.md B35
    async def close(self) -> None:
        """Unregister, close the connections, and stop writing. Everything acknowledged before is on disk."""
        if self._registration is not None:
            try:
                await self._registration.stop()
            except MetadataError as error:
                log.info("not unregistered, the registration ends with the session bookie=%s error=%r", self.id, error)
        if self._listener is not None:
            self._listener.close()
        if self._service is not None:
            self._service.close()
        if self._nursery is not None:
            await self._nursery.close()
        if self._opened is not None:
            self._opened.stop()

    async def __aenter__(self) -> Bookie:
        try:
            await self.start()
        except BaseException:
            await self.close()
            raise
        return self

    async def __aexit__(self, *_: Any) -> None:
        await self.close()
