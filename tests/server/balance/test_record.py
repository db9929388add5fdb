"""The record of the balancer's steps keeps the budget and the rests, and the settings are checked."""

from __future__ import annotations

import pytest

from kvstore.errors import ConfigError, InvalidRequest, UndecodableNode
from kvstore.meta import codec, paths
from kvstore.meta.memory import MemoryStore
from kvstore.ranges import WrongSettings
from kvstore.server.balance.record import KIND, BalanceRecord, Intent, Made, applied, record_store
from kvstore.server.balance.step import Goal, Step, way_back, way_of
from kvstore.server.balance_config import BalanceConfig

NOW = 1_700_000_000_000
CONFIG = BalanceConfig(moves_per_hour=3, settle_s=60)


def lead(partition: str = "p1", source: str = "n1", target: str = "n2") -> Step:
    return Step(goal=Goal.LEADS, partition=partition, source=source, target=target, reason="uneven")


def ranges(source: str = "p1", target: str = "p2", goal: Goal = Goal.LOAD) -> Step:
    return Step(goal=goal, partition=source, source=source, target=target, first=1, last=9, reason="hot")


def made(step: Step, at_ms: int) -> Made:
    return Made(step=step, at_ms=at_ms, by="n1")


def record_of(*ages_s: float) -> BalanceRecord:
    return BalanceRecord(steps=tuple(made(lead(f"p{i}"), NOW - int(age * 1000)) for i, age in enumerate(ages_s)))


# docs/protocol.md H13
def test_step_is_refused_without_budget_or_rest() -> None:
    def intent(at_ms: int) -> Intent:
        return Intent(made=made(lead(), at_ms), config=CONFIG)

    assert len(applied(record_of(3_500, 1_800), intent(NOW)).steps) == 3
    with pytest.raises(InvalidRequest, match="at most 3 steps within an hour"):
        applied(record_of(3_500, 1_800, 900), intent(NOW))
    assert len(applied(record_of(3_700, 1_800, 900), intent(NOW)).steps) == 4, "the oldest is more than an hour ago"
    with pytest.raises(InvalidRequest, match="needs 20 s more"):
        applied(record_of(40), intent(NOW))


def test_retry_of_recorded_step_is_accepted() -> None:
    intent = Intent(made=made(lead(), NOW), config=CONFIG)
    once = applied(BalanceRecord(), intent)
    assert applied(once, intent) is once


def test_step_with_wrong_date_in_future_does_not_stop_balancer() -> None:
    record = record_of(-7_200)
    assert record.budget_left(CONFIG, NOW) == 3
    assert record.rests_s(CONFIG, NOW) == 0


# docs/protocol.md H13
@pytest.mark.parametrize("ahead_s", [30, 90, 3_500])
def test_step_of_server_whose_clock_is_ahead_counts(ahead_s: int) -> None:
    """With a clock ahead by more than `settle_s`, two servers that both balance made steps without a rest."""
    record = record_of(-ahead_s)
    assert record.rests_s(CONFIG, NOW) == 60 + ahead_s
    assert record.budget_left(CONFIG, NOW) == 2
    assert record.rested(CONFIG, NOW) == {"p0"}
    assert way_of(lead("p0", "n2", "n1")) in record.ways_back(CONFIG, NOW)


def test_partitions_of_recent_steps_rest() -> None:
    record = BalanceRecord(steps=(made(lead("p1"), NOW - 700_000), made(ranges("p2", "p3"), NOW - 500_000)))
    assert record.rested(CONFIG, NOW) == {"p2", "p3"}


def reverses(step: Step, made: Step) -> bool:
    return way_of(step) == way_back(made)


def test_recent_step_is_not_reversed() -> None:
    assert reverses(lead("p1", "n2", "n1"), lead("p1", "n1", "n2"))
    assert not reverses(lead("p2", "n2", "n1"), lead("p1", "n1", "n2"))
    assert not reverses(lead("p1", "n2", "n3"), lead("p1", "n1", "n2"))
    assert reverses(ranges("p2", "p1", Goal.SHARES), ranges("p1", "p2", Goal.LOAD)), "whatever the goal"
    record = BalanceRecord(steps=(made(lead("p1", "n1", "n2"), NOW - 1_000_000),))
    assert record.ways_back(CONFIG, NOW) == {way_of(lead("p1", "n2", "n1"))}
    assert record.ways_back(CONFIG, NOW + 3_600_000) == frozenset()


async def test_record_survives_in_metadata_store() -> None:
    store = MemoryStore()
    await record_store(store).change(Intent(made=made(ranges(), NOW), config=CONFIG))
    assert await record_store(store).read() == BalanceRecord(steps=(made(ranges(), NOW),))
    with pytest.raises(UndecodableNode):
        KIND.decoded(b'{"format":1}')
    assert KIND.path == paths.BALANCE


def test_record_has_these_bytes() -> None:
    assert codec.encode(BalanceRecord(steps=(made(lead(), NOW),))) == (
        b'{"format":1,"steps":[{"step":{"goal":"leads","partition":"p1","source":"n1","target":"n2","first":0,'
        b'"last":0,"reason":"uneven"},"at_ms":1700000000000,"by":"n1"}]}'
    )


def test_commands_make_the_steps() -> None:
    assert lead().command == "kvstore partition move-lead p1 n2"
    assert ranges().command == "kvstore ring move p2 --first 1 --last 9"
    replica = Step(goal=Goal.REPLICAS, partition="p1", source="n1", target="n2", reason="")
    assert replica.command == "kvstore partition move-replica p1 n1 n2"


@pytest.mark.parametrize("window", ["1:00-2:00", "01:00", "24:00-01:00", "01:00-01:00", "01:60-02:00"])
def test_malformed_window_is_refused(window: str) -> None:
    with pytest.raises(WrongSettings, match="two different times"):
        BalanceConfig(window=window)
    assert issubclass(ConfigError, Exception)


@pytest.mark.parametrize("settings", [{"moves_per_hour": 0}, {"moves_per_hour": 241}, {"settle_s": 0.5}])
def test_settings_out_of_range_are_refused(settings: dict[str, float]) -> None:
    with pytest.raises(WrongSettings):
        BalanceConfig(**settings)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("window", "minute", "is_open"),
    [
        ("", 0, True),
        ("01:00-05:30", 59, False),
        ("01:00-05:30", 60, True),
        ("01:00-05:30", 329, True),
        ("01:00-05:30", 330, False),
        ("22:00-02:00", 1_320, True),
        ("22:00-02:00", 60, True),
        ("22:00-02:00", 120, False),
    ],
)
def test_window_is_in_utc_and_may_span_midnight(window: str, minute: int, *, is_open: bool) -> None:
    assert BalanceConfig(window=window).is_within_window(minute * 60_000) is is_open
