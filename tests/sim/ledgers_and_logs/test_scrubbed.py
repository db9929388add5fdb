"""A bit flips on a disk long after it was written. The scrub finds it, and a leader copies the entry there again
without a request (docs/protocol.md, B14)."""

from __future__ import annotations

from dataclasses import replace

import pytest

from kvstore.bookie.config import BookieConfig
from kvstore.partition.state import commands
from kvstore.wal.copies import copier
from tests.sim.nodes import Node
from tests.sim.stories.scenarios import Stage, knobs, play
from tests.sim.strikes.knobs import Knobs

pytestmark = pytest.mark.sim


VALUES = [b"%04d" % number * 500 for number in range(60)]


def places(node: Node, value: bytes) -> list[tuple[str, int]]:
    """Return the segments of the bookie's journal that contain the value, and the offsets."""
    files = {path: bytes(file.cache.data) for path, file in node.disk.names.now.files.items()}
    return [(path, data.index(value)) for path, data in files.items() if path.endswith(".journal") and value in data]


def test_flipped_bit_on_disk_is_repaired_unprompted(monkeypatch: pytest.MonkeyPatch) -> None:
    told = Knobs.bookie

    def eager(self: Knobs, name: str, listen: str) -> BookieConfig:
        return replace(told(self, name, listen), scrub_first_s=5, scrub_rest_s=5)

    monkeypatch.setattr(Knobs, "bookie", eager)
    monkeypatch.setattr(copier, "ROUND_S", 10.0)

    async def story(stage: Stage) -> None:
        other = stage.others(stage.leader)[0]
        stage.cluster.lossy = other
        for number, value in enumerate(VALUES):
            await stage.ask(commands.Put(b"k%d" % number, value), stage.leader)
        assert other.served is not None
        bookie = other.served.bookie
        value = next(each for each in VALUES if places(other, each))
        ((segment, at),) = places(other, value)
        other.disk.flip_bit(segment, 8 * at)
        assert not places(other, value)
        await stage.until(lambda: bool(bookie.upkeep[0].scrubber.damaged), 60)
        assert bookie.storage.statistics.damaged_records > 0, "kvstore_bookie_damaged_records_total"
        await stage.until(lambda: bool(places(other, value)), 60)
        await stage.until(lambda: not bookie.upkeep[0].scrubber.damaged, 60)

    play(story, replace(knobs(roll_entries=10, retention_ms=3_600_000), segment_bytes=16 << 10))
