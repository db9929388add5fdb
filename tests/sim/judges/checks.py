"""The conditions that must hold at the end of a run, when all faults have ended and all partitions serve again."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Iterable
from typing import Any

from kvstore.errors import ConditionFailed
from kvstore.partition.state.commands import Code, Delete, Flag, Increment, Level, Put
from kvstore.types import PartitionId
from tests.sim.cluster import Cluster
from tests.sim.judges import history
from tests.sim.judges.history import History, Kind, Result, history_of
from tests.sim.judges.linearizable import check_search
from tests.sim.judges.log_states import LogStates, Wrong
from tests.sim.judges.operations import Operation, Status
from tests.sim.judges.refusals import Refusals
from tests.sim.judges.scrub import scrub
from tests.sim.judges.transacted import Transacted
from tests.sim.judges.witness import Witness
from tests.sim.nodes import Node
from tests.sim.transacting.judging import at_rest, judge_transactions
from tests.sim.versions import check_versions
from tests.sim.workloads import ACCOUNTS, DEPOSIT

ENDED_S_MAX = 10.0
SETTLE_S_MAX = 60.0
"""Maximum time in seconds from the last write until all replicas have applied the whole log."""
SEARCH_STEPS_MAX = 300_000
_RESULTS = {Status.OK: Result.OK, Status.FAIL: Result.FAIL, Status.INFO: Result.INFO}


async def judge(cluster: Cluster, *, search: bool) -> None:
    """Raise AssertionError unless every promise was kept. With `search`, also use a checker that does not trust
    versions."""
    await settled(cluster)
    operations, knobs = cluster.recorder.operations, cluster.knobs
    transacted = None
    if knobs.load.transactors:
        await at_rest(cluster)
        await settled(cluster)
        transacted = judge_transactions(cluster, operations)
    Refusals(knobs.partition, knobs.spaces, is_older=knobs.older > 0, may_lose_dates=knobs.may_lose_dates).check(
        operations
    )
    for partition in cluster.partitions:
        states = LogStates(partition, cluster.logbook.log(partition))
        mine = [each for each in operations if concerns(cluster, each, partition, transacted)]
        prefixes = tuple(each.prefix for each in knobs.spaces if each.ttl_ms)
        parts = transacted.parts(partition) if transacted is not None else ()
        witness = Witness(states, prefixes, range_keys=knobs.range_keys, parts=parts, hash=knobs.hash)
        witness.check(mine)
        witness.check_nothing_else()
        check_banks(states)
        check_replicas(cluster, states)
        check_registers(states, mine, search=search)
    scrub(cluster)
    await ended(cluster)
    check_bounds(cluster)
    cluster.check()


def concerns(cluster: Cluster, operation: Operation, partition: PartitionId, transacted: Transacted | None) -> bool:
    """Return True if the operation is judged by this partition's log. Transactions on keys of several partitions are
    judged by their parts; one of unknown outcome may have done anything in each of them if no log shows it."""
    owners = {cluster.ring.partition_of(each.key) for each in operation.op.ops}
    if len(owners) < 2:
        return operation.partition == partition
    is_known = transacted is not None and operation.number in transacted.found
    return operation.status is Status.INFO and not is_known and partition in owners


# docs/protocol.md P10
async def ended(cluster: Cluster) -> None:
    """Return when no operation is in flight between servers, or after ENDED_S_MAX: an operation that its client has
    abandoned ends later."""
    loop = asyncio.get_running_loop()
    deadline = loop.time() + ENDED_S_MAX
    while any(in_flight(node) for node in cluster.servers):
        if loop.time() >= deadline:
            return  # check_bounds reports what is in flight
        await asyncio.sleep(0.1)


def in_flight(node: Node) -> dict[str, int]:
    """Return the nonzero counts of waiting or in-flight operations on a server and in the logs that it leads."""
    assert node.served is not None
    numbers: dict[str, Any] = {**node.served.statistics()["server"]}
    found = {name: numbers[name] for name in ("waiting_for_leader", "peer_operations_in_flight")}
    for partition, replica in sorted(node.served.hosting._hosted.items()) if node.is_serving else ():
        leading = replica.statistics()["leading"]
        if leading is not None:
            found |= {f"{partition} {name}": leading[name] for name in ("queued", "reads_waiting")}
    return {name: count for name, count in found.items() if count}


async def settled(cluster: Cluster) -> None:
    """Return when all replicas of each partition have applied their whole log."""
    loop = asyncio.get_running_loop()
    deadline = loop.time() + SETTLE_S_MAX
    while behind := [line for partition in cluster.partitions for line in lagging(cluster, partition)]:
        assert loop.time() < deadline, f"P8 replicas do not catch up within {SETTLE_S_MAX} s: {behind}"
        await asyncio.sleep(0.1)


def lagging(cluster: Cluster, partition: PartitionId) -> list[str]:
    """Return the replicas that have not applied the whole log, with reasons. A replica that is just opening the log
    may still have to read a confirmed entry that no replica has read."""
    found: list[str] = []
    positions = []
    for node in cluster.nodes:
        replica = node.replica(partition)
        if node.id not in cluster.ring.partitions[partition].replicas:
            continue
        if replica is None or replica.state.position is None:
            found.append(f"{partition} is not on {node.name}")
        else:
            assert replica._replica.following.failure is None, (
                f"P5 {node.name} {partition}: {replica._replica.following.failure}"
            )
            positions.append((replica.state.position, node.name))
    end = max(cluster.logbook.entries.get(partition, {}), default=None)
    if any(position != end for position, _ in positions):
        found.append(f"{partition} stands at {positions}, and its log ends at {end}")
    return found


# ── state ─────────────────────────────────────────────────────────────────────────────────────────────────────────────


def check_replicas(cluster: Cluster, states: LogStates) -> None:
    """Check P1 and P5: each replica's state is the fold of the log, and all states are equal."""
    prints: dict[int, list[str]] = {}
    for node in cluster.nodes:
        replica = node.replica(states.partition)
        if replica is None:
            continue
        state = replica.state
        if state.seq != states.end:
            raise Wrong(f"P1 {node.name} {states.partition} is at {state.seq}, its log ends at {states.end}")
        for key in states.all_keys():
            expected = states.record(key, states.end)
            found = state.get(key)
            gone = 0 < expected.expires_ms <= state.record_time_ms
            if found != (expected if expected.version and not gone else None):
                raise Wrong(f"P1 {node.name} {states.partition} has {found} for {key!r}, its log {expected}")
        if state.key_count != states.count(states.end):
            raise Wrong(f"P1 {node.name} counts {state.key_count} keys, its log {states.count(states.end)}")
        state.retries.check()
        prints.setdefault(state.fingerprint(), []).append(node.name)
    if len(prints) > 1:
        raise Wrong(f"P5 {states.partition} differs: {prints}")


