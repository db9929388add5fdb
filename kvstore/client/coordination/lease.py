"""The lease of a session: which keys it keeps alive, and until when its owner may rely on them. Decides only.

Rules (docs/protocol.md, Q1 to Q3):

- Every batch of the session has the condition that the session's own key exists. A renewal gives all keys of the
  session the same time to live again: `ttl_s` and the grace. A key written between renewals gets the expiry of the last
  one. So all keys end together, and none comes back.
- The owner measures `ttl_s` on its own monotonic clock, from before it *sent* the last renewal that was answered; the
  store measures from a later moment. The owner subtracts an eightieth, which is more than the store's clock may gain.
- The grace is longer than the clocks of two leaders may differ (P29, P30). A new leader may find a key expired sooner
  than the former one, but not before the owner has stopped relying on it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from itertools import count
from math import inf
from typing import Any

from kvstore.client.coordination.steps import SessionEnded, SessionFull, WriteStep
from kvstore.client.core import operations
from kvstore.client.core.batch import Batch
from kvstore.client.core.operation import DELETE
from kvstore.coordination_keys import SESSION
from kvstore.errors import InvalidRequest
from kvstore.limits import BATCH_BYTES_MAX
from kvstore.proto import kv_pb2

TTL_S = 10.0
TTL_S_MIN, TTL_S_MAX = 0.5, 86_400.0
GRACE_S = 6.0
"""Twice the maximum distance of a leader's clock from the clocks of a majority (P29), 3 s."""
GRACE_S_MAX = 3_600.0
CLOCK_RATE = 1 / 80
"""Share that the owner subtracts from its ttl. It covers 1 %, by which a leader's clock may move towards the wall
clocks of a majority (P28). It also covers 500 ppm, by which NTP may slow the owner's clock and speed up the
leader's."""
KEYS_MAX = 256
"""Maximum number of keys of a session. Every renewal names all of them."""
KEPT_BYTES_MAX = 768 << 10
"""Maximum bytes of keys and values of a session: each renewal logs all of them again, and one batch must name
all keys."""
CLOSE_S = 2.0
"""Maximum wait of a closing session for its current write, and again for the answer to its end, in seconds."""
CALL_S_MIN = 0.05
"""Minimum time of a call, in seconds, even if it begins just before the deadline."""
AGAIN_S = 0.2
"""Pause after a failed renewal, in seconds: the store may be between two leaders."""
DISCARDED_MAX = 1024
"""Maximum number of discarded keys; the oldest beyond it are left to their expiry."""
DROPPED_BYTES = 128 << 10
"""Maximum bytes of discarded keys that one batch deletes."""


