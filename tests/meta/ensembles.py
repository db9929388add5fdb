"""Ensembles of ZooKeeper that are restored to a copy of their data."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from pathlib import Path

from kvstore.devcluster import zookeeper
from kvstore.devcluster.zookeeper import ZooKeeperProcess
from tests.waiting import PATIENCE_S


def restored(members: Sequence[ZooKeeperProcess], copies: Sequence[Path]) -> list[ZooKeeperProcess]:
    """Replace the data of each member by its copy, and start all members. They elect leaders until the epoch is later
    than before: ZooKeeper refuses the session of a client that has seen a later epoch than its own, and such a client
    cannot know what the copy contains."""
    known = _epoch(members)
    _kill(members)
    for place, copy in enumerate(copies):
        set_back(members, place, copy)
    started = _started(members)
    while _epoch(started) <= known:
        _kill(started)
        started = _started(started)
    return started


def set_back(members: Sequence[ZooKeeperProcess], place: int, copy: Path) -> None:
    """Replace the data of one member, which is stopped, by the copy."""
    data = members[place].directory / "data"
    shutil.rmtree(data)
    shutil.copytree(copy, data)
    (data / "myid").write_text(f"{place + 1}\n")


def _started(members: Sequence[ZooKeeperProcess]) -> list[ZooKeeperProcess]:
    started = [zookeeper.restart(each) for each in members]
    for each in started:
        each.wait_ready(PATIENCE_S)
    return started


def _kill(members: Sequence[ZooKeeperProcess]) -> None:
    for each in members:
        each.kill()


def _epoch(members: Sequence[ZooKeeperProcess]) -> int:
    return max(int((each.directory / "data" / "version-2" / "currentEpoch").read_text()) for each in members)
