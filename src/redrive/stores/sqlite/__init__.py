"""The store for one machine: one SQLite file, any number of processes."""

from redrive.stores.sqlite.store import SqliteStore

__all__ = ["SqliteStore"]
