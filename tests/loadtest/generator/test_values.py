"""A value shows its key and writer, and that it is complete."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvstore.loadtest.generator.values import BYTES_MIN, Stamp, WrongValue, decode, encode, new_run, run_of, writer_of

GOLDEN = "6c743188c8028500000000000000070000000000000009000161"


@given(
    st.binary(min_size=1, max_size=200),
    st.integers(0, 2**64 - 1),
    st.integers(0, 2**64 - 1),
    st.integers(0, 3_000),
)
def test_written_value_is_read(key: bytes, writer: int, number: int, size: int) -> None:
    value = encode(key, Stamp(writer, number), size)
    assert decode(key, value) == Stamp(writer, number)
    assert len(value) == max(size, BYTES_MIN + len(key))


def test_bytes_are_as_described() -> None:
    assert encode(b"a", Stamp(7, 9), 0).hex() == GOLDEN


def test_writer_names_its_run_and_its_process() -> None:
    run = new_run()
    writers = [writer_of(run, worker) for worker in (0, 1, 65_535)]
    assert len(set(writers)) == 3
    assert {run_of(writer) for writer in writers} == {run} != {run_of(writer_of(new_run(), 0))}
    assert decode(b"a", encode(b"a", Stamp(writers[2], 9), 0)) == Stamp(writers[2], 9)


def test_mebibyte_is_filled() -> None:
    assert len(encode(b"key", Stamp(1, 1), 1 << 20)) == 1 << 20


@pytest.mark.parametrize("at", [0, 3, 6, 7, 15, 24, 26, 40, 99])
def test_each_changed_byte_is_noticed(at: int) -> None:
    value = bytearray(encode(b"key", Stamp(1, 2), 100))
    value[at] ^= 1
    with pytest.raises(WrongValue, match="key"):
        decode(b"key", bytes(value))


@pytest.mark.parametrize("value", [b"", b"lt1", b"something else that is long enough to be one"])
def test_foreign_value_is_detected(value: bytes) -> None:
    with pytest.raises(WrongValue, match="no load test wrote"):
        decode(b"key", value)


def test_value_cut_short_is_noticed() -> None:
    with pytest.raises(WrongValue, match="checksum"):
        decode(b"key", encode(b"key", Stamp(1, 2), 100)[:-1])


def test_another_keys_value_is_noticed() -> None:
    with pytest.raises(WrongValue, match="'other'"):
        decode(b"key", encode(b"other", Stamp(1, 2), 100))
