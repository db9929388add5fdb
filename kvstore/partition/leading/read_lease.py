"""Decides when a leader may answer from its state. Decides only.

An acknowledged append proves that no other leader had acknowledged anything when the append was first sent.

- Strict: a read is answered after the acknowledgement of an append that was sent after the read arrived. Waiting reads
  share the append; it never proves a later read.
- Lease: the next leader waits, so no other leader acknowledges anything for `lease_s` seconds after the first send of
  an acknowledged append. Until then reads are answered at once. Only that time is remembered; each read checks it
  again.

Both end for good before a release record is sent: from then on the next leader need not wait (docs/protocol.md, Reads).
"""

from __future__ import annotations

import math

RENEW_SHARE = 0.5
"""A lease is renewed when less than this share of it is left."""


class ReadLease:
    """One leadership's right to answer reads. The leader reports each append that is sent or acknowledged, in order.
    All times are of the boot-time clock, in seconds."""

    def __init__(self, lease_s: float) -> None:
        self.sent = 0
        """Number of appends sent: the ticket of a read that arrives now."""
        self.acknowledged = 0
        self.lease_until = -math.inf
        self.fresh_until = -math.inf
        """Until this time a read need not renew the lease. Earlier than `lease_until` unless an append is in flight."""
        self._lease_s = lease_s
        self._closed = False

    def send(self) -> None:
        """Record that an append is sent."""
        self.sent += 1
        self.fresh_until = self.lease_until

    # docs/protocol.md P17
    def acknowledge(self, sent_at: float) -> None:
        """Record that the oldest unacknowledged append has been acknowledged. `sent_at` is when its first byte was
        first sent."""
        self.acknowledged += 1
        if not self._closed:
            until = sent_at + self._lease_s
            if until > self.lease_until:
                self.lease_until = until
            is_last = self.sent == self.acknowledged
            self.fresh_until = self.lease_until - self._lease_s * RENEW_SHARE if is_last else self.lease_until

    # docs/protocol.md P18
    def has_lease(self, now: float) -> bool:
        """Return True if the lease allows reading the state at `now`. Call it in the same step as the read."""
        return now < self.lease_until

    # docs/protocol.md P19
    def proves(self, ticket: int) -> bool:
        """Return True if an append has been acknowledged that was sent after the read with this ticket arrived."""
        return self.acknowledged > ticket and not self._closed

    # docs/protocol.md P20
    def wants_renewal(self, now: float) -> bool:
        """Return True if a read at `now` should send an empty append to keep the lease. Returns False while any append
        is in flight."""
        if self._lease_s == 0 or self._closed or self.sent != self.acknowledged:
            return False
        return now >= self.lease_until - self._lease_s * RENEW_SHARE

    @property
    def expects_no_lease(self) -> bool:
        """Return True if no append in flight can bring a lease."""
        return self._lease_s == 0 or self.sent == self.acknowledged

    # docs/protocol.md P21
    def close(self) -> None:
        """End the right to answer reads for good. Later acknowledgements have no effect."""
        self._closed = True
        self.lease_until = self.fresh_until = -math.inf

    @property
    def is_closed(self) -> bool:
        return self._closed
