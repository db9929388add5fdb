"""A locustfile whose users wait for a slow Redis door for as long as it takes."""

from __future__ import annotations

from kvstore.loadtest.generator import resp_user
from kvstore.loadtest.locustfile import *  # noqa: F403

resp_user.PATIENCE_S = 60.0
