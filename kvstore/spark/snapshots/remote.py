"""Paths on file systems that are not mounted here: `s3://bucket/x`, `sftp://host/x`, `webhdfs://host/x` and any other
for which fsspec has a driver. Offers only those methods of pathlib that snapshots use.

A driver finds credentials and addresses as usual: in its environment, fsspec's configuration (FSSPEC_S3_ENDPOINT_URL
and so on) or its files. Executors need the same.
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
from kvstore.os_errors import is_absent

BLOCK_BYTES = 8 << 20
"""Bytes that are read ahead."""
SETTLE_S = 0.5
"""Seconds to wait where a rename overwrites: by then, all writers that started at the same time have finished, and the
last one has won."""
COPIES, COPY_S = "kvstore-piece-", 86_400.0
"""Prefix of folders of local copies, and seconds without a write after which such a folder is abandoned."""
_URL = re.compile(r"[A-Za-z][A-Za-z0-9+.-]+://.+")
_PASSWORD = re.compile(r"(?<=://)([^/:@]*):[^/]*@")


class RemotePath:
    """A path in a remote file system. The path need not exist. It is pickled as its URL. `str` omits the password of
    the URL, because the text appears in messages, names, and the metadata of the cluster."""

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
        """Return True if there is a file, or anything below a folder with this name."""
        with self._answered() as (fs, path):
            return _kind_or_none(fs, path) is not None

    def is_file(self) -> bool:
        with self._answered() as (fs, path):
            return _kind_or_none(fs, path) == "file"

    def is_dir(self) -> bool:
        with self._answered() as (fs, path):
            return _kind_or_none(fs, path) == "directory"

    def iterdir(self) -> Iterator[RemotePath]:
        """Return the content of a folder. Raises FileNotFoundError; object stores have no empty folders."""
        with self._answered() as (fs, path):
            fs.invalidate_cache()
            own = path.rstrip("/")
            found = {each.rstrip("/") for each in fs.ls(path, detail=False)}
        return iter([self / each.rpartition("/")[2] for each in sorted(found) if each != own and each != f"/{own}"])

    def files_below(self) -> list[str]:
        """Return the names of all files below, relative to this path."""
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
        """Return when a file directly below, or else any below, was last written, by the store's clock; the current
        time if the driver does not know. Names in `but` are ignored."""
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
        """Write a file atomically: by one put, or by a rename where partial puts are visible."""
        with self._answered() as (fs, path):
            _make_folder(fs, path)
            if not _renames(fs):
                fs.pipe_file(path, data)
                return
            temporary = f"{path}.{uuid4().hex}.tmp"
            fs.pipe_file(temporary, data)
            _move_over(fs, temporary, path)

    def create(self, data: bytes) -> bool:
        """Write a file atomically unless another exists; return False if so. Of several writers at once, one succeeds
        if the store can refuse a put (S3, Google, Azure) or a rename (HDFS). On other stores, the one that reads its
        own bytes a moment later succeeds. The stored bytes decide, because a reply may be lost, and a retry is then
        refused because of the writer's own put. So `data` must be unique."""
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
        """Upload a local file. Raises Unavailable if it did not arrive completely."""
        with self._answered() as (fs, path):
            _make_folder(fs, path)
            fs.put_file(str(source), path)
        wanted, found = source.stat().st_size, self.size()
        if wanted != found:
            raise Unavailable(f"{self}: expected {wanted} bytes as sent, got {found}; retry")

    def move_to(self, place: RemotePath) -> None:
        """Move the file, by a rename if possible, otherwise by a copy within the store."""
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
        """Remove the path and everything below; do nothing if it does not exist."""
        try:
            with self._answered() as (fs, path):
                if _kind_or_none(fs, path) is not None:
                    _remove_all(fs, path)
        except FileNotFoundError:
            return  # another process removes it, too

    @contextmanager
    def _answered(self) -> Iterator[tuple[Any, str]]:
        """Yield the driver's file system and the path in it. A driver's OSError gets the path; its other errors become
        Unavailable."""
        try:
            yield _opened(self._url)
        except OSError as error:
            raise _named(self, error) from error
        except (ConfigError, Unavailable, TypeError, NotImplementedError):
            raise
        except Exception as error:  # any error of a driver
            raise _failed(self, error) from error


Location = Path | RemotePath
"""The path of a file or folder, local or remote."""


def location(text: str) -> Location:
    """Parse a path, or a URL of fsspec. Raises ConfigError for a URL without a driver here."""
    text = text.removeprefix("file://")
    if not _URL.fullmatch(text):
        return Path(text)
    found = RemotePath(text)
    _opened(text)
    return found


@contextmanager
def local_copy_of(place: Location) -> Iterator[Path]:
    """Yield a local path for a new file, and store the file at `place` if the block succeeds."""
    if isinstance(place, Path):
        yield place
        return
    _sweep(time.time())
    with tempfile.TemporaryDirectory(prefix=COPIES) as folder:
        path = Path(folder) / place.name
        yield path
        place.upload(path)


class _RemoteFile(io.RawIOBase):
    """A file that is read. Errors of the driver become Unavailable, because they say nothing about the bytes."""

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
    """Return the same error with the path in its message. The type stays, because callers distinguish types."""
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
    """Return True if files are written in place and renamed, as on a disk. Object stores show only complete files and
    have no rename; fsspec's version copies and deletes."""
    from fsspec.spec import AbstractFileSystem

    protocols = {fs.protocol} if isinstance(fs.protocol, str) else set(fs.protocol)
    return type(fs).mv is not AbstractFileSystem.mv and not protocols & OBJECT_STORES


OBJECT_STORES = {"s3", "gs", "gcs", "abfs", "abfss", "az", "adl", "oss", "cos", "obs", "tos", "oci", "swift"}
"""Object stores put files atomically, whatever their drivers' move does."""


def _sweep(now_s: float) -> None:
    """Remove the local copies of killed processes, after COPY_S without a write."""
    for folder in Path(tempfile.gettempdir()).glob(f"{COPIES}*"):
        with suppress(OSError):  # another user's, or being removed
            if now_s - max(each.stat().st_mtime for each in (folder, *folder.iterdir())) > COPY_S:
                shutil.rmtree(folder, ignore_errors=True)


def _kind_or_none(fs: Any, path: str) -> str | None:
    """Return `file`, `directory`, or None if the store says that nothing exists. fsspec's own `exists`, `isfile` and
    `isdir` treat every failure as a no, so a broken connection would make a snapshot disappear."""
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
    """Return all files below. fsspec's own search skips folders that it cannot list, unless it is asked to raise
    errors."""
    from fsspec.spec import AbstractFileSystem

    skips_errors = not getattr(fs, "async_impl", False) and type(fs).find is AbstractFileSystem.find
    try:
        return list(fs.find(path, on_error="raise") if skips_errors else fs.find(path))
    except FileNotFoundError:
        return []


def _move_over(fs: Any, temporary: str, path: str) -> None:
    """Rename, and overwrite an existing file. Some drivers refuse to overwrite with an error; others, such as those of
    HDFS, do nothing."""
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
    """Write a new file. Raises OSError if the store can refuse an existing name, and does."""
    if not _renames(fs):
        try:
            fs.pipe_file(path, data, mode="create")
        except (TypeError, NotImplementedError):  # the driver does not support the mode
            fs.pipe_file(path, data)
            time.sleep(SETTLE_S)
        return
    temporary = f"{path}.{uuid4().hex}.tmp"
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
