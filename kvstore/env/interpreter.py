"""Tells what Python runs this, and whether it was built with profile-guided optimisation: without, it takes some 15 to
20 % more processor time. Also run by scripts/setup.sh, as a file: exit code 0 if it was."""

from __future__ import annotations

import platform
import sys
import sysconfig

DEBIAN_FLAG = "-Wdate-time"
"""Debian and its like optimise without saying so to `configure`; what their packages are built with has this flag."""
BUILD_VARIABLES = ("CONFIG_ARGS", "CPPFLAGS", "PY_CFLAGS_NODIST")
"""What `configure` and the compiler were told; the flag is in the second up to Debian 12, in the third after it."""


def is_profile_guided(config_args: str, *flags: str) -> bool:
    """Decide by what BUILD_VARIABLES names."""
    return "--enable-optimizations" in config_args or any(DEBIAN_FLAG in each for each in flags)


def is_this_profile_guided() -> bool:
    return is_profile_guided(*(str(sysconfig.get_config_var(name) or "") for name in BUILD_VARIABLES))


def interpreter() -> str:
    """Version and build, for people and for reports."""
    build = "profile-guided" if is_this_profile_guided() else "not profile-guided"
    return f"{platform.python_version()} ({build})"


if __name__ == "__main__":
    sys.exit(not is_this_profile_guided())
