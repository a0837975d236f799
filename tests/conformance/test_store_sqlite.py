"""The SQLite store keeps every promise of the socket: in a file, and in memory without FTS5."""

from __future__ import annotations

from itertools import count
from pathlib import Path

import pytest
from store_suite import MakeStore, StoreSuite

from redrive.stores.sqlite import SqliteStore, file, schema


class TestFile(StoreSuite):
    @pytest.fixture
    def make_store(self, tmp_path: Path) -> MakeStore:
        numbers = count()
        return lambda: SqliteStore(str(tmp_path / f"{next(numbers)}.db"))


class TestMemoryWithoutFullTextSearch(StoreSuite):
    """Where SQLite was built without FTS5 the words are scanned; the same letters are found."""

    @pytest.fixture
    def make_store(self, monkeypatch: pytest.MonkeyPatch) -> MakeStore:
        monkeypatch.setattr(schema, "has_fts5", lambda: False)
        monkeypatch.setattr(file, "has_fts5", lambda: False)
        return lambda: SqliteStore(":memory:")
