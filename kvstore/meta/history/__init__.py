"""Recognises an older copy of the metadata, and keeps a node from using it."""
