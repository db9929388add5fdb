"""The scopes in which the model of tests/models/txn.py is searched: transactions, partitions and bounds."""

from __future__ import annotations

from typing import Any, NamedTuple

from tests.models.txn import A, B, C
from tests.models.txn_log import ABSENT, FIRST, Part, Txn

RW, W, R, D = Part(True, True), Part(False, True), Part(True, False), Part(False, True, deletes=True)
TRANSFER = (Txn(0, (RW, RW)), Txn(1, (RW, RW)))
SKEW = (Txn(0, (W, R)), Txn(1, (R, W)))
"""Each transaction reads what the other one writes."""
BLIND = (Txn(0, (W, W)),)
ONE = (Txn(0, (RW, RW)),)
BOTH = (Txn(0, (W, W)), Txn(1, (W, W)))
CIRCLE = (Txn(0, (W, R, None)), Txn(1, (None, W, R)), Txn(2, (R, None, W)))
THREE = (Txn(0, (RW, RW, RW)), Txn(1, (RW, RW, RW)))
READER = (Txn(0, (W, R)),)
CHECKS = (Txn(0, (R, R)), Txn(1, (W, W)))
"""The first one only reads, and commits its reads as CHECKs."""
ABSENCE = (Txn(0, (W, W)), Txn(0, (D, W)))


class Scope(NamedTuple):
    """Transactions with bounds, and the number of their states. If the number differs, the model has changed, and with
    it what the search shows."""

    states: int
    txns: tuple[Txn, ...]
    bounds: dict[str, Any]


def scope(states: int, txns: tuple[Txn, ...], **bounds: Any) -> Scope:
    return Scope(states, txns, bounds)


SMALL = {
    "a leader leads again": scope(111, BLIND, tries=(1,), takeovers=2),
    "home is lost for good": scope(700, ONE, tries=(2,), takeovers=1, losses=1),
    "together, then apart": scope(1_314, ONE, tries=(2,), owners=(A, A), takeovers=1, writes=1, moves=((1, B),)),
    "a read transaction by checks": scope(1_303, CHECKS, tries=(1, 1), takeovers=1),
    "two attempts": scope(2_091, ONE, tries=(2,), takeovers=1, readonly=True, session=True),
    "PREPARED is sent later": scope(732, BLIND, tries=(1,), takeovers=1, readonly=True, withholds=True),
    "PREPARED is sent later, two attempts": scope(3_670, ONE, tries=(2,), takeovers=1, readonly=True, withholds=True),
    "PREPARED is sent later, participant moves": scope(
        1_098, BLIND, partitions=3, tries=(1,), takeovers=1, withholds=True, moves=((1, C), (1, B))
    ),
    "two pins": scope(4_620, BLIND, tries=(1,), pins=2),
    "absent keys": scope(2_865, ABSENCE, tries=(1, 1), values=(ABSENT, FIRST), readonly=True),
}
"""Scopes of a few seconds each."""

LARGE = {
    "late messages": scope(4_566, BLIND, tries=(2,), takeovers=1, writes=1, late=1),
    "late messages, shared": scope(11_271, READER, tries=(2,), takeovers=1, writes=1, late=1),
    "three partitions": scope(10_762, THREE, partitions=3, tries=(1, 1), takeovers=1),
    "one attempt each": scope(18_551, TRANSFER, tries=(1, 1), takeovers=1, readonly=True, session=True),
    "PREPARED is sent later, two transactions": scope(
        24_304, BOTH, tries=(1, 1), takeovers=1, readonly=True, withholds=True
    ),
    "transfers": scope(64_853, TRANSFER, tries=(2, 1), takeovers=1, readonly=True, session=True),
    "write skew": scope(13_909, SKEW, tries=(2, 1), takeovers=1),
    "write skew, plain writes, expiry": scope(29_453, SKEW, tries=(1, 1), takeovers=1, writes=1, expiries=1),
    "two pins, two attempts": scope(42_186, BLIND, tries=(2,), pins=2),
    "a pin of two transactions": scope(13_435, BOTH, tries=(1, 1), pins=1),
    "pins, takeover": scope(46_976, BLIND, tries=(2,), pins=1, takeovers=1),
    "home moves, and back": scope(14_610, BLIND, partitions=3, tries=(3,), takeovers=1, moves=((0, C), (0, A))),
    "participant moves": scope(41_917, BLIND, partitions=3, tries=(2,), takeovers=1, writes=1, late=1, moves=((1, C),)),
    "a pin while a participant moves": scope(23_956, BLIND, partitions=3, tries=(1,), pins=1, moves=((1, C),)),
    "a pin while home moves": scope(21_768, BLIND, partitions=3, tries=(1,), pins=1, moves=((0, C),)),
    "participant comes home": scope(8_000, BLIND, tries=(2,), takeovers=1, writes=1, moves=((1, A),)),
    "a pin while a participant moves on": scope(
        83_254, BLIND, partitions=3, tries=(1,), pins=1, moves=((1, C), (1, B))
    ),
    "both move": scope(28_746, TRANSFER, partitions=3, tries=(1, 1), takeovers=1, moves=((0, C), (1, C))),
    "one of home's keys moves": scope(
        35_516, (Txn(0, (W, W, W)),), partitions=2, owners=(A, A, B), tries=(2,), writes=1, moves=((1, B),)
    ),
}
"""Scopes of up to ten seconds each."""

