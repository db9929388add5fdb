"""Paths on file systems that are not mounted locally: `s3://bucket/x`, `sftp://host/x`, `webhdfs://host/x` and any
other file system for which fsspec has a driver. The class offers the methods of pathlib that snapshots use, and no
others.

A driver finds its credentials and addresses as usual: in its environment, in fsspec's configuration
(FSSPEC_S3_ENDPOINT_URL and so on) or in its files. Executors need the same configuration.
"""

from __future__ import annotations

import errno
import io
import os
import re
import shutil
import tempfile
import time
from collections.abc import Container, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, BinaryIO, cast
from uuid import uuid4

from kvstore.errors import ConfigError, Unavailable
from kvstore.extras import install_hint
from kvstore.os_errors import is_absent, is_of_connection

BLOCK_BYTES = 8 << 20
"""Number of bytes that a reader fetches in advance."""
SETTLE_S = 0.5
"""Seconds that a writer waits before it reads back its file, on stores where a rename overwrites. By then, all
writers that started at the same time have finished, and the file of the last one remains."""
TEMPORARY = ".tmp"
"""The end of the name of a file that is not complete yet."""
COPIES, COPY_S = "kvstore-piece-", 86_400.0
"""Prefix of folders of local copies, and seconds without a write after which such a folder is abandoned."""
_URL = re.compile(r"[A-Za-z][A-Za-z0-9+.-]+://.+")
_PASSWORD = re.compile(r"(?<=://)([^/:@]*):[^/]*@")


