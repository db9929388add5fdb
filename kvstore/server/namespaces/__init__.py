"""Namespaces at a server: the current table, usage and refusals."""
