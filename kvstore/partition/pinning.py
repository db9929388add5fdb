"""Carries out one replica's part in pins: the leader logs their records and pins its log for them; every replica
reports its views (docs/protocol.md, Pinned reads)."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from typing import NamedTuple

import msgspec

from kvstore.env import Env
from kvstore.errors import InvalidRequest, LedgerError, MetadataError, NoSuchPin, NotLeader, Unavailable
from kvstore.partition.in_time import in_time
from kvstore.partition.leading.leader import Leader
from kvstore.partition.state import pinned_scan
from kvstore.partition.state.engine import ViewClosed
from kvstore.partition.state.internal import Attempt
from kvstore.partition.state.marks import MarkRecord
from kvstore.partition.state.pinned_views import PinnedView
from kvstore.partition.state.state import ReplicaState
from kvstore.partition.state.tokens import TokenSpan
from kvstore.types import LedgerId, PartitionId, Position
from kvstore.wal.pins import Pins

log = logging.getLogger(__name__)

TAKE, RENEW, RELEASE, TELL, DECIDED = "pin-take", "pin-renew", "pin-release", "pin-tell", "pin-decided"
EXPIRE_S, IDLE_S = 1.0, 5.0
"""Seconds between two checks of the deadlines of views, and between two checks whether there are any views. Each
request for a view and each MARK checks the deadlines first."""
GIVEN_BACK_S = 10.0
"""Seconds between two checks of whether the views of a replica are still wanted."""
METHODS = frozenset((TAKE, RENEW, RELEASE, TELL, DECIDED))
NUMBERED_SINCE = 3
"""The first cluster version in which pins have numbers (docs/protocol.md Tx13)."""


class PinRequest(NamedTuple):
    """A server's request about a pin. The method determines which fields are used."""

    pin: str = ""
    ttl_ms: int = 0
    split_bytes: int = 0
    number: int = 0
    """The number of the pin (docs/protocol.md Tx13)."""


class AskedIntent(NamedTuple):
    """An intent in a pinned view, whose outcome its reader asks for."""

    home: bytes
    attempt: Attempt
    key: bytes
    seq: int


class DecidedRequest(NamedTuple):
    """A question to a replica that keeps a pin: which of these intents are committed at the pin. The answer has one
    element for each intent: True or False, or None if the partition did not own the home key at the pin."""

    pin: str
    number: int
    intents: list[AskedIntent]


class PinnedState(NamedTuple):
    """The state at a pin's position: the answer to a successful TAKE."""

    position: Position
    seq: int
    time_ms: int
    spans: tuple[TokenSpan, ...]
    records: int
    bytes: int
    split_tokens: list[int]
    deadline_ms: int
    intents: int = 0
    """Number of keys that intents change if they are committed."""


class HeldPin(NamedTuple):
    """A pin for which this replica keeps a view of its state."""

    pin: str
    position: Position
    deadline_ms: int


request_of = msgspec.msgpack.Decoder(PinRequest).decode
pinned_state_of = msgspec.msgpack.Decoder(PinnedState).decode
deadline_of = msgspec.msgpack.Decoder(int).decode
_decided_request_of = msgspec.msgpack.Decoder(DecidedRequest).decode
decided_of = msgspec.msgpack.Decoder(list[bool | None]).decode
held_pins_of = msgspec.msgpack.Decoder(list[HeldPin]).decode
encode = msgspec.msgpack.Encoder().encode


def encode_request(asked: PinRequest) -> bytes:
    """Encode a request. The number is omitted if it is 0, because servers of cluster version 2 do not know it."""
    return encode(asked if asked.number else asked[:-1])


def encode_state(state: PinnedState) -> bytes:
    """Encode the answer to a TAKE. The number of intents is omitted if it is 0, because servers of cluster version 2 do
    not know it."""
    return encode(state if state.intents else state[:-1])


