"""Converts results of the partition to the columns of Answers messages. Decides only."""

from __future__ import annotations

from collections import deque
from typing import Any

from kvstore.errors import OutcomeUnknown, StoreError
from kvstore.partition.state.commands import (
    Append,
    Batch,
    Count,
    Delete,
    DeleteRange,
    Expire,
    Flag,
    Get,
    Increment,
    Meta,
    Op,
    Put,
    Range,
    Record,
    Result,
    Scan,
    ScanTokens,
    Transact,
)
from kvstore.partition.state.traits import READS, VERSIONED
from kvstore.proto import compact, kv_pb2
from kvstore.rpc.channels import MESSAGE_BYTES_MAX
from kvstore.rpc.status import describe

MESSAGE_BYTES = 1 << 20
"""A message is sent when this many bytes have accumulated. A single result may exceed it."""
RESULT_BYTES_MAX = 5 << 19
"""Maximum size in bytes of the result of one operation. Only a batch of many large reads can exceed it."""


class AnswerColumns:
    """Results that wait to be sent, in the columns of one message."""

    __slots__ = ("absent", "bytes", "failure_bytes", "failures", "found", "numbers", "records", "results", "versions")

    def __init__(self) -> None:
        self.bytes = 0
        """Bytes of the values. Small columns are not counted."""
        self.failure_bytes = 0
        """Bytes of the errors, without the numbers of their operations. The errors of a thousand callers may be
        long."""
        self.numbers: list[int] = []
        self.versions: list[int] = []
        self.found: list[int] = []
        self.records: list[Record] = []
        self.absent: list[int] = []
        self.results: list[kv_pb2.Result] = []
        self.failures: dict[StoreError, kv_pb2.Failure] = {}

    def fail(self, number: int, error: StoreError) -> None:
        """Add the error of the operation with this number."""
        reported = self.failures.get(error)
        if reported is None:
            reported = self.failures[error] = failure(error, [])
            self.failure_bytes += reported.ByteSize()
        reported.numbers.append(number)

    @property
    def is_full(self) -> bool:
        return self.bytes + self.failure_bytes >= MESSAGE_BYTES

    @property
    def count(self) -> int:
        failed = sum(len(each.numbers) for each in self.failures.values())
        return len(self.numbers) + len(self.found) + len(self.absent) + len(self.results) + failed

    def compact_or_message(self) -> compact.CompactAnswers[Record] | kv_pb2.Answers:
        """Return the columns as a compact message, which streams without gRPC use, or as a protobuf message."""
        if self.results or self.failures:
            return self.message()
        return compact.CompactAnswers(0, [], self.numbers, self.versions, self.found, self.records, self.absent)

    def message(self) -> kv_pb2.Answers:
        """Return the columns as a message."""
        answers = kv_pb2.Answers(numbers=self.numbers, versions=self.versions, absent=self.absent, results=self.results)
        if self.found:
            values, versions, created, written, expiries = zip(*self.records, strict=True)
            answers.found.extend(self.found)
            answers.values.extend(values)
            answers.found_versions.extend(versions)
            answers.created.extend(created)
            answers.written_ms.extend(written)
            if any(expiries):
                answers.expiries_ms.extend(expiries)
        answers.failures.extend(self.failures.values())
        return answers


def append_part(answers: kv_pb2.Answers, part: kv_pb2.Answers) -> None:
    """Append the message `part` to `answers`. If only one of them has expiries, the other gets a zero for each of
    its reads; otherwise expiries would be assigned to the wrong keys."""
    if answers.expiries_ms or part.expiries_ms:
        for each in (answers, part):
            each.expiries_ms.extend([0] * (len(each.found) - len(each.expiries_ms)))
    answers.MergeFrom(part)


class Outbox:
    """The results that a stream still has to send. Several results share a message. When values and errors exceed
    MESSAGE_BYTES, another message begins."""

    def __init__(self) -> None:
        self._full: deque[AnswerColumns] = deque()
        self._open = AnswerColumns()
        self.count = 0
        """Number of waiting results."""
        self.bytes = 0
        """Bytes of their values. Plain numbers are not counted."""

    def add_all(
        self, first: int, ops: list[Op], done: list[tuple[int, Result | StoreError]], bytes_max: int, full: StoreError
    ) -> None:
        """Add results of the operations `ops`. Each item of `done` has the index of an operation in `ops` and its
        result. The number of the result in the message is `first` plus the index. While `bytes_max` bytes of values
        wait to be sent, reads fail with the error `full`."""
        self.count += len(done)
        columns = self._open
        places, results = zip(*done, strict=True)
        if set(map(type, results)) == {int}:  # versions, as for puts
            columns.numbers += map(first.__add__, places)
            columns.versions += results
            return
        for place, result in done:
            if result.__class__ is int:
                columns.numbers.append(first + place)
                columns.versions.append(result)
                continue
            op = ops[place]
            if self.bytes >= bytes_max and op.code in READS:
                result = full
            if result is None and op.__class__ is Get:
                columns.absent.append(first + place)
            elif isinstance(result, StoreError):
                columns.fail(first + place, result)
                columns = self._next(columns)
            else:
                self._add_large(columns, first + place, op, result)
                columns = self._next(columns)

    def _add_large(self, columns: AnswerColumns, number: int, op: Op, result: Result) -> None:
        if op.__class__ is Get:
            columns.found.append(number)
            columns.records.append(result)
            size = len(result[0])
        else:
            message = result_message(op, result)
            message.number = number
            size = message.ByteSize()
            if size > RESULT_BYTES_MAX:
                columns.fail(number, answer_too_large(size))
                return
            columns.results.append(message)
        self.bytes += size
        columns.bytes += size

    def _next(self, columns: AnswerColumns) -> AnswerColumns:
        """Return the columns for the next result."""
        if columns.is_full:
            self._full.append(columns)
            self._open = AnswerColumns()
        return self._open

    def is_empty(self) -> bool:
        return not self.count

    def take(self) -> AnswerColumns:
        """Remove and return the columns of the next message. At least one result must be waiting."""
        columns = self._full.popleft() if self._full else self._open
        if columns is self._open:
            self._open = AnswerColumns()
        self.bytes -= columns.bytes
        self.count -= columns.count
        return columns


