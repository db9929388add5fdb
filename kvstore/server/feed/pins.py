"""Pins of the whole store: creates, renews, releases and lists them. A pin consists of pins in all partitions,
whichever servers lead them."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Awaitable, Container, Iterable, Mapping, Sequence
from contextlib import suppress
from typing import Any, Protocol

from kvstore.env import Clock, Env
from kvstore.errors import (
    InvalidRequest,
    MetadataError,
    NoSuchPin,
    NotLeader,
    OutcomeUnknown,
    Overloaded,
    Retryable,
    StoreError,
    Unavailable,
)
from kvstore.meta import paths
from kvstore.meta.store import MetadataStore
from kvstore.partition import pinning
from kvstore.partition.pinning import HeldPin, PinnedState, PinRequest
from kvstore.proto import data_pb2
from kvstore.ring import MURMUR3, PartitionState, Ring, codec
from kvstore.ring.cover import flaw
from kvstore.server.cluster.topology import ClusterTopology
from kvstore.server.peer_calls import PeerCalls
from kvstore.types import PartitionId, ServerId
from kvstore.versions import Versions
from kvstore.wal.lists import LedgerLists
from kvstore.wal.pins import FEED_PIN, Pins

TTL_DEFAULT_MS, TTL_MAX_MS = 600_000, 86_400_000
PATIENCE_S = 15.0
"""Seconds for which creating a pin is retried. During that time leaders may change, and a range that moves has no
owner for a moment."""
CALL_S = 5.0
AGAIN_S = 0.05
CALLS_AT_ONCE = 16
_ID = re.compile(r"[A-Za-z0-9._-]{1,64}")
_HOLD = re.compile(rf"({FEED_PIN}[A-Za-z0-9._-]{{1,64}}@)[0-9]+")


class PinsSource(Protocol):
    """The access to the cluster that the node provides."""

    @property
    def store(self) -> MetadataStore: ...
    @property
    def topology(self) -> ClusterTopology: ...
    @property
    def links(self) -> PeerCalls: ...
    @property
    def versions(self) -> Versions: ...


class PinKeeper:
    """Manages pins by asking the leaders of all partitions. Every call is idempotent."""

    def __init__(self, env: Env, source: PinsSource) -> None:
        self._env, self._source = env, source
        self._pins = Pins(source.store, LedgerLists(source.store))
        self._nursery = env.nursery.child("pins")

    async def close(self) -> None:
        await self._nursery.close()

    async def pin(self, request: data_pb2.PinRequest) -> data_pb2.PinResponse:
        """Create a pin in partitions that together own every token exactly once, and return the named ones, by default
        all. Raises StoreError. After an error nothing stays pinned, or only until the pin's deadline."""
        self._check_hash(request.hashes)
        asked = PinRequest(self._id(request.id), _ttl(request.ttl_ms), request.split_bytes)
        named = [PartitionId(each) for each in request.partitions]
        self._check_named(named)
        until = self._env.clock.now() + PATIENCE_S
        ring: Ring | None = self._source.topology.ring
        while True:
            asked = asked._replace(number=await self._next_number())
            answers = await self._ask_all(self._members(), pinning.TAKE, asked)
            errors = {each: answer for each, answer in answers.items() if isinstance(answer, StoreError)}
            taken = {
                each: pinning.pinned_state_of(found) for each, found in answers.items() if isinstance(found, bytes)
            }
            wrong = _flaw_of(taken, named, errors)
            if not wrong:
                before, ring = ring, await self._ring()
                wrong = _unpinned_move(before, ring, taken)
            if not wrong:
                return self._response(asked.pin, taken, named or sorted(taken))
            final = next((error for error in errors.values() if not _may_pass(error)), None)
            if final is not None or self._env.clock.now() >= until:
                await self.unpin(asked.pin)
                raise final or Unavailable(f"pin {asked.pin!r}: {wrong}")
            await asyncio.sleep(AGAIN_S * self._env.random.uniform(1, 2))  # two pins may have overtaken each other

    # docs/protocol.md Tx13
    async def _next_number(self) -> int:
        """Return the number of a pin; 0 before cluster version 3. Raises Unavailable."""
        if self._source.versions.cluster < pinning.NUMBERED_SINCE:
            return 0
        try:
            return await self._pins.next_number(self._env.clock.date_ms())
        except MetadataError as error:
            raise Unavailable("a pin cannot get a number from the metadata store now") from error

    # docs/protocol.md K4
    async def _ring(self) -> Ring | None:
        """Return the present ring; None if it is unknown."""
        try:
            await self._source.store.sync(paths.RING)
            data, _ = await self._source.store.get(paths.RING)
        except MetadataError:
            return None
        return codec.decode(data)

    async def renew(self, request: data_pb2.RenewRequest) -> data_pb2.RenewResponse:
        """Renew a pin. Raises StoreError, which is NoSuchPin if the pin has ended in one of the named partitions, by
        default all that have it. The others are renewed if they can be: reads of the named ones may need them."""
        asked = PinRequest(_checked(request.id), _ttl(request.ttl_ms))
        holding = await self._holding(asked.pin)
        partitions = [PartitionId(each) for each in request.partitions] or holding
        until = self._env.clock.now() + PATIENCE_S
        deadlines: dict[PartitionId, int] = {}
        left = sorted({*partitions, *holding})
        while left:
            answers = await self._run({each: self._renew_in(each, asked) for each in left})
            for partition, answer in answers.items():
                if isinstance(answer, bytes):
                    deadlines[partition] = pinning.deadline_of(answer)
                elif partition in partitions and (not _may_pass(answer) or self._env.clock.now() >= until):
                    raise answer
            left = [each for each in partitions if each not in deadlines]
            if left:
                await asyncio.sleep(AGAIN_S)
        for partition in partitions:
            if partition in self._source.topology.ring.partitions:
                await self._check_kept(partition, asked.pin)
        return data_pb2.RenewResponse(deadline_ms=min(deadlines.values()), partitions=sorted(deadlines))

    async def _renew_in(self, partition: PartitionId, asked: PinRequest) -> bytes:
        if not self._source.topology.ring.has_left(partition):
            return await self._ask_leader(partition, pinning.RENEW, pinning.encode_request(asked))
        # There is no leader. Replicas that keep the view follow the pin of the log.
        deadline_ms = deadline_of(self._env.clock, asked.ttl_ms)
        if not await self._pins.extend(partition, asked.pin, deadline_ms):
            raise NoSuchPin(f"partition {partition}, which has left the ring: no pin {asked.pin!r}")
        return pinning.encode(deadline_ms)

    async def unpin(self, pin: str) -> data_pb2.UnpinResponse:
        """Release a pin in the partitions whose leaders answer. In the others, release the pin's hold on the log if
        possible; their replicas notice that and drop their views. A feed reader's hold is released under any of the
        names in the list. Raises InvalidRequest, MetadataError."""
        if hold := _HOLD.fullmatch(pin):
            return await self._release(hold[1])
        answers = await self._ask_all(self._members(), pinning.RELEASE, PinRequest(_checked(pin)))
        released = {each for each in answers if isinstance(answers[each], bytes)}
        for partition in sorted(self._source.topology.ring.partitions):
            if partition not in released:
                with suppress(MetadataError):
                    held = pin in dict(await self._pins.all(partition, pin))
                    await self._pins.release(partition, pin)
                    if held and partition not in answers:  # it is retired and has no leader
                        released.add(partition)
        return data_pb2.UnpinResponse(partitions=sorted(released))

    async def listed(self, only: PartitionId | None = None) -> data_pb2.PinsResponse:
        """List the pins of every partition of the ring, including retired partitions, which stay in the ring only while
        a pin holds their log; or of one partition. Raises MetadataError."""
        response = data_pb2.PinsResponse()
        partitions = self._source.topology.ring.partitions
        for partition in sorted(partitions if only is None else partitions.keys() & {only}):
            found: dict[str, data_pb2.PinStatus] = {}
            is_retired = partitions[partition].state is PartitionState.RETIRED
            for name, pin in await self._pins.all(partition):
                found[name] = data_pb2.PinStatus(
                    partition=partition, id=name, ledger=pin.ledger, deadline_ms=pin.deadline_ms, retired=is_retired
                )
            for server, each in [] if is_retired else await self._kept_views(partition):
                status = found.setdefault(each.pin, data_pb2.PinStatus(partition=partition, id=each.pin))
                status.position_ledger, status.position_entry = each.position
                status.deadline_ms = max(status.deadline_ms, each.deadline_ms)
                status.servers.append(server)
            response.pins.extend(found[name] for name in sorted(found))
        return response

    # ── inside ────────────────────────────────────────────────────────────────────────────────────────────────────────

    def _id(self, given: str) -> str:
        return _checked(given) if given else f"pin-{self._env.random.randbytes(8).hex()}"

    async def _release(self, prefix: str) -> data_pb2.UnpinResponse:
        response = data_pb2.UnpinResponse()
        for partition in sorted(self._source.topology.ring.partitions):
            for name, _ in (held := await self._pins.all(partition, prefix)):
                await self._pins.release(partition, name)
            response.partitions.extend([partition] if held else [])
        return response

    def _check_hash(self, known: Sequence[str]) -> None:
        """Raise InvalidRequest unless the caller can compute tokens as this cluster does."""
        hash = self._source.topology.ring.hash
        if hash is not MURMUR3 and hash.name not in known:
            raise InvalidRequest(
                f"expected a client that knows the key hash {hash.name} of this cluster, got one that knows "
                f"{', '.join(known) or MURMUR3.name}; upgrade the client"
            )

    def _check_named(self, named: Iterable[PartitionId]) -> None:
        members = self._members()
        for each in named:
            if each not in members:
                raise InvalidRequest(f"no partition {each}; expected some of {', '.join(members)}")

    def _members(self) -> list[PartitionId]:
        """Return the partitions of the ring, without retired ones, which have no leader."""
        members = self._source.topology.ring.partitions
        return [each for each in sorted(members) if members[each].state is not PartitionState.RETIRED]

    async def _holding(self, pin: str) -> list[PartitionId]:
        """Return the partitions that have the pin, including a pin that another server has just created."""
        await self._source.store.sync(paths.RING)
        ring = self._source.topology.ring
        found = [each for each in sorted(ring.partitions) if pin in dict(await self._pins.all(each))]
        if not found:
            raise NoSuchPin(f"no pin {pin!r}")
        return found

    async def _check_kept(self, partition: PartitionId, pin: str) -> None:
        """Raise NoSuchPin if no replica keeps the pin's view, even though the pin still holds the log. Replicas drop
        views at the deadline and when they restart."""
        answers = await self._ask_replicas(partition)
        kept = {
            each.pin
            for answer in answers.values()
            if isinstance(answer, bytes)
            for each in pinning.held_pins_of(answer)
        }
        if answers and pin not in kept and all(isinstance(answer, bytes) for answer in answers.values()):
            raise NoSuchPin(f"partition {partition}: no replica keeps pin {pin!r} any more")

    async def _kept_views(self, partition: PartitionId) -> list[tuple[ServerId, HeldPin]]:
        """Return the views that each replica of the partition keeps."""
        return [
            (server, each)
            for server, answer in (await self._ask_replicas(partition)).items()
            if isinstance(answer, bytes)
            for each in pinning.held_pins_of(answer)
        ]

    async def _ask_replicas(self, partition: PartitionId) -> dict[ServerId, bytes | StoreError]:
        """Ask the running replicas for the views that they keep."""
        topology = self._source.topology
        member = topology.ring.partitions.get(partition)  # a partition that has left may be gone meanwhile
        servers = [each for each in member.replicas if each in topology.servers] if member is not None else []
        body = pinning.encode_request(PinRequest())
        work = {
            server: self._source.links.call(server, partition, pinning.TELL, body, CALL_S) for server in sorted(servers)
        }
        return await self._run(work)

    async def _ask_all(
        self, partitions: Iterable[PartitionId], method: str, asked: PinRequest
    ) -> dict[PartitionId, bytes | StoreError]:
        """Ask each partition's leader."""
        body = pinning.encode_request(asked)
        return await self._run({each: self._ask_leader(each, method, body) for each in partitions})

    async def _ask_leader(self, partition: PartitionId, method: str, body: bytes) -> bytes:
        leader = self._source.topology.leaders.get(partition)
        if leader is None:
            raise NotLeader(partition)
        return await self._source.links.call(leader[0], partition, method, body, CALL_S)

    async def _run(self, work: Mapping[Any, Awaitable[bytes]]) -> dict[Any, bytes | StoreError]:
        """Run all calls, at most CALLS_AT_ONCE at a time."""
        answers: dict[Any, bytes | StoreError] = {}
        slots = asyncio.Semaphore(CALLS_AT_ONCE)

        async def one(name: Any, call: Awaitable[bytes]) -> None:
            async with slots:
                try:
                    answers[name] = await call
                except StoreError as error:
                    answers[name] = error

        tasks = [self._nursery.spawn(one(name, call), name=f"ask {name}") for name, call in work.items()]
        for task in tasks:
            await task
        return {name: answers[name] for name in work}

    def _response(
        self, pin: str, taken: dict[PartitionId, PinnedState], named: Sequence[PartitionId]
    ) -> data_pb2.PinResponse:
        topology = self._source.topology
        response = data_pb2.PinResponse(
            id=pin,
            ring_version=topology.ring.version,
            deadline_ms=min(each.deadline_ms for each in taken.values()),
            hash=topology.ring.hash.name,
        )
        for partition in sorted({*named}):
            found = taken[partition]
            message = response.partitions.add(
                partition=partition,
                ledger=found.position.ledger,
                entry=found.position.entry,
                sequence=found.seq,
                time_ms=found.time_ms,
                first_tokens=[span.first for span in found.spans],
                last_tokens=[span.last for span in found.spans],
                rows=found.records,
                bytes=found.bytes,
                split_tokens=found.split_tokens,
                deadline_ms=found.deadline_ms,
                intents=found.intents,
            )
            for server in _best_first(topology, partition):
                message.replicas.add(server=server, grpc=topology.servers[server].grpc)
        return response


