"""`locust -f loadtest/locustfile.py`, in a checkout: the users, the shape and the wiring that `kvstore-loadtest` runs."""

from kvstore_loadtest.locustfile import *  # noqa: F403
