"""The verdict of a ring drill about waits and throughput: the worst of all changes counts."""

from loadtest.drills.ring_spans import Longest
from loadtest.drills.ring_verdict import Load, Verdict


def verdicts(verdict: Verdict) -> list[str]:
    return [row["verdict"] for row in verdict.rows()]


def loads(*kept: float) -> list[Load]:
    return [Load(each, 800.0, 0.5) for each in kept]


def test_worst_move_and_the_worst_change_decide() -> None:
    fast = [Longest(0.09, 0.02)] * 99
    assert verdicts(Verdict(fast, fast, [1] * 99, loads(0.9, 0.95))) == ["PASS", "PASS", "PASS"]
    slow = Verdict([*fast, Longest(0.21, 0.04)], fast, [1] * 100, loads(0.95, 0.79))
    assert verdicts(slow) == ["FAIL", "PASS", "FAIL"]
    assert not slow.is_met


def test_text_names_figures_limits_and_the_machine_allowance() -> None:
    verdict = Verdict([Longest(0.1, 0.07), Longest(0.2, None)], [Longest(0.01, 0.01)], [1, 3], loads(0.85))
    writes, reads, throughput, loops, freezes, rates = verdict.text().splitlines()
    assert writes.startswith("PASS  longest write wait of any key of a range")
    assert (
        ": p99.9 200 ms, median 100 ms, max 200 ms, in 2 moves; of untouched keys at the same times: p99.9 10" in writes
    )
    assert writes.endswith("(wanted p99.9 <= 200 ms)")
    assert reads.startswith("FAIL  longest read wait of any key of a range")
    assert ": p99.9 70 ms, median 70 ms, max 70 ms, in 1 moves; " in reads
    assert (
        throughput
        == "PASS  throughput of untouched ranges, of that before; the least of the changes: 0.85 (wanted >= 0.8)"
    )
    assert "closed loops with rests" in loops
    assert freezes.strip() == "2 moves; 2 freezes ended before the release and were tried again"
    assert rates.endswith(": 800/s with 50 %")


def test_goal_without_measurements_is_not_met() -> None:
    assert verdicts(Verdict()) == ["FAIL", "FAIL", "FAIL"]