# docs/protocol.md P31
def deadline_of(clock: Clock, ttl_ms: int) -> int:
    """Return the deadline of a hold that is set without a leader. Raises Unavailable if this server could not lead by
    its date: others would remove the hold by their dates, perhaps at once."""
    if not clock.may_lead():
        raise Unavailable("this server is not sure of its date, by which the hold would end; ask another server")
    return clock.date_ms() + ttl_ms


def _best_first(topology: ClusterTopology, partition: PartitionId) -> list[ServerId]:
    """Return the running replicas in the order in which to ask them. The leader is last, because it is the busiest."""
    leader = topology.leaders.get(partition, (ServerId(""), 0))[0]
    member = topology.ring.partitions.get(partition)
    up = [each for each in member.replicas if each in topology.servers] if member is not None else []
    return sorted(up, key=lambda server: (server == leader, up.index(server)))


# docs/protocol.md K4
def _flaw_of(
    taken: dict[PartitionId, PinnedState], named: Sequence[PartitionId], errors: dict[PartitionId, StoreError]
) -> str:
    """Return what is wrong with a pin, or an empty string if it is complete. A partition that owns no tokens need
    not answer, unless it is named or a range moves to it."""
    failures = "; ".join(f"{partition}: {error}" for partition, error in sorted(errors.items()))
    wrong = flaw({partition: found.spans for partition, found in taken.items()})
    unpinned = next((f"partition {each} was not pinned" for each in named if each not in taken), "")
    return "; ".join(each for each in (wrong or unpinned, failures) if each) if wrong or unpinned else ""


