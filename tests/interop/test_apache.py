"""Apache BookKeeper's own programs against ours. For their jars see README.md."""

from __future__ import annotations

from pathlib import Path

import pytest

from kvstore.proto import bookkeeper_pb2 as pb
from tests.interop.apache import run_shell
from tests.interop.cluster import Cluster
from tests.interop.java import Programs
from tests.interop.their_bookie import ask, script, their_bookie
from tests.proto.golden import recorded

pytestmark = pytest.mark.interop


async def test_apache_shell_works_on_our_bookies_and_each_recovers_the_other(tmp_path: Path) -> None:
    async with Cluster(tmp_path) as cluster:
        await run_shell(cluster, Programs(tmp_path / "java", cluster.zookeeper.address))
        assert [bookie.statistics()["bad_requests"] for bookie in cluster.bookies] == [0, 0, 0]


async def test_apache_bookie_answers_match_the_recording(tmp_path: Path) -> None:
    expected = recorded("bookie.hex")
    async with their_bookie(tmp_path) as (_, address):
        told = await ask(address, script())
    for name, request, answer in told:
        assert pb.Request.FromString(request) == pb.Request.FromString(expected[name][0]), "record them anew"
        assert answer.hex() == expected[name][1].hex(), name
