"""Ways to stop the files of real nodes from growing, although bytes and inodes are free."""

from __future__ import annotations

import os
import resource
import shutil
import subprocess
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

SHIM = r"""
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>
#include <sys/stat.h>
#include <sys/types.h>

/* A file below QUOTA_DIR takes no block beyond `end` while there is the file QUOTA_FLAG. */
static int over(int fd, off_t end, int allocates) {
  char link[64], path[4096]; struct stat found;
  const char *flag = getenv("QUOTA_FLAG"), *dir = getenv("QUOTA_DIR");
  if (!flag || !dir || access(flag, F_OK)) return 0;
  snprintf(link, sizeof link, "/proc/self/fd/%d", fd);
  ssize_t n = readlink(link, path, sizeof path - 1);
  if (n < 0) return 0;
  path[n] = 0;
  if (strncmp(path, dir, strlen(dir)) || fstat(fd, &found) || !S_ISREG(found.st_mode)) return 0;
  return allocates || end > found.st_size;
}
#define REAL(name, type) static type real; if (!real) real = (type)dlsym(RTLD_NEXT, name)
typedef ssize_t (*write_t)(int, const void *, size_t);
typedef ssize_t (*pwrite_t)(int, const void *, size_t, off_t);
typedef int (*allocate_t)(int, off_t, off_t);
typedef int (*fallocate_t)(int, int, off_t, off_t);
#define FAIL { errno = EDQUOT; return -1; }
ssize_t write(int fd, const void *b, size_t n) {
  REAL("write", write_t);
  if (fd > 2) { off_t at = lseek(fd, 0, SEEK_CUR); if (at >= 0 && over(fd, at + n, 0)) FAIL }
  return real(fd, b, n);
}
#define PWRITE(name) ssize_t name(int fd, const void *b, size_t n, off_t o) { \
  REAL(#name, pwrite_t); if (over(fd, o + n, 0)) FAIL return real(fd, b, n, o); }
PWRITE(pwrite) PWRITE(pwrite64)
#define ALLOCATE(name) int name(int fd, off_t o, off_t n) { \
  REAL(#name, allocate_t); if (over(fd, o + n, 1)) return EDQUOT; return real(fd, o, n); }
ALLOCATE(posix_fallocate) ALLOCATE(posix_fallocate64)
#define FALLOCATE(name) int name(int fd, int m, off_t o, off_t n) { \
  REAL(#name, fallocate_t); if (over(fd, o + n, 1)) FAIL return real(fd, m, o, n); }
FALLOCATE(fallocate) FALLOCATE(fallocate64)
"""


def compiler_or_none() -> str | None:
    return next(filter(None, map(shutil.which, ("cc", "gcc", "clang", "tcc"))), None)


class Quota:
    """A quota on the files below one directory, for processes that start with `environ`. Needs a C compiler."""

    def __init__(self, home: Path, below: str) -> None:
        compiler = compiler_or_none()
        assert compiler is not None
        self._flag, library = home / "exceeded", home / "quota.so"
        (home / "quota.c").write_text(SHIM)
        subprocess.run(
            [compiler, "-shared", "-fPIC", "-O1", "-o", str(library), str(home / "quota.c"), "-ldl"], check=True
        )
        self.environ: Mapping[str, str] = {
            "LD_PRELOAD": str(library),
            "QUOTA_DIR": below,
            "QUOTA_FLAG": str(self._flag),
        }

    @contextmanager
    def exceeded(self) -> Iterator[None]:
        self._flag.touch()
        try:
            yield
        finally:
            self._flag.unlink()


@contextmanager
def file_sizes_limited(pids: list[int], size: int) -> Iterator[None]:
    """Let no file of these processes grow beyond `size` bytes, as by `ulimit -f`. Needs no compiler."""
    limits = {pid: resource.prlimit(pid, resource.RLIMIT_FSIZE) for pid in pids}
    for pid, (_, hard) in limits.items():
        resource.prlimit(pid, resource.RLIMIT_FSIZE, (size, hard))
    try:
        yield
    finally:
        for pid, limit in limits.items():
            if os.path.exists(f"/proc/{pid}"):
                resource.prlimit(pid, resource.RLIMIT_FSIZE, limit)
