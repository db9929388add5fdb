"""Every setting of a node is restricted to its range, and docs/reference/configuration.md agrees with the code."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator
from typing import Any, get_type_hints

import pytest

from kvstore import config as toml
from kvstore.bookie.config import BookieConfig
from kvstore.limits import BATCH_BYTES_MAX, KEY_BYTES_MAX
from kvstore.meta import ledger_metadata
from kvstore.partition.config import (
    ENTRY_BYTES_LIMIT,
    IN_FLIGHT_BYTES_LIMIT,
    IN_FLIGHT_LIMIT,
    LEASE_MS_MAX,
    PartitionConfig,
)
from kvstore.partition.leading.entry_in_flight import ALL_IN_FLIGHT_MAX
from kvstore.proto.bookkeeper import PACKET_MAX
from kvstore.ranges import Range, above, between, range_of, zero_or
from kvstore.server.config import ORPHAN_LEASES_MIN, NodeConfig
from kvstore.types import BookieId, EntryId, Fragment, LedgerId, LedgerMetadata, Quorum, Seq
from kvstore.wal import list_codec
from kvstore.wal.config import CHECK_EVERY_S_MAX, FRAGMENTS_MAX, LogConfig
from kvstore.wal.connection import BUFFERED_BYTES_MAX, OUTSTANDING_MAX
from kvstore.wal.leading.leader_log import IN_FLIGHT_MAX
from kvstore.wal.leading.standstill import SILENCE_S, STALL_MAX_S
from kvstore.wal.ledger_list import LedgerList, Listed
from kvstore.wal.seek import BEYOND
from scripts import configuration

GOOD: dict[str, Any] = {"id": "n1", "zookeeper": "127.0.0.1:2181/kvstore", "data_dir": "/d", "secret_file": "/s"}


def numbers(cls: type = NodeConfig, prefix: str = "") -> Iterator[tuple[str, type, Range | None]]:
    """Return every number in node.toml by its dotted name, except quorums, which are checked as a whole."""
    for name, hint in get_type_hints(cls, include_extras=True).items():
        bare = configuration.bare(hint)
        if dataclasses.is_dataclass(bare) and bare is not Quorum:
            assert isinstance(bare, type)
            yield from numbers(bare, f"{prefix}{name}.")
        elif bare in (int, float):
            yield prefix + name, bare, range_of(hint)


NUMBERS = list(numbers())


def faults_with(name: str, value: float) -> list[str]:
    """Return the faults that are reported for a file with one setting."""
    table: dict[str, Any] = dict(GOOD)
    *sections, last = name.split(".")
    inner = table
    for each in sections:
        inner = inner.setdefault(each, {})
    inner[last] = value
    return [str(each) for each in toml.build_or_faults(table, NodeConfig)[1] if each.name == name]


def test_every_number_has_a_bounded_range() -> None:
    assert len(NUMBERS) > 40
    assert [name for name, _, found in NUMBERS if found is None or math.isinf(found.most)] == []


@pytest.mark.parametrize(("name", "kind", "found"), NUMBERS, ids=[name for name, *_ in NUMBERS])
def test_value_out_of_range_is_refused_by_name(name: str, kind: type, found: Range | None) -> None:
    assert found is not None
    beyond: list[float] = [found.least - 1, found.most if found.is_below else found.most + 1]
    if found.is_zero_allowed:
        beyond[0] = found.least / 2
    for value in beyond:
        assert faults_with(name, kind(value)) == [f"{name}: expected {found}, got {kind(value)}"]
    if kind is float:
        assert [len(faults_with(name, value)) for value in (math.nan, math.inf, -math.inf)] == [1, 1, 1]
    within = kind(0 if found.is_zero_allowed else found.least)
    if name != "storage.segment_bytes":  # a node requires more than a bookie by itself
        assert faults_with(name, within) == []


def test_range_is_shown_in_plain_numbers() -> None:
    assert [str(each) for each in (Range(0), above(0), between(1 << 10, 2 << 30), Range(0, 1, is_below=True))] == [
        "at least 0",
        "more than 0",
        "1024 to 2147483648",
        "0 to below 1",
    ]
    assert [value for value in (-1, 0, 0.5, 1, math.nan) if Range(0, 1, is_below=True).admits(value)] == [0, 0.5]
    assert [value for value in (0, 1e-9, math.inf) if above(0).admits(value)] == [1e-9]
    assert str(zero_or(0.05, 60)) == "0, or 0.05 to 60"
    assert [value for value in (-1, 0, 0.01, 0.05, 60, 61) if zero_or(0.05, 60).admits(value)] == [0, 0.05, 60]


@pytest.mark.parametrize(
    ("settings", "fault"),
    [
        (
            {"partition": {"entries_in_flight_max": 33, "entry_bytes_max": 1 << 20}},
            (
                "partition.entries_in_flight_max: expected at most 33554432 bytes with entry_bytes_max, "
                "got 33 entries of 1048576 bytes, 34603008 in all"
            ),
        ),
        (
            {"partition": {"write_buffer_bytes": 32 << 20, "memory_bytes": 16 << 20}},
            "partition.write_buffer_bytes: expected at most memory_bytes, 16777216, got 33554432",
        ),
        (
            {"partition": {"lease_ms": 2_000}, "log": {"orphan_age_s": 4}},
            (
                "log.orphan_age_s: expected at least 4.5, 2 times partition.lease_ms and hidden_pause_ms together, "
                "got 4; a shorter age deletes the ledgers of new leaders while they wait for the former lease to end"
            ),
        ),
    ],
)
def test_conflicting_settings_are_refused(settings: dict[str, Any], fault: str) -> None:
    assert [str(each) for each in toml.build_or_faults({**GOOD, **settings}, NodeConfig)[1]] == [fault]


def test_leader_limits_fit_into_log_and_bookie_limits() -> None:
    """An entry above the log's limit stops the log, and an entry above the bookie's limit stops the bookie."""
    assert 2 * IN_FLIGHT_LIMIT <= ALL_IN_FLIGHT_MAX < IN_FLIGHT_MAX <= BEYOND // 2
    assert IN_FLIGHT_LIMIT * PartitionConfig().entry_bytes_max <= IN_FLIGHT_BYTES_LIMIT
    bookie = BookieConfig(name="b1")
    assert min(bookie.connection_bytes_max, bookie.pending_bytes_max, BUFFERED_BYTES_MAX // 2) >= IN_FLIGHT_BYTES_LIMIT
    assert min(bookie.connection_pending_max, OUTSTANDING_MAX) > IN_FLIGHT_LIMIT
    assert ENTRY_BYTES_LIMIT + BATCH_BYTES_MAX + KEY_BYTES_MAX < PACKET_MAX


def test_pauses_are_detected_with_the_longest_check_period() -> None:
    assert min(SILENCE_S, STALL_MAX_S / 2) >= CHECK_EVERY_S_MAX


def test_ledger_metadata_with_most_fragments_fits_into_a_node() -> None:
    bookies = tuple(BookieId(f"{'b' * 63}-{number:012x}") for number in range(7))
    fragments = tuple(Fragment(EntryId(number), bookies) for number in range(FRAGMENTS_MAX))
    metadata = LedgerMetadata(LedgerId(1), Quorum(7, 3, 2), fragments, token=1)
    assert len(ledger_metadata.encode(metadata)) < 1 << 20


def test_ledger_list_covers_the_longest_lease() -> None:
    most = PartitionConfig(lease_ms=LEASE_MS_MAX, hidden_pause_ms=LEASE_MS_MAX).listed_lease_ms
    listed = LedgerList(ledgers=(Listed(LedgerId(1), Seq(1), True, 1, most),) * 600)
    assert list_codec.decode(list_codec.encode(listed), what="x") == listed
    assert LogConfig().orphan_age_s >= ORPHAN_LEASES_MIN * most / 1000


def test_reference_has_every_setting_once() -> None:
    page = configuration.reference()
    names = [name.rpartition(".")[2] for name, *_ in NUMBERS]
    assert [name for name in names if f"| `{name}` |" not in page] == []
    assert (
        "| `retired_keep_s` | `86400` (1 day) | 0 to 1000000000 | Seconds of running time for which the state" in page
    )
    assert "| `ack` | `2` | a whole number |" in page, "by the default of [log], which the class has none of"