# docs/protocol.md K4
def _unpinned_move(before: Ring | None, ring: Ring | None, taken: Container[PartitionId]) -> str:
    """Return how a range may have moved past the pin, or an empty string if none can have. `before` is the ring from
    before the partitions were asked; None means that a ring is unknown."""
    if before is None or ring is None or ring.next_move != before.next_move:
        return "a range may have moved meanwhile"
    targets = sorted({move.target for move in before.moves.values()})
    unpinned = next((each for each in targets if each not in taken), None)
    return f"partition {unpinned}, to which a range moves, was not pinned" if unpinned else ""


def _may_pass(error: StoreError) -> bool:
    """Return True if the error is temporary, so that the same call may succeed soon."""
    if isinstance(error, Overloaded | NoSuchPin):
        return False
    return isinstance(error, Retryable | OutcomeUnknown | MetadataError)


def _checked(pin: str) -> str:
    if not _ID.fullmatch(pin) or pin in (".", ".."):
        raise InvalidRequest(f"expected a pin id of 1 to 64 letters, digits, '-', '_', '.', got {pin[:80]!r}")
    return pin


def _ttl(ttl_ms: int) -> int:
    if ttl_ms > TTL_MAX_MS:
        raise InvalidRequest(f"expected a pin lifetime of at most {TTL_MAX_MS} ms, got {ttl_ms}")
    return ttl_ms or TTL_DEFAULT_MS