LARGEST = {
    "two pins of two transactions": scope(0, BOTH, tries=(1, 1), pins=2),
    "a pin while home moves, two attempts": scope(0, BLIND, partitions=3, tries=(2,), pins=1, moves=((0, C),)),
    "pins, write skew": scope(0, SKEW, tries=(1, 1), pins=1, takeovers=1),
    "transfers, two attempts each, two takeovers": scope(0, TRANSFER, tries=(2, 2), takeovers=2),
    "write skew, two attempts each": scope(0, SKEW, tries=(2, 2), takeovers=1),
    "one of three moves": scope(0, THREE, partitions=3, tries=(1, 1), takeovers=1, moves=((1, C),)),
    "skew in a circle of three": scope(0, CIRCLE, partitions=3, tries=(1, 1, 1)),
    "transfers, a pin, a takeover": scope(0, TRANSFER, tries=(1, 1), pins=1, takeovers=1),
    "a pin of three partitions": scope(0, THREE, partitions=3, tries=(1, 1), pins=1),
    "home moves, and back, two transactions": scope(
        0, BOTH, partitions=3, tries=(2, 1), takeovers=1, moves=((0, C), (0, A))
    ),
    "skew, a key moves": scope(0, SKEW, partitions=3, tries=(1, 1), takeovers=1, writes=1, moves=((1, C),)),
}
"""Scopes of many minutes each, which `python -m tests.models.txn_search` searches and `make test` does not. Nothing
compares the number of their states."""

NEEDED_FOR = {
    "prepared_named": "two attempts",
    "attempt_joined": "late messages",
    "result_with_decide": "late messages",
    "dropped_with_lead": "a leader leads again",
    "shared": "write skew",
    "shared_logged": "write skew",
    "count_sent": "write skew, plain writes, expiry",
    "refusal_acked": "write skew, plain writes, expiry",
    "home_owns": "one of home's keys moves",
    "owner_says": "home moves, and back",
    "abandoned_when_lost": "home is lost for good",
    "outcome_named": "late messages",
    "raised": "participant moves",
    "sending_noted": "PREPARED is sent later",
    "assumed_sent": "PREPARED is sent later",
    "forgotten_at_release": "PREPARED is sent later, participant moves",
    "writes_wait": "late messages",
    "expiry_waits": "write skew, plain writes, expiry",
    "expired_reads_wait": "write skew, plain writes, expiry",
    "ro_absent": "absent keys",
    "mark_decide": "two pins",
    "mark_resolve": "two pins",
    "mark_end": "two pins",
    "mark_rises": "two pins",
    "view_resolves": "two pins",
    "changes_resolved": "two pins",
    "one_owner": "a pin while home moves",
    "none_planned": "a pin while a participant moves on",
    "targets_pinned": "a pin while a participant moves",
    "intents_move": "participant moves",
    "decisions_move": "home moves, and back",
    "results_move": "home moves, and back",
    "frozen": "participant moves",
    "die_at_release": "home moves, and back",
}
"""The scope in which a promise breaks without the rule; "one attempt each" if none is named."""

SLOW_TO_BREAK = {"none_planned", "raised", "targets_pinned"}
"""Rules without which more than 8,000 states are searched until a promise breaks."""
