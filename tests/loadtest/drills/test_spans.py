"""Log lines of nodes about leader changes are combined correctly."""

from pathlib import Path

from loadtest.drills.spans import HAND_OVER, TAKEOVER, read_logs, spans, summary

REPLICA = "kvstore.partition.election.replica"
OLD = f"""2026-01-01 10:00:00,000 INFO kvstore.partition.election.upkeep partition=p1 hands the lead back to n1
2026-01-01 10:00:00,100 INFO {REPLICA} partition=p1 n1 is ready to lead
2026-01-01 10:00:00,110 INFO {REPLICA} partition=p1 SERVING -> YIELDING on Yielded(successor='n1')
a line of something else
2026-01-01 10:00:05,000 INFO {REPLICA} partition=p2 FOLLOWING -> CANDIDATE on LeaderRead(record=None)
"""
NEW = f"""2026-01-01 10:00:00,115 INFO {REPLICA} partition=p1 FOLLOWING -> CLAIMING on Offered(term=2)
2026-01-01 10:00:00,120 INFO {REPLICA} partition=p1 CLAIMING -> OPENING on Claimed()
2026-01-01 10:00:00,140 INFO kvstore.wal.takeover partition=p1 epoch=3 opened ledger=7 after Position(ledger=6, entry=1)
2026-01-01 10:00:00,150 INFO {REPLICA} partition=p1 OPENING -> SERVING on Opened()
2026-01-01 10:00:05,010 INFO {REPLICA} partition=p2 FOLLOWING -> CANDIDATE on LeaderRead(record=None)
2026-01-01 10:00:05,020 INFO {REPLICA} partition=p2 CANDIDATE -> CLAIMING on Tick()
2026-01-01 10:00:05,600 INFO {REPLICA} partition=p2 OPENING -> SERVING on Opened()
2026-01-01 10:00:09,000 INFO {REPLICA} partition=p3 FOLLOWING -> CANDIDATE on LeaderRead(record=None)
"""


def test_leader_change_logged_by_both_nodes_is_counted_once(tmp_path: Path) -> None:
    (tmp_path / "n1.log").write_text(NEW)
    (tmp_path / "n2.log").write_text(OLD)
    found = spans(read_logs(tmp_path))
    assert [(span.kind, span.partition) for span in found] == [(HAND_OVER, "p1"), (TAKEOVER, "p2")]
    assert found[0].phases == {"released": 10, "claiming": 15, "claimed": 20, "opened": 40, "serving": 50}
    assert found[1].phases == {"claiming": 20, "serving": 600}


def test_summary_has_a_row_for_each_phase(tmp_path: Path) -> None:
    (tmp_path / "n1.log").write_text(NEW)
    rows = summary(spans(read_logs(tmp_path)), TAKEOVER)
    assert [row["until"] for row in rows] == ["claiming", "serving"]
    assert rows[-1] == {"change": TAKEOVER, "until": "serving", "count": 1, "median_ms": 590, "longest_ms": 590}