class RemotePath:
    """A path in a remote file system, whether or not it exists.

    A path is pickled as its URL. `str` omits the password of the URL, because the text is used in messages, in names
    and in the cluster's metadata.
    """

    def __init__(self, url: str) -> None:
        self._url = url.rstrip("/")

    def __str__(self) -> str:
        return _without_passwords(self._url)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, RemotePath) and self._url == other._url

    def __lt__(self, other: RemotePath) -> bool:
        return self._url < other._url

    def __hash__(self) -> int:
        return hash(self._url)

    def __truediv__(self, name: str) -> RemotePath:
        return RemotePath(f"{self._url}/{name}")

    @property
    def name(self) -> str:
        return self._url.rpartition("/")[2]

    @property
    def parent(self) -> RemotePath:
        return RemotePath(self._url.rpartition("/")[0])

    def relative_to(self, folder: RemotePath) -> str:
        return self._url.removeprefix(f"{folder._url}/")

    # ── what is there ──

    def exists(self) -> bool:
        """Return True if the path is a file, or a folder that contains anything."""
        with self._answered() as (fs, path):
            return _kind_or_none(fs, path) is not None

    def is_file(self) -> bool:
        with self._answered() as (fs, path):
            return _kind_or_none(fs, path) == "file"

    def is_dir(self) -> bool:
        with self._answered() as (fs, path):
            return _kind_or_none(fs, path) == "directory"

    def iterdir(self) -> Iterator[RemotePath]:
        """Yield the entries of a folder. Raises FileNotFoundError, on object stores also for an empty folder,
        because they have no empty folders."""
        with self._answered() as (fs, path):
            fs.invalidate_cache()
            own = path.rstrip("/")
            found = {each.rstrip("/") for each in fs.ls(path, detail=False)}
        return iter([self / each.rpartition("/")[2] for each in sorted(found) if each != own and each != f"/{own}"])

    def files_below(self) -> list[str]:
        """Return the names of all files in the folder and its subfolders, relative to this path."""
        with self._answered() as (fs, path):
            fs.invalidate_cache()
            own = path.strip("/")
            return sorted(each.strip("/").removeprefix(f"{own}/") for each in _found_below(fs, path))

    def size(self) -> int:
        """Return the size of the file. Raises FileNotFoundError."""
        with self._answered() as (fs, path):
            fs.invalidate_cache()
            return int(fs.info(path)["size"])

    def last_written_s(self, but: Container[str] = ()) -> float:
        """Return the time at which a file of this folder was last written, in seconds since 1970 by the store's clock.

        Considers the files directly in the folder or, if there are none, the files of its subfolders. Ignores the names
        in `but`. Returns the current time if the driver does not know times.
        """
        below = [each for each in self.files_below() if each not in but]
        names = [each for each in below if "/" not in each] or below
        try:
            with self._answered() as (fs, path):
                return max((float(fs.modified(f"{path}/{each}").timestamp()) for each in names), default=0.0)
        except NotImplementedError:
            return time.time()
        except FileNotFoundError:  # it is being removed
            return time.time()

    # ── bytes ──

    def read_bytes(self) -> bytes:
        with self._answered() as (fs, path):
            fs.invalidate_cache()
            return bytes(fs.cat_file(path))

    def open(self) -> BinaryIO:
        with self._answered() as (fs, path):
            return cast(BinaryIO, _RemoteFile(self, fs.open(path, "rb", block_size=BLOCK_BYTES)))

    def write(self, data: bytes) -> None:
        """Write a file atomically, and replace an existing one. Uses one put, or a rename on stores that show
        incomplete puts."""
        with self._answered() as (fs, path):
            _make_folder(fs, path)
            if not _renames(fs):
                fs.pipe_file(path, data)
                return
            temporary = f"{path}.{uuid4().hex}{TEMPORARY}"
            fs.pipe_file(temporary, data)
            _move_over(fs, temporary, path)

    def create(self, data: bytes) -> bool:
        """Write a file atomically unless a file already exists, and return True if the file now has these bytes. `data`
        must be unique among writers.

        If several writers call this at the same time, one succeeds, if the store can refuse to overwrite on a put (S3,
        Google, Azure) or on a rename (HDFS). On other stores, the writer that reads its own bytes a moment later
        succeeds. The stored bytes decide, because the reply to a put may be lost, and the store then refuses the retry
        because of the writer's own first put.
        """
        with self._answered() as (fs, path):
            _make_folder(fs, path)
            if _kind_or_none(fs, path) is None:
                try:
                    _put_new(fs, path, data)
                except OSError:
                    if _kind_or_none(fs, path) is None:
                        raise
            fs.invalidate_cache()
            return bool(fs.cat_file(path) == data)

    def upload(self, source: Path) -> None:
        """Upload a local file to this path. Raises Unavailable if the stored file has another size."""
        with self._answered() as (fs, path):
            _make_folder(fs, path)
            fs.put_file(str(source), path)
        wanted, found = source.stat().st_size, self.size()
        if wanted != found:
            raise Unavailable(f"{self}: expected {wanted} bytes as sent, got {found}; retry")

    def move_to(self, place: RemotePath) -> None:
        """Move the file to `place`, by a rename if possible, otherwise by a copy within the store."""
        with self._answered() as (fs, path):
            target = _opened(place._url)[1]
            _make_folder(fs, target)
            if _renames(fs):
                fs.mv(path, target)
            else:
                fs.cp_file(path, target)
                fs.rm_file(path)

    def unlink(self, missing_ok: bool = False) -> None:
        try:
            with self._answered() as (fs, path):
                fs.rm_file(path)
        except FileNotFoundError:
            if not missing_ok:
                raise

    def remove_all(self) -> None:
        """Remove the path and everything below it. Idempotent."""
        try:
            with self._answered() as (fs, path):
                if _kind_or_none(fs, path) is not None:
                    _remove_all(fs, path)
        except FileNotFoundError:
            return  # another process removes it, too

    @contextmanager
    def _answered(self) -> Iterator[tuple[Any, str]]:
        """Yield the driver's file system and the path in it. Adds the path to an OSError of the driver, and replaces
        other errors of the driver, and those of connections, by Unavailable."""
        try:
            yield _opened(self._url)
        except OSError as error:
            if is_of_connection(error):
                raise _failed(self, error) from error
            raise _named(self, error) from error
        except (ConfigError, Unavailable, TypeError, NotImplementedError):
            raise
        except Exception as error:  # any error of a driver
            raise _failed(self, error) from error


