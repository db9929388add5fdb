"""The judge of answers accepts what a correct store could have answered to any operation, and rejects everything
else."""

from __future__ import annotations

from typing import Any

import pytest

from kvstore.errors import (
    ConditionFailed,
    InvalidRequest,
    LedgerFenced,
    Moved,
    NotCaughtUp,
    OutcomeUnknown,
    Overloaded,
    RequestExpired,
    StoreError,
    Unavailable,
)
from kvstore.namespaces import Namespace
from kvstore.partition.config import PartitionConfig
from kvstore.partition.state import commands
from kvstore.partition.state.commands import Flag, Level, Op, Record, RequestId
from kvstore.types import PartitionId, ServerId
from tests.sim.judges.log_states import Wrong
from tests.sim.judges.operations import Operation, Status
from tests.sim.judges.refusals import Refusals
from tests.sim.judges.starts import Starts
from tests.sim.judges.test_witness import CLIENT, TWO_PUTS, K, L, Log, P, asked, judge, record
from tests.sim.judges.witness import Witness
from tests.sim.world.env import EPOCH_MS

OLD = record(b"1", 1, 1)
THREE = Log().add((K, b"1")).add((L, b"2")).add((b"m", b"3"))


def page(*keys: tuple[bytes, Record]) -> tuple[Any, ...]:
    return (keys, None)


ALL = ((K, record(b"1", 1, 1)), (L, record(b"2", 2, 2)), (b"m", record(b"3", 3, 3)))
REVERSE = Flag.REVERSE
RIGHT: list[tuple[Log, Op, Any]] = [
    (TWO_PUTS, commands.Put(K, b"2", flags=Flag.RETURN_OLD), (True, 2, OLD)),
    (TWO_PUTS, commands.Put(K, b"9", flags=Flag.RETURN_OLD | Flag.IF_ABSENT), (False, 1, OLD)),
    (TWO_PUTS, commands.Meta(K), (1, *OLD[1:])),
    (THREE, commands.Range(b"", b"", 2, Flag.BARE), ([K, L], b"m")),
    (THREE, commands.Range(b"", b"", 2, Flag.BARE | REVERSE), ([b"m", L], L)),
    (THREE, commands.Range(b"", b"", 9, Flag.COUNT_ONLY), (3, None)),
    (THREE, commands.Range(b"", b"", 9), page(*ALL)),
    (THREE, commands.Scan(L, b"", 1), ([ALL[1]], b"m")),
    (Log().add((K, b"1"), (L, b"2")).add((K, None), (L, None)), commands.DeleteRange(b"", b""), 2),
    (Log().add((K, b"1"), (L, b"2")), commands.Batch(K, (commands.Put(K, b"1"), commands.Put(L, b"2"))), [1, 2]),
]
WRONG: list[tuple[Log, Op, Any]] = [
    (TWO_PUTS, commands.Put(K, b"2", flags=Flag.RETURN_OLD), (True, 2, None)),
    (TWO_PUTS, commands.Put(K, b"9", flags=Flag.RETURN_OLD | Flag.IF_ABSENT), (False, 1, None)),
    (TWO_PUTS, commands.Meta(K), (2, *OLD[1:])),
    (THREE, commands.Range(b"", b"", 2, Flag.BARE), ([K, b"m"], None)),
    (THREE, commands.Range(b"", b"", 2, Flag.BARE | REVERSE), ([L, b"m"], L)),
    (THREE, commands.Range(b"", b"", 9, Flag.COUNT_ONLY), (4, None)),
    (THREE, commands.Range(b"", b"", 9), page(ALL[0], ALL[2])),
    (THREE, commands.Scan(L, b"", 1), ([ALL[1], ALL[2]], None)),
    (Log().add((K, b"1"), (L, b"2")).add((K, None)), commands.DeleteRange(b"", b""), 1),
    (Log().add((K, b"1"), (L, b"2")).add((K, None), (L, None)), commands.DeleteRange(b"", b""), 3),
    (Log().add((K, b"1")).add((L, b"2")), commands.Batch(K, (commands.Put(K, b"1"), commands.Put(L, b"2"))), [1, 2]),
]


@pytest.mark.parametrize(("log", "op", "result"), RIGHT)
def test_judge_accepts_right_answer(log: Log, op: Op, result: Any) -> None:
    judge(log, asked(op, 0, 1, result))


@pytest.mark.parametrize(("log", "op", "result"), WRONG)
def test_judge_rejects_wrong_answer(log: Log, op: Op, result: Any) -> None:
    with pytest.raises(Wrong):
        judge(log, asked(op, 0, 1, result))


