"""A rate limits the reads of a task, whatever it had left before."""

import pyarrow as pa
import pytest

from kvstore.spark.snapshots import tasks
from kvstore.spark.snapshots.tasks import paced


class Clock:
    """Advances by the sleeps and by the duration of the work."""

    def __init__(self) -> None:
        self.now = 100.0

    def monotonic(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds


@pytest.mark.parametrize(("work_s", "want_s"), [([0.0] * 5, 0.5), ([0.05] * 5, 0.5), ([0.3, 0.0, 0.0, 0.0, 0.0], 0.7)])
def test_batches_come_no_sooner_than_the_rate_has_it(
    monkeypatch: pytest.MonkeyPatch, work_s: list[float], want_s: float
) -> None:
    clock = Clock()
    monkeypatch.setattr(tasks, "time", clock)
    batch = pa.RecordBatch.from_arrays([pa.array([0] * 1000, pa.int64())], ["a"])
    for seconds, _ in zip(work_s, paced(iter([batch] * 5), batch.nbytes * 10), strict=True):
        clock.now += seconds
    assert list(paced(iter([batch]), 0)) == [batch]
    assert clock.now - 100.0 == pytest.approx(want_s)
