"""Folders as keys: unreadable files are named, and the rest is stored."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from kvstore.cli import trees
from kvstore.client import AsyncClient
from kvstore.client.aio import client
from kvstore.client.core.config import parse_url
from kvstore.env.library_env import library_env
from kvstore.errors import OutcomeUnknown
from kvstore.partition.state.commands import Code, Op, Put
from tests.client.model import ModelCluster
from tests.client.serving import HandClock, serving
from tests.waiting import PATIENCE_S


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for name in ("a", "gone", "locked/b", "z/c"):
        path = tmp_path / name
        path.parent.mkdir(exist_ok=True)
        path.write_text(name)
    return tmp_path


async def test_missing_files_and_unreadable_folders_are_named_the_rest_stored(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    walk, scan = trees.walk, os.scandir

    def listed(path: bytes) -> Iterator[tuple[bytes, bytes]]:
        yield from walk(path)
        (folder / "gone").unlink(missing_ok=True)

    def scandir(path: Any) -> Any:
        if os.fsencode(path).endswith(b"locked"):
            raise PermissionError(13, "Permission denied", path)
        return scan(path)

    monkeypatch.setattr(trees, "walk", listed)
    monkeypatch.setattr(trees.os, "scandir", scandir)
    async with serving(ModelCluster()) as servers, AsyncClient(servers.patient_url) as client:
        for work, rest in ((trees.load, (b"", 1 << 20)), (trees.verify, (b"",))):
            (folder / "gone").write_text("gone")
            found = await work(parse_url(servers.patient_url), folder, *rest)  # type: ignore[operator]
            problems = {each["path"]: each["what"] for each in found["problems"]}
            assert sorted(problems) == ["gone", "locked"]
            assert "FileNotFoundError" in problems["gone"]
            assert "is a folder that cannot be read" in problems["locked"]
            assert found["files"] == 2
        assert await client.get(b"z/c") is not None


async def test_file_whose_write_stays_unknown_is_not_written_again(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another client writes the key before the timeout."""
    cluster, clock = ModelCluster(), HandClock()
    monkeypatch.setattr(client, "library_env", lambda name: replace(library_env(name), clock=clock))

    def intercept(op: Op, answer: Any) -> bool:
        if op.key != b"a" or op.code != Code.PUT or lost:
            return False
        lost.append(op)
        for each in (op, Put(b"a", b"of another client")):
            cluster.partitions[cluster.ring.partition_of(b"a")].run(each)
        clock.at += PATIENCE_S
        asyncio.get_running_loop().call_soon(answer, OutcomeUnknown("lost"))
        return True

    for each in cluster.servers:
        each.intercept = intercept
    lost: list[Op] = []
    async with serving(cluster) as servers:
        found = await trees.load(parse_url(servers.patient_url), folder, b"", 1 << 20)
    assert [each["path"] for each in found["problems"]] == ["a"]
    assert cluster.partitions[cluster.ring.partition_of(b"a")].data[b"a"].value == b"of another client"


def test_folder_that_is_not_there_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        list(trees.walk(os.fsencode(tmp_path / "nothing")))
