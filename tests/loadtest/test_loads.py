"""The operations of a load, and the correctness of its figures."""

import asyncio
import json
import math
import signal
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from itertools import count
from types import SimpleNamespace
from typing import Any

import pytest
from typer.testing import CliRunner

from kvstore.cli.main import build
from kvstore.client import AsyncClient
from kvstore.errors import InvalidRequest, NotAuthenticated, Overloaded
from kvstore.loadtest import loads
from kvstore.loadtest.loads import Call, Generator, LoadResult, LoadSpec, parse_mix
from tests.client.model import ModelCluster
from tests.client.serving import serving_in_a_thread
from tests.sim.world.env import SimWorld
from tests.waiting import wait_until, wait_until_blocking


class Calls:
    """Counts calls, and can make them slow or failing."""

    def __init__(self) -> None:
        self.seen: Counter[str] = Counter()
        self.keys: set[bytes] = set()
        self.under_way = self.most = 0
        self.stall_s = 0.0
        self.fails = False

    def named(self, name: str) -> Call:
        async def call(key: bytes) -> None:
            self.seen[name] += 1
            self.keys.add(key)
            self.under_way += 1
            self.most = max(self.most, self.under_way)
            stall, self.stall_s = self.stall_s, 0.0
            done = asyncio.get_running_loop().create_future()
            asyncio.get_running_loop().call_later(stall or 0.001, done.set_result, None)
            await done
            self.under_way -= 1
            if self.fails:
                raise Overloaded("full")

        return call

    def all(self) -> dict[str, Call]:
        return {name: self.named(name) for name in ("get", "put")}


@pytest.fixture
def calls() -> Calls:
    return Calls()


@pytest.fixture
def world(monkeypatch: pytest.MonkeyPatch) -> Iterator[SimWorld]:
    """The only delays are those of calls: on a stalled machine, a load of a tenth of a second did nothing."""
    with SimWorld(1) as made:
        monkeypatch.setattr(loads, "time", SimpleNamespace(perf_counter=made.loop.time))
        yield made


def test_closed_loop_keeps_so_many_under_way(world: SimWorld, calls: Calls) -> None:
    found = world.run(Generator(LoadSpec(seconds=0.2, warmup_s=0, in_flight=7), calls.all()).run())
    assert calls.most == 7
    assert found.operations == sum(calls.seen.values()) > 7
    assert found.rate == pytest.approx(found.operations / found.took_s)


def test_warm_up_is_not_counted(world: SimWorld, calls: Calls) -> None:
    found = world.run(Generator(LoadSpec(seconds=0.1, warmup_s=0.1, in_flight=2), calls.all()).run())
    assert 0 < found.operations < sum(calls.seen.values())


def test_failures_of_the_warm_up_are_not_counted_either(world: SimWorld, calls: Calls) -> None:
    async def begun() -> LoadResult:
        calls.fails = True
        asyncio.get_running_loop().call_later(0.1, setattr, calls, "fails", False)
        return await Generator(LoadSpec(seconds=0.1, warmup_s=0.3, in_flight=3), calls.all()).run()

    found = world.run(begun())
    assert found.operations > 0
    assert not found.errors


@pytest.mark.parametrize("wrong", [{"rate": math.nan}, {"seconds": math.nan}, {"warmup_s": math.inf}])
def test_run_that_would_never_end_is_refused(wrong: dict[str, float]) -> None:
    with pytest.raises(InvalidRequest, match="expected a finite number"):
        LoadSpec(**wrong)  # type: ignore[arg-type]


def test_open_loop_begins_so_many_per_second(world: SimWorld, calls: Calls) -> None:
    found = world.run(Generator(LoadSpec(seconds=0.5, warmup_s=0, rate=200, in_flight=20), calls.all()).run())
    assert found.operations == 100


def test_open_loop_counts_the_wait_for_a_caller_as_latency(world: SimWorld, calls: Calls) -> None:
    """One call stalls for 200 ms; with one caller, operations that were due meanwhile are late, and the figures
    include it."""
    calls.stall_s = 0.2
    load = LoadSpec(seconds=0.4, warmup_s=0, rate=100, in_flight=1, mix=(("get", 1),))
    found = world.run(Generator(load, calls.all()).run())
    (row,) = found.rows()
    assert row["count"] == 40
    assert row["p50_ms"] > 1
    assert row["p90_ms"] > 100, f"a stalled caller hid the wait: {row}"
    assert row["service_p99_ms"] >= row["service_p50_ms"] > 0
    assert row["service_p50_ms"] < row["p50_ms"], "waiting for one's turn is no service"


def test_mix_and_its_keys_are_drawn_by_the_seed(world: SimWorld, calls: Calls) -> None:
    load = LoadSpec(seconds=0.3, warmup_s=0, in_flight=8, keys=5, mix=(("get", 9), ("put", 1)), prefix=b"{t}")
    world.run(Generator(load, calls.all()).run())
    assert calls.seen["get"] > 3 * calls.seen["put"] > 0
    assert calls.keys == {b"{t}%012d" % number for number in range(5)}


def test_failures_are_counted_by_name_and_not_as_operations(world: SimWorld, calls: Calls) -> None:
    calls.fails = True
    found = world.run(Generator(LoadSpec(seconds=0.05, warmup_s=0, in_flight=2), calls.all()).run())
    assert found.operations == 0
    assert found.errors["Overloaded"] == sum(calls.seen.values())


