"""The conditions of transactions that must hold at the end of a run."""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import Iterator, Sequence

from kvstore.partition.state.changes import feed_entry_of
from kvstore.partition.state.internal import Attempt
from kvstore.wal.ports import LogEntry
from tests.sim.cluster import Cluster
from tests.sim.judges.cycles import check_cycles
from tests.sim.judges.log_states import Wrong
from tests.sim.judges.operations import Operation
from tests.sim.judges.transacted import Transacted
from tests.sim.judges.transaction_logs import TransactionLogs
from tests.sim.judges.transactions import check_reads, list_history

REST_S_MAX = 30.0
"""Maximum time in seconds from the last fault until no intent and no decision is left."""


# docs/protocol.md Tx6, Tx8
async def at_rest(cluster: Cluster) -> None:
    """Return when no replica has an intent or a decision, and no leader a key that is locked. Raises AssertionError
    after REST_S_MAX."""
    loop = asyncio.get_running_loop()
    deadline = loop.time() + REST_S_MAX
    while left := list(_left(cluster)):
        assert loop.time() < deadline, f"Tx8, Tx16 intents, decisions and locks without an end: {left}"
        await asyncio.sleep(0.1)


def _left(cluster: Cluster) -> Iterator[str]:
    for node in cluster.servers:
        for partition in cluster.partitions:
            if (replica := node.replica(partition)) is not None:
                state = replica.state
                leader = replica._replica.leader
                locks = () if leader is None else leader._evaluator.lock_table.locks  # claims and lines are among them
                yield from (f"{node.name} {partition} {each}" for each in (*state.intents, *state.decisions, *locks))


def judge_transactions(cluster: Cluster, operations: Sequence[Operation]) -> Transacted:
    """Judge transactions by logs and answers, and return what was found. `operations` must contain all transactions and
    all operations on their keys. Call it when everything has come to rest. Raises AssertionError."""
    check_reads(operations)
    check_cycles(list_history(operations))
    logs = TransactionLogs({each: cluster.logbook.entries_of(each) for each in sorted(cluster.logbook.entries)})
    logs.check()
    transacted = Transacted(logs, operations)
    transacted.check()
    transacted.check_order()
    check_feed(cluster, logs)
    return transacted


# docs/protocol.md F9
def check_feed(cluster: Cluster, logs: TransactionLogs) -> None:
    """Put the transactions together again from the change feeds of all partitions, as a reader would, and check that
    none is there by half. Raises Wrong."""
    keys: defaultdict[Attempt, int] = defaultdict(int)
    of_all: defaultdict[Attempt, set[int]] = defaultdict(set)
    changes: defaultdict[Attempt, set[tuple[bytes, int]]] = defaultdict(set)
    for _, noted in sorted(cluster.logbook.entries.items()):
        for position, each in sorted(noted.items()):
            feed = feed_entry_of(LogEntry(position, each.payload))
            for number, part in enumerate(feed.parts, 1):
                keys[part.attempt] += part.keys
                of_all[part.attempt].add(part.keys_of_all)
                rows = zip(feed.keys, feed.sequences, feed.part_of, strict=True)
                changes[part.attempt] |= {(key, seq) for key, seq, of in rows if of == number}
    for attempt, count in keys.items():
        if of_all[attempt] != {count}:
            raise Wrong(f"F9 the parts of {attempt} have {count} keys of {of_all[attempt]}")
    if strange := keys.keys() ^ logs.commits.keys():
        raise Wrong(f"F9 the feeds and the logs differ in the transactions {strange}")
    for place, attempt in logs.owner.items():
        if place not in changes[attempt]:
            raise Wrong(f"F9 the feeds do not show {place} as a change of {attempt}")
