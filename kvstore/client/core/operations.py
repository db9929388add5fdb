"""Builds and checks the clients' operations, and decodes their answers. Decides only."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import repeat
from typing import Any, NamedTuple, TypeVar

from kvstore.client.core.config import SECONDS_MAX
from kvstore.client.core.operation import CHECK, DELETE, GET, META, OPERATION_BYTES, PUT, ClientOperation, operation
from kvstore.client.core.values import Item, Level, Meta, Replaced
from kvstore.errors import InvalidRequest, StoreError
from kvstore.limits import (
    BATCH_BYTES_MAX,
    BATCH_OPS_MAX,
    KEY_BYTES_MAX,
    VALUE_BYTES_MAX,
    check_transaction_keys,
)
from kvstore.proto import kv_pb2
from kvstore.rpc.status import restore

K = TypeVar("K")
V = TypeVar("V")

_APPLIES_NOTHING = frozenset((GET, META, CHECK))
TTL_S_MAX = 1 << 52
"""Maximum time to live in seconds: 142 million years. In milliseconds it fits into 64 bits."""


# ── what is asked ────────────────────────────────────────────────────────────────────────────────────────────────────


def get(key: bytes, level: int = Level.LINEARIZABLE) -> ClientOperation:
    if key.__class__ is not bytes:
        key = as_bytes(key)
    if level and level.__class__ is not Level:
        level = as_level(level)
    length = len(key)
    if not 0 < length <= KEY_BYTES_MAX:
        check(key)
    return ClientOperation(GET, key, length + OPERATION_BYTES, True, b"", None, level)


def meta(key: bytes, level: int = Level.LINEARIZABLE) -> ClientOperation:
    key, _ = check(key)
    return operation(META, key, level=as_level(level))


def put(
    key: bytes,
    value: bytes,
    *,
    ttl_s: float | None = None,
    if_absent: bool = False,
    if_present: bool = False,
    if_version: int | None = None,
    keep_ttl: bool = False,
    return_old: bool = False,
) -> ClientOperation:
    if key.__class__ is not bytes or value.__class__ is not bytes:
        key, value = as_bytes(key), as_bytes(value)
    length, size = len(key), len(value)
    if not 0 < length <= KEY_BYTES_MAX or size > VALUE_BYTES_MAX:
        check(key, value)
    flags = kv_pb2.RETURN_OLD * return_old
    if if_absent or if_present or keep_ttl:
        check_bools(if_absent=if_absent, if_present=if_present, keep_ttl=keep_ttl)
        flags |= kv_pb2.IF_ABSENT * if_absent | kv_pb2.IF_PRESENT * if_present | kv_pb2.KEEP_TTL * keep_ttl
    options = None
    if flags or ttl_s is not None or if_version is not None:
        options = options_or_none(flags, ttl_s=ttl_s, if_version=if_version)
    return ClientOperation(PUT, key, length + size + OPERATION_BYTES, False, value, options)


def put_until(key: bytes, value: bytes, expires_ms: int, *, if_absent: bool) -> ClientOperation:
    """Return a put of a value that expires at a time of the store's clock."""
    key, value = check(key, value)
    options = kv_pb2.Options(expires_ms=expires_ms, flags=kv_pb2.IF_ABSENT * if_absent)
    return operation(PUT, key, value, options)


def delete(key: bytes, *, if_version: int | None = None, return_old: bool = False) -> ClientOperation:
    key, _ = check(key)
    return operation(DELETE, key, options=options_or_none(kv_pb2.RETURN_OLD * return_old, if_version=if_version))


def condition(key: bytes, *, version: int | None = None, present: bool | None = None) -> ClientOperation:
    """Return a condition of a batch. Raises InvalidRequest unless exactly one of the two is given."""
    key, _ = check(key)
    if (version is None) == (present is None):
        raise InvalidRequest(
            f"expected either a version or whether the key is present, got version={version}, present={present}"
        )
    if present is not None:
        check_bools(present=present)
    flags = 0 if present is None else kv_pb2.IF_PRESENT if present else kv_pb2.IF_ABSENT
    return operation(CHECK, key, options=options_or_none(flags, if_version=version))


