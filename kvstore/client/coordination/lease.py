"""The lease of a session: which keys it keeps alive, and until when its owner may count on them. Decides only.

Rules (docs/protocol.md, Q1 to Q3):

- Each key of a session has one time to live, the session's ttl and the grace, and every batch of the session gives it
  anew to all of them, if the session's own key is still there. So they go together, and none comes back.
- The owner counts the ttl on its own monotonic clock, from before it *sent* the last batch that was answered: the
  store counted from later on.
- The grace is more than what the dates of two leaders may differ by (P29, P30): a leader that takes over may find a key
  past its expiry sooner than the one that wrote it would have, but not before the owner has stopped counting on it.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import count
from typing import Any

from kvstore.client.coordination.steps import SessionEnded, Write
from kvstore.client.core.batch import Batch
from kvstore.client.core.operation import DELETE
from kvstore.errors import InvalidRequest

TTL_S = 10.0
TTL_S_MIN = 0.5
GRACE_S = 6.0
"""Twice what the date of a server that leads may be from those of a majority (P29): 3 s."""
KEYS_MAX = 256
"""Of a session, each of which every renewal names."""
CLOSE_S = 2.0
"""A session that is closed waits so long for what it is writing, and again for the answer to its end."""
DISCARDED_MAX = 1024
"""Beyond this many the oldest are left to their expiry."""


@dataclass(slots=True)
class Lease:
    """One session's, for keys below one `{tag}`."""

    tag: bytes
    id: bytes
    ttl_s: float = TTL_S
    grace_s: float = GRACE_S
    deadline: float = float("-inf")
    """Until when the owner counts on the keys, by its clock."""
    keys: dict[bytes, None] = field(default_factory=dict)
    _discarded: dict[bytes, None] = field(default_factory=dict)
    """Keys that may be there or still come, and shall not be."""
    _is_over: bool = False
    _numbers: count[int] = field(default_factory=lambda: count(1))

    def __post_init__(self) -> None:
        if not self.tag or b"{" in self.tag or b"}" in self.tag:
            raise InvalidRequest(f"want a tag of one byte or more without braces, got {self.tag!r}")
        if not self.ttl_s >= TTL_S_MIN or not self.grace_s >= 0:
            raise InvalidRequest(
                f"want a ttl of at least {TTL_S_MIN} s and a grace of 0 s or more, got {self.ttl_s} s, {self.grace_s} s"
            )

    @property
    def key(self) -> bytes:
        """The session's own."""
        return self.path(b"session", self.id)

    @property
    def renew_after_s(self) -> float:
        """A third of the ttl: two renewals may fail."""
        return self.ttl_s / 3

    def path(self, *parts: bytes) -> bytes:
        """A key, or with an empty last part a prefix, below the tag. Raises InvalidRequest for a name with a slash."""
        for part in parts:
            if b"/" in part:
                raise InvalidRequest(f"want a name without a slash, got {part!r}")
        return b"{" + self.tag + b"}/" + b"/".join(parts)

    def new_name(self) -> bytes:
        """A name that nobody has used or will use, here or elsewhere. None begins with another."""
        return b"%s-%012x" % (self.id, next(self._numbers))

    def is_alive(self, now: float) -> bool:
        return not self._is_over and now < self.deadline

    def holds(self, key: bytes, now: float) -> bool:
        """Whether the owner may count on `key`."""
        return key in self.keys and self.is_alive(now)

    # ── batches ──

    def opening(self, value: bytes) -> Batch:
        """Makes the session. Its id is new, so the key is absent."""
        return Batch().put(self.key, value, ttl_s=self.ttl_s + self.grace_s, if_absent=True)

    def opened(self, sent: float) -> None:
        """The batch was answered. `sent`: when the call began."""
        self.deadline = sent + self.ttl_s

    def batch(self, write: Write, now: float) -> Batch:
        """The batch for `write`. Raises SessionEnded if the owner does not count on the session any more, and
        InvalidRequest if it would have too many keys."""
        if not self.is_alive(now):
            raise SessionEnded(f"the session {self.key!r} is over")
        if len(self.keys | dict.fromkeys(write.puts)) > KEYS_MAX:
            raise InvalidRequest(f"want at most {KEYS_MAX} keys in a session, got one more")
        life_s = self.ttl_s + self.grace_s
        batch = Batch().check(self.key, present=True).expire(self.key, life_s)
        for key in list(self.keys):  # other threads may discard
            batch.expire(key, life_s)
        for key in list(self._discarded):
            batch.delete(key)
        batch.operations += write.more
        for key, value in write.puts.items():
            batch.put(key, value, ttl_s=life_s)
        for key in write.drops:
            batch.delete(key)
        return batch

    def wrote(self, write: Write, batch: Batch, results: list[Any], sent: float) -> list[Any]:
        """Take the answer to a batch whose call began at `sent`, and return what belongs to the write itself. Batches
        of one lease follow one another."""
        self.deadline = max(self.deadline, sent + self.ttl_s)
        own = len(results) - len(write.puts) - len(write.drops) - len(write.more)
        for operation, result in zip(batch.operations[2:own], results[2:own], strict=True):
            if operation.code == DELETE:
                self._discarded.pop(operation.key, None)
            elif not result:
                self.keys.pop(operation.key, None)  # somebody else has deleted it
        for key in write.drops:
            self.keys.pop(key, None)
        self.keys |= dict.fromkeys(write.puts)
        return results[own:]

    def discard(self, *keys: bytes) -> None:
        """Keep these no longer: they are deleted with the next batch. Keys of a write of unknown outcome too, which
        may come later than that: then they go with their time to live, since nothing renews them."""
        for key in keys:
            self.keys.pop(key, None)
            self._discarded[key] = None
        while len(self._discarded) > DISCARDED_MAX:
            del self._discarded[next(iter(self._discarded))]

    def forget(self, key: bytes) -> None:
        """Neither keep it alive nor delete it."""
        self.keys.pop(key, None)

    @property
    def has_discarded(self) -> bool:
        return bool(self._discarded)

    def closing(self) -> Batch:
        """Ends the session with all its keys, at once; if it has ended already, others may have keys of these names."""
        batch = Batch().check(self.key, present=True).delete(self.key)
        for key in (*self.keys, *self._discarded):
            batch.delete(key)
        return batch

    def end(self) -> None:
        """The session is over."""
        self._is_over = True
        self.keys.clear()