async def test_cancelled_load_returns_its_result(calls: Calls) -> None:
    load = asyncio.create_task(Generator(LoadSpec(seconds=60, warmup_s=0, in_flight=2), calls.all()).run())

    async def is_begun() -> bool:
        return sum(calls.seen.values()) > 10

    await wait_until(is_begun, what="some operations")
    load.cancel()
    found = await load
    assert found.is_interrupted
    assert 8 < found.operations <= sum(calls.seen.values())
    assert 0 < found.took_s < 60


def test_stopped_open_loop_begins_no_more_and_ends_when_calls_have_ended(world: SimWorld, calls: Calls) -> None:
    generator = Generator(LoadSpec(seconds=1e9, warmup_s=0, rate=1, in_flight=50), calls.all())

    async def stopped() -> LoadResult:
        asyncio.get_running_loop().call_later(10.5, generator.stop)
        return await generator.run()

    found = world.run(stopped())
    assert not found.is_interrupted
    assert found.operations == sum(calls.seen.values()) == 11
    assert found.took_s < 10.5 + 2 * loads.STOP_S


def test_operations_are_recorded_in_the_outcome_of_when_they_begin(world: SimWorld, calls: Calls) -> None:
    generator = Generator(LoadSpec(seconds=2, warmup_s=0, rate=100, in_flight=10), calls.all())
    first, second = generator.outcome, LoadResult(LoadSpec())

    async def switched() -> LoadResult:
        asyncio.get_running_loop().call_later(0.995, setattr, generator, "outcome", second)
        return await generator.run()

    world.run(switched())
    assert (first.operations, second.operations) == (100, 100)


@pytest.mark.parametrize("in_flight", [1, 7])
def test_closed_loop_does_each_number_once_within_its_concurrency(world: SimWorld, in_flight: int) -> None:
    seen: list[int] = []
    under_way = most = 0

    async def one(number: int) -> None:
        nonlocal under_way, most
        under_way += 1
        most = max(most, under_way)
        await asyncio.sleep(0)
        seen.append(number)
        under_way -= 1

    world.run(loads.closed_loop(iter(range(100)), in_flight, one))
    assert (sorted(seen), most) == (list(range(100)), in_flight)


@pytest.mark.parametrize("text", ["", "get", "get=x", "get=0", "fly=3", "get=1,,put=1"])
def test_wrong_mix_is_refused(text: str) -> None:
    with pytest.raises(InvalidRequest):
        parse_mix(text)


def test_mix_names_operations_and_weights() -> None:
    assert parse_mix("get=95, put=5") == (("get", 95), ("put", 5))


def ticking() -> SimpleNamespace:
    """A clock that advances by a millisecond with each reading: the test measures a load by readings, not by time."""
    ticks = count()
    return SimpleNamespace(perf_counter=lambda: next(ticks) / 1000)


def test_load_of_which_nothing_was_done_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    async def refused(*_: Any, **__: Any) -> None:
        raise NotAuthenticated("who?")

    for name in ("get", "put"):
        monkeypatch.setattr(AsyncClient, name, refused)
    monkeypatch.setattr(loads, "time", ticking())
    with serving_in_a_thread(ModelCluster()) as servers:
        words = ["--seconds", "0.1", "--warmup", "0", "--in-flight", "2"]
        words += ["--server", servers.url.removeprefix("kv://")]
        answer = CliRunner().invoke(build(), ["bench", "run", *words])
    assert (answer.exit_code, "every operation failed" in answer.stderr) == (1, True), answer.output


def test_command_runs_a_load_and_prints_percentiles(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loads, "time", ticking())
    with serving_in_a_thread(ModelCluster()) as servers:
        arguments = ["--seconds", "0.2", "--warmup", "0", "--in-flight", "5", "--keys", "10", "--json"]
        arguments += ["--timeout", "60"]
        result = CliRunner().invoke(
            build(), ["bench", "run", "--server", servers.url.removeprefix("kv://"), *arguments]
        )
    document = json.loads(result.stdout)
    assert document["operations"] > 0
    assert document["interrupted"] is False
    assert document["errors"] == {}
    assert {row["operation"] for row in document["latencies"]} == {"get", "put"}
    assert all(row["p50_ms"] <= row["p99_ms"] <= row["max_ms"] for row in document["latencies"])


def test_interrupted_load_prints_its_figures_and_a_note() -> None:
    cluster = ModelCluster()
    with serving_in_a_thread(cluster) as servers:
        arguments = ["--seconds", "60", "--warmup", "0", "--in-flight", "2", "--json"]
        command = [sys.executable, "-m", "kvstore", "bench", "run", "--server", servers.url.removeprefix("kv://")]
        with subprocess.Popen([*command, *arguments], stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
            wait_until_blocking(lambda: sum(len(each.applied) for each in cluster.partitions.values()) > 9, what="puts")
            process.send_signal(signal.SIGINT)
            out, err = process.communicate(timeout=60)
    assert process.returncode == 130
    assert json.loads(out)["operations"] > 0
    assert json.loads(out)["interrupted"] is True
    assert b"kvstore: interrupted after" in err
