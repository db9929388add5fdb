"""Load tests and benchmarks: not shipped."""
