"""Spark support: the data source `kvstore`, the change feed, and snapshots."""
