"""An error of Spark, pages of two stacks, becomes a single line with the cause."""

import pytest
from py4j.protocol import Py4JError

from kvstore.errors import Corrupted, NoSuchPin, OutcomeUnknown, StoreError, Unavailable
from kvstore.spark.snapshots.planning import NotContinuable
from kvstore.spark.snapshots.runners import failure_of

STACK = """An error occurred while calling o12.collect.
: org.apache.spark.SparkException: Job aborted due to stage failure: Task 0 in stage 1.0 failed 3 times
Traceback (most recent call last):
  File "worker.py", line 1, in main
{raised}

\tat org.apache.spark.api.python.BasePythonRunner.handlePythonException(PythonRunner.scala:1)
\tat java.base/java.lang.Thread.run(Thread.java:840)
"""


@pytest.mark.parametrize(
    ("raised", "error"),
    [
        ("kvstore.errors.NoSuchPin: the pin has ended", NoSuchPin("the pin has ended")),
        ("kvstore.errors.Corrupted: x is damaged", Corrupted("x is damaged")),
        (
            "kvstore.errors.PositionTrimmed: partition p1: changes after 4",
            NotContinuable("partition p1: changes after 4"),
        ),
        ("kvstore.errors.NotLeader: p1", OutcomeUnknown("NotLeader: p1")),
        (
            "OSError: [Errno 28] No space left on device",
            Unavailable("the Spark job failed: OSError: [Errno 28] No space left on device"),
        ),
        (
            "",
            Unavailable(
                "the Spark job failed: org.apache.spark.SparkException: Job aborted due to stage failure: Task 0 in "
                "stage 1.0 failed 3 times"
            ),
        ),
    ],
)
def test_error_of_a_task_is_reported(raised: str, error: StoreError) -> None:
    found = failure_of(RuntimeError(STACK.format(raised=raised)))
    assert (type(found), str(found)) == (type(error), str(error))


@pytest.mark.parametrize("error", [ConnectionRefusedError(111, "refused"), Py4JError("calling o12.collect")])
def test_killed_jvm_is_reported(error: Exception) -> None:
    assert "its JVM was killed" in str(failure_of(error))


def test_stack_alone_is_no_reason() -> None:
    found = failure_of(RuntimeError("the JVM has ended\n\tat java.base/java.lang.Thread.run(Thread.java:840)\n"))
    assert str(found) == "the Spark job failed: the JVM has ended"


def test_failure_without_a_message_is_reported_by_its_type() -> None:
    assert str(failure_of(RuntimeError())) == "the Spark job failed: RuntimeError"
