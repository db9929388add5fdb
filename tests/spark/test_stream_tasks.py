"""What the tasks of a micro-batch read, and what is sent to them."""

from __future__ import annotations

import pickle

from hypothesis import given
from hypothesis import strategies as st

from kvstore.client.core.config import ClientConfig
from kvstore.client.feed import FeedReader
from kvstore.spark import offsets
from kvstore.spark.columns import CHANGES, COLUMNS
from kvstore.spark.offsets import ChangeSpan
from kvstore.spark.options import stream_options
from kvstore.spark.stream import ChangeReader

COUNTS = st.lists(st.integers(1, 30), max_size=12)


@given(COUNTS, st.integers(1, 40))
def test_spans_that_are_small_together_are_one_task(counts: list[int], rows_max: int) -> None:
    spans = [ChangeSpan(f"p{number}", 7, 7 + count) for number, count in enumerate(counts)]
    tasks = offsets.tasks(spans, rows_max)
    assert [span for task in tasks for span in task] == spans
    sizes = [sum(span.until - span.after for span in task) for task in tasks]
    assert all(len(task) == 1 or size <= rows_max for task, size in zip(tasks, sizes, strict=True))
    assert all(size + after[0].until - after[0].after > rows_max for size, after in zip(sizes, tasks[1:], strict=False))


def test_objects_sent_to_tasks_contain_no_connection_of_the_driver() -> None:
    config = ClientConfig(endpoints=("127.0.0.1:1",))
    reader = ChangeReader(config, stream_options({}, tuple(CHANGES), tuple(COLUMNS)))
    assert isinstance(reader._reader(), FeedReader)
    assert pickle.loads(pickle.dumps(reader))._feed is None
    reader.stop()
    assert reader._feed is None