def check_banks(states: LogStates) -> None:
    """Check that a bank holds its initial total at every entry of the log."""
    for bank in (b"{bank%d}" % number for number in range(2)):
        keys = [key for key in states.all_keys() if key.startswith(bank)]
        for seq in states.entry_ends:
            held = [record for key in keys if (record := states.record(key, seq)).version]
            total = sum(int(record.value) for record in held)
            if held and (len(held), total) != (ACCOUNTS, ACCOUNTS * DEPOSIT):
                raise Wrong(f"{states.partition}: at {seq} {bank!r} has {len(held)} accounts with {total}")


def check_bounds(cluster: Cluster) -> None:
    """Check that data kept for others is within its bounds and that all in-flight operations have ended."""
    for node in cluster.servers:
        waiting = in_flight(node)
        assert not waiting, f"{node.name} still holds {waiting}"
        _check_replica_bounds(cluster, node)


def _check_replica_bounds(cluster: Cluster, node: Node) -> None:
    config = cluster.knobs.partition
    for partition in cluster.partitions:
        replica = node.replica(partition)
        if replica is None:
            continue
        # A known client may still add its own results, up to twice the bound.
        assert replica.state.retries.bytes <= 2 * config.retry_bytes_max + (64 << 10), f"{node.name} {partition}"


# ── registers and counters, judged by two checkers that know nothing of logs ──────────────────────────────────────────


def check_registers(states: LogStates, operations: Iterable[Operation], *, search: bool) -> None:
    """Check operations on plain registers and counters with the other checkers, too."""
    found = as_history(states, operations)
    check_versions(found)
    if search:
        check_search(found, steps_max=SEARCH_STEPS_MAX)


def as_history(states: LogStates, operations: Iterable[Operation]) -> History:
    """Return the operations on registers and counters. Operations of unknown outcome are included only if the log
    has them."""
    kept = [each for each in operations if each.key[:1] in b"rc" and each.key[1:].isdigit()]
    translated = [_translate(states, each) for each in kept if each.level not in (Level.SESSION, Level.STALE)]
    return history_of(each for each in translated if each is not None)


def _translate(states: LogStates, operation: Operation) -> history.Operation | None:
    known = operation.status is Status.OK
    if operation.status is Status.FAIL or (not known and (not operation.is_write or not _is_in_log(states, operation))):
        return None
    failed = known and isinstance(operation.result, ConditionFailed)  # says nothing about the first attempt of a retry
    fields: dict[str, Any] = {"process": operation.client, "key": operation.key, "began": operation.began}
    fields |= {"ended": operation.ended, "result": Result.FAIL if failed else _RESULTS[operation.status]}
    fields |= {"condition_failed": failed, "node": ",".join(operation.attempts)}
    if failed:
        fields["version"] = operation.result.version or None
    match operation.code:
        case Code.GET:
            value, version = operation.result[:2] if operation.result else (None, None)
            return history.Operation(kind=Kind.GET, value=_value(operation.key, value), version=version, **fields)
        case Code.INCREMENT:
            assert isinstance(operation.op, Increment)
            value, version = operation.result if known else (None, None)
            return history.Operation(kind=Kind.INCR, delta=operation.op.delta, value=value, version=version, **fields)
        case Code.PUT | Code.DELETE:
            return _translate_put(states, operation, fields, known and not failed)
    raise AssertionError(f"expected an operation of a register, got {operation}")


def _translate_put(states: LogStates, operation: Operation, fields: dict[str, Any], done: bool) -> history.Operation:
    op = operation.op
    assert isinstance(op, (Put, Delete))
    is_put, flags, asked = isinstance(op, Put), op.flags, op.version
    fields["value"] = op.value if isinstance(op, Put) else None
    if done:
        fields["version"] = operation.result or None
    if flags & (Flag.IF_VERSION | Flag.IF_ABSENT):
        before = states.record(operation.key, asked) if flags & Flag.IF_VERSION else None
        return history.Operation(kind=Kind.CAS, expected=before.value if before else None, **fields)
    return history.Operation(kind=Kind.PUT if is_put else Kind.DEL, **fields)


def _is_in_log(states: LogStates, operation: Operation) -> bool:
    if operation.request is not None:
        return (operation.request.client, operation.request.sequence) in states.requests
    return isinstance(operation.op, Put) and (operation.key, operation.op.value) in states.written


def _value(key: bytes, value: bytes | None) -> history.Value:
    return int(value) if value is not None and key.startswith(b"c") else value


def count_statuses(cluster: Cluster) -> Counter[Status]:
    """Return the number of operations by status."""
    return Counter(operation.status for operation in cluster.recorder.operations)
