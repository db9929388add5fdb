"""A process has evidence that its event loop turns and that its disks complete writes, or its sessions end."""

from __future__ import annotations

import asyncio
import os
import threading
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from kvstore.env.liveness import watchdog as watching
from kvstore.env.liveness.evidence import (
    FORGIVEN_S,
    HOLD_FIRST_S,
    HOLD_MAX_S,
    LOOP,
    SILENCE_S,
    TICK_MAX_S,
    TICK_S,
    Evidence,
    Sign,
)
from kvstore.env.liveness.probe import DiskProbe
from kvstore.env.liveness.threads import ThreadTimes
from kvstore.env.liveness.watchdog import Watchdog
from tests.beside import beside
from tests.waiting import wait_until, wait_until_blocking

ALIVE, SILENT = Sign(is_alive=True), Sign(is_alive=False)
DISKS = ("disk1", "disk2")


def evidence(*, spares: tuple[str, ...] = (), disks: tuple[str, ...] = ()) -> Evidence:
    found = Evidence()
    found.watch_loop()
    for path in (*disks, *spares):
        found.watch_disk(path, is_spare=path in spares)
    return found


def ticks(judge: Evidence, seconds: float, **signs: Sign) -> list[str]:
    hung: list[str] = []
    for _ in range(int(seconds / TICK_S)):
        hung += judge.tick(TICK_S, {LOOP if name == "loop" else name: sign for name, sign in signs.items()})
    return hung


def seconds_until_healthy(judge: Evidence) -> float:
    seconds = 0.0
    while judge.failure:
        ticks(judge, TICK_S)
        seconds += TICK_S
    return seconds


# docs/protocol.md P45
@pytest.mark.parametrize(("silent", "said"), [("loop", "the event loop has been blocked"), ("disk1", "disk of disk1")])
def test_evidence_fails_after_the_bound_and_names_the_silent_subject(silent: str, said: str) -> None:
    judge = evidence(disks=DISKS)
    ticks(judge, SILENCE_S, **{silent: SILENT})
    assert judge.failure == ""
    ticks(judge, TICK_S, **{silent: SILENT})
    assert said in judge.failure
    assert f"for more than {SILENCE_S:g} s" in judge.failure
    assert judge.failures == 1


# docs/protocol.md P45
def test_evidence_does_not_count_a_stop_of_the_whole_process() -> None:
    judge = evidence(disks=DISKS)
    ticks(judge, SILENCE_S - TICK_MAX_S, loop=SILENT, disk1=SILENT)
    judge.tick(3600.0, {LOOP: SILENT, "disk1": SILENT})
    assert judge.failure == ""
    judge.tick(3600.0, {LOOP: ALIVE, "disk1": ALIVE})
    assert judge.silence_s[LOOP] == 0.0


# docs/protocol.md P45
def test_evidence_does_not_count_time_without_a_processor() -> None:
    judge = evidence()
    ticks(judge, 10 * SILENCE_S, loop=Sign(is_alive=False, starved_s=TICK_S))
    assert judge.failure == ""
    ticks(judge, 2 * SILENCE_S, loop=Sign(is_alive=False, starved_s=TICK_S / 2))
    assert judge.failure == ""
    ticks(judge, TICK_S, loop=SILENT)
    assert judge.failure != ""


# docs/protocol.md P45
def test_evidence_must_be_fresh_for_longer_after_each_failure() -> None:
    judge = evidence()
    waited = []
    for _ in range(8):
        ticks(judge, SILENCE_S + TICK_S, loop=SILENT)
        waited.append(seconds_until_healthy(judge))
    assert waited == [min(HOLD_MAX_S, HOLD_FIRST_S * 2**number) for number in range(8)]
    ticks(judge, FORGIVEN_S)
    ticks(judge, SILENCE_S + TICK_S, loop=SILENT)
    assert seconds_until_healthy(judge) == HOLD_FIRST_S


def test_evidence_that_comes_and_goes_does_not_count_as_fresh() -> None:
    judge = evidence()
    ticks(judge, SILENCE_S + TICK_S, loop=SILENT)
    for _ in range(10):
        ticks(judge, TICK_S)
        ticks(judge, 2.0, loop=SILENT)
    assert judge.failure != ""
    assert judge.failures == 1


# docs/protocol.md B24
def test_one_hanging_directory_of_several_is_abandoned_without_a_failure() -> None:
    judge = evidence(disks=("",), spares=DISKS)
    assert ticks(judge, 3 * SILENCE_S, disk2=SILENT) == ["disk2"]
    assert judge.failure == ""
    assert "disk2" not in judge.silence_s


# docs/protocol.md B24
def test_directories_that_hang_together_fail_the_evidence() -> None:
    judge = evidence(disks=("",), spares=DISKS)
    assert ticks(judge, 3 * SILENCE_S, disk1=SILENT, disk2=SILENT) == []
    assert "disk1" in judge.failure
    assert "disk2" in judge.failure


