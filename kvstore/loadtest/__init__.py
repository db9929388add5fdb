"""Load tests with Locust, including custom workloads: docs/loadtests.md."""
