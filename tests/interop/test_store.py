"""The whole store on Apache's bookies, and on ensembles of Apache's and ours. Skipped without jars: README.md."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import redis

from kvstore.types import BookieId, LedgerId, LedgerMetadata, LedgerState
from kvstore.wal.creator import owner_of
from tests.cluster.harness import running_cluster
from tests.cluster.outside import Outside
from tests.cluster.test_kill import counting, wait_going_on
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
        """Run one command of Apache's shell."""
        output = asyncio.run(self.programs.shell(*arguments))
        assert output.code == 0, output.text[-4000:]
        return output.text

    def add_theirs(self, name: str) -> BookieId:
        home = self.directory / name
        home.mkdir()
        return self.add(launch(home, self.address))

    def open_of(self, partition: str) -> LedgerMetadata:
        """Return the ledger that the partition's leader writes to."""
        found = [each for each in self.ledgers().values() if owner_of(each) == partition]
        return max((each for each in found if each.state is LedgerState.OPEN), key=lambda each: each.ledger)

    def state_of(self, ledger: LedgerId) -> LedgerState:
        return self.ledgers()[ledger].state

    def recover(self, ledger: LedgerId) -> None:
        """Let Apache's shell fence, recover and close a ledger, also one that is being written."""
        self.shell("readledger", "-l", str(ledger), "-fe", "0", "-le", "0", "-r")
        assert self.state_of(ledger) is LedgerState.CLOSED

    def naming(self, bookie: BookieId) -> list[LedgerId]:
        found = self.ledgers().values()
        return [each.ledger for each in found if any(bookie in fragment.ensemble for fragment in each.fragments)]


@contextmanager
def bookkeeper(directory: Path, *, ours: int, theirs: int) -> Iterator[BookKeeper]:
    made = BookKeeper(directory / "bookkeeper", ours=ours, theirs=theirs)
    try:
        yield made
    finally:
        made.end()


def test_store_runs_on_three_apache_bookies(tmp_path: Path) -> None:
    with bookkeeper(tmp_path, ours=0, theirs=3) as outside:
        before = outside.identity()
        outside.shell("simpletest", "-e", "3", "-w", "3", "-a", "2", "-n", "100")
        with running_cluster(tmp_path / "store", external_at=outside.address, settings=SETTINGS) as cluster:
            assert outside.writable() == set(outside.bookies)
            assert set(outside.open_of("p1").fragments[0].ensemble) == set(outside.bookies)
            with counting(cluster, "apache", *cluster.ids) as counters:
                victim = cluster.wait_led()["p1"]
                cluster.kill(victim)
                cluster.wait_led(by_other_than=victim)
                cluster.start_node(victim)
                cluster.wait_ready(victim)
                wait_going_on(cluster, counters)
                written = outside.open_of("p1").ledger
                outside.recover(written)  # its leader is alive and learns of the recovery by being fenced
                wait_going_on(cluster, counters)
                assert outside.open_of("p1").ledger > written
                for node in cluster.ids:
                    cluster.kill(node)
                left = outside.open_of("p2").ledger
                outside.recover(left)
                cluster.start()
                wait_going_on(cluster, counters)
            cluster.wait_succeeds("fsck")
        assert outside.identity() == before
        outside.shell("simpletest", "-e", "3", "-w", "3", "-a", "2", "-n", "100")


# docs/protocol.md G23
def test_store_runs_on_mixed_bookies_and_repairs_what_one_loses(tmp_path: Path) -> None:
    with bookkeeper(tmp_path, ours=1, theirs=2) as outside:
        *theirs, own = outside.bookies
        with running_cluster(tmp_path / "store", external_at=outside.address, settings=SETTINGS) as cluster:
            assert set(outside.open_of("p1").fragments[0].ensemble) == {*theirs, own}
            with counting(cluster, "mixed", *cluster.ids) as counters:
                victim = cluster.wait_led()["p1"]
                cluster.kill(victim)
                cluster.wait_led(by_other_than=victim)
                cluster.start_node(victim)
                wait_going_on(cluster, counters)
                outside.kill(own)
                wait_going_on(cluster, counters)
                outside.add_theirs("a3")
                cluster.wait_until(lambda: not outside.naming(own), "Apache's bookie has what ours had", WHOLE_S)
                outside.kill(theirs[0])
                wait_going_on(cluster, counters)
                outside.add_ours("b2")
                cluster.wait_until(lambda: not outside.naming(theirs[0]), "ours has what Apache's had", WHOLE_S)
                wait_going_on(cluster, counters)
            cluster.wait_succeeds("fsck")
            outside.shell("metaformat", "-nonInteractive", "-force")
            cluster.wait_until(lambda: not cluster.leaders(), "nobody leads without metadata", WHOLE_S)
            with pytest.raises(redis.RedisError) as refused:
                cluster.redis("n1").set("late", "lost")
            assert "UNKNOWN" not in str(refused.value), "it is refused before it is sent to any bookie"
