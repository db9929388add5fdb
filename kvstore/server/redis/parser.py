"""Bytes from a Redis client → commands. Decides only.

    command := array | inline
    array   := "*" count CRLF count × ( "$" length CRLF bytes CRLF )
    inline  := words split at blanks, quoted as for redis-server, up to LF

Every length is checked before it is used, nothing nests, and nothing is kept beyond COMMAND_BYTES_MAX. A command that
is too large is skipped byte by byte and answered with an error, so its connection stays open. Bytes that are not
commands at all raise ProtocolError, and nothing can be read after them.

The fast path splits a whole chunk at its line ends in one call and checks every length against the parts. A chunk for
which the lengths do not match (a value contains a line end, or a command is cut in two) takes the exact path.
"""

from __future__ import annotations

BULK_BYTES_MAX = (1 << 20) + 512
"""Maximum size of one argument in bytes. It is a little larger than the largest value, so that a slightly larger value
is refused as a value."""
COMMAND_BYTES_MAX = 16 << 20
ARGUMENTS_MAX = 1 << 16
INLINE_BYTES_MAX = 64 << 10
SKIPPED_ARGUMENTS_MAX = 1 << 20
SKIPPED_BULK_MAX = 512 << 20
"""Beyond these limits the client does not make a mistake but speaks another protocol."""
AT_ONCE_MAX = 1024
"""Maximum number of commands that are not plain, empty lines and skipped arguments that one call reads. A chunk of
256 KiB may hold as many lines as bytes, which take half a second, and everything else in the process waits meanwhile.
"""
_HEADER_BYTES_MAX = 32
_ALIKE_MIN = 20
"""Minimum number of lines for which it pays to check whether all commands have the same shape."""

_HEADS = [b"$%d" % length for length in range(4097)]
_COUNTS = {b"*%d" % count: count for count in range(1, 65)}

Words = list[bytes]
"""One command: its name, then its arguments."""


class ProtocolError(Exception):
    """The client sent bytes that are not the protocol. The connection must be closed."""


class OversizedCommand(list[bytes]):
    """Placeholder for a command that was received completely but is too large to execute. No real command has this
    name."""

    def __init__(self, reason: str) -> None:
        super().__init__([b""])
        self.reason = reason