Location = Path | RemotePath
"""The path of a file or folder, local or remote."""


def location(text: str) -> Location:
    """Parse a path, or a URL of fsspec. Raises ConfigError for a URL whose driver is not installed."""
    text = text.removeprefix("file://")
    if not _URL.fullmatch(text):
        return Path(text)
    found = RemotePath(text)
    _opened(text)
    return found


@contextmanager
def local_copy_of(place: Location) -> Iterator[Path]:
    """Yield a local path for a new file, and store the file at `place` when the block succeeds."""
    if isinstance(place, Path):
        yield place
        return
    _sweep(time.time())
    with tempfile.TemporaryDirectory(prefix=COPIES) as folder:
        path = Path(folder) / place.name
        yield path
        place.upload(path)


class _RemoteFile(io.RawIOBase):
    """A remote file that is open for reading. Errors of the driver become Unavailable, because they do not mean that
    the bytes are damaged."""

    def __init__(self, place: RemotePath, file: Any) -> None:
        self._place, self._file = place, file

    def read(self, size: int = -1) -> bytes:
        try:
            return bytes(self._file.read(size))
        except Exception as error:  # any error of a driver
            raise _failed(self._place, error) from error

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = 0) -> int:
        return int(self._file.seek(offset, whence))

    def tell(self) -> int:
        return int(self._file.tell())

    def close(self) -> None:
        self._file.close()
        super().close()


def _failed(place: RemotePath, error: Exception) -> Unavailable:
    """Return the error for an exception of a driver."""
    return Unavailable(f"{place}: {type(error).__name__}: {_without_passwords(str(error))}")


def _named(place: RemotePath, error: OSError) -> OSError:
    """Return an error of the same type with the path in its message. The type stays because callers distinguish
    types."""
    text = _without_passwords(error.strerror or str(error) or type(error).__name__)
    what = text if str(place) in text else f"{place}: {text}"
    kind = type(error) if type(error).__module__ == "builtins" else OSError
    return kind(error.errno, what) if error.errno else kind(what)


def _without_passwords(text: str) -> str:
    """Remove the passwords of URLs from a text."""
    return _PASSWORD.sub(r"\1:***@", text)


def _opened(url: str) -> tuple[Any, str]:
    try:
        from fsspec.core import url_to_fs
        from fsspec.dircache import DirCache
    except ImportError:
        raise ConfigError(f"{_without_passwords(url)}: a URL needs fsspec: {install_hint('node', 'remote')}") from None
    place = (os.getpid(), *url.split("/")[:3])
    if (fs := _shared.get(place)) is not None:
        return fs, str(fs._strip_protocol(url))
    try:
        fs, path = url_to_fs(url)
    except (ImportError, ValueError) as error:
        raise ConfigError(f"{_without_passwords(url)}: {_without_passwords(str(error))}") from None
    # A listing that one thread starts before another writes would hide the new file, as if it were lost.
    fs.dircache = DirCache(use_listings_cache=False)
    if getattr(fs, "async_impl", False):
        _shared[place] = fs
    return fs, str(path)


_shared: dict[tuple[object, ...], Any] = {}
"""File systems that any thread may use, by process and server. fsspec would create one per thread, and an S3 client
takes half a second to create."""


def _renames(fs: Any) -> bool:
    """Return True if the driver writes files in place and renames them, like a disk. Object stores show only
    complete files and have no rename; the rename that fsspec offers for them copies and deletes."""
    from fsspec.spec import AbstractFileSystem

    protocols = {fs.protocol} if isinstance(fs.protocol, str) else set(fs.protocol)
    return type(fs).mv is not AbstractFileSystem.mv and not protocols & OBJECT_STORES


