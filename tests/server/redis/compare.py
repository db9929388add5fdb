"""Random commands to our Redis port and to a redis-server side by side: `python -m tests.server.redis.compare [seed]`.

Not part of the suite, which needs no redis-server. Prints each difference that is not a declared one.
"""

from __future__ import annotations

import asyncio
import shutil
import sys
import tempfile
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from random import Random
from typing import Any

from kvstore.devcluster.zookeeper import free_port
from tests.server.redis.resp_port import redis_port
from tests.server.redis.script import END, Step, gist
from tests.waiting import PATIENCE_S, wait_until

COMMANDS = 20_000
NAMES_OF_KEYS = [b"a", b"b", b"c", b"n", b"e"]
INTEGERS = [
    b"0", b"1", b"-1", b"10", b"100", b"007", b"-0", b"+5", b" 5", b"5 ", b"1.5", b"1e3", b"", b"x", b"0x10",
    b"9223372036854775807", b"-9223372036854775808", b"9223372036854775808", b"-9223372036854775809",
    b"99999999999999999999", b"9223372036854775", b"9223372036854776", b"-9223372036854775", b"4611686018427387904",
    b"\xd9\xa3", b"1_000", b"00", b"-01",
]  # fmt: skip
VALUES = [*INTEGERS, b"abc", b"hello world", b"\x00\xff\r\n", b"x" * 100]
UNFIT_TIMES = (b"1", b"10", b"100", b"4611686018427387904", b"9223372036854775807", b"9223372036854775")
"""Times that would pass during the comparison, and times between our limit and that of Redis."""
SECONDS = [b"100000", b"500000", b"100000000", *(each for each in INTEGERS if each not in UNFIT_TIMES)]
FAR = b"4102444800"
SLACK = {b"TTL": 2, b"PTTL": 2000}
FAR_AWAY = 2_000_000_000
"""Only EXPIREAT and similar commands set such a time: the remaining time depends on the day."""


class Answer:
    """A reply with its kind."""

    def __init__(self, kind: str, value: Any) -> None:
        self.kind, self.value = kind, value

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Answer) and (self.kind, self.value) == (other.kind, other.value)

    def __repr__(self) -> str:
        return f"{self.kind}{self.value!r}"

    __hash__ = None  # type: ignore[assignment]