class Parser:
    """Parses the bytes of one connection into commands. After `parse`, `error` is set if the rest of the stream
    cannot be parsed."""

    def __init__(self) -> None:
        self.error: ProtocolError | None = None
        self.kept = bytearray()
        """Bytes of a command that is still incomplete, and bytes behind the commands that a call has read."""
        self.is_behind = False
        """True if the last call has not read everything that has arrived: call `parse` without bytes in a later turn of
        the event loop."""
        self._partial = _PartialCommand()
        self._skip = _SkippedCommand()
        self._is_plain = True
        """True if no bytes are being skipped and the stream is readable."""

    def parse(self, data: bytes) -> list[Words]:
        """Return the commands that `data` completes, in order. If `data` violates the protocol, `error` is set and
        the commands before the violation are returned."""
        found: list[Words] = []
        self.is_behind = False
        is_begun = bool(self.kept)
        parts = None
        if not is_begun and self._is_plain:
            parts = data.split(b"\r\n")
            if lone := _single_plain(parts):
                return [lone]
        if is_begun:
            self.kept += data
            if not self._skip.is_active() and self._partial.is_incomplete(self.kept):
                return found
            data = bytes(self.kept)
            self.kept.clear()
        if self.error is None:
            try:
                self._parse(data, found, is_begun, parts)
            except ProtocolError as error:
                self.error = error
        self._is_plain = self.error is None and not self._skip.is_active()
        return found

    def _parse(self, data: bytes, found: list[Words], is_begun: bool, parts: list[bytes] | None) -> None:
        """Parse a chunk. `is_begun`: `data` starts with a command that was kept. `parts`: `data`, split at its line
        ends."""
        if is_begun and not self._skip.is_active():
            pos = self._read_one(data, 0, found)
            if pos is None:
                return self._keep(data)
            data = data[pos:]
        pos = 0 if self._skip.is_active() else _read_plain(data, parts or data.split(b"\r\n"), found)
        for _ in range(AT_ONCE_MAX):
            if pos == len(data):
                return None
            if self._skip.is_active():
                end = self._skip.over(data, pos)
                if end == pos:
                    return self._keep(data[pos:])
                if not self._skip.is_active():
                    found.append(OversizedCommand(self._skip.reason))
            elif (one := self._read_one(data, pos, found)) is None:
                return self._keep(data[pos:])
            else:
                end = one
            pos = end
        self.is_behind = pos < len(data)
        return self._keep(data[pos:])

    def _keep(self, rest: bytes) -> None:
        self.kept += rest
        self._partial = _PartialCommand()

    def _read_one(self, data: bytes, pos: int, found: list[Words]) -> int | None:
        """Parse the command that begins at `pos`. Return the position after it, or None if the command is
        incomplete."""
        if data[pos] != 0x2A:
            return _inline(data, pos, found)
        line = data.find(b"\n", pos, pos + _HEADER_BYTES_MAX)
        if line < 0:
            _check_header(data, pos)
            return None
        count = _number(data, pos + 1, line, "multibulk", SKIPPED_ARGUMENTS_MAX)
        at = line + 1
        if count <= 0:
            return at
        if count > ARGUMENTS_MAX:
            self._skip.begin(count, f"expected at most {ARGUMENTS_MAX} arguments, got {count}")
            return at
        command: Words = []
        while len(command) < count:
            line = data.find(b"\n", at, at + _HEADER_BYTES_MAX)
            if line < 0:
                _check_header(data, at)
                return None
            length = _bulk_length(data, at, line)
            end = line + 1 + length
            if length > BULK_BYTES_MAX or end - pos > COMMAND_BYTES_MAX:
                self._skip.begin(count - len(command), _too_large(length))
                return at
            if len(data) < end + 2:
                return None
            _check_end(data, end)
            command.append(data[line + 1 : end])
            at = end + 2
        found.append(command)
        return at


class _PartialCommand:
    """Progress in parsing a command that arrives in pieces, so that earlier pieces are not parsed again for each new
    piece."""

    def __init__(self) -> None:
        self._at = 0
        """Position of its next header."""
        self._missing = -1
        """Number of missing arguments; -1: the first header has not been read yet."""
        self._needed = 0
        """Number of bytes that must have arrived before more of the command can be read."""

    def is_incomplete(self, kept: bytearray) -> bool:
        """Return True if the command at the start of `kept` is certainly incomplete. Errors are left to the exact path.
        True for every array that the exact path finds incomplete, because otherwise each piece would read the array
        again from its start."""
        if kept[0] != 0x2A:
            return False
        while self._missing and len(kept) >= self._needed:
            line = kept.find(b"\n", self._at, self._at + _HEADER_BYTES_MAX)
            if line < 0:
                return len(kept) - self._at < _HEADER_BYTES_MAX
            if not self._skip_header(kept[self._at : line + 1], line + 1):
                return False
        return len(kept) < self._needed

    def _skip_header(self, header: bytearray, end: int) -> bool:
        """Skip a header and its argument. Return True if they may be valid."""
        digits = header[1:-2]
        if header[-2:-1] != b"\r" or not digits.isdigit():
            return False
        value = int(digits)
        if self._missing < 0:
            self._missing, self._at = value, end
            return 0 < value <= ARGUMENTS_MAX
        if header[0] != 0x24 or value > BULK_BYTES_MAX or end + value > COMMAND_BYTES_MAX:
            return False
        self._missing -= 1
        self._at = self._needed = end + value + 2
        return True


