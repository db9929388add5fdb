"""Namespaces at a server: their table as it changes, what they use, and what is refused."""
