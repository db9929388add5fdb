"""Two directories of a bookie that are the same place."""

from __future__ import annotations

from pathlib import Path

import pytest

from kvstore.bookie.config import BookieConfig
from kvstore.bookie.directories.gathering import Gathered, gather
from kvstore.env.real import real_env
from kvstore.errors import ConfigError
from tests.bookie.directories.process import KeptCookies
from tests.bookie.directories.support import CLUSTER, Naming

MIB = 1 << 20


async def gathered(root: Path, *directories: str) -> Gathered:
    config = BookieConfig(name="b1", segment_bytes=MIB, reserve_bytes=0, journal_dirs=directories)
    env = real_env(root)
    try:
        return await gather(env, config, KeptCookies(root / "cookie"), CLUSTER, Naming())  # type: ignore[arg-type]
    finally:
        await env.nursery.close()


@pytest.mark.parametrize("target", ["one", "two"], ids=["the first directory", "another new one"])
async def test_bookie_refuses_directories_that_are_the_same_place(tmp_path: Path, target: str) -> None:
    """Two journals in one directory would overwrite each other."""
    for name in ("one", "two", "three"):
        (tmp_path / name).mkdir()
    (tmp_path / "link").symlink_to(target)
    with pytest.raises(ConfigError, match=f"distinct directories, got link and {target}, which are the same"):
        await gathered(tmp_path, "one", "two", "link")
    found = await gathered(tmp_path, "one", "two", "three")
    assert [each.path for each in found.directories] == ["one", "two", "three"]
