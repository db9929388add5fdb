"""Every error the store raises on purpose.

StoreError
├── Refused                   definitely not done
│   ├── Retryable             the same call may succeed later, or elsewhere
│   │   ├── NotLeader         carries the leader's server id and address, when known
│   │   ├── Moved             the partition does not own the key; carries the ring version to look for
│   │   ├── Overloaded        a bound is reached: connections, queue, memory
│   │   ├── RateExceeded      a namespace's operations per second; carries when to come again
│   │   ├── NotEnoughBookies  too few bookies for a write, seen before anything was appended
│   │   ├── Unavailable       no leader, no lease, or nobody reached in time, and nothing was sent
│   │   │   └── PeerRefused   the peer's port refuses connections: its process is gone
│   │   ├── NotCaughtUp       a replica has not applied what the session token asks for
│   │   └── NoSuchPin         a replica does not keep the pinned position (any more); another one may
│   ├── InvalidRequest        malformed, too large, or over two partitions; says what was expected and what came
│   ├── ConditionFailed       the version or absence asked for was not met; carries the version found
│   ├── QuotaExceeded         a namespace's keys or bytes; carries which, how many are used, and the limit
│   ├── NotAuthenticated      nobody has said who asks, or not rightly
│   │   └── AccessUnfounded   other machines reach this node, and access control is off
│   ├── PermissionDenied      the user lacks a right; names both, and what it was wanted for
│   ├── NotYetRaised          the cluster's version is too low for it: some server is older
│   ├── RequestExpired        a retry older than the window of remembered requests
│   └── PositionTrimmed       the log does not reach back to where a feed shall go on; carries both
├── OutcomeUnknown            it may or may not be done: timeout, fence or loss after the append was sent
├── MetadataError             the metadata store's answers
│   ├── NoSuchNode
│   ├── NodeExists
│   ├── NotEmpty
│   ├── VersionConflict       somebody else wrote first
│   ├── MetadataUnavailable   not connected; the call was not sent
│   │   └── OlderMetadata     connected to an older copy of the metadata; no call is sent to it
│   ├── MetadataUnknown       the connection broke while the call was under way
│   ├── MetadataDenied        the store does not take who we say we are, or does not let us
│   ├── MetadataLost          the store was reached, and has no more what this process needs
│   └── UndecodableNode       one node's bytes are not what this build can read; Corrupted too
├── LedgerError               stays inside wal and bookie
│   ├── NoSuchLedger
│   ├── LedgerDeleted         a log's list has the ledger still: somebody has deleted it
│   ├── NoSuchEntry
│   ├── LedgerFenced          another writer has taken the ledger over
│   ├── LedgerClosed
│   ├── NotRecoverable        too few definite answers to tell where the ledger ends
│   └── BookieError           one bookie's failure: unreachable, slow, unknown state
├── Corrupted                 bytes read back are not the bytes written
│   └── WrittenByNewer        they are, and a newer release has written what this build cannot read
└── ConfigError               a configuration or a data directory that must not be used; names what is wrong
    └── ClusterTooNew         the cluster is at a version that this build cannot do; says what to install
"""

from __future__ import annotations


class StoreError(Exception):
    """Base of every error a caller is meant to handle."""


class Refused(StoreError):
    """The request was definitely not carried out."""


class Retryable(Refused):
    """The same call may succeed later, or at another server."""


class NotLeader(Retryable):
    """This server does not lead the partition."""

    def __init__(self, partition: str, leader: str = "", address: str = "") -> None:
        super().__init__(partition, leader, address)
        self.partition, self.leader, self.address = partition, leader, address

    def __str__(self) -> str:
        return f"partition {self.partition} is led by {self.leader or 'nobody known'} {self.address}".rstrip()


class Moved(Retryable):
    """The key belongs to another partition."""

    def __init__(self, partition: str, ring_version: int) -> None:
        super().__init__(partition, ring_version)
        self.partition, self.ring_version = partition, ring_version

    def __str__(self) -> str:
        return f"the key belongs to partition {self.partition} at ring version {self.ring_version}"


class Overloaded(Retryable):
    """A bound is reached; says which."""


class RateExceeded(Retryable):
    """The clients of a namespace ask for more operations per second than it has. `ops_per_s`: what it has in the whole
    cluster; `share`: what of it is this server's now; `retry_after_ms`: the same call may succeed from then on."""

    def __init__(self, namespace: str, ops_per_s: int, share: int, retry_after_ms: int) -> None:
        super().__init__(namespace, ops_per_s, share, retry_after_ms)
        self.namespace, self.ops_per_s, self.share = namespace, ops_per_s, share
        self.retry_after_ms = retry_after_ms

    def __str__(self) -> str:
        return (
            f"namespace {self.namespace}: its {self.ops_per_s} operations/s are used up ({self.share} of them are this "
            f"server's now); try again in {self.retry_after_ms} ms"
        )


class NotEnoughBookies(Retryable):
    """Fewer bookies answer than an acknowledged write needs. Nothing was appended."""


class Unavailable(Retryable):
    """Nobody who may answer was reached in time. Nothing was sent."""


class PeerRefused(Unavailable):
    """The peer's machine answered that nobody listens there: its process is gone, or not up yet."""


class NotCaughtUp(Retryable):
    """The replica has not applied the sequence that the session token asks for."""


class NoSuchPin(Retryable):
    """The replica does not keep its state at the pinned position: the pin has ended, or the replica was not there, was
    restarted, or has taken its state from another one since. Another replica may keep it."""


