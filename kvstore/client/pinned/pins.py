"""Reads of the whole store at pinned positions: planning and reading for data pipelines. Blocking.

    store = pin_store("kv://host:7401", ttl_s=600)
    for split in store.splits():            # in any process, any number of times: always the same bytes
        for page in read_pinned(split):
            ...
    unpin("kv://host:7401", store.id)

Plans are frozen values that can be pickled. They carry no login: the reader passes one to `read_pinned(login=…)`, or
the environment names it. No connection stays open between calls, so a fork does no harm.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import grpc

from kvstore.backoff import delays
from kvstore.client.blocking.identity import check_cluster
from kvstore.client.core.config import ClientConfig, as_config
from kvstore.client.core.login_refusals import LoginRefusals
from kvstore.env.library_env import library_env
from kvstore.env.tls import Tls
from kvstore.errors import ConfigError, NoSuchPin, NotAuthenticated, OutcomeUnknown, Retryable, StoreError, Unavailable
from kvstore.proto import data_pb2, data_pb2_grpc
from kvstore.ring.cover import flaw
from kvstore.ring.hashing import HASHES, KeyHash, hash_named
from kvstore.rpc import workers
from kvstore.rpc.channels import open_channel
from kvstore.rpc.status import from_rpc_error, is_answered
from kvstore.types import EntryId, LedgerId, Position

T = TypeVar("T")
SPLIT_BYTES = 64 << 20
TIMEOUT_S = 30.0
LATE_S = 2.0
"""How long a call may exceed its `timeout_s` while it waits for gRPC."""


@dataclass(frozen=True, slots=True)
class Split:
    """A range of tokens of one partition at its pinned position: what one task reads."""

    pin: str
    partition: str
    position: Position
    first: int
    last: int
    """First and last token, both included. Tokens that the partition does not own are not read."""
    replicas: tuple[str, ...]
    """Addresses (`host:port`) of the replicas that can be asked, the best first."""
    rows: int
    bytes: int
    """Approximate number of bytes."""
    tls: Tls | None = None


@dataclass(frozen=True, slots=True)
class PinnedPartition:
    """Where and how to read one partition at its pinned position."""

    partition: str
    position: Position
    sequence: int
    """Sequence of the last mutation up to the position."""
    time_ms: int
    """Record time at the position. Keys that expire at this time or earlier are not read."""
    spans: tuple[tuple[int, int], ...]
    """First and last tokens, both included, of the ranges that the partition owns at the position."""
    replicas: tuple[str, ...]
    """Addresses (`host:port`) of the replicas that can be asked; the leader is last."""
    rows: int
    bytes: int
    """Approximate bytes of keys and values."""
    split_tokens: tuple[int, ...]
    """Last tokens of all splits but the last one."""
    deadline_ms: int
    intents: int = 0
    """Number of keys that intents of transactions change if they are committed. The log up to the position lacks these
    changes; `read_pinned` with `intents_only` reads them."""


@dataclass(frozen=True, slots=True)
class PinnedStore:
    """A pin and the partitions that it holds."""

    id: str
    deadline_ms: int
    """Deadline by the servers' wall clocks, in milliseconds since 1970; the earliest of all partitions."""
    ring_version: int
    partitions: tuple[PinnedPartition, ...]
    hash: KeyHash
    """The cluster's key hash, by which keys have tokens."""
    tls: Tls | None = None

    @property
    def rows(self) -> int:
        return sum(each.rows for each in self.partitions)

    @property
    def bytes(self) -> int:
        return sum(each.bytes for each in self.partitions)

    def splits(self) -> list[Split]:
        """Return ranges of about equal size that contain every pinned record exactly once. Neighbouring splits prefer
        different replicas."""
        return [split for each in self.partitions for split in self._splits_of(each)]

    def _splits_of(self, pinned: PinnedPartition) -> list[Split]:
        if not pinned.spans:
            return []
        bounds = [pinned.spans[0][0] - 1, *pinned.split_tokens, pinned.spans[-1][1]]
        count = len(bounds) - 1
        return [
            Split(
                self.id,
                pinned.partition,
                pinned.position,
                bounds[number] + 1,
                bounds[number + 1],
                rotated(pinned.replicas, number),
                pinned.rows // count,
                pinned.bytes // count,
                self.tls,
            )
            for number in range(count)
        ]