def increment(key: bytes, delta: int = 1) -> ClientOperation:
    key, _ = check(key)
    if not isinstance(delta, int) or isinstance(delta, bool) or not -(1 << 63) <= delta < 1 << 63:
        raise InvalidRequest(f"expected delta to be an integer of 64 bits, got {delta!r}")
    return operation(kv_pb2.INCREMENT, key, options=kv_pb2.Options(delta=delta))


def append(key: bytes, suffix: bytes) -> ClientOperation:
    key, suffix = check(key, suffix)
    return operation(kv_pb2.APPEND, key, suffix)


def expire(key: bytes, ttl_s: float | None) -> ClientOperation:
    """Return an operation that sets the expiry of a key, or removes it if `ttl_s` is None."""
    key, _ = check(key)
    return operation(kv_pb2.EXPIRE, key, options=options_or_none(0, ttl_s=ttl_s))


def scan(partition: str, start: bytes, end: bytes, limit: int, level: int, *, flags: int = 0) -> ClientOperation:
    """Return a read of a page of one partition. Flags that only RANGE supports use a RANGE, which older servers refuse;
    in a SCAN they would ignore them."""
    options = kv_pb2.Options(limit=limit, flags=flags)
    code = kv_pb2.RANGE if flags & ~kv_pb2.KEYS_ONLY else kv_pb2.SCAN
    page = operation(code, start, end, options, as_level(level))
    page.partition = partition
    return page


def count(partition: str, level: int) -> ClientOperation:
    combined = operation(kv_pb2.COUNT, b"", level=as_level(level))
    combined.partition = partition
    return combined


def batch(operations: Sequence[ClientOperation]) -> ClientOperation:
    """Return an atomic batch. Raises InvalidRequest if it is empty or too large: an oversized message would end its
    connection and all operations in flight there."""
    if not operations:
        raise InvalidRequest("expected at least one operation in a batch, got none")
    return _combined(kv_pb2.BATCH, operations[0].key, operations, "batch")


def transact(operations: Sequence[ClientOperation], partition_of: Callable[[bytes], str]) -> ClientOperation:
    """Return a transaction. Raises InvalidRequest if it is too large. Servers check the limits of keys and partitions
    too, by their own ring."""
    check_transaction_keys((each.key for each in operations), partition_of)
    written = next((each.key for each in operations if each.code not in _APPLIES_NOTHING), None)
    combined = _combined(kv_pb2.TRANSACT, written or operations[0].key, operations, "transaction")
    combined.is_read = written is None
    return combined


def _combined(code: int, key: bytes, operations: Sequence[ClientOperation], name: str) -> ClientOperation:
    if len(operations) > BATCH_OPS_MAX:
        raise InvalidRequest(
            f"expected at most {BATCH_OPS_MAX} operations in a {name}, got {len(operations)}; split the {name}"
        )
    size = sum(len(each.key) + len(each.value) for each in operations)
    if size > BATCH_BYTES_MAX:
        raise InvalidRequest(f"expected at most {BATCH_BYTES_MAX} bytes in a {name}, got {size}; split the {name}")
    parts = [
        kv_pb2.Operation(code=each.code, key=each.key, value=each.value, options=each.options)  # type: ignore[arg-type]
        for each in operations
    ]
    combined = operation(code, key, options=kv_pb2.Options(operations=parts))
    combined.size = size + OPERATION_BYTES * len(operations)
    return combined


def names_its_partition(operation: ClientOperation) -> bool:
    """Return True if the operation is for one partition whatever its key."""
    return operation.code in (kv_pb2.SCAN, kv_pb2.RANGE, kv_pb2.SCAN_TOKENS, kv_pb2.COUNT)


