"""A locustfile whose users wait for a slow Redis endpoint without a time limit."""

from __future__ import annotations

from kvstore.loadtest.generator import resp_user
from kvstore.loadtest.locustfile import *  # noqa: F403

resp_user.PATIENCE_S = 60.0