@dataclass(frozen=True, slots=True)
class PinStatus:
    """The state of a pin in one partition."""

    partition: str
    id: str
    ledger: int | None
    """First ledger of the log that the pin holds."""
    deadline_ms: int
    """Deadline in milliseconds since 1970; 0: the pin lives as long as the session that made it."""
    position: Position | None
    """Position that can be read; None if the pin only holds the log."""
    servers: tuple[str, ...]
    """Servers that keep the position."""
    is_retired: bool = False
    """True if the partition has retired and remains because of its pins."""


def rotated(replicas: tuple[str, ...], number: int) -> tuple[str, ...]:
    """Rotate the replicas, except the last one, which leads."""
    followers = replicas[:-1]
    if not followers:
        return replicas
    at = number % len(followers)
    return (*followers[at:], *followers[:at], replicas[-1])


def pin_store(
    cluster: str | ClientConfig,
    *,
    ttl_s: float,
    id: str = "",
    partitions: Sequence[str] = (),
    split_bytes: int = SPLIT_BYTES,
    timeout_s: float = TIMEOUT_S,
    identity: str = "",
) -> PinnedStore:
    """Pin the store, and return the pinned positions of all partitions, or of some.

    Every token belongs to exactly one partition. Costs one call, which takes as long as the slowest partition.

    Args:
        cluster: A URL, `host:port`, or a `ClientConfig`.
        ttl_s: How long the pin lives without `renew_pin`, in seconds.
        id: Name of the pin. Pinning an existing name replaces its positions. Empty: a random name.
        partitions: Ids of the partitions to return. Empty: all. All are pinned in any case, so that reads show each
            transaction as a whole.
        split_bytes: Size of a split, in bytes.
        timeout_s: Maximum time for the call, in seconds.
        identity: Id of the cluster that the servers must belong to.

    Raises:
        Unavailable: If no server has answered in time.
        OutcomeUnknown: If the pin may have been made.
    """
    config = _config(cluster)
    # The client chooses the name: a name chosen by the server would differ at the next server, so that a retry would
    # leave another pin.
    name = id or f"pin-{library_env('kvstore pinned').random.randbytes(8).hex()}"
    request = data_pb2.PinRequest(
        id=name,
        ttl_ms=round(ttl_s * 1000),
        partitions=partitions,
        split_bytes=max(0, split_bytes),
        cluster=identity,
        hashes=sorted(HASHES),
    )
    answer = _ask(config, timeout_s, lambda stub, left_s: stub.Pin(request, timeout=left_s))
    pinned = tuple(map(_pinned_of, answer.partitions))
    if not partitions and (wrong := flaw({each.partition: each.spans for each in pinned})):
        raise OutcomeUnknown(f"pin {answer.id}: {wrong}")
    return PinnedStore(answer.id, answer.deadline_ms, answer.ring_version, pinned, hash_named(answer.hash), config.tls)


def renew_pin(
    cluster: str | ClientConfig,
    id: str,
    *,
    ttl_s: float,
    partitions: Sequence[str] = (),
    timeout_s: float = TIMEOUT_S,
    identity: str = "",
) -> int:
    """Extend a pin, and return its new deadline in milliseconds since 1970.

    Args:
        cluster: A URL, `host:port`, or a `ClientConfig`.
        id: Name of the pin.
        ttl_s: How long the pin lives from now on, in seconds.
        partitions: Ids of the partitions that must still have the pin. Empty: all that have it. The pin is renewed in
            the others too, if possible.
        timeout_s: Maximum time for the call, in seconds.
        identity: Id of the cluster that the servers must belong to.

    Raises:
        NoSuchPin: If the pin has ended in one of the partitions.
    """
    request = data_pb2.RenewRequest(id=id, ttl_ms=round(ttl_s * 1000), partitions=partitions, cluster=identity)
    deadline_ms: int = _ask(
        _config(cluster), timeout_s, lambda stub, left_s: stub.Renew(request, timeout=left_s)
    ).deadline_ms
    return deadline_ms


def unpin(cluster: str | ClientConfig, id: str, *, timeout_s: float = TIMEOUT_S) -> list[str]:
    """Release a pin, and return the partitions that have released it. In other partitions it ends at its deadline."""
    request = data_pb2.UnpinRequest(id=id)
    return list(_ask(_config(cluster), timeout_s, lambda stub, left_s: stub.Unpin(request, timeout=left_s)).partitions)


