"""Spark and the store: the data source, the change feed, snapshots."""