class Side:
    """One of the two servers."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader, self.writer = reader, writer

    async def ask(self, words: list[bytes]) -> Answer:
        self.writer.write(b"*%d\r\n" % len(words) + b"".join(b"$%d\r\n%b\r\n" % (len(word), word) for word in words))
        async with asyncio.timeout(PATIENCE_S):
            return await self.read()

    async def read(self) -> Answer:
        line = (await self.reader.readuntil(b"\r\n"))[:-2]
        kind, rest = chr(line[0]), line[1:]
        if kind in "+-:_,#(":
            return Answer(kind, rest)
        if kind in "$=":
            if rest == b"-1":
                return Answer(kind, None)
            return Answer(kind, (await self.reader.readexactly(int(rest) + 2))[:-2])
        if rest == b"-1":
            return Answer(kind, None)
        count = int(rest) * (2 if kind == "%" else 1)
        return Answer(kind, [await self.read() for _ in range(count)])


class Commands:
    """Random commands on a few keys, most of them well-formed."""

    def __init__(self, random: Random) -> None:
        self.random = random

    def next(self) -> list[bytes]:
        words = self.one()
        dice = self.random.random()
        if dice < 0.02:
            words = words[: self.random.randrange(1, len(words) + 1)]
        elif dice < 0.04:
            words = [*words, self.pick([b"x", b"NX", b"10", b"EX"])]
        if self.random.random() < 0.1:
            words[0] = words[0].lower()
        return words

    def pick(self, some: list[Any]) -> Any:
        return some[self.random.randrange(len(some))]

    def key(self) -> bytes:
        return self.pick(NAMES_OF_KEYS)  # type: ignore[no-any-return]

    def one(self) -> list[bytes]:
        key, value = self.key(), self.pick(VALUES)
        name = self.pick(NAMES)
        match name:
            case b"SET":
                return [name, key, value, *self.set_options()]
            case b"SETEX" | b"PSETEX":
                return [name, key, self.pick(SECONDS), value]
            case b"SETNX" | b"GETSET" | b"APPEND":
                return [name, key, value]
            case b"GETRANGE" | b"SUBSTR":
                return [name, key, self.pick(INTEGERS), self.pick(INTEGERS)]
            case b"MGET" | b"DEL" | b"UNLINK" | b"EXISTS":
                return [name, *(self.key() for _ in range(self.random.randrange(1, 4)))]
            case b"MSET":
                return [name, *(each for _ in range(self.random.randrange(1, 3)) for each in (self.key(), value))]
            case b"INCRBY" | b"DECRBY":
                return [name, key, self.pick(INTEGERS)]
            case b"EXPIRE" | b"PEXPIRE" | b"EXPIREAT" | b"PEXPIREAT":
                return [name, key, self.time(name), *self.expire_options()]
            case b"SELECT":
                return [name, self.pick([b"0", b"x", b"00", b"99"])]
            case b"ECHO":
                return [name, value]
            case b"PING":
                return [name, *([value] if self.random.random() < 0.5 else [])]
            case b"SCAN":
                return [name, self.pick([b"0", b"x", b"0 "]), *self.scan_options()]
            case b"KEYS":
                return [name, self.pick([b"a", b"?", b"[ab]", b"[^a]", b"*z", b"a*", b"[a-b]"])]
            case b"TTL" | b"PTTL" | b"GET" | b"GETDEL" | b"STRLEN" | b"TYPE" | b"INCR" | b"DECR" | b"PERSIST":
                return [name, key]
        return [name]

    def time(self, name: bytes) -> bytes:
        if not name.endswith(b"AT") or self.random.random() < 0.3:
            return self.pick(SECONDS)  # type: ignore[no-any-return]
        return FAR if name == b"EXPIREAT" else FAR + b"000"

    def set_options(self) -> list[bytes]:
        words: list[bytes] = []
        while self.random.random() < 0.5:
            option = self.pick([b"NX", b"XX", b"GET", b"KEEPTTL", b"EX", b"PX", b"EXAT", b"PXAT", b"nx", b"BAD"])
            words.append(option)
            if option in (b"EX", b"PX"):
                words.append(self.pick(SECONDS))
            elif option in (b"EXAT", b"PXAT"):
                words.append(self.time(b"EXPIREAT" if option == b"EXAT" else b"PEXPIREAT"))
        return words

    def expire_options(self) -> list[bytes]:
        words: list[bytes] = []
        while self.random.random() < 0.4:
            words.append(self.pick([b"NX", b"XX", b"GT", b"LT", b"gt", b"BAD"]))
        return words

    def scan_options(self) -> list[bytes]:
        words: list[bytes] = []
        while self.random.random() < 0.5:
            option = self.pick([b"MATCH", b"COUNT", b"TYPE", b"BAD"])
            words += [option, self.pick([b"string", b"hash", b"100", b"0", b"-1", b"x", b"a*"])]
        return words


NAMES = [
    *[b"SET"] * 4, b"SETEX", b"PSETEX", b"SETNX", b"GETSET", b"APPEND", b"GETRANGE", b"SUBSTR", b"MGET", b"DEL",
    b"UNLINK", b"EXISTS", b"MSET", b"INCRBY", b"DECRBY", b"EXPIRE", b"PEXPIRE", b"EXPIREAT", b"PEXPIREAT", b"SELECT",
    b"ECHO", b"PING", b"SCAN", b"KEYS", b"TTL", b"PTTL", b"GET", b"GETDEL", b"STRLEN", b"TYPE", b"INCR", b"DECR",
    b"PERSIST", b"DBSIZE", b"MULTI", b"EXEC", b"DISCARD", b"NOSUCH",
]  # fmt: skip


def alike(words: list[bytes], ours: Answer, theirs: Answer) -> bool:
    """Return True if the two replies are equivalent."""
    name = words[0].upper()
    if ours == theirs:
        return True
    if ours.kind == "-" and ours.value.endswith(b"not allowed in transactions"):
        return True  # our transactions have only commands on keys
    if name == b"PING" and ours.kind == "-":
        return True  # Redis checks the number of arguments at EXEC
    if ours.kind == theirs.kind == ":" and name == b"DBSIZE":
        return int(ours.value) <= int(theirs.value)  # it counts keys that were already expired when written
    if ours.kind == theirs.kind == ":" and name in SLACK:
        mine, other = int(ours.value), int(theirs.value)
        return abs(mine - other) <= SLACK[name] and (mine < 0) == (other < 0)
    if ours.kind == theirs.kind == "*" and name in (b"KEYS",) and ours.value is not None and theirs.value is not None:
        return sorted(map(repr, ours.value)) == sorted(map(repr, theirs.value))
    if ours.kind == theirs.kind == "*" and name == b"SCAN":
        return sorted(map(repr, ours.value[1].value)) == sorted(map(repr, theirs.value[1].value))
    if ours.kind == theirs.kind == "*" and name == b"EXEC" and ours.value is not None and theirs.value is not None:
        pairs = zip(ours.value, theirs.value, strict=True)
        return all(one == other or one.kind == other.kind == ":" for one, other in pairs)
    return False


async def same(step: Step, ours: list[bytes], theirs: list[bytes]) -> bool:
    """Return True if the replies to a step of a script are equivalent."""
    if len(ours) != len(theirs):
        return False
    words = step.words
    if not words:
        return ours == theirs
    (mine,), (other,) = ours, theirs
    if END in (mine, other):
        return mine == other
    if step.is_loose:
        return gist(mine) == gist(other)
    one, two = await parsed(mine), await parsed(other)
    if words[0].upper() in (b"TTL", b"PTTL") and one.kind == two.kind == ":" and int(one.value) > FAR_AWAY:
        return int(two.value) > FAR_AWAY  # the time until a date in the next century, seen on two days
    return alike(words, one, two)


async def parsed(data: bytes) -> Answer:
    reader = asyncio.StreamReader()
    reader.feed_data(data)
    return await Side(reader, None).read()  # type: ignore[arg-type]


async def compare(seed: int, count: int, port: int, protocol: int) -> Counter[str]:
    commands = Commands(Random(seed))
    differences: Counter[str] = Counter()
    with tempfile.TemporaryDirectory() as root:
        async with redis_port(Path(root), partitions=1) as resp:
            ours = Side(*await asyncio.open_connection(resp.host, resp.port))
            theirs = Side(*await asyncio.open_connection("127.0.0.1", port))
            await theirs.ask([b"FLUSHALL"])
            for side in (ours, theirs):
                await side.ask([b"HELLO", b"%d" % protocol])
            for _ in range(count):
                words = commands.next()
                if words[0].upper() == b"EXEC" and len(words) > 1:
                    continue  # in Redis, an EXEC with arguments ends the transaction
                mine, other = await ours.ask(words), await theirs.ask(words)
                if not alike(words, mine, other):
                    shape = b" ".join(words[:1] + [w if w.isalpha() else b"." for w in words[2:]]).decode("latin1")
                    what = f"{shape.upper()}: {mine!r:.100} / {other!r:.140}"
                    if not differences[what]:
                        say(f"{words}\n    ours   {mine}\n    theirs {other}")
                    differences[what] += 1
                if not (mine == other or words[0].upper() in SLACK):
                    for side in (ours, theirs):  # the states may differ now as well
                        await side.ask([b"DISCARD"])
                        await side.ask([b"DEL", *NAMES_OF_KEYS])
            for side in (ours, theirs):
                side.writer.close()
    return differences


@asynccontextmanager
async def redis_server() -> AsyncIterator[int]:
    """Start a redis-server without a disk. Yields its port."""
    program = shutil.which("redis-server")
    if program is None:
        sys.exit("no redis-server on the PATH")
    port = free_port()
    arguments = ["--port", str(port), "--save", "", "--appendonly", "no", "--bind", "127.0.0.1"]
    redis = await asyncio.create_subprocess_exec(program, *arguments, stdout=asyncio.subprocess.DEVNULL)
    try:
        await wait_until(lambda: listens(port), what="redis-server listens")
        yield port
    finally:
        redis.terminate()
        await redis.wait()


async def main(seed: int, count: int) -> int:
    async with redis_server() as port:
        found = 0
        for protocol in (2, 3):
            differences = await compare(seed, count, port, protocol)
            found += sum(differences.values())
        say(f"seed {seed}: {found} differences in {2 * count} commands")
        return 1 if found else 0


def say(line: str) -> None:
    sys.stdout.write(line + "\n")


async def listens(port: int) -> bool:
    try:
        _, writer = await asyncio.open_connection("127.0.0.1", port)
    except OSError:
        return False
    writer.close()
    return True


if __name__ == "__main__":
    sys.exit(asyncio.run(main(int(sys.argv[1]) if len(sys.argv) > 1 else 1, COMMANDS)))
