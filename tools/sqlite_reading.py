"""Opening a SQLite file that another process may be writing to, so that nothing of it changes."""

from __future__ import annotations

import os
from pathlib import Path
from urllib.parse import quote


def read_only_uri(path: Path) -> str:
    """For ``sqlite3.connect(..., uri=True)``. In a folder that nobody can write to, a file in WAL mode opens only as
    one that does not change; there it does not, unless a log that was not merged lies beside it."""
    log = path.with_name(path.name + "-wal")
    unchanging = not os.access(path.parent, os.W_OK) and not (log.is_file() and log.stat().st_size)
    return f"file:{quote(str(path.absolute()))}?mode=ro{'&immutable=1' if unchanging else ''}"