@dataclass(slots=True)
class SessionLease:
    """The lease of one session, for keys below one `{tag}`."""

    tag: bytes
    id: bytes
    ttl_s: float = TTL_S
    grace_s: float = GRACE_S
    deadline: float = -inf
    """Time until which the owner relies on the keys, by its own clock."""
    keys: dict[bytes, int] = field(default_factory=dict)
    """Keys of the session, with the bytes of key and value."""
    _renewed_at: float = -inf
    """Time at which the last answered renewal was sent."""
    _expires_ms: int = 0
    """Expiry that this renewal set, by the store's clock."""
    _discarded: dict[bytes, None] = field(default_factory=dict)
    """Keys that may exist, or may still be written, and must not exist."""
    _was_opened: bool = False
    _is_over: bool = False
    _numbers: count[int] = field(default_factory=lambda: count(1))

    def __post_init__(self) -> None:
        self.tag = operations.as_bytes(self.tag)
        if not self.tag or b"{" in self.tag or b"}" in self.tag:
            raise InvalidRequest(f"expected a tag of at least one byte and without braces, got {self.tag!r}")
        if not TTL_S_MIN <= self.ttl_s <= TTL_S_MAX or not 0 <= self.grace_s <= GRACE_S_MAX:
            raise InvalidRequest(
                f"expected ttl_s to be {TTL_S_MIN:g} to {TTL_S_MAX:g} and grace_s 0 to {GRACE_S_MAX:g}, "
                f"got {self.ttl_s} and {self.grace_s}"
            )

    @property
    def key(self) -> bytes:
        """The session's own key."""
        return self.path(SESSION, self.id)

    @property
    def renew_after_s(self) -> float:
        """A third of the ttl, in seconds, so that two renewals may fail."""
        return self.ttl_s / 3

    def path(self, *parts: bytes) -> bytes:
        """Return a key below the tag, or a prefix if the last part is empty. Raises InvalidRequest for a name with a
        slash."""
        for part in parts:
            if b"/" in operations.as_bytes(part):
                raise InvalidRequest(f"expected a name without a slash, got {part!r}")
        return b"{" + self.tag + b"}/" + b"/".join(parts)

    def new_name(self) -> bytes:
        """Return a name that nobody has used or will use, on any machine. No name is a prefix of another."""
        return b"%s-%012x" % (self.id, next(self._numbers))

    def is_alive(self, now: float) -> bool:
        return not self._is_over and now < self.deadline

    def holds(self, key: bytes, now: float) -> bool:
        """Return True if the owner may rely on `key`."""
        return key in self.keys and self.is_alive(now)

    def ended(self) -> SessionEnded:
        """Return the error for callers of a session that is not alive."""
        is_over = self._is_over or self._was_opened
        return SessionEnded(
            f"the session {self.key!r} {'has ended' if is_over else 'was not opened; enter it, or call open()'}"
        )

    # ── times ──

    def is_due(self, now: float) -> bool:
        """Return True if a renewal is due."""
        return now >= self._renewed_at + self.renew_after_s

    def pause_s(self, now: float) -> float:
        """Return the time until the next renewal is due or the session ends, in seconds."""
        return max(0.0, min(self._renewed_at + self.renew_after_s, self.deadline) - now)

    def call_s(self, batch: Batch, now: float, until: float) -> float:
        """Return the maximum time of a batch whose caller has time until `until`. A batch that does not renew leaves
        time for a renewal after it."""
        last = self.deadline if _renews(batch, self.key) else self._renewed_at + self.ttl_s / 2
        return max(CALL_S_MIN, min(last, until) - now)

    # ── batches ──

    def opening(self, value: bytes) -> Batch:
        """Return the batch that creates the session. Its id is new, so the key is absent. Raises InvalidRequest if the
        session was opened before, and SessionEnded if it has ended: nobody may rely on its keys again."""
        if self._is_over:
            raise self.ended()
        if self._was_opened:
            raise InvalidRequest(f"the session {self.key!r} was opened before; make a new session")
        self._was_opened = True
        return Batch().put(self.key, value, ttl_s=self.ttl_s + self.grace_s, if_absent=True).get(self.key)

    def opened(self, results: list[Any], sent: float) -> None:
        """Record the answer to the opening batch. `sent`: when the call began."""
        self._renewed(sent, results[1].expires_ms)

    def not_opened(self) -> None:
        """Record that the opening batch was refused, so that it may be tried again."""
        self._was_opened = False

    def batch(self, write: WriteStep, now: float) -> Batch:
        """Return the batch for `write`. Raises SessionEnded if the owner does not rely on the session any more, and
        SessionFull if it would have too many keys or bytes."""
        if not self.is_alive(now):
            raise self.ended()
        self._check_capacity(write)
        batch = Batch().check(self.key, present=True)
        is_near = now >= self._renewed_at + self.renew_after_s / 2
        if write.renews or (is_near and _may_renew_beside(write, [*self.keys], self.key)):
            life_s = self.ttl_s + self.grace_s
            batch.expire(self.key, life_s).get(self.key)
            for key in list(self.keys):  # other threads may discard keys
                batch.expire(key, life_s)
        large = sum(len(each.key) + len(each.value) for each in write.more) > BATCH_BYTES_MAX // 8
        self._drop(batch, 0 if large else DROPPED_BYTES, write.puts)
        batch.operations += write.more
        for key, value in write.puts.items():
            self._put(batch, key, value)
        for key in write.drops:
            batch.delete(key)
        return batch

    def _put(self, batch: Batch, key: bytes, value: bytes) -> None:
        is_new = key not in self.keys
        if _renews(batch, self.key):
            batch.put(key, value, ttl_s=self.ttl_s + self.grace_s, if_absent=is_new)
        else:
            batch.operations.append(operations.put_until(key, value, self._expires_ms, if_absent=is_new))

    def _drop(self, batch: Batch, most: int, first: Mapping[bytes, bytes]) -> None:
        """Delete discarded keys, as many as fit into `most` bytes, and first those that are written again."""
        for key in sorted(self._discarded, key=lambda each: each not in first):
            most -= len(key)
            if most >= 0 or key in first:
                batch.delete(key)

    def _check_capacity(self, write: WriteStep) -> None:
        keys = self.keys | {key: len(key) + len(value) for key, value in write.puts.items()}
        if write.puts and len(keys) > KEYS_MAX:
            raise SessionFull(f"expected at most {KEYS_MAX} keys in a session, got {len(keys)}")
        size = sum(keys.values())
        if write.puts and size > KEPT_BYTES_MAX:
            raise SessionFull(f"expected at most {KEPT_BYTES_MAX} bytes of keys and values in a session, got {size}")

    def wrote(self, write: WriteStep, batch: Batch, results: list[Any], sent: float) -> list[Any]:
        """Record the answer to a batch whose call began at `sent`, and return the results of the write itself. Batches
        of one lease do not overlap."""
        first = 1
        if _renews(batch, self.key):
            self._renewed(sent, results[2].expires_ms)
            first = 3
        own = len(results) - len(write.puts) - len(write.drops) - len(write.more)
        for operation, result in zip(batch.operations[first:own], results[first:own], strict=True):
            if operation.code == DELETE:
                self._discarded.pop(operation.key, None)
            elif not result:
                self.keys.pop(operation.key, None)  # another client has deleted the key
        for key in write.drops:
            self.keys.pop(key, None)
        self.keys |= {key: len(key) + len(value) for key, value in write.puts.items()}
        return results[own:]

    # docs/protocol.md Q2, Q3
    def _renewed(self, sent: float, expires_ms: int) -> None:
        if sent >= self._renewed_at:
            self._renewed_at, self._expires_ms = sent, expires_ms
            self.deadline = sent + self.ttl_s * (1 - CLOCK_RATE)

    def discard(self, *keys: bytes) -> None:
        """Stop keeping keys; the next batch deletes them. A write of unknown outcome may create them later than that;
        then they expire, because nothing renews them."""
        for key in keys:
            self.keys.pop(key, None)
            self._discarded[key] = None
        if len(self._discarded) > DISCARDED_MAX:
            for key in list(self._discarded)[:-DISCARDED_MAX]:
                self._discarded.pop(key, None)  # the thread that renews may have deleted it just now

    def forget(self, key: bytes) -> None:
        """Neither keep a key alive nor delete it."""
        self.keys.pop(key, None)

    @property
    def has_discarded(self) -> bool:
        return bool(self._discarded)

    def closing(self) -> Batch:
        """Return the batch that ends the session with all its keys at once. If the session has ended already, other
        sessions may have keys with these names. Discarded keys that do not fit expire by themselves."""
        batch = Batch().check(self.key, present=True).delete(self.key)
        for key in list(self.keys):
            batch.delete(key)
        self._drop(batch, DROPPED_BYTES, {})
        return batch

    def end(self) -> None:
        """Mark the session as over."""
        self._is_over = True
        self.keys.clear()


def _renews(batch: Batch, session: bytes) -> bool:
    """Return True if the batch renews all keys of that session."""
    second = batch.operations[1] if len(batch) > 1 else None
    return second is not None and second.code == kv_pb2.EXPIRE and second.key == session


def _may_renew_beside(write: WriteStep, keys: list[bytes], session: bytes) -> bool:
    """Return True if one batch can hold both the write and a renewal. A large write must not fail because a renewal is
    due."""
    own = sum(len(each.key) + len(each.value) for each in write.more)
    own += sum(len(key) + len(value) for key, value in write.puts.items()) + sum(map(len, write.drops))
    return own + sum(map(len, keys)) + 3 * len(session) <= BATCH_BYTES_MAX
