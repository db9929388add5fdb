"""Options are checked before anything happens; an error names the option, the expected form and the given value."""

import json
from pathlib import Path

import pytest

from kvstore.errors import ConfigError
from kvstore.spark.options import (
    KEYS_MAX,
    KeyRange,
    OnConflict,
    OnNull,
    cluster_of,
    columns_of,
    key_range,
    prefix_range,
    read_options,
    stream_options,
    write_options,
)

KNOWN = ("partition", "key", "value")


def test_cluster_is_named_in_one_way() -> None:
    assert cluster_of({"servers": "a:1,b:2"}, {}).servers == ("a:1", "b:2")
    assert cluster_of({"servers": "kv://a:1"}, {}).servers == ("a:1",)
    assert cluster_of({"dataDir": "data"}, {}).data_dir == "data"
    with pytest.raises(ConfigError, match=r"expected one of the options .*, got servers and dataDir"):
        cluster_of({"servers": "a:1", "dataDir": "data"}, {})
    with pytest.raises(ConfigError, match="no cluster given; set the option servers"):
        cluster_of({}, {})


def test_tls_comes_from_options_or_as_for_commands_from_the_environment() -> None:
    tls = cluster_of({"servers": "a:1", "tlsCa": "/ca"}, {"KVSTORE_TLS_CA": "/other"}).tls
    assert tls is not None
    assert tls.ca == Path("/ca")
    assert cluster_of({"servers": "a:1"}, {"KVSTORE_TLS_CA": "/other"}).tls is not None
    assert cluster_of({"servers": "a:1"}, {}).tls is None


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"servers": "a:b"}, "servers: expected HOST:PORT,..."),
        ({"servers": "a:1", "timeout": "soon"}, "timeout: expected a time like 30s"),
        ({"servers": "a:1", "timeout": "9h"}, "timeout: expected a time like 30s"),
        ({"servers": "a:1", "tlsCert": "/c"}, "expected both or neither"),
    ],
)
def test_wrong_address_is_named(options: dict[str, str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        cluster_of(options, {})


def test_writing_has_defaults_and_uses_the_given_options() -> None:
    assert write_options({}).on_conflict is OnConflict.overwrite
    found = write_options({"onConflict": "KEEP", "batchBytes": "64KiB", "keyColumn": "id"})
    assert (found.on_conflict, found.batch_bytes, found.key_column) == (OnConflict.keep, 65_536, "id")
    assert write_options({"onNull": "delete"}).on_null is OnNull.delete


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"bogus": "1"}, "unknown option 'bogus' for writing; expected one of servers"),
        ({"onConflict": "maybe"}, "onConflict: expected overwrite or keep, got 'maybe'"),
        ({"onNull": ""}, "onNull: expected error or delete"),
        ({"onNull": "delete", "onConflict": "keep"}, "expected onConflict=keep or onNull=delete, got both"),
        ({"batchRows": "0"}, "batchRows: expected a number from 1 to 50000, alone or with KiB"),
        ({"batchBytes": "2MiB"}, "batchBytes: expected a number from 1 to 1048576"),
        ({"path": "/x"}, "expected load\\(\\) or save\\(\\) without a path"),
    ],
)
def test_wrong_option_of_a_write_is_named(options: dict[str, str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        write_options(options)


def test_reading_has_defaults_and_uses_the_given_options() -> None:
    found = read_options({}, KNOWN)
    assert found.columns == KNOWN
    assert found.keys == KeyRange()
    found = read_options({"columns": "value, key", "prefix": "a/", "end": "a/m", "splitBytes": "1mib"}, KNOWN)
    assert found.columns == ("value", "key")
    assert found.keys == KeyRange(b"a/", b"a/m")
    assert found.split_bytes == 1 << 20
    assert (found.exactly, found.partition) == (None, "")
    found = read_options({"keys": '["00ff", "61"]', "keyEncoding": "hex", "partition": "p1"}, KNOWN)
    assert (found.exactly, found.partition) == ({b"\0\xff", b"a"}, "p1")
    assert read_options({"keys": "[]"}, KNOWN).exactly == frozenset()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"columns": "key,vlaue"}, "no column 'vlaue'; expected partition, key, value"),
        ({"columns": "key,key"}, "expected each column once"),
        ({"columns": " ,"}, "columns: expected one or more of partition, key, value"),
        ({"keyEncoding": "hex", "prefix": "xy"}, "prefix: expected hexadecimal digits"),
        ({"keyEncoding": "rot13"}, "keyEncoding: expected utf8 or hex"),
        ({"batchRows": "1"}, "unknown option 'batchRows' for reading"),
        ({"pushfilters": "once"}, "pushFilters does not exist"),
        ({"keys": "user/1"}, "keys: expected a list as JSON"),
        ({"keys": "[1]"}, "keys: expected a list as JSON"),
        ({"keys": '["zz"]', "keyEncoding": "hex"}, "keys: expected hexadecimal digits"),
        (
            {"keys": json.dumps([str(number) for number in range(KEYS_MAX + 1)])},
            "keys: expected at most 10000, got 10001",
        ),
    ],
)
def test_wrong_option_of_a_read_is_named(options: dict[str, str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        read_options(options, KNOWN)


def test_stream_begins_at_the_given_position() -> None:
    assert stream_options({}, KNOWN, KNOWN[:2]).start == "latest"
    assert stream_options({}, KNOWN, KNOWN[:2]).columns == ("partition", "key")
    assert stream_options({"startingPosition": '{"p1": 7}'}, KNOWN, KNOWN).start == {"p1": 7}


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"startingPosition": "yesterday"}, "startingPosition: expected earliest, latest or an offset"),
        ({"startingPosition": "[1]"}, "startingPosition: expected earliest, latest or an offset"),
        ({"startingPosition": ""}, "startingPosition: expected earliest, latest or an offset"),
        ({"maxRowsPerTrigger": "1", "maxBytesPerTrigger": "1"}, "expected maxRowsPerTrigger or"),
        ({"holdName": "a b"}, "holdName: expected 1 to 64 letters"),
        ({"holdTtl": "2d"}, "holdTtl: expected a time like 30s"),
        ({"pinttl": "10s"}, "unknown option 'pinTtl' for reading a stream"),
        ({"keys": "[]"}, "unknown option 'keys' for reading a stream"),
    ],
)
def test_wrong_option_of_a_stream_is_named(options: dict[str, str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        stream_options(options, KNOWN, KNOWN)


def test_before_the_mode_is_known_options_of_reads_and_streams_are_valid() -> None:
    assert columns_of({"pinTtl": "10s", "holdTtl": "10s", "columns": "key"}, KNOWN, KNOWN) == ("key",)
    with pytest.raises(ConfigError, match="unknown option 'onNull' for reading"):
        columns_of({"onNull": "error"}, KNOWN, KNOWN)


def test_keys_may_be_given_as_hexadecimal_digits() -> None:
    assert key_range({"keyEncoding": "hex", "start": "ff00"}) == KeyRange(b"\xff\x00")


@pytest.mark.parametrize(
    ("prefix", "end"), [(b"", b""), (b"a", b"b"), (b"a\xff", b"b"), (b"\xff\xff", b""), (b"a\xfe\xff\xff", b"a\xff")]
)
def test_prefix_is_a_range(prefix: bytes, end: bytes) -> None:
    assert prefix_range(prefix) == KeyRange(prefix, end)


def test_range_that_ends_before_it_starts_is_refused() -> None:
    with pytest.raises(ConfigError, match="start, end: expected start below end, got 'z' and 'a'"):
        key_range({"start": "z", "end": "a"})
    assert key_range({"start": "a", "end": "a"}).is_empty


def test_ranges_intersect() -> None:
    assert KeyRange(b"b", b"") & KeyRange(b"a", b"m") == KeyRange(b"b", b"m")
    assert (KeyRange(b"m", b"") & KeyRange(b"a", b"m")).is_empty
    assert not KeyRange(b"m", b"").is_empty
