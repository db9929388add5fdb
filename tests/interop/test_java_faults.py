"""Apache's client, shell and auto-recovery while our bookies are killed and paused. Skipped without jars: README.md."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import suppress
from pathlib import Path

import pytest

from kvstore.errors import NoSuchNode
from kvstore.meta import paths
from kvstore.types import EntryId, LedgerId
from tests.interop import java
from tests.interop.apache import java_recovers, python_recovers
from tests.interop.processes import JavaWriter, OurBookie, Processes
from tests.waiting import wait_until

pytestmark = pytest.mark.interop
UNDERREPLICATION = f"{paths.LEDGERS}/underreplication"
AUTO_RECOVERY = "org.apache.bookkeeper.replication.AutoRecoveryMain"


@pytest.fixture
async def cluster(tmp_path: Path) -> AsyncIterator[Processes]:
    java.compile_sessions()
    async with Processes(tmp_path, 4) as cluster:
        yield cluster


async def reads(cluster: Processes, *ledgers: tuple[LedgerId, EntryId]) -> None:
    """Let Java recover the ledgers if necessary and read them at least up to the given entries."""
    arguments = [str(each) for pair in ledgers for each in pair]
    output = await cluster.programs.run("Reader", f"{cluster.zookeeper.address}/ledgers", *arguments)
    assert (output.code, len(output.lines("read "))) == (0, len(ledgers)), output.text[-3000:]


async def first_ensemble(cluster: Processes, ledger: LedgerId) -> list[OurBookie]:
    fragments = (await cluster.metadata(ledger)).fragments
    return [cluster.bookie(each) for each in fragments[0].ensemble]


async def test_java_writer_continues_while_bookies_are_killed_and_paused(cluster: Processes) -> None:
    writer = await JavaWriter.start(cluster, 3, 3, 2)
    await writer.writes(1000)
    killed, stopped, last = await first_ensemble(cluster, writer.ledger)
    await killed.kill()
    await writer.writes(1000)
    fragments = (await cluster.metadata(writer.ledger)).fragments
    assert len(fragments) == 2
    assert killed.id not in fragments[1].ensemble, "the fourth bookie has taken its place"
    was = killed.id
    await killed.start()
    assert killed.id == was
    await cluster.are_registered(*(each.id for each in cluster.bookies))
    stopped.pause()
    try:
        await writer.writes(1000)

        async def is_replaced() -> bool:
            return stopped.id not in (await cluster.metadata(writer.ledger)).fragments[-1].ensemble

        await wait_until(is_replaced, what="Java replaces a bookie that stands still")
        await cluster.are_registered(*(each.id for each in cluster.bookies if each is not stopped))
    finally:
        stopped.resume()
    await writer.writes(1000)
    await cluster.are_registered(*(each.id for each in cluster.bookies))
    await last.kill()
    await writer.writes(1000)
    end = await writer.stop()
    await last.start()
    await reads(cluster, (writer.ledger, end))


async def written(cluster: Processes, entries: int) -> tuple[LedgerId, EntryId]:
    """Return a closed ledger of Java's with at least this many entries, and its last entry."""
    writer = await JavaWriter.start(cluster, 3, 3, 2)
    await writer.writes(entries)
    return writer.ledger, await writer.stop()


def mark_of(ledger: LedgerId) -> str:
    """Return the path where Apache's auditor marks a ledger as under-replicated."""
    text = f"{ledger:016x}"
    groups = "/".join(text[i : i + 4] for i in range(0, 16, 4))
    return f"{UNDERREPLICATION}/ledgers/{groups}/urL{ledger:010d}"


async def no_ledger_names(cluster: Processes, bookie: OurBookie, *ledgers: LedgerId) -> bool:
    """Return True if the ledgers use other bookies and are not marked as under-replicated."""
    for ledger in ledgers:
        metadata = await cluster.metadata(ledger)
        if any(bookie.id in fragment.ensemble for fragment in metadata.fragments):
            return False
        with suppress(NoSuchNode):
            await cluster.store.get(mark_of(ledger))
            return False
    return True


async def test_apache_shell_and_auto_recovery_recreate_copies_on_our_bookies(cluster: Processes) -> None:
    first, second = await written(cluster, 500), await written(cluster, 500)
    ensembles = [await first_ensemble(cluster, ledger) for ledger, _ in (first, second)]
    lost = next(each for each in ensembles[0] if each in ensembles[1])
    there = [each for each in cluster.bookies if each is not lost]
    await lost.kill()
    await cluster.are_registered(*(each.id for each in there))
    shell = cluster.programs.shell
    said = await shell("recover", "-f", "-l", str(first[0]), lost.id)
    assert said.code == 0, said.text[-3000:]
    assert await no_ledger_names(cluster, lost, first[0])
    await reads(cluster, first)
    open_one = await JavaWriter.start(cluster, 3, 3, 2)
    await open_one.writes(500)
    assert lost.id not in [each.id for each in await first_ensemble(cluster, open_one.ledger)]
    daemon = cluster.programs.daemon(AUTO_RECOVERY, cluster.directory / "auto-recovery.log")
    try:

        async def is_repaired() -> bool:
            return await no_ledger_names(cluster, lost, first[0], second[0])

        async def is_audited() -> bool:
            with suppress(NoSuchNode):
                return bool(await cluster.store.children(f"{UNDERREPLICATION}/auditorelection"))
            return False

        assert not await is_repaired()
        await wait_until(is_audited, timeout_s=60, what="auto-recovery has an auditor")
        await wait_until(is_repaired, timeout_s=60, what="auto-recovery copies what the lost bookie had")
        said = await shell("decommissionbookie", "-bookieid", lost.id)
        assert said.code == 0, said.text[-3000:]
        with pytest.raises(NoSuchNode):
            await cluster.store.get(paths.cookie(lost.id))
        await open_one.writes(500)
        said = await shell("listunderreplicated")
        assert said.code == 0, said.text[-3000:]
        assert not said.lines(f"{second[0]}\n")
        end = await open_one.stop()
    finally:
        daemon.kill()
        daemon.wait()
    await reads(cluster, first, second, (open_one.ledger, end))


async def test_mixed_ensemble_serves_writers_and_recoveries_of_both_kinds(tmp_path: Path) -> None:
    java.compile_sessions()
    async with Processes(tmp_path, 2) as cluster:
        theirs = await cluster.add_their_bookie()
        await java_recovers(cluster, cluster.programs)  # of a writer of ours
        writer = await JavaWriter.start(cluster, 3, 3, 2)
        await writer.writes(500)
        await writer.kill()
        assert theirs in (await cluster.metadata(writer.ledger)).fragments[0].ensemble
        await python_recovers(cluster, writer.ledger)
        assert (await cluster.metadata(writer.ledger)).last_entry >= writer.confirmed
        await reads(cluster, (writer.ledger, writer.confirmed))
        going_on = await JavaWriter.start(cluster, 3, 3, 2)
        await going_on.writes(500)
        await python_recovers(cluster, going_on.ledger)  # while it is still written
        with pytest.raises(AssertionError, match="-101"):  # fenced
            await going_on.writes(1_000_000)
        assert (await cluster.metadata(going_on.ledger)).last_entry >= going_on.confirmed
        await reads(cluster, (going_on.ledger, going_on.confirmed))
