"""The errors that kvstore raises deliberately. Their place in the tree says what a caller may conclude.

    StoreError
    ├── Refused                   the request was not carried out
    │   ├── Retryable             the same call may succeed later or on another server
    │   │   ├── NotLeader         carries the leader's server id and address, if known
    │   │   ├── Moved             the partition does not own the key; carries the ring version to wait for
    │   │   ├── Overloaded        a limit is reached: connections, queues or memory
    │   │   ├── RateExceeded      a namespace's operations per second are used up; carries when to retry
    │   │   ├── Conflict          another transaction holds a key, or changed what was read; nothing was done
    │   │   ├── NotEnoughBookies  too few bookies for a write; nothing was appended
    │   │   ├── Unavailable       no leader or lease, or no server answered in time; nothing was sent
    │   │   │   ├── OtherCluster  only servers of another cluster answer at the configured addresses
    │   │   │   └── PeerRefused   the server's port refuses connections: its process does not run
    │   │   ├── NotCaughtUp       the replica has not applied what the session token requires
    │   │   └── NoSuchPin         the replica does not keep the pinned position; another replica may
    │   ├── InvalidRequest        malformed, too large, or across partitions; says what was expected and what came
    │   │   └── NotThere          the change names a user, role, right, token or namespace that does not exist
    │   ├── ConditionFailed       the key has another version than required; carries the version found
    │   ├── QuotaExceeded         a namespace's keys or bytes are used up; carries which, the usage and the limit
    │   ├── NotAuthenticated      the caller sent no credentials, or wrong ones
    │   │   └── AccessUnfounded   the node is reachable from other machines while access control is off
    │   ├── PermissionDenied      the user lacks a right; names both, and what needs the right
    │   ├── NotYetRaised          the cluster version is too low: some server runs an older release
    │   ├── RequestExpired        a retry that is older than the window of remembered requests
    │   └── PositionTrimmed       the log no longer reaches back to the position of a feed; carries both
    ├── OutcomeUnknown            the request may have been carried out: timeout, fence or loss after the append
    ├── MetadataError             errors of the metadata store
    │   ├── NoSuchNode
    │   ├── NodeExists
    │   ├── NotEmpty
    │   ├── VersionConflict       another client wrote first
    │   ├── MetadataUnavailable   not connected; the call was not sent
    │   │   └── OlderMetadata     connected to an older copy of the metadata; no call is sent to it
    │   ├── MetadataUnknown       the connection broke during the call, which may have taken effect
    │   ├── MetadataDenied        the metadata store rejects the login or lacks a permission for it
    │   ├── MetadataLost          the metadata store no longer has what this process needs
    │   └── UndecodableNode       this build cannot decode a node's bytes; also a Corrupted
    ├── LedgerError               never leaves wal and bookie
    │   ├── NoSuchLedger
    │   ├── LedgerDeleted         a log still lists the ledger, but it was deleted
    │   ├── NoSuchEntry
    │   ├── LedgerFenced          another writer took over the ledger
    │   ├── LedgerClosed
    │   ├── NotRecoverable        too few definite answers to find the end of the ledger
    │   └── BookieError           one bookie failed: unreachable, slow or in an unknown state
    ├── Corrupted                 bytes read back are not the bytes written
    │   └── WrittenByNewer        the bytes are intact, but a newer release wrote them in a format unknown here
    └── ConfigError               an invalid configuration or data directory; names the faults
        └── ClusterTooNew         the cluster version is higher than this build supports; says what to install

kvstore/rpc/status.py maps each class to its gRPC and HTTP status.
"""

from __future__ import annotations

from urllib.parse import quote_from_bytes, unquote_to_bytes


class StoreError(Exception):
    """Base class of the errors that callers are expected to handle."""


class Refused(StoreError):
    """The request was not carried out."""


class Retryable(Refused):
    """The request was not carried out. The same call may succeed later or on another server."""


class NotLeader(Retryable):
    """This server does not lead the partition. The error names the leader if it is known."""

    def __init__(self, partition: str, leader: str = "", address: str = "") -> None:
        super().__init__(partition, leader, address)
        self.partition, self.leader, self.address = partition, leader, address

    def __str__(self) -> str:
        return f"partition {self.partition} is led by {self.leader or 'no known server'} {self.address}".rstrip()


