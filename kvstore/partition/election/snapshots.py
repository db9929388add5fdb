"""Installs the state of another replica if this replica is too far behind the log: requests an export, imports it, and
then continues to follow the log.

During the installation, the replica publishes a synced sequence of 0, so that the leader does not trim the entries that
the replica will need next.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping
from contextlib import suppress

import orjson

from kvstore.env import Clock
from kvstore.errors import Corrupted, InvalidRequest, Overloaded, Unavailable
from kvstore.partition.election.ranking import Published
from kvstore.partition.ports import Peers
from kvstore.partition.state.engine import ViewClosed, wait_caught_up
from kvstore.partition.state.state import ReplicaState
from kvstore.partition.state.transfer import StateExport, StateImport
from kvstore.types import PartitionId, ServerId

log = logging.getLogger(__name__)

CHUNK_BYTES = 256 << 10
CALL_S = 10.0
EXPORTS_MAX = 2
IDLE_S = 60.0
"""Seconds after which an export without requests is closed, because it holds space in the engine."""
BEGIN = "export-begin"
NEXT = "export-next"


class Exports:
    """Serves this replica's state to other replicas, in chunks."""

    def __init__(self, state: ReplicaState, clock: Clock) -> None:
        self._state, self._clock = state, clock
        self._open: dict[str, tuple[StateExport, float]] = {}
        self._count = 0
        self._idle_check: asyncio.TimerHandle | None = None
        self.served = 0

    def begin(self) -> bytes:
        """Open an export, and return its number and position. Raises Overloaded if too many exports are open, and
        Unavailable if this replica has no state."""
        self._drop_idle()
        self._trust()
        if len(self._open) >= EXPORTS_MAX:
            raise Overloaded(f"expected at most {EXPORTS_MAX} exports at once; retry later")
        self._count += 1
        number = str(self._count)
        self._open[number] = (StateExport(self._state), self._clock.now())
        if self._idle_check is None:
            self._check_later()
        return orjson.dumps({"export": number, "seq": self._state.seq, "origins": sorted(self._state.origins)})

    def next(self, number: str) -> bytes:
        """Return the next chunk of the export. Raises InvalidRequest if the export is not open. Raises Unavailable if
        this replica may be damaged, because its copy would then agree with it. An error closes the export, because a
        later chunk would lack the rows at which it failed."""
        export, _ = self._open.get(number, (None, 0.0))
        if export is None:
            raise InvalidRequest(f"expected an open export, got {number!r}; begin again")
        try:
            self._trust()
            chunk = export.next_chunk(CHUNK_BYTES)
        except ViewClosed:
            self._close(number)
            raise InvalidRequest(
                f"export {number!r} has ended: this replica's state was replaced; begin again"
            ) from None
        except BaseException:
            self._close(number)
            raise
        assert chunk is not None, "an export that has ended is closed"
        if export.has_ended:
            self._close(number)
            self.served += 1
        else:
            self._open[number] = (export, self._clock.now())
        return chunk

    # docs/protocol.md P5
    def _trust(self) -> None:
        if self._state.position is None or self._state.is_suspect:
            raise Unavailable(f"partition {self._state.partition}: this replica has no state that can be trusted")

    def close(self) -> None:
        """Close all exports."""
        if self._idle_check is not None:
            self._idle_check.cancel()
        for number in list(self._open):
            self._close(number)

    def _check_later(self) -> None:
        self._idle_check = asyncio.get_running_loop().call_later(IDLE_S, self._check_idle)

    def _check_idle(self) -> None:
        """Close idle exports, because their readers may be gone and no other reader may ever come."""
        self._idle_check = None
        self._drop_idle()
        if self._open:
            self._check_later()

    def _drop_idle(self) -> None:
        for number, (_, asked) in list(self._open.items()):
            if self._clock.now() - asked > IDLE_S:
                self._close(number)

    def _close(self, number: str) -> None:
        export, _ = self._open.pop(number)
        export.close()


def best_sources(
    me: ServerId, leader: ServerId | None, published: Mapping[ServerId, Published], replicas: tuple[ServerId, ...]
) -> list[ServerId]:
    """Return the servers to ask for their state, the furthest first. The leader comes after the other replicas, because
    it has other work. Replicas that have stopped come last: the log may no longer reach back to their state, so another
    state would have to be installed next."""
    up = [server for server in replicas if server != me and server in published and published[server].seq > 0]
    return sorted(up, key=lambda each: (published[each].is_stopped, each == leader, -published[each].seq, each))


async def install(peers: Peers, partition: PartitionId, source: ServerId, state: ReplicaState, least: int = 0) -> None:
    """Replace `state` by the state of the replica on `source`, which must not be behind it, and must have applied at
    least sequence `least`. Raises StoreError; the state is then empty or unchanged."""
    begun = orjson.loads(await peers.call(source, partition, BEGIN, b"", CALL_S))
    if begun["seq"] < max(state.seq, least):  # docs/protocol.md G26
        raise Unavailable(
            f"partition {partition}: {source} has applied up to sequence {begun['seq']}, and this replica up to "
            f"{state.seq}"
        )
    number = str(begun["export"]).encode()
    origins = frozenset(map(ServerId, begun.get("origins", ()))) | {source}
    incoming = StateImport(state, origins)
    try:
        while chunk := await peers.call(source, partition, NEXT, number, CALL_S):
            last = incoming.add(chunk)
            await asyncio.sleep(0)
            await wait_caught_up(state.engine)
            if last:
                log.info("partition=%s installed the state of %s at seq=%d", partition, source, state.seq)
                return
    finally:
        if state.position is None:
            with suppress(OSError):  # the engine has stopped, and the state is loaded when it resumes
                state.load()  # removes the rows that have come: the log may still be there from its beginning
    raise Corrupted(f"partition {partition}: expected a last chunk in the export of {source}, got none")
