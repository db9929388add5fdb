"""Folders as keys: unreadable files are named, and the rest is stored."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from kvstore.cli import trees
from kvstore.client import AsyncClient
from kvstore.client.core.config import parse_url
from tests.client.model import ModelCluster
from tests.client.serving import serving


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


def test_folder_that_is_not_there_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        list(trees.walk(os.fsencode(tmp_path / "nothing")))