# ── a real process ────────────────────────────────────────────────────────────────────────────────────────────────────


@asynccontextmanager
async def watched(base: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[tuple[Watchdog, list[str]]]:
    """A watchdog that is eight times as fast, and the reasons for which it would have ended the process."""
    ended: list[str] = []

    for name, seconds in (("TICK_S", 0.02), ("TICK_MAX_S", 0.04), ("SILENCE_S", 0.5), ("FRESH_S", 0.1)):
        monkeypatch.setattr(f"kvstore.env.liveness.evidence.{name}", seconds)
    monkeypatch.setattr(watching, "TICK_S", 0.02)
    monkeypatch.setattr(watching, "GONE_S", 0.1)
    dog = Watchdog(ended.append, str(base))
    try:
        yield dog, ended
    finally:
        dog.close()


def beat(dog: Watchdog) -> None:
    """Beat from now on, as the node does."""
    dog.beat()
    asyncio.get_running_loop().call_later(0.02, beat, dog)


# docs/protocol.md P45
async def test_watchdog_ends_sessions_while_the_loop_is_blocked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    reader, writer = os.pipe()
    failures: list[str] = []

    def give_up() -> bool:
        failures.append(dog.failure)
        if len(failures) == 1:
            os.write(writer, b"x")
        return True

    async with watched(tmp_path, monkeypatch) as (dog, ended):
        dog.add_session(give_up)
        dog.start()
        beat(dog)
        os.read(reader, 1)  # the loop is blocked here until the watchdog has acted
        assert "the event loop has been blocked" in failures[0]
        assert dog.statistics()["liveness_failures_total"] == 1

        async def is_healthy() -> bool:
            return not dog.failure

        await wait_until(is_healthy, what="the return of the evidence")
        assert ended == []
    for end in (reader, writer):
        os.close(end)


# docs/protocol.md P45
async def test_watchdog_ends_the_process_when_a_session_cannot_be_ended(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with watched(tmp_path, monkeypatch) as (dog, ended):
        dog.add_session(lambda: False)
        dog.start()

        async def has_ended() -> bool:
            return bool(ended)

        await wait_until(has_ended, what="the end of the process")
        assert "the metadata session cannot be ended" in ended[0]


# docs/protocol.md P45, B24
async def test_write_that_ends_while_its_directory_is_abandoned_raises_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The journal reports the write on the event loop, and the watchdog's thread abandons the directory meanwhile."""
    async with watched(tmp_path, monkeypatch) as (dog, _):
        reasons: list[str] = []
        dog.watch_disk("", reasons.append)

        class Devices(dict[str, int]):
            def get(self, path: str, default: int | None = None) -> int | None:  # type: ignore[override]
                device = super().get(path)
                dog._give_up_directory(path)
                return device

        dog._devices = Devices(dog._devices)
        dog.disk_works("")

        async def is_given_up() -> bool:
            return bool(reasons)

        await wait_until(is_given_up, what="the end of the directory")


# docs/protocol.md P45
async def test_watchdog_probes_a_disk_only_when_it_completes_no_other_writes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with watched(tmp_path, monkeypatch) as (dog, _):
        dog.watch_disk("")
        dog.watch_disk(str(tmp_path))
        (disk,) = vars(dog)["_disks"].values()  # both are on one device

        async def is_probed() -> bool:
            return disk.probe.completed > 2

        await wait_until(is_probed, what="probes of an idle disk")
        assert list(tmp_path.iterdir()) == []
        for _ in range(50):  # one tick after the other, as the watchdog does
            disk.sign(0.02)
            disk.works += 1
        assert disk.sign(0.02).is_alive
        assert dog.failure == ""


def test_probe_hangs_alone_while_its_disk_does(tmp_path: Path) -> None:
    """A named pipe that nobody reads replaces the disk: opening it for writing blocks."""
    os.mkfifo(tmp_path / "PROBE")
    probe = DiskProbe(str(tmp_path))
    probe.ask()
    probe.ask()
    assert probe.is_under_way
    assert probe.completed == 0
    reader = os.open(tmp_path / "PROBE", os.O_RDONLY)
    wait_until_blocking(lambda: not probe.is_under_way, what="the end of the write")
    assert probe.completed == 1  # a pipe cannot be synced: an error is an answer, too
    os.close(reader)
    probe.close()


def test_thread_that_waits_for_an_event_is_not_starved() -> None:
    times: list[ThreadTimes] = []

    def rest(over: threading.Event) -> None:
        times.append(ThreadTimes(threading.get_native_id()))
        over.wait()

    with beside(rest):
        wait_until_blocking(lambda: times, what="the thread")
        began = time.monotonic()
        wait_until_blocking(lambda: time.monotonic() - began > 0.3, what="a while")
        elapsed = time.monotonic() - began
        assert times[0].starved_s(elapsed) < 0.5 * elapsed
    wait_until_blocking(lambda: times[0].starved_s(elapsed) == 0.0, what="the end of its files")
