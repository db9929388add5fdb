"""The one table of what an error of the operating system or of RocksDB means. Every part of the store asks it.

Parts never compare `errno` with a number themselves, and never search the text of an error. They ask `meaning_of`
(docs/protocol.md, B39):

NO_SPACE    The file system refuses to store more, and nothing that is stored is in doubt. The part refuses new work,
           keeps answering what it can, and tries again until a real write succeeds. ENOSPC covers bytes and inodes.
           EDQUOT is a quota, which `statvfs` does not show. EFBIG is a limit on the size of one file (`ulimit -f`).
TRANSIENT  The kernel or this process lacks something for a moment: memory, descriptors, a lock, a turn. The part tries
           again later, exactly as with NO_SPACE, but making room would not help.
DIRECTORY  The directory or its disk fails: EIO and its relatives, a file system that has become read-only, a device
           that has gone, a stale NFS handle, missing permissions. An NFS server that answers with ETIMEDOUT belongs
           here, because a soft mount drops the write that timed out. A bookie of several directories continues without
           this one (B24). Otherwise the process ends.
PROCESS    The call itself is wrong: EBADF, EFAULT, EINVAL. The process ends, because its own state is in doubt.

An errno that the table does not list means DIRECTORY, which is never retried in place.

A failed sync is outside the table (B1). The kernel may have marked the pages as clean, so that a second sync reports
success for bytes that are lost. That holds for ENOSPC and EDQUOT as well: file systems that allocate blocks late, and
NFS, report them by the sync. `SyncFailed` therefore always means DIRECTORY. Preallocated segments make such a sync
rare, because their blocks are allocated before the first write.
"""

from __future__ import annotations

import errno
import os
import re
import socket
from enum import Enum


# docs/protocol.md B39
class Meaning(Enum):
    """The consequence of an error. The module docstring describes each."""

    NO_SPACE = "no room"
    TRANSIENT = "transient"
    DIRECTORY = "fatal for the directory"
    PROCESS = "fatal for the process"


class SyncFailed(OSError):
    """A sync that failed, with the errno that the kernel gave."""


class ReserveKept(OSError):
    """A write that this store refuses itself, because it would use up a reserve. Its text is the reason."""


def _numbers(*names: str) -> tuple[int, ...]:
    """Return the errno of each name that this platform has."""
    return tuple(getattr(errno, name) for name in names if hasattr(errno, name))


