"""Callers and servers have their own processors, and no processor sleeps."""

from __future__ import annotations

import os
import sys

import psutil
import pytest

from loadtest.bench import processors
from tests.waiting import wait_until_blocking

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="needs Linux")


def test_callers_and_servers_share_no_processor_if_there_are_two() -> None:
    usable = os.sched_getaffinity(0)
    askers, answerers = processors.of_askers(), processors.of_answerers()
    assert len(askers) == 1
    assert askers | answerers == usable
    assert askers.isdisjoint(answerers) == (len(usable) > 1)


def test_started_process_stays_on_its_processors() -> None:
    before = os.sched_getaffinity(0)
    with processors.on(processors.of_askers()):
        assert os.sched_getaffinity(0) == processors.of_askers()
    assert os.sched_getaffinity(0) == before


def test_processors_are_kept_awake_by_the_lowest_priority() -> None:
    def keeps_awake(process: psutil.Process) -> bool:
        try:
            return "loadtest.bench.processors" in process.cmdline()
        except psutil.NoSuchProcess:  # a finished process of another test
            return False

    def awake() -> list[psutil.Process]:
        return list(filter(keeps_awake, psutil.Process().children()))

    with processors.awake():
        count = len(os.sched_getaffinity(0))
        wait_until_blocking(lambda: [os.sched_getscheduler(each.pid) for each in awake()] == [os.SCHED_IDLE] * count)
    assert awake() == []