def options_or_none(flags: int, *, ttl_s: float | None = None, if_version: int | None = None) -> kv_pb2.Options | None:
    """Return None if there are no options, which is cheap."""
    if not flags and ttl_s is None and if_version is None:
        return None
    conditions = {"if_absent": flags & kv_pb2.IF_ABSENT, "if_present": flags & kv_pb2.IF_PRESENT}
    _check_exclusive(conditions | {"if_version": if_version is not None})
    _check_exclusive({"keep_ttl": flags & kv_pb2.KEEP_TTL, "ttl_s": ttl_s is not None})
    options = kv_pb2.Options()
    if ttl_s is not None:
        if not isinstance(ttl_s, int | float) or not 0 < ttl_s < TTL_S_MAX:
            raise InvalidRequest(f"expected ttl_s to be more than 0 and less than {TTL_S_MAX} seconds, got {ttl_s!r}")
        options.expires_ms = max(1, round(ttl_s * 1000))
        flags |= kv_pb2.RELATIVE_TTL
    if if_version is not None:
        if not isinstance(if_version, int) or not 0 <= if_version < 1 << 63:
            raise InvalidRequest(f"expected a version from 0 to {(1 << 63) - 1}, got {if_version!r}")
        options.version = if_version
        flags |= kv_pb2.IF_VERSION
    options.flags = flags
    return options


def _check_exclusive(given: Mapping[str, object]) -> None:
    """Raise InvalidRequest if more than one of the arguments is given. Servers refuse it too, with their own names."""
    names = [name for name, is_given in given.items() if is_given]
    if len(names) > 1:
        raise InvalidRequest(f"expected at most one of {', '.join(given)}, got {' and '.join(names)}")


def check(key: bytes, value: bytes = b"") -> tuple[bytes, bytes]:
    """Return key and value as they are sent. Raises InvalidRequest if no server would accept them."""
    key, value = as_bytes(key), as_bytes(value)
    if not 0 < len(key) <= KEY_BYTES_MAX:
        raise InvalidRequest(f"expected a key of 1 to {KEY_BYTES_MAX} bytes, got {len(key)}")
    if len(value) > VALUE_BYTES_MAX:
        raise InvalidRequest(f"expected a value of at most {VALUE_BYTES_MAX} bytes, got {len(value)}")
    return key, value


def as_level(given: int) -> Level:
    """Return a Level. Raises InvalidRequest if there is no such level."""
    try:
        return Level(given)
    except ValueError:
        raise InvalidRequest(f"expected a Level, for example Level.STALE, got {given!r}") from None


def as_limit(given: int) -> int:
    """Return the maximum number of keys, 0 for all. Raises InvalidRequest for anything but a whole number from 0 on."""
    if isinstance(given, int) and given >= 0:
        return given
    raise InvalidRequest(f"expected a limit of 0 (none) or more, got {type(given).__name__} {given!r:.80}")


def as_mapping(name: str, given: Mapping[K, V], content: str) -> Mapping[K, V]:
    """Return a mapping. Raises InvalidRequest for anything else, naming the argument and what it maps."""
    if isinstance(given, Mapping):
        return given
    raise InvalidRequest(f"expected {name} to be a mapping of {content}, got {type(given).__name__} {given!r:.80}")


def distinct(keys: Iterable[Any]) -> list[bytes]:
    """Return the keys without repetitions. Raises InvalidRequest for a single key, and for what has no keys."""
    if not isinstance(keys, bytes | str):
        try:
            return list(dict.fromkeys(keys))
        except TypeError:
            pass
    raise InvalidRequest(f"expected keys to be an iterable of bytes, got {type(keys).__name__} {keys!r:.80}")


def check_bools(**given: bool) -> None:
    """Raise InvalidRequest if an argument is not a bool: a number would set other flags."""
    for name, value in given.items():
        if not isinstance(value, bool):
            raise InvalidRequest(f"expected {name} to be True or False, got {type(value).__name__} {value!r:.80}")


def as_seconds(given: float) -> float:
    """Return the maximum time of an operation. Raises InvalidRequest for a time that leaves the operation none, or to
    which no timer can be set."""
    if isinstance(given, int | float) and 0 < given <= SECONDS_MAX:
        return given
    raise InvalidRequest(f"expected timeout_s to be more than 0 and at most {SECONDS_MAX:g}, got {given!r}")