class InvalidRequest(Refused):
    """The request can never succeed as it is; says what was expected and what came."""


class NotThere(InvalidRequest):
    """A change names a user, a role, a right, a token or a namespace that is not in its table."""


class ConditionFailed(Refused):
    """The version or absence that the request named was not met."""

    def __init__(self, version: int) -> None:
        super().__init__(version)
        self.version = version

    def __str__(self) -> str:
        return f"the key's version is {self.version}" if self.version else "the key is absent"


class QuotaExceeded(Refused):
    """The write would bring a namespace above its quota of keys or of bytes (`quota` says which): `used` of `limit` are
    used, and it needs `wanted` more. That lasts until keys are deleted or expire, or the quota is raised."""

    def __init__(self, namespace: str, quota: str, used: int, limit: int, wanted: int) -> None:
        super().__init__(namespace, quota, used, limit, wanted)
        self.namespace, self.quota, self.used, self.limit, self.wanted = namespace, quota, used, limit, wanted

    def __str__(self) -> str:
        return (
            f"namespace {self.namespace}: {self.used} of {self.limit} {self.quota} are used, the write needs "
            f"{self.wanted} more: refused until keys are deleted or expire, or the quota is raised"
        )


class NotAuthenticated(Refused):
    """The server asks who its callers are, and this one has not said so, or not rightly."""


class AccessUnfounded(NotAuthenticated):
    """Other machines reach this server, and its cluster asks nobody who he is: it serves nobody."""


class PermissionDenied(Refused):
    """The user has not the right; says which one, and what it was wanted for."""


class NotYetRaised(Refused):
    """The cluster is at a version at which not all servers could do this; says which one it takes, and what to do."""


class RequestExpired(Refused):
    """The request is older than what is remembered of its client, so it can be neither applied nor recognised."""


class PositionTrimmed(Refused):
    """Changes behind `asked` are not in the partition's log any more: it begins behind `oldest`, or, if that is −1, it
    is gone with the partition. `advice`: what to do."""

    def __init__(self, partition: str, asked: int, oldest: int, advice: str = "") -> None:
        super().__init__(partition, asked, oldest)
        self.partition, self.asked, self.oldest, self.advice = partition, asked, oldest, advice

    def __str__(self) -> str:
        left = (
            f"the oldest position that can be read from is {self.oldest}"
            if self.oldest >= 0
            else "its log is gone, since it left the ring"
        )
        advice = self.advice and f". {self.advice}"
        return f"partition {self.partition}: changes behind {self.asked} were trimmed; {left}{advice}"


class OutcomeUnknown(StoreError):
    """The request may or may not have been carried out. Retry it with the same request id, or read."""


class MetadataError(StoreError):
    """Base of what the metadata store answers."""


class NoSuchNode(MetadataError):
    """The path does not exist."""


class NodeExists(MetadataError):
    """The path exists already."""


class NotEmpty(MetadataError):
    """The node has children."""


class VersionConflict(MetadataError):
    """The node has another version than the call named: somebody else wrote first."""


class MetadataUnavailable(MetadataError):
    """The metadata store is not connected. The call was not sent."""


class OlderMetadata(MetadataUnavailable):
    """The metadata store holds an older copy of the metadata than this process or another one has seen. The call was
    not sent. Restore a later copy (docs/how-to/back-up-and-restore-metadata.md)."""


class MetadataUnknown(MetadataError):
    """The connection broke while the call was under way: it may or may not have taken effect."""


class MetadataDenied(MetadataError):
    """The metadata store does not take the login, or does not let its user do this. Nothing was done."""


class MetadataLost(MetadataError):
    """The metadata store was reached and is up to date, and has no more what this process needs: its cluster, or its
    log. It was removed, or another cluster was founded there."""


class LedgerError(StoreError):
    """Base of a ledger's errors. They never reach a client of the store."""


class NoSuchLedger(LedgerError):
    """No metadata is stored for the ledger."""


class LedgerDeleted(LedgerError):
    """A log's list has the ledger, and nothing is stored for it: what is trimmed leaves the list first, so somebody has
    deleted it. Who gave a state up for that might give up the last that has what stood there."""


class NoSuchEntry(LedgerError):
    """The ledger has no such entry, for sure."""


class LedgerFenced(LedgerError):
    """Another writer has taken the ledger over."""


class LedgerClosed(LedgerError):
    """The ledger takes no more entries."""


class NotRecoverable(LedgerError):
    """Too few bookies gave a definite answer to tell where the ledger ends. Try again when more are back."""


class BookieError(LedgerError):
    """One bookie did not do what it was asked: unreachable, slow, read-only, or unsure."""


class Corrupted(StoreError):
    """Bytes read back are not the bytes written. Says where."""


class UndecodableNode(MetadataError, Corrupted):
    """A node of the metadata store holds what this build cannot decode; names it. Whoever goes over many nodes reports
    it and passes it over (docs/protocol.md, P34)."""


class WrittenByNewer(Corrupted):
    """Bytes that are as they were written, by a newer release, and that this build cannot read: no damage."""


class ConfigError(StoreError):
    """A configuration or a data directory that must not be used; each of several faults is an argument."""

    @property
    def faults(self) -> tuple[str, ...]:
        return tuple(map(str, self.args))

    def __str__(self) -> str:
        return "; ".join(self.faults)


class ClusterTooNew(ConfigError):
    """The cluster is at a version that this build cannot do; says which, and what to install."""
