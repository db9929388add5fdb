"""Reads and changes the znode of the ring. Implements the interface through which ranges and replicas are moved."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass

from kvstore.errors import MetadataUnavailable, MetadataUnknown, Overloaded, StoreError
from kvstore.meta import paths
from kvstore.meta.store import MetadataStore
from kvstore.meta.update import update
from kvstore.ring import Ring, codec
from kvstore.server.cluster.membership import Membership

RING_BYTES_MAX = 512 << 10
"""Maximum size in bytes of the znode with which a plan is accepted. A larger plan is refused and can be made in
parts."""
RING_STEP_BYTES_MAX = 768 << 10
"""Maximum size in bytes of the znode in any case, below ZooKeeper's limit. A planned ring grows a little while the
plan is carried out, and a range that was released is unavailable until the ring names its new owner."""


class RingStore:
    """Implements kvstore.ring.Rings on the metadata store. The server's own writes are visible to it at once."""

    def __init__(self, store: MetadataStore, membership: Membership) -> None:
        self._store, self._membership = store, membership
        self._turn = asyncio.Lock()
        self._waiting: list[_Change] = []

    @property
    def ring(self) -> Ring:
        return self._membership.topology.ring

    def hint(self, routed: int) -> None:
        self._membership.hint_ring(routed)

    def on_ring(self, changed: Callable[[], None]) -> Callable[[], None]:
        known = self.ring.version

        def check() -> None:
            nonlocal known
            if self.ring.version != known:
                known = self.ring.version
                changed()

        return self._membership.on_topology(check)

    async def change(self, step: Callable[[Ring], Ring], *, soon: bool = False, plans: bool = False) -> Ring:
        """Change the ring, one write at a time, because concurrent writes of this server would only conflict. Changes
        that wait meanwhile are written together, each step applied to the result of the step before."""
        mine = _Change(step, soon, plans)
        self._waiting.append(mine)
        try:
            async with self._turn:
                if not mine.is_over:
                    taken, self._waiting = self._waiting, []
                    await self._make(taken)
        finally:
            if mine in self._waiting:  # cancelled before its turn
                self._waiting.remove(mine)
        if mine.error is not None:
            raise mine.error
        assert mine.ring is not None
        return mine.ring

    async def _make(self, taken: list[_Change]) -> None:
        """Write these changes together, and deliver the outcome of each."""
        combined = _combined(taken)
        known = self._membership.stored_ring if all(each.soon for each in taken) else None
        try:
            plans = any(each.plans for each in taken)
            ring, version = await change_ring_at(self._store, combined, known, plans=plans)
        except Overloaded as error:
            if len(taken) == 1:
                return _end(taken, error)
            await self._make_apart(taken)
        except (StoreError, ValueError) as error:
            _end(taken, error)
        except BaseException:
            _end(taken, MetadataUnknown("the writer of the ring was cancelled"))
            raise
        else:
            _end(taken, None)
            self._membership.note_written(ring, version)

    async def _make_apart(self, taken: list[_Change]) -> None:
        """Write the changes one by one, because together they were too large for the znode and nothing was written."""
        try:
            for each in taken:
                each.ring = each.error = None
                await self._make([each])
        finally:
            _end([each for each in taken if not each.is_over], MetadataUnavailable("the writer of the ring has ended"))


@dataclass(eq=False)
class _Change:
    """A change of the ring that waits for its turn, and its outcome."""

    step: Callable[[Ring], Ring]
    soon: bool = False
    plans: bool = False
    ring: Ring | None = None
    error: Exception | None = None
    is_over: bool = False


def _end(changes: list[_Change], failure: Exception | None) -> None:
    for each in changes:
        each.is_over = True
        each.error = each.error or failure


def _combined(changes: list[_Change]) -> Callable[[Ring], Ring]:
    """Return a function that applies all changes. If one change is refused, the others are still applied."""
    allowed: set[int] = set()

    def step(ring: Ring) -> Ring:
        for number, each in enumerate(changes):
            each.ring = each.error = None
            try:
                ring = each.ring = each.step(ring)
                allowed.add(number)
            except Exception as error:  # noqa: BLE001 - an error of one step must not affect the others; its caller raises it
                # Refused after it was allowed: an attempt of unknown outcome may have been written.
                each.error = MetadataUnknown(f"a retry failed: {error!r}") if number in allowed else error
        return ring

    return step


class _Stale(Exception):
    """Raised if the known ring does not determine the outcome of a change, so that the stored ring must be read."""


async def change_ring(store: MetadataStore, step: Callable[[Ring], Ring]) -> Ring:
    """Store the ring that `step` returns by compare-and-set, and return it; see kvstore.ring.Rings. `step` may
    return a plan. Raises Overloaded if the ring would be too large for its znode."""
    return (await change_ring_at(store, step, plans=True))[0]


async def change_ring_at(
    store: MetadataStore, step: Callable[[Ring], Ring], known: tuple[Ring, int] | None = None, *, plans: bool = False
) -> tuple[Ring, int]:
    """Like `change_ring`, but also return the version of the znode. `known` is a ring and the version of its znode,
    which the first attempt uses instead of reading them."""
    if known is not None:
        try:
            return await _change_ring(store, step, known, plans)
        except _Stale:
            pass  # nothing was written
    return await _change_ring(store, step, None, plans)


async def _change_ring(
    store: MetadataStore, step: Callable[[Ring], Ring], known: tuple[Ring, int] | None, plans: bool
) -> tuple[Ring, int]:
    sent: list[bytes] = []
    """Data of writes whose outcome is unknown. If such data is found in the znode later, the write succeeded."""
    found = b""
    is_read = False

    async def read() -> tuple[Ring, int]:
        nonlocal found, known, is_read
        if known is not None:
            begun_with, known = known, None
            return begun_with
        is_read = True
        await store.sync(paths.RING)  # a step that an older ring shows as done may have been undone since
        found, stat = await store.get(paths.RING)
        return codec.decode(found), stat.version

    async def write(ring: Ring, version: int) -> int:
        data = codec.encode(ring)
        bytes_max = RING_BYTES_MAX if plans else RING_STEP_BYTES_MAX
        if len(data) > bytes_max:
            refused = f"expected a ring of at most {bytes_max} bytes, got {len(data)}; plan fewer changes at once"
            raise (
                MetadataUnknown(f"the ring may have been changed; a second attempt failed: {refused}")
                if sent
                else Overloaded(refused)
            )
        try:
            return await store.set(paths.RING, data, version)
        except MetadataUnknown:
            sent.append(data)
            raise

    def decide(ring: Ring) -> Ring:
        if found in sent:
            return ring
        try:
            wanted = step(ring)
        except ValueError as error:
            if sent:
                raise MetadataUnknown(
                    f"the ring may have been changed; a second attempt was refused: {error}"
                ) from None
            if not is_read:
                raise _Stale from None
            raise
        if wanted is ring and not is_read:
            raise _Stale
        return wanted

    return await update(read, write, decide)
