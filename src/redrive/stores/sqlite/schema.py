"""The tables, migration by migration.

`seq` numbers identities in the order they were first seen. Every other table hangs on it, so that filing appends
almost everywhere and only `identities` is written at random places. It also breaks ties of `filed_at` in lists, and
being the rowid it ends every index without being named there.
"""

from __future__ import annotations

import sqlite3

OLDEST_SQLITE = (3, 37, 0)

_TABLES = """
CREATE TABLE identities (
    seq INTEGER PRIMARY KEY,
    id TEXT NOT NULL UNIQUE,
    purged_at INTEGER
) STRICT;

CREATE TABLE letters (
    seq INTEGER PRIMARY KEY,
    id TEXT NOT NULL,
    state TEXT NOT NULL,
    version INTEGER NOT NULL,
    hop INTEGER NOT NULL,
    death INTEGER NOT NULL,
    confirmed_hop INTEGER NOT NULL,
    job TEXT NOT NULL,
    sent_at INTEGER,
    occurrences INTEGER NOT NULL,
    source TEXT NOT NULL,
    grp TEXT NOT NULL,
    kind TEXT NOT NULL,
    reason TEXT NOT NULL,
    error_type TEXT NOT NULL,
    error_message TEXT NOT NULL,
    handler TEXT NOT NULL,
    message_type TEXT NOT NULL,
    attempts INTEGER NOT NULL,
    size INTEGER NOT NULL,
    verified INTEGER NOT NULL,
    first_attempt_at INTEGER NOT NULL,
    last_attempt_at INTEGER NOT NULL,
    filed_at INTEGER NOT NULL,
    updated_at INTEGER NOT NULL,
    attributes TEXT NOT NULL,
    masked TEXT NOT NULL,
    content BLOB
) STRICT;
CREATE INDEX letters_sent_unverified ON letters (content) WHERE state = 'replaying' AND content IS NOT NULL;
CREATE INDEX letters_by_time ON letters (filed_at);
CREATE INDEX letters_by_state ON letters (state, filed_at);
CREATE INDEX letters_by_source ON letters (source, filed_at);
CREATE INDEX letters_by_error ON letters (error_type, filed_at);
CREATE INDEX letters_by_handler ON letters (handler, filed_at);
CREATE INDEX letters_by_kind ON letters (kind, filed_at);

CREATE TABLE bodies (
    seq INTEGER PRIMARY KEY,
    broker ANY NOT NULL,
    source ANY NOT NULL,
    partition INTEGER NOT NULL,
    position ANY NOT NULL,
    timestamp INTEGER NOT NULL,
    claim BLOB,
    key BLOB,
    headers BLOB NOT NULL,
    body BLOB
) STRICT;

CREATE TABLE occurrences (
    seq INTEGER NOT NULL,
    hop INTEGER NOT NULL,
    filed_at INTEGER NOT NULL,
    facts BLOB NOT NULL,
    PRIMARY KEY (seq, hop)
) STRICT;

CREATE TABLE keyed (
    seq INTEGER PRIMARY KEY,
    lane BLOB NOT NULL,
    place INTEGER NOT NULL
) STRICT;
CREATE INDEX keyed_by_lane ON keyed (lane, place);

CREATE TABLE attributes (
    digest BLOB NOT NULL,
    filed_at INTEGER NOT NULL,
    seq INTEGER NOT NULL,
    PRIMARY KEY (digest, filed_at, seq)
) STRICT, WITHOUT ROWID;

CREATE TABLE recorded (
    n INTEGER PRIMARY KEY,
    letter TEXT NOT NULL,
    source TEXT NOT NULL,
    grp TEXT NOT NULL,
    handler TEXT NOT NULL,
    message_id TEXT NOT NULL,
    at INTEGER NOT NULL,
    note TEXT NOT NULL
) STRICT;
CREATE INDEX recorded_by_letter ON recorded (letter, at);

CREATE TABLE reports_seen (
    runtime TEXT NOT NULL,
    serial INTEGER NOT NULL,
    PRIMARY KEY (runtime, serial)
) STRICT, WITHOUT ROWID;

CREATE TABLE tallies (
    n INTEGER PRIMARY KEY,
    source TEXT NOT NULL,
    grp TEXT NOT NULL,
    handler TEXT NOT NULL,
    minute INTEGER NOT NULL,
    handled INTEGER NOT NULL,
    failed INTEGER NOT NULL,
    retried INTEGER NOT NULL,
    filed INTEGER NOT NULL,
    recorded INTEGER NOT NULL,
    discarded INTEGER NOT NULL
) STRICT;

CREATE TABLE jobs (
    n INTEGER PRIMARY KEY,
    id TEXT NOT NULL UNIQUE,
    who TEXT NOT NULL,
    why TEXT NOT NULL,
    state TEXT NOT NULL,
    created_at INTEGER NOT NULL,
    total INTEGER NOT NULL,
    size INTEGER NOT NULL,
    rate REAL,
    window_start INTEGER NOT NULL,
    window_end INTEGER NOT NULL,
    sent INTEGER NOT NULL,
    refused INTEGER NOT NULL,
    resolved INTEGER NOT NULL,
    died INTEGER NOT NULL,
    owner TEXT NOT NULL,
    lease_until INTEGER NOT NULL
) STRICT;
CREATE INDEX jobs_open ON jobs (state, n) WHERE window_start < total;

CREATE TABLE job_items (
    job TEXT NOT NULL,
    n INTEGER NOT NULL,
    letter TEXT NOT NULL,
    refused TEXT,
    resolved INTEGER NOT NULL DEFAULT 0,
    died INTEGER NOT NULL DEFAULT 0,
    PRIMARY KEY (job, n)
) STRICT, WITHOUT ROWID;
CREATE UNIQUE INDEX job_items_by_letter ON job_items (job, letter);

CREATE TABLE audit (
    number INTEGER PRIMARY KEY,
    at INTEGER NOT NULL,
    who TEXT NOT NULL,
    why TEXT NOT NULL,
    what TEXT NOT NULL,
    letter TEXT NOT NULL,
    hash TEXT NOT NULL
) STRICT;
"""

# The words are cut in Python (rows.words), so both kinds of table hold the same text and find the same letters.
_INDEXED_TEXT = (
    "CREATE VIRTUAL TABLE letters_text USING fts5(words, detail = none, columnsize = 0, tokenize = 'ascii');\n"
)
_PLAIN_TEXT = "CREATE TABLE letters_text (seq INTEGER PRIMARY KEY, words TEXT NOT NULL) STRICT;\n"


def migrations() -> list[str]:
    """For this build of SQLite: text search is indexed where FTS5 is compiled in, else scanned."""
    return [_TABLES + (_INDEXED_TEXT if has_fts5() else _PLAIN_TEXT)]


def has_fts5() -> bool:
    probe = sqlite3.connect(":memory:")
    try:
        return bool(probe.execute("SELECT 1 FROM pragma_module_list WHERE name = 'fts5'").fetchone())
    finally:
        probe.close()


def text_is_indexed(connection: sqlite3.Connection) -> bool:
    """What this file was made with, which need not be what this build would make."""
    sql = connection.execute("SELECT sql FROM sqlite_master WHERE name = 'letters_text'").fetchone()[0]
    return "fts5" in sql
