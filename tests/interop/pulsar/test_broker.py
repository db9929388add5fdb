"""Apache Pulsar's broker on our bookies, set up as docs/how-to/run-apache-pulsar.md says: messages while bookies and
the broker die, and the disk after a trim. Skipped without jars."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from kvstore.devcluster.zookeeper import free_ports
from kvstore.types import LedgerId, LedgerMetadata
from tests.interop import java
from tests.interop.processes import OurBookie, Processes
from tests.interop.pulsar.broker import Broker, Session, disk_bytes
from tests.waiting import wait_until

pytestmark = pytest.mark.interop
TOPIC = "persistent://public/default/numbers"
BOOKIES, SIZE = 5, "1024"
SEGMENT = 1 << 20
ENTRIES_OF_A_LEDGER = 2_000
SMALL = {
    "brokerDeduplicationEnabled": "true",  # without it, a message that was sent again may be there twice
    "brokerDeduplicationEntriesInterval": "100",
    "brokerDeduplicationSnapshotFrequencyInSeconds": "1",
    "brokerDeduplicationSnapshotIntervalSeconds": "1",
    "managedLedgerCacheSizeMB": "0",
    "managedLedgerMaxEntriesPerLedger": str(ENTRIES_OF_A_LEDGER),
    "managedLedgerMinLedgerRolloverTimeMinutes": "0",
    "retentionCheckIntervalInSeconds": "2",
}
"""Small ledgers, of which consumed ones are deleted soon, and reads that reach the bookies."""


async def with_messages(cluster: Processes) -> dict[LedgerId, LedgerMetadata]:
    """Return the ledgers of the topic that have many entries."""
    found = {each: await cluster.metadata(each) for each in await cluster.ledgers.list_ids()}
    return {each: metadata for each, metadata in found.items() if metadata.last_entry >= ENTRIES_OF_A_LEDGER // 2}


async def written(cluster: Processes) -> list[OurBookie]:
    """Return the bookies of the newest ledger, without the one that is alone in its rack."""
    newest = max(await cluster.ledgers.list_ids())
    ensemble = (await cluster.metadata(newest)).fragments[-1].ensemble
    return [cluster.bookie(each) for each in ensemble if each != cluster.bookies[-1].id]


async def test_pulsar_keeps_messages_when_bookies_and_broker_die_and_frees_disks(tmp_path: Path) -> None:
    java.compile_pulsar()
    async with Processes(tmp_path, 0, f"segment_bytes={SEGMENT}", "reclaim_interval_s=1") as cluster:
        for number, port in enumerate(free_ports(BOOKIES), 1):
            zone = f"zone=rack-{number // BOOKIES}"
            await cluster.add_bookie(f"b{number}", port, zone, host=f"127.0.0.{number}")
        alone = cluster.bookies[-1]
        broker = Broker(cluster, SMALL)
        await asyncio.to_thread(broker.set_up)
        await broker.start()
        producer = await Session.start(broker, "produce", "URL", TOPIC, SIZE)
        await producer.reports("acknowledged", 5_000)
        first, second = await written(cluster)
        await first.kill()
        await producer.reports("acknowledged", 10_000)
        await first.start()
        await second.kill()
        await second.start()
        await producer.reports("acknowledged", 15_000)
        await broker.kill()  # its successor recovers the ledgers that it left open
        await broker.start()
        await producer.reports("acknowledged", 20_000)
        _, sent, acknowledged = await producer.stop()
        assert sent == acknowledged

        full = await with_messages(cluster)
        ensembles = [fragment.ensemble for each in full.values() for fragment in each.fragments]
        assert all(alone.id in ensemble for ensemble in ensembles), "each ensemble has two racks"
        disks = [tmp_path / f"b{number}" for number in range(1, BOOKIES + 1)]
        assert sum(map(disk_bytes, disks)) > 3 * int(sent) * int(SIZE)
        consumer = await Session.start(broker, "consume", "URL", TOPIC, sent, SIZE)
        await consumer.reports("received", 2_000)
        await alone.kill()
        await consumer.reports("received", 10_000)
        await alone.start()
        assert " ".join(await consumer.reports("end")) == "end lost 0 doubled 0 reordered 0 damaged 0"

        async def are_trimmed() -> bool:
            return not full.keys() & set(await cluster.ledgers.list_ids())

        async def are_freed() -> bool:
            return max(map(disk_bytes, disks)) < 6 * SEGMENT  # of 12: live cursors keep some

        await wait_until(are_trimmed, what="Pulsar deletes the consumed ledgers")
        await wait_until(are_freed, what="every bookie frees its disk")
