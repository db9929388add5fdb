"""For `locust -f loadtest/locustfile.py` in a checkout: the users, the shape and the wiring of `kvstore-loadtest`."""

from kvstore.loadtest.locustfile import *  # noqa: F403