_LISTED = {
    Meaning.NO_SPACE: _numbers("ENOSPC", "EDQUOT", "EFBIG"),
    Meaning.TRANSIENT: (
        *_numbers("EAGAIN", "EWOULDBLOCK", "EINTR", "EBUSY", "ENOLCK", "EDEADLK", "ETXTBSY", "ERESTART"),
        *_numbers("ENOMEM", "ENOBUFS", "EMFILE", "ENFILE"),
    ),
    Meaning.DIRECTORY: (
        *_numbers("EIO", "EREMOTEIO", "EROFS", "ENXIO", "ENODEV", "ENOMEDIUM", "EMEDIUMTYPE", "ENOTBLK"),
        *_numbers("EUCLEAN", "EBADMSG", "EILSEQ", "ENODATA", "ESTALE", "ETIMEDOUT", "ETIME"),
        *_numbers("ENOENT", "EEXIST", "ENOTDIR", "EISDIR", "ENOTEMPTY", "ELOOP", "ENAMETOOLONG", "EXDEV", "EMLINK"),
        *_numbers("EACCES", "EPERM", "EOVERFLOW", "EREMCHG"),
        *_numbers("ENOKEY", "EKEYEXPIRED", "EKEYREVOKED", "EKEYREJECTED"),  # of an encrypted directory
        *_numbers("ENETDOWN", "ENETUNREACH", "EHOSTDOWN", "EHOSTUNREACH", "ENOTCONN", "ECONNRESET", "ESHUTDOWN"),
        *_numbers("ECOMM", "EREMOTE", "ENOLINK", "ENONET", "EPROTO"),  # of a network file system
    ),
    Meaning.PROCESS: _numbers(
        "EBADF",
        "EFAULT",
        "EINVAL",
        "ENOSYS",
        "EOPNOTSUPP",
        "ENOTSUP",
        "ESPIPE",
        "EDOM",
        "ERANGE",
        "E2BIG",
        "ENOEXEC",
        "ECHILD",
        "ESRCH",
        "ENOTTY",
        "EPIPE",
        "EBADFD",
        "EBADRQC",
    ),
}
_MEANING = {number: meaning for meaning, numbers in _LISTED.items() for number in numbers}
_SHORTAGE = {
    **dict.fromkeys(_numbers("EMFILE"), "this process has no free file descriptor (`ulimit -n`)"),
    **dict.fromkeys(_numbers("ENFILE"), "this machine has no free file descriptor (`fs.file-max`)"),
    **dict.fromkeys(_numbers("ENOMEM", "ENOBUFS"), "the kernel has no free memory"),
    **dict.fromkeys(_numbers("EADDRNOTAVAIL"), "this machine has no free local port"),
}
_WORDS = {
    **dict.fromkeys(_numbers("ENOSPC"), "no space is left"),
    **dict.fromkeys(_numbers("EDQUOT"), "the disk quota is exceeded"),
    **dict.fromkeys(_numbers("EFBIG"), "a file would exceed the largest size allowed (`ulimit -f`)"),
    **dict.fromkeys(_numbers("EROFS"), "the file system is read-only"),
    **dict.fromkeys(_numbers("EIO", "EREMOTEIO"), "the disk reports an I/O error"),
    **dict.fromkeys(_numbers("ENXIO", "ENODEV", "ENOMEDIUM"), "the device has gone"),
    **dict.fromkeys(_numbers("ESTALE", "ETIMEDOUT"), "the file server does not answer for the file"),
    **_SHORTAGE,
}
_UNREACHED = (
    *_numbers("ECONNREFUSED", "ECONNRESET", "ECONNABORTED", "EPIPE", "ETIMEDOUT"),
    *_numbers("ENETDOWN", "ENETUNREACH", "EHOSTDOWN", "EHOSTUNREACH"),
    socket.EAI_AGAIN,
    socket.EAI_NONAME,
)
"""Numbers in OSErrors of network libraries if a host cannot be found or does not answer."""
NO_INODES = "no inodes are free, although bytes are"

CORRUPTION = errno.EBADMSG
"""The errno that stands for RocksDB's `Corruption`: a file holds other bytes than were written."""
_STATUSES = {
    "Corruption": CORRUPTION,
    "IO error: No space left on device": errno.ENOSPC,
    "IO error: Space limit reached": errno.ENOSPC,
    "IO error: Stale file handle": errno.ESTALE,
    "IO error: No such file or directory": errno.ENOENT,
    "IO error: Memory limit reached": errno.ENOMEM,
    "Resource busy": errno.EAGAIN,
    "Operation timed out": errno.EAGAIN,
    "Operation aborted": errno.EAGAIN,
    "Operation failed. Try again.": errno.EAGAIN,
    "Shutdown in progress": errno.EAGAIN,
    "Result incomplete": errno.EAGAIN,
    "Operation expired": errno.EAGAIN,
    "DB has already been closed": errno.EAGAIN,
    "Invalid argument": errno.EINVAL,
    "Not implemented": errno.EINVAL,
    "Merge in progress": errno.EINVAL,
    "Column family dropped": errno.EINVAL,
    "NotFound": errno.ENOENT,
    "IO error": errno.EIO,
}
"""How RocksDB's statuses begin, and the errno that means the same. The first that fits counts, unless the status ends
with the text of an errno, as each `IO error` of a system call does."""