class Moved(Retryable):
    """The key belongs to another partition. Retry once the ring has reached `ring_version`."""

    def __init__(self, partition: str, ring_version: int) -> None:
        super().__init__(partition, ring_version)
        self.partition, self.ring_version = partition, ring_version

    def __str__(self) -> str:
        return f"the key belongs to partition {self.partition} at ring version {self.ring_version}"


class Overloaded(Retryable):
    """A limit is reached; the message names it. Retry after a pause."""


class RateExceeded(Retryable):
    """The clients of a namespace exceed its rate limit. `ops_per_s` is the limit for the whole cluster, `share` is this
    server's current part of it, and the same call may succeed after `retry_after_ms`."""

    def __init__(self, namespace: str, ops_per_s: int, share: int, retry_after_ms: int) -> None:
        super().__init__(namespace, ops_per_s, share, retry_after_ms)
        self.namespace, self.ops_per_s, self.share = namespace, ops_per_s, share
        self.retry_after_ms = retry_after_ms

    def __str__(self) -> str:
        return (
            f"namespace {self.namespace}: its {self.ops_per_s} operations/s are used up (this server's share is now "
            f"{self.share}); retry in {self.retry_after_ms} ms"
        )


class Conflict(Retryable):
    """Another transaction has locked a key of this transaction, or has changed a key that this transaction read.
    Nothing was done. Run the transaction again, reads included, after a random pause."""


class NotEnoughBookies(Retryable):
    """Fewer bookies answer than an acknowledged write needs. Nothing was appended."""


class Unavailable(Retryable):
    """No server that may answer did so in time. No write was carried out."""


class OtherCluster(Unavailable):
    """Servers answer at the configured addresses, but they belong to another cluster than the client is configured for
    or has used so far. Nothing was sent to them. Check the addresses and the cluster's id."""


class PeerRefused(Unavailable):
    """The server's machine refuses the connection: its process has ended or has not started yet. Nothing was sent."""


class NotCaughtUp(Retryable):
    """The replica has not applied the sequence that the session token requires. Another replica, or the leader, may
    have."""


class NoSuchPin(Retryable):
    """The replica does not keep its state at the pinned position: the pin has ended, or the replica was added,
    restarted or replaced its state after the pin. Another replica may keep the position."""


class InvalidRequest(Refused):
    """The request can never succeed as it is. The message says what was expected and what came."""


class NotThere(InvalidRequest):
    """The change names a user, role, right, token or namespace that does not exist."""


class ConditionFailed(Refused):
    """The key does not have the version, or the absence, that the request required. Carries the version found, 0 if the
    key is absent. A transaction also names the key (`quoted_key`, percent-encoded), unless that
    has more than 1,024 characters."""

    def __init__(self, version: int, key: bytes | str = b"") -> None:
        """`key`: the key, or its percent-encoded form, in which errors travel. Empty if the request has one key or is a
        batch."""
        self.version = version
        self.quoted_key = quote_from_bytes(key) if isinstance(key, bytes) else key
        super().__init__(version, *filter(None, [self.quoted_key]))

    @property
    def key(self) -> bytes:
        """The key whose condition was not met, in a transaction. Empty otherwise."""
        return unquote_to_bytes(self.quoted_key)

    def __str__(self) -> str:
        name = f"the key {self.key!r:.100}" if self.quoted_key else "the key"
        return f"condition not met: {name} {f'has version {self.version}' if self.version else 'is absent'}"


class QuotaExceeded(Refused):
    """The write would exceed a namespace's quota of keys or bytes (`quota` says which): `used` of `limit` are used and
    the write needs `wanted` more. Retrying does not help until keys are deleted or expire, or the quota is raised."""

    def __init__(self, namespace: str, quota: str, used: int, limit: int, wanted: int) -> None:
        super().__init__(namespace, quota, used, limit, wanted)
        self.namespace, self.quota, self.used, self.limit, self.wanted = namespace, quota, used, limit, wanted

    def __str__(self) -> str:
        return (
            f"namespace {self.namespace}: {self.used} of {self.limit} {self.quota} are used and the write needs "
            f"{self.wanted} more; delete keys, wait until keys expire, or raise the quota"
        )


class NotAuthenticated(Refused):
    """The server requires a login, and the caller sent none or a wrong one."""


