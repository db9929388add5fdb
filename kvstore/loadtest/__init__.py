"""Load tests with Locust, of one's own workload too: docs/how-to/run-load-tests.md."""
