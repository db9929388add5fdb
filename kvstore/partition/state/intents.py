"""Intents: what a transaction over several partitions will do to the keys of a partition that is not its home, or what
it has only read there. Decides only (docs/protocol.md, Transactions).

An INTENT record contains the finished effect on its key, so that RESOLVED needs no reading. Intents are rows of the
engine; an index of the intents on owned keys is in memory.

The bytes of records are MessagePack: an array of the fields in the order given here. DO NOT CHANGE the order. New
fields come last, have a default, and must be safe to ignore for readers that do not know them (docs/protocol.md V5).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from enum import IntEnum
from typing import Any, NamedTuple, TypeVar

import msgspec

from kvstore.errors import Corrupted, WrittenByNewer
from kvstore.partition.state.internal import Attempt
from kvstore.partition.state.tokens import Tokens, TokenSpan
from kvstore.proto.arrays import ArrayDecoder
from kvstore.ring.hashing import KeyHash

INTENTS_MAX = 4096
"""Maximum number of intents of a partition. Further PREPAREs are refused with Overloaded."""
INTENTS_BYTES_MAX = 32 << 20
"""Maximum bytes of all intents of a partition, because the index is in memory. Further PREPAREs are refused with
Overloaded."""
_FORMAT = 1
_OVERHEAD_BYTES = 512
"""Approximate bytes that an intent takes in memory besides its keys and its value."""


class IntentEffect(IntEnum):
    """Effect of a committed intent on its key. DO NOT CHANGE: these numbers are in the log."""

    NONE = 0
    """Nothing: the transaction only read or checked the key, or its writes change nothing."""
    PUT = 1
    """Write the value: overwrite the record that `created` names, or create the key if `created` is 0."""
    DELETE = 2
    RECREATE = 3
    """Delete the record, then create the key again with the value."""

    @property
    def mutations(self) -> int:
        """Number of mutations that carry out the effect."""
        return _MUTATIONS[self]


_MUTATIONS = {IntentEffect.NONE: 0, IntentEffect.PUT: 1, IntentEffect.DELETE: 1, IntentEffect.RECREATE: 2}


# docs/protocol.md Tx4
class IntentRecord(NamedTuple):
    """The contents of an INTENT mutation. The mutation's key is the key of the intent."""

    attempt: Attempt
    home: bytes
    """The transaction's home key. The owner of its token knows whether the transaction is committed."""
    is_exclusive: bool
    """True if the transaction writes the key. False if it only reads or checks the key."""
    written_ms: int
    """Record time of the INTENT, in ms since 1970."""
    parts: int = 0
    """Number of different keys that the transaction writes, in all partitions."""
    effect: int = 0
    """An IntentEffect."""
    value: bytes = b""
    created: int = 0
    """The sequence that created the record that a PUT overwrites; 0 if the key is absent."""
    expires_ms: int = 0
    """Expiry of the new record; 0 means never."""
    replaced_ms: int = 0
    """Expiry of the record that is overwritten or deleted; 0 if it has none."""


class IntentName(NamedTuple):
    """An intent's key and the sequence of its INTENT mutation. Together they name the intent for good, because
    sequences rise along the owners of a key (docs/protocol.md M9)."""

    key: bytes
    seq: int


class Intent(NamedTuple):
    """An intent on a key."""

    key: bytes
    seq: int
    """The sequence of the INTENT mutation."""
    record: IntentRecord

    @property
    def name(self) -> IntentName:
        return IntentName(self.key, self.seq)

    @property
    def attempt(self) -> Attempt:
        return self.record.attempt

    @property
    def home(self) -> bytes:
        """The transaction's home key."""
        return self.record.home

    @property
    def is_exclusive(self) -> bool:
        """True if the transaction writes the key."""
        return self.record.is_exclusive

    @property
    def size_bytes(self) -> int:
        """Approximate bytes that the intent takes in memory."""
        return len(self.key) + len(self.record.home) + len(self.record.value) + _OVERHEAD_BYTES


# docs/protocol.md Tx7
class ResolvedRecord(NamedTuple):
    """The contents of a RESOLVED mutation, which removes an intent. If the intent is committed, the mutations that it
    asks for follow directly: none, a DELETE, a put, or a DELETE and a put."""

    attempt: Attempt
    seq: int
    """The sequence of the intent."""
    is_committed: bool
    parts: int = 0
    """If the mutation commits an exclusive intent, the number of keys that the transaction writes. Otherwise 0."""
    mutations: int = 0
    """Number of the mutations that follow."""


_encode = msgspec.msgpack.Encoder().encode
_intents, _resolved = ArrayDecoder(IntentRecord), ArrayDecoder(ResolvedRecord)
_Record = TypeVar("_Record")


def encode(record: tuple[Any, ...]) -> bytes:
    """Encode the contents of a mutation of a transaction."""
    return _encode(record)


