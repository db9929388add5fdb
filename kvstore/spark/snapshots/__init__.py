"""Snapshots of the whole store in Parquet: full and incremental, with verification, restore and retention."""
