"""The whole store on Apache's bookies, and on ensembles of Apache's and ours. Skipped without jars: README.md."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from kvstore.meta import paths
from kvstore.meta.zookeeper.store import ZooKeeperStore
from kvstore.types import BookieId, LedgerId, LedgerMetadata, LedgerState
from tests.cluster.harness import Cluster, running_cluster
from tests.cluster.outside import Outside
from tests.cluster.test_kill import counting, keys_of, wait_going_on
from tests.interop import java
from tests.interop.java import Programs
from tests.interop.their_bookie import launch

pytestmark = pytest.mark.interop
SETTINGS = ["autorecovery.lost_bookie_delay_s=2", "log.check_every_s=0.5"]
WHOLE_S = 150.0


class BookKeeper(Outside):
    """A cluster of BookKeeper, founded by Apache's own shell, with bookies of both kinds."""

    def __init__(self, directory: Path, *, ours: int, theirs: int) -> None:
        super().__init__(directory)
        self.programs = Programs(directory / "java", self.address, allowLoopback="true")
        self.shell("initnewcluster")
        for number in range(theirs):
            self.add_theirs(f"a{number + 1}")
        for number in range(ours):
            self.add_ours(f"b{number + 1}")

    def shell(self, *arguments: str) -> str:
        """Let Apache's shell do one thing."""
        output = asyncio.run(self.programs.shell(*arguments))
        assert output.code == 0, output.text[-4000:]
        return output.text

    def add_theirs(self, name: str) -> BookieId:
        home = self.directory / name
        home.mkdir()
        return self.add(launch(home, self.address))

    def open_of(self, partition: str) -> LedgerMetadata:
        """The ledger that the partition's leader writes to."""
        found = [each for each in self.ledgers().values() if dict(each.custom).get("kvstore-partition") == partition.encode()]
        return max((each for each in found if each.state is LedgerState.OPEN), key=lambda each: each.ledger)

    def naming(self, bookie: BookieId) -> list[LedgerId]:
        found = self.ledgers().values()
        return [each.ledger for each in found if any(bookie in fragment.ensemble for fragment in each.fragments)]


@contextmanager
def bookkeeper(directory: Path, *, ours: int, theirs: int) -> Iterator[BookKeeper]:
    java.compile_sessions()
    made = BookKeeper(directory / "bookkeeper", ours=ours, theirs=theirs)
    try:
        yield made
    finally:
        made.end()