def check_answer(message: kv_pb2.BatchResponse | kv_pb2.TransactResponse | kv_pb2.Answers) -> None:
    """Raise OutcomeUnknown if the answer is larger than a message may be, because gRPC would report the call as
    refused. Before that, errors with the same reason are merged, because a refused operation must not be reported as
    unknown."""
    if message.ByteSize() > MESSAGE_BYTES_MAX and isinstance(message, kv_pb2.Answers):
        _gather_failures(message)
    if (size := message.ByteSize()) > MESSAGE_BYTES_MAX:
        raise answer_too_large(size)


def _gather_failures(answers: kv_pb2.Answers) -> None:
    found: dict[tuple[object, ...], kv_pb2.Failure] = {}
    for each in answers.failures:
        as_reported = (each.reason, each.message, *sorted(each.metadata.items()))
        if as_reported in found:
            found[as_reported].numbers.extend(each.numbers)
        else:
            found[as_reported] = each
    gathered = list(found.values())
    del answers.failures[:]
    answers.failures.extend(gathered)


def answer_too_large(size: int) -> OutcomeUnknown:
    return OutcomeUnknown(f"the operation has ended, but its result of {size} bytes is larger than a message")


def failure(error: StoreError, numbers: list[int]) -> kv_pb2.Failure:
    """Return an error in the form of frames."""
    reason, message, metadata = describe(error)
    return kv_pb2.Failure(numbers=numbers, reason=reason, message=message, metadata=metadata)


def position_message(position: tuple[str, int]) -> kv_pb2.Progress:
    """Return the position of a transaction in one partition."""
    return kv_pb2.Progress(partition=position[0], sequence=position[1])


def record_message(record: tuple[bytes, int, int, int, int]) -> kv_pb2.Record:
    value, version, created, written_ms, expires_ms = record
    return kv_pb2.Record(value=value, version=version, created=created, written_ms=written_ms, expires_ms=expires_ms)


def result_message(op: Op, result: Result | StoreError) -> kv_pb2.Result:
    """Return the complete result of one operation as a message. Batches and rare operations use this form."""
    if result.__class__ is int and op.code in VERSIONED:
        return kv_pb2.Result(version=result)
    if isinstance(result, StoreError):
        return kv_pb2.Result(failure=failure(result, []))
    if result is None:
        return kv_pb2.Result()
    match op:
        case Get():
            return kv_pb2.Result(version=result[1], record=record_message(result))
        case Meta():
            length, version, created, written_ms, expires_ms = result
            record = kv_pb2.Record(version=version, created=created, written_ms=written_ms, expires_ms=expires_ms)
            return kv_pb2.Result(version=version, integer=length, record=record)
        case Put() if op.flags & Flag.RETURN_OLD:
            applied, version, old = result
            return kv_pb2.Result(version=version, integer=int(applied), record=record_message(old) if old else None)
        case Delete() if op.flags & Flag.RETURN_OLD:
            sequence, old = result
            return kv_pb2.Result(version=sequence, record=record_message(old) if old else None)
        case Increment() | Append():
            return kv_pb2.Result(integer=result[0], version=result[1])
        case Expire() | DeleteRange() | Count():
            return kv_pb2.Result(integer=int(result))
        case Transact():
            results, positions = result
            messages = [result_message(*pair) for pair in zip(op.ops, results, strict=True)]
            return kv_pb2.Result(results=messages, positions=map(position_message, positions))
        case Batch():
            return kv_pb2.Result(results=[result_message(*pair) for pair in zip(op.ops, result, strict=True)])
        case Scan():
            return _page(result[0], next=result[1])
        case Range():
            return _range(op.flags, *result)
        case ScanTokens():
            return _page(result[0], next_token=result[1])
    raise AssertionError(f"no message for the result of {op.code}")


def _range(flags: int, found: Any, next: bytes | None) -> kv_pb2.Result:
    if flags & Flag.COUNT_ONLY:
        return kv_pb2.Result(integer=found, next=next)
    return kv_pb2.Result(keys=found, next=next) if flags & Flag.BARE else _page(found, next=next)


def _page(
    items: list[tuple[bytes, Record]], *, next: bytes | None = None, next_token: int | None = None
) -> kv_pb2.Result:
    keys, records = [key for key, _ in items], [record_message(record) for _, record in items]
    return kv_pb2.Result(keys=keys, records=records, next=next, next_token=next_token)
