"""The meaning of a partition: operations on a plain dict, one after the other. Slow, obvious, and without a log."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from msgspec.structs import astuple

from kvstore.errors import ConditionFailed, InvalidRequest, StoreError
from kvstore.partition.state.commands import Code, Flag, Op, Record, RequestId
from tests.ring import rings


def token_of(key: bytes) -> int:
    return rings.key_hash.token_of(key)


@dataclass
class Model:
    """A partition's model. `records` also holds expired keys whose delete is not logged yet."""

    records: dict[bytes, Record] = field(default_factory=dict)
    seq: int = 0
    time_ms: int = 0
    done: dict[tuple[bytes, int, bytes], Any] = field(default_factory=dict)
    """Results by client, sequence and key; a model forgets nothing."""

    def copy(self) -> Model:
        return Model(dict(self.records), self.seq, self.time_ms, dict(self.done))

    # ── mutations ─────────────────────────────────────────────────────────────────────────────────────────────────────

    def apply(self, op: Op) -> Any:
        """Return the result of an operation; an error if it is refused."""
        request: RequestId | None = op.request
        if request is None:
            return self._try(op)
        name = (request.client, request.sequence, op.key)
        if name not in self.done:
            before = self.seq
            result = self._try(op)
            if isinstance(result, StoreError):
                return result
            if self.seq == before or op.code == Code.DELETE_RANGE:
                self.seq += 1
            self.done[name] = result
        return self.done[name]

    def _try(self, op: Op) -> Any:
        before = (dict(self.records), self.seq)
        try:
            return getattr(self, "_" + Code(op.code).name.lower())(*astuple(op))
        except StoreError as error:
            if op.ops:
                self.records, self.seq = before
            return error

    def _live(self, key: bytes) -> Record | None:
        record = self.records.get(key)
        if record is not None and 0 < record.expires_ms <= self.time_ms:
            self._remove(key)
            return None
        return record

    def _remove(self, key: bytes) -> int:
        del self.records[key]
        self.seq += 1
        return self.seq

    def _write(self, key: bytes, value: bytes, expires_ms: int) -> int:
        self.seq += 1
        old = self.records.get(key)
        created = self.seq if old is None else old.created
        self.records[key] = Record(value, self.seq, created, self.time_ms, expires_ms)
        return self.seq

    def _condition(self, flags: int, version: int, old: Record | None) -> bool:
        found = old.version if old else 0
        if flags & Flag.IF_ABSENT and old:
            return False
        if flags & Flag.IF_PRESENT and not old:
            return False
        return not (flags & Flag.IF_VERSION and version != found)

    def _put(self, key: bytes, value: bytes, expires_ms: int, flags: int, version: int, _: Any) -> Any:
        old = self._live(key)
        if not self._condition(flags, version, old):
            found = old.version if old else 0
            if flags & Flag.RETURN_OLD:
                return (False, found, old)
            raise ConditionFailed(found)
        if flags & Flag.KEEP_TTL:
            expires_ms = old.expires_ms if old else 0
        elif expires_ms and flags & Flag.RELATIVE_TTL:
            expires_ms += self.time_ms
        if expires_ms and expires_ms <= self.time_ms:
            if old:
                seq = self._remove(key)
            else:
                self.seq += 1
                seq = self.seq
        else:
            seq = self._write(key, value, expires_ms)
        return (True, seq, old) if flags & Flag.RETURN_OLD else seq

    def _delete(self, key: bytes, flags: int, version: int, _: Any) -> Any:
        old = self._live(key)
        if not self._condition(flags, version, old):
            raise ConditionFailed(old.version if old else 0)
        seq = self._remove(key) if old else 0
        return (seq, old) if flags & Flag.RETURN_OLD else seq

    def _increment(self, key: bytes, delta: int, _: Any) -> Any:
        old = self._live(key)
        try:
            number = int(old.value) if old else 0
            if old and b"%d" % number != old.value:
                raise ValueError(old.value)
        except ValueError:
            raise InvalidRequest("value is not an integer or out of range") from None
        number += delta
        if not -(2**63) <= number < 2**63:
            raise InvalidRequest("increment or decrement would overflow")
        return (number, self._write(key, b"%d" % number, old.expires_ms if old else 0))

    def _append(self, key: bytes, suffix: bytes, _: Any) -> Any:
        old = self._live(key)
        value = (old.value if old else b"") + suffix
        return (len(value), self._write(key, value, old.expires_ms if old else 0))

    def _expire(self, key: bytes, expires_ms: int, flags: int, _: Any) -> Any:
        old = self._live(key)
        if old is None:
            return False
        if expires_ms == 0 and not flags & Flag.RELATIVE_TTL:
            if old.expires_ms:
                self._write(key, old.value, 0)
            return bool(old.expires_ms)
        if flags & Flag.RELATIVE_TTL:
            expires_ms += self.time_ms
        never = float("inf")
        current = old.expires_ms or never
        if (
            (flags & Flag.IF_NO_TTL and current != never)
            or (flags & Flag.IF_TTL and current == never)
            or (flags & Flag.IF_LONGER and expires_ms <= current)
            or (flags & Flag.IF_SHORTER and expires_ms >= current)
        ):
            return False
        if expires_ms <= self.time_ms:
            self._remove(key)
        else:
            self._write(key, old.value, expires_ms)
        return True

    def _check(self, key: bytes, flags: int, version: int, _: Any) -> Any:
        old = self._live(key)
        found = old.version if old else 0
        if not self._condition(flags, version, old):
            raise ConditionFailed(found)
        return found

    def _batch(self, _key: bytes, ops: tuple[Op, ...], flags: int, _: Any) -> Any:
        results: list[Any] = []
        for op in ops:
            result = self._try(op)
            if isinstance(result, StoreError) and (not flags & Flag.INDEPENDENT or op.code == Code.CHECK):
                raise result
            results.append(result)
        return results

    def _transact(self, key: bytes, ops: tuple[Op, ...], flags: int, request: Any) -> Any:
        """Return the results. A model is one partition, so positions are not part of the answer."""
        results: list[Any] = []
        for op in ops:
            result = self._try(op)
            if isinstance(result, StoreError) and (not flags & Flag.INDEPENDENT or op.code == Code.CHECK):
                raise ConditionFailed(result.version, op.key) if isinstance(result, ConditionFailed) else result
            results.append(result)
        return results

    def _delete_range(self, start: bytes, end: bytes, _: Any) -> Any:
        keys = sorted(key for key in self.records if key >= start and (not end or key < end))
        live = [key for key in keys if self._live(key)]
        for key in live:
            self._remove(key)
        return len(live)

    def reap(self, keys: Iterable[bytes]) -> None:
        for key in keys:
            self._live(key)

    # ── reads ─────────────────────────────────────────────────────────────────────────────────────────────────────────

    def _get(self, key: bytes, *_: Any) -> Record | None:
        return self._live(key)

    def _meta(self, key: bytes, *_: Any) -> Any:
        record = self._live(key)
        return None if record is None else (len(record.value), *record[1:])

    def visible(self, now_ms: int) -> dict[bytes, Record]:
        """Return what a reader at that time sees."""
        return {key: each for key, each in self.records.items() if not 0 < each.expires_ms <= now_ms}

    def read(self, op: Op, now_ms: int) -> Any:
        """Return the answer to a read. Scans are compared by their contents, without page bounds."""
        visible = self.visible(now_ms)
        match (op.code, *astuple(op)):
            case (Code.GET, key, *_):
                return visible.get(key)
            case (Code.META, key, *_):
                found = visible.get(key)
                return None if found is None else (len(found.value), *found[1:])
            case (Code.COUNT, *_):
                return len(self.records)
            case (Code.SCAN, start, end, limit, *_):
                keys = sorted(key for key in visible if key >= start and (not end or key < end))[:limit]
                return [(key, visible[key]) for key in keys]
            case (Code.RANGE, start, end, limit, flags, *_):
                keys = sorted(
                    (key for key in visible if key >= start and (not end or key < end)),
                    reverse=bool(flags & Flag.REVERSE),
                )[:limit]
                if flags & Flag.COUNT_ONLY:
                    return len(keys)
                return keys if flags & Flag.BARE else [(key, visible[key]) for key in keys]
            case (Code.SCAN_TOKENS, token, _, *_):
                keys = sorted(
                    (key for key in visible if token_of(key) >= token),
                    key=lambda key: (token_of(key), key),
                )
                return [(key, visible[key]) for key in keys]
        raise AssertionError(op)