# docs/protocol.md P27
def test_stale_read_is_wrong_below_floor_of_its_replica() -> None:
    stale = commands.Get(K, Level.STALE)
    judge(TWO_PUTS, asked(stale, 4, 5, OLD, floor=1))
    with pytest.raises(Wrong, match="no state"):
        judge(TWO_PUTS, asked(stale, 4, 5, OLD, floor=2))


def test_floor_is_what_other_replicas_had_published_at_start() -> None:
    now = [0.0]
    starts = Starts(lambda: now[0])
    for at, server, seq in ((1.0, "n1", 50), (1.0, "n2", 10), (2.0, "n2", 20), (9.0, "n2", 90)):
        now[0] = at
        said = b'{"seq":%d,"durable_seq":0,"epoch":1,"nonce":"x"}' % seq
        starts(f"/partitions/{P}/replicas/{server}", None, said)
    assert starts.floor(ServerId("n1"), P, 5.0) == 20
    now[0] = 10.0
    starts(f"/partitions/{P}/replicas/n2", b"", None)
    assert starts.floor(ServerId("n1"), P, 5.0) == 0, "it may have read when no position was published"
    assert starts.floor(ServerId("n1"), PartitionId("p9"), 5.0) == 0


def test_mutation_is_wrong_when_no_client_requested_it() -> None:
    witness = Witness(TWO_PUTS.states())
    witness.check([asked(commands.Put(K, b"1"), 0, 1, 1)])
    with pytest.raises(Wrong, match="no operation explains"):
        witness.check_nothing_else()
    witness = Witness(TWO_PUTS.states())
    lost = asked(commands.Put(K, b"2"), 2, 3, OutcomeUnknown("lost"), Status.INFO)
    witness.check([asked(commands.Put(K, b"1"), 0, 1, 1), lost])
    witness.check_nothing_else()


# ── refusals ──────────────────────────────────────────────────────────────────────────────────────────────────────────

REQUEST = RequestId(CLIENT, 1, 1, EPOCH_MS)
PUT, GET = commands.Put(K, b"1"), commands.Get(K)
SPACE = Namespace(name="k", prefix=b"k", keys_max=1)


def refused(op: Op, error: StoreError, at: float = 1.0, request: RequestId | None = None) -> Operation:
    return asked(op, 0, 1, error, Status.FAIL, errors=[(error, at)], request=request)


def judge_refusal(operation: Operation, config: PartitionConfig | None = None, *spaces: Namespace) -> None:
    Refusals(config or PartitionConfig(), spaces, is_older=False).check([operation])


@pytest.mark.parametrize(
    ("op", "error", "request_id"),
    [
        (PUT, Unavailable(""), None),
        (PUT, OutcomeUnknown(""), None),
        (PUT, Overloaded(""), REQUEST),
        (commands.Get(K, Level.STALE), NotCaughtUp(""), None),
        (commands.Increment(K, 1), InvalidRequest(""), None),
        (commands.Batch(K, ()), InvalidRequest(""), None),
        (commands.Delete(K, Flag.IF_VERSION, 1), ConditionFailed(0), None),
    ],
)
def test_refusal_is_accepted_when_it_has_a_cause(op: Op, error: StoreError, request_id: RequestId | None) -> None:
    judge_refusal(refused(op, error, request=request_id))


@pytest.mark.parametrize(
    ("op", "error"),
    [
        (PUT, InvalidRequest("")),
        (PUT, LedgerFenced("")),
        (PUT, ConditionFailed(1)),
        (PUT, Overloaded("")),
        (GET, OutcomeUnknown("")),
        (GET, NotCaughtUp("")),
        (GET, Moved("p1", 1)),
        (GET, RequestExpired("")),
    ],
)
def test_refusal_of_wrong_kind_is_noticed(op: Op, error: StoreError) -> None:
    with pytest.raises(Wrong):
        judge_refusal(refused(op, error))


def test_request_is_refused_as_too_old_only_after_its_window() -> None:
    config = PartitionConfig(retry_window_ms=60_000)
    judge_refusal(refused(PUT, RequestExpired(""), 61.0, REQUEST), config)
    with pytest.raises(Wrong, match="has no cause"):
        judge_refusal(refused(PUT, RequestExpired(""), 50.0, REQUEST), config)


def test_request_may_be_too_old_when_all_machines_reboot_with_wrong_clocks() -> None:
    early = refused(PUT, RequestExpired(""), 50.0, REQUEST)
    Refusals(PartitionConfig(), (), is_older=False, may_lose_dates=True).check([early])


def test_request_may_carry_a_time_ahead_when_all_clocks_were_wrong() -> None:
    ahead = refused(PUT, InvalidRequest(""), 50.0, REQUEST)
    Refusals(PartitionConfig(), (), is_older=False, may_lose_dates=True).check([ahead])
    with pytest.raises(Wrong, match="has no cause"):
        judge_refusal(ahead)
