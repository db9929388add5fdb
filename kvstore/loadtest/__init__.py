"""Load tests with Locust, of one's own workload too: docs/loadtests.md."""
