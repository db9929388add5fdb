"""The rules about operations, and what each endpoint answers to a request that breaks one.

Each cell is a request as its users write it, and the answer. tests/cluster/rules/test_rules.py sends every request to a
real cluster; `make reference` writes docs/reference/rules.md from this table.

A request may name bytes by their number, as `<4,097 bytes>`. Requests of Python are calls of a client, and those of
gRPC are calls of the service `kvstore.v1.KV`. An HTTP request is a method, a target, headers and a body, divided by
` | `. A request of Spark is the query whose rows are appended, or the options of a read.
"""

from __future__ import annotations

from typing import NamedTuple

ENDPOINTS = ("redis", "grpc", "http", "python", "spark", "command")
"""`python` stands for AsyncClient and Client; the test uses both."""


class Ask(NamedTuple):
    """A request and its answer."""

    request: str
    answer: str


class Rule(NamedTuple):
    """A rule that operations must keep. An endpoint without a cell cannot express such a request."""

    rule: str
    redis: Ask | None = None
    grpc: Ask | None = None
    http: Ask | None = None
    python: Ask | None = None
    spark: Ask | None = None
    command: Ask | None = None


INVALID = "INVALID_ARGUMENT"
BAD = "400 INVALID_REQUEST"
NO = "InvalidRequest"
LONG_KEY, LARGE_VALUE = "<4,097 bytes>", "<1,048,577 bytes>"


def python(request: str, answer: str = NO) -> Ask:
    """Return a call of both clients."""
    return Ask(f"client.{request}", answer)