def decode_with(decoder: ArrayDecoder[_Record], data: bytes) -> _Record:
    """Decode the contents of a mutation of a transaction. Raises Corrupted."""
    try:
        return decoder.decode(data)
    except (msgspec.DecodeError, TypeError) as error:
        raise Corrupted(f"cannot read record {data[:32].hex()} of a transaction: {error}") from error


def intent_of(key: bytes, seq: int, data: bytes) -> Intent:
    """Return the intent of an INTENT mutation. Raises Corrupted."""
    return Intent(key, seq, decode_with(_intents, data))


def resolved_of(data: bytes) -> ResolvedRecord:
    """Decode the contents of a RESOLVED mutation. Raises Corrupted."""
    return decode_with(_resolved, data)


def encode_row(record: bytes) -> bytes:
    """Return the engine row of an intent or a decision, from the contents of its mutation."""
    return bytes((_FORMAT,)) + record


def record_of_row(row: bytes) -> bytes:
    """Return the contents of the mutation that wrote the row of an intent or a decision. Raises WrittenByNewer for an
    unknown format."""
    if row[:1] != bytes((_FORMAT,)):
        raise WrittenByNewer(f"expected a transaction's row in format {_FORMAT}, got format {row[:1].hex()}")
    return row[1:]


class Intents:
    """The intents on the owned keys of a partition. `by_key` and `exclusive` are empty while no transaction is under
    way, so testing one of them costs next to nothing."""

    def __init__(self, intents: Iterable[Intent] = ()) -> None:
        self.by_key: dict[bytes, dict[int, Intent]] = {}
        """Key → sequence → intent. Several intents may share a key if none of them is exclusive."""
        self.by_attempt: dict[Attempt, dict[IntentName, Intent]] = {}
        self.exclusive: dict[bytes, Intent] = {}
        """Key → its exclusive intent."""
        self.size_bytes = 0
        """Approximate bytes that the intents take in memory."""
        self._count = 0
        for each in intents:
            self.add(each)

    def __len__(self) -> int:
        return self._count

    def __iter__(self) -> Iterator[Intent]:
        """Iterate over all intents. The order is the order in which their keys got their first intent."""
        return (intent for of_key in self.by_key.values() for intent in of_key.values())

    @property
    def is_full(self) -> bool:
        """True if the partition has as many intents, or as many bytes of intents, as it may have."""
        return self._count >= INTENTS_MAX or self.size_bytes >= INTENTS_BYTES_MAX

    def at(self, key: bytes) -> Sequence[Intent]:
        """Return the intents on the key."""
        found = self.by_key.get(key)
        return tuple(found.values()) if found else ()

    def find(self, key: bytes, seq: int) -> Intent | None:
        """Return the intent of this name, or None."""
        found = self.by_key.get(key)
        return found.get(seq) if found else None

    def of(self, attempt: Attempt) -> Sequence[Intent]:
        """Return the intents of the attempt."""
        return tuple(self.by_attempt.get(attempt, {}).values())

    def exclusive_between(self, hash: KeyHash, start: bytes, end: bytes, tokens: Tokens | None = None) -> list[Intent]:
        """Return the exclusive intents on keys in [start, end). An empty `end` means up to the last key. If `tokens` is
        given, only keys with these tokens count."""
        return [
            intent
            for key, intent in self.exclusive.items()
            if start <= key and (not end or key < end) and (tokens is None or tokens.holds(hash.token_of(key)))
        ]

    def within(self, hash: KeyHash, span: TokenSpan) -> list[Intent]:
        """Return the intents on keys with tokens in `span`."""
        return [
            intent
            for key, of_key in self.by_key.items()
            if span.holds(hash.token_of(key))
            for intent in of_key.values()
        ]

    def add(self, intent: Intent) -> None:
        """Add an intent. Does nothing if the intent is known."""
        of_key = self.by_key.setdefault(intent.key, {})
        if intent.seq in of_key:
            return
        of_key[intent.seq] = intent
        self.by_attempt.setdefault(intent.attempt, {})[intent.name] = intent
        self.size_bytes += intent.size_bytes
        self._count += 1
        if intent.is_exclusive:
            self.exclusive[intent.key] = intent

    def remove(self, key: bytes, seq: int) -> Intent | None:
        """Remove an intent and return it. Returns None if there is no intent of this name."""
        of_key = self.by_key.get(key)
        intent = of_key.pop(seq, None) if of_key else None
        if intent is None or of_key is None:
            return None
        if not of_key:
            del self.by_key[key]
        of_attempt = self.by_attempt[intent.attempt]
        del of_attempt[intent.name]
        if not of_attempt:
            del self.by_attempt[intent.attempt]
        self.size_bytes -= intent.size_bytes
        self._count -= 1
        if self.exclusive.get(key) is intent:
            del self.exclusive[key]
        return intent
