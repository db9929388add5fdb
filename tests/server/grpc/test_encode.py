"""The results that wait to be sent on a stream, and the size of one answer."""

from __future__ import annotations

import pytest

from kvstore.errors import OutcomeUnknown, QuotaExceeded, StoreError
from kvstore.partition.state import commands
from kvstore.proto import kv_pb2
from kvstore.rpc.channels import MESSAGE_BYTES_MAX
from kvstore.rpc.status import restore
from kvstore.server.grpc.encode import Outbox, check_answer, failure
from kvstore.server.grpc.session import OPEN_MAX

FULL = StoreError("nothing is full here")
NAMESPACE = "n" * 64


def test_accumulated_errors_stay_below_the_size_of_a_message() -> None:
    """Each write that a quota refuses has its own error. Errors that a client did not read at once broke its
    stream, and its refused writes had an unknown outcome."""
    outbox, ops = Outbox(), [commands.Put(b"k", b"v")] * OPEN_MAX
    refused: list[tuple[int, StoreError]] = [
        (place, QuotaExceeded(NAMESPACE, "keys", 10**9, 10**9, place)) for place in range(OPEN_MAX)
    ]
    outbox.add_all(1, ops, list(refused), 1 << 20, FULL)
    assert outbox.bytes == 0, "reads are not refused for errors' sake"
    numbers, sizes = list[int](), list[int]()
    while not outbox.is_empty():
        message = outbox.take().message()
        sizes.append(message.ByteSize())
        numbers += [number for each in message.failures for number in each.numbers]
    assert max(sizes) <= MESSAGE_BYTES_MAX // 2
    assert numbers == list(range(1, OPEN_MAX + 1))


def test_frame_refused_for_one_reason_is_not_reported_as_unknown() -> None:
    answers = kv_pb2.Answers()
    for number in range(40_000):
        answers.failures.append(failure(QuotaExceeded(NAMESPACE, "keys", 10**9, 10**9, number % 2), [number]))
    assert answers.ByteSize() > MESSAGE_BYTES_MAX
    check_answer(answers)
    assert [list(each.numbers) for each in answers.failures] == [list(range(i, 40_000, 2)) for i in (0, 1)]
    told = [restore(each.reason, each.message, each.metadata) for each in answers.failures]
    assert [(type(each), each.args[-1]) for each in told] == [(QuotaExceeded, 0), (QuotaExceeded, 1)]


def test_answer_larger_than_a_message_has_an_unknown_outcome() -> None:
    answers = kv_pb2.Answers(values=[b"v" * (MESSAGE_BYTES_MAX + 1)])
    with pytest.raises(OutcomeUnknown, match="larger than a message"):
        check_answer(answers)
