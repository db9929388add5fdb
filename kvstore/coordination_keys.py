"""Names of the keys that hold sessions, locks, elections, groups, barriers and queues (docs/protocol.md Q1 to Q6).

Clients build such keys, and servers recognise them by their names. Decides only.
"""

from __future__ import annotations

import re

SESSION, LOCK, LEADER, MEMBER = b"session", b"lock", b"leader", b"member"
BARRIER, RENDEZVOUS, QUEUE = b"barrier", b"rendezvous", b"queue"
TURN = b"turn"
"""The kind of the release notes of locks and elections."""
KINDS = (SESSION, LOCK, LEADER, MEMBER, BARRIER, RENDEZVOUS, QUEUE, TURN)

_NAME = re.compile(rb"\{[^{}]+\}/(?:%b)/" % b"|".join(KINDS))


def is_coordination_key(key: bytes) -> bool:
    """Return True if the key has the name of a record of a session, lock, election, group, barrier or queue. The names
    that applications choose for keys of a session (`Session.put`) are not recognised."""
    return _NAME.match(key) is not None