def as_bytes(given: bytes | bytearray | memoryview) -> bytes:
    """Return immutable bytes. Raises InvalidRequest for text and the like: detected only when the frame is made, or by
    the server, it would fail all other operations of the frame."""
    if isinstance(given, bytes | bytearray | memoryview):
        return bytes(given)
    raise InvalidRequest(f"expected a key, value or name as bytes, got {type(given).__name__} {given!r:.80}; encode it")


# ── what is answered ─────────────────────────────────────────────────────────────────────────────────────────────────


def decode(operation: ClientOperation, answer: Any) -> Any:
    """Return the result of an operation. `answer` is a number, an Item, None, or a Result message."""
    if answer.__class__ is not kv_pb2.Result:
        return answer
    return _DECODE[operation.code](answer)


def decode_batch(operations: Sequence[ClientOperation], answer: kv_pb2.Result) -> list[Any]:
    """Return the results of a batch's operations, in order."""
    return [_decode_part(each, part) for each, part in zip(operations, answer.results, strict=True)]


def positions_of(answer: kv_pb2.Result) -> dict[str, int]:
    """Return the position of a transaction in each partition, as a session token."""
    return {each.partition: each.sequence for each in answer.positions}


def _decode_part(operation: ClientOperation, part: kv_pb2.Result) -> Any:
    if part.HasField("failure"):
        return restore(part.failure.reason, part.failure.message, part.failure.metadata)
    if operation.options is not None and operation.options.flags & kv_pb2.RETURN_OLD:
        return _DECODE[operation.code](part)
    if operation.code in (PUT, DELETE, CHECK):
        return part.version
    return _DECODE[operation.code](part)


def item_or_none(message: Any) -> Item | None:
    """Return the item of a message that may have a record."""
    return item_of(message.record) if message.HasField("record") else None


def item_of(record: kv_pb2.Record) -> Item:
    return Item(record.value, record.version, record.created, record.written_ms, record.expires_ms)


def _meta_or_none(answer: kv_pb2.Result) -> Meta | None:
    if not answer.HasField("record"):
        return None
    record = answer.record
    return Meta(answer.integer, record.version, record.created, record.written_ms, record.expires_ms)


class Part(NamedTuple):
    """One partition's part of the answer about a range."""

    items: list[tuple[bytes, Any]]
    """Keys with their items; None instead of an item if only keys were requested."""
    next: bytes | None
    number: int
    """Number of keys, if only that was requested."""


def _part(answer: kv_pb2.Result) -> Part:
    found: Iterable[Item | None] = map(item_of, answer.records) if answer.records else repeat(None, len(answer.keys))
    following = answer.next if answer.HasField("next") else None
    return Part(list(zip(answer.keys, found, strict=True)), following, answer.integer)


_DECODE: dict[int, Callable[[kv_pb2.Result], Any]] = {
    GET: item_or_none,
    META: _meta_or_none,
    PUT: lambda answer: Replaced(bool(answer.integer), answer.version, item_or_none(answer)),
    DELETE: item_or_none,
    kv_pb2.INCREMENT: lambda answer: answer.integer,
    kv_pb2.APPEND: lambda answer: answer.integer,
    kv_pb2.EXPIRE: lambda answer: bool(answer.integer),
    kv_pb2.DELETE_RANGE: lambda answer: answer.integer,
    kv_pb2.COUNT: lambda answer: answer.integer,
    kv_pb2.BATCH: lambda answer: answer,
    kv_pb2.TRANSACT: lambda answer: answer,
    kv_pb2.SCAN: _part,
    kv_pb2.RANGE: _part,
}


def failures_of(answers: kv_pb2.Answers) -> list[tuple[StoreError, Sequence[int]]]:
    """Return each error with the numbers of the operations that it ended."""
    return [(restore(each.reason, each.message, each.metadata), each.numbers) for each in answers.failures]