class Pinning:
    """The pins of one replica. `leading` returns the replica's leader, or None while the replica does not serve."""

    def __init__(
        self,
        env: Env,
        partition: PartitionId,
        state: ReplicaState,
        leading: Callable[[], Leader | None],
        pins: Pins,
    ) -> None:
        self._env, self._partition, self._state = env, partition, state
        self._leading, self._pins = leading, pins
        self.taken = 0
        state.pinned_views.passed_ms = env.clock.passed_ms

    def start(self) -> None:
        """Start ending views at their deadlines."""
        self._env.nursery.spawn(self._expire_periodically(), name=f"{self._partition} pins")
        self._env.nursery.spawn(self._end_released_periodically(), name=f"{self._partition} pins released")

    async def _expire_periodically(self) -> None:
        seen = 0
        while True:
            await self._env.beat.pause(EXPIRE_S if self._state.pinned_views.by_pin else IDLE_S)
            self.held()
            if self._state.pinned_views.expired != seen and self._leading() is not None:
                try:
                    await self._pins.oldest(self._partition, self._env.clock.passed_ms())
                    seen = self._state.pinned_views.expired
                except MetadataError as error:
                    log.info("partition=%s pins past their deadline were not removed: %r", self._partition, error)

    # docs/protocol.md K5
    async def follow_renewals(self) -> None:
        """Extend the deadlines of views of a replica that has left, because no MARK notifies it of a renewal. The claim
        that pins the log is renewed before the pin."""
        for held in self._state.pinned_views.all:
            try:
                deadline_ms = await self._pins.deadline(self._partition, held.pin)
            except MetadataError as error:
                log.info(
                    "partition=%s pin=%s cannot check whether the pin was renewed: %r", self._partition, held.pin, error
                )
            else:
                held.deadline_ms = max(held.deadline_ms, deadline_ms)

    async def _end_released_periodically(self) -> None:
        while True:
            await self._env.beat.pause(GIVEN_BACK_S)
            await self.end_released()

    async def answer(self, method: str, body: bytes) -> bytes:
        """Answer another server's request about a pin. Raises StoreError."""
        return await in_time(self._answer(method, body), self._partition, method)

    async def _answer(self, method: str, body: bytes) -> bytes:
        if method == DECIDED:
            return encode(self._decided(body))
        try:
            asked = request_of(body)
        except msgspec.DecodeError as error:
            raise InvalidRequest(f"expected a request about pins, got {body[:64].hex()}: {error}") from error
        if method == TAKE:
            return encode_state(await self._take(asked))
        if method == RENEW:
            return encode(await self._renew(asked))
        if method == RELEASE:
            return encode(await self._release(asked))
        if method == TELL:
            return encode([HeldPin(held.pin, held.position, held.deadline_ms) for held in self.held()])
        raise InvalidRequest(f"expected one of {', '.join(sorted(METHODS))}, got {method!r}")

    # docs/protocol.md Tx13
    def _decided(self, body: bytes) -> list[bool | None]:
        """Return the outcomes of intents, by the decisions that this replica's view of the pin contains. Raises
        NoSuchPin."""
        try:
            pin, number, intents = _decided_request_of(body)
        except msgspec.DecodeError as error:
            raise InvalidRequest(f"expected intents of a pin, got {body[:64].hex()}: {error}") from error
        if self._state.is_suspect:
            raise NoSuchPin(f"partition {self._partition}: the replica at this server may be damaged")
        self.held()
        view = self._state.pinned_views.numbered(pin, number)
        return [view.outcome(*each) for each in intents]

    def held(self) -> list[PinnedView]:
        """Return the views whose deadline has not passed."""
        self._state.pinned_views.expire(self._env.clock.passed_ms())
        return self._state.pinned_views.all

    async def end_released(self) -> None:
        """Drop views whose pin has been released without a MARK in this replica's log: the pin was released while no
        replica led, or this replica has left. The claim that pins the log is created before the pin's MARK, so a
        missing claim means a released pin."""
        kept = self.held()
        if not kept:
            return
        try:
            wanted = await self._pins.names(self._partition)
        except MetadataError as error:
            log.info("partition=%s cannot check for released pins: %r", self._partition, error)
            return
        for held in kept:
            if (
                held.pin not in wanted and held in self._state.pinned_views.all
            ):  # otherwise it was taken again meanwhile
                self._state.pinned_views.drop(held.pin)

    def _lead(self) -> Leader:
        leader = self._leading()
        if leader is None:
            raise NotLeader(self._partition)
        return leader

    def _deadline(self, ttl_ms: int) -> int:
        """Return the deadline by the later of both clocks, because replicas compare it with either."""
        return max(self._env.clock.date_ms(), self._state.record_time_ms) + ttl_ms

    async def _take(self, asked: PinRequest) -> PinnedState:
        self._lead()
        self._state.pinned_views.expire(self._env.clock.passed_ms())
        self._state.pinned_views.check_capacity(asked.pin)
        deadline_ms = self._deadline(asked.ttl_ms)
        first = await self._hold_log(asked.pin, deadline_ms)
        self._check_number(asked.number)  # in the step that sends the MARK, because the log's version may rise before
        position = await self._lead().append_record(MarkRecord(asked.pin, deadline_ms, True, asked.number))
        self.taken += 1
        held = self._state.pinned_views.taken(asked.pin, position)
        await self._release_before(asked.pin, first)
        size, split_tokens = pinned_scan.sizes(held, await self._samples(held), asked.split_bytes)
        log.info("partition=%s pin=%s at %s until %d", self._partition, asked.pin, position, deadline_ms)
        return PinnedState(
            position,
            held.seq,
            held.time_ms,
            held.owned.spans,
            held.records,
            size,
            split_tokens,
            deadline_ms,
            len(held.intents),
        )

    # docs/protocol.md Tx13
    def _check_number(self, number: int) -> None:
        """Raise Unavailable unless a pin has a number exactly if the log can contain transactions. The versions of the
        log and of the server that takes the pin follow the cluster's within seconds."""
        version = self._state.log_version
        if (version >= NUMBERED_SINCE) != (number > 0):
            raise Unavailable(
                f"partition {self._partition}: expected a pin for a log of cluster version {version}, got one with "
                f"number {number}; take it again"
            )

    async def _samples(self, held: PinnedView) -> list[pinned_scan.Sample]:
        """Sample the view, yielding to the event loop between samples because each may read a large value."""
        found = []
        try:
            for span in pinned_scan.stretches(held):
                found.append(pinned_scan.sample(held.view, span))
                await asyncio.sleep(0)
        except ViewClosed:
            raise NoSuchPin(f"partition {self._partition}: pin {held.pin!r} ended while it was taken") from None
        return found

    # docs/protocol.md K3
    async def _hold_log(self, pin: str, deadline_ms: int) -> LedgerId:
        """Pin the log from the state's position on, which is at or before the following MARK. Return the position's
        ledger."""
        position = self._state.position
        assert position is not None
        try:
            await self._pins.hold_until(self._partition, pin, position.ledger, deadline_ms)
        except LedgerError as error:
            raise Unavailable(f"partition {self._partition}: {error}") from error
        return position.ledger

    # docs/protocol.md K3
    async def _release_before(self, pin: str, ledger: LedgerId) -> None:
        """Release what a pin that was taken again held for its earlier position. Otherwise a pin whose id is taken
        again and again would keep the log forever."""
        try:
            await self._pins.advance(self._partition, pin, ledger)
        except MetadataError as error:
            log.info("partition=%s pin=%s holds older ledgers too: %r", self._partition, pin, error)

    async def _renew(self, asked: PinRequest) -> int:
        self._lead()
        deadline_ms = self._deadline(asked.ttl_ms)
        if not await self._pins.extend(self._partition, asked.pin, deadline_ms):
            raise NoSuchPin(f"partition {self._partition}: there is no pin {asked.pin!r}")
        await self._lead().append_record(MarkRecord(asked.pin, deadline_ms, takes=False))
        return deadline_ms

    async def _release(self, asked: PinRequest) -> bool:
        self._lead()
        await self._pins.release(self._partition, asked.pin)
        await self._lead().append_record(MarkRecord(asked.pin, 0, takes=False))
        log.info("partition=%s pin=%s released", self._partition, asked.pin)
        return True