def list_pins(cluster: str | ClientConfig, *, timeout_s: float = TIMEOUT_S) -> list[PinStatus]:
    """Return all pins of the cluster."""
    request = data_pb2.PinsRequest()
    answer = _ask(_config(cluster), timeout_s, lambda stub, left_s: stub.Pins(request, timeout=left_s))
    return [_status_of(each) for each in answer.pins]


# ── inside ────────────────────────────────────────────────────────────────────────────────────────────────────────────


def _config(cluster: str | ClientConfig) -> ClientConfig:
    return as_config(f"kv://{cluster}" if isinstance(cluster, str) and "://" not in cluster else cluster)


def _ask(config: ClientConfig, timeout_s: float, call: Callable[[Any, float], T]) -> T:
    """Return the answer of the first server that gives one. Every call may be repeated: there may be time left, and a
    server that could not be reached may have been starting. Raises StoreError."""
    try:
        return workers.run(lambda: _ask_all(config, timeout_s, call), timeout_s + LATE_S)
    except workers.Late:
        raise OutcomeUnknown(f"no server answered within {timeout_s:g} s; a call hangs in gRPC") from None


def _ask_all(config: ClientConfig, timeout_s: float, call: Callable[[Any, float], T]) -> T:
    env = library_env("kvstore pinned")
    end = env.clock.now() + timeout_s
    failure: StoreError = Unavailable("no server can be reached")
    weight = 0
    addresses, refusals = dict.fromkeys(config.endpoints), LoginRefusals()
    for pause_s in delays(env.random, first_s=0.02, cap_s=0.5):
        is_any_away = False
        for place, address in enumerate(config.endpoints):
            left_s = (end - env.clock.now()) / (len(config.endpoints) - place)
            if left_s <= 0:
                break
            try:
                with open_channel(address, config.tls, login=config.login) as channel:
                    if config.cluster:
                        check_cluster(channel, config.cluster, address, left_s)
                    return call(data_pb2_grpc.DataStub(channel), left_s)
            except grpc.RpcError as error:
                found, is_away = from_rpc_error(error), not is_answered(error)
            except Unavailable as error:  # a server of another cluster listens there
                found, is_away = error, False
            except (OSError, ConfigError) as error:  # a certificate or password file may be missing for a moment
                found, is_away = Unavailable(f"{address}: {error}"), True
            found_weight = _weight(found, is_away=is_away)
            found = refusals.judge(address, found, addresses)
            if not isinstance(found, Retryable | OutcomeUnknown):
                raise failure if isinstance(failure, OutcomeUnknown) else found
            is_any_away |= is_away
            if found_weight >= weight:
                failure, weight = found, found_weight
        if isinstance(failure, NoSuchPin) or not is_any_away or env.clock.now() + pause_s >= end:
            break
        threading.Event().wait(pause_s)
    login_error = refusals.error_or_none(addresses, is_late=True) if weight == 0 else None
    raise login_error or failure


def _weight(found: StoreError, *, is_away: bool) -> int:
    """Return the weight of an error beside the errors of other servers: the pin has ended; the pin may exist; any other
    answer; a server is down or rejects the login."""
    if isinstance(found, NoSuchPin | OutcomeUnknown):
        return 3 if isinstance(found, NoSuchPin) else 2
    return 0 if is_away or isinstance(found, NotAuthenticated) else 1


def _pinned_of(message: data_pb2.PinnedPartition) -> PinnedPartition:
    return PinnedPartition(
        message.partition,
        Position(LedgerId(message.ledger), EntryId(message.entry)),
        message.sequence,
        message.time_ms,
        tuple(zip(message.first_tokens, message.last_tokens, strict=True)),
        tuple(each.grpc for each in message.replicas),
        message.rows,
        message.bytes,
        tuple(message.split_tokens),
        message.deadline_ms,
        message.intents,
    )


def _status_of(message: data_pb2.PinStatus) -> PinStatus:
    position = None
    if message.HasField("position_ledger"):
        position = Position(LedgerId(message.position_ledger), EntryId(message.position_entry))
    ledger = message.ledger if message.HasField("ledger") else None
    servers, is_retired = tuple(message.servers), message.retired
    return PinStatus(message.partition, message.id, ledger, message.deadline_ms, position, servers, is_retired)
