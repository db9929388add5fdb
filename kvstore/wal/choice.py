"""Chooses the bookies for new ledgers and for replacements, among those registered now."""

from __future__ import annotations

from collections.abc import Callable, Collection
from random import Random

from kvstore.env.ports import Clock
from kvstore.errors import NotEnoughBookies
from kvstore.meta.bookies import BookieView
from kvstore.meta.store import MetadataStore, SessionState
from kvstore.types import BookieId, LedgerMetadata, Quorum
from kvstore.wal.placement import choose, machine_count, quorum_for, spread_out, swaps
from kvstore.wal.repair import bookies_of

QUARANTINE_S = 5.0
"""Seconds for which a failed bookie is not chosen as a replacement."""
URGENT_QUARANTINE_S = 0.5
"""Seconds of quarantine if the ledger cannot confirm entries without a replacement. The short time gives a bookie that
failed a moment ago a chance to be back."""


class BookieChoice:
    """Chooses ensembles and replacements for the writers on this node. Copies go to distinct zones if there are enough
    zones (docs/protocol.md, W10)."""

    def __init__(
        self,
        view: BookieView,
        store: MetadataStore,
        *,
        clock: Clock,
        random: Random,
        own: BookieId | None = None,
    ) -> None:
        self.own = own
        self._view = view
        self._store = store
        self._clock = clock
        self._random = random
        self._failed_at: dict[BookieId, float] = {}
        self._listeners: dict[object, Callable[[], None]] = {}
        view.on_change(self._changed)
        store.on_state(lambda _: self._changed())

    @property
    def writable(self) -> frozenset[BookieId]:
        """Bookies that are registered as writable, according to the last view of the registrations."""
        return frozenset(self._view.current.writable)

    @property
    def readonly(self) -> frozenset[BookieId]:
        """Bookies that are registered as read-only, according to the last view of the registrations."""
        return frozenset(self._view.current.readonly)

    @property
    def registered(self) -> frozenset[BookieId]:
        """All registered bookies, according to the last view of the registrations."""
        return self.writable | self.readonly

    def is_readonly(self, bookie: BookieId) -> bool:
        return bookie in self._view.current.readonly

    def is_registered(self, bookie: BookieId) -> bool:
        return bookie in self._view.current.writable or self.is_readonly(bookie)

    def is_full(self, ack: int) -> bool:
        """Return True if the bookies of enough machines for an ack quorum are registered, but too few of these are
        writable, so that no log can be opened. Returns False while the metadata store is unreachable."""
        bookies = self._view.current
        is_known = self._store.state is SessionState.CONNECTED
        return is_known and machine_count(bookies.writable) < ack <= machine_count(bookies.writable | bookies.readonly)

    def spares(self, *, is_urgent: bool = False) -> frozenset[BookieId]:
        """Return the bookies that may replace a failed one. With `is_urgent`, the quarantine of failed bookies is
        shorter; pass it if too few bookies are left to confirm entries. Returns none while the metadata store is
        unreachable, because no change could be recorded."""
        if self._store.state is not SessionState.CONNECTED:
            return frozenset()
        return self.writable - self._quarantined(URGENT_QUARANTINE_S if is_urgent else QUARANTINE_S)

    @property
    def ensemble_max(self) -> int:
        """Maximum size of an ensemble of spare bookies: the number of machines that have one."""
        return machine_count(self.spares())

    def failed(self, bookie: BookieId) -> None:
        """Do not choose `bookie` as a replacement for the next QUARANTINE_S seconds."""
        self._failed_at[bookie] = self._clock.now()

    def new_ensemble(self, default: Quorum, failed: Collection[BookieId] = ()) -> tuple[Quorum, tuple[BookieId, ...]]:
        """Choose the quorum and the ensemble of a new ledger. The ensemble has bookies on distinct machines; it is
        smaller than the default if there are too few, but never smaller than the ack quorum. Bookies in `failed` and
        quarantined ones are avoided if possible. Raises NotEnoughBookies."""
        writable = self.writable
        quorum = quorum_for(machine_count(writable), default)
        avoid = self._quarantined().union(failed)
        good = writable - avoid
        if default.ack <= machine_count(good) < quorum.ensemble:
            # a smaller ensemble, but of bookies that answer
            quorum, writable = quorum_for(machine_count(good), default), good
        zones = self.zones_of(writable)
        ensemble = choose(zones, quorum.ensemble, self._random, write=quorum.write, own=self.own, avoid=avoid)
        if len(ensemble) < quorum.ensemble:
            raise NotEnoughBookies(f"expected {quorum.ensemble} bookies on distinct machines, got {sorted(ensemble)}")
        return quorum, ensemble

    def swaps(
        self, ensemble: tuple[BookieId, ...], failed: Collection[BookieId], *, write: int, is_urgent: bool = False
    ) -> dict[BookieId, BookieId]:
        """Choose a replacement for each failed bookie in `ensemble`; a failed bookie without a spare is left out of the
        result. `write` is the size of the write quorum."""
        zones = self.zones_of(self.spares(is_urgent=is_urgent).union(ensemble))
        return swaps(ensemble, failed, zones, self._random, self.own, write=write)

    def spread_out(self, metadata: LedgerMetadata) -> LedgerMetadata | None:
        """Return a closed ledger's metadata with some places given to bookies in other zones, or None if no exchange
        helps."""
        spares = self.spares()
        zones = self.zones_of(spares.union(bookies_of(metadata)))
        return spread_out(metadata, zones, spares, self._random, self.own)

    def zones_of(self, bookies: Collection[BookieId]) -> dict[BookieId, str]:
        """Return the current or last known zone of each bookie."""
        return {bookie: self._view.zone(bookie) for bookie in bookies}

    def listen(self, key: object, listener: Callable[[], None]) -> None:
        """Call `listener` whenever the answers of this object may have changed, until `forget(key)` is called."""
        self._listeners[key] = listener

    def forget(self, key: object) -> None:
        """Remove the listener that was registered under `key`, if any."""
        self._listeners.pop(key, None)

    def _quarantined(self, for_s: float = QUARANTINE_S) -> frozenset[BookieId]:
        now = self._clock.now()
        self._failed_at = {bookie: at for bookie, at in self._failed_at.items() if now - at < QUARANTINE_S}
        return frozenset(bookie for bookie, at in self._failed_at.items() if now - at < for_s)

    def _changed(self) -> None:
        for listener in list(self._listeners.values()):
            listener()