class AccessUnfounded(NotAuthenticated):
    """The node is reachable from other machines and access control is off, so the node serves no client."""


class PermissionDenied(Refused):
    """The user lacks a right. The message names the right and what it was needed for."""


class NotYetRaised(Refused):
    """The cluster version is too low, because some server cannot do this yet. The message says which version is needed
    and what to do."""


class RequestExpired(Refused):
    """The request is older than the remembered requests of its client, so the server can neither apply nor recognize
    it. An earlier attempt may have been carried out."""


class PositionTrimmed(Refused):
    """The partition's log no longer has the changes after `asked`: it begins after `oldest`, or was removed with the
    partition if `oldest` is −1. `advice` says what to do."""

    def __init__(self, partition: str, asked: int, oldest: int, advice: str = "") -> None:
        super().__init__(partition, asked, oldest)
        self.partition, self.asked, self.oldest, self.advice = partition, asked, oldest, advice

    def __str__(self) -> str:
        left = (
            f"the oldest position that can be read from is {self.oldest}"
            if self.oldest >= 0
            else "its log is gone, because the partition left the ring"
        )
        advice = self.advice and f". {self.advice}"
        return f"partition {self.partition}: changes after {self.asked} were trimmed; {left}{advice}"


class OutcomeUnknown(StoreError):
    """The request may or may not have been carried out. Retry it with the same request id, or read the key. The Python
    clients have retried it until the deadline."""


class MetadataError(StoreError):
    """Base class of the errors of the metadata store."""


class NoSuchNode(MetadataError):
    """The path does not exist."""


class NodeExists(MetadataError):
    """The path already exists."""


class NotEmpty(MetadataError):
    """The node has children."""


class VersionConflict(MetadataError):
    """The node does not have the version that the call named: another client wrote first."""


class MetadataUnavailable(MetadataError):
    """The metadata store is not connected. The call was not sent."""


class OlderMetadata(MetadataUnavailable):
    """The metadata store holds an older copy of the metadata than this process or another process has seen. The call
    was not sent. Restore a later copy (docs/how-to/back-up-and-restore-metadata.md)."""


class MetadataUnknown(MetadataError):
    """The connection broke during the call, so the call may or may not have taken effect."""


class MetadataDenied(MetadataError):
    """The metadata store rejects the login or lacks a permission for it. Nothing was done."""


class MetadataLost(MetadataError):
    """The metadata store answers and is up to date, but no longer has what this process needs: its cluster or its log.
    It was removed, or another cluster was created there."""


class LedgerError(StoreError):
    """Base class of the errors of a ledger. They never reach a client."""


class NoSuchLedger(LedgerError):
    """No metadata is stored for the ledger."""


class LedgerDeleted(LedgerError):
    """A log lists the ledger, but the metadata store does not have it. Trimming removes a ledger from the list first,
    so another program deleted it. A replica must not discard its state for this, because it may be the last copy of
    what the ledger held."""


class NoSuchEntry(LedgerError):
    """The ledger definitely has no such entry."""


class LedgerFenced(LedgerError):
    """Another writer took over the ledger."""


class LedgerClosed(LedgerError):
    """The ledger accepts no more entries."""


class NotRecoverable(LedgerError):
    """Too few bookies gave a definite answer to find the end of the ledger. Retry when more bookies are back."""


class BookieError(LedgerError):
    """One bookie could not do what it was asked to: it is unreachable, slow, read-only or in an unknown state."""


class Corrupted(StoreError):
    """Bytes read back are not the bytes written. The message says where."""


class UndecodableNode(MetadataError, Corrupted):
    """A node of the metadata store holds bytes that this build cannot decode; the message names it. Code that reads
    many nodes reports the node and skips it (docs/protocol.md, P34)."""


class WrittenByNewer(Corrupted):
    """The bytes are intact, but a newer release wrote them in a format that this build cannot read."""


class ConfigError(StoreError):
    """The configuration or the data directory is invalid. Each fault is one argument."""

    @property
    def faults(self) -> tuple[str, ...]:
        return tuple(map(str, self.args))

    def __str__(self) -> str:
        return "; ".join(self.faults)


class ClusterTooNew(ConfigError):
    """The cluster version is higher than this build supports. The message says which release to install."""
