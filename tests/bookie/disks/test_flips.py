"""Any flipped byte in a stopped bookie's files: the bookie serves nothing wrong, denies nothing that it has
acknowledged, and is complete again once its peers' copies were stored (docs/protocol.md, B6, B7, B14)."""

from __future__ import annotations

from pathlib import Path

import pytest

from kvstore.bookie import replay
from kvstore.bookie.journal import record, scan
from kvstore.bookie.steps import Steps
from kvstore.env.real import real_env, run
from tests.bookie.flips import NEEDED, Broken, Flip, Trial, flip_many, write

pytestmark = pytest.mark.slow
COUNT = 60
"""Each kind of bytes once or twice, in either directory."""


def test_bookie_never_lies_after_a_flipped_byte(tmp_path: Path) -> None:
    results = run(flip_many(COUNT, 1, tmp_path))
    assert results.total() == COUNT
    outcomes = {what.rpartition(": ")[2] for what in results}
    assert {"found, told as unreadable, and mended", "does not start, and names the file"} <= outcomes


def test_flip_test_detects_a_bookie_that_checks_no_packet(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def flip_in_a_payload() -> str:
        env = real_env(tmp_path)
        original = await write(env, tmp_path / "original", is_doubted=False)
        kind = f"record body: {NEEDED}"
        file, _, end = original.places[kind][0]
        trial = Trial(env, original, Flip(kind, file, end - 1, 1), tmp_path / "flip", reads_first=True)
        return await trial.run()

    monkeypatch.setattr(record, "is_body_good", lambda _head, _body: True)
    with pytest.raises(Broken, match="served wrong"):
        run(flip_in_a_payload())


def test_flip_test_detects_a_bookie_that_takes_damage_for_the_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def without_damage(*arguments: object, **known: object) -> Steps[scan.SegmentScan]:
        found = yield from scan.scan(*arguments, **known)  # type: ignore[arg-type]
        found.damage = []
        return found

    async def flip_in_the_newest_segment() -> str:
        """Its records are in no checkpoint, so a start knows only the scanned ones."""
        env = real_env(tmp_path)
        original = await write(env, tmp_path / "original", is_doubted=False)
        kind = f"record head: {NEEDED}"
        newest = max(file for file, _, _ in original.places[kind])
        first = min(first for file, first, _ in original.places[kind] if file == newest)
        trial = Trial(env, original, Flip(kind, newest, first, 1), tmp_path / "flip", reads_first=True)
        return await trial.run()

    monkeypatch.setattr(replay, "scan", without_damage)
    with pytest.raises(Broken, match="was acknowledged and is denied"):
        run(flip_in_the_newest_segment())
