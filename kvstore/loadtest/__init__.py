"""Load tests with Locust, including custom workloads: docs/how-to/run-load-tests.md."""