OBJECT_STORES = {"s3", "gs", "gcs", "abfs", "abfss", "az", "adl", "oss", "cos", "obs", "tos", "oci", "swift"}
"""Protocols of object stores, which put files atomically, whatever the `move` of their drivers does."""


def _sweep(now_s: float) -> None:
    """Remove the local copies of killed processes, once COPY_S seconds have passed without a write."""
    for folder in Path(tempfile.gettempdir()).glob(f"{COPIES}*"):
        with suppress(OSError):  # another user's, or being removed
            if now_s - max(each.stat().st_mtime for each in (folder, *folder.iterdir())) > COPY_S:
                shutil.rmtree(folder, ignore_errors=True)


def _kind_or_none(fs: Any, path: str) -> str | None:
    """Return `file` or `directory`, or None if the store reports that nothing exists. fsspec's own `exists`,
    `isfile` and `isdir` return False for every failure, so a broken connection would make a snapshot disappear."""
    fs.invalidate_cache()
    try:
        return str(fs.info(path)["type"])
    except OSError as error:
        if is_absent(error):
            return None
        raise
    except RuntimeError as error:  # from HDFS's REST interface, for a path below a file
        if "is not a directory" in str(error):
            return None
        raise


def _found_below(fs: Any, path: str) -> list[str]:
    """Return all files below a path, and raise if a folder cannot be listed. By default, fsspec's own search skips
    such folders."""
    from fsspec.spec import AbstractFileSystem

    skips_errors = not getattr(fs, "async_impl", False) and type(fs).find is AbstractFileSystem.find
    try:
        return list(fs.find(path, on_error="raise") if skips_errors else fs.find(path))
    except FileNotFoundError:
        return []


def _move_over(fs: Any, temporary: str, path: str) -> None:
    """Rename a file, and overwrite an existing file. Some drivers raise an error instead of overwriting; others,
    such as those of HDFS, do nothing."""
    try:
        fs.mv(temporary, path)
    except OSError:
        if _kind_or_none(fs, temporary) is None:
            raise
    if _kind_or_none(fs, temporary) is None:
        return
    with suppress(FileNotFoundError):
        fs.rm_file(path)
    fs.mv(temporary, path)
    if _kind_or_none(fs, temporary) is not None:
        raise OSError(errno.EIO, f"{path}: could not be written, because its driver does not rename {temporary}")


def _put_new(fs: Any, path: str, data: bytes) -> None:
    """Write a new file. Raises OSError if the store can refuse an existing name, and refuses this one."""
    if not _renames(fs):
        try:
            fs.pipe_file(path, data, mode="create")
        except (TypeError, NotImplementedError):  # the driver does not support the mode
            fs.pipe_file(path, data)
            time.sleep(SETTLE_S)
        return
    temporary = f"{path}.{uuid4().hex}{TEMPORARY}"
    fs.pipe_file(temporary, data)
    try:
        fs.mv(temporary, path)
    finally:
        if fs.exists(temporary):
            fs.rm_file(temporary)
    time.sleep(SETTLE_S)


def _remove_all(fs: Any, path: str) -> None:
    """Remove everything below a path. fsspec's own removal treats a name with * or [ as a pattern, which may match
    other names."""
    from fsspec.core import has_magic

    if not has_magic(path):
        fs.rm(path, recursive=True)
        return
    for each in sorted(fs.find(path, withdirs=True), reverse=True):  # the content of a folder before the folder
        if fs.isdir(each):
            with suppress(FileNotFoundError):  # object stores have only files
                fs.rmdir(each)
        else:
            fs.rm_file(each)
    if fs.isdir(path):
        fs.rmdir(path)


def _make_folder(fs: Any, path: str) -> None:
    """Create the folder of a file. Object stores have no folders and would create a bucket."""
    if _renames(fs):
        fs.makedirs(path.rpartition("/")[0], exist_ok=True)