RULES = (
    Rule(
        "A key has at least one byte",
        redis=Ask("SET '' v", "ERR expected a key of at least 1 byte, got an empty key"),
        grpc=Ask('Put(key=b"", value=b"v")', INVALID),
        http=Ask("PUT /v1/keys/ | v", BAD),
        python=python('put(b"", b"v")'),
        spark=Ask("select '' as key, 'v' as value", NO),
        command=Ask("put '' v", "exit code 1"),
    ),
    Rule(
        "A key has at most 4,096 bytes",
        redis=Ask(f"SET {LONG_KEY} v", "ERR expected a key of at most 4096 bytes, got more"),
        grpc=Ask(f'Put(key=b"{LONG_KEY}", value=b"v")', INVALID),
        http=Ask(f"PUT /v1/keys/{LONG_KEY} | v", BAD),
        python=python(f'put(b"{LONG_KEY}", b"v")'),
        spark=Ask("select repeat('k', 4097) as key, 'v' as value", NO),
        command=Ask(f"put {LONG_KEY} v", "exit code 1"),
    ),
    Rule(
        "A value has at most 1 MiB",
        redis=Ask(f"SET k {LARGE_VALUE}", "ERR expected a value of at most 1048576 bytes, got more"),
        grpc=Ask(f'Put(key=b"k", value=b"{LARGE_VALUE}")', INVALID),
        http=Ask(f"PUT /v1/keys/k | {LARGE_VALUE}", "413 INVALID_REQUEST"),
        python=python(f'put(b"k", b"{LARGE_VALUE}")'),
        spark=Ask("select 'k' as key, repeat('v', 1048577) as value", NO),
        command=Ask("put k --file <1,048,577 bytes>", "exit code 1"),
    ),
    Rule(
        "A request has at most 16 MiB over Redis, and 4 MiB over gRPC",
        redis=Ask("MSET <17 pairs of 1 MiB>", "ERR expected a command of at most 16777216 bytes, got more"),
        grpc=Ask('Put(key=b"k", value=b"<4,194,305 bytes>")', "RESOURCE_EXHAUSTED"),
    ),
    Rule(
        "An append leaves a value of at most 1 MiB",
        redis=Ask("APPEND k <1,048,576 bytes>", "ERR expected a value of at most 1048576 bytes, got 1048595"),
        grpc=Ask('Batch(operations=[Operation(code=APPEND, key=b"k", value=b"<1,048,576 bytes>")])', INVALID),
        http=Ask("POST /v1/append/k | <1,048,576 bytes>", BAD),
        python=python('append(b"k", b"<1,048,576 bytes>")'),
    ),
    Rule(
        "Keys and values are bytes",
        python=python('put("k", b"v")'),
        spark=Ask("select 1 as key, 'v' as value", "ConfigError"),
    ),
    Rule(
        "A time to live is more than 0",
        redis=Ask("SET k v PX 0", "ERR invalid expire time in 'set' command"),
        grpc=Ask('Put(key=b"k", value=b"v", flags=RELATIVE_TTL)', INVALID),
        http=Ask("PUT /v1/keys/k?ttl_ms=0 | v", BAD),
        python=python('put(b"k", b"v", ttl_s=0)'),
        command=Ask("put k v --ttl 0", "exit code 2"),
    ),
    Rule(
        "A time to live has an end that fits",
        redis=Ask("SET k v PX 9223372036854775807", "ERR invalid expire time in 'set' command"),
        grpc=Ask('Put(key=b"k", value=b"v", expires_ms=1 << 62, flags=RELATIVE_TTL)', INVALID),
        http=Ask("PUT /v1/keys/k?ttl_ms=4611686018427387904 | v", BAD),
        python=python('put(b"k", b"v", ttl_s=1e300)'),
        command=Ask("put k v --ttl 1e300", "exit code 1"),
    ),
    Rule(
        "A time to live is a number",
        redis=Ask("SET k v PX soon", "ERR value is not an integer or out of range"),
        http=Ask("PUT /v1/keys/k?ttl_ms=soon | v", BAD),
        python=python('put(b"k", b"v", ttl_s="5")'),
        command=Ask("put k v --ttl soon", "exit code 2"),
    ),
    Rule(
        "A put sets an expiry or keeps the old one",
        redis=Ask("SET k v PX 5000 KEEPTTL", "ERR syntax error"),
        grpc=Ask('Put(key=b"k", value=b"v", expires_ms=5000, flags=RELATIVE_TTL | KEEP_TTL)', INVALID),
        http=Ask("PUT /v1/keys/k?ttl_ms=5000&keep_ttl=true | v", BAD),
        python=python('put(b"k", b"v", ttl_s=5, keep_ttl=True)'),
    ),
    Rule(
        "An operation in a batch sets an expiry or keeps the old one",
        grpc=Ask(
            'Batch(operations=[Operation(code=PUT, key=b"k", options=Options(expires_ms=5000, flags=KEEP_TTL))])',
            INVALID,
        ),
        http=Ask(
            'POST /v1/batch | Content-Type: application/json | {"operations": [{"operation": "put", "key": "k", '
            '"value": "v", "ttl_ms": 5000, "keep_ttl": true}]}',
            BAD,
        ),
        python=python('batch(Batch().put(b"k", b"v", ttl_s=5, keep_ttl=True))'),
    ),
    Rule(
        "A write has one expiry",
        redis=Ask("SET k v EX 5 PX 5000", "ERR syntax error"),
        http=Ask("PUT /v1/keys/k?ttl_ms=5000&expires_ms=4102444800000 | v", BAD),
    ),
    Rule(
        "A write has one condition: the key is absent, or it is there",
        redis=Ask("SET k v NX XX", "ERR syntax error"),
        grpc=Ask('Put(key=b"k", value=b"v", flags=IF_ABSENT | IF_PRESENT)', INVALID),
        http=Ask("PUT /v1/keys/k | If-Match: * | If-None-Match: * | v", BAD),
        python=python('put(b"k", b"v", if_absent=True, if_present=True)'),
    ),
    Rule(
        "A write has one condition: the key is absent, or it has a version",
        grpc=Ask('Put(key=b"k", value=b"v", flags=IF_ABSENT | IF_VERSION, version=1)', INVALID),
        http=Ask('PUT /v1/keys/k | If-Match: "1" | If-None-Match: * | v', BAD),
        python=python('put(b"k", b"v", if_absent=True, if_version=1)'),
        command=Ask("put k v --if-absent --if-version 1", "exit code 1"),
    ),
    Rule(
        "An operation in a batch has one condition",
        grpc=Ask(
            'Batch(operations=[Operation(code=CHECK, key=b"k", options=Options(flags=IF_ABSENT | IF_PRESENT))])',
            INVALID,
        ),
        http=Ask(
            'POST /v1/batch | Content-Type: application/json | {"operations": ['
            '{"operation": "check", "key": "k", "if_absent": true, '
            '"if_present": true}]}',
            BAD,
        ),
        python=python('batch(Batch().put(b"k", b"v", if_absent=True, if_present=True))'),
    ),
    Rule(
        "A version stands beside the condition that names it",
        grpc=Ask('Put(key=b"k", value=b"v", version=1)', INVALID),
    ),
    Rule(
        "An increment has no condition and no expiry",
        grpc=Ask(
            'Batch(operations=[Operation(code=INCREMENT, key=b"n", options=Options(delta=1, flags=IF_ABSENT))])',
            INVALID,
        ),
        http=Ask("POST /v1/increment/n | If-None-Match: *", BAD),
        python=python('increment(b"n", if_absent=True)', "TypeError"),
    ),
    Rule(
        "A version is a number from 0 on",
        http=Ask("PUT /v1/keys/k | If-Match: one | v", BAD),
        python=python('put(b"k", b"v", if_version=-1)'),
        command=Ask("put k v --if-version -1", "exit code 2"),
    ),
    Rule(
        "A condition that is not met changes nothing",
        redis=Ask("SET k v NX", "nil"),
        grpc=Ask('Put(key=b"k", value=b"v", flags=IF_ABSENT)', "ABORTED"),
        http=Ask("PUT /v1/keys/k | If-None-Match: * | v", "412 CONDITION_FAILED"),
        python=python('put(b"k", b"v", if_absent=True)', "ConditionFailed"),
        command=Ask("put k v --if-absent", "exit code 1"),
    ),
    Rule(
        "An expiry changes under conditions that can be met together",
        redis=Ask("PEXPIRE k 5000 NX GT", "ERR NX and XX, GT or LT options at the same time are not compatible"),
        grpc=Ask(
            'Batch(operations=[Operation(code=EXPIRE, key=b"k", options=Options(expires_ms=5000, '
            "flags=RELATIVE_TTL | IF_NO_TTL | IF_LONGER))])",
            INVALID,
        ),
    ),
    Rule(
        "An operation has no option that it does not honour",
        redis=Ask("SET k v MAYBE", "ERR syntax error"),
        grpc=Ask('Delete(key=b"k", flags=KEEP_TTL)', INVALID),
        http=Ask("PUT /v1/keys/k?ttl=5 | v", BAD),
        python=python('delete(b"k", keep_ttl=True)', "TypeError"),
        spark=Ask("bogus=1", "ConfigError"),
        command=Ask("put k v --bogus", "exit code 2"),
    ),
    Rule(
        "An increment finds a decimal number of 64 bits",
        redis=Ask("INCRBY k 1", "ERR value is not an integer or out of range"),
        grpc=Ask('Batch(operations=[Operation(code=INCREMENT, key=b"k", options=Options(delta=1))])', INVALID),
        http=Ask("POST /v1/increment/k", BAD),
        python=python('increment(b"k")'),
    ),
    Rule(
        "The amount of an increment has 64 bits",
        redis=Ask("INCRBY k 9223372036854775808", "ERR value is not an integer or out of range"),
        http=Ask("POST /v1/increment/k?delta=9223372036854775808", BAD),
        python=python('increment(b"k", 1 << 63)'),
    ),
    Rule(
        "A batch has at least one operation",
        grpc=Ask("Batch(operations=[])", INVALID),
        http=Ask('POST /v1/batch | Content-Type: application/json | {"operations": []}', BAD),
        python=python("batch(Batch())"),
    ),
    Rule(
        "A batch has at most 10,000 operations",
        grpc=Ask('Batch(operations=[Operation(code=GET, key=b"k")] * 10_001)', INVALID),
        http=Ask('POST /v1/batch | Content-Type: application/json | {"operations": [<10,001 gets>]}', BAD),
        python=python("batch(many(Batch(), 10_001))"),
    ),
    Rule(
        "A batch has at most 1 MiB of keys and values",
        redis=Ask(
            "MULTI; SET k <1,048,576 bytes>; EXEC",
            "ERR expected at most 1048576 bytes of keys and values in a transaction, got 1048577",
        ),
        grpc=Ask('Batch(operations=[Operation(code=PUT, key=b"k", value=b"<1,048,576 bytes>")])', INVALID),
        http=Ask(
            'POST /v1/batch | Content-Type: application/json | {"operations": ['
            '{"operation": "put", "key": "k", "value": "<1,048,576 bytes>"}]}',
            BAD,
        ),
        python=python('batch(Batch().put(b"k", b"<1,048,576 bytes>"))'),
    ),
    Rule(
        "The keys of a batch are of one partition",
        redis=Ask("MULTI; SET k v; SET <key elsewhere> v; EXEC", "CROSSSLOT"),
        grpc=Ask(
            'Batch(operations=[Operation(code=PUT, key=b"k"), Operation(code=PUT, key=b"<key elsewhere>")])', INVALID
        ),
        http=Ask(
            'POST /v1/batch | Content-Type: application/json | {"operations": ['
            '{"operation": "put", "key": "k", "value": "v"}, '
            '{"operation": "put", "key": "<key elsewhere>", "value": "v"}]}',
            BAD,
        ),
        python=python('batch(Batch().put(b"k", b"v").put(b"<key elsewhere>", b"v"))'),
    ),
    Rule(
        "A range is a prefix, or has bounds",
        grpc=Ask('Page(prefix=b"k", start=b"a")', INVALID),
        http=Ask("GET /v1/keys?prefix=k&start=a", BAD),
        python=python('page(prefix=b"k", start=b"a")'),
        spark=Ask("start=b, end=a", "ConfigError"),
        command=Ask("scan --prefix k --start a", "exit code 1"),
    ),
    Rule(
        "A page has a limit that is no more than its endpoint gives",
        redis=Ask("SCAN 0 COUNT 0", "ERR syntax error"),
        grpc=Ask("Page(limit=10_001)", INVALID),
        http=Ask("GET /v1/keys?limit=1001", BAD),
        python=python("page(limit=10_001)"),
        command=Ask("scan --limit -1", "exit code 2"),
    ),
    Rule(
        "A page token is one that a page gave",
        redis=Ask("SCAN token", "ERR invalid cursor"),
        grpc=Ask('Page(page_token="token")', INVALID),
        http=Ask("GET /v1/keys?cursor=token", BAD),
        python=python('page("token")'),
        command=Ask("scan --token token", "exit code 1"),
    ),
    Rule(
        "A range that is deleted is named",
        http=Ask("DELETE /v1/keys", BAD),
        python=python('delete_prefix(b"")'),
        command=Ask("delete-prefix '' --yes", "exit code 1"),
    ),
    Rule(
        "A read has a level that there is",
        grpc=Ask('Get(key=b"k", level=9)', INVALID),
        http=Ask("GET /v1/keys/k?level=newest", BAD),
        python=python('get(b"k", level=9)'),
        command=Ask("get k --level newest", "exit code 2"),
    ),
    Rule(
        "A time limit is a number that a clock can be set to",
        http=Ask("GET /v1/keys/k?timeout_ms=soon", BAD),
        python=python('get(b"k", timeout_s=float("inf"))'),
        spark=Ask("timeout=soon", "ConfigError"),
        command=Ask("get k --timeout 0", "exit code 2"),
    ),
    Rule(
        "A watch is of a key, of a prefix or of a range",
        http=Ask("GET /v1/watch?key=k&prefix=k", BAD),
        python=python('watch(b"k", prefix=b"k")'),
    ),
)
