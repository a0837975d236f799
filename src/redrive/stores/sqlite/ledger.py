"""What became of a job's items, each counted once however often it is reported."""

# ruff: noqa: S608 - only names and operators are put into SQL here; every value is a parameter

from __future__ import annotations

import sqlite3
from collections.abc import Iterable, Mapping
from typing import Literal

from redrive.stores.sqlite.rows import ids_json


def count_items(
    connection: sqlite3.Connection,
    what: Literal["resolved", "died"],
    by_job: Mapping[str, Iterable[str]],
) -> None:
    for job, letters in by_job.items():
        marked = connection.execute(
            f"UPDATE job_items SET {what} = 1 WHERE job = ? AND {what} = 0"
            " AND letter IN (SELECT value FROM json_each(?))",
            (job, ids_json(letters)),
        ).rowcount
        connection.execute(f"UPDATE jobs SET {what} = {what} + ? WHERE id = ?", (marked, job))