class _SkippedCommand:
    """Skips the rest of a command that is too large, without storing it."""

    def __init__(self) -> None:
        self.reason = ""
        self._arguments = 0
        self._bytes = 0

    def is_active(self) -> bool:
        return bool(self._arguments or self._bytes)

    def begin(self, arguments: int, reason: str) -> None:
        """Begin to skip this many arguments, starting at the next header. `reason` is the error for the client."""
        self.reason, self._arguments, self._bytes = reason, arguments, 0

    def over(self, data: bytes, pos: int) -> int:
        """Skip as much of `data` from `pos` on as belongs to one argument of the command, and return the position at
        which parsing continues. An incomplete header is left in place."""
        if not self._bytes:
            line = data.find(b"\n", pos, pos + _HEADER_BYTES_MAX)
            if line < 0:
                _check_header(data, pos)
                return pos
            self._bytes = _bulk_length(data, pos, line) + 2
            self._arguments -= 1
            pos = line + 1
        step = min(self._bytes, len(data) - pos)
        self._bytes -= step
        return pos + step


def _read_plain(data: bytes, parts: list[bytes], found: list[Words]) -> int:
    """Read plain commands from the start of `data`, whose lines are `parts`. Return the position of the first other
    command."""
    heads, counts = _HEADS, _COUNTS
    last = len(parts) - 1
    at = _read_uniform(parts, last, found) if last >= _ALIKE_MIN else 0
    try:
        while at < last:
            head = parts[at]
            if head == b"*3":
                after = at + 7
                first, second, third = command = parts[at + 2 : after : 2]
                if (
                    parts[at + 3] != heads[len(second)]
                    or parts[at + 5] != heads[len(third)]
                    or parts[at + 1] != heads[len(first)]
                ):
                    break
            elif head == b"*2":
                after = at + 5
                first, second = command = parts[at + 2 : after : 2]
                if parts[at + 3] != heads[len(second)] or parts[at + 1] != heads[len(first)]:
                    break
            else:
                after = at + 1 + 2 * counts[head]
                command = parts[at + 2 : after : 2]
                if parts[at + 1 : after : 2] != [heads[len(argument)] for argument in command]:
                    break
            if after > last:
                break
            found.append(command)
            at = after
    except (ValueError, LookupError):  # not plain: the exact path reads it or reports the error
        pass
    if at == last and not parts[last]:
        return len(data)
    return len(data) - sum(map(len, parts[at:])) - 2 * (last - at)


def _single_plain(parts: list[bytes]) -> Words | None:
    """Return the only command in these lines, if it is plain and has two or three words."""
    count = len(parts)
    try:
        if count == 6 and parts[0] == b"*2":
            _, name_head, name, head, key, rest = parts
            if head == _HEADS[len(key)] and name_head == _HEADS[len(name)] and not rest:
                return [name, key]
        elif count == 8 and parts[0] == b"*3":
            _, name_head, name, head, key, value_head, value, rest = parts
            if (
                value_head == _HEADS[len(value)]
                and head == _HEADS[len(key)]
                and name_head == _HEADS[len(name)]
                and not rest
            ):
                return [name, key, value]
    except IndexError:  # an argument too long for the table of headers
        pass
    return None


def _read_uniform(parts: list[bytes], last: int, found: list[Words]) -> int:
    """Read commands with an equal number of arguments from the start of `parts`. Return the index of the next part, or
    0 if the first `last` parts hold anything else. The last command may be incomplete. The checks are those of single
    commands, made argument by argument over all commands."""
    count = _COUNTS.get(parts[0], 0)
    step = 1 + 2 * count
    whole = last // step
    end = whole * step
    if not count or parts[:end:step].count(parts[0]) != whole:
        return 0
    head_of, columns = _HEADS.__getitem__, []
    try:
        for at in range(2, step, 2):
            column = parts[at:end:step]
            if parts[at - 1 : end : step] != list(map(head_of, map(len, column))):
                return 0
            columns.append(column)
    except IndexError:  # an argument too long for the table of headers
        return 0
    found += map(list, zip(*columns, strict=True))
    return end


