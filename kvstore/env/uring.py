"""File syncs through Linux's io_uring: begun and ended on the event loop, carried out by the kernel's own threads.

A Python thread that comes back from fdatasync must win the interpreter from a busy event loop before it can report,
and may lose for seconds. Here nobody needs the interpreter: the kernel puts the result in memory that it shares with
us, and the ring's descriptor becomes readable. Only the submitting thread touches the ring, and what it writes there is
read by the kernel inside its own io_uring_enter, so that no memory barrier is missing.

Measured beside threads (ThreadSyncs), one sync of 4 KiB after the other: with an idle loop p50 92 µs instead of 109,
and 41 µs of CPU instead of 62; with a loop that is always busy, in callbacks of 0.3 ms, p50 0.6 ms instead of 1.0, p99
1.7 ms instead of 3.1.
"""

from __future__ import annotations

import asyncio
import ctypes
import mmap
import os
import struct
import weakref
from collections import deque

from kvstore.env.syncs import Done

_SETUP, _ENTER = 425, 426  # system call numbers, the same on all architectures
_ENTRIES = 64
_PARAMS = struct.Struct("=10I10I10I")  # struct io_uring_params: our fields, then the offsets of both rings
_FEATURE_SINGLE_MMAP = 1
_SQES_OFFSET = 0x10000000
_SQE = struct.Struct("=BBHiQQIIQ24x")  # opcode, flags, ioprio, fd, offset, address, length, fsync flags, user data
_CQE = struct.Struct("=QiI")  # user data, result, flags
_FSYNC, _DATASYNC = 3, 1
_WRAP = 0xFFFFFFFF

_libc = ctypes.PyDLL(None, use_errno=True)  # PyDLL: the calls are short, so the interpreter is not let go of
_syscall = _libc.syscall
_syscall.restype = ctypes.c_long


def _call(*args: object) -> int:
    """Make a system call: its number, which is a long like all that it takes, and what it takes."""
    result: int = _syscall(*args)
    if result < 0:
        error = ctypes.get_errno()
        raise OSError(error, os.strerror(error))
    return result


class RingSyncs:
    """Syncs by io_uring. Implements `Syncs`."""

    def __init__(self) -> None:
        """Raises OSError where the kernel has no io_uring or forbids it."""
        params = ctypes.create_string_buffer(_PARAMS.size)
        self._fd = fd = _call(ctypes.c_long(_SETUP), ctypes.c_long(_ENTRIES), params)
        self._free = weakref.finalize(self, os.close, fd)
        fields = _PARAMS.unpack(params.raw)
        submit, complete = fields[10:20], fields[20:30]
        try:
            if not fields[5] & _FEATURE_SINGLE_MMAP:
                raise OSError("io_uring of this kernel is too old")
            size = max(submit[6] + 4 * fields[0], complete[5] + _CQE.size * fields[1])
            self._ring = mmap.mmap(self._fd, size)
            self._sqes = mmap.mmap(self._fd, _SQE.size * fields[0], offset=_SQES_OFFSET)
        except OSError:
            self._free()
            raise
        self._words = words = memoryview(self._ring).cast("I")
        self._sq_tail, self._sq_mask = submit[1] // 4, words[submit[2] // 4]
        self._cq_head, self._cq_tail, self._cq_mask = complete[0] // 4, complete[1] // 4, words[complete[2] // 4]
        self._cqes = complete[5]
        for index in range(fields[0]):
            words[submit[6] // 4 + index] = index
        self._enter = (*map(ctypes.c_long, (_ENTER, self._fd, 1, 0, 0)), None, ctypes.c_long(0))
        self._nothing = (*map(ctypes.c_long, (_ENTER, self._fd, 0, 0, 0)), None, ctypes.c_long(0))
        self._in_flight: dict[int, Done] = {}
        self._waiting: deque[tuple[int, Done]] = deque()
        self._count = 0
        self._loop: asyncio.AbstractEventLoop | None = None

    def submit(self, fd: int, done: Done) -> None:
        """Raises OSError if the kernel does not take it."""
        if self._loop is None:
            self._loop = asyncio.get_running_loop()
            self._loop.add_reader(self._fd, self._reap)
        if len(self._in_flight) < _ENTRIES:
            self._begin(fd, done)
        else:
            self._waiting.append((fd, done))

    def report(self) -> None:
        """Report what has ended. Where nothing has, that is a look at two words of memory."""
        if self._in_flight and self._words[self._cq_head] != self._words[self._cq_tail]:
            _call(*self._nothing)  # as after a poll: what is read behind the tail is no older than the tail
            self._reap()

    def close(self) -> None:
        if self._fd < 0:
            return
        if self._loop is not None and not self._loop.is_closed():
            self._loop.remove_reader(self._fd)
        self._in_flight.clear()
        self._words.release()
        self._ring.close()
        self._sqes.close()
        self._free()
        self._fd = -1

    def _begin(self, fd: int, done: Done) -> None:
        words = self._words
        tail = words[self._sq_tail]
        at = _SQE.size * (tail & self._sq_mask)
        self._count += 1
        _SQE.pack_into(self._sqes, at, _FSYNC, 0, 0, fd, 0, 0, 0, _DATASYNC, self._count)
        words[self._sq_tail] = (tail + 1) & _WRAP
        try:
            _call(*self._enter)
        except OSError:
            words[self._sq_tail] = tail
            raise
        self._in_flight[self._count] = done

    def _reap(self) -> None:
        """Report what has ended, and begin what waited for room."""
        words, head = self._words, self._words[self._cq_head]
        ended: list[tuple[Done, OSError | None]] = []
        while head != words[self._cq_tail]:
            number, result, _ = _CQE.unpack_from(self._ring, self._cqes + _CQE.size * (head & self._cq_mask))
            head = (head + 1) & _WRAP
            ended.append((self._in_flight.pop(number), None if result >= 0 else OSError(-result, os.strerror(-result))))
        words[self._cq_head] = head
        while self._waiting and len(self._in_flight) < _ENTRIES:
            fd, done = self._waiting.popleft()
            try:
                self._begin(fd, done)
            except OSError as error:
                ended.append((done, error))
        for done, failed in ended:
            done(failed)