def meaning_of(error: OSError) -> Meaning:
    """Return what an error means. Every errno has a meaning."""
    if isinstance(error, SyncFailed) or error.errno is None:
        return Meaning.DIRECTORY
    return _MEANING.get(error.errno, Meaning.DIRECTORY)


def is_passing(error: BaseException) -> bool:
    """Return True if nothing is broken, so that the caller waits and tries again: NO_SPACE and TRANSIENT."""
    return isinstance(error, OSError) and meaning_of(error) in (Meaning.NO_SPACE, Meaning.TRANSIENT)


def is_no_space(error: BaseException) -> bool:
    """Return True if the file system refuses to store more."""
    return isinstance(error, OSError) and meaning_of(error) is Meaning.NO_SPACE


def is_shortage_here(error: OSError) -> bool:
    """Return True if a connection failed because this side lacks descriptors, memory or ports. The other side may be
    healthy."""
    return error.errno in _SHORTAGE


def has_no_such_address(error: OSError) -> bool:
    """Return True if this machine does not have the address, or the family of addresses."""
    return error.errno in _numbers("EADDRNOTAVAIL", "EAFNOSUPPORT")


def is_medium_error(error: OSError) -> bool:
    """Return True if a read failed because the stored bytes are lost. Any other error says nothing about the bytes."""
    return error.errno in _numbers("EIO", "ENODATA", "EBADMSG", "EILSEQ", "EUCLEAN", "ENOENT")


def is_absent(error: OSError) -> bool:
    """Return True if there is no such file. Some drivers of remote file systems raise a bare OSError with the errno."""
    return isinstance(error, FileNotFoundError | NotADirectoryError) or error.errno in _numbers("ENOENT", "ENOTDIR")


def is_of_connection(error: OSError) -> bool:
    """Return True if a remote file system has not answered. HTTP libraries have their own subclasses of OSError for
    that, with or without an errno."""
    if isinstance(error, ConnectionError | TimeoutError | socket.gaierror):
        return True
    if error.errno is None:
        return type(error).__module__ != "builtins"
    return error.errno in _UNREACHED


def is_other_kind(error: OSError) -> bool:
    """Return True if a path names another kind of file than was asked for: a symbolic link, or no folder."""
    return error.errno in _numbers("ELOOP", "ENOTDIR")


def busy(why: str) -> OSError:
    """Return the error of work that cannot be done now, and that may be tried again."""
    return OSError(errno.EAGAIN, why)


def no_space(why: str) -> OSError:
    """Return the error of a write that this store refuses itself, because it would use up a reserve."""
    return ReserveKept(errno.ENOSPC, why)


def reason_of(error: OSError, path: str, *, has_inodes: bool = True) -> str:
    """Return what an operator reads: the reason and the path. `has_inodes`: False if `statvfs` shows no free inode, by
    which ENOSPC means inodes."""
    given = error.strerror or str(error) or type(error).__name__
    words = given if isinstance(error, ReserveKept) else _WORDS.get(error.errno or 0, given)
    if error.errno == errno.ENOSPC and not has_inodes:
        words = NO_INODES
    if isinstance(error, SyncFailed):
        words = f"a sync failed, {words}"
    is_more = given != words and given != os.strerror(error.errno or 0)
    return f"{words}: {path} ({given})" if is_more else f"{words}: {path}"


def errno_of_status(text: str) -> int:
    """Return the errno for the text of a RocksDB status, or of an error of the bindings' own files. The bindings raise
    a bare Exception that has only the text."""
    if (own := _ERROR_OF_RUST.search(text)) is not None:
        return int(own[1])
    if text.startswith("IO error"):
        number = _ERRNO_OF_TEXT.get(text.rpartition(": ")[2])
        if number is not None:
            return number
    return next((number for start, number in _STATUSES.items() if text.startswith(start)), errno.EIO)


_ERROR_OF_RUST = re.compile(r"\(os error (\d+)\)$")
_ERRNO_OF_TEXT = {os.strerror(number): number for number in sorted(errno.errorcode, reverse=True)}