def _bulk_length(data: bytes, at: int, line: int) -> int:
    if data[at] != 0x24:
        raise ProtocolError(f"expected '$', got '{chr(data[at])}'")
    if data[at + 1] == 0x2D:  # also refuse -0: a length that `_PartialCommand` rejects must be an error here too
        raise ProtocolError("invalid bulk length")
    return _number(data, at + 1, line, "bulk", SKIPPED_BULK_MAX)


def _number(data: bytes, start: int, line: int, what: str, largest: int) -> int:
    digits = data[start : line - 1]
    negative = digits[:1] == b"-"
    if data[line - 1] != 0x0D or not digits[negative:].isdigit():
        raise ProtocolError(f"invalid {what} length")
    value = int(digits)
    if value > largest:
        raise ProtocolError(f"invalid {what} length")
    return value


def _check_header(data: bytes, at: int) -> None:
    """Raise ProtocolError if an incomplete header is already too long."""
    if len(data) - at >= _HEADER_BYTES_MAX:
        raise ProtocolError("header is too long")


def _check_end(data: bytes, end: int) -> None:
    if data[end : end + 2] != b"\r\n":
        raise ProtocolError("expected a line end after an argument")


def _too_large(length: int) -> str:
    if length > BULK_BYTES_MAX:
        return f"expected an argument of at most {BULK_BYTES_MAX} bytes, got {length}"
    return f"expected a command of at most {COMMAND_BYTES_MAX} bytes, got more"


def _inline(data: bytes, pos: int, found: list[Words]) -> int | None:
    line = data.find(b"\n", pos, pos + INLINE_BYTES_MAX)
    if line < 0:
        if len(data) - pos >= INLINE_BYTES_MAX:
            raise ProtocolError("too big inline request")
        return None
    words = _words(data[pos:line].removesuffix(b"\r"))
    if words:
        found.append(words)
    return line + 1


def _words(line: bytes) -> Words:
    if b'"' not in line and b"'" not in line:
        return line.split()
    words: Words = []
    at = 0
    while at < len(line):
        if line[at : at + 1].isspace():
            at += 1
            continue
        word, at = _word(line, at)
        words.append(word)
    return words


_SINGLE, _DOUBLE = b"'"[0], b'"'[0]
_ESCAPES = {0x6E: 0x0A, 0x72: 0x0D, 0x74: 0x09, 0x62: 0x08, 0x61: 0x07}


def _word(line: bytes, at: int) -> tuple[bytes, int]:
    """Return the word that begins at `at` and the position of its end, by the rules of redis-server: a quote may open
    inside a word and must end it. Raises ProtocolError."""
    word, quote = bytearray(), 0
    while at < len(line):
        char = line[at]
        if quote:
            if char == 0x5C and (quote == _DOUBLE or line[at + 1 : at + 2] == b"'") and at + 1 < len(line):
                at = _escaped(line, at + 1, word)
                continue
            if char == quote:
                if line[at + 1 : at + 2].strip():
                    break
                return bytes(word), at + 1
        elif line[at : at + 1].isspace():
            return bytes(word), at
        elif char in (_SINGLE, _DOUBLE):
            quote, at = char, at + 1
            continue
        word.append(char)
        at += 1
    if quote:
        raise ProtocolError("unbalanced quotes in request")
    return bytes(word), at


def _escaped(line: bytes, at: int, word: bytearray) -> int:
    digits = line[at + 1 : at + 3]
    if line[at] == 0x78 and len(digits) == 2 and all(digit in b"0123456789abcdefABCDEF" for digit in digits):
        word.append(int(digits, 16))
        return at + 3
    word.append(_ESCAPES.get(line[at], line[at]))
    return at + 1
