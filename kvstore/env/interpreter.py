"""Finds out which Python runs this, and whether it was built with profile-guided optimisation; without it, Python needs
15 to 20 % more processor time. scripts/setup.sh runs this file: exit code 0 means profile-guided."""

from __future__ import annotations

import platform
import sys
import sysconfig

DEBIAN_FLAG = "-Wdate-time"
"""Debian and its derivatives optimise without passing the option to `configure`; their packages are built with this
flag."""
BUILD_VARIABLES = ("CONFIG_ARGS", "CPPFLAGS", "PY_CFLAGS_NODIST")
"""Build variables of `configure` and the compiler. Up to Debian 12 the flag is in the second, later in the third."""


def is_profile_guided(config_args: str, *flags: str) -> bool:
    """Return True if one of the values of BUILD_VARIABLES shows the optimisation."""
    return "--enable-optimizations" in config_args or any(DEBIAN_FLAG in each for each in flags)


def is_this_profile_guided() -> bool:
    return is_profile_guided(*(str(sysconfig.get_config_var(name) or "") for name in BUILD_VARIABLES))


def interpreter() -> str:
    """Return version and build, for people and for reports."""
    build = "profile-guided" if is_this_profile_guided() else "not profile-guided"
    return f"{platform.python_version()} ({build})"


if __name__ == "__main__":
    sys.exit(not is_this_profile_guided())
