"""A node's report on itself contains the numbers of all its parts in the right places."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from kvstore.bookie.directories.state import DirectoryState
from kvstore.meta.store import SessionState
from kvstore.partition.moves.import_driver import MoveProgress
from kvstore.partition.state.engine import RESERVE_BYTES
from kvstore.proto.admin_pb2 import NodeReport
from kvstore.ring import MoveId
from kvstore.server.clock.clock_sync import ClockReport
from kvstore.server.load.load import HotKey, PartitionLoad
from kvstore.server.status.latencies import Latency
from kvstore.server.status.node_report import replica_report, report_of
from kvstore.types import PartitionId

P1 = PartitionId("p1")
REPLICA: dict[str, Any] = {
    "role": "serving",
    "leader": "n1",
    "seq": 70,
    "durable_seq": 60,
    "epoch": 4,
    "keys": 5,
    "failure": None,
    "lead_failure": "",
    "is_in_doubt": False,
    "moves_stuck": 1,
    "pins_held": 2,
    "leading": {
        "epoch": 3,
        "queued": 9,
        "intents": 4,
        "decisions": 2,
        "oldest_intent_s": 31.5,
        "oldest_decision_s": 0.5,
    },
    "log": {
        "ledgers": 6,
        "trimmed_seq": 11,
        "ledgers_lacking_copies": 1,
        "ledgers_lacking_at": [("n2-ab", 1)],
        "ledgers_at_risk": 1,
        "ledgers_undecodable": 0,
    },
}
LOAD = PartitionLoad(P1, 120.0, 20.0, 4_000.0, (HotKey(b"hot", 0.5),))


class FullBookie:
    """Return a bookie whose first disk is full and whose second one has failed."""

    id = "n1-ab"
    address = "n1:3181"

    def statistics(self) -> dict[str, Any]:
        return {"readonly": 1, "ledgers": 7, "limbo_ledgers": 2, "refused_other_entry": 4, "damaged_records": 3}

    def space(self) -> tuple[int, int]:
        return 1_000, 10

    def directories(self) -> list[DirectoryState]:
        return [DirectoryState("/a", "", 10, True), DirectoryState("/b", "EIO", 0, False)]


class MuteBookie(FullBookie):
    def space(self) -> tuple[int, int]:
        raise OSError("the disk has failed")


def report(bookie: Any = None, **changes: Any) -> NodeReport:
    worker = SimpleNamespace(
        statistics=lambda: {
            "enabled": 1,
            "ledgers_marked": 17,
            "ledgers_repairing": 4,
            "ledgers_unreadable": 1,
            "ledgers_repaired": 8,
            "copied_bytes": 9,
        }
    )
    node: Any = SimpleNamespace(
        id="n1",
        version="0.1.0",
        zookeeper="etcd://e1:2379/kv",
        store=SimpleNamespace(state=SessionState.LOST),
        is_open=True,
        is_draining=True,
        bookie=bookie,
        worker=worker,
        auditor=SimpleNamespace(statistics=lambda: {"active": 1, "bookies_lost": 2}),
        resident_bytes=lambda: 5,
        tls=SimpleNamespace(mode="prefer", left_s=60.0, plain_connections=7, is_failing=True),
        not_ready=lambda: ["draining"],
        replicas=lambda: {P1: REPLICA},
    )
    given: dict[str, Any] = {
        "uptime_s": 9.0,
        "read_age_s": 31.0,
        "starved": 0.25,
        "access_on": True,
        "date": ClockReport(1, True, "no doubt any more"),
        "ring_version": 4,
        "loads": {P1: LOAD},
        "moves": {MoveId(7): MoveProgress(0.5, "p1 has no leader", 31.0), MoveId(8): MoveProgress(0.5, eta_s=4.0)},
        "latencies": [Latency("get", 0.001, 0.004, 7, 60.0)],
        "snapshot": {"snapshot_age_s": 60.0, "snapshot_rows": 5, "snapshot_bytes": 6},
        "disk": (100, 40),
        "reserve_bytes": 50,
        "copies": None,
    }
    member = {"zone": "rack-1", "roles": ("bookie", "server"), "grpc": "n1:2", "resp": "n1:1", "http": "n1:3"}
    return report_of(node, member, **(given | changes))


def test_report_contains_state_of_tls() -> None:
    told = report().tls
    assert (told.mode, told.left_s, told.plain_connections, told.failing) == ("prefer", 60.0, 7, True)


def test_leading_replica_reports_its_log() -> None:
    told = replica_report(P1, REPLICA, LOAD)
    assert (told.role, told.leader, told.sequence, told.durable_sequence, told.epoch) == ("serving", "n1", 70, 60, 4)
    assert (told.keys, told.failure, told.is_in_doubt, told.moves_stuck, told.pins_held) == (5, "", False, 1, 2)
    lead = told.lead
    assert (lead.epoch, lead.queued, lead.ledgers, lead.trimmed_sequence) == (3, 9, 6, 11)
    assert (lead.intents, lead.decisions, lead.oldest_intent_s, lead.oldest_decision_s) == (4, 2, 31.5, 0.5)
    assert (lead.ledgers_lacking_copies, lead.ledgers_at_risk, lead.ledgers_undecodable) == (1, 1, 0)
    assert [(each.bookie, each.ledgers) for each in lead.lacking_at] == [("n2-ab", 1)]
    assert (lead.ops_per_s, lead.writes_per_s, lead.written_bytes_per_s) == (120.0, 20.0, 4_000.0)
    assert [(hot.key, hot.share) for hot in lead.hot_keys] == [(b"hot", 0.5)]


def test_replica_not_serving_leads_nothing() -> None:
    opening = {
        **REPLICA,
        "role": "opening",
        "failure": "the log has a gap",
        "leader": None,
        "lead_failure": "no quorum",
    }
    told = replica_report(P1, opening, None)
    assert (told.HasField("lead"), told.failure, told.leader) == (False, "the log has a gap", "")
    assert told.lead_failure == "no quorum"


def test_report_covers_every_part() -> None:
    told = report(FullBookie())
    assert (told.id, told.zone, list(told.roles), told.resp) == ("n1", "rack-1", ["bookie", "server"], "n1:1")
    assert (list(told.not_ready), told.draining, told.access_on, told.ring_version) == (["draining"], True, True, 4)
    metadata = told.metadata
    assert (metadata.kind, metadata.address, metadata.state, metadata.read_age_s) == (
        "etcd",
        "etcd://e1:2379/kv",
        "lost",
        31.0,
    )
    assert (told.disk.total_bytes, told.disk.free_bytes, told.disk.reserve_bytes) == (100, 40, RESERVE_BYTES)
    bookie = told.bookie
    assert (bookie.id, bookie.state, bookie.ledgers, bookie.limbo_ledgers, bookie.damaged_records) == (
        "n1-ab",
        "readonly",
        7,
        2,
        3,
    )
    assert bookie.refused_other_entry == 4
    assert (bookie.disk.total_bytes, bookie.disk.free_bytes, bookie.disk.reserve_bytes) == (1_000, 10, 50)
    assert [(each.path, each.failure, each.readonly) for each in bookie.directories] == [
        ("/a", "", True),
        ("/b", "EIO", False),
    ]
    assert (told.repair.enabled, told.repair.marked, told.repair.repairing, told.repair.unreadable) == (True, 17, 4, 1)
    assert (told.is_auditor, told.bookies_lost) == (True, 2)
    assert [(each.id, each.part, each.failure, each.failing_s) for each in told.copied] == [
        (7, 0.5, "p1 has no leader", 31.0),
        (8, 0.5, "", 0.0),
    ]
    assert [each.eta_s if each.HasField("eta_s") else None for each in told.copied] == [None, 4.0]
    [latency] = told.latencies
    assert (latency.operation, latency.p50_s, latency.p99_s, latency.timed) == ("get", 0.001, 0.004, 7)
    assert (told.snapshot.age_s, told.snapshot.rows, told.snapshot.bytes) == (60.0, 5, 6)
    assert [each.partition for each in told.replicas] == ["p1"]


def test_unknown_values_are_absent() -> None:
    told = report(MuteBookie(), disk=(0, 0), snapshot={})
    assert not told.HasField("disk")
    assert not told.bookie.HasField("disk"), "its disk does not say"
    assert not told.HasField("snapshot")
    assert not report().HasField("bookie")


def test_doubt_about_date_is_reported_while_it_lasts() -> None:
    assert report().date_doubt == ""
    assert report(date=ClockReport(1, False, "it is 9 s ahead")).date_doubt == "it is 9 s ahead"
    assert report(date=ClockReport(1, False)).date_doubt == "it is too early to tell"
    assert report(date=ClockReport(1, True, behind_ms=60_000.0)).date_behind_s == 60.0
