"""Snapshots of the whole store in Parquet: full and incremental, verified, restored, kept and pruned."""
