"""What an error of SQLite means for the user, in one sentence."""

from __future__ import annotations

import sqlite3

# Primary result codes (https://www.sqlite.org/rescode.html): the low byte of sqlite_errorcode.
_ADVICE: dict[int, str] = {
    sqlite3.SQLITE_FULL: "cannot grow because the disk is full: free some space and run the command again",
    sqlite3.SQLITE_BUSY: "is locked by another process: wait for it to end, or end it",
    sqlite3.SQLITE_LOCKED: "is locked by another process: wait for it to end, or end it",
    sqlite3.SQLITE_READONLY: "cannot be written to: check the permissions of the file and its folder",
    sqlite3.SQLITE_PERM: "cannot be opened: check the permissions of the file and its folder",
    sqlite3.SQLITE_CANTOPEN: "cannot be opened: check that the folder exists and may be written to",
    sqlite3.SQLITE_NOTADB: "is not a database, or its beginning is damaged: restore it or move it away",
    sqlite3.SQLITE_CORRUPT: "is damaged (truncated or overwritten): restore it or move it away",
    sqlite3.SQLITE_IOERR: (
        "cannot be read or written because the disk reports an error, or is full: check the disk, free some space and "
        "run the command again"
    ),
}


def explain(error: sqlite3.Error, what: str) -> str:
    """``what`` names the file, as in "the store /home/me/store.sqlite"."""
    code = getattr(error, "sqlite_errorcode", None)  # set by SQLite itself, not by the Python module
    advice = _ADVICE.get(code & 0xFF) if isinstance(code, int) else None
    return f"{what} {advice}" if advice else f"{what} cannot be used: {error}"
